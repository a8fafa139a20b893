"""Test nbkit's extension of JupyterLab: package.json matches the files that it names, and the server lists what exists.

Write package.json after a change of nbkit.js or nbkit.css with `python -m tests.notebook.test_lab_files`.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

import nbkit
from nbkit.errors import ClusterNotFound, UsageError
from nbkit.notebook.json_text import plain

FOLDER = Path(nbkit.__file__).parent / "notebook" / "lab" / "nbkit-train"


def package() -> str:
    """Return the expected package.json. The digest is in the address, because browsers keep such files for a year."""
    digest = hashlib.sha256(b"".join((FOLDER / "static" / name).read_bytes() for name in ("nbkit.js", "nbkit.css")))
    build = {"load": f"static/nbkit.js?v={digest.hexdigest()[:16]}", "extension": "./extension"}
    told = {
        "name": FOLDER.name,
        "version": nbkit.__version__,
        "description": "Clusters, runs and lessons of nbkit in JupyterLab's sidebar",
        "license": "Apache-2.0",
        "jupyterlab": {"extension": True, "_build": build},
    }
    return json.dumps(told, indent=2) + "\n"


def test_package_json_names_the_version_and_the_digest_of_the_files() -> None:
    assert (FOLDER / "package.json").read_text() == package(), "python -m tests.notebook.test_lab_files   writes it"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("jupyter_server", reason="pip install jupyterlab")
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path / "home"))
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_the_sidebar_lists_runs_of_both_folders_newest_first(root: Path) -> None:
    from nbkit.notebook.lab.server import Sidebar

    for age, name in enumerate(("deep/runs/b", "runs/a", "elsewhere/runs/c", "runs/no-run")):
        (root / name / ("x" if name == "runs/no-run" else "telemetry")).mkdir(parents=True)
        os.utime(root / name, (1e9 - age, 1e9 - age))

    told = plain(Sidebar(root).state(0, "deep/lesson.ipynb", ranks=True))

    assert [run["name"] for run in told["runs"]] == ["b", "a"]
    assert (told["clusters"], told["jobs"]) == ([], [])
    assert told["lessons"][0] == "00_quickstart"


def test_a_lesson_is_opened_in_place_or_copied_and_other_names_are_refused(root: Path) -> None:
    from nbkit.notebook.lab.server import Sidebar

    (root / "notebooks").mkdir()
    (root / "notebooks" / "09_zero.ipynb").write_text("mine")
    sidebar = Sidebar(root)

    assert sidebar.lesson("09_zero") == "notebooks/09_zero.ipynb"
    assert sidebar.lesson("00_quickstart") == "nbkit-lessons/00_quickstart.ipynb"
    assert json.loads((root / "nbkit-lessons" / "00_quickstart.ipynb").read_text())["cells"]
    with pytest.raises(UsageError, match="no such lesson"):
        sidebar.lesson("../secret")
    with pytest.raises(ClusterNotFound):
        sidebar.stop("nobody")


if __name__ == "__main__":
    (FOLDER / "package.json").write_text(package())
