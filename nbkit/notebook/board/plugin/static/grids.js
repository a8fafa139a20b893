// Charts with two dimensions: the traffic between ranks, and the inside of a step.

import { COLOURS, PASSES, bytes, faint, ink, paper, percent, rule, seconds, shade, ticks } from "./paint.js";

// traffic: {world, sent, modelled} with rows of [from, to, bytes]. hosts: the host of each rank, to draw borders of nodes.
export function drawTraffic(picture, traffic, hosts) {
  const n = traffic.world;
  const left = 64;
  const width = picture.begin(Math.min(440, 44 * n + 34));
  const cell = Math.max(3, Math.min((picture.height - 34) / n, (width - left - 8) / n, 44));
  const cells = new Map();
  for (const [kind, rows] of [["sent", traffic.sent], ["modelled", traffic.modelled]]) {
    for (const [from, to, size] of rows) {
      const key = from * n + to;
      cells.set(key, { from, to, sent: 0, modelled: 0, ...cells.get(key), [kind]: size });
    }
  }
  const most = Math.max(1, ...[...cells.values()].map((c) => c.sent + c.modelled));
  picture.canvas.dataset.cells = cells.size;
  picture.canvas.dataset.world = n;
  const gap = cell > 8 ? 1 : 0;
  const at = (i) => 22 + i * cell;
  picture.frame(left - 1, at(0) - 1, n * cell + 2, n * cell + 2, rule());
  for (let i = 0; i < n; i += 1) {
    picture.box(left + i * cell, at(i), cell - gap, cell - gap, rule());
    if (n <= 16 || i % 8 === 0) {
      picture.words(`${i}`, left - 6, at(i) + cell / 2, { align: "right" });
      picture.words(`${i}`, left + (i + 0.5) * cell, 14, { align: "center" });
    }
  }
  picture.words("from ↓ to →", 0, 6);
  for (const c of cells.values()) {
    const total = c.sent + c.modelled;
    const [x, y] = [left + c.to * cell, at(c.from)];
    picture.box(x, y, cell - gap, cell - gap, shade(total / most, c.sent >= c.modelled ? "blue" : "orange"));
    if (cell >= 34) {
      const strong = total / most > 0.3;
      bytes(total).split(" ").forEach((word, line) => picture.words(word, x + cell / 2, y + cell / 2 + 11 * line - 5, { align: "center", size: 10, colour: strong ? paper() : ink() }));
    }
    picture.spot(x, y, cell, cell, () => [
      `rank ${c.from} → rank ${c.to}, a step`,
      c.sent ? `messages: ${bytes(c.sent)} (exact)` : "",
      c.modelled ? `collectives: ${bytes(c.modelled)} (modelled as a ring)` : "",
    ].filter(Boolean).join("\n"));
  }
  for (let i = 1; i < n; i += 1) {
    if (hosts[i] === hosts[i - 1]) continue;
    picture.line(left + i * cell - 0.5, at(0), left + i * cell - 0.5, at(n), faint(), { width: 0.6 });
    picture.line(left, at(i) - 0.5, left + n * cell, at(i) - 0.5, faint(), { width: 0.6 });
  }
}

const KINDS = { ...PASSES, I: PASSES.B };
const NAMES = { F: "forward", B: "backward", I: "backward, input", W: "backward, weights" };

// until: seconds at which the rows end. span: seconds of the whole width.
function drawRows(picture, rows, ranks, until, span, top, height, colour, text, label) {
  const left = 58;
  const x = (t) => left + ((picture.width - left - 10) * t) / span;
  rows.forEach((row, i) => {
    const y = top + i * height;
    picture.box(left, y, x(until) - left, height - 1, rule());
    if (ranks.length <= 16 || i % 8 === 0) picture.words(`rank ${ranks[i]}`, left - 6, y + height / 2, { align: "right" });
    for (const one of row) {
      const [x0, x1] = [x(one[3]), x(one[4])];
      const gap = x1 - x0 > 4 ? 0.6 : 0;
      picture.box(x0, y, Math.max(x1 - x0 - gap, 0.6), height - 1, colour(one));
      const name = label(one);
      if (name && x1 - x0 > name.length * 6.5 + 2 && height > 11) {
        picture.words(name, (x0 + x1) / 2, y + height / 2, { align: "center", size: 10, colour: one[0] === "W" ? "#16181c" : "#ffffff" });
      }
      picture.spot(x0, y, Math.max(x1 - x0, 1), height, () => text(one, ranks[i]));
    }
  });
}

function drawTime(picture, span, y) {
  for (const value of ticks(span, 6)) {
    const x = 58 + ((picture.width - 68) * value) / span;
    picture.line(x, y - 3, x, y + 1, faint());
    picture.words(seconds(value), Math.min(x, picture.width - 22), y + 10, { align: "center" });
  }
}

export function drawMoments(picture, moments) {
  const ranks = moments.ranks;
  picture.canvas.dataset.kind = moments.kind;
  picture.canvas.dataset.rows = ranks.length;
  if (!ranks.length) {
    picture.begin(20);
    return;
  }
  const height = ranks.length > 16 ? 7 : 20;
  const block = ranks.length * height;
  if (moments.kind === "laps") {
    picture.begin(block + 26);
    const text = (one, rank) => `rank ${rank}: ${one[0]}\n${seconds(one[4] - one[3])}, from ${seconds(one[3])}`;
    drawRows(picture, moments.measured, ranks, moments.measured_span || 1, moments.measured_span || 1, 0, height, (one) => lapColour(one[0]), text, () => "");
    drawTime(picture, moments.measured_span || 1, block + 4);
    return;
  }
  const planned = moments.planned;
  picture.begin((planned ? block + 30 : 0) + block + 46);
  // Both have the same scale, so that longer means slower.
  const span = Math.max(moments.measured_span, planned ? moments.planned_span : 0) || 1;
  const colour = (one) => KINDS[one[0]];
  const label = (one) => `${one[2]}`;
  const text = (one, rank) =>
    `rank ${rank}, stage ${one[1]}\n${NAMES[one[0]]} of micro-batch ${one[2]}\n${seconds(one[4] - one[3])}, from ${seconds(one[3])}`;
  let top = 18;
  if (planned) {
    picture.words(`planned: ${moments.schedule}, ${seconds(moments.planned_span)} for all passes`, 58, 8, { colour: ink() });
    picture.spot(58, 0, picture.width - 58, 16, () =>
      `as the schedule orders it, with the measured cost of each stage and no transfers\n${idle(moments.planned_bubble)}`);
    drawRows(picture, planned, ranks, moments.planned_span, span, top, height, colour, text, label);
    top += block + 30;
  }
  picture.words(`measured in step ${moments.step}: ${seconds(moments.measured_span)} for all passes`, 58, top - 10, { colour: ink() });
  picture.spot(58, top - 18, picture.width - 58, 16, () => idle(moments.measured_bubble));
  drawRows(picture, moments.measured, ranks, moments.measured_span, span, top, height, colour, text, label);
  drawTime(picture, span, top + block + 6);
}

// The bars show the share of bubble in the whole step. A step also takes time before and after the passes, so that share
// is smaller. The share of the passes appears only at the pointer, because readers thought that the two were one number.
const idle = (bubble) => `${percent(bubble)} of the time of these passes is bubble; the bars show its share of the whole step`;

function lapColour(state) {
  if (state === "forward") return PASSES.F;
  if (state === "backward") return PASSES.B;
  if (state.startsWith("wait ")) return COLOURS.exposed;
  return COLOURS[state] || COLOURS.other;
}
