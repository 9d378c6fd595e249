// Parts of pages, also those that come later.

// What scripts make possible is hidden without them.
export function prepare(root) {
  if (!navigator.clipboard) return; // not offered by browsers to pages of plain http, but of this machine
  for (const button of root.querySelectorAll("[data-copy][hidden]")) button.hidden = false;
}

// What to tell of an answer after which there is nothing to wait for; empty: it may be asked again.
export function endOf(status) {
  if (status === 401) return "Your sign-in has ended: reload the page to sign in again.";
  if (status === 404) return "This is not there any more: it was deleted, or has expired.";
  return "";
}

// What is to be known of the connection, above everything; empty: nothing.
export function showOffline(text) {
  const place = document.querySelector("#offline");
  if (place.textContent !== text) place.textContent = text;
  place.hidden = !text;
}
