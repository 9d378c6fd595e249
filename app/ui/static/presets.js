// Named sets of parameters, stored only in this browser: the form's fields whose names begin with
// `p.`, without the prompt. Forms have the attribute `data-presets`.
const KEY = "presets";

const read = () => { try { return JSON.parse(localStorage.getItem(KEY)) ?? {}; } catch { return {}; } };
const write = (presets) => localStorage.setItem(KEY, JSON.stringify(presets));
const controls = (scope) => [...scope.querySelectorAll("[data-parameter]")];

export function offerPresets() {
  for (const bar of document.querySelectorAll("[data-presets]")) offer(bar);
}

function offer(bar) {
  const scope = bar.closest("[data-presets-scope]") ?? bar.closest("form");
  const choice = bar.querySelector("select");
  const name = bar.querySelector("input");
  const list = () => {
    choice.replaceChildren(new Option("Choose a preset", ""), ...Object.keys(read()).sort().map((one) => new Option(one, one)));
  };
  const tell = (text) => { bar.querySelector("[role=status]").textContent = text; };
  choice.addEventListener("change", () => {
    const preset = read()[choice.value];
    if (!preset) return;
    for (const control of controls(scope)) {
      control.value = preset[control.dataset.parameter] ?? "";
      control.dispatchEvent(new Event("input", { bubbles: true }));
    }
    if (name) name.value = choice.value;
    tell(`Preset ${choice.value} is entered.`);
  });
  bar.querySelector("[data-preset-save]")?.addEventListener("click", () => {
    const label = name.value.trim().slice(0, 60);
    if (!label) { name.focus(); tell("Give the preset a name."); return; }
    const entered = controls(scope).filter((control) => control.value !== "");
    write({ ...read(), [label]: Object.fromEntries(entered.map((one) => [one.dataset.parameter, one.value])) });
    list();
    choice.value = label;
    tell(`Preset ${label} is saved in this browser.`);
  });
  bar.querySelector("[data-preset-delete]")?.addEventListener("click", () => {
    const presets = read();
    if (!(choice.value in presets)) { tell("Choose a preset first."); return; }
    delete presets[choice.value];
    write(presets);
    list();
    tell("The preset is deleted.");
  });
  list();
  bar.hidden = false;
}
