// The last known state of ranks and hosts, as a table. Slowed GPUs are highlighted.

import { bytes, percent } from "./paint.js";

const part = (value, unit, top = null) => (value === null ? "" : `${Math.round(value)}${top === null ? "" : ` of ${Math.round(top)}`} ${unit}`);

// health: as nbkit.notebook.board.plugin.host_health makes it. Returns elements.
export function healthRows(health) {
  const gpus = health.ranks.some((row) => row.gpu);
  const slowed = health.ranks.some((row) => row.slowed); // first, because it matters most and a narrow pane shows it
  const head = ["", ...(slowed ? ["slowed by"] : []), "CPU, of a core", "memory of the process", ...(gpus ? ["GPU busy", "clock", "temperature", "power"] : [])];
  const table = document.createElement("table");
  table.append(line(head, "th"));
  for (const row of health.ranks) {
    const own = [`rank ${row.rank}`, ...(slowed ? [row.slowed] : []), percent(row.cpu), bytes(row.rss)];
    const gpu = [row.busy === null ? "" : percent(row.busy), part(row.mhz, "MHz", row.top_mhz), part(row.celsius, "°C"), part(row.watts, "W", row.limit_watts)];
    const made = line([...own, ...(gpus ? gpu : [])], "td");
    made.classList.toggle("slowed", Boolean(row.slowed));
    table.append(made);
  }
  const note = document.createElement("small");
  const hosts = health.hosts.map((host) => [host.host, host.load === null ? "" : `load ${host.load} on ${host.cores} cores`, part(host.mhz, "MHz")].filter(Boolean).join(", "));
  note.textContent = [health.more, ...hosts, health.more_hosts ? `${health.more_hosts} hosts more, with less load` : ""].filter(Boolean).join(" · ");
  return [table, note];
}

function line(values, tag) {
  const made = document.createElement("tr");
  for (const value of values) {
    const cell = document.createElement(tag);
    cell.textContent = value;
    made.append(cell);
  }
  return made;
}
