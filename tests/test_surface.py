"""Test that the names people type and the records others read equal tests/surface.txt, line by line.

Write an intended change there with `python -m tests.test_surface`. It then shows in the commit.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import nbkit
from magics.arguments import PARSERS
from nbkit import errors, lesson, schedules, sinks, strategy, techniques
from nbkit.commands import prepare_parser, subcommands
from nbkit.notebook.cluster import registry, site_settings
from nbkit.notebook.cluster.cells.handle import CellHandle
from nbkit.notebook.cluster.training_control import TrainingClient
from nbkit.rank.train.checkpoint import manifest
from nbkit.rank.train.job import Job
from nbkit.records import events, records, tags

EXPECTED = Path(__file__).parent / "surface.txt"
OF_A_JOB = "backward batches clip draw evaluate grad_norm history log mean rows step strategy switch undo".split()
"""The members of a job that a user's own loop calls; the rest is for the Trainer."""
SOURCES = [path for folder in ("nbkit", "magics") for path in (EXPECTED.parents[1] / folder).rglob("*.py")]


def surface() -> Iterator[str]:
    """Yield all names and options, as lines."""
    yield from _section("Magics", (line for name, make in PARSERS.items() for line in _typed(name, make())))
    commands = _subcommands(prepare_parser(subcommands()))
    yield from _section("Commands", (line for name, parser in commands for line in _typed(f"nbkit {name}", parser)))
    spelled = [f"presets: {' '.join(strategy.PRESETS)}", f"keys: {' '.join(f'{key}=' for key in strategy.keys())}"]
    yield from _section("Strategies", [*spelled, f"schedules: {' '.join(schedules.BUILT_IN)}"])
    public = [(name, getattr(nbkit, name)) for name in nbkit.__all__ if name not in nbkit._MODULES]
    public += [(f"lesson.{name}", getattr(lesson, name)) for name in ("predict", "collect", "judge")]
    public += [("schedules.register", schedules.register), ("techniques.register", techniques.register)]
    public += [("techniques.use", techniques.use)]
    public += [(f"sinks.{name}", getattr(sinks, name)) for name in sinks.__all__]
    yield from _section("Python: nbkit", (line for name, offered in public for line in _called(name, offered)))
    yield from _section("job = nbkit.prepare(...)", (line for line in _members(Job) if line.split("(")[0] in OF_A_JOB))
    yield from _section("handle, of a detached cell", _members(CellHandle))
    yield from _section("cluster.training", _members(TrainingClient))
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    lines = (f"{kind.__name__}({', '.join(base.__name__ for base in kind.__bases__)})" for kind in found)
    yield from _section("Errors", lines)
    yield from _section("nbkit.toml", [" ".join(site_settings._KEYS)])
    text = "".join(path.read_text() for path in SOURCES)
    yield from _section("Environment", [" ".join(sorted(set(re.findall(r"NBKIT_[A-Z_]+", text))))])
    numbered = {"cluster.json": registry.FORMAT, "record files": records.FORMAT, "checkpoints": manifest._FORMAT}
    yield from _section("Formats", [f"{name}: {number}" for name, number in numbered.items()])
    yield from _section("cluster.json", [_columns(registry.ClusterEntry)])
    yield from _section("Records", (f"{kind}: {_columns(made)}" for kind, made in records._KINDS.items()))
    yield from _section("Rows of records", (f"{name}: {_columns(made)}" for name, made in records._ROWS.items()))
    kinds = [made for _, made in inspect.getmembers(events, inspect.isclass) if issubclass(made, events.Event)]
    yield from _section("Events", (f"{made.kind}: {_columns(made)}" for made in kinds if made.kind))
    yield from _section("Checkpoints", [" ".join(manifest._FIELDS)])
    plain = sorted(value for name, value in vars(tags).items() if name.isupper())
    made = [tags.logged("NAME"), tags.part("PART"), tags.moved("OP", "AXIS", "WHAT"), tags.memory("KIND")]
    made.append(tags.expert("NUMBER"))
    yield from _section("TensorBoard tags", [*plain, *made])


def _section(title: str, lines: Any) -> Iterator[str]:
    yield from (title, "-" * len(title), *lines, "")


def _typed(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    below = list(_subcommands(parser))
    for verb, under in below:
        yield from _typed(f"{name} {verb}", under)
    if not below:
        words = (_word(action) for action in parser._actions if not isinstance(action, argparse._HelpAction))
        yield " ".join((name, *words))


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _word(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    default = f" ({action.default})" if action.default not in (None, False, "") else ""
    if not action.option_strings:
        many = " ..." if action.nargs in ("*", "+") else ""
        return f"{name}{many}" if action.required and action.nargs != "*" else f"[{name}{many}{default}]"
    values = "" if action.nargs == 0 else f" [{name}]" if action.nargs == "?" else f" {name}"
    return f"[{'/'.join(action.option_strings)}{values}{default}]"


def _called(name: str, offered: Callable[..., Any]) -> Iterator[str]:
    yield f"{name}({_arguments(offered)})"
    if inspect.isclass(offered):
        yield from (f"    {line}" for line in _members(offered))


def _members(kind: type) -> Iterator[str]:
    """Yield the public methods and properties that nbkit defines."""
    for name, member in sorted(inspect.getmembers_static(kind)):
        inner = getattr(member, "__func__", member)
        if name.startswith("_") or not getattr(getattr(inner, "fget", inner), "__module__", "").startswith("nbkit"):
            continue
        yield name if isinstance(member, property) else f"{name}({_arguments(getattr(kind, name))})"


def _arguments(called: Callable[..., Any]) -> str:
    words, named = [], False
    for name, one in inspect.signature(called).parameters.items():
        if one.kind is one.KEYWORD_ONLY and not named:
            words.append("*")
            named = True
        default = getattr(one.default, "__name__", repr(one.default))
        words.append(f"{'*' * (2 if one.kind is one.VAR_KEYWORD else one.kind is one.VAR_POSITIONAL)}{name}")
        words[-1] += "" if one.default is one.empty else f"={default}"
    return ", ".join(word for word in words if word != "self")


def _columns(made: Any) -> str:
    return " ".join(field.name for field in fields(made))


def test_the_public_surface_equals_surface_txt() -> None:
    found, expected = list(surface()), EXPECTED.read_text().splitlines()
    changed = [line for line in difflib.unified_diff(expected, found, "tests/surface.txt", "found", lineterm="", n=0)]

    assert not changed, "\n".join([*changed, "If it is meant: python -m tests.test_surface"])


if __name__ == "__main__":
    EXPECTED.write_text("\n".join(surface()) + "\n")
