"""The Trainers of a script take their strategy from its command line: their calls, rewritten where they stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from nbkit.notebook.export.cell_source import place_of
from nbkit.notebook.export.source import Code

_MAKERS = ("Trainer", "prepare")
_DEFAULT = "ddp"


def with_arguments(cells: Sequence[Code], arguments: str) -> tuple[list[Code], str | None]:
    """The cells with `strategy=ARGUMENTS.strategy, switches=ARGUMENTS.switches` in the calls that make a training.

    Those calls that name the same strategy as the last one. Also the strategy that they named: None where there is no
    such call, "" where it is no literal, and then it stays as it is.
    """
    own = {name for cell in cells for name in _from_nbkit(cell)}
    calls = [(cell, call) for cell in cells for call in _calls(cell, own)]
    if not calls:
        return list(cells), None
    wanted = _strategy_of(calls[-1][1])
    literal = wanted if isinstance(wanted, str) else ""
    chosen = {id(cell): [call for of, call in calls if of is cell and _same(call, wanted)] for cell in cells}
    return [replace(cell, text=_rewritten(cell.text, chosen[id(cell)], arguments, literal)) for cell in cells], literal


def _from_nbkit(cell: Code) -> Iterator[str]:
    """What Trainer and prepare are called there, where they were imported by name."""
    for node in ast.walk(ast.parse(cell.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nbkit":
            yield from (alias.asname or alias.name for alias in node.names if alias.name in _MAKERS)


def _calls(cell: Code, own: Collection[str]) -> list[ast.Call]:
    found = [node for node in ast.walk(ast.parse(cell.text)) if isinstance(node, ast.Call) and _makes(node.func, own)]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def _makes(func: ast.expr, own: Collection[str]) -> bool:
    match func:
        case ast.Attribute(ast.Name("nbkit"), name):
            return name in _MAKERS
        case ast.Name(name):
            return name in own
    return False


def _keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((each for each in call.keywords if each.arg == name), None)


def _strategy_of(call: ast.Call) -> str | ast.expr:
    if (found := _keyword(call, "strategy")) is None:
        return _DEFAULT
    value = found.value
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else value


def _same(call: ast.Call, wanted: str | ast.expr) -> bool:
    one = _strategy_of(call)
    if isinstance(one, str) or isinstance(wanted, str):
        return one == wanted
    return ast.unparse(one) == ast.unparse(wanted)


def _rewritten(text: str, calls: Sequence[ast.Call], arguments: str, literal: str) -> str:
    for call in reversed(calls):  # from the end, so that the places of the others stay
        text = _one(text, call, arguments, literal)
    return text


def _one(text: str, call: ast.Call, arguments: str, literal: str) -> str:
    spelled = _keyword(call, "strategy") if literal else None
    added = [f"switches={arguments}.switches"] if _keyword(call, "switches") is None else []
    added = [f"strategy={arguments}.strategy", *added] if literal and spelled is None else added
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    after = spelled or (given[-1] if given else None)
    if after is None:
        end = _end(text, call) - 1
        return text[:end] + ", ".join(added) + text[end:]
    start, end = place_of(text, after.lineno, after.col_offset), _end(text, after)
    kept = text[start:end] if spelled is None else f"strategy={arguments}.strategy"
    indent = text[text.rfind("\n", 0, start) + 1 : start]
    rest = re.match(r",[ \t]*(?:#[^\n]*)?\n", text[end:])
    # Arguments that stand on lines of their own stay so, and comments beside their argument.
    if indent.strip():
        kept = ", ".join([kept, *added])
    elif rest is None:
        kept = f",\n{indent}".join([kept, *added])
    else:
        kept += rest[0] + "".join(f"{indent}{each},\n" for each in added)
        end += rest.end()
    return text[:start] + kept + text[end:]


def _end(text: str, node: ast.expr | ast.keyword) -> int:
    return place_of(text, node.end_lineno or node.lineno, node.end_col_offset or 0)
