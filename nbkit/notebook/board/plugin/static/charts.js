// Charts along an axis: a run over time, a bar per rank, memory per rank, several runs.

import { COLOURS, MEMORY, MEMORY_WORDS, PARTS, SPOKEN, FAMILIES, alarm, bytes, faint, familyOf, ink, lateWords, number, paper, percent, rule, seconds, ticks } from "./paint.js";

const LEFT = 58;

function axis(picture, top, y0, y1, spoken) {
  for (const value of ticks(top)) {
    const y = y1 - ((y1 - y0) * value) / top;
    picture.line(LEFT, y, picture.width - 8, y, rule());
    picture.words(spoken(value), LEFT - 6, y, { align: "right" });
  }
}

// points: from the server's timeline. chosen: the step that is shown below. other: {run, points} of a second run, whose
// seconds per step are drawn as a line. window: show only this many of the newest steps; 0: all. A point may be the mean
// of several steps, some of them older. unit: the unit of the rate.
export function drawTimeline(picture, points, events, { window: only, chosen, other, unit, pick }) {
  const oldest = only && points.length ? points[points.length - 1][0] - only : 0;
  const shown = points.filter((p) => p[0] > oldest);
  const width = picture.begin(230);
  picture.canvas.dataset.points = shown.length;
  if (!shown.length) {
    picture.words("no finished step yet", LEFT, 40);
    return;
  }
  const [y0, y1] = [34, 196];
  const first = Math.max(shown[0][0] - shown[0][1], oldest); // number of steps before the first shown one
  const last = shown[shown.length - 1][0];
  picture.canvas.dataset.first = first + 1;
  const x = (step) => LEFT + ((width - LEFT - 10) * Math.max(step - first, 0)) / Math.max(last - first, 1);
  // A slow first step, such as with compilation, must not flatten all the others.
  const beside = other.points.filter((p) => p[0] > first && p[0] - p[1] < last);
  picture.canvas.dataset.other = beside.length;
  const sorted = [...shown, ...beside].map((p) => p[2]).sort((a, b) => a - b);
  const top = Math.min(sorted[sorted.length - 1], 2.2 * sorted[Math.floor(sorted.length * 0.9)]) * 1.05 || 1e-9;
  axis(picture, top, y0, y1, seconds);
  const pen = picture.pen;
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, y0 - 2, width - LEFT, y1 - y0 + 4);
  pen.clip();
  for (const point of shown) {
    const [x0, x1] = [Math.round(x(point[0] - point[1])), Math.round(x(point[0]))];
    let y = y1;
    const measured = PARTS.some((_, i) => point[3 + i] > 0);
    for (let i = 0; i < PARTS.length; i += 1) {
      const h = ((y1 - y0) * (measured ? point[3 + i] : i === PARTS.length - 1 ? point[2] : 0)) / top;
      picture.box(x0, y - h, Math.max(x1 - x0, 1), h, COLOURS[PARTS[i]]);
      y -= h;
    }
    if (point[2] > top) picture.words("▲", (x0 + x1) / 2, y0 + 5, { align: "center", colour: ink() }); // the bar is cut off
    const text = () => [
      point[2] > top ? "▲ longer than the picture is high" : "",
      point[1] > 1 ? `steps ${point[0] - point[1] + 1} to ${point[0]}, mean` : `step ${point[0]}`,
      point[point.length - 1],
      `${seconds(point[2])} a step, mean over ranks`,
      ...PARTS.map((part, i) => [part, point[3 + i]]).filter(([, v]) => v > 0)
        .map(([part, v]) => `  ${SPOKEN[part]}: ${seconds(v)} (${percent(v / point[2])})`),
      point[3 + PARTS.length] === null ? "" : `${number(point[3 + PARTS.length])} ${unit}/s`,
      point[4 + PARTS.length] === null ? "" : `loss ${point[4 + PARTS.length]}`,
    ].filter(Boolean).join("\n");
    picture.spot(x0, y0 - 4, Math.max(x1 - x0, 1), y1 - y0 + 8, text, () => pick(point[0]));
  }
  drawOther(picture, beside, x, (value) => y1 - ((y1 - y0) * value) / top);
  pen.restore();
  drawChanges(picture, shown, x, y1);
  drawEvents(picture, events.filter((e) => e.step >= first && e.step <= last), shown[0][shown[0].length - 1], x, y0, y1);
  for (const value of ticks(last - first, 8)) picture.words(`${Math.round(first + value)}`, x(first + value), y1 + 24, { align: "center" });
  picture.words("step", LEFT - 6, y1 + 24, { align: "right" });
  if (chosen > first && chosen <= last) {
    const at = x(chosen - 0.5);
    picture.line(at, y0 - 4, at, y1 + 3, ink(), { width: 1.5 });
    picture.words("▲", at, y1 + 8, { colour: ink(), align: "center", size: 9 });
  }
}

function drawOther(picture, points, x, y) {
  for (const [colour, thick] of [[paper(), 4], [ink(), 2]]) {
    for (const point of points) {
      picture.line(x(point[0] - point[1]), y(point[2]), x(point[0]), y(point[2]), colour, { width: thick });
    }
  }
}

// Draws a strip below the chart, colored by strategy.
function drawChanges(picture, shown, x, y1) {
  const names = [...new Set(shown.map((p) => p[p.length - 1]))];
  picture.canvas.dataset.strategies = names.filter(Boolean).length;
  let start = 0;
  for (let i = 1; i <= shown.length; i += 1) {
    const name = shown[start][shown[start].length - 1];
    if (i < shown.length && shown[i][shown[i].length - 1] === name) continue;
    const [x0, x1] = [x(shown[start][0] - shown[start][1]), x(shown[i - 1][0])];
    if (name) {
      picture.box(x0, y1 + 3, Math.max(x1 - x0 - 1, 1), 5, FAMILIES[familyOf(name)]); // with a gap, because both may be of one family
      const [from, to] = [shown[start][0] - shown[start][1] + 1, shown[i - 1][0]];
      picture.spot(x0, y1, x1 - x0, 10, () => `${name}\nsteps ${from} to ${to}`);
    }
    start = i;
  }
}

const SIGNS = { run_started: "▸", run_stopped: "■" }; // other events have their own sign: nbkit/records/event_words.py

const signOf = (event) => event.sign || SIGNS[event.kind] || "•";

// Returns what the signs above the chart mean: "⇄ switch · ■ run stopped".
export const signWords = (events) => [...new Set(events.map((event) => `${signOf(event)} ${event.kind.replaceAll("_", " ")}`))].join(" · ");

// begun: the strategy at the left end. It is named if there is room before the next event.
function drawEvents(picture, events, begun, x, y0, y1) {
  picture.canvas.dataset.events = events.map((e) => e.kind).join(" ");
  let free = 0;
  for (const [i, event] of events.entries()) {
    const [sign, colour] = [signOf(event), event.kind === "failure" ? alarm() : ink()];
    const at = Math.max(x(event.step), LEFT + 2);
    picture.line(at, y0 - 10, at, y1, colour, { dash: [3, 3] });
    const text = () => event.text || `${event.kind.replaceAll("_", " ")} after step ${event.step}`;
    picture.pen.font = "600 11px system-ui, sans-serif";
    const fits = (words) => at + picture.pen.measureText(words).width + 6 < (i + 1 < events.length ? x(events[i + 1].step) : picture.width);
    const named = event.kind === "switch" ? `${sign} ${event.new || "switch"}` : event.kind === "run_started" && begun ? `${sign} ${begun}` : sign;
    const wide = (words) => picture.pen.measureText(words).width + 6;
    // At the right end, the name of a switch moves to the left, but not over the sign before it.
    const clear = Math.min(at, picture.width - wide(named) - 4) >= free;
    const name = clear && (event.kind === "switch" || fits(named)) ? named : sign;
    const w = wide(name);
    if (at >= free) {
      picture.words(name, Math.min(at, picture.width - w - 4), y0 - 18, { colour, bold: true });
      free = at + w;
    }
    picture.spot(at - 5, y0 - 26, Math.max(10, at >= free - w ? w : 10), 22, text);
    picture.spot(at - 2, y0 - 4, 4, y1 - y0, text);
  }
}

// Draws a bar per rank on a common axis. With many ranks the bars are thin.
export function drawBars(picture, ranks, late) {
  const many = ranks.length > 16;
  const row = many ? Math.max(5, Math.min(14, Math.floor(420 / ranks.length))) : 24;
  const width = picture.begin(ranks.length * row + 30);
  picture.canvas.dataset.rows = ranks.length;
  if (!ranks.length) return;
  const top = Math.max(...ranks.map((r) => r[1]), 1e-9);
  const right = width - 70;
  const x = (value) => LEFT + ((right - LEFT) * value) / top;
  const bottom = ranks.length * row + 8;
  for (const value of ticks(top, 5)) {
    picture.line(x(value), 0, x(value), bottom, rule());
    picture.words(seconds(value), x(value), bottom + 12, { align: "center" });
  }
  picture.words("time", LEFT - 14, bottom + 12, { align: "right" });
  ranks.forEach((values, i) => {
    const [rank, total] = values;
    const y = i * row + 4;
    const slow = late && late.rank === rank;
    if (!many || i % 8 === 0 || slow) {
      picture.words(`rank ${rank}`, LEFT - 6, y + row / 2, { align: "right", colour: slow ? alarm() : faint(), bold: slow });
    }
    let at = 0;
    PARTS.forEach((part, p) => {
      picture.box(x(at), y + 1, x(at + values[2 + p]) - x(at), row - (many ? 1 : 5), COLOURS[part]);
      at += values[2 + p];
    });
    if (!many) picture.words(seconds(total), x(total) + 6, y + row / 2);
    if (slow) picture.words(many ? "◀ late" : "", x(total) + 6, y + row / 2, { colour: alarm(), bold: true });
    const text = () => [
      `rank ${rank}: ${seconds(total)}`,
      ...PARTS.map((part, p) => `  ${SPOKEN[part]}: ${seconds(values[2 + p])} (${percent(values[2 + p] / total)})`),
      slow ? `late: ${lateWords(late)}` : "",
    ].filter(Boolean).join("\n");
    picture.spot(0, y, width, row, text);
  });
}

// rows: one for each rank. If the parts of the peak are known, a bar shows the peak by kind, and a thin bar below shows the
// planned peak. Otherwise it shows the memory between two steps, and the rest of the peak. pick: called with a clicked rank.
export function drawMemory(picture, rows, pick = null) {
  const many = rows.length > 16;
  const planned = !many && rows.some((r) => r.planned);
  const row = many ? Math.max(5, Math.min(14, Math.floor(420 / rows.length))) : planned ? 34 : 26;
  const width = picture.begin(rows.length * row + 30);
  picture.canvas.dataset.rows = rows.length;
  if (!rows.length) return;
  const whole = (r) => (r.formula ? sumOf(r.formula) : 0); // predicted memory between two steps
  const top = Math.max(...rows.map((r) => Math.max(r.peak ?? r.at_rest, whole(r), sumOf(r.planned ?? []))), 1);
  const x = (value) => LEFT + ((width - (many ? 20 : 180) - LEFT) * value) / top;
  const bottom = rows.length * row + 8;
  for (const value of ticks(top)) {
    if (x(value) > width - 30) continue;
    picture.line(x(value), 0, x(value), bottom, rule());
    picture.words(bytes(value), x(value), bottom + 12, { align: "center" });
  }
  rows.forEach((r, i) => {
    const y = i * row + 4;
    const high = many ? row - 1 : planned ? 18 : 20;
    const middle = y + 1 + high / 2;
    if (!many || i % 8 === 0) picture.words(`rank ${r.rank}`, LEFT - 6, middle, { align: "right" });
    const drawn = stack(picture, x, y + 1, high, r.kinds ?? r);
    const most = r.peak === null ? "peak not counted" : `peak ${bytes(r.peak)}`;
    if (!many) picture.words(`${bytes(r.at_rest)} at rest, ${most}`, x(Math.max(drawn, whole(r))) + 6, middle);
    if (r.formula && !r.planned) {
      picture.line(x(whole(r)), y - 1, x(whole(r)), y + high + 3, paper(), { width: 4 });
      picture.line(x(whole(r)), y - 1, x(whole(r)), y + high + 3, ink(), { width: 2 });
    }
    if (planned && r.planned) {
      const all = stack(picture, x, y + 22, 6, named(r.planned));
      picture.words(`planned ${bytes(all)}`, x(all) + 6, y + 25);
    }
    picture.spot(0, y, width, row, () => memoryText(r), pick && (() => pick(r.rank)));
  });
}

// Returns the legend: {kind: color}, the words of kinds, and whether the tick of the formula is drawn.
export function memoryLegend(rows) {
  const kinds = Object.keys(MEMORY).filter((kind) => rows.some((r) => (r.kinds ?? r)[kind]));
  return {
    colours: Object.fromEntries(kinds.map((kind) => [kind, MEMORY[kind]])),
    words: rows.some((r) => r.kinds) ? MEMORY_WORDS : { ...MEMORY_WORDS, activations: "activations and other, at the peak" },
    tick: rows.some((r) => r.formula && !r.planned),
  };
}

const PLANNED = ["parameters", "gradients", "optimizer", "activations", "working"];
const named = (planned) => Object.fromEntries(PLANNED.map((kind, i) => [kind, planned[i]]));
const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

// Draws the kinds side by side. Returns their sum.
function stack(picture, x, y, high, of) {
  let at = 0;
  for (const kind of Object.keys(MEMORY)) {
    const size = of[kind] ?? 0;
    picture.box(x(at), y, x(at + size) - x(at), high, MEMORY[kind]);
    at += size;
  }
  return at;
}

function memoryText(r) {
  const formula = r.formula || [];
  const rest = ["parameters", "gradients", "optimizer", "buffers"].map((name, k) =>
    `  ${MEMORY_WORDS[name] ?? name}: ${bytes(r[name])}${r.formula ? `   formula ${bytes(formula[k] ?? 0)}` : ""}`);
  const plan = r.planned && named(r.planned);
  const peak = r.kinds && Object.entries(r.kinds).filter(([, size]) => size).map(([kind, size]) =>
    `  ${MEMORY_WORDS[kind] ?? kind}: ${bytes(size)} (${percent(size / r.peak)})${plan && plan[kind] !== undefined ? `   planned ${bytes(plan[kind])}` : ""}`);
  return [
    `rank ${r.rank}, counted in step ${r.step}`,
    "between two steps:", ...rest,
    ...(peak ? [`at the peak, ${bytes(r.peak)}:`, ...peak] : [r.activations === null ? "the peak of a step was not counted" : `activations and other, at the peak: ${bytes(r.activations)}`]),
    r.growth === null ? "" : `the process has grown by ${bytes(r.growth)}, with what nbkit needs to examine the model`,
  ].filter(Boolean).join("\n");
}

// Memory is counted seldom, maybe under another strategy. The growth of a process is text, as it is not part of a peak.
export function memoryNote(rows, strategy) {
  if (!rows.length) return "not counted yet";
  const [{ step, strategy: under }] = rows;
  const grown = Math.max(...rows.map((r) => r.growth ?? 0));
  return [`counted in step ${step}`, under && under !== strategy ? `under ${under}` : "", grown > 0 ? `a process has grown by ${bytes(grown)} since before the job, at most` : ""].filter(Boolean).join("; ");
}

// Draws a bar for a run, on a common axis of seconds per step.
export function drawRun(picture, run, top) {
  const width = picture.begin(16);
  if (!run.seconds) return;
  let at = 0;
  run.parts.forEach((value, i) => {
    const w = (width * value) / top;
    picture.box(at, 2, w, 12, COLOURS[PARTS[i]]);
    picture.spot(at, 0, w, 16, () => `${SPOKEN[PARTS[i]]}: ${seconds(value)} (${percent(value / run.seconds)})`);
    at += w;
  });
}
