// nbkit in JupyterLab: a sidebar, a line in the status bar, and a switch in each notebook's toolbar.
//
// This file is what the browser loads. Nothing builds it: Lab loads extensions by webpack's module federation, so a
// script leaves a container {init, get} in window._JUPYTERLAB, and takes Lab's own modules from the share scope.
// package.json has a digest of both files: after a change, `python -m tests.notebook.test_lab_files` writes it.
// What the sidebar shows comes from nbkit/notebook/lab/server.py. What it starts is a cell, which one can read and keep.

(() => {
  const NAME = "nbkit-train";
  const { search: DIGEST } = new URL(document.currentScript.src); // browsers keep files of extensions for a year
  const SEEN_MS = 2000;
  const UNSEEN_MS = 6000;
  const ON = "getattr(get_ipython(), 'nbkit_all_cells', None)"; // None: the kernel has not loaded nbkit
  const OF_LAB = /^@jupyter(lab\/application-top|-notebook\/app)/;

  let scope;
  const shared = async name => {
    const versions = Object.values(scope[name] ?? {});
    return (await (versions.find(one => OF_LAB.test(one.from)) ?? versions[0]).get())();
  };

  (window._JUPYTERLAB ??= {})[NAME] = {
    init: given => {
      scope = given;
    },
    get: async () => {
      const names = ["application", "apputils", "coreutils", "notebook", "outputarea", "services", "statusbar", "ui-components"];
      const modules = await Promise.all([...names.map(name => `@jupyterlab/${name}`), "@lumino/widgets"].map(shared));
      const lab = Object.assign({}, ...modules.map(one => ({ ...one })));
      return () => ({ __esModule: true, default: plugin(lab) });
    },
  };

  const plugin = lab => ({
    id: `${NAME}:plugin`,
    description: "Clusters, runs and lessons of nbkit.",
    autoStart: true,
    requires: [lab.INotebookTracker],
    optional: [lab.IStatusBar, lab.ICommandPalette, lab.ILayoutRestorer],
    activate: (app, tracker, statusBar, palette, restorer) => {
      const sheet = `${lab.PageConfig.getOption("fullLabextensionsUrl")}/${NAME}/static/nbkit.css${DIGEST}`;
      document.head.append(element("link", { rel: "stylesheet", href: sheet }));
      const server = new Server(lab);
      const notebooks = new Notebooks(lab, app, tracker);
      const sidebar = new Sidebar(lab, app, server, notebooks);
      app.shell.add(sidebar.widget, "left", { rank: 210 });
      restorer?.add(sidebar.widget, NAME);
      const status = statusItem(lab, () => app.shell.activateById(sidebar.widget.id));
      statusBar?.registerStatusItem(`${NAME}:status`, { item: status.widget, align: "left", rank: 20 });
      addCommands(app, palette, notebooks, sidebar);
      app.docRegistry.addWidgetExtension("Notebook", { createNew: panel => notebooks.add(panel) });
      void app.restored.then(() => explainOtherTab(app));

      const look = async () => {
        if (!document.hidden) {
          const kernel = notebooks.kernel();
          await server.look(kernel?.id, notebooks.path(), sidebar.widget.isVisible);
          sidebar.draw();
          status.show(server.state);
        }
        timer = setTimeout(look, sidebar.widget.isVisible ? SEEN_MS : UNSEEN_MS);
      };
      let timer = setTimeout(look, 0);
      const now = () => {
        clearTimeout(timer);
        timer = setTimeout(look, 0);
      };
      sidebar.now = now;
      tracker.currentChanged.connect(now);
    },
  });

  // ---- what the server knows ----------------------------------------------------------------------------------------

  class Server {
    constructor(lab) {
      this.lab = lab;
      this.settings = lab.ServerConnection.makeSettings();
      this.state = null;
      this.error = "";
    }

    async ask(method, path) {
      const { ServerConnection, URLExt } = this.lab;
      const url = URLExt.join(this.settings.baseUrl, "nbkit", path);
      const answer = await ServerConnection.makeRequest(url, { method }, this.settings);
      const told = await answer.json().catch(() => ({}));
      if (!answer.ok) throw new Error(answer.status === 404 ? "nbkit is not installed where the server runs." : told.message);
      return told;
    }

    async look(kernel, path, ranks) {
      const asked = new URLSearchParams({ kernel: kernel ?? "", path: path ?? "", ranks: ranks ? "1" : "" });
      try {
        this.state = await this.ask("GET", `state?${asked}`);
        this.error = "";
      } catch (error) {
        this.error = error.message || "The server does not answer.";
      }
    }
  }

  // ---- the notebooks ------------------------------------------------------------------------------------------------

  class Notebooks {
    constructor(lab, app, tracker) {
      Object.assign(this, { lab, app, tracker });
      this.loaded = new WeakSet(); // kernels with nbkit
      this.docks = new WeakMap(); // notebook -> what is docked beside it
    }

    path = () => this.tracker.currentWidget?.context.path;
    kernel = () => this.tracker.currentWidget?.sessionContext.session?.kernel;

    // Put a cell below the current one, and run it.
    run(source) {
      const panel = this.tracker.currentWidget;
      const { NotebookActions } = this.lab;
      NotebookActions.insertBelow(panel.content);
      panel.content.activeCell.model.sharedModel.setSource(this.withNbkit(panel, source));
      this.app.shell.activateById(panel.id);
      return NotebookActions.run(panel.content, panel.sessionContext);
    }

    withNbkit = (panel, source) =>
      this.loaded.has(panel.sessionContext.session?.kernel) ? source : `%load_ext nbkit\n${source}`;

    // Show what a magic displays beside the notebook.
    dock(source, label) {
      const { MainAreaWidget, OutputAreaModel, SimplifiedOutputArea } = this.lab;
      const panel = this.tracker.currentWidget;
      const { rendermime } = panel.content;
      const area = new SimplifiedOutputArea({ model: new OutputAreaModel({ trusted: true }), rendermime });
      area.addClass("nbkit-docked");
      const shown = new MainAreaWidget({ content: area });
      shown.id = `nbkit-docked-${(this.docked = (this.docked ?? 0) + 1)}`;
      Object.assign(shown.title, { label, closable: true, caption: `${label} of ${panel.title.label}` });
      // A tab beside what is docked already, so that the notebook keeps its room.
      const beside = this.docks.get(panel)?.find(one => !one.isDisposed);
      this.app.shell.add(shown, "main", beside ? { mode: "tab-after", ref: beside.id } : { mode: "split-right", ref: panel.id });
      this.docks.set(panel, [...(this.docks.get(panel) ?? []), shown]);
      const wait = element("p", { className: "nbkit-wait", role: "status" }, "The kernel is busy. This appears when its cell has ended.");
      if (panel.sessionContext.session?.kernel?.status === "busy") area.node.append(wait);
      const done = SimplifiedOutputArea.execute(this.withNbkit(panel, source), area, panel.sessionContext);
      void done.catch(() => {}).then(() => wait.remove());
      panel.disposed.connect(() => shown.dispose());
      return shown;
    }

    // Give a notebook its switch "cells go to all ranks". The kernel has the truth: it is asked, not remembered.
    add(panel) {
      const { NotebookActions, Widget } = this.lab;
      const button = element("button", { className: "nbkit-switch", role: "switch" });
      const widget = new Widget({ node: element("div", {}, button) });
      const show = on => {
        button.setAttribute("aria-checked", String(on));
        button.textContent = on ? "cells → ALL RANKS" : "cells → notebook";
        button.setAttribute("aria-label", "Cells go to all ranks");
        button.title = on
          ? "Each cell runs on all ranks, unless it begins with %, ! or ?. Click: cells run in this notebook."
          : "Cells run in this notebook. Click: each cell runs on all ranks.";
        panel.toggleClass("nbkit-all-ranks", on);
        panel.title.className = on ? "nbkit-tab-all" : "";
      };
      const kernel = () => panel.sessionContext.session?.kernel;
      const ask = async () => {
        const asked = kernel();
        if (!asked || (await asked.info).language_info.name !== "python") return;
        const code = { code: "", silent: true, store_history: false, user_expressions: { on: ON } };
        const reply = await asked.requestExecute(code).done;
        const told = reply.content.user_expressions?.on?.data?.["text/plain"];
        if (told === "None") this.loaded.delete(asked);
        else if (told) this.loaded.add(asked);
        if (!panel.isDisposed) show(told === "True");
      };
      const begin = () => {
        show(false); // a new kernel sends no cell to ranks
        void ask().catch(() => {});
      };
      button.onclick = async () => {
        if (!kernel()) return;
        const on = button.getAttribute("aria-checked") !== "true";
        const code = this.withNbkit(panel, `%distributed ${on ? "on" : "off"}`);
        button.setAttribute("aria-busy", "true"); // until the kernel's cell has ended
        const future = kernel().requestExecute({ code, store_history: false });
        let said = "";
        future.onIOPub = ({ header, content }) => {
          if (header.msg_type === "error") said = content.evalue;
          else if (content.name === "stderr") said += content.text;
        };
        await future.done.catch(() => {});
        await ask().catch(() => {});
        button.removeAttribute("aria-busy");
        if (on !== (button.getAttribute("aria-checked") === "true"))
          void this.lab.showErrorMessage("The switch stays where it was", said);
      };
      const executed = (_, { notebook, cell }) => {
        const source = cell.model.sharedModel.getSource();
        if (notebook === panel.content && /%distributed o|nbkit|%cluster/.test(source)) void ask().catch(() => {});
      };
      const status = (_, now) => {
        if (!/restarting|dead|starting/.test(now)) return;
        this.loaded.delete(kernel());
        show(false);
      };
      const tellAgain = (_, now) => now === "connected" && begin();
      // After a reload Lab does not know which output an update is for. The outputs of nbkit keep their display id.
      const update = (_, { header, content }) => {
        if (header.msg_type !== "update_display_data") return;
        const { data, metadata } = content;
        for (const cell of panel.content.model?.cells ?? [])
          for (let i = 0; i < (cell.outputs?.length ?? 0); i++)
            if (metadata.nbkit_display_id && cell.outputs.get(i).metadata.nbkit_display_id === metadata.nbkit_display_id)
              cell.outputs.get(i).setData({ data, metadata });
      };
      panel.sessionContext.kernelChanged.connect(begin);
      panel.sessionContext.statusChanged.connect(status);
      panel.sessionContext.connectionStatusChanged.connect(tellAgain);
      panel.sessionContext.iopubMessage.connect(update);
      NotebookActions.executed.connect(executed);
      show(false);
      void panel.sessionContext.ready.then(begin);
      panel.toolbar.insertItem(0, "nbkit-all-ranks", widget); // a narrow toolbar hides what is at its end
      panel.disposed.connect(() => NotebookActions.executed.disconnect(executed));
      return widget;
    }
  }

  // ---- the sidebar --------------------------------------------------------------------------------------------------

  class Sidebar {
    constructor(lab, app, server, notebooks) {
      Object.assign(this, { lab, app, server, notebooks, now: () => {}, drawn: "" });
      this.options = element("input", { id: "nbkit-options", placeholder: "-n 4 --cpu", spellcheck: false });
      this.options.onkeydown = event => event.key === "Enter" && this.start();
      this.startButton = button("start", "Start", "Start a cluster in a new cell", () => this.start());
      this.live = element("div", { className: "nbkit-live" });
      const form = element("div", { className: "nbkit-row" }, this.options, this.startButton);
      this.widget = new lab.Widget({
        node: element(
          "section",
          { ariaLabel: "nbkit" },
          element("h2", {}, "nbkit"),
          element("label", { htmlFor: "nbkit-options" }, "Start a cluster, with the options of %cluster start"),
          form,
          this.live,
        ),
      });
      this.widget.id = NAME;
      this.widget.addClass("nbkit-sidebar");
      Object.assign(this.widget.title, { caption: "nbkit: clusters, runs, lessons", icon: icon(lab) });
    }

    start() {
      if (this.notebooks.kernel()) void this.do(() => this.notebooks.run(`%cluster start ${this.options.value.trim()}`.trim()));
    }

    async do(action) {
      try {
        await action();
      } catch (error) {
        void this.lab.showErrorMessage("nbkit", error.message);
      }
      this.now();
    }

    async stop({ name, n }) {
      const { Dialog, showDialog } = this.lab;
      const body = `Its ${n} ranks end, with their variables and with what trains there.`;
      const buttons = [Dialog.cancelButton(), Dialog.warnButton({ label: "Stop" })];
      const { button } = await showDialog({ title: `Stop the cluster ${name}?`, body, buttons });
      if (button.accept) await this.do(() => this.server.ask("DELETE", `clusters/${name}`));
    }

    // Draw again only what has changed, and leave the focus where it is.
    draw() {
      const { state, error } = this.server;
      const there = Boolean(this.notebooks.kernel());
      this.startButton.disabled = !there;
      this.startButton.title = there ? "Start a cluster in a new cell" : "Open a notebook first";
      const seen = JSON.stringify([state, error, there]);
      if (seen === this.drawn || !this.widget.isVisible) return;
      this.drawn = seen;
      const focus = this.live.contains(document.activeElement) ? document.activeElement.dataset.key : null;
      this.live.replaceChildren(...this.sections(state ?? { clusters: [], jobs: [], runs: [], lessons: [], notes: [] }, error, there));
      if (focus) this.live.querySelector(`[data-key=${CSS.escape(focus)}]`)?.focus();
    }

    sections({ clusters, jobs, runs, lessons, notes }, error, there) {
      const beside = (key, label, source) =>
        button(`dock-${key}`, label, `Show the ${label.toLowerCase()} beside the notebook`, () => this.notebooks.dock(source, label), there);
      return [
        error && element("p", { className: "nbkit-error", role: "alert" }, error),
        section("Beside the notebook", element("div", { className: "nbkit-row" }, beside("panel", "Panel", "%strategy"), beside("dashboard", "Dashboard", "%dashboard"))),
        section("Clusters", ...clusters.map(one => this.cluster(one, there)), !clusters.length && note("None runs."), ...notes.map(note)),
        jobs.length && section("Programs that listen", ...jobs.map(one => this.job(one, there))),
        section("Runs", list(runs.map(({ name, folder }) =>
          button(`run-${name}`, name, `Show the dashboard of ${folder} beside the notebook`, () => this.notebooks.dock(`%dashboard ${quoted(folder)}`, name), there))),
          !runs.length && note("No training is recorded here.")),
        section("Lessons", list(lessons.map(name => button(`lesson-${name}`, name, `Open the lesson ${name}`, () => this.do(() => this.lesson(name)))))),
      ].filter(Boolean);
    }

    cluster(one, there) {
      const { name, n, state, here, alive, ranks, run } = one;
      const attach = button(`attach-${name}`, "Attach", `Use ${name} in this notebook, in a new cell`, () => this.do(() => this.notebooks.run(`%cluster attach ${name}`)), there && alive && !here);
      const stop = button(`stop-${name}`, "Stop", `Stop the cluster ${name}`, () => this.stop(one));
      const rows = ranks.map(({ rank, device, memory, state }) =>
        element("tr", {}, element("th", { scope: "row" }, String(rank)), ...[device, memory, state].map(text => element("td", {}, text))));
      const head = ["rank", "device", "memory", "state"].map(text => element("th", { scope: "col" }, text));
      return element(
        "article",
        { className: here ? "nbkit-here" : "", ariaLabel: `cluster ${name}` },
        element("div", { className: "nbkit-row" }, element("h4", {}, name), attach, stop),
        note(`${n} ranks · ${here ? "this notebook's" : state}`),
        run?.stands === "running" && note(trainingWords(run, true)),
        rows.length && element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
      );
    }

    job({ name, ranks, state, program }, there) {
      const attach = button(`job-${name}`, "Attach", `Look at ${name}, in a new cell`, () => this.do(() => this.notebooks.run(`%cluster attach --job ${name}`)), there);
      return element("article", { ariaLabel: `program ${name}` },
        element("div", { className: "nbkit-row" }, element("h4", {}, name), attach), note(`${ranks} ranks · ${state} · ${program}`));
    }

    async lesson(name) {
      const { path } = await this.server.ask("POST", `lessons/${name}`);
      return this.app.commands.execute("docmanager:open", { path });
    }
  }

  // ---- small parts --------------------------------------------------------------------------------------------------

  const statusItem = (lab, open) => {
    const node = element("button", { className: "nbkit-status", title: "Show nbkit's sidebar" });
    node.onclick = open;
    const widget = new lab.Widget({ node });
    const show = state => {
      const alive = (state?.clusters ?? []).filter(one => one.alive);
      const one = alive.find(each => each.here) ?? (alive.length === 1 ? alive[0] : null);
      const words = one && [`${one.n} ranks`, one.run?.stands === "running" && trainingWords(one.run)].filter(Boolean).join(" · ");
      node.textContent = words || (alive.length ? `${alive.length} clusters` : "no cluster");
      node.setAttribute("aria-label", `nbkit: ${node.textContent}`);
    };
    show(null);
    return { widget, show };
  };

  const trainingWords = ({ step, strategy, rate, unit }, withStep = false) =>
    [withStep && `step ${step}`, strategy, rate && `${short(rate)} ${unit === "rows" ? "rows" : "tok"}/s`].filter(Boolean).join(" · ");

  const short = value => (value < 1000 ? Number(value.toPrecision(3)).toString() : value < 1e6 ? `${Number((value / 1e3).toPrecision(3))}k` : `${Number((value / 1e6).toPrecision(3))}M`);

  const addCommands = (app, palette, notebooks, sidebar) => {
    const isEnabled = () => Boolean(notebooks.kernel());
    const all = {
      "nbkit:panel": ["nbkit: panel beside the notebook", () => notebooks.dock("%strategy", "Panel"), isEnabled],
      "nbkit:dashboard": ["nbkit: dashboard beside the notebook", () => notebooks.dock("%dashboard", "Dashboard"), isEnabled],
      "nbkit:sidebar": ["nbkit: clusters, runs, lessons", () => app.shell.activateById(sidebar.widget.id), () => true],
    };
    for (const [command, [label, execute, enabled]] of Object.entries(all)) {
      app.commands.addCommand(command, { label, execute: () => void execute(), isEnabled: enabled });
      palette?.addItem({ command, category: "nbkit" });
    }
  };

  // ipyparallel, which nbkit uses, has a tab of its own, which does not know nbkit's clusters.
  const explainOtherTab = app => {
    const other = [...app.shell.widgets("left"), ...app.shell.widgets("right")].find(one => /ipp|ipyparallel/i.test(one.id));
    if (!other) return;
    other.title.caption = "Clusters of ipyparallel. Those of nbkit are in the tab nbkit.";
    other.node.prepend(element("p", { className: "nbkit-note nbkit-other" }, "These are clusters that ipyparallel starts. Those of nbkit are in the tab nbkit."));
  };

  const icon = lab => new lab.LabIcon({
    name: `${NAME}:icon`,
    svgstr: '<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24"><g class="jp-icon3" fill="#616161"><circle cx="5" cy="5" r="3"/><circle cx="19" cy="5" r="3"/><circle cx="5" cy="19" r="3"/><circle cx="19" cy="19" r="3"/><path d="M7 4h10v2H7zM7 18h10v2H7zM4 7h2v10H4zM18 7h2v10h-2z"/></g></svg>',
  });

  const element = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    for (const name of ["role"]) if (properties[name]) made.setAttribute(name, properties[name]);
    made.append(...children.filter(Boolean));
    return made;
  };
  const button = (key, text, label, act, enabled = true) => {
    const made = element("button", { className: "nbkit-button", title: enabled ? label : "Open a notebook first", ariaLabel: label, disabled: !enabled, onclick: act }, text);
    made.dataset.key = key;
    return made;
  };
  const section = (title, ...children) => element("section", { ariaLabel: title }, element("h3", {}, title), ...children);
  const list = items => element("ul", {}, ...items.map(item => element("li", {}, item)));
  const note = text => element("p", { className: "nbkit-note" }, text);
  const quoted = text => `'${text.replaceAll("'", `'"'"'`)}'`;
})();
