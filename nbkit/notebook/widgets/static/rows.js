// One bar per rank, of many ranks the slowest, the one in the middle and the rest; the bytes of each axis; and the tokens
// of experts.

import { COLOURS, PARTS, SPOKEN, alarm, bytes, faint, ink, lateWords, number, paper, percent, rule, seconds, shade, ticks } from "./paint.js";

const MANY = 16;

// ranks: [rank, seconds, ...parts] of all. Returns rows {name, values, ranks} to draw: all of them, or three.
export function folded(ranks, late) {
  if (ranks.length <= MANY) return ranks.map((values) => ({ name: `rank ${values[0]}`, values: values.slice(1), ranks: [values[0]] }));
  // The slow one is who has most to do, not whose step is longest: a step ends for all at about the same time.
  const own = (values) => ["compute", "data", "optimizer", "other"].reduce((sum, part) => sum + values[2 + PARTS.indexOf(part)], 0);
  const sorted = [...ranks].sort((a, b) => own(a) - own(b));
  const slow = (late && ranks.find((values) => values[0] === late.rank)) || sorted[sorted.length - 1];
  const others = sorted.filter((values) => values !== slow);
  const middle = others[others.length >> 1];
  const rest = others.filter((values) => values !== middle);
  const mean = rest[0].slice(1).map((_, i) => rest.reduce((sum, values) => sum + values[i + 1], 0) / rest.length);
  return [
    { name: `slowest: ${slow[0]}`, values: slow.slice(1), ranks: [slow[0]] },
    { name: `median: ${middle[0]}`, values: middle.slice(1), ranks: [middle[0]] },
    { name: `other ${rest.length}`, values: mean, ranks: rest.map((values) => values[0]) },
  ];
}

export function drawRanks(picture, ranks, late, unfold) {
  const rows = folded(ranks, late);
  const height = 26;
  const left = ranks.length > MANY ? 84 : 58;
  const bottom = rows.length * height + 6;
  const width = picture.begin(bottom + 24);
  Object.assign(picture.canvas.dataset, { rows: rows.length, ranks: ranks.length });
  if (!rows.length) return;
  const top = Math.max(...rows.map((row) => row.values[0]), 1e-9);
  const x = (value) => left + ((width - 72 - left) * value) / top;
  for (const value of ticks(top, 4)) {
    if (value > top * 1.02) continue;
    picture.line(x(value), 0, x(value), bottom, rule());
    picture.words(seconds(value), x(value), bottom + 12, { align: "center" });
  }
  picture.words("time", left - 14, bottom + 12, { align: "right" });
  rows.forEach((row, i) => {
    const y = i * height + 4;
    const slow = late !== null && late !== undefined && row.ranks.length === 1 && row.ranks[0] === late.rank;
    picture.words(row.name, left - 6, y + height / 2 - 2, { align: "right", colour: slow ? alarm() : ink(), bold: slow });
    let at = 0;
    PARTS.forEach((part, p) => {
      picture.box(x(at), y, x(at + row.values[1 + p]) - x(at), height - 6, COLOURS[part]);
      at += row.values[1 + p];
    });
    picture.words(seconds(row.values[0]), x(at) + 6, y + height / 2 - 2);
    const text = () => [
      row.ranks.length > 1 ? `mean of ${row.ranks.length} ranks: ${seconds(row.values[0])}` : `rank ${row.ranks[0]}: ${seconds(row.values[0])}`,
      ...PARTS.map((part, p) => [part, row.values[1 + p]]).filter(([, value]) => value > 0)
        .map(([part, value]) => `  ${SPOKEN[part]}: ${seconds(value)} (${percent(value / row.values[0])})`),
      slow ? `late: ${lateWords(late)}` : "",
      unfold ? "click: all ranks" : "",
    ].filter(Boolean).join("\n");
    picture.spot(0, y - 2, width, height, text, unfold);
  });
}

// table: of a step, rows of operations. Per axis the bytes that were measured, a tick where the formula says.
export function drawAxes(picture, table) {
  const axes = new Map();
  for (const row of table) {
    if (row.op === "batch" || row.op === "recv" || !row.sent) continue;
    const own = axes.get(row.axis) || { bytes: 0, formula: null, rows: [] };
    own.bytes += row.sent;
    if (row.formula_sent !== null) own.formula = (own.formula || 0) + row.formula_sent;
    own.rows.push(row);
    axes.set(row.axis, own);
  }
  const rows = [...axes].sort((a, b) => b[1].bytes - a[1].bytes);
  const height = 34;
  const width = picture.begin(Math.max(rows.length * height + 4, 40));
  picture.canvas.dataset.rows = rows.length;
  if (!rows.length) picture.words("this step sent nothing", 8, 20);
  const top = Math.max(...rows.map(([, own]) => Math.max(own.bytes, own.formula || 0)), 1);
  const left = 66;
  const x = (value) => left + ((width - 80 - left) * value) / top;
  rows.forEach(([axis, own], i) => {
    const y = i * height + 4;
    picture.words(axis, left - 8, y + 11, { align: "right", colour: ink(), bold: true });
    picture.box(left, y, Math.max(x(own.bytes) - left, 1), 20, faint());
    picture.words(bytes(own.bytes), Math.max(x(own.bytes), own.formula === null ? 0 : x(own.formula)) + 6, y + 11);
    if (own.formula !== null) {
      picture.line(x(own.formula), y - 4, x(own.formula), y + 24, paper(), { width: 5 });
      picture.line(x(own.formula), y - 4, x(own.formula), y + 24, ink(), { width: 2 });
    }
    const text = () => [
      `${axis}: ${bytes(own.bytes)} a step, sent by all ranks (measured; collectives as in rings)`,
      own.formula === null ? "no formula is known for this" : `${bytes(own.formula)} by formula`,
      ...own.rows.map((row) => `  ${row.op.replaceAll("_", " ")}: ${bytes(row.sent)} in ${+row.calls.toPrecision(3)} calls of a rank`
        + (row.seconds ? `, ${seconds(row.seconds)} each` : "") + (row.busbw ? `, bus ${bytes(row.busbw)}/s` : "")),
    ].join("\n");
    picture.spot(0, y - 4, width, height, text);
  });
}

// experts: {ranks: [rank, [[expert, tokens], ...]], imbalance: [[step, most / mean of each layer], ...]}. A bar per
// rank, of many ranks those with most tokens, with a piece per expert; below it the imbalance of all steps. Returns
// which ranks, in words.
export function drawExperts(picture, { ranks, imbalance }) {
  const sum = ([, experts]) => experts.reduce((all, [, tokens]) => all + tokens, 0);
  const rows = ranks.length > MANY ? [...ranks].sort((a, b) => sum(b) - sum(a)).slice(0, MANY) : ranks;
  const height = 26;
  const left = 58;
  const under = rows.length * height + 16; // where the imbalance begins
  const curve = imbalance.length > 1 ? 84 : 0;
  const width = picture.begin(under + curve + 8);
  Object.assign(picture.canvas.dataset, { rows: rows.length, steps: imbalance.length });
  const mean = ranks.reduce((all, row) => all + sum(row), 0) / ranks.length;
  const top = Math.max(...rows.map(sum), mean, 1);
  const x = (value) => left + ((width - 72 - left) * value) / top;
  rows.forEach(([rank, experts], i) => {
    const y = i * height + 4;
    const tokens = sum(rows[i]);
    picture.words(`rank ${rank}`, left - 6, y + height / 2 - 2, { align: "right", colour: ink() });
    let at = 0;
    experts.forEach(([, own], n) => {
      picture.box(x(at), y, Math.max(x(at + own) - x(at) - 1, 0), height - 6, shade(n % 2 ? 0.55 : 0.85, "blue"));
      at += own;
    });
    picture.words(number(tokens), x(tokens) + 6, y + height / 2 - 2);
    const text = () => [`rank ${rank}: ${number(tokens)} tokens, ${percent(tokens / (mean || 1))} of the mean`, ...experts.map(([n, own]) => `  expert ${n}: ${number(own)}`)].join("\n");
    picture.spot(0, y - 2, width, height, text);
  });
  picture.line(x(mean), 0, x(mean), rows.length * height + 4, ink(), { width: 2 });
  const some = rows.length < ranks.length ? `; the ${rows.length} of ${ranks.length} ranks with most` : "";
  if (!curve) return some;
  const [first, last] = [imbalance[0][0], imbalance.at(-1)[0]];
  const most = Math.max(...imbalance.map(([, uneven]) => uneven), 1.1);
  const across = (step) => left + ((width - 72 - left) * (step - first)) / (last - first || 1);
  const up = (uneven) => under + curve - 20 - ((curve - 30) * (uneven - 1)) / (most - 1);
  for (const value of [1, most]) {
    picture.line(left, up(value), width - 72, up(value), rule());
    picture.words(value.toFixed(2), left - 6, up(value), { align: "right" });
  }
  imbalance.slice(1).forEach(([step, uneven], i) => {
    picture.line(across(imbalance[i][0]), up(imbalance[i][1]), across(step), up(uneven), ink(), { width: 1.5 });
  });
  picture.words(`step ${number(first)}`, left, under + curve - 6);
  picture.words(number(last), width - 72, under + curve - 6, { align: "right" });
  picture.words(imbalance.at(-1)[1].toFixed(2), width - 66, up(imbalance.at(-1)[1]), { colour: ink(), bold: true });
  picture.spot(left, under, width - left, curve, () => "most tokens of a rank in each layer / mean of the ranks, in each step");
  return some;
}

export function axisNote({ table = [], sent }) {
  const formula = table.some((row) => row.formula_bytes !== null) ? "measured; tick: by formula" : "measured; no formula known";
  return sent ? `${formula}; the busiest rank sends ${bytes(sent)}` : formula;
}
