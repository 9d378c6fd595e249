// Parts of a page that are refreshed while it is visible: `data-refresh` is their address,
// `data-every` the interval in seconds. A part whose new form has no such attribute is final.
import { endOf, prepare, showOffline } from "./parts.js";

export function refreshParts(root) {
  for (const part of root.querySelectorAll("[data-refresh]")) keep(part);
}

function keep(part) {
  const wait = 1000 * Number(part.dataset.every ?? 2);
  let tag = null;
  const again = () => setTimeout(look, wait);
  const look = async () => {
    if (!part.isConnected) return;
    if (document.hidden) { document.addEventListener("visibilitychange", look, { once: true }); return; }
    // A visitor who uses the part is not disturbed.
    if (isInUse(part)) { again(); return; }
    if (part.querySelector("form[data-doing][data-sent]")) { again(); return; }
    try {
      const headers = { "X-Part": "1" };
      const response = await fetch(part.dataset.refresh, { headers });
      const end = endOf(response.status);
      if (end) { showOffline(end); return; }
      if (!response.ok) throw new Error(response.statusText);
      const text = await response.text();
      showOffline("");
      if (text !== tag) replace(part, text);
      tag = text;
      if (response.headers.get("X-Part-Ended")) return;
    } catch {
      showOffline("The connection is lost. What you see is from before; this page goes on once it is back.");
    }
    again();
  };
  again();
}

// True while the visitor types in it, or has selected text of it.
function isInUse(part) {
  const marked = getSelection();
  if (!marked.isCollapsed && marked.containsNode(part, true)) return true;
  return part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea");
}

// Scrolled, open and focused elements stay so, by id.
function replace(part, text) {
  const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
  const open = [...part.querySelectorAll("details[open][id]")].map((details) => details.id);
  const scrolled = [...part.querySelectorAll("[id][tabindex]")].map((region) => [region.id, region.scrollLeft, region.scrollTop]);
  part.innerHTML = text;
  for (const id of open) part.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
  for (const [id, left, top] of scrolled) if (left || top) part.querySelector(`#${CSS.escape(id)}`)?.scrollTo(left, top);
  if (focused) part.querySelector(`#${CSS.escape(focused)}`)?.focus();
  prepare(part);
}
