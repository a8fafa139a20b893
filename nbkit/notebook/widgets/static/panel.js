// The strategy panel. Python tells what is (`job`: changes with the strategy, `pulse`: with every look, `note`); what the
// user is about to choose lives here alone, so that two panels on one cluster agree on what is and nothing else.

const KEYS = [
  ["switch", "Apply", "main", "apply"],
  ["try", "Try 10 steps", "", "try"],
  ["measure", "Measure all that fit", "", "measure"],
  ["undo", "Undo", "", "undo"],
];
const TITLES = {
  "strategy": "",
  "memory": "What the fullest rank holds between steps: weights, gradients, optimizer state and buffers. Paler: while the switch is made.",
  "peak": "What the fullest rank holds at the highest moment of a step, as counted in a step. ≈: predicted.",
  "step": "The median time of the newest steps, and the interval in which it lies with 95 %. The interval is 10 % wider if the steps were made more than 400 steps ago. ≈: predicted from the steps of the strategy that runs now.",
  "sends": "What the busiest rank sends in a step, without backups, as counted in a step. ≈: predicted. On several nodes also what all ranks send between nodes.",
  "moves": "The bytes that a switch to this strategy moves, over all ranks. They are exact.",
  "pause": "The predicted time without a step while the switch is made.",
  "pays back": "After this many steps the faster step has made up for the pause. Within noise: the intervals of both steps overlap, so nobody can say.",
};
// What a column is of stands below its name: two columns of bytes are not the same bytes.
const OF = {
  "memory": "at rest,\nfullest rank", "peak": "in a step,\nfullest rank", "step": "≈ predicted", "sends": "in a step,\nno backups,\nbusiest rank",
  "moves": "over\nall ranks", "pause": "predicted", "pays back": "after",
};
const COLUMNS = [["memory", "memory"], ["peak", "peak"], ["step", "step"], ["sends", "sends"], ["moves", "moved"], ["pause", "pause"], ["pays back", "payback"]];
const LOOSE = { before: "before blocks", after: "after blocks" }; // what is in no block
const UNTOLD = "Not known yet: the model has not been examined for this strategy.";
const UNKNOWN = "This job has not measured it yet. Try 10 steps measures it.";
const APART = [
  ["pause", "Pause", "", "pause"],
  ["save", "Save", "", "save"],
  ["stop", "Stop", "stop", "stop"],
];

const UNHEARD_MS = 3000;
const UNHEARD =
  "The kernel has not received this click, because a cell is running. The click acts when the cell ends. " +
  "A training started with %%distributed --detach reacts at once.";

// Python lets hear of itself every other second, whatever cells run; a page that loads, or was saved, is given longer.
const SILENT_MS = 6000;
const FIRST_MS = 30000;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// Enter with Shift, Ctrl, Alt or Meta runs a cell where we are shown; Enter also ends the composition of a word.
const modified = (event) =>
  event.shiftKey || event.ctrlKey || event.altKey || event.metaKey || event.isComposing || event.keyCode === 229;
const plain = (event) => !modified(event) && !event.repeat; // a key that is held down is pressed once

function titled(words, content) {
  const box = make("div", "box");
  box.append(make("div", "title", words), content);
  return box;
}

function render({ model, el }) {
  const root = make("div", "nbkit-panel");
  root.dataset.lmSuppressShortcuts = "true"; // typing here must not run commands of the notebook
  const head = make("div", "head");
  const headline = make("span", "headline"); // no live region: it changes with every step
  const name = make("span", "name");
  head.append(make("span", "dot"), headline, name);
  for (const kind of ["keydown", "keyup"]) {
    root.addEventListener(kind, (event) => {
      // A button that was clicked keeps the focus, and the browser lets any Enter and any space press it again.
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
  const drawing = make("div", "job");
  const rows = make("div", "rows");
  body.append(titled("who holds what: ranks across, layers down", drawing), titled("", rows));

  const keys = make("div", "keys");
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
  root.append(head, line, said, body, keys, told, note);
  el.append(root);

  let draft = null; // the strategy that the user looks at; null: the one in force
  let verdict = null; // what Python says of a draft that is in no row
  let shown = ""; // the outcome that is on the page
  const unheard = new Set(); // presses of buttons in this page
  let silent = false; // nothing comes from the kernel any more
  let patience = setTimeout(fallSilent, FIRST_MS);

  const job = () => model.get("job");
  const pulse = () => model.get("pulse");
  const rowOf = (text) => (job().rows ?? []).find((row) => row.strategy === text);
  const open = (row) => row.ok || row.untried; // what was not tried yet is tried when it is chosen
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
      if (previewed) drawRows();
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

  // What is ---------------------------------------------------------------------------------------------------------

  function drawPulse() {
    const { phase, headline: words, asked, results: outcomes = [] } = pulse();
    root.dataset.phase = silent ? "silent" : phase ?? "looking";
    input.disabled = silent;
    const waiting = phase === "idle" || phase === "training" ? "working out what each strategy would cost …" : "";
    const doing = asked || (job().strategy ? "" : waiting);
    headline.textContent = silent ? "nothing is heard from the kernel" : doing ? `${words} — ${doing}` : words ?? "";
    buttons.pause.textContent = phase === "held" ? "Go on" : "Pause";
    drawTold(outcomes[0]);
    drawButtons();
  }

  function drawTold(outcome) {
    const words = JSON.stringify(outcome ?? null);
    if (words === shown) return; // what is drawn again is read out again
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
    line.style.display = body.style.display = keys.style.display = known ? "" : "none";
    name.textContent = job().cluster ? `cluster ${job().cluster}` : "";
    if (!known) return;
    if (draft === null || draft === job().strategy || verdict?.strategy === job().strategy) {
      draft = verdict = null;
      if (input.value !== job().strategy) input.value = job().strategy;
    } else if (verdict?.row) {
      model.send({ do: "check", strategy: verdict.text }); // its figures are of the strategy before, or of older steps
    }
    drawRows();
    drawChoice();
    drawPulse();
  }

  // What could be ---------------------------------------------------------------------------------------------------

  function drawChoice() {
    const row = candidate();
    const shown = draft === null ? job().arithmetic : row?.arithmetic ?? "";
    const cut = (draft === null ? rowOf(job().strategy) : row)?.cut;
    sum.textContent = [shown, cut].filter(Boolean).join("; ");
    const why = draft === null ? "" : row ? row.why : verdict?.why ?? "";
    said.textContent = why;
    said.classList.toggle("bad", draft !== null && (row ? !open(row) : verdict ? !verdict.ok : false));
    drawGrid(row?.ok && !row.current ? row : null);
    for (const line of rows.querySelectorAll("tbody tr")) {
      const selected = line.dataset.strategy === (row?.strategy ?? (draft === null ? job().strategy : ""));
      line.setAttribute("aria-selected", selected);
      line.tabIndex = selected ? 0 : -1;
    }
    if (!rows.querySelector("tbody tr[tabindex='0']")) {
      const first = rows.querySelector("tbody tr");
      if (first) first.tabIndex = 0;
    }
    drawButtons();
  }

  function drawGrid(ghost) {
    const { ranks, blocks, held, axis, legend, nodes } = job();
    const part = (of, rank, place) => of?.rows[of.ranks[rank]]?.[place] ?? 0;
    const begins = (rank) => rank > 0 && nodes[rank] !== nodes[rank - 1]; // another node than the rank before
    const several = nodes.some((node) => node !== nodes[0]);
    const width = Math.max(5, Math.min(40, Math.floor(300 / ranks)));
    const every = width >= 18 ? 1 : width >= 12 ? 4 : 8;
    const height = Math.max(9, Math.min(20, Math.floor(280 / blocks.length) - 2));
    const grid = make("div", ghost ? "grid ghosted" : "grid");
    grid.setAttribute("role", "img");
    grid.setAttribute("aria-label", `${blocks.length} blocks on ${ranks} ranks, ${legend[axis]}`);
    const apart = several ? Math.max(6, Math.floor(width / 2)) : 0;
    const columns = nodes.map((_, rank) => (begins(rank) ? `${apart}px ` : "") + `${width}px`);
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
        if (now > 0) cell.append(bar(`fill ${axis}`, now));
        const later = ghost ? part(ghost.held, rank, place) : 0;
        if (later > 0) cell.append(bar(`ghost ${ghost.axis}`, later));
        cell.title = `rank ${rank}, ${block.name}: ${percent(now)}` + (ghost ? ` → ${percent(later)}` : "");
        put(cell, rank);
      }
    });
    const words = make("div", "legend");
    words.append(make("span", `swatch ${axis}`), `${ghost ? "above, now" : "now"}: ${legend[axis]}`);
    if (ghost) {
      const later = `below, ${ghost.strategy}: ${legend[ghost.axis]}`;
      words.append(make("br"), make("span", `swatch later ${ghost.axis}`), later);
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

  function bar(className, part) {
    const element = make("span", className);
    element.style.width = `${100 * part}%`;
    return element;
  }

  const percent = (part) => `${Math.round(100 * part)} %`;

  const list = make("tbody");
  const drawn = new WeakMap(); // row of the table -> what it shows

  function drawTable() {
    const table = make("table");
    table.setAttribute("role", "listbox");
    table.setAttribute("aria-label", "strategies");
    const titles = make("tr");
    for (const word of Object.keys(TITLES)) {
      const title = make("th", "", word);
      if (OF[word]) title.append(make("small", "", OF[word]));
      title.title = TITLES[word];
      titles.append(title);
    }
    const header = make("thead");
    header.append(titles);
    table.append(header, list);
    rows.append(table);
  }

  // Rows whose figures are as before stay what they are: the pace of the one in force changes while the mouse is on others.
  function drawRows() {
    const focused = rows.contains(document.activeElement) ? document.activeElement.dataset.strategy : null;
    const top = rows.scrollTop;
    const before = new Map([...list.children].map((line) => [line.dataset.strategy, line]));
    let next = list.firstElementChild;
    for (const row of verdict?.row && !rowOf(verdict.strategy) ? [verdict.row, ...job().rows] : job().rows) {
      const figures = JSON.stringify([row, job().unpredicted_pause, row.recommended && job().because]);
      let line = before.get(row.strategy);
      before.delete(row.strategy);
      if (line && drawn.get(line) !== figures) {
        const fresh = lineOf(row);
        line.replaceWith(fresh);
        if (line === next) next = fresh;
        line = fresh;
      }
      line ??= lineOf(row);
      drawn.set(line, figures);
      if (line === next) next = line.nextElementSibling;
      else list.insertBefore(line, next);
    }
    for (const line of before.values()) line.remove();
    rows.scrollTop = top;
    rows.previousSibling.textContent = wordsOn(job().rows);
    if (focused && document.activeElement?.dataset.strategy !== focused) list.querySelector(`[data-strategy="${CSS.escape(focused)}"]`)?.focus();
  }

  // How many rows there are, of which some are out of sight, and what is recommended.
  function wordsOn(all) {
    const known = all.filter((row) => row.ok && row.step !== "unknown").length;
    const unknown = all.filter((row) => row.ok).length - known;
    const why = job().unpredicted ? `, and cannot be predicted (${job().unpredicted})` : "";
    const asked = unknown ? `The step time of ${unknown} is not known yet${why}: the button below measures it.` : "";
    const first = all.find((row) => row.recommended);
    const sure = first ? `Recommended: ${first.label}, ${job().because}.` : "";
    const unexamined = all.filter((row) => row.untried).length;
    const later = unexamined ? `${unexamined} are not examined yet; a switch runs the model on a few rows first.` : "";
    return [`${all.length} strategies. Choose a row, then Apply.`, later, asked, sure].filter(Boolean).join(" ");
  }

  function lineOf(row) {
    const element = make("tr", row.current ? "now" : row.ok ? "" : "no");
    element.dataset.strategy = row.strategy;
    element.setAttribute("role", "option");
    element.tabIndex = -1; // or the row that had the focus could not get it back
    element.setAttribute("aria-disabled", !open(row));
    const first = make("td", "", row.label);
    first.title = row.ok && row.proof ? `${row.strategy}: ${row.proof}` : row.strategy;
    if (row.label !== row.strategy) first.append(make("small", "", row.strategy));
    if (row.recommended) {
      const mark = make("span", "recommended", "recommended");
      mark.title = job().because;
      first.append(mark);
    }
    element.append(first);
    if (row.ok) {
      const memory = make("td", "memory");
      const scale = make("span", "bar");
      for (const [className, part] of [["during", row.during_part], ["rest", row.memory_part]]) {
        const filled = make("i", className);
        filled.style.width = `${100 * part}%`;
        scale.append(filled);
      }
      memory.append(scale, row.memory);
      memory.title = row.memory_words;
      if (row.tight) memory.classList.add("tight");
      element.append(memory);
      for (const [, name] of COLUMNS.slice(1)) {
        const known = row[name] !== "unknown";
        const cell = make("td", known ? "" : "dim", known ? row[name].replace("within ", "within\n") : "?");
        if (!known) cell.title = { peak: UNTOLD, pause: job().unpredicted_pause }[name] ?? UNKNOWN;
        if (name === "step" && row.margin) cell.append(make("small", "predicted", row.margin.replace(/(^| )of /, (_, apart) => (apart ? "\n" : "")).replace(", ", "\n")));
        if (name === "step" && row.predicted) cell.append(make("small", "predicted", row.predicted));
        element.append(cell);
      }
    } else {
      const why = make("td", "", row.why);
      why.colSpan = Object.keys(TITLES).length - 1;
      element.append(why);
    }
    element.setAttribute("aria-label", spoken(row));
    // At once: news can redraw the table before the button of the mouse is let go, and there is no click then.
    for (const kind of ["mousedown", "click"]) element.addEventListener(kind, () => choose(row.strategy));
    return element;
  }

  // An option is read out as one text: each figure with the name of its column.
  function spoken(row) {
    const name = [row.label, row.label === row.strategy ? "" : row.strategy, row.recommended ? "recommended" : "", row.current ? "in force" : ""];
    const figures = COLUMNS.map(([column, key]) => row[key] && `${column} ${row[key]}${key === "step" && row.predicted ? ` ${row.predicted}` : ""}${key === "step" && row.margin ? ` ${row.margin}` : ""}`);
    return [...name, ...(row.ok ? figures : [row.why])].filter(Boolean).join(", ");
  }

  rows.addEventListener("keydown", (event) => {
    const lines = [...rows.querySelectorAll("tbody tr")];
    const at = lines.indexOf(event.target);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: lines.length - 1 }[event.key];
    if (to !== undefined && lines[to] && !modified(event)) {
      event.preventDefault();
      choose(lines[to].dataset.strategy);
      lines[to].focus();
    } else if (event.key === "Enter" && plain(event) && !buttons.switch.disabled) {
      // A row is only chosen: where we are shown, Enter is what begins to edit a cell.
      event.preventDefault(); // or the browser presses the button that has the focus then
      buttons.switch.focus();
    }
    event.stopPropagation();
  });

  const heard = (message) => {
    if (unheard.delete(message.heard)) {
      root.dataset.unheard = unheard.size;
      drawNote(unheard.size > 0 && note.textContent === UNHEARD);
    }
    if (draft !== null && message.checked?.text === (verdict?.row?.strategy === draft ? verdict.text : draft)) {
      const row = verdict?.strategy === message.checked.strategy ? verdict.row : undefined;
      verdict = { row, ...message.checked }; // the first word on it comes without
      if (verdict.row) drawRows();
      drawChoice();
    }
  };
  const news = [["change:job", drawJob], ["change:pulse", drawPulse], ["change:note", () => drawNote()], ["msg:custom", heard]];
  const listeners = news.map(([event, act]) => [event, (...what) => (hear(), act(...what))]);
  for (const event of ["comm:close", "destroy"]) listeners.push([event, fallSilent]);
  for (const [event, act] of listeners) model.on(event, act);
  drawTable();
  drawNote();
  drawJob();
  drawPulse();
  return () => {
    clearTimeout(patience);
    for (const [event, act] of listeners) model.off(event, act);
  };
}

export default { render };
