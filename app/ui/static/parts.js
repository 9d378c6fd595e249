// Parts of pages, also those that come later.

// What scripts make possible is hidden without them.
export function prepare(root) {
  for (const button of root.querySelectorAll("[data-copy][hidden]")) button.hidden = false;
}

// What is to be known of the connection, above everything; empty: nothing.
export function showOffline(text) {
  const place = document.querySelector("#offline");
  if (place.textContent !== text) place.textContent = text;
  place.hidden = !text;
}
