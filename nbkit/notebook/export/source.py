"""What a script is made of, as frozen values: the same whether a running notebook or a file was read."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nbkit.errors import UsageError
from nbkit.notebook.export.cell_source import Plain, is_of_notebook, masked, refusal, without_shown


@dataclass(frozen=True)
class Code:
    """A cell on the ranks. ranks: those that ran it, None for all. title: the heading above it. state: see SentCell."""

    number: int
    text: str
    ranks: tuple[int, ...] | None = None
    title: str = ""
    state: str = "ok"


@dataclass(frozen=True)
class Values:
    """Values pushed to the ranks. literals: name -> its text in Python; others: name -> what it is instead."""

    number: int
    literals: Mapping[str, str]
    others: Mapping[str, str]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LeftOut:
    """What is in the notebook and not in the script. why: "" where the line itself says it."""

    number: int
    text: str
    why: str = ""


@dataclass(frozen=True)
class Switch:
    """A switch of the notebook, after so many steps. typed: as somebody wrote it; old, new: in full."""

    step: int
    typed: str
    old: str
    new: str


@dataclass(frozen=True)
class Source:
    """A notebook. name: of its file, "" when not known. threads: of each CPU rank, 0 when not known. imports: name ->
    the statement by which a cell of the notebook itself imports it."""

    name: str
    parts: tuple[Code | Values, ...]
    left_out: tuple[LeftOut, ...]
    num_ranks: int
    gpus: bool = False
    threads: int = 0
    switches: tuple[Switch, ...] = ()
    strategy: str = ""  # the last one that was switched to
    imports: Mapping[str, str] = field(default_factory=dict)


def code_of(
    number: int, source: str, ranks: tuple[int, ...] | None, title: str, state: str
) -> tuple[Code | None, list[LeftOut]]:
    """A cell of the ranks without what only a notebook understands, and what was taken out.

    Raises UsageError for a cell that no script can have.
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
    """The lines of a cell that only a notebook understands."""
    return (LeftOut(number, line) for _, line in sorted(plain.magics.items()))


def _first(source: str) -> str:
    return next((line.strip() for line in source.splitlines() if line.strip() and not line.startswith("# %%")), "")


def plain_code(number: int, plain: Plain) -> LeftOut:
    """A cell of the notebook itself."""
    first, *others = [node for node in plain.tree.body if not isinstance(node, ast.Pass)]
    line = plain.text.split("\n")[first.lineno - 1]
    more = " …" if others or first.end_lineno != first.lineno else ""
    return LeftOut(number, line + more, "ran in the notebook alone")


def imports_of(plain: Plain) -> dict[str, str]:
    """What a cell of the notebook itself imports: name -> statement."""
    statements = [node for node in plain.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {
        (alias.asname or alias.name).split(".")[0]: ast.unparse(node)
        for node in statements
        if not is_of_notebook(node)
        for alias in node.names
    }
