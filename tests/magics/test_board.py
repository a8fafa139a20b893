"""Test `%board` in a shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from nbkit.errors import BoardError, UsageError
from nbkit.notebook.board import board
from nbkit.notebook.board.board import Board


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "nbkit")
    yield shell
    Board.end()
    InteractiveShell.clear_instance()


@pytest.mark.long
def test_board_shows_the_runs_beside_the_notebook_until_stop(
    shell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = shell.run_line_magic("board", "--height 400")
    assert (shown.logdir, shown.height) == (tmp_path / "runs", 400)
    assert shown.is_alive()

    assert shell.run_line_magic("board", "--stop") is None

    assert not shown.is_alive()
    assert "has ended" in capsys.readouterr().out
    shell.run_line_magic("board", "--stop")
    assert "has no TensorBoard" in capsys.readouterr().out


@pytest.mark.long
def test_a_stopped_board_leaves_no_frame_in_its_cell(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "notebook_shell", lambda: SimpleNamespace(kernel=object()))
    with capture_output() as shown:
        shell.run_cell("%board")
        shell.run_line_magic("board", "--stop")

    first, last = shown.outputs
    assert "<iframe" in first.data["text/html"]
    assert last.update and last.transient == first.transient
    assert "<iframe" not in last.data["text/html"] and "ended" in last.data["text/html"]


def test_board_shows_help_and_refuses_a_wrong_height(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_line_magic("board", "-h") is None
    assert "--height" in capsys.readouterr().out
    with pytest.raises(UsageError, match="height"):
        shell.run_line_magic("board", "--height tall")
    with pytest.raises(BoardError, match="no height"):
        shell.run_line_magic("board", "--height 0")
