// The loss of a run over its steps, its tokens or its time, and below it how many of these a second. Of what has no tokens, rows are counted.

import { FAMILIES, alarm, bytes, dark, faint, familyOf, ink, inkOn, number, rule, seconds } from "./paint.js";

const LEFT = 58;
const RIGHT = 12;
const SIGNS = { checkpoint: "▾", failure: "✕", replaced: "✚", resized: "⤢", rebalanced: "÷", out_of_memory: "▤", lr_changed: "lr" };

// Columns of a point, as nbkit.notebook.widgets.loss_curve has them.
export const STEP = 0;
const SPAN = 1;
const TIME = 2;
const TOKENS = 3;
export const LOSS = 4;
export const RATE = 5;
export const STRATEGY = 6;
const AXES = { step: STEP, tokens: TOKENS, time: TIME };

// points: rows of columns. unit: what is counted as tokens, "tokens" or "rows". along: what lies on x. smooth: steps over which the bold line is a mean, about.
export function drawCurves(picture, { points, events, strategies, unit, along, smooth }) {
  const width = picture.begin(330);
  Object.assign(picture.canvas.dataset, { points: points.length, along, step: points.length ? points[points.length - 1][STEP] : 0 });
  if (!points.length) {
    picture.words("no finished step yet", LEFT, 60);
    return;
  }
  const column = AXES[along];
  const first = points[0];
  const start = along === "step" ? first[STEP] - first[SPAN] : 0;
  const stop = Math.max(points[points.length - 1][column], start + 1e-9);
  const x = (value) => LEFT + ((width - LEFT - RIGHT) * (value - start)) / (stop - start);
  const switches = events.filter((event) => event.kind === "switch");
  const gaps = switches.map((event) => gapOf(event, points, column, along));
  drawStrip(picture, points, strategies, column, x, gaps, 192);
  const loss = { y0: 26, y1: 186, column: LOSS, name: "loss", spoken: number, floor: false };
  const rate = { y0: 232, y1: 296, column: RATE, name: `${unit}/s`, spoken: (value) => (value >= 1e5 ? brief(value) : number(value)), floor: true };
  for (const row of [loss, rate]) drawRow(picture, points, row, x, column, gaps, smooth);
  drawGaps(picture, switches, gaps, x, loss, rate);
  drawEvents(picture, events, points, column, x, loss, rate);
  const end = along === "step" ? number(stop) : along === "tokens" ? brief(stop) : clock(stop);
  for (const [value, words] of marks(start, stop, along)) {
    if (x(value) < width - RIGHT - 60) picture.words(words, x(value), 310, { align: "center" });
  }
  picture.words(end, width - RIGHT, 310, { align: "right", colour: ink() });
  picture.words(along === "tokens" ? unit : along, 2, 310, { colour: ink(), bold: true });
  drawSpots(picture, points, strategies, unit, column, x, along);
}

// Where on x a switch lies: from when to when no step could be made.
function gapOf(event, points, column, along) {
  if (along === "time") {
    const pause = (event.pause_s || 0) + (event.proof_s || 0);
    return [Math.max(0, event.time - pause), event.time];
  }
  const before = points.findLast((point) => point[STEP] <= event.step);
  const at = before ? before[column] : 0;
  return [at, at];
}

function drawRow(picture, points, row, x, column, gaps, smooth) {
  const values = points.map((point) => point[row.column]);
  const bold = smoothed(points, values, smooth);
  const [low, high] = range([...values.filter(Number.isFinite)], bold, row.floor);
  const y = (value) => row.y1 - ((row.y1 - row.y0) * (value - low)) / (high - low);
  picture.words(row.name, 2, row.y0 - 12, { colour: ink(), bold: true });
  for (const value of between(low, high, row.floor ? 2 : 4)) {
    picture.line(LEFT, y(value), picture.width - RIGHT, y(value), rule());
    picture.words(row.spoken(value), LEFT - 6, y(value), { align: "right" });
  }
  const pen = picture.pen;
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, row.y0 - 3, picture.width - LEFT - RIGHT + 2, row.y1 - row.y0 + 6);
  pen.clip();
  const colour = row.floor ? faint() : ink();
  // A switch breaks nothing of the loss. In its pause no tokens were trained.
  const breaks = row.floor ? gaps : [];
  stroke(pen, points, values, x, y, column, breaks, colour, 1, dark() ? 0.6 : 0.4);
  stroke(pen, points, bold, x, y, column, breaks, colour, 2.2, 1);
  pen.restore();
  const last = bold.findLast(Number.isFinite);
  if (last === undefined) return;
  picture.words(`smoothed ${row.spoken(last)}`, picture.width - RIGHT, row.y0 - 12, { align: "right", colour: ink(), bold: true });
  row.told = pen.measureText(`smoothed ${row.spoken(last)}`).width;
}

// A line that breaks where a switch lies between two points.
function stroke(pen, points, values, x, y, column, gaps, colour, wide, strong) {
  pen.strokeStyle = colour;
  pen.globalAlpha = strong;
  pen.lineWidth = wide;
  pen.lineJoin = "round";
  pen.beginPath();
  let before = null;
  for (let i = 0; i < points.length; i += 1) {
    if (!Number.isFinite(values[i])) {
      before = null;
      continue;
    }
    const at = points[i][column];
    const broken = before === null || gaps.some(([from]) => from >= before - 2e-3 && from < at);
    if (broken) pen.moveTo(x(at), y(values[i]));
    if (broken) pen.lineTo(x(at) + 0.5, y(values[i]));
    else pen.lineTo(x(at), y(values[i]));
    before = at;
  }
  pen.stroke();
  pen.globalAlpha = 1;
  pen.lineWidth = 1;
}

// A mean that forgets over about `over` steps; at the beginning it is the mean of what there is.
function smoothed(points, values, over) {
  let sum = 0;
  let weight = 0;
  return values.map((value, i) => {
    if (!Number.isFinite(value)) return NaN;
    const keep = Math.exp(-points[i][SPAN] / over);
    sum = sum * keep + value * (1 - keep);
    weight = weight * keep + (1 - keep);
    return sum / weight;
  });
}

// From the lowest to the highest, without the few wildest of the raw values.
function range(values, bold, floor) {
  if (!values.length) return [0, 1];
  values.sort((a, b) => a - b);
  const cut = Math.floor(values.length * 0.01);
  const calm = bold.filter(Number.isFinite);
  let low = floor ? 0 : Math.min(values[cut], ...minmax(calm));
  let high = Math.max(values[values.length - 1 - cut], ...minmax(calm));
  if (high - low < 1e-12) [low, high] = [low - Math.abs(low) * 0.05 - 1e-6, high + Math.abs(high) * 0.05 + 1e-6];
  const air = 0.06 * (high - low);
  return [floor ? 0 : low - air, high + air];
}

function minmax(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

// Round values between two.
function between(low, high, count) {
  const raw = (high - low) / count;
  const ten = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * ten).find((s) => s >= raw * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(Math.abs(value) < step / 1e6 ? 0 : value);
  return found;
}

function marks(start, stop, along) {
  const spoken = along === "time" ? clock : along === "tokens" ? brief : (value) => `${Math.round(value)}`;
  const values = between(start, stop, 6).filter((value) => along !== "step" || Number.isInteger(value));
  return values.map((value) => [value, spoken(value)]);
}

function clock(value) {
  if (value < 120) return `${+value.toPrecision(3)} s`;
  return value < 7200 ? `${+(value / 60).toPrecision(3)} min` : `${+(value / 3600).toPrecision(3)} h`;
}

function brief(value) {
  const [unit, size] = value >= 1e9 ? ["G", 1e9] : value >= 1e6 ? ["M", 1e6] : value >= 1e3 ? ["k", 1e3] : ["", 1];
  return `${+(value / size).toPrecision(3)}${unit}`;
}

function drawStrip(picture, points, strategies, column, x, gaps, y) {
  const used = [...new Set(points.map((point) => point[STRATEGY]))];
  picture.canvas.dataset.strategies = used.filter((one) => strategies[one]).length;
  let begin = 0;
  for (let i = 1; i <= points.length; i += 1) {
    const own = points[begin][STRATEGY];
    if (i < points.length && points[i][STRATEGY] === own) continue;
    const before = begin ? points[begin - 1][column] : -1;
    const gap = gaps.find(([, until]) => until >= before && until < points[begin][column]);
    const from = begin ? x(gap ? gap[1] : before) : LEFT;
    const to = x(points[i - 1][column]);
    const name = strategies[own];
    if (name) {
      const colour = FAMILIES[familyOf(name)];
      picture.box(from, y, Math.max(to - from - 1.5, 1.5), 14, colour); // a gap: two strategies of a family may meet
      picture.pen.font = "600 11px system-ui, sans-serif";
      const fits = [name, brieflyNamed(name)].find((words) => picture.pen.measureText(words).width < to - from - 8);
      if (fits) picture.words(fits, from + 4, y + 7.5, { colour: inkOn(colour), bold: true });
      const [one, other] = [points[begin][STEP], points[i - 1][STEP]];
      picture.spot(from, y, Math.max(to - from, 3), 14, () => `${name}\nsteps ${one} to ${other}`);
    }
    begin = i;
  }
}

// The axes alone: "pp=4" of "pp=4 schedule=1f1b microbatches=8".
const brieflyNamed = (strategy) => strategy.split(" schedule=")[0];

function drawGaps(picture, switches, gaps, x, loss, rate) {
  picture.canvas.dataset.switches = switches.length;
  let free = 0;
  switches.forEach((event, i) => {
    const [from, to] = [x(gaps[i][0]), x(gaps[i][1])];
    const w = Math.max(to - from, 1.5);
    for (const row of [loss, rate]) {
      if (w > 3) {
        picture.pen.globalAlpha = row.floor ? 0.85 : 0.3;
        picture.box(from, row.y0 - 3, w, row.y1 - row.y0 + 6, rule());
        picture.pen.globalAlpha = 1;
        picture.frame(from, row.y0 - 3, w, row.y1 - row.y0 + 6, ink(), [3, 3]);
      } else for (const y of [row.y0 - 3, row.y1 - 7]) picture.box(from, y, w, 10, ink());
    }
    const words = `⇄ ${brieflyNamed(event.new)}`;
    picture.pen.font = "600 11px system-ui, sans-serif";
    const wide = picture.pen.measureText(words).width;
    const at = Math.max(LEFT, Math.min(from, picture.width - RIGHT - wide - (loss.told ?? 0) - 12));
    if (at > free) {
      picture.words(words, at, 12, { colour: ink(), bold: true });
      free = at + wide + 6;
    }
    const text = () => [
      `switched after step ${event.step}`, `  from ${event.old}`, `  to ${event.new}`,
      `  moved ${bytes(event.moved_bytes)}, no step for ${seconds(event.pause_s)}`,
      event.identical === true ? "  weights and optimizer state proven the same" : "",
    ].filter(Boolean).join("\n");
    picture.late = picture.late || [];
    picture.late.push([from - 4, loss.y0 - 20, w + 8, rate.y1 - loss.y0 + 20, text]);
  });
}

function drawEvents(picture, events, points, column, x, loss, rate) {
  for (const event of events) {
    const sign = SIGNS[event.kind];
    if (!sign) continue;
    const near = points.findLast((point) => point[STEP] <= event.step) || points[0];
    const at = x(near[column]);
    const colour = event.kind === "failure" ? alarm() : ink();
    picture.line(at, loss.y0, at, rate.y1, colour, { dash: [2, 4] });
    if (event.kind === "replaced") picture.words(`${sign} rank ${event.ranks}`, at + 4, loss.y1 - 6, { colour, bold: true });
    else if (event.kind === "resized") picture.words(`${sign} ${event.ranks} ranks`, at + 4, loss.y1 - 6, { colour, bold: true });
    else picture.words(sign, at, loss.y1 - 6, { colour, align: "center", bold: true });
    const text = () => `${event.kind.replaceAll("_", " ")} after step ${event.step}\n${wordsOf(event)}`;
    picture.late = picture.late || [];
    picture.late.push([at - 5, loss.y1 - 14, 10, 16, text]);
  }
}

function wordsOf(event) {
  const rank = Number.isInteger(event.rank) ? `rank ${event.rank}` : "";
  if (event.kind === "failure") return [rank, event.error, event.what].filter(Boolean).join(": ");
  if (event.kind === "replaced") return `${event.why}: ${event.steps_lost} steps and ${seconds(event.seconds)} lost`;
  if (event.kind === "resized") return `${event.old_ranks} → ${event.ranks} ranks\n${event.old} → ${event.new}\n${bytes(event.moved_bytes)} moved, no step for ${seconds(event.pause_s)}`;
  if (event.kind === "rebalanced") return `speeds ${event.speeds}: ${Math.round(100 * event.gain)} % less computing`;
  if (event.kind === "out_of_memory") return [event.changes && `now ${event.changes}`, event.what].filter(Boolean).join("\n");
  return event.path || (event.new ?? "");
}

// Whatever lies under the pointer in between: the nearest point.
function drawSpots(picture, points, strategies, unit, column, x, along) {
  const text = (at) => {
    let [low, high] = [0, points.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x(points[middle][column]) < at) low = middle + 1; else high = middle;
    }
    const point = points[low];
    return [
      point[SPAN] > 1 ? `steps ${point[STEP] - point[SPAN] + 1} to ${point[STEP]}, mean` : `step ${point[STEP]}`,
      strategies[point[STRATEGY]] || "",
      Number.isFinite(point[LOSS]) ? `loss ${+point[LOSS].toPrecision(5)}` : "",
      Number.isFinite(point[RATE]) ? `${number(point[RATE])} ${unit}/s` : "",
      `after ${clock(point[TIME])}, ${brief(point[TOKENS])} ${unit}`,
    ].filter(Boolean).join("\n");
  };
  const late = picture.late || [];
  picture.late = [];
  for (let at = LEFT; at < picture.width - RIGHT; at += 4) picture.spot(at, 24, 4, 166, () => text(at + 2));
  for (let at = LEFT; at < picture.width - RIGHT; at += 4) picture.spot(at, 226, 4, 76, () => text(at + 2));
  for (const spot of late) picture.spot(...spot);
}
