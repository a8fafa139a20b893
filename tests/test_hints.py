"""Test that everything an error tells to type exists: magics, verbs, options, commands, functions, variables.

The tests read every `hint=` of the source, with the names in it. Parts that are filled in later become "…".
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import product
from pathlib import Path

import pytest

import nbkit
from magics.arguments import EXAMPLES, PARSERS, HelpShown, MagicParser, parse
from nbkit import lesson, schedules, techniques
from nbkit.commands import prepare_parser, subcommands
from nbkit.errors import UsageError
from nbkit.notebook.cluster.cells.handle import CellHandle
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.planner.stages import partition
from nbkit.rank.train.job import Job
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.world.rank_place import RankPlace
from nbkit.rank.world.world import World
from nbkit.strategy import keys
from nbkit.trainer_options import OPTIONS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "nbkit").rglob("*.py"), *(ROOT / "magics").rglob("*.py")])
OBJECTS = {"trainer": Trainer, "job": Job, "handle": CellHandle, "cluster": Cluster, "world": World}
CALLED = [getattr(nbkit, name) for name in nbkit.__all__ if name not in nbkit._MODULES]
CALLED += [
    lesson.predict,
    schedules.register,
    techniques.register,
    Cluster.start,
    Cluster.run,
    Trainer.fit,
    Trainer.evaluate,
    Trainer.generate,
    Job.backward,
    Job.batches,
    World.join,
    RankPlace,
    partition,
]
ARGUMENTS = {*keys(), "net", *(name for called in CALLED for name in inspect.signature(called).parameters)}
OPTION_OF = {field.name: kind.__name__ for kind in OPTIONS.values() for field in fields(kind)}
ALSO_OF_OTHERS = {"shuffle", "drop_last", "example", "every"}  # DataLoader, nbkit.plan and WeightAverage have them too
OF_OTHERS = {
    *("num_workers", "sparse", "batch_first", "need_weights", "use_reentrant", "track_running_stats", "lr", "shuffle"),
    *("attn_implementation", "use_dora", "lora_bias", "num_heads", "head_dim", "requires_grad", "device", "min"),
}
"""Arguments and attributes of torch, transformers and peft."""


_followed: list[str] = []


def strings(node: ast.expr, module: ast.Module) -> list[str]:
    """Return the texts that a hint can have."""
    match node:
        case ast.Constant(str(text)):
            return [text]
        case ast.JoinedStr(parts):
            return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)]
        case ast.IfExp(_, first, second):
            return strings(first, module) + strings(second, module)
        case ast.BoolOp(_, values) | ast.List(values) | ast.Tuple(values) | ast.Dict(_, values):
            return [text for value in values for text in strings(value, module)]
        case ast.BinOp(first, ast.Add(), second):
            return [a + b for a, b in product(strings(first, module) or ["…"], strings(second, module) or ["…"])]
        case ast.Name(name) | ast.Attribute(attr=name) if name not in _followed:
            _followed.append(name)  # so that a name defined by itself ends the recursion
            try:
                return [text for value in _assigned(name, module) for text in strings(value, module)]
            finally:
                _followed.pop()
        case ast.Call(ast.Name(name)):
            found = (each for each in ast.walk(module) if isinstance(each, ast.FunctionDef) and each.name == name)
            returns = (each for one in found for each in ast.walk(one) if isinstance(each, ast.Return) and each.value)
            return [text for each in returns for text in strings(each.value, module)]
    return []


def _assigned(name: str, module: ast.Module) -> Iterator[ast.expr]:
    for each in ast.walk(module):
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets) and getattr(
            each, "value", None
        ):
            yield each.value


@cache
def hints() -> list[tuple[str, str]]:
    """Return (where, hint) for each hint of the source."""
    found = []
    for path in SOURCES:
        module = ast.parse(path.read_text())
        for node in ast.walk(module):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "hint":
                    where = f"{path.relative_to(ROOT)}:{keyword.value.lineno}"
                    found += [(where, text) for text in strings(keyword.value, module)]
    return found


def missing(hint: str) -> Iterator[str]:
    """Yield the things that a hint tells to type and that do not exist."""
    typed = re.findall(r"(%%?)([a-z_]+)(?: +([a-z]+)\b)?", hint)
    for sign, name, word in typed:
        if name not in ("load_ext", "run", "env") and sign + name not in PARSERS:
            yield sign + name
        elif word and (verbs := _verbs(PARSERS.get(sign + name))) and word not in verbs:
            yield f"{sign}{name} {word}"
    yield from (option for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", hint) if option not in OPTIONS)
    yield from (f"nbkit {word}" for word in re.findall(r"(?<![\w.%])nbkit ([a-z]+)", hint) if word not in COMMANDS)
    yield from (f"nbkit.{name}" for name in re.findall(r"\bnbkit\.(\w+)", hint) if name not in nbkit.__all__)
    for name, attribute in re.findall(r"(?<![\w.])(\w+)\.([a-z_]+)", hint):
        if name in OBJECTS and not hasattr(OBJECTS[name], attribute) and attribute not in ("model", "optimizer"):
            yield f"{name}.{attribute}"
    for name in re.findall(r"(?<![\w.-])([a-z_]+)=(?![=…])", hint):
        if name not in ARGUMENTS | OF_OTHERS and not re.search(rf"\b{name} = ", hint):
            yield f"{name}="
        elif name in OPTION_OF.keys() - ALSO_OF_OTHERS and not re.search(
            rf"nbkit\.{OPTION_OF[name]}\([^)]*\b{name}=", hint
        ):
            yield f"{name}= outside of nbkit.{OPTION_OF[name]}"
    yield from (name for name in re.findall(r"\bNBKIT_\w+", hint) if f'"{name}"' not in ALL_SOURCE)


def _verbs(parser: object) -> set[str]:
    actions = parser()._actions if callable(parser) else ()
    return {verb for action in actions if isinstance(action, argparse._SubParsersAction) for verb in action.choices}


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        for below in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from _options(below)


_OF_OTHER_PROGRAMS = ("--upgrade", "--index-url", "--install", "--shm-size")  # options of pip, wsl and docker
OPTIONS = {option for make in PARSERS.values() for option in _options(make())}
OPTIONS |= {*_options(prepare_parser(subcommands())), *_OF_OTHER_PROGRAMS}
COMMANDS = {module.__name__.rpartition(".")[2] for module in subcommands()}
ALL_SOURCE = "".join(path.read_text() for path in SOURCES)


def test_every_hint_can_be_typed() -> None:
    found = [f"{where}: {what} in {hint!r}" for where, hint in hints() for what in missing(hint)]

    assert found == []


@pytest.mark.parametrize(
    ("hint", "what"),
    [
        ("%nbkit scheme shows what each strategy takes", "%nbkit scheme"),
        ("%clusters list", "%clusters"),
        ("%cluster start --silent", "--silent"),
        ("sequence=False", "sequence="),
        ("trainer.train(5)", "trainer.train"),
        ("nbkit.Train(...)", "nbkit.Train"),
        ("nbkit doctors", "nbkit doctors"),
        ("NBKIT_NOTHING=1", "NBKIT_NOTHING"),
        ("on_oom='fit'", "on_oom= outside of nbkit.Recovery"),
        ("nbkit.Compute(on_oom='fit')", "on_oom= outside of nbkit.Recovery"),
    ],
)
def test_a_hint_that_names_something_missing_is_found(hint: str, what: str) -> None:
    assert list(missing(hint)) == [what]


def magics(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of a magic, and those of its verbs."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    yield parser
    for verb in (verb for action in below for verb in action.choices.values()):
        yield from magics(verb)


HAVE_VERBS = {"%cluster", "%train", "%nbkit"}  # their usage lists the verbs


@pytest.mark.parametrize("magic", PARSERS)
def test_a_magic_with_an_unknown_option_suggests_a_line_that_parses(magic: str) -> None:
    for parser in magics(PARSERS[magic]()):
        assert isinstance(parser, MagicParser)
        with pytest.raises(UsageError) as refused:
            parse(parser, "--no-such-option")
        typed, _, _ = refused.value.hint.partition("   ")
        assert typed.startswith(parser.prog.split()[0]) and not set(typed) & set("{}[]"), typed
        assert ("[-h]" in refused.value.numbers) == (parser.prog in {*EXAMPLES, *HAVE_VERBS})
        with contextlib.suppress(HelpShown), contextlib.redirect_stdout(io.StringIO()):
            parse(PARSERS[magic](), typed.removeprefix(magic))


@pytest.mark.parametrize(
    ("magic", "typed", "hint"),
    [
        ("%nbkit", "plan cfg --batch 64 --on 8 H100", "%nbkit plan config --batch 512 --on '8 H100'"),
        ("%cluster", "start --ranks 4", "%cluster start -h"),
        ("%cluster", "--ranks 4", "%cluster -h"),
        ("%strategy", "--pause", "%train pause"),
    ],
)
def test_a_wrong_argument_of_a_verb_gets_a_hint_for_that_verb(magic: str, typed: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(PARSERS[magic](), typed)

    assert refused.value.hint == hint


def test_every_magic_that_needs_arguments_has_an_example() -> None:
    needs = set()
    for parser in (parser for make in PARSERS.values() for parser in magics(make())):
        try:
            parse(parser, "")
        except UsageError:
            needs |= {parser.prog} - HAVE_VERBS

    assert needs == set(EXAMPLES) - {"%nbkit plan"}  # it takes a model with batch and hardware, or nothing


def test_hints_built_from_several_expressions_are_read() -> None:
    read = [hint for _, hint in hints()]

    assert len(read) > 250
    assert "%cluster attach … --take" in read  # an assignment with a condition
    assert any(hint.startswith("strategy='zero2', which keeps weights whole") for hint in read)  # a constant
