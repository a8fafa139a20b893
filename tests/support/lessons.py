"""The lessons: what they ask, the answers in their text, and copies with their outputs.

Lessons are stored without outputs, so that nobody reads an answer before the question. `make lessons` executes those
whose code has changed, and stores copies with outputs in notebooks/rendered/, for the site. It copies changed text too.
Outputs that a page cannot show without their kernel are left out if there is text, HTML or a picture beside them.
"""

from __future__ import annotations

import ast
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
RENDERED = ROOT / "notebooks" / "rendered"
LIVE = ("application/vnd.jupyter.widget-view+json", "application/javascript")
PACE_SECONDS = 8.0  # before a cell that reads or switches a training, as if a person read the text above it
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


def rendered(path: Path) -> Path:
    """Return the place of the copy of a lesson that has outputs."""
    return RENDERED / path.name


def is_stale(path: Path) -> bool:
    """Return True if the rendered copy of a lesson is missing, or its outputs are of older code."""
    if not rendered(path).exists():
        return True
    made_of = stored(rendered(path))["metadata"].get("nbkit", {}).get("outputs_of")
    return bool(made_of != digest(stored(path)))


def texts_of(notebook: dict[str, Any]) -> list[str]:
    """Return all text of all outputs, also of HTML and SVG."""
    outputs = [output for cell in code_of(notebook) for output in cell["outputs"]]
    pieces = [output.get("text", "") for output in outputs]
    shown = [(kind, part) for output in outputs for kind, part in output.get("data", {}).items()]
    return ["".join(piece) for piece in (*pieces, *(part for kind, part in shown if kind != "image/png"))]


_ANSWER = re.compile(r"<summary>Answer ([\d.]+)</summary>\s+\*\*(.+?)\.?\*\*")
_NUMBER = re.compile(r"-?[\d,]*\.?\d+(?:e-?\d+)?")


def questions_of(notebook: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arguments of each call of `nbkit.lesson.predict`, by its key."""
    found = {}
    for cell in code_of(notebook):
        source = "".join(cell["source"])
        if "lesson.predict(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "nbkit.lesson.predict":
                given = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
                found[given["key"]] = given | {"question": ast.literal_eval(node.args[0])}
    return found


def answers_of(notebook: dict[str, Any]) -> dict[str, float | str]:
    """Return the answers in the text, by the key of the question: numbers, and choices as text."""
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    questions, found = questions_of(notebook), {}
    for key, said in _ANSWER.findall(text):
        number = _NUMBER.match(said)
        is_number = key in questions and "choices" not in questions[key] and number
        found[key] = float(number[0].replace(",", "")) if is_number else said
    return found


def with_outputs(path: Path) -> dict[str, Any]:
    """Return a lesson with the outputs of its rendered copy, which has the same code but may have older text."""
    notebook, copy = stored(path), stored(rendered(path))
    for cell, executed in zip(code_of(notebook), code_of(copy), strict=True):
        cell.update(outputs=executed["outputs"], execution_count=executed["execution_count"])
    notebook["metadata"]["nbkit"] = copy["metadata"]["nbkit"]
    return notebook


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
    """Run the notebook in an empty folder, as a reader who gives no guess. Store a copy with its outputs."""
    notebook = read_notebook(path)
    with tempfile.TemporaryDirectory() as folder, surroundings(notebook), pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBKIT_GUESSES", "{}")
        with Headless(Path(folder), lambda cell, text: None) as kernel:
            kernel.run(notebook, on_cell=_at_a_readers_pace)
        for cell in code_of(notebook):
            for output in cell["outputs"]:
                _keep_what_lasts(output, folder)
    notebook["metadata"]["nbkit"] = {"outputs_of": digest(notebook)}
    _store(path, notebook)


def _store(path: Path, notebook: dict[str, Any]) -> None:
    RENDERED.mkdir(exist_ok=True)
    rendered(path).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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
    for lesson in wanted or [path for path in LESSONS if is_stale(path)]:
        print(f"{lesson.name} ...", flush=True)
        execute(lesson)
    for lesson in LESSONS:
        if not is_stale(lesson):
            _store(lesson, with_outputs(lesson))
