"""A loop over `job.batches` that is a statement of a cell: found in its source, and made one that can be run again.

    for batch in job.batches(loader):                while loops.again(3):
        ...                                  ->          with loops:
                                                             for batch in loops.items(job.batches(loader)):
                                                                 ...

A death ends the body on the ranks that live; `with` takes that, and `while` runs the statement again. Lines and columns
are those of the source, for tracebacks and debuggers.
"""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LOOPS = "__nbkit_loops__"
"""Where the code of a cell finds what has `again` and `items`."""
_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_AROUND = ("enumerate", "islice", "tqdm", "zip")  # what gives an item for each batch, in order


@dataclass(frozen=True)
class LoopStatement:
    """job: its name. over: names in what it is over. used: names that the body mentions; needed: those of them that it
    reads before it assigns them."""

    job: str
    over: frozenset[str]
    used: frozenset[str]
    needed: frozenset[str]

    @classmethod
    def of(cls, statement: ast.stmt) -> LoopStatement | None:
        """None for any other statement."""
        if not isinstance(statement, ast.For) or statement.orelse or (job := _job_of(statement.iter)) is None:
            return None
        order = _Order(statement.target)
        for part in statement.body:
            order.visit(part)
        over = {part.id for part in ast.walk(statement.iter) if isinstance(part, ast.Name)}
        return cls(job, frozenset(over), frozenset(order.used), frozenset(order.needed))

    @property
    def assigned(self) -> frozenset[str]:
        """Names that the body assigns before it reads them: what they are at a boundary is of no account to it."""
        return self.used - self.needed

    def names(self, namespace: Mapping[str, Any]) -> set[str]:
        """The names that the body uses, also in functions of cells that it calls."""
        found, waiting = set[str](), set(self.used)
        while waiting:
            found.add(name := waiting.pop())
            value = namespace.get(name)
            if isinstance(value, types.FunctionType) and value.__globals__ is namespace:
                waiting |= _globals_of(value.__code__) - found
        return found


def _job_of(iterated: ast.expr) -> str | None:
    """NAME of NAME.batches(...), which may stand in an enumerate(...) or the like."""
    if not isinstance(iterated, ast.Call):
        return None
    function = iterated.func
    if isinstance(function, ast.Attribute) and function.attr == "batches" and isinstance(function.value, ast.Name):
        return function.value.id
    named = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    found = [job for each in iterated.args if (job := _job_of(each)) is not None]
    return found[0] if named in _AROUND and len(found) == 1 else None


def _globals_of(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    own = {each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL}
    return own.union(*map(_globals_of, inner))


class _Order(ast.NodeVisitor):
    """Goes over statements in the order in which they run."""

    def __init__(self, target: ast.expr) -> None:
        self.used, self.needed, self._assigned = set[str](), set[str](), set[str]()
        self.visit(target)

    def visit_Name(self, node: ast.Name) -> None:
        self.used.add(node.id)
        if not isinstance(node.ctx, ast.Load):
            self._assigned.add(node.id)
        elif node.id not in self._assigned:
            self.needed.add(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.visit_Name(ast.Name(node.target.id, ast.Load()))
        self.visit(node.value)
        self.visit(node.target)

    def visit_For(self, node: ast.For) -> None:
        for part in (node.iter, node.target, *node.body, *node.orelse):
            self.visit(part)


class LoopStatements(ast.NodeTransformer):
    """Rewrites the loops of a cell. begins: asked once for each Module, whether it is a cell that now begins. found: by
    number of the statement, those of the last cell."""

    def __init__(self, begins: Callable[[], bool]) -> None:
        self._begins = begins
        self.found: dict[int, LoopStatement] = {}

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Leaves alone what runs within a cell: what a magic runs, live cells."""
        if self._begins():
            each = {number: LoopStatement.of(statement) for number, statement in enumerate(node.body)}
            self.found = {number: found for number, found in each.items() if found is not None}
            for number in self.found:
                node.body[number] = _rewritten(number, node.body[number])
        return node


def _rewritten(number: int, statement: Any) -> ast.stmt:
    text = f"while {LOOPS}.again({number}):\n with {LOOPS}:\n  for each in {LOOPS}.items(batches): pass"
    outer: Any = ast.parse(text).body[0]
    for part in ast.walk(outer):
        ast.copy_location(part, statement.iter)
    items = outer.body[0].body[0].iter
    items.args = [statement.iter]
    statement.iter = items
    outer.body[0].body = [statement]
    return outer  # type: ignore[no-any-return]
