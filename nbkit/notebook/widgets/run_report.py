"""Write a run as one self-contained HTML page, with all charts and their data."""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbkit.figures import size
from nbkit.notebook.run.reader import RunReader
from nbkit.notebook.user_files import write_file
from nbkit.notebook.widgets.javascript import joined, style

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body {{ margin: 0; padding: 12px; background: #f4f5f7; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #181b20; }} }}
main {{ max-width: 1300px; margin: auto; }}
{style}</style></head>
<body><main id="run"></main>
<script type="application/json" id="data">{data}</script>
<script type="module">
{script}
show(document.getElementById("run"), JSON.parse(document.getElementById("data").textContent));
</script></body></html>
"""


_STEERED = "run_started", "switch", "lr_changed"  # what has to be typed again


@dataclass(frozen=True)
class Written:
    """A page that was written. It can be used as a path."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{self.path}   ({size(self.path.stat().st_size)}, needs nothing else: open it in a browser)"


def write_report(run_dir: Path, path: Path) -> Path:
    """Write the page of a run in its current state to `path`. Return the path. Raises NbkitError if that fails."""
    return write_file(path, page_of(RunReader(run_dir).snapshot()))


def page_of(snapshot: dict[str, Any]) -> str:
    """Return the page for a RunReader.snapshot."""
    # The page contains no folder of this machine. "<" is escaped, so that no text ends the script element.
    public = snapshot | {"state": {**snapshot["state"], "folder": ""}, "about": about(snapshot)}
    data = json.dumps(_finite(public), separators=(",", ":"), default=str).replace("<", "\\u003c")
    script = joined().replace("export const", "const").replace("export default", "void")
    title = html.escape(f"nbkit: {snapshot['state']['run']}")
    return _PAGE.format(title=title, style=style(), data=data, script=script)


def about(snapshot: dict[str, Any]) -> list[tuple[str, str]]:
    """Return [(name, text)]: what ran, on which machines, and how to reproduce it; [] if the records do not say."""
    started = [event for event in snapshot["events"] if event["kind"] == "run_started"]
    facts = started[-1].get("about") if started else None
    if not facts:
        return []
    batch = f"{started[-1]['arithmetic']}, under {started[-1]['strategy']}" if started[-1]["arithmetic"] else ""
    first = f'Trainer(..., strategy="{started[0]["strategy"]}", seed={facts["seed"]})'
    done = [event for event in snapshot["events"] if event["kind"] in _STEERED]
    again = [first]
    for event in done:
        if event["kind"] == "switch":
            again.append(f"after step {event['step']:,}: %strategy {event['new']}")
        elif event["kind"] == "lr_changed":
            again.append(f"after step {event['step']:,}: trainer.lr = {event['new']!r}")
        else:
            again.append(
                f"trainer.fit({event['total'] or '...'})" + f"   after step {event['step']:,}" * (event["step"] > 0)
            )
    return [*facts.items(), *([("batch", batch)] if batch else []), ("to repeat it", "\n".join(again))]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
