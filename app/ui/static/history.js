// The chosen match is in sight, wherever in a long text it stands; the page itself stays where it is.
const chosen = document.querySelector(".attributed [aria-current]");
const box = chosen?.closest(".attributed");
if (box) box.scrollTop += chosen.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 3;
