// What is read as text in rows and columns.

import { drawRun } from "./charts.js";
import { PARTS, Picture, SPOKEN, bytes, number, percent, seconds } from "./paint.js";

const $ = (id) => document.getElementById(id);

export function fill(select, names, chosen) {
  const shown = [...select.options].map((option) => option.value).join("\n");
  if (shown !== names.join("\n")) select.replaceChildren(...names.map((name) => new Option(name === "." ? "this directory" : name || "none", name)));
  if (chosen !== null && document.activeElement !== select) select.value = chosen;
}

function rows(table, head, body) {
  const cells = (values, tag) => values.map((value) => {
    const cell = document.createElement(tag);
    if (value instanceof Node) cell.append(value); else cell.textContent = value;
    return cell;
  });
  const line = (values, tag) => {
    const made = document.createElement("tr");
    made.append(...cells(values, tag));
    return made;
  };
  table.replaceChildren(line(head, "th"), ...body.map((values) => line(values, "td")));
}

const perSecond = (value) => (value === null ? "–" : `${bytes(value)}/s`);

export function drawTable(step) {
  const sums = step.table || [];
  const waits = sums.filter((row) => row.op === "batch");
  rows($("table"), ["operation", "axis", "calls of a rank", "sent, measured", "sent by formula", "time of a call", "algbw", "busbw", "overlapped"],
    sums.filter((row) => row.op !== "batch").map((row) => [
      row.op.replaceAll("_", " "), row.axis, number(row.calls), row.op === "recv" ? `${bytes(row.sent)} received` : bytes(row.sent),
      row.formula_sent === null ? "–" : `${bytes(row.formula_sent)} (${percent(row.formula_sent / row.sent)})`,
      seconds(row.seconds), perSecond(row.algbw), perSecond(row.busbw), percent(row.overlap)]));
  $("tablenote").textContent = [
    sums.length ? "" : "This step sent nothing.",
    step.formula ? "" : "No formula is known for this run.",
    waits.length ? `Messages issued together are waited for together: ${seconds(waits[0].seconds)} each time.` : "",
    step.sent ? `The busiest rank sends ${bytes(step.sent)}.` : "",
    "Sent: by all ranks; collectives as in rings, as in the picture of who sends to whom. – was not timed or is not known. Times contain the waiting for peers that came late.",
  ].filter(Boolean).join(" ");
}

export function drawLateness({ of, rows: those }) {
  $("latenote").textContent = of ? `in the newest ${of} steps, by medians of five` : "";
  rows($("lateness"), ["rank", "late in", "what takes it longer"], those.map((one) => [
    `${one.rank}`, `${one.steps} of ${of} steps`, SPOKEN[one.cause] || one.cause]));
  if (!those.length) $("lateness").textContent = of ? "Nobody: no rank makes the others wait 5 % of a step." : "Not known: no step of this strategy has been compared yet.";
}

// choose: called with the name of the run that is clicked.
export function drawRuns(runs, chosen, choose) {
  const top = Math.max(...runs.map((run) => run.seconds || 0), 1e-9);
  const table = $("runs");
  if (table.contains(document.activeElement)) return;
  const bars = [];
  rows(table, ["run", "strategy", "ranks", "up to step", "loss", "rate", "time of a step", "sent a step", "where it goes"], runs.slice(0, 20).map((run) => {
    const link = document.createElement("button");
    link.className = "link";
    link.textContent = run.name;
    link.onclick = () => choose(run.name);
    const host = document.createElement("div");
    host.className = "bar";
    bars.push([host, run]);
    return [link, run.strategy, run.ranks, run.step, number(run.loss), run.rate === null ? "–" : `${number(run.rate)} ${run.unit}/s`, seconds(run.seconds), bytes(run.sent), host];
  }));
  for (const [host, run] of bars) if (run.parts.length === PARTS.length) drawRun(new Picture(host, "step breakdown"), run, top);
  for (const line of table.rows) line.classList.toggle("chosen", line.cells[0]?.textContent === chosen);
}
