// Before the page is drawn, so that no click comes too early: destructive forms ask for a confirmation,
// and each form is sent once.
document.addEventListener("submit", (event) => {
  const form = event.target;
  const question = event.submitter?.dataset.confirm ?? form.dataset.confirm;
  if (question && !confirm(question)) { event.preventDefault(); return; }
  if (form.dataset.sent) { event.preventDefault(); return; }
  if (form.method === "post") {
    form.dataset.sent = "1";
    // A slow form shows its progress until the response is there.
    if (form.dataset.doing && event.submitter) event.submitter.textContent = form.dataset.doing;
    else setTimeout(() => { delete form.dataset.sent; }, 5000);
  }
});
addEventListener("pageshow", () => {
  for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
});
