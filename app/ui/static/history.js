// Scrolls the chosen match of a long text into view, without scrolling the page.
const chosen = document.querySelector(".attributed [aria-current]");
const box = chosen?.closest(".attributed");
if (box) box.scrollTop += chosen.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 3;
