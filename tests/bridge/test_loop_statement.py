"""Which loops of a cell can be run again, what their bodies read first, and what is made of them."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from nbkit.bridge.replacing.loop_statement import LOOPS, LoopStatement, LoopStatements


def of(source: str) -> LoopStatement | None:
    return LoopStatement.of(ast.parse(source).body[0])


@pytest.mark.parametrize(
    ("source", "job"),
    [
        ("for batch in job.batches(loader): pass", "job"),
        ("for number, batch in enumerate(job.batches(make(1)), 1): pass", "job"),
        ("for batch in tqdm.auto.tqdm(run.batches(loader), total=3): pass", "run"),
        ("for one, other in zip(job.batches(loader), others): pass", "job"),
        ("for batch in itertools.islice(job.batches(loader), 3): pass", "job"),
        ("for batch in mine(job.batches(loader)): pass", None),
        ("for both in zip(job.batches(loader), job.batches(loader)): pass", None),
        ("for batch in self.job.batches(loader): pass", None),
        ("for batch in job.batches(loader): pass\nelse: after()", None),
        ("for epoch in range(3):\n    for batch in job.batches(loader): pass", None),
        ("while True:\n    pass", None),
    ],
)
def test_a_loop_over_the_batches_of_a_job_is_found(source: str, job: str | None) -> None:
    found = of(source)
    assert (found and found.job) == job


def test_what_a_body_reads_before_it_assigns_it_is_needed() -> None:
    body = """
for number, batch in enumerate(job.batches(loader)):
    began = now()
    total += number
    losses.append(total)
    for part in parts:
        last = part
    spent = now() - began
    shown[number] = last, spent, before
    before = batch
"""
    found = of(body)
    assert found is not None
    assert found.needed == {"now", "total", "losses", "parts", "shown", "before"}
    assert found.over == {"enumerate", "job", "loader"}


def test_names_in_functions_that_the_body_calls_are_used_too() -> None:
    names: dict[str, Any] = {}
    exec(
        "count = 0\ndef step(batch):\n    global count\n    count += 1\n    inner()\ndef inner():\n    seen.append(1)",
        names,
    )
    found = of("for batch in job.batches(loader):\n    step(batch)")
    assert found is not None and found.names(names) == {"batch", "step", "count", "inner", "seen"}


def test_only_the_cell_itself_is_rewritten_and_its_lines_stay() -> None:
    begins = [True, False]
    statements = LoopStatements(lambda: begins.pop(0))
    source = "before = 1\nfor batch in job.batches(loader):\n    body(batch)"
    tree: Any = statements.visit_Module(ast.parse(source))
    assert list(statements.found) == [1]
    assert ast.unparse(tree) == (
        f"before = 1\nwhile {LOOPS}.again(1):\n    with {LOOPS}:\n"
        f"        for batch in {LOOPS}.items(job.batches(loader)):\n            body(batch)"
    )
    assert tree.body[1].body[0].body[0].body[0].lineno == 3
    compile(tree, "<cell>", "exec")
    assert ast.unparse(statements.visit_Module(ast.parse(source))) == source
