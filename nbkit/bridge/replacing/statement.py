"""Finds the statement of a cell that calls `fit`. A survivor finds it, and a new rank enters the cell there.

history = trainer.fit(500)      the new rank runs this statement and the rest of the cell; `fit` makes the steps left
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FrameType
from typing import Any

NOWHERE = -1
"""Used instead of a statement: a new rank takes part until the training is saved, and runs nothing of the cell."""
_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign)
_MANY = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.IfExp, ast.BoolOp, ast.Await)


def statement_of(source: str, frame: FrameType, is_trainer: Callable[[str], bool]) -> int | None:
    """Return the index of the top-level statement of `source` that calls NAME.fit(...) in `frame`.

    Returns None if a new rank cannot enter there. It can enter if the statement calls nothing else before `fit`, so
    that the new rank has missed nothing.
    """
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    for index, statement in enumerate(ast.parse(source).body):
        for call in ast.walk(statement):
            if isinstance(call, ast.Call) and (call.end_lineno, call.end_col_offset) == (positions[1], positions[3]):
                return index if _can_be_entered(statement, call, is_trainer) else None
    return None


def _can_be_entered(statement: ast.stmt, call: ast.Call, is_trainer: Callable[[str], bool]) -> bool:
    if _fit_of(call) is None or not is_trainer(_fit_of(call) or ""):
        return False
    if not isinstance(statement, _SIMPLE) or any(isinstance(part, _MANY) for part in ast.walk(statement)):
        return False
    inside = set(map(id, ast.walk(call)))
    others = [part for part in ast.walk(statement) if isinstance(part, ast.Call) and id(part) not in inside]
    return all(any(part is call for part in ast.walk(other)) for other in others)


def _fit_of(call: ast.Call) -> str | None:
    """Return NAME of a call NAME.fit(...), or None for another call."""
    function = call.func
    is_fit = isinstance(function, ast.Attribute) and function.attr == "fit" and isinstance(function.value, ast.Name)
    return function.value.id if is_fit else None  # type: ignore[attr-defined]


class Entering(ast.NodeTransformer):
    """Reduces a cell to the statement with number `index` and the statements after it.

    It drops the arguments of the call of `fit`: the training already has them, and their names may not exist here.
    """

    def __init__(self, index: int) -> None:
        self._index: int | None = index

    def visit_Module(self, node: ast.Module) -> Any:
        """Cut the cell. Later calls change nothing: they are for cells that run within this one."""
        index, self._index = self._index, None
        if index == NOWHERE:
            node.body = []
        elif index is not None:
            node.body = node.body[index:]
            self.generic_visit(node.body[0])
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if _fit_of(node) is not None:
            node.args, node.keywords = [], []
        return node
