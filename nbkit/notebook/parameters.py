"""A notebook's parameters: the values of its first assignments, set from outside before it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from nbkit.errors import UsageError
from nbkit.notebook.export.cell_source import masked, place_of
from nbkit.notebook.headless import tagged


def set_parameters(notebook: dict[str, Any], given: Mapping[str, str]) -> None:
    """Replace the value of the first assignment to each name by the given text, as a literal of the same type.

    In the cells tagged `parameters`; in all cells of the notebook itself where none has that tag. Comments stay.
    Raises UsageError for a name that is not assigned there, and for a value of another type.
    """
    cells = tagged(notebook, "parameters") or [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found: dict[str, tuple[dict[str, Any], ast.expr]] = {}
    for cell in cells:
        for name, value in _assignments("".join(cell["source"])):
            found.setdefault(name, (cell, value))
    for name in given:
        if name not in found:
            raise UsageError(
                f"The notebook has no parameter {name}.",
                numbers=f"it assigns: {', '.join(found) or 'nothing'}",
                hint=f"{name} = ...   in a cell tagged parameters",
            )
    # From the end, so that the places of the others stay.
    for name, text in sorted(given.items(), key=lambda each: _start(found[each[0]][1]), reverse=True):
        cell, value = found[name]
        source = "".join(cell["source"])
        start = place_of(source, value.lineno, value.col_offset)
        end = place_of(source, value.end_lineno or value.lineno, value.end_col_offset or 0)
        cell["source"] = source[:start] + _literal(name, text, value) + source[end:]


def _start(value: ast.expr) -> tuple[int, int]:
    return value.lineno, value.col_offset


def _assignments(source: str) -> Iterator[tuple[str, ast.expr]]:
    try:
        tree = masked(source, "the cell").tree
    except UsageError:  # it fails when it runs, and says why
        return
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
                yield name, value
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
                for target, value in zip(targets, values, strict=True):
                    if isinstance(target, ast.Name):
                        yield target.id, value


def _literal(name: str, text: str, before: ast.expr) -> str:
    """`text` in Python, of the type that the value had: "500" is a number for a number, and text for text."""
    try:
        old = ast.literal_eval(before)
    except ValueError:  # it was computed
        old = None
    if isinstance(old, str):
        return repr(text)
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        value = text
    fits = old is None or type(value) is type(old) or (type(old) is float and type(value) is int)
    if not fits:
        raise UsageError(
            f"{name} is of another type.",
            numbers=f"{name}={text}; the notebook has {ast.unparse(before)}, of type {type(old).__name__}",
            hint=f"-p {name}={ast.unparse(before)}",
        )
    return repr(float(value) if type(old) is float else value)
