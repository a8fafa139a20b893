"""A notebook's file: its cells in the order in which they stand, and what its stored outputs say of them."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nbkit.errors import UsageError
from nbkit.notebook.cluster.naming import chosen_ranks
from nbkit.notebook.cluster.sent_cells import literal_text
from nbkit.notebook.export.cell_source import masked, names_of
from nbkit.notebook.export.source import Code, LeftOut, Source, Switch, Values, code_of, imports_of, plain_code

_MOST_RANKS = 1 << 20
_DEFAULT_RANKS = 2
_CONSTANT = (
    *(ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Name, ast.expr_context),
    *(ast.operator, ast.unaryop, ast.JoinedStr, ast.FormattedValue),
)
_SWITCHED = re.compile(r"^(\S.*) → (\S.*) after step (\d+)$", re.MULTILINE)


def read_saved(path: Path) -> Source:
    """Raises UsageError for what is no notebook, or has no cell for the ranks."""
    reading = _Reading()
    for cell in cells_of(path):
        reading.take(cell)
    if not any(isinstance(part, Code) for part in reading.parts):
        raise UsageError(
            f"{path.name} has no cell for the ranks, so there is nothing to export.",
            numbers=f"{reading.number} code cells, none of which begins with %%distributed or %%rank and went well",
            hint="%%distributed   as the first line of a cell",
        )
    return Source(
        name=path.name,
        parts=tuple(reading.parts),
        left_out=tuple(reading.left_out),
        num_ranks=reading.num_ranks,
        switches=tuple(reading.switches),
        strategy=reading.strategies[-1] if reading.strategies else "",
        imports=reading.imports,
    )


def cells_of(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook's file. Raises UsageError when it is none."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        return list(read["cells"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no notebook that can be read.",
            numbers=f"{type(error).__name__}: {error}",
            hint="nbkit export notebook.ipynb train.py",
        ) from None


class _Reading:
    """What has been read so far. known: values of the notebook's own names, as far as its text alone says them."""

    def __init__(self) -> None:
        self.parts: list[Code | Values] = []
        self.left_out: list[LeftOut] = []
        self.switches: list[Switch] = []
        self.strategies: list[str] = []
        self.number, self.num_ranks, self.title = 0, _DEFAULT_RANKS, ""
        self.known: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.imports: dict[str, str] = {}

    def take(self, cell: dict[str, Any]) -> None:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"^#+ +(.+?)\s*$", source, re.MULTILINE)
            self.title = headings[-1] if headings else self.title
        if cell["cell_type"] != "code" or not source.strip():
            return
        self.number += 1
        magic, _, options = source.lstrip().partition("\n")[0].partition(" ")
        if magic in ("%%distributed", "%%rank"):
            self._take_for_ranks(magic, options, source.lstrip().partition("\n")[2], cell)
        elif magic.startswith("%%"):
            self.left_out.append(LeftOut(self.number, source.strip().partition("\n")[0], "ran in the notebook alone"))
        else:
            self._take_own(source, cell)

    def _take_for_ranks(self, magic: str, options: str, source: str, cell: dict[str, Any]) -> None:
        words = shlex.split(options, comments=True)
        named = re.search(r"--ranks[ =]+(\S+)", " ".join(words))
        ranks = words[0] if magic == "%%rank" and words else named[1] if named else None
        if "--at-step" in words:
            line = f"{magic} {options} | {source.strip().partition(chr(10))[0]} …"
            self.left_out.append(LeftOut(self.number, line, "ran inside a training (--at-step)"))
            return
        failed = [one for one in cell.get("outputs", ()) if one["output_type"] == "error"]
        stopped = any(one["ename"] in ("CellStopped", "KeyboardInterrupt") for one in failed)
        state = "ok" if not failed else "interrupted" if stopped else failed[0]["ename"]
        chosen = None if ranks is None else chosen_ranks(ranks, _MOST_RANKS)
        code, taken = code_of(self.number, source, chosen, self.title, state)
        self.parts += [code] if code else []
        self.left_out += taken
        self.title = ""

    def _take_own(self, source: str, cell: dict[str, Any]) -> None:
        plain = masked(source, f"cell {self.number}")
        self.imports |= imports_of(plain)
        has_code = False
        for node in plain.tree.body:
            if isinstance(node, ast.Pass) and node.lineno in plain.magics:
                line = plain.magics[node.lineno]
                if not self._take_magic(line, cell):
                    self.left_out.append(LeftOut(self.number, line))
            else:
                has_code = True
                self._assign(node)
        if has_code:
            self.left_out.append(plain_code(self.number, plain))

    def _take_magic(self, line: str, cell: dict[str, Any]) -> bool:
        """Whether the line stands in the script, as something else."""
        for name, value in self.known.items():
            line = line.replace("{" + name + "}", str(value))
        magic, _, rest = line.partition(" ")
        words = shlex.split(rest, comments=True) if magic in ("%push", "%cluster", "%strategy") else []
        if magic == "%push":
            self._push(words)
            return True
        if magic == "%cluster" and words[:1] == ["start"] and (found := re.search(r"-n[ =]*(\d+)", rest)):
            self.num_ranks = int(found[1])
        if magic == "%strategy" and words and words[0] != "--try":
            # What --undo goes back to is the one before.
            self.strategies += [" ".join(words)] if words[0] != "--undo" else self.strategies[-2:-1]
            for old, new, step in _SWITCHED.findall(_text_of(cell)):
                self.switches.append(Switch(int(step), self.strategies[-1] if self.strategies else new, old, new))
        return False

    def _push(self, words: list[str]) -> None:
        ranks = None
        if "--ranks" in words:
            at = words.index("--ranks")
            ranks, words = chosen_ranks(words[at + 1], _MOST_RANKS), words[:at] + words[at + 2 :]
        names = [word for word in words if word.isidentifier()]
        literals = {name: text for name in names if name in self.known and (text := literal_text(self.known[name]))}
        others = {name: self.unknown.get(name, "never assigned") for name in names if name not in literals}
        self.parts.append(Values(self.number, literals, others, ranks))

    def _assign(self, node: ast.stmt) -> None:
        values = dict(_constants(node, self.known))
        for name in names_of(ast.unparse(node)).bound:
            self.known.pop(name, None)
            self.unknown[name] = f"computed in cell {self.number}: {ast.unparse(node).partition(chr(10))[0]}"
        self.known.update(values)


def _constants(node: ast.stmt, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names that an assignment of constants binds, and to what."""
    match node:
        case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
            pairs = [(name, value)]
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
            pairs = [
                (each.id, value) for each, value in zip(targets, values, strict=True) if isinstance(each, ast.Name)
            ]
        case _:
            return
    for name, value in pairs:
        inside = [*ast.walk(value)]
        named = {one.id for one in inside if isinstance(one, ast.Name)}
        if all(isinstance(one, _CONSTANT) for one in inside) and named <= set(known):
            try:
                # Constants and names of constants alone, of a notebook that its owner runs anyway.
                yield name, eval(compile(ast.Expression(value), name, "eval"), {"__builtins__": {}}, dict(known))
            except Exception:
                continue


def _text_of(cell: dict[str, Any]) -> str:
    shown = (one.get("data", {}).get("text/plain", "") for one in cell.get("outputs", ()))
    return "\n".join("".join(text) for text in shown)
