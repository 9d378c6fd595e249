// Before the page is drawn: the theme that was chosen here; without a choice, the system's.
(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
