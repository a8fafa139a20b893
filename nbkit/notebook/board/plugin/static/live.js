// TensorBoard's own tabs do not follow a training by themselves, and their settings allow no less than 30 seconds.
// This runs beside them, in the page of a TensorBoard that nbkit started: when a run has grown, it presses "reload".

const EVERY_MS = 2000;

let before = "";
let due = 0;

async function look() {
  if (document.hidden) return;
  try {
    const answer = await (await fetch("./data/plugin/communication/newest")).json();
    const button = document.querySelector("app-header-reload button, .reload-button");
    // Once more after the last change: TensorBoard reads files a moment later than they are written.
    if (before !== "" && answer.newest !== before) due = 2;
    before = answer.newest;
    if (due === 0 || button === null || button.disabled || button.classList.contains("loading")) return;
    due -= 1;
    button.click();
  } catch {
    // TensorBoard has ended, or this is another one.
  }
}

setInterval(look, EVERY_MS);
