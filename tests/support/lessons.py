"""The notebooks with their outputs: `make lessons` executes those whose code has changed, and stores what came of it.

Outputs that a page cannot show without their kernel are left out if there is text, HTML or a picture beside them.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nbkit.notebook.headless import Headless, read_notebook, tagged
from tests.support import slurm_nodes

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIVE = ("application/vnd.jupyter.widget-view+json", "application/javascript")
PACE_SECONDS = 8.0  # before a cell that looks at a training or switches it, as when a person reads what is above it
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def stored(path: Path) -> dict[str, Any]:
    """Return the notebook as it is in the file, outputs included."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def code_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict[str, Any]) -> str:
    """Return a hash of the source of all code cells. If it changes, the stored outputs are out of date."""
    sources = ["".join(cell["source"]) for cell in code_of(notebook)]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def is_stale(notebook: dict[str, Any]) -> bool:
    """Return True if the outputs are not those of the code."""
    return bool(notebook["metadata"].get("nbkit", {}).get("outputs_of") != digest(notebook))


def texts_of(notebook: dict[str, Any]) -> list[str]:
    """Return all text of all outputs, also of HTML and SVG."""
    outputs = [output for cell in code_of(notebook) for output in cell["outputs"]]
    pieces = [output.get("text", "") for output in outputs]
    shown = [(kind, part) for output in outputs for kind, part in output.get("data", {}).items()]
    return ["".join(piece) for piece in (*pieces, *(part for kind, part in shown if kind != "image/png"))]


@contextmanager
def surroundings(notebook: dict[str, Any]) -> Iterator[None]:
    """Run a Slurm of two nodes if the lesson has a cell tagged slurm. Other lessons need nothing."""
    if not tagged(notebook, "slurm"):
        yield
        return
    with slurm_nodes.running(ROOT) as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(slurm_nodes.scontrol_that_knows_hosts(nodes.folder)), prepend=os.pathsep)
        yield


def execute(path: Path) -> None:
    """Run the notebook in an empty folder, and store it with what it has shown."""
    notebook = read_notebook(path)
    with tempfile.TemporaryDirectory() as folder, surroundings(notebook):
        with Headless(Path(folder), lambda cell, text: None) as kernel:
            kernel.run(notebook, on_cell=_at_a_readers_pace)
        for cell in code_of(notebook):
            for output in cell["outputs"]:
                _keep_what_lasts(output, folder)
    notebook["metadata"]["nbkit"] = {"outputs_of": digest(notebook)}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _at_a_readers_pace(cell: dict[str, Any]) -> None:
    if {"panel", "switch"} & set(cell["metadata"].get("tags", [])):
        time.sleep(PACE_SECONDS)


def _keep_what_lasts(output: dict[str, Any], folder: str) -> None:
    data = output.get("data", {})
    for kind in [kind for kind in data if kind in LIVE or (kind == "text/html" and "<iframe" in data[kind])]:
        del data[kind]
    for holder in (output, data):
        for kind, part in holder.items():
            if isinstance(part, str) and kind not in ("output_type", "name", "image/png"):
                holder[kind] = _of_no_machine(ANSI.sub("", part).replace("\r", ""), folder)


def _of_no_machine(text: str, folder: str) -> str:
    here = f"{getpass.getuser()}@{socket.gethostname()}"
    text = text.replace(f"{folder}/", "").replace(folder, ".").replace(str(Path.home()), "~")
    return text.replace(here, "USER@HOST")


if __name__ == "__main__":
    wanted = [path for path in LESSONS if any(name in path.stem for name in sys.argv[1:])]
    for lesson in wanted or [path for path in LESSONS if is_stale(stored(path))]:
        print(f"{lesson.name} ...", flush=True)
        execute(lesson)
