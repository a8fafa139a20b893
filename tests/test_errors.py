"""Test how nbkit's errors look, that they survive pickling, and that they are documented."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbkit import errors
from nbkit.errors import CellError, NbkitError, NotFinite, RankDied, Stopped, UsageError

CLASSES = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == "nbkit.errors"
}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    InteractiveShell.clear_instance()
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def example(kind: type) -> BaseException:
    if not issubclass(kind, NbkitError):
        return kind("stopped at step 7")
    extra = {}
    if issubclass(kind, CellError):
        extra = {"rank": 2, "ranks": (2, 3), "traceback": "Traceback ..."}
    if issubclass(kind, NotFinite):
        extra = {"step": 7, "rank": 1}
    return kind("It broke.", numbers="3 of 4", hint="try -n 3", **extra)


def test_an_error_in_a_notebook_shows_its_own_lines_and_no_python_traceback(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    result = shell.run_cell(
        "from nbkit.errors import UsageError\nraise UsageError('Too many ranks.', numbers='4 of 2', hint='-n 2')"
    )
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)

    assert isinstance(result.error_in_exec, UsageError)
    assert shown.splitlines() == ["UsageError: Too many ranks.", "  4 of 2", "  → -n 2"]


def test_an_error_is_raised_so_run_all_stops(shell: InteractiveShell) -> None:
    assert not shell.run_cell("import nbkit.errors; raise nbkit.errors.BoardError('x')").success


def test_str_has_what_numbers_and_hint_on_their_own_lines() -> None:
    assert str(UsageError("a", numbers="b", hint="c")) == "a\nb\n→ c"
    assert str(UsageError("a")) == "a"


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
def test_every_error_survives_pickling_with_all_attributes(kind: type) -> None:
    error = example(kind)

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind
    assert copy.args == error.args
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_the_tree_in_the_docstring_equals_the_class_hierarchy() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:│   |    |├── |└── )*)([A-Z]\w+)(?:\s|$)", line)
        if match:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            drawn[match[2]] = path[depth - 1] if depth else ""

    assert set(drawn) == set(CLASSES)
    for name, parent in drawn.items():
        bases = [base.__name__ for base in CLASSES[name].__bases__]
        assert bases[0] == parent or parent == "", f"{name} is drawn under {parent} and derives from {bases}"


def test_every_error_is_exported_in_order() -> None:
    assert errors.__all__ == sorted(CLASSES)


def test_stopped_is_a_keyboard_interrupt_so_except_exception_does_not_catch_it() -> None:
    assert issubclass(Stopped, KeyboardInterrupt)
    assert not issubclass(Stopped, Exception)


def test_a_cell_error_has_the_first_rank_and_all_ranks() -> None:
    assert RankDied("Rank 3 died.", rank=3).ranks == (3,)
    assert CellError("x", rank=1, ranks=(1, 2)).rank == 1
