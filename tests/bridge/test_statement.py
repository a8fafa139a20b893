"""Test the statements at which a new rank can enter a cell, and the part of the cell that it runs."""

from __future__ import annotations

import ast
import sys
from types import FrameType
from typing import Any

import pytest

from nbkit.bridge.replacing.statement import Entering, statement_of


class Trainer:
    """Records the statement that calls `fit`."""

    def __init__(self) -> None:
        self.found: int | None = None
        self.source = ""

    def fit(self, *steps: int) -> list[int]:
        frame: FrameType = sys._getframe(1)
        self.found = statement_of(self.source, frame, lambda name: frame.f_globals.get(name) is self)
        return [*steps]


def found_in(source: str) -> int | None:
    trainer = Trainer()
    trainer.source = source
    exec(compile(source, "<cell>", "exec"), {"trainer": trainer, "other": Trainer(), "steps": 3})
    return trainer.found


@pytest.mark.parametrize(
    ("source", "statement"),
    [
        ("trainer.fit(3)", 0),
        ("a = 1; history = trainer.fit(steps); b = 2", 1),
        ("# steps\n\nlosses = print(len(trainer.fit(\n    max(1, 2),\n)))", 0),
        ("total = 0\ntotal += trainer.fit(3)[0]", 1),
        ("history: list = trainer.fit(steps)", 0),
        ("for _ in range(2):\n    trainer.fit(1)", None),
        ("if steps:\n    trainer.fit(1)", None),
        ("both = [trainer.fit(1) for _ in range(2)]", None),
        ("both = other.fit(1), trainer.fit(1)", None),
        ("print(max(1, 2), trainer.fit(1))", None),
        ("def run():\n    trainer.fit(1)\nrun()", None),
        ("fit = trainer.fit\nfit(1)", None),
    ],
)
def test_a_rank_enters_only_a_top_level_statement_that_calls_fit_first(source: str, statement: int | None) -> None:
    assert found_in(source) == statement


def test_a_new_rank_runs_fit_without_arguments_and_all_that_follows() -> None:
    tree: Any = ast.parse("first = missing\nlosses = len(trainer.fit(missing, until=missing))\nlast = losses")
    entering = Entering(1)
    assert ast.unparse(entering.visit(tree)) == "losses = len(trainer.fit())\nlast = losses"
    nested: Any = ast.parse("a = 1\ntrainer.fit(3)")
    assert ast.unparse(entering.visit(nested)) == "a = 1\ntrainer.fit(3)"  # a nested cell is not changed
