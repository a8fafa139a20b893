"""Test that a panel that cannot receive clicks while a cell runs says so, and says what to type instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipywidgets
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from nbkit.notebook.widgets import widget_output
from nbkit.notebook.widgets.widget_output import here, in_vscode, lost_words, note_words


@pytest.mark.parametrize(("version", "note", "lost"), [
    ("6.31.0", True, True),
    ("7.0.0", False, True),
    ("7.3.0", False, True),
    ("7.4.0", False, False),
    ("7.10.1", False, False),
    ("8.0.0a1", False, False),
    ("", False, False),
])  # fmt: skip
def test_only_the_limits_of_this_version_of_ipykernel_are_explained(version: str, note: bool, lost: bool) -> None:
    said, below = note_words(version, vscode=False), lost_words(version, vscode=False)

    assert (bool(said), bool(below)) == (note, lost)
    for words in filter(None, (said, below)):
        assert f"ipykernel {version}" in words
        assert "%%distributed --detach" in words and "pip install -U ipykernel" in words


@pytest.mark.parametrize("version", ["6.31.0", "7.4.0"])
def test_vs_code_is_named_with_every_version_of_the_kernel(version: str) -> None:
    said = note_words(version, vscode=True)

    assert said.startswith("With VS Code the buttons act between cells")
    assert "%%distributed --detach" in said and "ipykernel" not in said
    assert lost_words(version, vscode=True) == ""


@pytest.mark.parametrize(("environment", "variables", "vscode"), [
    ({"VSCODE_PID": "7"}, {}, True),
    ({"VSCODE_CWD": "somewhere"}, {}, True),
    ({}, {"__vsc_ipynb_file__": "lesson.ipynb"}, True),
    ({"VSCODE_GIT_IPC_HANDLE": "JupyterLab from its terminal"}, {"x": 1}, False),
])  # fmt: skip
def test_vs_code_is_recognized_by_the_variables_that_it_sets(
    environment: dict[str, str], variables: dict[str, Any], vscode: bool
) -> None:
    assert in_vscode(environment, variables) is vscode


def test_there_are_no_notes_outside_of_a_kernel() -> None:
    assert note_words(**here()) == lost_words(**here()) == ""


class Panel:
    """Imitates a panel whose picture changes."""

    def __init__(self, widget: Any) -> None:
        self.widget, self.words = widget, "the panel as text"

    def still(self) -> dict[str, Any]:
        return {"text/plain": self.words, "text/html": f"<img alt='{self.words}'>"}

    def close(self) -> None:
        self.widget.close()

    def _repr_mimebundle_(self) -> dict[str, Any]:
        return self.still()


def test_the_note_is_shown_below_the_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotImplementedError):  # so IPython displays it like any object
        widget_output.display_until_stopped(Panel(None), None, "This is a picture.")
    monkeypatch.setattr(widget_output, "notebook_shell", lambda: SimpleNamespace(kernel=object()))
    widget_output.display_until_stopped(Panel(None), None, "This is a picture.")

    shown = capsys.readouterr().out
    assert shown.index("the panel as text") < shown.index("This is a picture.")


def test_a_widget_updates_its_picture_and_leaves_the_last_one_after_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widget_output, "notebook_shell", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr(widget_output, "STILL_SECONDS", 0.05)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    before_stop: list[Callable[[], object]] = []
    panel = Panel(ipywidgets.HTML())
    InteractiveShell.instance()
    try:
        with capture_output() as caught:
            widget_output.display_until_stopped(panel, before_stop, "words for old kernels")
            panel.words = "step 2"
            while len(caught.outputs) < 3:
                time.sleep(0.01)
            panel.words = "the end"
            (leave,) = before_stop
            leave()
    finally:
        InteractiveShell.clear_instance()

    view, first, second, *_, last, gone = caught.outputs
    # A page that does not trust the notebook, or has no kernel, shows no output that contains a widget.
    assert set(view.data) == {"application/vnd.jupyter.widget-view+json"}
    assert set(first.data) == {"text/plain", "text/html"} and "words for old kernels" in first.data["text/html"]
    assert second.update and second.transient == first.transient and "alt='step 2'" in second.data["text/html"]
    assert last.update and last.transient == first.transient and last.data["text/plain"] == "the end"
    assert gone.update and gone.transient == view.transient and gone.data == {"text/plain": ""}
    assert panel.widget.comm is None
