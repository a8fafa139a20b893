// The tab "Communication": requests new data each second, and draws the run and one of its steps.

import { drawBars, drawMemory, drawTimeline, memoryLegend, memoryNote, signWords } from "./charts.js";
import { drawMoments, drawTraffic } from "./grids.js";
import { healthRows } from "./health.js";
import { COLOURS, PARTS, PASSES, Picture, SPOKEN, familiesOf, lateWords, percent, seconds, shade } from "./paint.js";
import { drawLateness, drawRuns, drawTable, fill } from "./tables.js";

const EVERY_MS = 1000;
const RUNS_EVERY = 3; // polls
const WINDOW = 200;

const state = {
  run: null, runs: [], points: [], events: [], epoch: -1, newest: 0, world: 0, lateness: { of: 0, rows: [] },
  other: { run: "", points: [], epoch: -1 }, step: null, follow: true, only: 0, replica: 0, polls: 0,
};
const $ = (id) => document.getElementById(id);
let pictures = {};

const LAYOUT = `
<header>
  <label>Run <select id="run"></select></label>
  <label>compare with <select id="other"></select></label>
  <span id="strategy" class="chip"></span><span id="live" class="chip"></span>
  <span class="grow"></span>
  <span class="picker">
    <button id="back" title="one step back">◀</button>
    <label>Step <input id="step" type="number" min="1" size="8"></label>
    <button id="forth" title="one step on">▶</button>
    <button id="follow" aria-pressed="true">Follow newest</button>
  </span>
</header>
<p id="reading"></p>
<p id="empty" hidden></p>
<main id="main" hidden>
  <section class="wide"><h2>Where the time of a step goes <small>mean over ranks · click a step to see it below</small>
    <span class="buttons"><button id="whole" aria-pressed="true">whole run</button><button id="recent" aria-pressed="false">newest ${WINDOW}</button></span></h2>
    <div class="legend"><span id="parts"></span><span id="laid" hidden><b class="stroke"></b><span id="laidname"></span></span></div><div id="timeline"></div><div class="legend" id="families"></div></section>
  <section><h2><span id="at">Step</span>, one bar per rank <small>measured</small></h2><p class="note" id="late"></p><div id="bars"></div></section>
  <section><h2>Who sends to whom <small id="trafficof"></small></h2>
    <div class="legend"><i id="exact"></i>messages: exact <i id="modelled"></i>collectives: <b>modelled</b> as rings<span id="nodes"></span></div><div id="traffic"></div></section>
  <section class="wide"><h2>Communication by operation and axis <small id="tableof"></small></h2><div class="scroll"><table id="table"></table></div><p class="note" id="tablenote"></p></section>
  <section class="wide"><h2 id="momentshead"></h2><div class="legend" id="momentslegend"></div><div id="moments"></div></section>
  <section><h2>Memory per rank <small id="memorynote"></small></h2><div class="legend" id="memorylegend"></div><div id="memory"></div><div id="health" hidden></div></section>
  <section><h2>Who is late <small id="latenote"></small></h2><table id="lateness"></table></section>
  <section class="wide"><h2>Runs <small>medians of 20 steps up to the one that is named, and its loss, read every few seconds; sent by the busiest rank · click one to open it</small></h2><div class="scroll"><table id="runs"></table></div></section>
</main>
<footer id="footer"></footer>`;

const swatches = (colours, names) => Object.entries(colours).map(([key, colour]) => `<i style="background:${colour}"></i>${names[key] || key} `).join("");

export async function render() {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = "./static/index.css";
  document.head.append(style);
  await new Promise((done) => { style.onload = done; style.onerror = done; });
  document.body.innerHTML = LAYOUT;
  for (const [id, label] of Object.entries({ timeline: "step breakdown over time", bars: "step breakdown per rank", traffic: "traffic from rank to rank", moments: "moments of a step", memory: "memory per rank" })) {
    pictures[id] = new Picture($(id), label);
  }
  listen();
  watchTheme();
  keepNeighboursLive();
  for (;;) {
    await poll();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

function listen() {
  $("run").onchange = () => choose($("run").value);
  $("other").onchange = () => { state.other = { run: $("other").value, points: [], epoch: -1 }; poll(); };
  $("step").onchange = () => pick(Number($("step").value));
  $("back").onclick = () => pick((state.step?.asked ?? state.newest) - 1);
  $("forth").onclick = () => pick((state.step?.asked ?? state.newest) + 1);
  $("follow").onclick = () => { state.follow = !state.follow; show(); poll(); };
  $("whole").onclick = () => { state.only = 0; draw(); };
  $("recent").onclick = () => { state.only = WINDOW; draw(); };
  window.addEventListener("resize", draw);
}

// TensorBoard's own setting if there is one, else the browser's.
function watchTheme() {
  let above = null;
  try { above = window.parent !== window ? window.parent.document.body : null; } catch { above = null; }
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  const set = () => {
    document.body.classList.toggle("dark", above ? above.classList.contains("dark-mode") : wish.matches);
    draw();
  };
  if (above) new MutationObserver(set).observe(above, { attributes: true, attributeFilter: ["class"] });
  wish.addEventListener("change", set);
  set();
}

// A TensorBoard that nbkit did not start has this tab, but not the script that refreshes the other tabs.
function keepNeighboursLive() {
  try {
    const page = window.parent.document;
    if (window.parent === window || page.querySelector("script[src$='communication/static/live.js']")) return;
    const script = page.createElement("script");
    script.type = "module";
    script.src = "data/plugin/communication/static/live.js";
    page.body.append(script);
  } catch {
    // The surrounding page has another origin.
  }
}

async function ask(what, values = {}) {
  const answer = await fetch(`./${what}?${new URLSearchParams(values)}`);
  if (!answer.ok) throw new Error(`${what}: ${answer.status}`);
  return answer.json();
}

function choose(name) {
  Object.assign(state, { run: name, points: [], events: [], epoch: -1, newest: 0, step: null, follow: true, replica: 0 });
  if (state.other.run === name) state.other = { run: "", points: [], epoch: -1 };
  poll();
}

function pick(step) {
  if (!(step >= 1)) return;
  state.follow = false;
  fetchStep(Math.min(step, state.newest)).then(draw);
}

let asking = false;

async function poll() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    if (state.polls % RUNS_EVERY === 0) state.runs = (await ask("runs")).runs;
    state.polls += 1;
    const name = state.run ?? state.runs[0]?.name;
    if (name !== undefined) {
      state.run = name;
      const grown = await ask("poll", { run: name, epoch: state.epoch, points: state.points.length, events: state.events.length });
      if (state.run !== name) return;
      state.points = [...state.points.slice(0, grown.keep), ...grown.points];
      state.events = [...state.events.slice(0, grown.events_keep), ...grown.events];
      Object.assign(state, { epoch: grown.epoch, newest: grown.newest, world: grown.world, lateness: grown.lateness });
      await pollOther();
      if (state.newest && (state.step === null || (state.follow && state.step.asked !== state.newest))) await fetchStep("newest");
    }
    $("footer").classList.remove("gone");
    draw();
  } catch (error) {
    $("footer").classList.add("gone");
    $("footer").textContent = `No answer from TensorBoard (${error.message}); trying again.`;
  } finally {
    asking = false;
  }
}

async function pollOther() {
  const { other } = state;
  if (!other.run) return;
  const grown = await ask("poll", { run: other.run, epoch: other.epoch, points: other.points.length, events: 0 });
  if (state.other === other) state.other = { run: other.run, points: [...other.points.slice(0, grown.keep), ...grown.points], epoch: grown.epoch };
}

async function fetchStep(step) {
  const name = state.run;
  const found = await ask("step", { run: name, step, replica: state.replica });
  if (state.run === name) state.step = found;
}

function draw() {
  if (!pictures.timeline || document.body.clientWidth === 0) return; // another tab is shown
  show();
  const nothing = state.points.length === 0;
  $("main").hidden = nothing;
  $("empty").hidden = !nothing;
  $("empty").textContent = state.run === null
    ? "No run with records yet. They appear here by themselves as soon as a Trainer or nbkit.prepare trains into this log directory."
    : `${state.run} has no finished step yet.`;
  if (nothing) return;
  const there = PARTS.filter((_, i) => state.points.some((point) => point[3 + i] > 0)); // no legend for parts that are not drawn
  $("parts").innerHTML = swatches(Object.fromEntries(there.map((part) => [part, COLOURS[part]])), SPOKEN);
  $("families").innerHTML = `strategy: ${swatches(familiesOf(state.points.map((point) => point[point.length - 1])), {})}`;
  $("families").append(` ${signWords(state.events)}`);
  drawTimeline(pictures.timeline, state.points, state.events, { window: state.only, chosen: state.step?.asked ?? 0, other: state.other, unit: state.runs.find((run) => run.name === state.run)?.unit ?? "tokens", pick });
  drawRuns(state.runs, state.run, choose);
  drawLateness(state.lateness);
  const step = state.step;
  if (!step?.ranks) return;
  drawBars(pictures.bars, step.ranks, step.late);
  if (step.traffic) drawTraffic(pictures.traffic, step.traffic, step.hosts);
  $("exact").style.background = shade(1, "blue"); // depends on the theme
  $("modelled").style.background = shade(1, "orange");
  $("nodes").textContent = new Set(step.hosts).size > 1 ? " · lines: borders of nodes" : "";
  drawTable(step);
  drawInside(step);
  drawMemory(pictures.memory, step.memory || []);
  const { colours, words, tick } = memoryLegend(step.memory || []);
  $("memorylegend").innerHTML = swatches(colours, words) + (tick ? '<b class="tick"></b>formula, at rest' : "");
  $("health").hidden = !step.health;
  if (step.health) $("health").replaceChildren(...healthRows(step.health));
  $("memorynote").textContent = memoryNote(step.memory || [], step.strategy);
}

// Updates all text.
function show() {
  const { step } = state;
  fill($("run"), state.runs.map((run) => run.name), state.run);
  fill($("other"), ["", ...state.runs.map((run) => run.name).filter((name) => name !== state.run)], state.other.run);
  $("laid").hidden = !state.other.run;
  $("laidname").textContent = `time of a step of ${state.other.run}`;
  $("other").parentElement.hidden = state.runs.length < 2;
  const here = state.runs.find((run) => run.name === state.run);
  $("strategy").textContent = step?.strategy || here?.strategy || "";
  $("live").textContent = here ? `${state.world} ranks · ${here.live ? "running" : "ended"}` : "";
  $("live").classList.toggle("on", Boolean(here?.live));
  $("reading").textContent = step?.reading ? `${step.of || `Step ${step.step}`}: ${step.reading}` : "";
  $("follow").setAttribute("aria-pressed", String(state.follow));
  $("whole").setAttribute("aria-pressed", String(!state.only));
  $("recent").setAttribute("aria-pressed", String(Boolean(state.only)));
  if (!step) return;
  if (document.activeElement !== $("step")) $("step").value = step.asked ?? step.step;
  $("step").max = state.newest;
  $("at").textContent = step.of || `Step ${step.step}`;
  $("trafficof").textContent = `bytes, step ${step.step}`;
  $("tableof").textContent = `step ${step.step}, all ranks`;
  $("late").textContent = step.late ? `Rank ${step.late.rank} is late: ${lateWords(step.late)}` : "";
  const lost = step.lost ? ` · ${step.lost} calls were lost from the record` : "";
  const missing = step.missing?.length ? ` · nothing of rank ${step.missing.join(", ")}` : "";
  const share = step.seconds ? ` (${percent(step.own / step.seconds)} of the step)` : "";
  $("footer").textContent = `Measured, unless modelled or formula is said. Measuring itself took ${seconds(step.own)}${share} on each rank${lost}${missing}`;
}

function drawInside(step) {
  const moments = step.moments;
  $("momentshead").replaceChildren(moments?.kind === "pipeline" ? "The pipeline, planned above measured" : "Inside a step, moment by moment", small(moments ? `step ${moments.step}, ${state.follow ? "a typical step" : "the nearest step kept in detail"}` : "no step was kept in detail yet"));
  if (moments?.replicas > 1) {
    const select = document.createElement("select");
    fill(select, [...Array(moments.replicas).keys()].map(String), String(state.replica));
    for (const option of select.options) option.text = `pipeline ${option.value}`;
    select.onchange = () => { state.replica = Number(select.value); fetchStep(state.follow ? "newest" : step.asked).then(draw); };
    $("momentshead").append(" ", select);
  }
  $("momentslegend").innerHTML = moments?.kind === "pipeline"
    ? swatches(Object.fromEntries(Object.entries(PASSES).filter(([pass]) => pass !== "W" || moments.measured.some((row) => row.some(([kind]) => kind === "W")))), { F: "forward", B: "backward", W: "weight gradients" }) + " · the number is the micro-batch"
    : swatches({ f: PASSES.F, b: PASSES.B, w: COLOURS.exposed, u: COLOURS.bubble, d: COLOURS.data, o: COLOURS.optimizer, x: COLOURS.other },
      { f: "forward", b: "backward", w: "standing in a collective", u: "pipeline bubble", d: "data", o: "optimizer", x: "other" });
  drawMoments(pictures.moments, moments || { kind: "laps", ranks: [] });
}

function small(text) {
  const made = document.createElement("small");
  made.textContent = ` ${text}`;
  return made;
}

