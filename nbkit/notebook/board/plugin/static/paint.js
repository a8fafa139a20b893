// A canvas whose drawn objects can have a tooltip.

export const PARTS = ["compute", "exposed", "waiting", "bubble", "data", "optimizer", "other"];
export const SPOKEN = {
  compute: "compute", exposed: "exposed communication", waiting: "waiting for peers", bubble: "pipeline bubble",
  data: "data", optimizer: "optimizer", other: "other", nbkit: "nbkit examines strategies",
};
// Each color has one meaning. Readers with any kind of color blindness can distinguish the colors of a set, on a light and
// a dark background (tests/notebook/widgets/test_colours.py).
export const COLOURS = {
  compute: "#4d718f", exposed: "#e15759", waiting: "#f2a33c", bubble: "#d6c5aa", data: "#55a190",
  optimizer: "#9d6cd9", other: "#9cafc9",
};
// The passes of a pipeline, drawn on the background of an idle rank. Forward has the color of compute.
export const PASSES = { F: "#4d718f", B: "#2840a0", W: "#b6e1b1" };
export const MEMORY = { parameters: "#2f5d50", gradients: "#a66f35", optimizer: "#c48fb0", buffers: "#a1b24b", activations: "#cbbdb7", buckets: "#3c5fd7", working: "#9bdae7", other: "#7d7d7c" };
export const MEMORY_WORDS = { optimizer: "optimizer state", activations: "activations", buckets: "sent, received, gathered", working: "working memory", other: "not counted" };
// A strategy has the color of its family in every view. The family is the way in which it divides the model. Python reads
// these lines too (nbkit/notebook/widgets/javascript.py).
export const FAMILIES = { dp: "#2478ef", zero: "#31b98d", tp: "#cf4b27", pp: "#ae9bd3", cp: "#ca9e15", mixed: "#8d6b97" };

// The same rule as family_of in nbkit/notebook/widgets/panel/view.py.
export function familyOf(strategy) {
  const keys = strategy.split(" ").map((word) => word.split("=")[0]);
  const axes = ["tp", "pp", "cp"].filter((axis) => keys.includes(axis));
  return axes.length > 1 ? "mixed" : axes[0] ?? (keys.includes("zero") ? "zero" : "dp");
}

// Returns the families of the strategies, for a legend.
export const familiesOf = (strategies) => {
  const used = new Set(strategies.filter(Boolean).map(familyOf));
  return Object.fromEntries(Object.entries(FAMILIES).filter(([name]) => used.has(name)));
};

// Returns black or white, whichever is readable on this color.
export function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.19 ? "#16181c" : "#ffffff";
}

export const dark = () => document.body.classList.contains("dark");
export const ink = () => (dark() ? "#e3e6ea" : "#23272e");
export const faint = () => (dark() ? "#9aa3ae" : "#68717d");
export const rule = () => (dark() ? "#3c434d" : "#dfe3e8");
export const alarm = () => (dark() ? "#ff8a8a" : "#c3393f"); // a failure, a late rank
export const paper = () => (dark() ? "#23272e" : "#ffffff");

// Returns why a rank is late.
export const lateWords = ({ cause, seconds: longer }) => (cause === "nbkit"
  ? `nbkit examines strategies on it, which takes ${seconds(longer)}` : `its ${SPOKEN[cause]} takes ${seconds(longer)} longer than elsewhere`);

// The same formats as in nbkit/figures.py, so that a number looks the same everywhere.
const three = (value) => `${+value.toPrecision(3)}`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value >= 999.5) return `${Math.round(value).toLocaleString("en")} s`;
  if (value >= 0.9995) return `${three(value)} s`;
  return value >= 0.9995e-3 ? `${three(value * 1e3)} ms` : `${three(value * 1e6)} µs`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (value >= 999.5 && i < units.length - 1) { value /= 1000; i += 1; }
  return `${i === 0 ? Math.round(value) : three(value)} ${units[i]}`;
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);
export const number = (value) => (value === null || value === undefined ? "–" : value >= 1000 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(4)}`);

let tip = null;

export function showTip(text, event) {
  if (tip === null) {
    tip = document.createElement("div");
    tip.className = "tip";
  }
  const home = document.fullscreenElement || document.body; // in full screen only this element is visible
  if (tip.parentNode !== home) home.append(tip);
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const right = event.clientX + tip.offsetWidth + 24 > window.innerWidth;
  tip.style.left = `${right ? event.clientX - tip.offsetWidth - 12 : event.clientX + 14}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 6))}px`;
}

export class Picture {
  constructor(host, label) {
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", label);
    host.append(this.canvas);
    this.spots = [];
    this.over = null; // the last event of the pointer over the canvas
    this.canvas.addEventListener("mousemove", (event) => {
      const spot = this.at(event);
      this.over = event;
      showTip(spot && spot.text(), event);
      this.canvas.style.cursor = spot && spot.pick ? "pointer" : "default";
    });
    this.canvas.addEventListener("mouseleave", (event) => { this.over = null; showTip("", event); });
    this.canvas.addEventListener("click", (event) => {
      const spot = this.at(event);
      if (spot && spot.pick) spot.pick();
    });
  }

  // Clears the canvas and sets its height. Returns its width.
  begin(height) {
    const width = Math.max(200, this.canvas.parentElement.clientWidth);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.pen = this.canvas.getContext("2d");
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pen.clearRect(0, 0, width, height);
    this.width = width;
    this.height = height;
    this.spots = [];
    // After the drawing, another object or none may be under the pointer.
    if (this.over) queueMicrotask(() => this.over && showTip(this.at(this.over)?.text(), this.over));
    return width;
  }

  box(x, y, w, h, colour) {
    this.pen.fillStyle = colour;
    this.pen.fillRect(x, y, w, h);
  }

  frame(x, y, w, h, colour, dash = []) {
    this.pen.setLineDash(dash);
    this.pen.strokeStyle = colour;
    this.pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    this.pen.setLineDash([]);
  }

  line(x0, y0, x1, y1, colour, { width = 1, dash = [] } = {}) {
    this.pen.setLineDash(dash);
    this.pen.lineWidth = width;
    this.pen.strokeStyle = colour;
    this.pen.beginPath();
    this.pen.moveTo(x0, y0);
    this.pen.lineTo(x1, y1);
    this.pen.stroke();
    this.pen.setLineDash([]);
    this.pen.lineWidth = 1;
  }

  words(text, x, y, { colour = faint(), align = "left", size = 11, bold = false } = {}) {
    this.pen.fillStyle = colour;
    this.pen.textAlign = align;
    this.pen.textBaseline = "middle";
    this.pen.font = `${bold ? "600 " : ""}${size}px system-ui, sans-serif`;
    this.pen.fillText(text, x, y);
  }

  // Adds an area with a tooltip. text: returns the tooltip. pick: called on a click.
  spot(x, y, w, h, text, pick = null) {
    this.spots.push({ x, y, w, h, text, pick });
  }

  at(event) {
    const frame = this.canvas.getBoundingClientRect();
    const x = event.clientX - frame.left;
    const y = event.clientY - frame.top;
    return this.spots.findLast((s) => x >= s.x && x < s.x + s.w && y >= s.y && y < s.y + s.h);
  }
}

// Returns round values from 0 to about `top`.
export function ticks(top, count = 4) {
  if (!(top > 0)) return [0];
  const raw = top / count;
  const ten = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * ten).find((s) => s >= raw * 0.999);
  const found = [];
  for (let value = 0; value <= top * 1.0001; value += step) found.push(value);
  return found;
}

// Returns a color between the background and a strong color, for a share from 0 to 1.
export function shade(share, hue) {
  const s = share <= 0 ? 0 : 0.12 + 0.88 * Math.sqrt(share);
  const from = dark() ? [35, 39, 46] : [255, 255, 255];
  const to = { blue: dark() ? [108, 170, 240] : [26, 84, 150], orange: dark() ? [245, 170, 90] : [191, 91, 10] }[hue];
  return `rgb(${from.map((value, i) => Math.round(value + s * (to[i] - value))).join(",")})`;
}
