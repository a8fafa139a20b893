// The strategy panel. Python sends the state: `job`, which changes with the strategy, `pulse`, which changes all the time,
// and `note`. The user's unfinished choice is stored only here, so that two panels of a cluster share only the state.
//
// While the pointer is over the table or the picture, nothing there moves: figures change in place, and a new order of
// the rows waits until the pointer leaves.

import { FAMILIES, bytes, seconds, ticks } from "./paint.js";

const KEYS = [
  ["switch", "Apply", "main", "apply"],
  ["try", "Try 10 steps", "", "try"],
  ["measure", "Measure all that fit", "", "measure"],
  ["undo", "Undo", "", "undo"],
];
// Key of a row, title of the column, subtitle, explanation.
const COLUMNS = [
  ["memory", "memory", "at rest,\nfullest rank", "What the fullest rank holds between steps: weights, gradients, optimizer state and buffers. Paler: while the switch is made."],
  ["peak", "peak", "in a step,\nfullest rank", "What the fullest rank holds at the highest moment of a step, as counted in a step. ≈: predicted."],
  ["step", "step", "≈ if predicted", "The median time of the newest steps, or of the steps of the last comparison. ≈: predicted from the steps of the strategy that runs now."],
  ["interval", "interval", "of the\nmedian", "The interval in which the median lies with 95 %. It is 10 % wider if the steps were made more than 400 steps ago."],
  ["sends", "sends", "in a step,\nbusiest rank", "What the busiest rank sends in a step, without backups, as counted in a step. ≈: predicted."],
  ["between", "between", "nodes,\nall ranks", "What all ranks send between nodes in a step. ≈: predicted."],
  ["moved", "moves", "over\nall ranks", "The bytes that a switch to this strategy moves, over all ranks. They are exact."],
  ["pause", "pause", "predicted", "The predicted time without a step while the switch is made."],
  ["payback", "pays back", "after", "After this many steps the faster step has made up for the pause. Within noise: the intervals of both steps overlap, so nobody can say."],
];
const LOOSE = { before: "before blocks", after: "after blocks" }; // parameters outside of blocks
const UNTOLD = "The model has not been examined for this strategy.";
const UNKNOWN = "This job has not measured it yet. Try 10 steps measures it.";
const READ_PICTURE = "● measured  ○ predicted  × step time not known  ◎ runs now. Dashed line: no other strategy needs less memory and less time.";
const APART = [
  ["pause", "Pause", "", "pause"],
  ["save", "Save", "", "save"],
  ["stop", "Stop", "stop", "stop"],
];

const UNHEARD_MS = 3000;
const UNHEARD =
  "The kernel has not received this click, because a cell is running. The click acts when the cell ends. " +
  "A training started with %%distributed --detach reacts at once.";

// Python sends a message every other second, even during a cell. A page that is loading gets more time.
const SILENT_MS = 6000;
const FIRST_MS = 30000;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// In a notebook, Enter with Shift, Ctrl, Alt or Meta runs a cell. Enter also ends the composition of a word.
const modified = (event) =>
  event.shiftKey || event.ctrlKey || event.altKey || event.metaKey || event.isComposing || event.keyCode === 229;
const plain = (event) => !modified(event) && !event.repeat; // a held key counts once

function titled(words, ...content) {
  const box = make("div", "box");
  box.append(make("div", "title", words), ...content);
  return box;
}

function shape(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function tinted(element, family) {
  element.style.setProperty("--family", FAMILIES[family]);
  return element;
}

function render({ model, el }) {
  const root = make("div", "nbkit-panel");
  root.dataset.lmSuppressShortcuts = "true"; // typing here must not run commands of the notebook
  const head = make("div", "head");
  const headline = make("span", "headline"); // not a live region, because it changes with every step
  const name = make("span", "name");
  head.append(make("span", "dot"), headline, name);
  for (const kind of ["keydown", "keyup"]) {
    root.addEventListener(kind, (event) => {
      // A clicked button keeps the focus, and the browser would press it again for any Enter or space.
      const presses = event.key === "Enter" || event.key === " ";
      if (presses && event.target.tagName === "BUTTON" && !plain(event)) event.preventDefault();
    });
  }

  const line = make("label", "line");
  const input = make("input");
  input.type = "text";
  input.spellcheck = false;
  input.setAttribute("aria-label", "strategy");
  const sum = make("span", "sum");
  line.append(input, sum);
  const said = make("div", "said");
  said.setAttribute("role", "status");

  const body = make("div", "body");
  const words = make("div", "words");
  const chips = make("div", "chips");
  const drawing = make("div", "job");
  const rows = make("div", "rows");
  const picture = make("div", "picture");
  const hint = make("div", "hint", READ_PICTURE);
  const keys = make("div", "keys");
  const table = make("div", "box");
  table.append(words, chips, rows, line, keys, said);
  const views = make("div", "views");
  views.append(
    titled("memory and time of each strategy: lower left is better", picture, hint),
    titled("who holds what: ranks across, layers down", drawing),
  );
  body.append(table, views);

  const aside = make("span", "aside");
  const buttons = {};
  for (const [list, into] of [[KEYS, keys], [APART, aside]]) {
    for (const [action, label, className] of list) {
      buttons[action] = make("button", className, label);
      buttons[action].addEventListener("click", () => press(action));
      into.append(buttons[action]);
    }
  }
  keys.append(aside);
  const told = make("div", "told");
  const note = make("div", "note");
  for (const region of [told, note]) region.setAttribute("role", "status");
  root.append(head, body, told, note);
  el.append(root);

  let draft = null; // the strategy that the user considers; null: the current one
  let verdict = null; // Python's answer for a draft that is in no row
  let shown = ""; // the outcome on the page
  const unheard = new Set(); // clicks in this page that the kernel has not confirmed
  let silent = false; // the kernel sends nothing any more
  let patience = setTimeout(fallSilent, FIRST_MS);

  const job = () => model.get("job");
  const pulse = () => model.get("pulse");
  const rowOf = (text) => (job().rows ?? []).find((row) => row.strategy === text);
  const open = (row) => row.ok || row.untried; // an unexamined strategy is examined when it is chosen
  const candidate = () => (draft === null ? undefined : rowOf(draft) ?? rowOf(verdict?.strategy) ?? verdict?.row);

  function press(action) {
    if (action === "pause" && pulse().phase === "held") action = "resume";
    const message = { do: action };
    if (action === "switch" || action === "try") message.strategy = (draft ?? job().strategy).trim();
    const press = (message.press = Math.random());
    unheard.add(press);
    root.dataset.unheard = unheard.size;
    model.send(message);
    setTimeout(() => drawNote(unheard.has(press)), UNHEARD_MS);
  }

  function drawNote(waits = false) {
    note.textContent = silent ? silence() : waits ? UNHEARD : model.get("note");
  }

  function hear() {
    clearTimeout(patience);
    patience = setTimeout(fallSilent, SILENT_MS);
    if (!silent) return;
    silent = false;
    drawNote(unheard.size > 0);
    drawPulse();
  }

  function fallSilent() {
    clearTimeout(patience);
    silent = true;
    drawNote();
    drawPulse();
  }

  const silence = () =>
    "The kernel does not answer. It was restarted, it has ended, or this page has lost its connection. The training may go on. In a new cell: " +
    `%load_ext nbkit, then %cluster ${job().cluster ? `attach ${job().cluster}` : "list"}, then %strategy.`;

  function look(text) {
    draft = text.trim() === job().strategy ? null : text;
    if (draft === null || draft !== verdict?.row?.strategy) {
      const previewed = Boolean(verdict?.row);
      verdict = null;
      if (draft !== null && !rowOf(draft)) model.send({ do: "check", strategy: draft });
      if (previewed) drawRows(true);
    }
    drawChoice();
  }

  input.addEventListener("input", () => look(input.value));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && plain(event) && !buttons.switch.disabled) press("switch");
    if (event.key === "Escape" && plain(event)) choose(job().strategy);
    event.stopPropagation();
  });

  function choose(strategy) {
    if (silent) return;
    input.value = strategy;
    look(strategy);
  }

  // The state --------------------------------------------------------------------------------------------------------

  function drawPulse() {
    const { phase, headline: words, asked, results: outcomes = [] } = pulse();
    root.dataset.phase = silent ? "silent" : phase ?? "looking";
    input.disabled = silent;
    const waiting = phase === "idle" || phase === "training" ? "working out what each strategy would cost …" : "";
    const doing = asked || (job().strategy ? "" : waiting);
    const short = (words ?? "").split(" · ").slice(0, 2).join(" · "); // a narrow pane has no room for all words and `doing`
    headline.textContent = silent ? "nothing is heard from the kernel" : doing ? `${short} — ${doing}` : words ?? "";
    buttons.pause.textContent = phase === "held" ? "Resume" : "Pause";
    drawTold(outcomes[0]);
    drawButtons();
  }

  function drawTold(outcome) {
    const words = JSON.stringify(outcome ?? null);
    if (words === shown) return; // do not draw it again: a screen reader would read it again
    shown = words;
    told.replaceChildren();
    if (!outcome) return;
    told.append(make("span", outcome.ok ? "" : "bad", `last: ${outcome.line}`));
    if (!outcome.ok && outcome.hint) told.append(make("span", "fig", `→ ${outcome.hint}`));
    for (const [what, predicted, measured] of outcome.figures) {
      const figure = make("span", "fig", `${what}: predicted `);
      figure.append(make("b", "", predicted), " | measured ", make("b", "", measured));
      told.append(figure);
    }
    if (outcome.proof) told.append(make("span", outcome.identical ? "same" : "differs fig", outcome.proof));
    for (const deviation of outcome.deviations ?? []) told.append(make("span", "fig", deviation));
  }

  function drawButtons() {
    const can = silent ? {} : pulse().can ?? {};
    const changes = draft !== null && (candidate() ? open(candidate()) : verdict?.ok ?? false);
    buttons.switch.disabled = !(can.apply && changes);
    buttons.try.disabled = !(can.try && changes);
    buttons.measure.disabled = !(can.measure && job().measure?.label);
    buttons.measure.textContent = job().measure?.label ?? "Measure all that fit";
    buttons.measure.title = "measures each of them in turns, from the same state on the same batches; then the training goes on";
    buttons.undo.disabled = !can.undo;
    buttons.undo.title = can.undo ? `back to ${job().previous}` : "";
    buttons.pause.disabled = !(can.pause || can.resume);
    buttons.save.disabled = !can.save;
    buttons.stop.disabled = !can.stop;
  }

  function drawJob() {
    const known = Boolean(job().strategy);
    body.style.display = known ? "" : "none";
    name.textContent = job().cluster ? `cluster ${job().cluster}` : "";
    if (!known) return;
    if (draft === null || draft === job().strategy || verdict?.strategy === job().strategy) {
      draft = verdict = null;
      if (input.value !== job().strategy) input.value = job().strategy;
    } else if (verdict?.row) {
      model.send({ do: "check", strategy: verdict.text }); // its figures are for the previous strategy, or for older steps
    }
    drawRows();
    drawChoice();
    drawPulse();
  }

  // The table and the picture stay as they are under the pointer.
  let over = false;
  let held = false; // true if a new order waits
  for (const place of [rows, picture]) {
    place.addEventListener("pointerenter", () => { over = true; });
    place.addEventListener("pointerleave", () => {
      over = false;
      if (!held) return;
      drawRows();
      drawChoice();
    });
  }

  // The choice ---------------------------------------------------------------------------------------------------

  function drawChoice() {
    const row = candidate();
    const shown = draft === null ? job().arithmetic : row?.arithmetic ?? "";
    const cut = (draft === null ? rowOf(job().strategy) : row)?.cut;
    sum.textContent = [shown, cut].filter(Boolean).join("; ");
    const why = draft === null ? "" : row ? row.why : verdict?.why ?? "";
    said.textContent = why;
    said.classList.toggle("bad", draft !== null && (row ? !open(row) : verdict ? !verdict.ok : false));
    drawGrid(row?.ok && !row.current ? row : null);
    const chosen = row?.strategy ?? (draft === null ? job().strategy : "");
    for (const [place, one] of [[list, "tr"], [picture, ".point"]]) {
      const options = [...place.querySelectorAll(one)];
      for (const option of options) {
        const selected = option.dataset.strategy === chosen;
        option.setAttribute("aria-selected", selected);
        option.setAttribute("tabindex", selected ? 0 : -1);
      }
      if (!options.some((option) => option.dataset.strategy === chosen)) options[0]?.setAttribute("tabindex", 0);
    }
    drawButtons();
  }

  function drawGrid(ghost) {
    const { ranks, blocks, held, family, legend, nodes } = job();
    const part = (of, rank, place) => of?.rows[of.ranks[rank]]?.[place] ?? 0;
    const begins = (rank) => rank > 0 && nodes[rank] !== nodes[rank - 1]; // on another node than the rank before
    const several = nodes.some((node) => node !== nodes[0]);
    const width = Math.max(5, Math.min(40, Math.floor(264 / ranks)));
    const every = width >= 18 ? 1 : width >= 12 ? 4 : 8;
    const height = Math.max(9, Math.min(20, Math.floor(280 / blocks.length) - 2));
    const grid = make("div", ghost ? "grid ghosted" : "grid");
    grid.setAttribute("role", "img");
    grid.setAttribute("aria-label", `${blocks.length} blocks on ${ranks} ranks, ${legend[family]}`);
    const apart = several ? Math.max(6, Math.floor(width / 2)) : 0;
    const columns = nodes.map((_, rank) => (begins(rank) ? `${apart}px ` : "") + `minmax(0, ${width}px)`);
    grid.style.gridTemplateColumns = `max-content ${columns.join(" ")}`;
    const put = (element, rank) => {
      if (begins(rank)) grid.append(make("span", "apart"));
      grid.append(element);
    };
    grid.style.setProperty("--row", `${height}px`);
    if (width < 18) grid.style.columnGap = "1px";
    if (several) {
      grid.append(make("span", "side", "node"));
      for (let rank = 0; rank < ranks; ) {
        let next = rank + 1;
        while (next < ranks && !begins(next)) next++;
        const label = make("span", "node", String(nodes[rank]));
        label.style.gridColumn = `span ${next - rank}`;
        put(label, rank);
        rank = next;
      }
    }
    grid.append(make("span", "side", "rank"));
    for (let rank = 0; rank < ranks; rank++) put(make("span", "top", rank % every ? "" : String(rank)), rank);
    blocks.forEach((block, place) => {
      const side = make("span", "side", LOOSE[block.name] ?? block.name);
      if (height < 12) side.style.fontSize = `${height}px`;
      side.title = `${block.size} parameters`;
      grid.append(side);
      for (let rank = 0; rank < ranks; rank++) {
        const cell = make("span", "cell");
        const now = part(held, rank, place);
        if (now > 0) cell.append(bar("fill", family, now));
        const later = ghost ? part(ghost.held, rank, place) : 0;
        if (later > 0) cell.append(bar("ghost", ghost.family, later));
        cell.title = `rank ${rank}, ${block.name}: ${percent(now)}` + (ghost ? ` → ${percent(later)}` : "");
        put(cell, rank);
      }
    });
    const words = make("div", "legend");
    words.append(tinted(make("span", "swatch"), family), `${ghost ? "above, now" : "now"}: ${legend[family]}`);
    if (ghost) {
      const later = `below, ${ghost.strategy}: ${legend[ghost.family]}`;
      words.append(make("br"), tinted(make("span", "swatch later"), ghost.family), later);
    }
    if (job().link || job().limit) {
      const facts = [job().link && `link: ${job().link}`, job().limit && `a rank has room for ${job().limit}`];
      words.append(make("br"), facts.filter(Boolean).join("; "));
    }
    if (job().levers) words.append(make("br"), make("span", "levers", job().levers));
    const frame = make("div", "frame");
    frame.append(grid);
    drawing.replaceChildren(frame, words);
  }

  function bar(className, family, part) {
    const element = tinted(make("span", className), family);
    element.style.width = `${100 * part}%`;
    return element;
  }

  const percent = (part) => `${Math.round(100 * part)} %`;

  // The table ---------------------------------------------------------------------------------------------------------

  const list = make("tbody");
  const drawn = new WeakMap(); // row of the table -> its content
  const only = new Set(); // shown families; empty: all
  let sorting = null; // [key of a column, 1 or -1]; null: the fixed order
  let columns = []; // the shown columns

  // All possible rows of the table, in the fixed order.
  const everyRow = () => (verdict?.row && !rowOf(verdict.strategy) ? [verdict.row, ...job().rows] : job().rows);
  const filtered = () => everyRow().filter((row) => !only.size || only.has(row.family));
  const standing = (row) => (row.ok ? 0 : row.untried ? 1 : 2);

  function sorted() {
    const all = filtered();
    if (sorting === null) return all;
    const [key, way] = sorting;
    const value = (row) => row.values[key] ?? Infinity;
    const order = (a, b) => {
      if (value(a) === value(b)) return standing(a) - standing(b);
      return value(a) === Infinity || value(b) === Infinity ? value(a) - value(b) : way * (value(a) - value(b));
    };
    return [...all].sort(order);
  }

  function drawHeads() {
    const names = COLUMNS.filter(([key]) => key !== "between" || job().rows.some((row) => row.between));
    if (names.length === columns.length) return;
    columns = names;
    const table = make("table");
    table.setAttribute("role", "presentation");
    list.setAttribute("role", "listbox");
    list.setAttribute("aria-label", "strategies");
    const heads = make("tr");
    for (const [key, name, of, meaning] of [["", "strategy", "", "The order of the list: simple strategies first."], ...columns]) {
      const head = make("th", key);
      const button = make("button", "", name);
      if (of) button.append(make("small", "", of));
      head.title = key === "interval" ? meaning : `${meaning} A click sorts.`;
      button.dataset.key = key;
      button.addEventListener("click", () => sortBy(key === "interval" ? "step" : key));
      head.append(button);
      heads.append(head);
    }
    const header = make("thead");
    header.append(heads);
    table.append(header, list);
    rows.replaceChildren(table);
    rows.classList.toggle("nodes", columns.some(([key]) => key === "between"));
    markHeads();
  }

  // Each click changes the order: ascending, descending, fixed.
  function sortBy(key) {
    if (!key || (sorting?.[0] === key && sorting[1] < 0)) sorting = null;
    else sorting = [key, sorting?.[0] === key ? -1 : 1];
    markHeads();
    drawRows(true);
    drawChoice();
    rows.scrollTop = 0;
  }

  function markHeads() {
    for (const button of rows.querySelectorAll("th button")) {
      const key = button.dataset.key;
      const way = sorting?.[0] === key ? sorting[1] : sorting === null && !key ? 1 : 0;
      button.parentElement.dataset.way = key ? way : 0;
      const name = button.firstChild.textContent;
      button.setAttribute("aria-label", `sort by ${name}${way ? `: sorted, ${key ? (way > 0 ? "least first" : "most first") : "simple ones first"}` : ""}`);
    }
  }

  function drawChips() {
    const families = Object.keys(FAMILIES).filter((family) => job().rows.some((row) => row.family === family));
    const shown = `${filtered().length} of ${everyRow().length} are shown`;
    const state = JSON.stringify([families, [...only], shown]);
    if (chips.dataset.state === state) return;
    chips.dataset.state = state;
    const focused = chips.contains(document.activeElement) ? document.activeElement.dataset.family : null;
    chips.replaceChildren(...families.map((family) => {
      const chip = make("button", "chip");
      chip.append(tinted(make("span", "swatch"), family), family);
      chip.title = `Shows only these: ${job().legend[family]}`;
      chip.dataset.family = family;
      chip.setAttribute("aria-pressed", only.has(family));
      chip.addEventListener("click", () => {
        if (!only.delete(family)) only.add(family);
        drawRows(true);
        drawChoice();
      });
      return chip;
    }), make("span", "count", only.size ? shown : "a click shows only these; dark bar: memory at rest; pale bar: memory during a switch"));
    if (focused) chips.querySelector(`[data-family="${focused}"]`)?.focus();
  }

  // now: the user has requested another order, so rows may move under the pointer.
  function drawRows(now = false) {
    drawHeads();
    const before = new Map([...list.children].map((line) => [line.dataset.strategy, line]));
    const still = over && !now && before.size > 0;
    held = still;
    let next = list.firstElementChild;
    for (const row of sorted()) {
      let line = before.get(row.strategy);
      if (!line && still) continue;
      before.delete(row.strategy);
      line ??= make("tr");
      const figures = JSON.stringify([row, job().unpredicted_pause, row.recommended && job().because, columns.length]);
      if (drawn.get(line) !== figures) fill(line, row);
      drawn.set(line, figures);
      if (still || line === next) next = line.nextElementSibling;
      else list.insertBefore(line, next);
    }
    if (still) return;
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    for (const line of before.values()) line.remove();
    drawWords();
    drawChips();
    drawPicture();
    if (focused?.isConnected && document.activeElement !== focused) focused.focus();
    if (!rows.dataset.placed && list.offsetHeight) {
      rows.dataset.placed = true;
      const line = list.querySelector("tr.now");
      if (line && line.offsetTop + line.offsetHeight > rows.clientHeight) rows.scrollTop = line.offsetTop - rows.clientHeight / 2;
    }
  }

  // Lists the unknown figures once, here.
  function drawWords() {
    const all = job().rows;
    const unexamined = all.filter((row) => row.untried).length;
    const unknown = all.filter((row) => row.ok && row.step === "unknown").length;
    const first = all.find((row) => row.recommended);
    const why = job().unpredicted ? `, and cannot be predicted (${job().unpredicted})` : "";
    const sentences = [
      `${all.length} strategies.`,
      job().compared ? "The step times are those of the last comparison; now a step may take longer or shorter." : "",
      unexamined ? `${unexamined} are not examined yet; a switch runs the model on a few rows first.` : "",
      unknown ? `The step time of ${unknown} is not known yet${why}: the button below measures it.` : "",
      all.some((row) => row.pause && row.pause !== "unknown") || !job().unpredicted_pause ? "" : `No pause is predicted: ${job().unpredicted_pause}.`,
    ];
    words.replaceChildren(
      make("b", "", first ? `Recommended: ${first.label}, ${job().because}. ` : ""),
      sentences.filter(Boolean).join(" "),
    );
  }

  function fill(line, row) {
    line.className = row.current ? "now" : row.ok ? "" : row.untried ? "later" : "no";
    line.dataset.strategy = row.strategy;
    line.setAttribute("role", "option");
    if (!line.hasAttribute("tabindex")) line.tabIndex = -1;
    line.setAttribute("aria-disabled", !open(row));
    line.setAttribute("aria-label", spoken(row));
    const first = make("td");
    first.append(tinted(make("span", "swatch"), row.family), row.label);
    first.title = row.ok && row.proof ? `${row.strategy}: ${row.proof}` : row.strategy;
    if (row.current) first.append(make("span", "tag", "now"));
    if (row.recommended) {
      const mark = make("span", "tag recommended", "recommended");
      mark.title = job().because;
      first.append(mark);
    }
    if (row.label !== row.strategy) first.append(make("small", "", row.strategy));
    line.replaceChildren(first);
    if (!row.ok && !row.untried) {
      const why = make("td", "why", row.why);
      why.title = row.why;
      why.colSpan = columns.length;
      line.append(why);
      return;
    }
    for (const [key] of columns) line.append(cellOf(row, key));
  }

  function cellOf(row, key) {
    const known = row[key] && row[key] !== "unknown";
    const cell = make("td", key, known ? row[key] : "");
    if (!known && row[key] === "unknown") cell.title = { peak: UNTOLD, pause: job().unpredicted_pause }[key] ?? UNKNOWN;
    if (key === "memory" && known) {
      const scale = make("span", "bar");
      for (const [className, part] of [["during", row.during_part], ["rest", row.memory_part]]) {
        const filled = make("i", className);
        filled.style.width = `${100 * part}%`;
        scale.append(filled);
      }
      cell.prepend(scale);
      cell.title = row.memory_words;
      if (row.tight) cell.classList.add("tight");
    }
    if (key === "step" && known) {
      const told = [row.margin && `the median ${row.margin.replace(/^of /, "of only ")}`, row.predicted && `predicted ${row.predicted}`];
      cell.title = told.filter(Boolean).join("; ");
    }
    return cell;
  }

  // Screen readers read an option as one text: each figure with the name of its column.
  function spoken(row) {
    const name = [row.label, row.label === row.strategy ? "" : row.strategy, row.recommended ? "recommended" : "", row.current ? "in force" : ""];
    const figures = COLUMNS.map(([key, column]) => {
      if (!row[key] || key === "interval") return "";
      const more = key === "step" ? [row.predicted && row.step !== row.predicted ? row.predicted : "", row.margin] : [];
      return [`${column} ${row[key]}`, ...more].filter(Boolean).join(" ");
    });
    return [...name, ...(row.ok ? figures : [row.why])].filter(Boolean).join(", ");
  }

  // Choose on press too, because the mouse button may be released elsewhere.
  for (const kind of ["mousedown", "click"]) {
    list.addEventListener(kind, (event) => {
      const line = event.target.closest("tr");
      if (line) choose(line.dataset.strategy);
    });
  }

  // Arrow keys move through the options of a list, and choose.
  function steer(event, options, before, after) {
    const at = options.indexOf(event.target);
    if (at < 0) return;
    const to = { [before]: at - 1, [after]: at + 1, Home: 0, End: options.length - 1 }[event.key];
    if (to !== undefined && options[to] && !modified(event)) {
      event.preventDefault();
      choose(options[to].dataset.strategy);
      options[to].focus();
    } else if (event.key === "Enter" && plain(event) && !buttons.switch.disabled) {
      // Enter only chooses an option. In a notebook it would begin to edit a cell.
      event.preventDefault(); // otherwise the browser presses the button that then has the focus
      buttons.switch.focus();
    }
    event.stopPropagation();
  }

  rows.addEventListener("keydown", (event) => steer(event, [...list.children], "ArrowUp", "ArrowDown"));

  // The picture -------------------------------------------------------------------------------------------------------

  const WIDE = 380;
  const HIGH = 250;
  const BOX = { left: 50, right: WIDE - 14, top: 14, bottom: HIGH - 34 };
  const BAND = 22; // for strategies with an unknown step time
  let dots = []; // {row, x, y} in the units of the picture

  // Maps a value to a share of the axis: linear from 0, or logarithmic if values are far apart.
  function scaleOf(values) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    if (!(low > 0) || high / low < 15) {
      const top = (high || 1) * 1.08;
      return { at: (value) => value / top, marks: ticks(high || 1, 3).filter((value) => value <= top) };
    }
    const [from, to] = [Math.log(low / 1.3), Math.log(high * 1.3)];
    const marks = [];
    for (let ten = 10 ** Math.floor(Math.log10(low)); ten <= high * 1.3; ten *= 10) {
      for (const one of high / low > 200 ? [1] : [1, 3]) if (one * ten >= low / 1.3 && one * ten <= high * 1.3) marks.push(one * ten);
    }
    return { at: (value) => (Math.log(value) - from) / (to - from), marks };
  }

  function drawPicture() {
    const all = filtered().filter((row) => row.ok && row.values.peak);
    const known = all.filter((row) => row.values.step !== null);
    const focused = picture.contains(document.activeElement) ? document.activeElement.dataset.strategy : null;
    const svg = shape("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "listbox", "aria-label": "strategies, by the memory and the time of a step" });
    picture.replaceChildren(svg);
    dots = [];
    if (!all.length) {
      svg.append(shape("text", { x: WIDE / 2, y: HIGH / 2, class: "mark middle" }, only.size ? "none of these is known to fit" : "nothing is known yet"));
      return;
    }
    const band = known.length < all.length ? BAND : 0;
    const across = scaleOf(all.map((row) => row.values.peak));
    const down = scaleOf(known.length ? known.flatMap((row) => [row.values.step, row.values.high ?? row.values.step]) : [1]);
    const x = (value) => BOX.left + (BOX.right - BOX.left) * across.at(value);
    const y = (value) => BOX.bottom - (BOX.bottom - BOX.top - band) * Math.min(1, Math.max(0, down.at(value)));
    const axes = shape("g", { "aria-hidden": true });
    svg.append(axes);
    for (const value of across.marks) {
      axes.append(shape("line", { x1: x(value), x2: x(value), y1: BOX.top, y2: BOX.bottom }));
      axes.append(shape("text", { x: x(value), y: BOX.bottom + 13, class: "mark middle" }, bytes(value)));
    }
    for (const value of known.length ? down.marks : []) {
      axes.append(shape("line", { x1: BOX.left, x2: BOX.right, y1: y(value), y2: y(value) }));
      axes.append(shape("text", { x: BOX.left - 5, y: y(value) + 4, class: "mark end" }, seconds(value)));
    }
    axes.append(shape("text", { x: BOX.right, y: HIGH - 4, class: "name end" }, "peak memory of the fullest rank"));
    axes.append(shape("text", { x: 2, y: 9, class: "name" }, "step"));
    const limit = job().limit_bytes;
    if (limit && x(limit) > BOX.left && x(limit) < BOX.right) {
      axes.append(shape("rect", { x: x(limit), y: BOX.top, width: BOX.right - x(limit), height: BOX.bottom - BOX.top, class: "beyond" }));
      axes.append(shape("text", { x: x(limit) + 3, y: BOX.bottom - 5, class: "mark" }, "no room"));
    }
    if (band) axes.append(shape("text", { x: BOX.right, y: BOX.top - 4, class: "mark end" }, `step time not known: ${all.length - known.length}`));
    if (!known.length) axes.append(shape("text", { x: (BOX.left + BOX.right) / 2, y: (BOX.top + BOX.bottom) / 2, class: "mark middle" }, "no step time is known yet"));

    for (const row of all) {
      const { peak, step } = row.values;
      dots.push({ row, x: x(peak), y: step === null ? BOX.top + BAND / 2 - 2 : y(step) });
    }
    const best = dots.filter(({ row }) => row.values.step !== null && !known.some((other) => beats(other.values, row.values)));
    best.sort((a, b) => a.x - b.x);
    if (best.length) {
      const path = best.map((dot, i) => (i ? `H${dot.x}V${dot.y}` : `M${dot.x} ${BOX.top + band}V${dot.y}`)).join("");
      axes.append(shape("path", { d: `${path}H${BOX.right}`, class: "frontier" }));
    }
    for (const dot of dots) {
      const { low, high } = dot.row.values;
      if (low && high) axes.append(tinted(shape("line", { x1: dot.x, x2: dot.x, y1: y(low), y2: y(high), class: "interval" }), dot.row.family));
    }
    // Important dots are drawn last, on top. Arrow keys go from left to right.
    const weight = ({ row }) => row.current * 4 + row.recommended * 2 + best.some((one) => one.row === row);
    dots.sort((a, b) => a.x - b.x || a.y - b.y);
    for (const dot of dots) svg.append(pointOf(dot));
    label([...dots].filter((dot) => weight(dot)).sort((a, b) => weight(b) - weight(a)), axes);
    if (focused) svg.querySelector(`[data-strategy="${CSS.escape(focused)}"]`)?.focus();
  }

  const beats = (one, other) => one.peak <= other.peak && one.step <= other.step && (one.peak < other.peak || one.step < other.step);

  function pointOf({ row, x, y }) {
    const known = row.values.step !== null;
    const kind = !known ? "unknown" : row.step.startsWith("≈") ? "predicted" : "measured";
    const point = tinted(shape("g", { class: `point ${kind}`, role: "option", "aria-label": spoken(row), tabindex: -1, transform: `translate(${x} ${y})` }), row.family);
    point.dataset.strategy = row.strategy;
    point.append(shape("circle", { r: 11, class: "chosen" }));
    if (row.current) point.append(shape("circle", { r: 8.5, class: "ring" }));
    point.append(known ? shape("circle", { r: 5, class: "dot" }) : shape("path", { d: "M-3 -3 3 3M-3 3 3 -3", class: "dot" }));
    return point;
  }

  // Draws names beside dots if there is room.
  function label(named, into) {
    const taken = dots.map((dot) => [dot.x - 6, dot.y - 6, 12, 12]);
    for (const { row, x, y } of named) {
      const text = row.label + (row.current ? ", now" : "");
      const wide = 6.7 * text.length + 2;
      const places = [[x + 11, y - 8], [x - 11 - wide, y - 8], [x + 14, y + 4], [x - 14 - wide, y + 4], [x - wide / 2, y + 22]];
      const free = places.find(([left, base]) => left > BOX.left && left + wide < WIDE && base - 10 > BOX.top && base < BOX.bottom
        && !taken.some(([l, t, w, h]) => left < l + w && l < left + wide && base - 9 < t + h && t < base + 2));
      if (!free) continue;
      taken.push([free[0], free[1] - 9, wide, 11]);
      into.append(shape("text", { x: free[0], y: free[1], class: row.recommended || row.current ? "dot-label strong" : "dot-label" }, text));
    }
  }

  function nearest(event) {
    const frame = picture.firstElementChild.getBoundingClientRect();
    const [x, y] = [((event.clientX - frame.left) * WIDE) / frame.width, ((event.clientY - frame.top) * HIGH) / frame.height];
    const away = (dot) => Math.hypot(dot.x - x, dot.y - y);
    const first = dots.reduce((a, b) => (a && away(a) <= away(b) ? a : b), null);
    return first && away(first) < 24 ? first.row : null;
  }

  picture.addEventListener("mousedown", (event) => {
    const row = nearest(event);
    if (row) choose(row.strategy);
  });
  picture.addEventListener("pointermove", (event) => {
    const row = nearest(event);
    const step = row && row.step !== "unknown" ? `${row.step} a step${row.margin ? ` (${row.margin})` : ""}` : "step time not known yet";
    hint.textContent = row ? `${row.label}: ${row.peak} at the peak, ${step}` : READ_PICTURE;
    picture.style.cursor = row ? "pointer" : "default";
  });
  picture.addEventListener("pointerleave", () => { hint.textContent = READ_PICTURE; });
  picture.addEventListener("keydown", (event) => steer(event, [...picture.querySelectorAll(".point")], "ArrowLeft", "ArrowRight"));

  const heard = (message) => {
    if (unheard.delete(message.heard)) {
      root.dataset.unheard = unheard.size;
      drawNote(unheard.size > 0 && note.textContent === UNHEARD);
    }
    if (draft !== null && message.checked?.text === (verdict?.row?.strategy === draft ? verdict.text : draft)) {
      const row = verdict?.strategy === message.checked.strategy ? verdict.row : undefined;
      verdict = { row, ...message.checked }; // the first answer comes without a row
      if (verdict.row) drawRows(true);
      drawChoice();
    }
  };
  const news = [["change:job", drawJob], ["change:pulse", drawPulse], ["change:note", () => drawNote()], ["msg:custom", heard]];
  const listeners = news.map(([event, act]) => [event, (...what) => (hear(), act(...what))]);
  for (const event of ["comm:close", "destroy"]) listeners.push([event, fallSilent]);
  for (const [event, act] of listeners) model.on(event, act);
  drawNote();
  drawJob();
  drawPulse();
  return () => {
    clearTimeout(patience);
    for (const [event, act] of listeners) model.off(event, act);
  };
}

export const widget = { render };
