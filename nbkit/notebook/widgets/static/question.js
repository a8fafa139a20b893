// A question of a lesson. The page sends {lock: guess}, and Python answers with the trait `answer`. A guess that is
// not locked yet is stored only here.

const UNHEARD_MS = 3000;
let forms = 0;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function input(type, attributes) {
  const element = make("input");
  element.type = type;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// A slider has about 200 positions at round numbers: for 0 to 8 the step is 0.05.
function stepOf(low, high) {
  const rough = (high - low) / 200;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((times) => times * power >= rough * 0.999);
}

function numberFields(asked, id) {
  const line = make("div", "line");
  const number = input("number", { step: "any", "aria-labelledby": `${id}-question`, "aria-describedby": `${id}-unit ${id}-band` });
  const unit = make("span", "unit", asked.unit);
  unit.id = `${id}-unit`;
  let slider = null;
  if (asked.low !== null) {
    slider = input("range", {
      min: asked.low, max: asked.high, step: stepOf(asked.low, asked.high), "aria-labelledby": `${id}-question`,
    });
    slider.value = (asked.low + asked.high) / 2;
    slider.addEventListener("input", () => { number.value = slider.value; });
    number.addEventListener("input", () => { if (number.value !== "") slider.value = number.value; });
    line.append(make("span", "end", String(asked.low)), slider, make("span", "end", String(asked.high)));
  }
  line.append(number, unit);
  const show = (guess) => {
    number.value = guess ?? "";
    if (slider && guess !== null) slider.value = guess;
  };
  return { line, show, value: () => (number.value === "" ? null : Number(number.value)), missing: "Give a number first." };
}

function choiceFields(asked, id) {
  const line = make("div", "choices");
  const radios = asked.choices.map((choice) => {
    const label = make("label");
    const radio = input("radio", { name: id, value: choice });
    label.append(radio, make("span", "", choice));
    line.append(label);
    return radio;
  });
  const show = (guess) => radios.forEach((radio) => { radio.checked = radio.value === guess; });
  return { line, show, value: () => radios.find((radio) => radio.checked)?.value ?? null, missing: "Choose an answer first." };
}

function render({ model, el }) {
  const asked = model.get("asked");
  const id = `nbkit-question-${++forms}-${Math.random().toString(36).slice(2)}`;
  const form = make("div", "nbkit-question");
  form.dataset.lmSuppressShortcuts = "true"; // typing here must not run commands of the notebook
  const set = make("fieldset");
  const legend = make("legend", "", asked.question);
  legend.id = `${id}-question`;
  const fields = asked.choices.length ? choiceFields(asked, id) : numberFields(asked, id);
  const band = make("p", "band", asked.band);
  band.id = `${id}-band`;
  const buttons = make("div", "line");
  const lock = make("button", "main", "Lock my guess");
  lock.type = "button";
  const skip = make("button", "", "I do not know");
  skip.type = "button";
  buttons.append(lock, skip);
  set.append(legend, fields.line, band, buttons);
  const said = make("p", "said");
  said.setAttribute("role", "status");
  form.append(set, said);

  let unheard = 0;
  function send(guess) {
    set.disabled = true;
    said.textContent = "Locking …";
    model.send({ lock: guess });
    unheard = setTimeout(() => {
      said.textContent = "The kernel is busy. It takes your guess when the cell that runs is over. If the kernel was restarted, run this cell again.";
    }, UNHEARD_MS);
  }
  function show() {
    const { locked, guess } = model.get("answer");
    if (!locked) return;
    clearTimeout(unheard);
    set.disabled = true;
    buttons.hidden = true;
    fields.show(guess);
    const words = guess === null ? "You do not know." : `You said ${guess}${asked.unit && !asked.choices.length ? ` ${asked.unit}` : ""}.`;
    said.textContent = `Locked. ${words} Run the next cells.`;
  }
  function refused(message) {
    if (!("refused" in message)) return;
    clearTimeout(unheard);
    set.disabled = false;
    said.textContent = message.refused;
  }
  function take() {
    const guess = fields.value();
    if (guess === null) said.textContent = fields.missing;
    else send(guess);
  }
  lock.addEventListener("click", take);
  // Not with a submit event, because JupyterLab handles Enter. There, Enter with Shift, Ctrl, Alt or Meta runs a cell.
  fields.line.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
    event.preventDefault();
    event.stopPropagation();
    take();
  });
  skip.addEventListener("click", () => send(null));
  model.on("change:answer", show);
  model.on("msg:custom", refused);
  show();
  el.append(form);
  return () => {
    clearTimeout(unheard);
    model.off("change:answer", show);
    model.off("msg:custom", refused);
  };
}

export default { render };
