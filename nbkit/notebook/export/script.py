"""The text of the script: what every rank has from the start, the arguments, and then the notebook's own cells."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbkit.errors import UsageError
from nbkit.notebook.export.cell_source import indented, names_of
from nbkit.notebook.export.source import Code, Source, Values
from nbkit.notebook.export.strategy_argument import with_arguments
from nbkit.quoting import file_word, shell_words

MARK = '"""Exported by nbkit from '
READY = ("rank", "world_size", "local_rank", "device", "torch", "dist", "nbkit")
"""What a rank of a cluster has without an import."""
_MOST_LEFT_OUT = 40
_LONGEST_LINE = 100


@dataclass(frozen=True)
class Script:
    """text: of the file. notes: what its reader should know of it, a sentence each."""

    text: str
    notes: tuple[str, ...]


def script_of(source: Source, name: str) -> Script:
    """The script called `name`. Raises UsageError where cells use what no line of it would define."""
    cells = [part for part in source.parts if isinstance(part, Code)]
    arguments = _free_name(("args", "options", "script_args"), cells)
    options = _options(source.parts)
    rewritten, strategy = with_arguments(cells, arguments)
    if "strategy" in options or "switches" in options:  # the notebook's own, pushed
        rewritten, strategy = cells, None
    imported = _imported(source)
    texts = {id(cell): new.text for cell, new in zip(cells, rewritten, strict=True)}
    default = source.strategy or (source.switches[-1].typed if source.switches else "") or strategy
    sections = [
        "\n\n".join([_docstring(source, name), _imports(rewritten, options)]),
        _arguments(options, arguments, strategy=default if strategy else None, switches=strategy is not None),
        _start(source),
        "\n".join(["# Cells of the notebook itself import this; the ranks use it.", *imported] if imported else ()),
        *_sections(source.parts, texts, options, arguments),
    ]
    text = "\n\n".join(section for section in sections if section)
    hoisted = [line for line in text.split("\n") if line.startswith("from __future__ import ")]
    for line in hoisted:
        text = text.replace(f"{line}\n", "", 1)
    if hoisted:
        head, _, rest = text.partition('\n"""\n')
        text = f'{head}\n"""\n\n' + "\n".join(dict.fromkeys(hoisted)) + "\n" + rest
    return Script(text + "\n", tuple(_notes(source, strategy, imported)))


def _docstring(source: Source, name: str) -> str:
    order = "which they stand" if source.name else "which they ran"
    title = _quoted(source.name) or "a notebook"
    run = f"torchrun --nproc-per-node {source.num_ranks} {_quoted(shell_words(file_word(name)))}"
    lines = [
        f"{MARK}{title}: its cells for the ranks, in the order in {order}.",
        "",
        f"    {run}",
        f"    {run} --help",
        '"""',
    ]
    left_out = [_line(f"cell {each.number:<3} {each.text}", each.why) for each in source.left_out]
    if left_out:
        more = len(left_out) - _MOST_LEFT_OUT
        lines += ["", "# Left out:", *(f"#   {line}".rstrip() for line in left_out[:_MOST_LEFT_OUT])]
        lines += [f"#   and {more} more"] if more > 0 else []
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return `text` as part of a docstring, on one line."""
    seen = "".join(each if each.isprintable() else "?" for each in text)
    return seen.replace("\\", r"\\").replace('"', r"\"")


def _line(text: str, why: str) -> str:
    room = _LONGEST_LINE - len(why) - 4
    text = " ".join(text.splitlines())  # also what ends a line in Python alone
    text = text if len(text) <= room else text[: room - 1] + "…"
    return f"{text}   ({why})" if why else text


def _imports(cells: Sequence[Code], options: Mapping[str, _Option]) -> str:
    used = any(re.search(r"\bdist\b", cell.text) for cell in cells)
    torch = ["import torch", *(["import torch.distributed as dist"] if used else [])]
    standard = ["import argparse", *(["import ast"] if any(one.kind == "literal" for one in options.values()) else [])]
    own = [*(["import nbkit"] if any(re.search(r"\bnbkit\b", cell.text) for cell in cells) else [])]
    own += ["from nbkit.rank.world.world import World"]
    return "\n\n".join("\n".join(group) for group in (standard, torch, own))


# Arguments ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Option:
    """A pushed value on the command line. flag: "--text-bytes". attribute: "text_bytes". kind: of its value."""

    flag: str
    attribute: str
    kind: str
    default: str


def _options(parts: Sequence[Code | Values]) -> dict[str, _Option]:
    """name -> option, of each literal that is pushed to all ranks, as it was pushed first."""
    first: dict[str, str] = {}
    for part in parts:
        if isinstance(part, Values) and part.ranks is None:
            for name, text in part.literals.items():
                first.setdefault(name, text)
    lower = [name.lower() for name in first]
    made = {}
    for name, text in first.items():
        attribute = name.lower() if lower.count(name.lower()) == 1 else name
        attribute = f"{attribute}_" if attribute in ("help", "h") else attribute
        kind = type(ast.literal_eval(text)).__name__
        kind = kind if kind in ("int", "float", "str", "bool") else "literal"
        made[name] = _Option(f"--{attribute.replace('_', '-')}", attribute.lstrip("_"), kind, text)
    return made


def _arguments(options: Mapping[str, _Option], arguments: str, *, strategy: str | None, switches: bool) -> str:
    lines = [
        "parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)"
    ]
    for option in options.values():
        convert = {"bool": "action=argparse.BooleanOptionalAction", "literal": "type=ast.literal_eval", "str": ""}
        words = [f'"{option.flag}"', convert.get(option.kind, f"type={option.kind}"), f"default={option.default}"]
        words.append('help="default: %(default)s"' if option.kind != "bool" else "")
        lines.append(f"parser.add_argument({', '.join(word for word in words if word)})")
    if strategy is not None:
        text = repr(strategy).replace("'", '"')
        lines.append(f'parser.add_argument("--strategy", default={text}, help="to begin with; default: %(default)s")')
    if switches:
        help_ = "a plan of switches: a JSON file, finished steps -> strategy"
        lines.append(f'parser.add_argument("--switches", metavar="FILE", help="{help_}")')
    return "\n".join([*lines, f"{arguments} = parser.parse_args()"])


def _start(source: Source) -> str:
    lines = [
        "# What every rank of the notebook had from the start.",
        "place = World.join_from_env().place",
        "rank, world_size, local_rank = place.rank, place.world_size, place.local_rank",
        "device = torch.device(place.device)",
    ]
    if source.threads > 1:
        lines.append(f"torch.set_num_threads({source.threads})  # as there: sums come out the same to the last bit")
    return "\n".join(lines)


def _free_name(names: Sequence[str], cells: Sequence[Code]) -> str:
    bound = {name for cell in cells for name in names_of(cell.text).bound}
    return next(name for name in (*names, *(f"args{number}" for number in range(2, 1000))) if name not in bound)


# Cells ----------------------------------------------------------------------------------------------------------------


def _sections(
    parts: Sequence[Code | Values], texts: Mapping[int, str], options: Mapping[str, _Option], arguments: str
) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Values):
            lines = [f"{name} = {_value(name, text, part, options, arguments)}" for name, text in part.literals.items()]
            if lines:
                yield f"\n# %% cell {part.number}: pushed\n{_for_ranks(chr(10).join(lines), part.ranks)}"
            continue
        title = f": {part.title}" if part.title else ""
        note = (
            "\n# Somebody stopped it in the notebook; here it runs to its end." if part.state == "interrupted" else ""
        )
        yield f"\n# %% cell {part.number}{title}{note}\n{_for_ranks(texts[id(part)], part.ranks)}"


def _value(name: str, text: str, part: Values, options: Mapping[str, _Option], arguments: str) -> str:
    option = options.get(name)
    # Pushed again with another value: that is the notebook's, and the argument was the first one.
    return f"{arguments}.{option.attribute}" if option and option.default == text and part.ranks is None else text


def _for_ranks(text: str, ranks: tuple[int, ...] | None) -> str:
    if ranks is None:
        return text
    condition = f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in {ranks}"
    return f"if {condition}:\n{indented(text)}"


def _imported(source: Source) -> list[str]:
    """The imports of the notebook itself that its ranks need. Raises UsageError for names that nothing defines."""
    parts = source.parts
    names = {id(part): names_of(part.text) for part in parts if isinstance(part, Code)}
    defined = set(READY).union(*(one.bound for one in names.values()))
    defined |= {name for part in parts if isinstance(part, Values) for name in part.literals}
    if any(one.free for one in names.values()):
        return []
    lacking = {
        name: part.number
        for part in reversed(parts)
        if isinstance(part, Code)
        for name in names[id(part)].read - defined
    }
    imported = list(dict.fromkeys(source.imports[name] for name in sorted(lacking) if name in source.imports))
    if not (unknown := sorted(set(lacking) - set(source.imports))):
        return imported
    others = {name: why for part in parts if isinstance(part, Values) for name, why in part.others.items()}
    raise UsageError(
        "The cells for the ranks use what no line of the script would define.",
        numbers="\n".join(f"{name} (cell {lacking[name]}{_why(name, others)})" for name in unknown),
        hint=f"{unknown[0]} = ...   in a %%distributed cell that ran before; what was pushed has to be a literal",
    )


def _why(name: str, others: Mapping[str, str]) -> str:
    return f"; pushed, and no literal: {others[name]}" if name in others else ""


def _notes(source: Source, strategy: str | None, imported: Sequence[str]) -> Iterator[str]:
    if imported:
        yield f"the ranks need what a cell of the notebook itself imports: {'; '.join(imported)}"
    stopped = [part.number for part in source.parts if isinstance(part, Code) and part.state == "interrupted"]
    if stopped:
        yield f"cell {stopped[0]} was stopped in the notebook; in the script it runs to its end"
    live = [each.number for each in source.left_out if "--at-step" in each.why]
    if live:
        yield f"cell {live[0]} ran inside a training (--at-step), which a script cannot: what it changed is missing"
    failed = [each for each in source.left_out if each.why.startswith("failed")]
    if failed:
        yield f"cell {failed[0].number} failed and is left out"
    if strategy == "":
        yield "--strategy is left out: the strategy of the Trainer is no literal"
