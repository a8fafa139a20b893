"""The source of a cell as plain Python: lines that only a notebook understands are taken out, and named.

Lines keep their numbers until `plain` is done, so that a statement and the line it stands in can be told apart.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from nbkit.errors import UsageError

_MAGIC = re.compile(r"\s*(?:[%!?]|[\w., \[\]]+=\s*[%!]|[\w.]+\?{1,2}\s*$)")
_TIMED = re.compile(r"(\s*)%time\s+(?=\S)")
_PASSED_OVER = ("%%time", "%%capture")  # cell magics whose cell is Python, and runs
_SHOWN = ("display", "clear_output", "get_ipython")
_OF_JUPYTER = ("IPython", "ipykernel", "ipywidgets", "google.colab")


@dataclass(frozen=True)
class Plain:
    """What a cell is as Python. text: "" where nothing is left. magics: the lines taken out, by number, from 1."""

    text: str
    magics: dict[int, str]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def masked(source: str, where: str) -> Plain:
    """`source` with `pass` for each line that only a notebook understands. Raises UsageError for what is no Python.

    where: "cell 4", for the error.
    """
    lines, magics = source.split("\n"), {}
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if lines[first].startswith("%%"):
        magics[first + 1] = lines[first]
        if lines[first].split()[0] not in _PASSED_OVER:
            return Plain("", magics)
        lines[first] = ""
    while True:
        try:
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            number = _magic_line(lines, (error.lineno or 1) - 1)
            if number is None:
                raise UsageError(
                    f"{where[0].upper()}{where[1:]} is not Python.",
                    numbers=f"line {error.lineno}: {error.msg}",
                    hint="correct it, or take it out of the notebook",
                ) from None
        else:
            return Plain("\n".join(lines), magics)
        line = lines[number]
        if _TIMED.match(line):
            lines[number] = _TIMED.sub(r"\1", line)
            continue
        magics[number + 1], lines[number] = line.strip(), _indent(line) + "pass"
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line, lines[number] = lines[number], ""


def _magic_line(lines: list[str], broken: int) -> int | None:
    """The line to take out when Python stumbles over `broken`: that one, or the first above or below that is no Python
    (a quote in a shell command is noticed far from it)."""
    order = [broken, *range(broken - 1, -1, -1), *range(broken + 1, len(lines))]
    return next((n for n in order if n < len(lines) and _MAGIC.match(lines[n])), None)


def without_shown(plain: Plain) -> Plain:
    """Without the statements that show something in a notebook, or import from it, and without the marks of magics."""
    lines: list[str | None] = [*plain.text.split("\n")]
    magics = dict(plain.magics)
    for node in ast.walk(plain.tree):
        is_mark = isinstance(node, ast.Pass) and node.lineno in plain.magics
        if not isinstance(node, ast.stmt) or not (is_mark or (is_of_notebook(node) and _stands_alone(plain, node))):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        magics.setdefault(first, (lines[first - 1] or "").strip())
        # A block needs a statement; in the cell itself the line goes.
        lines[first - 1 : last] = [None] * (last - first + 1)
        if node.col_offset:
            lines[first - 1] = _indent(plain.text.split("\n")[first - 1]) + "pass"
    kept = [line.rstrip() for line in lines if line is not None]
    return Plain("\n".join(kept).strip("\n"), magics)


def is_of_notebook(node: ast.stmt) -> bool:
    """Whether it shows something in a notebook and does nothing else, or imports from Jupyter."""
    match node:
        case ast.Expr(ast.Call(ast.Name(name))):
            return name in _SHOWN
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("plt"), "show"))):
            return True
        case ast.Expr(ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"))))):
            return True
        case ast.ImportFrom(module=str(module)):
            return module.split(".")[0] in _OF_JUPYTER or module in _OF_JUPYTER
        case ast.Import(names):
            return all(alias.name.split(".")[0] in _OF_JUPYTER for alias in names)
    return False


def _stands_alone(plain: Plain, node: ast.stmt) -> bool:
    """No other statement shares its lines."""
    lines = plain.text.split("\n")
    before = lines[node.lineno - 1].encode()[: node.col_offset]
    after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].strip()
    return not before.strip() and (not after or after.startswith(b"#"))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def place_of(text: str, line: int, column: int) -> int:
    """The index in `text` of a place that ast names by line and byte."""
    lines = text.split("\n")
    return sum(len(each) + 1 for each in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())


# Names ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """Of the module that a cell is. bound: it gives them a value. read: it takes them from elsewhere, in functions too.

    free: a star import or exec() may bind anything.
    """

    bound: frozenset[str]
    read: frozenset[str]
    free: bool


def names_of(text: str) -> Names:
    """The names of a cell's Python."""
    top = symtable.symtable(text, "cell", "exec")
    bound = {one.get_name() for one in top.get_symbols() if _is_bound(one)}
    read = {one.get_name() for one in top.get_symbols() if one.is_referenced()}
    for table in _below(top):
        bound |= {one.get_name() for one in table.get_symbols() if one.is_declared_global() and one.is_assigned()}
        read |= {one.get_name() for one in table.get_symbols() if one.is_global() and one.is_referenced()}
    free = any(_binds_anything(node) for node in ast.walk(ast.parse(text)))
    return Names(frozenset(bound), frozenset(read - set(dir(builtins)) - {"__name__", "__file__"}), free)


def _is_bound(one: symtable.Symbol) -> bool:
    return one.is_assigned() or one.is_imported() or one.is_namespace()


def _below(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _below(child)


def _binds_anything(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(names=names):
            return any(alias.name == "*" for alias in names)
        case ast.Call(ast.Name("exec" | "globals")):
            return True
    return False


# What a script cannot have --------------------------------------------------------------------------------------------


def refusal(tree: ast.Module) -> str:
    """Why a cell cannot stand in a script, or ""."""
    if any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "input" for node in ast.walk(tree)):
        return "it asks with input(), and a job has no keyboard"
    if _awaits(tree):
        return "it awaits outside of a function, which only a notebook can"
    return ""


def _awaits(node: ast.AST) -> bool:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Await | ast.AsyncFor | ast.AsyncWith) or _awaits(child):
            return True
    return False


def indented(text: str) -> str:
    """`text` four spaces to the right; the inside of strings over several lines stays as it is."""
    inside = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant | ast.JoinedStr) and isinstance(getattr(node, "value", ""), str | bytes)
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }
    lines = text.split("\n")
    return "\n".join(line if number in inside or not line else f"    {line}" for number, line in enumerate(lines, 1))
