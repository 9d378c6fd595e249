// Script of every page. Each module looks for its own attributes; the page also works without scripts.
// No module imports this one: pages load it by another address, so that it would run twice.
import { followStreams } from "./stream.js";
import { refreshParts } from "./refresh.js";
import { offerPresets } from "./presets.js";
import { offerUploads } from "./upload.js";
import { prepare } from "./parts.js";

function offerTheme() {
  const button = document.querySelector("[data-theme-switch]");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
    show();
  });
  button.hidden = false;
  show();
}

// Parts that come later (an answer, a refreshed table) have buttons too: listen above them.
function listenForClicks() {
  document.addEventListener("click", async (event) => {
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      const source = document.querySelector(copy.dataset.copy);
      await navigator.clipboard.writeText(source.value ?? source.textContent);
      const before = copy.textContent;
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = before; }, 1500);
      return;
    }
    const swap = event.target.closest("[data-swap]");
    if (swap) {
      event.preventDefault();
      const response = await fetch(swap.href, { headers: { "X-Part": "1" } });
      if (!response.ok) { location.assign(swap.href); return; }
      const part = swap.closest(".answer");
      part.innerHTML = await response.text();
      prepare(part);
    }
  });
}

function listenForInput() {
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submit-on-change]")) event.target.form.requestSubmit();
  });
  // Ctrl+Enter in a prompt sends it.
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.matches("textarea#prompt")) {
      event.target.form?.requestSubmit();
    }
  });
}

offerTheme();
listenForClicks();
listenForInput();
prepare(document);
offerPresets();
offerUploads();
followStreams(document);
refreshParts(document);
document.querySelector("[data-focus]")?.focus();
