// Parts of pages, also those that come later.

// Controls that need scripts are hidden without them.
export function prepare(root) {
  if (!navigator.clipboard) return; // not offered by browsers to pages of plain http, but of this machine
  for (const button of root.querySelectorAll("[data-copy][hidden]")) button.hidden = false;
}

// Message of a response that ends the polling; empty: the request may be repeated.
export function endOf(status) {
  if (status === 401) return "Your sign-in has ended: reload the page to sign in again.";
  if (status === 404) return "This is not there any more: it was deleted, or has expired.";
  return "";
}

// State of the connection, shown above the page; empty: no message.
export function showOffline(text) {
  const place = document.querySelector("#offline");
  if (place.textContent !== text) place.textContent = text;
  place.hidden = !text;
}
