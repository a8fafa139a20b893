// The loss of a run over its steps, its tokens or its time, and below it how many tokens a second. uPlot draws the lines;
// this file prepares the numbers, marks what happened on the way, and answers pointer, keyboard and buttons.

/* global uPlot */
import { FAMILIES, alarm, dark, faint, familyOf, ink, inkOn, number, paper, rule, showTip } from "./paint.js";

const LEFT = 62;
const RIGHT = 14;
const HEIGHTS = [204, 126]; // of the loss without the words above, and of the tokens a second with the axis below
const LANE = 15; // of words above the plot of the loss
const LANES = 3;
const STRIP = 20; // above the plot of tokens a second: the strategies
const FONT = "11px system-ui, sans-serif";
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;

// Columns of a point, as nbkit.notebook.run.follower has them.
export const STEP = 0;
const SPAN = 1;
const TIME = 2;
const TOKENS = 3;
export const LOSS = 4;
export const RATE = 5;
export const STRATEGY = 6;
const AXES = { step: STEP, tokens: TOKENS, time: TIME };
const NAMES = ["last_step", "steps", "seconds", "tokens", "loss", "tokens_per_second", "strategy"];

// Kinds of events that have a line through both plots and words above, the gravest first; of the others a small sign at
// the bottom. The words come with each event: nbkit/records/event_words.py.
const GREAT = ["failure", "replaced", "out_of_memory", "resized", "switch", "rebalanced"];

const accent = () => (dark() ? "#6cb0ff" : "#1f6fd1"); // the other run

// The axes alone: "pp=4" of "pp=4 schedule=1f1b microbatches=8".
const shortName = (strategy) => String(strategy ?? "").split(/ (?:experts|schedule)=/)[0];

export class Curves {
  // tools: where the buttons are. name: of a file that is saved, without its ending.
  constructor(host, tools, log) {
    Object.assign(this, { host, tools, log, plots: [], zoom: null, shape: "", hidden: new Set(), smooth: 0, logarithmic: false, over: null, group: `nbkit-${Math.random()}` });
    host.tabIndex = 0;
    host.dataset.lmSuppressShortcuts = "true"; // JupyterLab must not take our keys for its own
    host.setAttribute("role", "application");
    host.setAttribute("aria-label", "Loss and tokens a second. Arrow keys read values, plus and minus zoom, 0 shows all, L is a logarithmic axis, F the full screen.");
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("mouseleave", () => this.leave());
    host.addEventListener("blur", () => this.leave());
    tools.addEventListener("click", (event) => this.press(event.target.closest("button")));
    tools.querySelector("input").addEventListener("input", (event) => {
      this.smooth = Number(event.target.value);
      this.redraw();
    });
  }

  // points: rows of columns. unit: what is counted as tokens, "tokens" or "rows". along: what lies on x. beside: another
  // run {run, points, strategies}, or null. name: of the run.
  draw(seen) {
    this.seen = seen;
    this.redraw();
  }

  redraw() {
    const { points, events, along, beside } = this.seen;
    const last = points[points.length - 1];
    Object.assign(this.host.dataset, { points: points.length, along, step: last ? last[STEP] : 0, beside: beside?.points.length || 0, smooth: this.smooth });
    this.host.classList.toggle("empty", !last);
    this.tools.hidden = !last;
    if (!last) {
      this.end();
      this.host.textContent = "no finished step yet";
      return;
    }
    if (along !== this.along) this.zoom = null;
    this.along = along;
    this.measure();
    this.pinned();
    this.marks = marksOf(events, points, along, this.scale);
    this.host.dataset.switches = this.marks.filter((mark) => mark.kind === "switch").length;
    this.host.dataset.marks = this.marks.map((mark) => mark.kind).join(" ");
    this.host.dataset.strategies = new Set(points.map((point) => this.seen.strategies[point[STRATEGY]]).filter(Boolean)).size;
    this.build();
    this.fill();
    this.legend();
    this.list();
    if (this.over !== null) this.tell(this.over);
  }

  end() {
    for (const plot of this.plots) plot.destroy();
    this.plots = [];
    this.shape = "";
    this.host.replaceChildren();
  }

  // The unit of x, and from where to where x goes.
  measure() {
    const { points, along, beside } = this.seen;
    const column = AXES[along];
    const most = Math.max(points[points.length - 1][column], beside?.points.at(-1)?.[column] ?? 0);
    [this.scale, this.unit] = along === "time" ? unitOfTime(most) : [1, ""];
    const first = points[0];
    const begin = along === "step" ? Math.min(first[STEP] - first[SPAN], beside?.points[0] ? beside.points[0][STEP] - beside.points[0][SPAN] : Infinity) : 0;
    this.whole = [begin / this.scale, Math.max(most / this.scale, begin / this.scale + 1e-9)];
  }

  x(point) {
    return point[AXES[this.along]] / this.scale;
  }

  build() {
    const { beside } = this.seen;
    const lanes = this.hidden.has("marks") ? 0 : Math.min(LANES, this.marks.filter((mark) => mark.great).length);
    this.top = 6 + LANE * Math.max(lanes, 1);
    const shape = [this.logarithmic, beside?.run ?? "", lanes].join();
    const [width, heights] = this.room();
    if (shape === this.shape) {
      for (const [i, plot] of this.plots.entries()) {
        if (plot.width !== width || plot.height !== heights[i]) plot.setSize({ width, height: heights[i] });
      }
      return;
    }
    this.end();
    this.shape = shape;
    const rows = [
      { name: "loss", column: LOSS, floor: false, distr: this.logarithmic ? 3 : 1, spoken: number },
      { name: "rate", column: RATE, floor: true, distr: 1, spoken: (value) => (value >= 1e5 ? brief(value) : number(value)) },
    ];
    this.rows = rows;
    this.plots = rows.map((row, i) => new uPlot(this.options(row, width, heights[i], i), [[], []], this.host));
  }

  room() {
    const width = Math.max(260, this.host.clientWidth);
    const full = document.fullscreenElement?.contains(this.host);
    const height = Math.max(420, window.innerHeight - 150);
    return [width, full ? [Math.round(height * 0.7), Math.round(height * 0.3)] : [HEIGHTS[0] + this.top, HEIGHTS[1]]];
  }

  options(row, width, height, place) {
    const stroke = (colour, wide, more = {}) => ({ stroke: colour, width: wide, points: { show: false }, ...more });
    const raw = () => (row.floor ? faint() : ink());
    const pale = (colour) => () => (this.smooth ? `${colour()}66` : colour());
    const below = place === 1;
    return {
      width,
      height,
      ms: 1,
      padding: [below ? STRIP : this.top, RIGHT, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: this.group },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        bind: {
          dblclick: () => () => this.look(null),
          mousedown: (plot, target, handler) => (event) => (event.shiftKey ? this.pan(plot, event) : handler(event)),
        },
      },
      scales: {
        x: { time: false, auto: false, range: (plot, low, high) => [low, high] },
        y: { distr: row.distr, range: (plot) => this.range(plot, row) },
      },
      series: [
        {},
        stroke(pale(raw), 1.6, { label: row.name }),
        stroke(raw, 2.2, { label: "smoothed" }),
        stroke(pale(accent), 1.6, { label: "other" }),
        stroke(accent, 2.2, { label: "other, smoothed" }),
      ],
      axes: [
        {
          stroke: faint, font: FONT, size: below ? 26 : 4, gap: 4, grid: { stroke: rule, width: 1 }, ticks: { show: false },
          splits: (plot, axis, low, high) => this.across(low, high),
          values: (plot, splits) => splits.map((value) => (below && this.fits(value) ? this.named(value) : "")),
          filter: (plot, splits) => splits,
        },
        {
          stroke: faint, font: FONT, size: LEFT, gap: 6, grid: { stroke: rule, width: 1 }, ticks: { show: false },
          splits: (plot, axis, low, high) => (row.distr === 3 ? logarithms(low, high) : between(low, high, row.floor ? 2 : 4)),
          values: (plot, splits) => splits.map(row.spoken),
          filter: (plot, splits) => splits,
        },
      ],
      hooks: {
        draw: [(plot) => {
          const pen = new CanvasPen(plot.ctx, uPlot.pxRatio);
          pen.begin();
          this.around(pen, plot, row);
          pen.end();
        }],
        setSelect: [(plot) => {
          const { left, width: wide } = plot.select;
          if (wide > 3) this.look([plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")]);
          if (wide) plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
        ready: [(plot) => plot.over.addEventListener("mousemove", (event) => this.point(plot, event))],
      },
    };
  }

  fill() {
    const { points, beside } = this.seen;
    for (const [i, plot] of this.plots.entries()) {
      const { column, distr } = this.rows[i];
      const own = table(points, (point) => this.x(point), column, this.smooth, distr === 3);
      const other = beside?.points.length ? table(beside.points, (point) => this.x(point), column, this.smooth, distr === 3) : null;
      const data = other ? uPlot.join([own, other]) : [...own, own[0].map(() => null), own[0].map(() => null)];
      plot.batch(() => {
        plot.setData(data, false);
        const shows = [true, !this.hidden.has("raw"), this.smooth > 0 && !this.hidden.has("smoothed"), Boolean(other) && !this.hidden.has("other"), Boolean(other) && this.smooth > 0 && !this.hidden.has("other")];
        shows.forEach((show, k) => k && plot.series[k].show !== show && plot.setSeries(k, { show }, false));
        const [min, max] = this.zoom ?? this.whole;
        plot.setScale("x", { min, max });
      });
    }
  }

  // From the lowest to the highest value in sight. The wildest do not count, nor does the rate of the first step under
  // a strategy: it contains what is made once.
  range(plot, row) {
    const [min, max] = this.zoom ?? this.whole; // plot.scales has what was before
    const found = [];
    const first = row.floor ? firsts(this.seen.points) : new Set();
    const [x, ...series] = plot.data;
    for (const [k, values] of series.entries()) {
      if (!plot.series[k + 1].show) continue;
      for (let i = 0; i < values.length; i += 1) {
        if (Number.isFinite(values[i]) && x[i] >= min && x[i] <= max && !first.has(x[i] * this.scale)) found.push(values[i]);
      }
    }
    if (!found.length) return row.distr === 3 ? [0.1, 1] : [0, 1];
    found.sort((a, b) => a - b);
    const cut = Math.floor(found.length * 0.01);
    let [low, high] = [found[0], found[found.length - 1]];
    if (found[cut] - low > 0.5 * (found[found.length - 1 - cut] - found[cut])) low = found[cut];
    if (high - found[found.length - 1 - cut] > 0.5 * (found[found.length - 1 - cut] - low)) high = found[found.length - 1 - cut];
    if (row.distr === 3) return [low / 1.06, high * 1.06];
    if (row.floor) return [0, high * 1.12 || 1];
    if (high - low < 1e-12) [low, high] = [low - Math.abs(low) * 0.05 - 1e-6, high + Math.abs(high) * 0.05 + 1e-6];
    const air = 0.06 * (high - low);
    return [low - air, high + air];
  }

  across(low, high) {
    const values = between(low, high, Math.max(2, Math.floor((this.host.clientWidth - LEFT) / 150)));
    return this.along === "step" ? values.filter(Number.isInteger) : values;
  }

  named(value) {
    if (this.along === "tokens") return brief(value);
    return this.along === "time" ? `${+value.toPrecision(4)}` : number(Math.round(value));
  }

  // The last value stands at the right end: others keep away from it.
  fits(value) {
    const [low, high] = this.zoom ?? this.whole;
    return (high - value) / (high - low) > 48 / (this.room()[0] - LEFT - RIGHT);
  }

  // What stands around the lines and on them: names of axes, strategies, marks. For canvas and SVG alike.
  around(pen, plot, row) {
    const box = boxOf(plot);
    const x = (value) => box.left + plot.valToPos(value, "x");
    const { unit, strategies, points } = this.seen;
    const [low, high] = [plot.scales.x.min, plot.scales.x.max];
    if (!(high > low)) return;
    if (row.floor) {
      this.strip(pen, box, x, low, high, points, strategies);
      const end = this.named(high);
      pen.words(end, box.left + box.width, box.top + box.height + 10, { align: "right", colour: ink() });
      pen.words(this.along === "tokens" ? unit : this.along === "time" ? `time, ${this.unit}` : "step", 2, box.top + box.height + 10, { colour: ink(), bold: true });
    }
    pen.words(row.floor ? `${unit}/s` : "loss", 2, row.floor ? box.top - 10 : this.top - 12, { colour: ink(), bold: true });
    this.drawMarks(pen, box, x, low, high, row);
  }

  strip(pen, box, x, low, high, points, strategies) {
    let begin = 0;
    for (let i = 1; i <= points.length; i += 1) {
      const own = points[begin][STRATEGY];
      if (i < points.length && points[i][STRATEGY] === own) continue;
      const [from, to] = [begin ? this.x(points[begin - 1]) : this.whole[0], this.x(points[i - 1])];
      const name = strategies[own];
      if (name && to > low && from < high) {
        const left = x(Math.max(from, low));
        const right = Math.max(x(Math.min(to, high)), left + 1.5);
        const colour = FAMILIES[familyOf(name)];
        pen.box(left, box.top - STRIP + 3, Math.max(right - left - 1.5, 1.5), 13, colour); // a gap: two strategies of a family may meet
        const fitting = [name, shortName(name)].find((words) => pen.width(words, true) < right - left - 8);
        if (fitting) pen.words(fitting, left + 4, box.top - STRIP + 10, { colour: inkOn(colour), bold: true });
      }
      begin = i;
    }
  }

  drawMarks(pen, box, x, low, high, row) {
    if (this.hidden.has("marks")) return;
    const shown = this.marks.filter((mark) => mark.at >= low && mark.at <= high);
    const signs = []; // where the small signs are, so that one is drawn above the other
    for (const mark of shown) {
      const at = x(mark.at);
      const colour = mark.kind === "failure" ? alarm() : ink();
      if (mark.until > mark.at) pen.box(at, box.top, x(Math.min(mark.until, high)) - at, box.height, rule(), 0.6);
      if (mark.great) pen.line(at, box.top - (row.floor ? 0 : 4), at, box.top + box.height, colour, mark.kind === "switch" ? [] : [2, 3]);
      if (row.floor) continue;
      if (!mark.great) {
        pen.line(at, box.top + box.height - 8, at, box.top + box.height, colour);
        const below = signs.filter((other) => Math.abs(other - at) < 11).length;
        signs.push(at);
        pen.words(mark.sign, at, box.top + box.height - 14 - 12 * Math.min(below, 3), { align: "center", colour });
      }
    }
    if (row.floor) return;
    // Where there is no room for all words, those of the graver marks stay; pointer and list tell the others.
    const taken = Array.from({ length: LANES }, () => []);
    for (const mark of [...shown].sort((a, b) => GREAT.indexOf(a.kind) - GREAT.indexOf(b.kind))) {
      if (!mark.great) continue;
      const colour = mark.kind === "failure" ? alarm() : ink();
      for (const words of [`${mark.sign} ${mark.words}`, mark.sign]) {
        const wide = pen.width(words, true);
        const left = Math.max(38, Math.min(x(mark.at) - 3, box.left + box.width + RIGHT - wide - 2));
        const lane = taken.findIndex((spans) => spans.every(([from, to]) => left > to + 6 || left + wide < from - 6));
        if (lane < 0) continue;
        taken[lane].push([left, left + wide]);
        pen.words(words, left, this.top - 12 - LANE * lane, { colour, bold: true });
        break;
      }
    }
  }

  // Only this part of x: [from, to]; null: all of it.
  look(part) {
    const [low, high] = this.whole;
    if (part) {
      const least = this.along === "step" ? 2 : (high - low) / 1e4;
      const wide = Math.max(part[1] - part[0], least);
      const from = Math.max(low, Math.min(part[0], high - wide));
      this.zoom = wide >= high - low ? null : [from, Math.min(from + wide, high)];
    } else this.zoom = null;
    this.host.dataset.zoom = this.zoom ? this.zoom.join(" ") : "";
    for (const plot of this.plots) {
      const [min, max] = this.zoom ?? this.whole;
      plot.setScale("x", { min, max });
    }
    this.legend();
  }

  // The first and the last step in sight; null: all of them.
  sight() {
    if (!this.zoom) return null;
    const [low, high] = this.zoom;
    const seen = this.seen.points.filter((point) => this.x(point) >= low && this.x(point) <= high);
    return seen.length ? [seen[0][STEP] - seen[0][SPAN] + 1, seen[seen.length - 1][STEP]] : null;
  }

  // Look at the steps that were pinned, when they are.
  pinned() {
    const { steps, points, along } = this.seen;
    const told = JSON.stringify([steps ?? null, along]);
    if (told === this.told) return;
    this.told = told;
    if (!steps) return;
    const inside = points.filter((point) => point[STEP] >= steps[0] && point[STEP] <= steps[1]);
    if (!inside.length) this.told = ""; // they are still to come
    else this.look([along === "step" ? steps[0] - inside[0][SPAN] : this.x(inside[0]), along === "step" ? steps[1] : this.x(inside[inside.length - 1])]);
  }

  // Zoom around the middle of what is in sight, or the point that is told.
  by(factor) {
    const [low, high] = this.zoom ?? this.whole;
    const at = this.over === null ? (low + high) / 2 : Math.min(Math.max(this.x(this.seen.points[this.over]), low), high);
    this.look([at - (at - low) * factor, at + (high - at) * factor]);
  }

  pan(plot, event) {
    event.preventDefault();
    const [begin, from] = [event.clientX, this.zoom ?? this.whole];
    const per = (from[1] - from[0]) / plot.over.clientWidth;
    const move = (next) => this.look(from.map((value) => value - (next.clientX - begin) * per));
    const up = () => {
      document.removeEventListener("mousemove", move);
      document.removeEventListener("mouseup", up);
    };
    document.addEventListener("mousemove", move);
    document.addEventListener("mouseup", up);
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || !this.plots.length) return;
    const [low, high] = this.zoom ?? this.whole;
    const tenth = (high - low) / 10;
    const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const acts = { "+": () => this.by(0.5), "=": () => this.by(0.5), "-": () => this.by(2), 0: () => this.look(null), l: () => this.press("log"), f: () => this.press("full"), Escape: () => this.leave() };
    const act = side ? () => (event.shiftKey ? this.look([low + side * tenth, high + side * tenth]) : this.walk(side)) : acts[event.key];
    if (!act || (event.key === "Escape" && this.over === null)) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  // The next point to one side, in sight.
  walk(side) {
    const [low, high] = this.zoom ?? this.whole;
    const { points } = this.seen;
    const seen = (i) => this.x(points[i]) >= low && this.x(points[i]) <= high;
    let next = this.over === null ? points.findIndex((_, i) => seen(i)) : this.over + side;
    if (this.over !== null && (!points[next] || !seen(next))) next = this.over;
    if (points[next]) this.tell(next);
  }

  point(plot, event) {
    if (plot.cursor.left < 0) return;
    const near = nearest(this.seen.points, plot.posToVal(plot.cursor.left, "x") * this.scale, AXES[this.along]);
    this.over = near;
    showTip(this.text(near, plot.posToVal(plot.cursor.left, "x"), (this.zoom ?? this.whole)), event);
  }

  tell(near) {
    if (!this.seen.points[near]) return this.leave();
    this.over = near;
    const [plot] = this.plots;
    if (document.activeElement !== this.host) return;
    const at = this.x(this.seen.points[near]);
    plot.setCursor({ left: plot.valToPos(at, "x"), top: plot.over.clientHeight / 2 });
    const frame = plot.over.getBoundingClientRect();
    showTip(this.text(near, at, this.zoom ?? this.whole), { clientX: frame.left + plot.valToPos(at, "x"), clientY: frame.top + 20 });
  }

  leave() {
    this.over = null;
    showTip("", null);
    for (const plot of this.plots) plot.setCursor({ left: -10, top: -10 });
  }

  text(i, at, [low, high]) {
    const { points, strategies, unit, beside } = this.seen;
    const near = (high - low) / 120;
    const marks = this.hidden.has("marks") ? [] : this.marks.filter((mark) => Math.abs(mark.at - at) < near || (mark.at <= at && at <= mark.until));
    return [
      ...marks.map((mark) => `${mark.sign} ${broken(mark.text)}`),
      wordsOf(points[i], strategies, unit),
      beside?.points.length ? `${beside.run}:\n${wordsOf(beside.points[nearest(beside.points, at * this.scale, AXES[this.along])], beside.strategies, unit)}` : "",
    ].filter(Boolean).join("\n\n");
  }

  // Buttons that hide a line, and how the others stand.
  legend() {
    const { beside, name } = this.seen;
    const items = [["raw", beside ? name : "loss", ink()]];
    if (this.smooth) items.push(["smoothed", "smoothed", ink()]);
    if (beside) items.push(["other", beside.run, accent()]);
    if (this.marks.length) items.push(["marks", "marks", faint()]);
    const host = this.tools.querySelector(".lines");
    const shown = items.map(([key, words, colour]) => [key, words, colour, this.hidden.has(key)].join()).join(";");
    if (host.dataset.shown !== shown) {
      host.dataset.shown = shown;
      host.replaceChildren(...items.map(([key, words, colour]) => {
        const button = Object.assign(document.createElement("button"), { title: `hide or show: ${words}` });
        Object.assign(button.dataset, { line: key });
        button.setAttribute("aria-pressed", String(!this.hidden.has(key)));
        const swatch = document.createElement("i");
        swatch.style.background = colour;
        button.append(swatch, words);
        return button;
      }));
    }
    this.tools.querySelector("output").textContent = this.smooth ? this.smooth.toFixed(2) : "off";
    this.tools.querySelector("[data-do=log]").setAttribute("aria-pressed", String(this.logarithmic));
    this.tools.querySelector("[data-do=all]").disabled = !this.zoom;
  }

  // All that happened, as text, the newest first.
  list() {
    const shown = this.marks.map((mark) => mark.at).join() + this.marks.length;
    if (this.log.dataset.shown === shown) return;
    this.log.dataset.shown = shown;
    this.log.hidden = !this.marks.length;
    this.log.querySelector("summary").textContent = this.marks.length ? `${this.marks.length} mark${this.marks.length > 1 ? "s" : ""} on the curve; the newest: ${this.marks.at(-1).text.split(", ")[0]}` : "";
    this.log.querySelector("ul").replaceChildren(...[...this.marks].reverse().slice(0, 200).map((mark) => {
      const line = document.createElement("li");
      line.textContent = `${mark.sign} ${mark.text}`;
      if (mark.kind === "failure") line.className = "failure";
      return line;
    }));
  }

  press(button) {
    if (!button) return;
    const act = typeof button === "string" ? button : button.dataset.do;
    const line = button.dataset?.line;
    if (line && !this.hidden.delete(line)) this.hidden.add(line);
    if (line) this.redraw();
    if (act === "log") {
      this.logarithmic = !this.logarithmic;
      this.redraw();
    }
    if (act === "all") this.look(null);
    if (act === "in") this.by(0.5);
    if (act === "out") this.by(2);
    if (act === "full") {
      if (document.fullscreenElement) document.exitFullscreen();
      else this.host.closest("section").requestFullscreen?.();
    }
    if (act === "png") this.picture().toBlob((blob) => this.save(blob, "png"));
    if (act === "svg") this.save(new Blob([this.svg()], { type: "image/svg+xml" }), "svg");
    if (act === "csv") this.save(new Blob([this.csv()], { type: "text/csv" }), "csv");
  }

  save(blob, ending) {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `${this.seen.name || "run"}.${ending}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  picture() {
    const canvas = document.createElement("canvas");
    const ratio = uPlot.pxRatio;
    canvas.width = Math.max(...this.plots.map((plot) => plot.ctx.canvas.width));
    canvas.height = this.plots.reduce((sum, plot) => sum + plot.ctx.canvas.height, 0) + 24 * ratio;
    const context = canvas.getContext("2d");
    context.fillStyle = paper();
    context.fillRect(0, 0, canvas.width, canvas.height);
    let y = 24 * ratio;
    for (const plot of this.plots) {
      context.drawImage(plot.ctx.canvas, 0, y);
      y += plot.ctx.canvas.height;
    }
    const pen = new CanvasPen(context, ratio);
    pen.begin();
    pen.words(this.title(), 4, 14, { colour: ink(), bold: true });
    pen.end();
    return canvas;
  }

  title() {
    const { name, beside } = this.seen;
    return [name, beside?.run].filter(Boolean).join(" and ");
  }

  svg() {
    const pen = new SvgPen();
    pen.words(this.title(), 4, 14, { colour: ink(), bold: true });
    let y = 24;
    for (const [i, plot] of this.plots.entries()) {
      pen.open(y);
      const box = boxOf(plot);
      const x = (value) => box.left + plot.valToPos(value, "x");
      const h = (value) => box.top + plot.valToPos(value, "y");
      const row = this.rows[i];
      const { x: across, y: up } = plot.scales;
      for (const value of this.across(across.min, across.max)) {
        pen.line(x(value), box.top, x(value), box.top + box.height, rule());
        if (row.floor && this.fits(value)) pen.words(this.named(value), x(value), box.top + box.height + 10, { align: "center" });
      }
      for (const value of row.distr === 3 ? logarithms(up.min, up.max) : between(up.min, up.max, row.floor ? 2 : 4)) {
        pen.line(box.left, h(value), box.left + box.width, h(value), rule());
        pen.words(row.spoken(value), box.left - 6, h(value), { align: "right" });
      }
      const [all, ...series] = plot.data;
      series.forEach((values, k) => {
        const { show, width } = plot.series[k + 1];
        if (!show) return;
        const line = [];
        all.forEach((at, p) => {
          if (at < across.min || at > across.max || values[p] === undefined) return;
          line.push(values[p] === null ? null : [x(at), Math.max(box.top, Math.min(box.top + box.height, h(values[p])))]);
        });
        const colour = k < 2 ? (row.floor ? faint() : ink()) : accent();
        pen.path(line, colour, width, this.smooth && k % 2 === 0 ? 0.4 : 1);
      });
      this.around(pen, plot, row);
      pen.shut();
      y += plot.height;
    }
    return pen.text(this.plots[0].width, y);
  }

  // What is in sight, of each run.
  csv() {
    const { points, strategies, beside, name } = this.seen;
    const [low, high] = this.zoom ?? this.whole;
    const runs = [[name, points, strategies], ...(beside ? [[beside.run, beside.points, beside.strategies]] : [])];
    const lines = runs.flatMap(([run, rows, names]) => rows.filter((point) => this.x(point) >= low && this.x(point) <= high)
      .map((point) => [run, ...point.slice(0, STRATEGY).map((value) => (Number.isFinite(value) ? value : "")), names[point[STRATEGY]] ?? ""]));
    const quoted = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
    return [["run", ...NAMES], ...lines].map((line) => line.map(quoted).join(",")).join("\n") + "\n";
  }
}

// x, values and smoothed values. A step without a number breaks the line, a switch does not.
function table(points, x, column, smooth, positive) {
  const values = points.map((point) => (Number.isFinite(point[column]) && (!positive || point[column] > 0) ? point[column] : null));
  const across = [];
  for (const [i, point] of points.entries()) {
    const at = x(point);
    across.push(i && at <= across[i - 1] ? across[i - 1] + 1e-9 : at); // steps that were made again: x only grows
  }
  return [across, values, smooth ? smoothed(values, smooth) : values.map(() => null)];
}

// The mean of a running mean from the left and one from the right, so that the line does not lag behind. smooth: the
// weight of what was before, as in TensorBoard.
function smoothed(values, smooth) {
  const sides = [1, -1].map((side) => {
    const made = new Array(values.length);
    let [sum, weight] = [0, 0];
    for (let i = side > 0 ? 0 : values.length - 1; i >= 0 && i < values.length; i += side) {
      if (values[i] === null) continue;
      sum = sum * smooth + values[i] * (1 - smooth);
      weight = weight * smooth + (1 - smooth);
      made[i] = sum / weight;
    }
    return made;
  });
  return values.map((value, i) => (value === null ? null : (sides[0][i] + sides[1][i]) / 2));
}

// x of the points that begin a stretch under one strategy, where there are others to see.
function firsts(points) {
  const found = new Set();
  for (let i = 0; i < points.length - 2; i += 1) {
    if (i && points[i][STRATEGY] === points[i - 1][STRATEGY]) continue;
    for (const column of [STEP, TOKENS, TIME]) found.add(points[i][column]);
  }
  return found;
}

function marksOf(events, points, along, scale) {
  const column = AXES[along];
  const made = [];
  for (const event of events) {
    if (!event.sign) continue;
    const [at, until] = along === "time" ? spanOf(event) : placeOf(event, points, column);
    made.push({ kind: event.kind, sign: event.sign, great: GREAT.includes(event.kind), at: at / scale, until: until / scale, words: shortName(event.name), text: event.text });
  }
  return made;
}

// From when to when no step was made.
function spanOf(event) {
  const pause = (event.pause_s || 0) + (event.proof_s || 0) + (["replaced", "out_of_memory", "live_cell"].includes(event.kind) ? event.seconds || 0 : 0);
  return [Math.max(0, event.time - pause), event.time];
}

function placeOf(event, points, column) {
  const near = points.findLast((point) => point[STEP] <= event.step);
  const at = near ? near[column] : 0;
  return [at, at];
}

// A long text in lines, for the tip.
const broken = (text) => text.replace(/(.{50,80}?) /g, "$1\n  ");

function wordsOf(point, strategies, unit) {
  return [
    point[SPAN] > 1 ? `steps ${number(point[STEP] - point[SPAN] + 1)} to ${number(point[STEP])}, mean` : `step ${number(point[STEP])}`,
    strategies[point[STRATEGY]] || "",
    Number.isFinite(point[LOSS]) ? `loss ${+point[LOSS].toPrecision(5)}` : "",
    Number.isFinite(point[RATE]) ? `${number(point[RATE])} ${unit}/s` : "",
    `after ${clock(point[TIME])}, ${brief(point[TOKENS])} ${unit}`,
  ].filter(Boolean).join("\n");
}

function nearest(points, value, column) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][column] < value) low = middle + 1; else high = middle;
  }
  return low && value - points[low - 1][column] < points[low][column] - value ? low - 1 : low;
}

// Where the plot lies, in pixels of the page.
function boxOf(plot) {
  const { left, top, width, height } = plot.bbox;
  const ratio = uPlot.pxRatio;
  return { left: left / ratio, top: top / ratio, width: width / ratio, height: height / ratio };
}

function unitOfTime(most) {
  if (most < 2 * MINUTE) return [1, "s"];
  if (most < 2 * HOUR) return [MINUTE, "min"];
  return most < 2 * DAY ? [HOUR, "h"] : [DAY, "days"];
}

function clock(value) {
  const [scale, unit] = unitOfTime(value);
  return `${+(value / scale).toPrecision(3)} ${unit}`;
}

// Round values between two.
function between(low, high, count) {
  const raw = (high - low) / count;
  if (!(raw > 0)) return [low];
  const ten = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * ten).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i += 1) found.push(+(i * step).toPrecision(12));
  return found;
}

// The same for a logarithmic axis: 1, 2, 5 of each power of ten; where these are too few, values of equal distance.
function logarithms(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const first of [1, 2, 5]) found.push(first * 10 ** power);
  }
  const inside = found.filter((value) => value >= low && value <= high);
  return inside.length < 3 ? between(low, high, 4) : inside.length > 7 ? inside.filter((value) => Number.isInteger(Math.log10(value))) : inside;
}

function brief(value) {
  const [unit, size] = value >= 1e9 ? ["G", 1e9] : value >= 1e6 ? ["M", 1e6] : value >= 1e3 ? ["k", 1e3] : ["", 1];
  return `${+(value / size).toPrecision(3)}${unit}`;
}

// Two pens with the same strokes: on a canvas, and as SVG.
class CanvasPen {
  constructor(context, ratio) {
    Object.assign(this, { context, ratio });
  }

  begin() {
    this.context.save();
    this.context.scale(this.ratio, this.ratio);
  }

  end() {
    this.context.restore();
  }

  box(x, y, w, h, colour, strong = 1) {
    Object.assign(this.context, { fillStyle: colour, globalAlpha: strong });
    this.context.fillRect(x, y, w, h);
    this.context.globalAlpha = 1;
  }

  line(x0, y0, x1, y1, colour, dash = []) {
    const { context } = this;
    context.setLineDash(dash);
    Object.assign(context, { strokeStyle: colour, lineWidth: 1 });
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
    context.setLineDash([]);
  }

  words(text, x, y, { colour = faint(), align = "left", bold = false } = {}) {
    Object.assign(this.context, { fillStyle: colour, textAlign: align, textBaseline: "middle", font: `${bold ? "600 " : ""}${FONT}` });
    this.context.fillText(text, x, y);
  }

  width(text, bold) {
    this.context.font = `${bold ? "600 " : ""}${FONT}`;
    return this.context.measureText(text).width;
  }
}

class SvgPen {
  constructor() {
    this.parts = [];
    this.ruler = new CanvasPen(document.createElement("canvas").getContext("2d"), 1);
  }

  open(y) {
    this.parts.push(`<g transform="translate(0 ${y})">`);
  }

  shut() {
    this.parts.push("</g>");
  }

  box(x, y, w, h, colour, strong = 1) {
    this.parts.push(`<rect x="${tenth(x)}" y="${tenth(y)}" width="${tenth(w)}" height="${tenth(h)}" fill="${colour}" opacity="${strong}"/>`);
  }

  line(x0, y0, x1, y1, colour, dash = []) {
    this.parts.push(`<line x1="${tenth(x0)}" y1="${tenth(y0)}" x2="${tenth(x1)}" y2="${tenth(y1)}" stroke="${colour}" stroke-dasharray="${dash.join(" ")}"/>`);
  }

  // points: [x, y], or null where the line breaks.
  path(points, colour, width, strong) {
    let pen = "M";
    const made = points.map((point) => {
      const drawn = point ? `${pen}${tenth(point[0])} ${tenth(point[1])}` : "";
      pen = point ? "L" : "M";
      return drawn;
    });
    this.parts.push(`<path d="${made.join("")}" fill="none" stroke="${colour}" stroke-width="${width}" stroke-linejoin="round" opacity="${strong}"/>`);
  }

  words(text, x, y, { colour = faint(), align = "left", bold = false } = {}) {
    const anchor = { left: "start", center: "middle", right: "end" }[align];
    const safe = String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
    this.parts.push(`<text x="${tenth(x)}" y="${tenth(y + 4)}" fill="${colour}" text-anchor="${anchor}"${bold ? ' font-weight="600"' : ""}>${safe}</text>`);
  }

  width(text, bold) {
    return this.ruler.width(text, bold);
  }

  text(width, height) {
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="system-ui, sans-serif" font-size="11"><rect width="100%" height="100%" fill="${paper()}"/>${this.parts.join("")}</svg>`;
  }
}

const tenth = (value) => +value.toFixed(1);
