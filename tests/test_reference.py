"""Test that the reference's tables are generated from the code, and contain everything that people type."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import nbkit
from magics.arguments import PARSERS
from nbkit.commands import prepare_parser, subcommands
from nbkit.records import events, records
from nbkit.trainer_options import OPTIONS
from tests.test_surface import OF_A_JOB

DOCS = Path(__file__).resolve().parents[1] / "docs"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("generated", DOCS / "generated.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["generated"] = made
    spec.loader.exec_module(made)
    return made


generated = _load()


@pytest.fixture(scope="module")
def reference() -> str:
    """Return the reference pages with their tables, without the error texts, because those name everything."""
    pages = sorted(page for page in (DOCS / "reference").glob("*.md") if page.name != "error-texts.md")
    return "\n".join(generated.filled(page.read_text()) for page in pages)


def test_help_shows_each_magic_as_users_type_it() -> None:
    """A `%` is written `%%` in the help of an argument, which argparse formats, but not in a description."""
    verbs = [
        below
        for make in PARSERS.values()
        for action in make()._actions
        if isinstance(action, argparse._SubParsersAction)
        for below in action.choices.values()
    ]
    subparsers = prepare_parser(subcommands())._subparsers
    assert subparsers is not None
    commands = [below for action in subparsers._group_actions for below in dict(action.choices or ()).values()]
    texts = [parser.format_help() for parser in (*(make() for make in PARSERS.values()), *verbs, *commands)]
    typed = {magic for text in texts for magic in re.findall(r"%+[a-z]+", text)}

    assert {"%%rank", "%compare", "%strategy", "%nbkit"} <= typed
    assert typed <= {*PARSERS, "%load"}


def test_each_generated_table_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))

    assert set(re.findall(r"<!-- generated: (\w+) -->", pages)) == set(generated.TABLES)


def test_everything_that_people_type_is_in_the_reference(reference: str) -> None:
    options = {option for make in PARSERS.values() for option in re.findall(r"--[a-z-]+", make().format_help())}
    commands = [f"## nbkit {module.__name__.rpartition('.')[2]}\n" for module in subcommands()]
    names = [f"nbkit.{name}" for name in nbkit.__all__ if name not in ("load_ipython_extension", "techniques")]

    for typed in [*(f"## {name}\n" for name in PARSERS), *(options - {"--help"}), *commands, *names]:
        assert typed in reference, typed
    for member in OF_A_JOB:
        assert f"job.{member}" in reference, member
    for name in ("Trainer", "prepare"):
        for argument, *_ in generated.parameters(generated.definition(name)):
            assert f"| `{argument}` |" in reference, argument
    for kind in OPTIONS.values():
        for argument, *_ in generated.parameters(generated.definition(kind.__name__)):
            assert f"| `{argument}` |" in reference, argument


def test_the_reference_explains_each_record_and_event(reference: str) -> None:
    kinds = {kind for module in (events, records) for kind in vars(module).values() if isinstance(kind, type)}
    named = {kind.kind for kind in kinds if getattr(kind, "kind", "")}

    assert len(named) > 15
    assert [kind for kind in named if f'"kind": "{kind}"' not in reference] == []


def test_a_row_has_type_unit_default_and_meaning() -> None:
    table = "".join(generated.trainer())

    assert re.search(r"\| `batch_size` \| `int` \| rows of all ranks \| required \| .+\. \|", table)
    assert re.search(r"\| `eval_every` \| `int` \| steps \| `None` \| .+\. \|", table)


def test_an_argument_without_a_unit_or_a_meaning_is_an_error() -> None:
    (undescribed,) = generated.ast.parse("def train(rows: int) -> None:\n    '''Train.'''").body
    (unitless,) = generated.ast.parse("def train(moons: int) -> None:\n    '''Train. moons: how many.'''").body

    with pytest.raises(LookupError, match="does not say what rows is"):
        generated.arguments(undescribed)
    with pytest.raises(LookupError, match="give its unit"):
        generated.arguments(unitless)


def test_a_docstring_is_split_by_its_arguments() -> None:
    doc = "Do it: now.\n\na, b: the ends (see c: below). c: more.\nStill c. Raises UsageError if not.\n\nThe end."

    general, said, raised = generated.meanings(doc, ["a", "b", "c"])

    assert general == "Do it: now.\n\nThe end."
    assert said == {"a": "the ends (see c: below).", "b": "the ends (see c: below).", "c": "more. Still c."}
    assert raised == "Raises UsageError if not."


def test_error_texts_are_found_with_their_hints() -> None:
    found = "\n".join(generated.error_texts())

    assert re.search(r"\| More ranks than idle GPUs\.", found)
    assert re.search(r"\| There is no such ZeRO stage\. \| `zero=3` \|", found)


def test_fields_that_a_class_docstring_describes_become_a_list() -> None:
    assert "- `url`: " in "".join(generated.views())
    assert "- `nodes`: " in "".join(generated.plugins())
