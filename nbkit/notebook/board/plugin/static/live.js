// TensorBoard's own tabs refresh at most every 30 seconds, and only if the user enables it. In a TensorBoard that nbkit
// started, this script presses "reload" when a run has new data.

const EVERY_MS = 2000;

let before = "";
let due = 0;

async function look() {
  if (document.hidden) return;
  try {
    const answer = await (await fetch("./data/plugin/communication/newest")).json();
    const button = document.querySelector("app-header-reload button, .reload-button");
    // Reload once more after the last change, because TensorBoard reads files with a delay.
    if (before !== "" && answer.newest !== before) due = 2;
    before = answer.newest;
    if (due === 0 || button === null || button.disabled || button.classList.contains("loading")) return;
    due -= 1;
    button.click();
  } catch {
    // TensorBoard has ended, or another one uses its port.
  }
}

setInterval(look, EVERY_MS);
