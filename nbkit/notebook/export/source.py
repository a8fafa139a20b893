"""Read a notebook into frozen values (`Source`), from which a script is made.

- `plain_code` and `code_of` turn a cell into plain Python. They remove lines that only notebooks understand, and list
  them. Until then, `masked` puts `pass` in their place, so that all other lines keep their numbers.
- `read_running` reads the running notebook: the cells that its cluster was sent, in order, and the rest of its history.
- `read_saved` reads a notebook's file: its cells in file order, and facts from their stored outputs.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import re
import shlex
import symtable
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nbkit.errors import UsageError
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.notebook.cluster.hosts.launcher import LauncherRequest
from nbkit.notebook.cluster.hosts.launchers.ssh import read_hosts
from nbkit.notebook.cluster.registry import chosen_ranks, notebook_number, notebook_shell
from nbkit.notebook.cluster.sent_cells import SentCell, literal_text

_MAGIC = re.compile(r"\s*(?:[%!?]|[\w., \[\]]+=\s*[%!]|[\w.]+\?{1,2}\s*$)")
_TIMED = re.compile(r"(\s*)%time\s+(?=\S)")
_PYTHON_CELL_MAGICS = ("%%time", "%%capture")  # cell magics that run their cell as Python
_SHOWN = ("display", "clear_output", "get_ipython")
_JUPYTER_PACKAGES = ("IPython", "ipykernel", "ipywidgets", "google.colab")


@dataclass(frozen=True)
class Plain:
    """A cell as plain Python. text: "" if nothing is left. magics: line number (from 1) -> removed line."""

    text: str
    magics: dict[int, str]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def masked(source: str, where: str) -> Plain:
    """Return `source` with `pass` in place of each notebook-only line. Raises UsageError if the rest is not Python.

    where: "cell 4", for the error.
    """
    lines, magics = source.split("\n"), {}
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if lines[first].startswith("%%"):
        magics[first + 1] = lines[first]
        if lines[first].split()[0] not in _PYTHON_CELL_MAGICS:
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
    """Return the index of the line to remove when Python fails at `broken`: that line, or another magic line.

    Python may notice a quote in a shell command only many lines later.
    """
    order = [broken, *range(broken - 1, -1, -1), *range(broken + 1, len(lines))]
    return next((n for n in order if n < len(lines) and _MAGIC.match(lines[n])), None)


def without_shown(plain: Plain) -> Plain:
    """Return the cell without the `pass` of magics, and without statements that only show output or import Jupyter."""
    lines: list[str | None] = [*plain.text.split("\n")]
    magics = dict(plain.magics)
    for node in ast.walk(plain.tree):
        is_mark = isinstance(node, ast.Pass) and node.lineno in plain.magics
        if not isinstance(node, ast.stmt) or not (is_mark or (is_of_notebook(node) and _stands_alone(plain, node))):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        magics.setdefault(first, (lines[first - 1] or "").strip())
        # A block needs a statement, so it gets `pass`. At the top level the line is removed.
        lines[first - 1 : last] = [None] * (last - first + 1)
        if node.col_offset:
            lines[first - 1] = _indent(plain.text.split("\n")[first - 1]) + "pass"
    kept = [line.rstrip() for line in lines if line is not None]
    return Plain("\n".join(kept).strip("\n"), magics)


def is_of_notebook(node: ast.stmt) -> bool:
    """Return True if the statement only shows something in a notebook, or imports from Jupyter."""
    match node:
        case ast.Expr(ast.Call(ast.Name(name))):
            return name in _SHOWN
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("plt"), "show"))):
            return True
        case ast.Expr(ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"))))):
            return True
        case ast.ImportFrom(module=str(module)):
            return module.split(".")[0] in _JUPYTER_PACKAGES or module in _JUPYTER_PACKAGES
        case ast.Import(names):
            return all(alias.name.split(".")[0] in _JUPYTER_PACKAGES for alias in names)
    return False


def _stands_alone(plain: Plain, node: ast.stmt) -> bool:
    """Return True if no other statement is on its lines."""
    lines = plain.text.split("\n")
    before = lines[node.lineno - 1].encode()[: node.col_offset]
    after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].strip()
    return not before.strip() and (not after or after.startswith(b"#"))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def place_of(text: str, line: int, column: int) -> int:
    """Return the index in `text` of a place from ast, which counts lines and bytes."""
    lines = text.split("\n")
    return sum(len(each) + 1 for each in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())


# Names ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellNames:
    """The names in a cell, as in a module.

    bound: global names that it assigns. read: global names that it uses, also in functions. free: True if a star import
    or exec() may bind other names.
    """

    bound: frozenset[str]
    read: frozenset[str]
    free: bool


def names_of(text: str) -> CellNames:
    """Return the names in Python code."""
    top = symtable.symtable(text, "cell", "exec")
    bound = {one.get_name() for one in top.get_symbols() if _is_bound(one)}
    read = {one.get_name() for one in top.get_symbols() if one.is_referenced()}
    for table in _below(top):
        bound |= {one.get_name() for one in table.get_symbols() if one.is_declared_global() and one.is_assigned()}
        read |= {one.get_name() for one in table.get_symbols() if one.is_global() and one.is_referenced()}
    free = any(_binds_anything(node) for node in ast.walk(ast.parse(text)))
    return CellNames(frozenset(bound), frozenset(read - set(dir(builtins)) - {"__name__", "__file__"}), free)


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
    """Return why a cell cannot be in a script, or ""."""
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
    """Return `text` indented by four spaces. The inside of multi-line strings is unchanged."""
    inside = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant | ast.JoinedStr) and isinstance(getattr(node, "value", ""), str | bytes)
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }
    lines = text.split("\n")
    return "\n".join(line if number in inside or not line else f"    {line}" for number, line in enumerate(lines, 1))


@dataclass(frozen=True)
class Code:
    """A cell of the ranks. ranks: those that ran it, None for all. title: the heading above it. state: see SentCell."""

    number: int
    text: str
    ranks: tuple[int, ...] | None = None
    title: str = ""
    state: str = "ok"


@dataclass(frozen=True)
class Values:
    """Values pushed to the ranks. literals: name -> Python literal. others: name -> description of another value."""

    number: int
    literals: Mapping[str, str]
    others: Mapping[str, str]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LeftOut:
    """A line of the notebook that is not in the script. why: the reason, "" if the line itself shows it."""

    number: int
    text: str
    why: str = ""


@dataclass(frozen=True)
class Switch:
    """A switch of the strategy after `step` steps. typed: as the user typed it. old, new: in canonical form."""

    step: int
    typed: str
    old: str
    new: str


@dataclass(frozen=True)
class Source:
    """A notebook.

    name: of its file, "" if unknown. ranks_of_hosts: number of ranks on each host of its cluster. threads: number of
    threads of each CPU rank, 0 if unknown. imports: name -> import statement, from cells that ran in the notebook
    itself.
    """

    name: str
    parts: tuple[Code | Values, ...]
    left_out: tuple[LeftOut, ...]
    ranks_of_hosts: tuple[int, ...]
    gpus: bool = False
    threads: int = 0
    switches: tuple[Switch, ...] = ()
    strategy: str = ""  # of the last switch
    imports: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_of_hosts)


def code_of(
    number: int, source: str, ranks: tuple[int, ...] | None, title: str, state: str
) -> tuple[Code | None, list[LeftOut]]:
    """Return a cell of the ranks without notebook-only lines, and these lines.

    Raises UsageError for a cell that a script cannot contain.
    """
    if state not in ("ok", "running", "interrupted"):
        return None, [LeftOut(number, _first(source), f"failed: {state}")]
    where = f"cell {number}"
    plain = masked(source, where)
    if why := refusal(plain.tree):
        raise UsageError(
            f"{where[0].upper()}{where[1:]} cannot be exported: {why}.",
            numbers=_first(source),
            hint="%push answer   from a cell of the notebook"
            if "input" in why
            else "asyncio.run(main()), with async def main()",
        )
    plain = without_shown(plain)
    code = Code(number, plain.text, ranks, title, state) if plain.text.strip() else None
    return code, [*taken_out(number, plain)]


def taken_out(number: int, plain: Plain) -> Iterable[LeftOut]:
    """Return the notebook-only lines of a cell."""
    return (LeftOut(number, line) for _, line in sorted(plain.magics.items()))


def _first(source: str) -> str:
    return next((line.strip() for line in source.splitlines() if line.strip() and not line.startswith("# %%")), "")


def plain_code(number: int, plain: Plain) -> LeftOut:
    """Return a cell that ran in the notebook itself, as a LeftOut."""
    first, *others = [node for node in plain.tree.body if not isinstance(node, ast.Pass)]
    line = plain.text.split("\n")[first.lineno - 1]
    more = " …" if others or first.end_lineno != first.lineno else ""
    return LeftOut(number, line + more, "ran in the notebook alone")


def imports_of(plain: Plain) -> dict[str, str]:
    """Return name -> statement for the imports of a cell that ran in the notebook itself."""
    statements = [node for node in plain.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {
        (alias.asname or alias.name).split(".")[0]: ast.unparse(node)
        for node in statements
        if not is_of_notebook(node)
        for alias in node.names
    }


def read_running(cluster: Cluster) -> Source:
    """Return everything that the ranks of `cluster` have run since they were started.

    Raises UsageError if they have run nothing.
    """
    parts: list[Code | Values] = []
    left_out: list[LeftOut] = []
    everyone = tuple(range(cluster.entry.n))
    for sent in cluster.sent:
        if not isinstance(sent, SentCell):
            chosen = None if sent.ranks == everyone else sent.ranks
            parts.append(Values(sent.number, sent.literals, sent.others, chosen))
            continue
        request = sent.request
        if sent.live:
            left_out.append(LeftOut(request.number, _shown(request.source), "ran inside a training (--at-step)"))
            continue
        chosen = None if request.ranks == everyone else request.ranks
        code, taken = code_of(request.number, _own(request.source), chosen, "", sent.state)
        parts += [code] if code else []
        left_out += taken
    if not any(isinstance(part, Code) for part in parts):
        raise UsageError(
            "No cell has run on the ranks, so there is nothing to export.",
            numbers=f"{cluster.entry.name}: {len(cluster.sent)} cells and pushes since its ranks were started",
            hint="%%distributed   first; or, of a saved notebook: nbkit export notebook.ipynb train.py",
        )
    own, imports = _history(cluster)
    switched = cluster.training.switched
    gpus = "GPU " in cluster.entry.labels[0]
    threads = cluster.pinning.pins[0].threads if cluster.pinning else 1
    return Source(
        name="",
        parts=tuple(parts),
        left_out=tuple(sorted([*left_out, *own], key=lambda each: each.number)),
        ranks_of_hosts=tuple(Counter(cluster.entry.hosts).values()),
        gpus=gpus,
        threads=0 if gpus else threads,
        switches=tuple(
            Switch(one.step, one.args.get("strategy", one.strategy), one.result["old"], one.result["new"])
            for one in switched
        ),
        imports=imports,
    )


def _history(cluster: Cluster) -> tuple[list[LeftOut], dict[str, str]]:
    """Return the cells that ran in the notebook itself, and their imports."""
    shell = notebook_shell()
    if shell is None:
        return [], {}
    sent = {one.request.number if isinstance(one, SentCell) else one.number for one in cluster.sent}
    found: list[LeftOut] = []
    imports: dict[str, str] = {}
    for number, source in enumerate(shell.history_manager.input_hist_raw):
        if number in sent or number == notebook_number() or not source.strip():
            continue
        if source.lstrip().startswith("%%"):
            to_ranks = source.lstrip().startswith(("%%distributed", "%%rank"))
            why = "did not run on these ranks" if to_ranks else "ran in the notebook alone"
            found.append(LeftOut(number, _shown(source), why))
            continue
        try:
            plain = masked(source, f"cell {number}")
        except UsageError:  # the cell never ran
            continue
        found += taken_out(number, plain)
        imports |= imports_of(plain)
        if any(not isinstance(node, ast.Pass) for node in plain.tree.body):
            found.append(plain_code(number, plain))
    return found, imports


def _own(source: str) -> str:
    """Return the cell without the comment that replaced its magic's line."""
    return source.partition("\n")[2] if source.startswith("# %%") else source


def _shown(source: str) -> str:
    lines = [line for line in source.splitlines() if line.strip()]
    return lines[0].removeprefix("# ") + (f" | {lines[1].strip()} …" if len(lines) > 1 else "")


_MOST_RANKS = 1 << 20
_DEFAULT_RANKS: tuple[int, ...] = (2,)
_CONSTANT = (
    *(ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Name, ast.expr_context),
    *(ast.operator, ast.unaryop, ast.JoinedStr, ast.FormattedValue),
)
_SWITCHED = re.compile(r"^(\S.*) → (\S.*) after step (\d+)$", re.MULTILINE)


def read_saved(path: Path) -> Source:
    """Read a saved notebook. Raises UsageError if it is not a notebook, or has no cell for the ranks."""
    reading = _Reading(path.parent)
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
        ranks_of_hosts=reading.ranks_of_hosts,
        switches=tuple(reading.switches),
        strategy=reading.strategies[-1] if reading.strategies else "",
        imports=reading.imports,
    )


def cells_of(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook's file. Raises UsageError if it is not a notebook."""
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
    """The state of reading a notebook.

    folder: the notebook's. known: values of the notebook's names that are constants in its text.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[Code | Values] = []
        self.left_out: list[LeftOut] = []
        self.switches: list[Switch] = []
        self.strategies: list[str] = []
        self.number, self.ranks_of_hosts, self.title = 0, _DEFAULT_RANKS, ""
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
        """Return True if the script has other code in place of the line."""
        for name, value in self.known.items():
            line = line.replace("{" + name + "}", str(value))
        magic, _, rest = line.partition(" ")
        words = shlex.split(rest, comments=True) if magic in ("%push", "%cluster", "%strategy") else []
        if magic == "%push":
            self._push(words)
            return True
        if magic == "%cluster" and words[:1] == ["start"]:
            self.ranks_of_hosts = _requested_ranks(words[1:], self.folder) or self.ranks_of_hosts
        if magic == "%strategy" and words and words[0] != "--try":
            # --undo goes back to the strategy before.
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


def _requested_ranks(words: Sequence[str], folder: Path) -> tuple[int, ...]:
    """Return the number of ranks on each host for the options of `%cluster start`; () if they do not say it.

    folder: the notebook's. A file of hosts is looked for there first, because a notebook starts in its folder.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-n", type=int)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--hosts")
    try:
        asked, _ = parser.parse_known_args(words)
        if asked.hosts:
            return tuple(count for _, count in read_hosts(asked.hosts, folder))
        return LauncherRequest("", asked.n, asked.nodes).ranks_of_hosts if asked.n else ()
    except (argparse.ArgumentError, OSError, ValueError):  # a name in braces whose value is unknown
        return ()


def _constants(node: ast.stmt, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the names that an assignment of constants binds."""
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
                # The expression has only constants and names of constants, and the owner runs this notebook anyway.
                yield name, eval(compile(ast.Expression(value), name, "eval"), {"__builtins__": {}}, dict(known))
            except Exception:
                continue


def _text_of(cell: dict[str, Any]) -> str:
    shown = (one.get("data", {}).get("text/plain", "") for one in cell.get("outputs", ()))
    return "\n".join("".join(text) for text in shown)
