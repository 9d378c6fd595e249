// Uploads with a progress bar, and with a check of their size before they begin; slow forms show that
// they are busy. The same forms also work without scripts.
export function offerUploads() {
  for (const form of document.querySelectorAll("form[data-upload]")) watch(form);
  for (const form of document.querySelectorAll("form[data-busy]")) {
    form.addEventListener("submit", () => { document.querySelector(form.dataset.busy).hidden = false; });
  }
}

function watch(form) {
  const input = form.querySelector("input[type=file]");
  const button = form.querySelector("button");
  const bar = form.querySelector("[data-upload-progress]");
  const place = form.querySelector("[data-upload-problem]");
  const tell = (text) => { place.textContent = text; place.hidden = !text; };
  input.addEventListener("change", () => {
    const most = Number(form.dataset.maxBytes);
    const size = input.files[0]?.size ?? 0;
    tell(size > most ? `The file has ${size.toLocaleString("en")} bytes; at most ${most.toLocaleString("en")} are taken. Split it.` : "");
    button.disabled = size > most;
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    event.stopPropagation(); // it may be sent again after an error, at once
    const request = new XMLHttpRequest(); // fetch reports no progress of uploads
    const progress = bar.querySelector("progress");
    const end = (text) => { tell(text); bar.hidden = true; button.disabled = false; };
    request.upload.addEventListener("progress", (now) => { progress.value = now.loaded / (now.total || 1); });
    request.upload.addEventListener("load", () => { bar.querySelector("[role=status]").textContent = "The file is stored and read …"; });
    request.addEventListener("load", () => {
      const address = request.getResponseHeader("Location");
      if (request.status === 201 && address) location.assign(address);
      else if (request.status === 401) location.reload();
      else end(request.getResponseHeader("Content-Type")?.startsWith("text/plain") ? request.responseText : `The upload failed (status ${request.status}). Try again.`);
    });
    request.addEventListener("error", () => end("The connection broke. Try again."));
    request.open("POST", form.action);
    request.setRequestHeader("X-Part", "1");
    tell("");
    button.disabled = true;
    bar.querySelector("[role=status]").textContent = "Uploading …";
    bar.hidden = false;
    request.send(new FormData(form));
  });
}
