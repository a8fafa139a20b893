// Tables.

import { drawRun } from "./charts.js";
import { PARTS, Picture, SPOKEN, bytes, number, percent, seconds } from "./paint.js";

const $ = (id) => document.getElementById(id);

export function fill(select, names, chosen) {
  const shown = [...select.options].map((option) => option.value).join("\n");
  if (shown !== names.join("\n")) select.replaceChildren(...names.map((name) => new Option(name === "." ? "this directory" : name || "none", name)));
  if (chosen !== null && document.activeElement !== select) select.value = chosen;
}

const WORDS = new Set(["operation", "axis", "run", "strategy", "rank", "what takes it longer", "where it goes"]); // other columns hold numbers

function rows(table, head, body) {
  const cells = (values, tag) => values.map((value, i) => {
    const cell = document.createElement(tag);
    if (!WORDS.has(head[i])) cell.className = "number";
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
    "Sent: by all ranks; collectives as in rings, as in the picture of who sends to whom. algbw: bytes of a call by its time; busbw: what each link carries of them, as nccl-tests count. – was not timed or is not known. Times contain the waiting for peers that came late.",
  ].filter(Boolean).join(" ");
}

export function drawLateness({ of, rows: those }) {
  $("latenote").textContent = of ? `in the newest ${of} steps, by medians of five` : "";
  rows($("lateness"), ["rank", "late in", "what takes it longer"], those.map((one) => [
    `${one.rank}`, `${one.steps} of ${of} steps`, SPOKEN[one.cause] || one.cause]));
  if (!those.length) $("lateness").textContent = of ? "Nobody: no rank makes the others wait 5 % of a step." : "Not known: no step of this strategy has been compared yet.";
}

let bars = []; // bars in the rows of the table of runs

// choose: called with the name of a clicked run. While the runs are the same, only figures change, because a row that is
// replaced under the pointer loses its click.
export function drawRuns(runs, chosen, choose) {
  const shown = runs.slice(0, 20);
  const top = Math.max(...runs.map((run) => run.seconds || 0), 1e-9);
  const figures = (run) => [run.strategy, run.ranks, run.step, number(run.loss), run.rate === null ? "–" : `${number(run.rate)} ${run.unit}/s`, seconds(run.seconds), bytes(run.sent)];
  const table = $("runs");
  const names = JSON.stringify(shown.map((run) => run.name));
  if (table.dataset.names !== names) {
    table.dataset.names = names;
    const hosts = shown.map(() => document.createElement("div"));
    rows(table, ["run", "strategy", "ranks", "up to step", "loss", "rate", "time of a step", "sent a step", "where it goes"], shown.map((run, i) => {
      const link = document.createElement("button");
      link.className = "link";
      link.textContent = run.name;
      link.onclick = () => choose(run.name);
      hosts[i].className = "bar";
      return [link, ...figures(run), hosts[i]];
    }));
    bars = hosts.map((host) => new Picture(host, "step breakdown"));
  }
  shown.forEach((run, i) => {
    const { cells } = table.rows[i + 1];
    figures(run).forEach((value, k) => { cells[k + 1].textContent = value; });
    if (run.parts.length === PARTS.length) drawRun(bars[i], run, top);
  });
  for (const line of table.rows) line.classList.toggle("chosen", line.cells[0]?.textContent === chosen);
}
