"""Test `nbkit lab`: it writes the lessons into a folder, and a real server serves the first one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from nbkit.commands import main
from nbkit.notebook.lessons import lesson, write_lessons

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def test_lessons_are_written_and_changed_ones_are_not_overwritten(tmp_path: Path) -> None:
    changed = tmp_path / "new" / "03_data_parallel.ipynb"
    changed.parent.mkdir()
    changed.write_text("my answers")

    written = write_lessons(tmp_path / "new")

    assert [path.name for path in written] == sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
    assert changed.read_text() == "my answers"
    others = [path for path in written if path != changed]
    assert all(_code(path) == _code(NOTEBOOKS / path.name) for path in others)
    assert lesson("00_switch_live") == NOTEBOOKS / "00_switch_live.ipynb"


def test_links_to_pages_outside_the_folder_become_plain_names(tmp_path: Path) -> None:
    linked = (NOTEBOOKS / "19_break_it.ipynb").read_text()
    texts = {path.name: path.read_text() for path in write_lessons(tmp_path)}

    assert "](../docs/how-to/hang.md)" in linked and " (docs/how-to/hang.md)" in texts["19_break_it.ipynb"]
    assert not [name for name, text in texts.items() if "](../" in text]


def _code(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_without_jupyterlab_the_lessons_are_written_with_an_install_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert main(["lab", str(tmp_path / "lessons")]) == 1

    assert (tmp_path / "lessons" / "00_quickstart.ipynb").is_file()
    assert "-m pip install 'nbkit-train[lab]'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()

    assert main(["lab", str(tmp_path / "file")]) == 1

    assert f"The folder for the lessons cannot be made.\n{tmp_path}/file: File exists" in capsys.readouterr().err


def test_jupyterlab_serves_the_first_lesson(tmp_path: Path) -> None:
    assert_serves(Path(sys.executable), tmp_path)


def assert_serves(python: Path, folder: Path) -> None:
    """Run `nbkit lab` in `folder`, with the packages of `python`, and ask its server for the first lesson."""
    private = {name: str(folder / name) for name in ("HOME", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    command = [python, "-m", "nbkit", "lab", "--no-browser", "--allow-root", "--port", "0"]
    log = folder / "log"
    with log.open("wb") as out:
        lab = subprocess.Popen(command, cwd=folder, env={**os.environ, **private}, stdout=out, stderr=out)
    try:
        served = _answer(lab, log)
        assert served["content"]["cells"]
        assert f"{len(list(NOTEBOOKS.glob('*.ipynb')))} notebooks in nbkit-lessons" in log.read_text()
    finally:
        lab.send_signal(signal.SIGTERM)
        lab.wait(30)


def _answer(lab: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Return the first lesson as the server sends it, from the address that the server prints."""
    address = r"(http://localhost:\d+/)lab/tree/00_quickstart\.ipynb\?(token=\w+)"
    deadline = time.monotonic() + 100
    while lab.poll() is None and time.monotonic() < deadline:
        if found := re.search(address, log.read_text()):
            with suppress(URLError), urlopen(f"{found[1]}api/contents/00_quickstart.ipynb?{found[2]}") as answer:
                return dict(json.load(answer))
        time.sleep(0.1)
    raise AssertionError(log.read_text())
