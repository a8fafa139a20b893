// The dashboard: keeps the data of a run that Python sends, and draws it into all views of the widget.
//
// Messages from Python: {kind: "state", state}, {kind: "curve", epoch, keep, strategies, events_keep, events} with the
// new points as doubles, {kind: "beside", run, epoch, keep, strategies} with those of a second run, {kind: "step", step},
// {kind: "runs", runs, pinned, beside, steps}, {kind: "note", text}, {kind: "traced", busy, text}.
// Messages to Python: {ask: "all"}, {ask: "step", step}, {ask: "trace"}, {ask: "run", run}, {ask: "beside", run},
// {ask: "pin", steps}, {ask: "unpin"}. run: "" means the newest run, or no second run.

import { drawBars, drawMemory, memoryLegend, memoryNote } from "./charts.js";
import { Curves, LOSS, STEP, STRATEGY } from "./curves.js";
import { drawMoments, drawTraffic } from "./grids.js";
import { COLOURS, MEMORY, MEMORY_WORDS, PARTS, PASSES, Picture, SPOKEN, bytes, dark, familiesOf, lateWords, number, percent, seconds, shade } from "./paint.js";
import { axisNote, drawAxes, drawExperts, drawRanks } from "./rows.js";
import { healthRows } from "./health.js";

const COLUMNS = 7;
const DRAW_MS = 50;
const NARROW = 760;
const UNHEARD_MS = 3000;
const UNHEARD = "The kernel has not heard this: a cell keeps it. What trains with %%distributed --detach can be traced at once.";

const swatches = (colours, names) => Object.entries(colours).map(([key, colour]) => `<span><i style="background:${colour}"></i>${names[key] || key}</span>`).join("");

const LAYOUT = `
<div class="top"><b class="run"></b><label class="pickrun">run <select class="runs"></select></label><label class="pickrun">beside <select class="besides"></select></label><span class="chip strategy"></span><span class="chip stands"></span><span class="figures"></span></div>
<p class="reading"></p>
<section class="wide curve"><h3>Loss <small>and <span class="counted">tokens</span> a second · drag to zoom, double click for all</small>
  <span class="buttons along"><button data-along="step">step</button><button data-along="tokens">tokens</button><button data-along="time">time</button></span></h3>
  <div class="tools"><span class="lines"></span>
    <label title="as in TensorBoard: the weight of the values before; 0 shows the values themselves">smoothing <input type="range" min="0" max="0.99" step="0.01" value="0"><output></output></label>
    <span class="buttons"><button data-do="log" title="logarithmic axis of the loss (L)">log</button><button data-do="in" title="zoom in (+)">+</button><button data-do="out" title="zoom out (−)">−</button><button data-do="all" title="all steps (0)">all</button><button data-do="full" title="full screen (F)">full screen</button></span>
    <span class="buttons"><button class="pin" title="stay with this run, and with the steps in sight, also in the saved notebook">pin</button></span>
    <span class="buttons"><button data-do="png" title="save the picture">PNG</button><button data-do="svg" title="save the picture, for print">SVG</button><button data-do="csv" title="save the values in sight">CSV</button></span></div>
  <div class="curves"></div><div class="legend families"></div>
  <details class="marks" hidden><summary></summary><ul></ul></details></section>
<section><h3><span class="at">The step</span>, one bar per rank <small>measured</small> <small class="late"></small>
  <span class="buttons"><button class="trace" title="the next 3 steps of all ranks as one file for Perfetto">trace next 3 steps</button></span></h3><p class="traced"></p><div class="legend parts"></div><div class="ranks"></div></section>
<section><h3><span class="what"></span> <small class="whatnote"></small>
  <span class="buttons pick"><button data-pick="pipeline">pipeline</button><button data-pick="traffic">traffic</button></span></h3>
  <div class="legend whatlegend"></div><div class="pair"><div class="grid"></div><div class="axes"></div></div><div class="moments"></div></section>
<section class="wide expert"><h3>Tokens of each rank's experts <small class="expertnote"></small></h3><div class="experts"></div></section>
<section class="wide"><h3>Memory per rank <small class="memorynote"></small></h3><div class="legend memorylegend"></div><div class="memory"></div><div class="modules"></div><div class="health"></div></section>
<section class="wide about" hidden><h3>What ran</h3><table></table></section>
<p class="foot"></p>`;

export class Story {
  constructor() {
    Object.assign(this, { state: null, points: [], events: [], strategies: [], epoch: -1, step: null, note: "", traced: { busy: false, text: "" }, runs: null, beside: null, live: false, views: new Set(), due: 0 });
  }

  // Returns false if the message does not fit the data here. Then everything must be requested again.
  take(message, buffers) {
    let fits = true;
    if (message.kind === "state") this.state = message.state;
    if (message.kind === "note") this.note = message.text;
    if (message.kind === "step") this.step = message.step;
    if (message.kind === "traced") this.traced = message;
    if (message.kind === "runs") {
      this.runs = message;
      if (!message.beside) this.beside = null;
    }
    if (message.kind === "beside") {
      const before = this.beside?.run === message.run && this.beside.epoch === message.epoch ? this.beside.points : [];
      fits = message.keep <= before.length;
      if (fits) this.beside = { run: message.run, epoch: message.epoch, strategies: message.strategies, points: [...before.slice(0, message.keep), ...rowsOf(message, buffers)] };
    }
    if (message.kind === "curve") {
      fits = message.keep <= this.points.length && message.events_keep <= this.events.length
        && (message.keep + message.events_keep === 0 || message.epoch === this.epoch);
      if (fits) {
        this.points.length = message.keep;
        this.points.push(...rowsOf(message, buffers));
        this.events = [...this.events.slice(0, message.events_keep), ...message.events];
        Object.assign(this, { epoch: message.epoch, strategies: message.strategies });
      }
    }
    this.draw();
    return fits;
  }

  draw() {
    if (this.due) return;
    this.due = setTimeout(() => {
      this.due = 0;
      for (const view of this.views) view();
    }, DRAW_MS);
  }
}

function rowsOf(message, buffers) {
  const found = [];
  if (message.points) return message.points;
  const view = buffers && buffers[0];
  if (!view) return found;
  const bytes = view instanceof ArrayBuffer ? new Uint8Array(view) : new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  const values = new Float64Array(bytes.slice().buffer); // a copy is aligned for doubles
  for (let i = 0; i < values.length; i += COLUMNS) found.push(Array.from(values.subarray(i, i + COLUMNS)));
  return found;
}

// ask: sends {ask: ...} to Python, null without Python.
export function view(el, story, ask) {
  const root = document.createElement("div");
  root.className = "nbkit-dashboard";
  root.innerHTML = LAYOUT;
  el.append(root);
  const $ = (name) => root.querySelector(`.${name}`);
  const labels = { ranks: "step by rank", grid: "traffic from rank to rank", axes: "bytes by axis", moments: "pipeline, planned and measured", memory: "memory by rank", experts: "tokens by expert and rank" };
  const pictures = Object.fromEntries(Object.entries(labels).map(([name, label]) => [name, new Picture($(name), label)]));
  const chosen = { along: "step", pick: null, all: false };
  const curves = new Curves($("curves"), $("tools"), $("marks"));
  root.addEventListener("click", (event) => {
    const { along, pick } = event.target.dataset || {};
    if (along) chosen.along = along;
    if (pick) chosen.pick = pick;
    if (event.target.className === "trace" && ask) trace();
    if (event.target.className === "pin" && ask) ask(story.runs?.pinned ? { ask: "unpin" } : { ask: "pin", steps: curves.sight() });
    if (along || pick) draw();
  });
  for (const [name, what] of [["runs", "run"], ["besides", "beside"]]) $(name).addEventListener("change", (event) => ask({ ask: what, run: event.target.value }));
  for (const kind of ["keydown", "keyup"]) {
    root.addEventListener(kind, (event) => {
      // In a notebook, Enter with Shift, Ctrl or Alt runs a cell. It must not press the last clicked button again.
      const other = event.shiftKey || event.ctrlKey || event.altKey || event.metaKey || event.repeat;
      if ((event.key === "Enter" || event.key === " ") && event.target.tagName === "BUTTON" && other) event.preventDefault();
    });
  }
  const trace = () => {
    const before = story.traced;
    ask({ ask: "trace" });
    setTimeout(() => {
      if (story.traced === before) story.take({ kind: "traced", busy: false, text: UNHEARD });
    }, UNHEARD_MS);
  };
  const press = (name, key, value) => {
    for (const button of $(name).querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset[key] === value));
  };

  function draw() {
    if (!root.isConnected || root.clientWidth === 0) return;
    root.classList.toggle("dark", dark());
    root.classList.toggle("narrow", root.clientWidth < NARROW); // the width of the pane, not of the window
    const { state, points, step } = story;
    const last = points[points.length - 1];
    const unit = state?.unit || "tokens";
    $("counted").textContent = unit;
    $("along").querySelector("[data-along=tokens]").textContent = unit;
    $("run").textContent = state?.run || "";
    $("strategy").textContent = last ? story.strategies[last[STRATEGY]] || "" : step?.strategy || "";
    $("stands").textContent = state && state.run ? `${state.world} ranks · ${state.stands}` : "";
    $("stands").classList.toggle("on", state?.stands === "running");
    $("figures").textContent = last ? [`step ${number(last[STEP])}${state?.goal ? ` of ${number(state.goal)}` : ""}`, state?.left,
      Number.isFinite(last[LOSS]) ? `loss ${number(last[LOSS])}` : "", state?.rate ? `${number(state.rate)} ${unit}/s` : ""].filter(Boolean).join(" · ") : "";
    $("reading").textContent = step?.reading || (last ? "" : "No finished step yet: this moves as soon as a Trainer, or a loop over nbkit.prepare, trains.");
    press("along", "along", chosen.along);
    $("families").innerHTML = swatches(familiesOf(story.strategies), {});
    curves.draw({ points, events: story.events, strategies: story.strategies, unit, along: chosen.along, beside: story.beside, name: state?.run || "", steps: story.runs?.steps ?? null });
    drawChoice(last);
    for (const section of root.querySelectorAll("section:not(:first-of-type, .about)")) section.hidden = !step?.ranks?.length;
    if (step?.ranks?.length) drawStep(step);
    $("trace").hidden = !story.live || state?.stands !== "running";
    $("trace").disabled = story.traced.busy;
    $("traced").textContent = story.traced.text;
    $("foot").textContent = story.note || (step?.ranks?.length ? foot(step) : "");
  }

  function drawChoice(last) {
    const { runs } = story;
    $("pin").hidden = !ask || !last;
    $("pin").setAttribute("aria-pressed", String(Boolean(runs?.pinned)));
    $("pin").textContent = runs?.steps ? `pinned: steps ${number(runs.steps[0])} to ${number(runs.steps[1])}` : runs?.pinned ? "pinned" : "pin";
    for (const label of root.querySelectorAll(".pickrun")) label.hidden = !ask || (runs?.runs.length || 0) < 2;
    if (!runs || !ask) return;
    fill($("runs"), [["", "the newest"], ...runs.runs.map((name) => [name, name])], runs.pinned);
    const shown = story.state?.run;
    fill($("besides"), [["", "none"], ...runs.runs.filter((name) => name !== shown).map((name) => [name, name])], runs.beside);
  }

  function drawStep(step) {
    const there = PARTS.filter((_, i) => step.ranks.some((row) => row[2 + i] > 0)); // no legend for parts that are not drawn
    const whole = step.ranks.reduce((sum, row) => sum + row[1], 0); // for the shares of all ranks together, as in the sentence above
    const share = (part) => step.ranks.reduce((sum, row) => sum + row[2 + PARTS.indexOf(part)], 0) / whole;
    $("parts").innerHTML = swatches(Object.fromEntries(there.map((part) => [part, COLOURS[part]])), Object.fromEntries(there.map((part) => [part, `${SPOKEN[part]} ${Math.round(100 * share(part))} %`])));
    $("at").textContent = step.of;
    $("late").textContent = step.late ? `· rank ${step.late.rank} is late: ${lateWords(step.late)}` : "";
    const turn = step.ranks.length > 16 ? () => { chosen.all = !chosen.all; draw(); } : null;
    if (chosen.all && turn) drawBars(pictures.ranks, step.ranks, step.late);
    else drawRanks(pictures.ranks, step.ranks, step.late, turn);
    pictures.ranks.canvas.ondblclick = turn;
    const pipeline = step.moments?.kind === "pipeline";
    const shown = pipeline ? chosen.pick || "pipeline" : "traffic";
    $("pick").hidden = !pipeline;
    press("pick", "pick", shown);
    $("pair").hidden = shown === "pipeline";
    $("moments").hidden = shown !== "pipeline";
    if (shown === "pipeline") {
      $("what").textContent = "The pipeline, planned above measured";
      $("whatnote").textContent = `step ${step.moments.step}, a typical step${step.moments.replicas > 1 ? `; the first of ${step.moments.replicas} pipelines` : ""}`;
      const passes = Object.entries(PASSES).filter(([pass]) => pass !== "W" || step.moments.measured.some((row) => row.some(([kind]) => kind === "W")));
      $("whatlegend").innerHTML = swatches(Object.fromEntries(passes), { F: "forward", B: "backward", W: "weight gradients" }) + "<span>the number is the micro-batch</span>";
      drawMoments(pictures.moments, step.moments);
    } else {
      $("what").textContent = "Who sends to whom";
      $("whatnote").textContent = `and bytes per axis, one step, all ranks (${axisNote(step)})`;
      $("whatlegend").innerHTML = swatches({ a: shade(1, "blue"), b: shade(1, "orange") }, { a: "messages: exact", b: "collectives: modelled as rings" }) + (new Set(step.hosts).size > 1 ? `<span>lines: borders of nodes${betweenNodes(step.traffic?.nodes)}</span>` : "");
      $("pair").classList.toggle("tall", (step.traffic?.world || 0) > 16);
      if (step.traffic) drawTraffic(pictures.grid, step.traffic, step.hosts);
      drawAxes(pictures.axes, step.table || []);
    }
    $("expert").hidden = !step.experts;
    if (step.experts) {
      const some = drawExperts(pictures.experts, step.experts);
      $("expertnote").textContent = `measured in this step, all layers${some}; the line is the mean of all ranks; below it the most / the mean, in each step`;
    }
    const memory = step.memory || [];
    $("memorynote").textContent = memoryNote(memory, step.strategy);
    drawMemory(pictures.memory, memory, (rank) => { chosen.rank = rank; draw(); });
    drawModules(memory);
    $("health").hidden = !step.health;
    if (step.health) $("health").replaceChildren(...healthRows(step.health));
  }

  // The largest parts of the memory peak of one rank: the clicked one, or the fullest.
  function drawModules(memory) {
    const { colours, words, tick } = memoryLegend(memory);
    $("memorylegend").innerHTML = swatches(colours, words) + (tick ? '<span><b class="tick"></b>formula, at rest</span>' : "");
    const told = memory.filter((row) => row.modules?.length);
    const row = told.find((one) => one.rank === chosen.rank) ?? [...told].sort((a, b) => b.peak - a.peak)[0];
    $("modules").hidden = !row;
    if (!row) return;
    const shown = JSON.stringify([row.rank, row.step, row.modules]);
    if ($("modules").dataset.shown === shown) return;
    $("modules").dataset.shown = shown;
    const title = document.createElement("p");
    title.textContent = `The peak of rank ${row.rank}, ${bytes(row.peak)}, by module${told.length > 1 ? " (click a bar for another rank)" : ""}`;
    const table = document.createElement("table");
    for (const [kind, module, size] of row.modules) {
      const line = table.insertRow();
      const swatch = document.createElement("i");
      swatch.style.background = MEMORY[kind];
      line.insertCell().append(swatch, module || "the whole model");
      line.insertCell().textContent = MEMORY_WORDS[kind] ?? kind;
      line.insertCell().textContent = bytes(size);
      line.insertCell().textContent = percent(size / row.peak);
    }
    const rest = row.peak - row.modules.reduce((sum, [, , size]) => sum + size, 0);
    if (rest > 0.005 * row.peak) {
      const line = table.insertRow();
      for (const text of ["all other modules", "", bytes(rest), percent(rest / row.peak)]) line.insertCell().textContent = text;
    }
    $("modules").replaceChildren(title, table);
  }

  const redraw = () => draw();
  const theme = new MutationObserver(redraw);
  for (const node of [document.body, document.documentElement]) theme.observe(node, { attributes: true, attributeFilter: ["class", "data-jp-theme-light", "data-theme"] });
  const system = window.matchMedia("(prefers-color-scheme: dark)"); // if the page has no theme of its own
  system.addEventListener("change", redraw);
  const size = new ResizeObserver(redraw);
  size.observe(root);
  story.views.add(draw);
  draw();
  if (ask && !story.points.length) ask({ ask: "all" });
  return () => {
    story.views.delete(draw);
    curves.end();
    theme.disconnect();
    system.removeEventListener("change", redraw);
    size.disconnect();
  };
}

// Fills a select with options [value, text]. A select that the user has open keeps its value.
function fill(select, options, value) {
  const words = options.map(([one]) => one).join("\n");
  if (select.dataset.words !== words) {
    select.dataset.words = words;
    select.replaceChildren(...options.map(([one, text]) => new Option(text, one)));
  }
  if (document.activeElement !== select) select.value = value;
}

/** Returns the bytes of a step between and within nodes, and the predicted bytes, as text. */
function betweenNodes(nodes) {
  if (!nodes) return "";
  const formula = nodes.formula === null ? "" : `, ${bytes(nodes.formula)} by the formula`;
  return `; ${bytes(nodes.between)} between them${formula}, ${bytes(nodes.within)} within`;
}

function foot(step) {
  const lost = step.lost ? ` · ${step.lost} calls were lost from the record` : "";
  const missing = step.missing?.length ? ` · nothing of rank ${step.missing.join(", ")}` : "";
  return `Measured, unless modelled, planned or formula is said. Measuring itself took ${seconds(step.own)}${step.seconds ? ` (${percent(step.own / step.seconds)} of the step)` : ""} on each rank${lost}${missing}.`;
}

// One story per widget, for all its views. The map uses a key, because each call gets another proxy of the model.
const stories = new Map();

export const widget = {
  initialize({ model }) {
    const story = new Story();
    story.live = model.get("live");
    stories.set(model.get("key"), story);
    const ask = (what) => model.send(what);
    model.on("msg:custom", (message, buffers) => {
      if (!story.take(message, buffers)) ask({ ask: "all" });
    });
    ask({ ask: "all" });
    return () => stories.delete(model.get("key"));
  },
  render({ model, el }) {
    return view(el, stories.get(model.get("key")), (what) => model.send(what));
  },
};

// Draws a saved page, which has all data.
export function show(el, data) {
  const story = new Story();
  Object.assign(story, { state: data.state, points: data.points.map((point) => point.map((value) => value ?? NaN)), events: data.events, strategies: data.strategies, step: data.step });
  view(el, story, null);
  const about = el.querySelector(".about");
  about.hidden = !data.about?.length;
  for (const [name, words] of data.about ?? []) {
    const line = about.querySelector("table").insertRow();
    line.insertCell().textContent = name;
    line.insertCell().textContent = words;
  }
  return story;
}
