"""`%nbkit export train.py`, `nbkit export notebook.ipynb train.py`, `nbkit.export("train.py")`: one function, `export`.

The script has the imports and names that every rank has, then the arguments, then the notebook's own cells. Calls that
make a Trainer are rewritten to take the strategy from the command line (`with_arguments`).
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nbkit.errors import UsageError
from nbkit.notebook.cluster.cluster import current
from nbkit.notebook.export.sbatch_file import SlurmOptions, check_resumes, script_job
from nbkit.notebook.export.source import (
    Code,
    LeftOut,
    Source,
    Switch,
    Values,
    indented,
    names_of,
    place_of,
    read_running,
    read_saved,
)
from nbkit.notebook.user_files import write_file
from nbkit.quoting import file_word, shell_words, user_path

_MAKERS = ("Trainer", "prepare")
_DEFAULT = "ddp"


def with_arguments(cells: Sequence[Code], arguments: str) -> tuple[list[Code], str | None]:
    """Return the cells with `strategy=ARGUMENTS.strategy, switches=ARGUMENTS.switches` in calls that make a training.

    Only calls with the same strategy as the last call are changed. Also return that strategy: None if there is no such
    call, "" if it is not a literal. Then nothing is changed.
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
    """Yield the cell's names for Trainer and prepare, if it imports them by name."""
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
    for call in reversed(calls):  # from the end, so that earlier places stay valid
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
    # Arguments on separate lines stay there, and comments stay beside their argument.
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


MARK = '"""Exported by nbkit from '
READY = ("rank", "world_size", "local_rank", "device", "torch", "dist", "nbkit")
"""Names that a rank has without an import."""
_MOST_LEFT_OUT = 40
_LONGEST_LINE = 100


@dataclass(frozen=True)
class Script:
    """A script. text: the file's content. notes: sentences for the user."""

    text: str
    notes: tuple[str, ...]


def script_of(source: Source, name: str) -> Script:
    """Return a script called `name`. Raises UsageError if cells use a name that the script would not define."""
    cells = [part for part in source.parts if isinstance(part, Code)]
    arguments = _free_name(("args", "options", "script_args"), cells)
    options = _options(source.parts)
    rewritten, strategy = with_arguments(cells, arguments)
    if "strategy" in options or "switches" in options:  # the notebook pushes its own values with these names
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
    script = _quoted(shell_words(file_word(name)))
    run = f"{_torchrun(source)} {script}"
    lines = [
        f"{MARK}{title}: its cells for the ranks, in the order in {order}.",
        "",
        f"    {run}",
        f"    python {script} --help",
        '"""',
    ]
    left_out = [_line(f"cell {each.number:<3} {each.text}", each.why) for each in source.left_out]
    if left_out:
        more = len(left_out) - _MOST_LEFT_OUT
        lines += ["", "# Left out:", *(f"#   {line}".rstrip() for line in left_out[:_MOST_LEFT_OUT])]
        lines += [f"#   and {more} more"] if more > 0 else []
    return "\n".join(lines)


def _torchrun(source: Source) -> str:
    """Return the torchrun command for as many ranks as the notebook had.

    If it had several hosts with equal numbers of ranks, the command has to run on each of them. HOST stands for the
    name of one of these hosts. If the numbers differ, the command starts all ranks on one host.
    """
    hosts = source.ranks_of_hosts
    if len(hosts) == 1 or len(set(hosts)) > 1:
        return f"torchrun --nproc-per-node {source.num_ranks}"
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {len(hosts)} --nproc-per-node {hosts[0]} {meeting}"


def _quoted(text: str) -> str:
    """Return `text` as part of a docstring, on one line."""
    seen = "".join(each if each.isprintable() else "?" for each in text)
    return seen.replace("\\", r"\\").replace('"', r"\"")


def _line(text: str, why: str) -> str:
    room = _LONGEST_LINE - len(why) - 4
    text = " ".join(text.splitlines())  # splitlines also knows Python's other line ends
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
    """A pushed value as a command-line option.

    flag: "--text-bytes". attribute: "text_bytes". kind: type of its value.
    """

    flag: str
    attribute: str
    kind: str
    default: str


def _options(parts: Sequence[Code | Values]) -> dict[str, _Option]:
    """Return name -> option for each literal that is pushed to all ranks. The default is the first pushed value."""
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
    # The argument replaces the first pushed value. Other values, which are pushed later, are written out.
    return f"{arguments}.{option.attribute}" if option and option.default == text and part.ranks is None else text


def _for_ranks(text: str, ranks: tuple[int, ...] | None) -> str:
    if ranks is None:
        return text
    condition = f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in {ranks}"
    return f"if {condition}:\n{indented(text)}"


def _imported(source: Source) -> list[str]:
    """Return the imports of the notebook's own cells that ranks need. Raises UsageError for undefined names."""
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
        "The cells for the ranks use names that no line of the script would define.",
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


@dataclass(frozen=True)
class Exported:
    """The written files. It can be used as a path, which is `path`.

    beside: (other file, command to type).
    """

    path: Path
    run: str
    num_cells: int
    beside: tuple[tuple[Path, str], ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        cells = f"{self.num_cells} cell{'s' * (self.num_cells != 1)} for the ranks"
        lines = [f"{self.path}   {cells}, {len(self.left_out)} lines of the notebook left out (listed in it)"]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {typed}" for typed in (self.run, *(typed for _, typed in self.beside))]
        return "\n".join(lines)


def export(
    path: str | os.PathLike[str],
    notebook: str | os.PathLike[str] | None = None,
    *,
    slurm: bool = False,
    n: int | None = None,
    nodes: int | None = None,
    partition: str = "",
    time: str = "",
    gpus: int | None = None,
    cpus: int | None = None,
    requeue: bool = False,
) -> Exported:
    """Write the cells that the ranks have run as one script for torchrun. The script needs no Jupyter.

    path: the script to write. notebook: a saved notebook; its cells keep the order of the file. Default: the running
    notebook; its cells have the order in which they ran since the ranks were started. slurm: also write an sbatch file.
    nodes: the number of nodes in the sbatch file; default: the number of hosts of the notebook. n: the number of ranks
    on all nodes; default: each node has as many ranks as each host of the notebook. partition: the partition of Slurm.
    time: the time limit of the job, such as "4:00:00". gpus: GPUs of each node. cpus: cores of each node. requeue: run
    the job again from a checkpoint if the time limit or another job ends it.

    If the notebook has switched its strategy, nbkit also writes a file with the switches, for the script's option
    --switches. It overwrites only files that it has exported itself. Raises UsageError, and then writes nothing, for
    anything that a script cannot contain, and for ranks that cannot be divided evenly between the nodes.
    """
    to = user_path(os.fspath(path))
    options = SlurmOptions(1 if nodes is None else nodes, partition, time, gpus, cpus, requeue)
    if not slurm and (n is not None or options != SlurmOptions()):
        raise UsageError("This option is for an sbatch file.", numbers=f"n={n}, {options}", hint="--slurm")
    _check_free(to)
    source = read_running(current()) if notebook is None else read_saved(user_path(os.fspath(notebook)))
    script = script_of(source, to.name)
    check_resumes(script.text, options)
    run, notes = f"{_torchrun(source)} {shell_words(file_word(to))}", script.notes
    if (hosts := len(source.ranks_of_hosts)) > 1 and "--nnodes" in run and not slurm:
        notes = (*notes, f"type the torchrun command on each of the {hosts} hosts; HOST is the name of one of them")
    files = [(to, script.text, "")]
    if source.switches:
        plan = to.with_suffix(".switches.json")
        typed = f"{run} --switches {shell_words(file_word(plan))}   as the notebook was switched"
        files.append((plan, json.dumps(_plan(source.switches), indent=2) + "\n", typed))
    if slurm:
        batch = to.with_suffix(".sbatch")
        options = replace(options, nodes=len(source.ranks_of_hosts) if nodes is None else nodes)
        ranks = _ranks_on_each(options.nodes, n, source.ranks_of_hosts)
        if source.gpus:
            options = replace(options, gpus=gpus or ranks)
        elif source.threads:
            options = replace(options, cpus=cpus or ranks * source.threads)
        if (total := options.nodes * ranks) != source.num_ranks:
            said = f"the job has {total} ranks, the notebook had {source.num_ranks}: strategies have to fit {total}"
            notes = (*notes, said)
        text = script_job(str(to), to.stem, ranks, options)
        files.append((batch, text, f"sbatch {shell_words(file_word(batch))}"))
    for file, text, _ in files:
        write_file(file, text)
    return Exported(
        to,
        run,
        sum(isinstance(part, Code) for part in source.parts),
        tuple((file, typed) for file, _, typed in files[1:]),
        source.left_out,
        notes,
    )


def _ranks_on_each(nodes: int, n: int | None, hosts: Sequence[int]) -> int:
    """Return the number of ranks on each node: `n` divided by `nodes`, or as many as the notebook had on each host.

    hosts: number of ranks on each host of the notebook. Raises UsageError if the number would not be the same on all
    nodes.
    """
    if n is None and len(set(hosts)) == 1:
        return hosts[0]
    if n is not None and n > 0 and n % nodes == 0:
        return n // nodes
    ranks, numbers = sum(hosts), f"ranks on the hosts of the notebook: {', '.join(map(str, hosts))}"
    if n is not None:
        ranks, numbers = n, f"-n {n}, --nodes {nodes}"
    even = nodes * max(math.ceil(ranks / nodes), 1)
    hint = f"--slurm --nodes {nodes} -n {even}"
    raise UsageError("Each node of a Slurm job has the same number of ranks.", numbers=numbers, hint=hint)


def _check_free(to: Path) -> None:
    if to.suffix != ".py":
        raise UsageError("A script's name ends in .py.", numbers=str(to), hint="%nbkit export train.py")
    if not to.parent.is_dir():
        raise UsageError(f"There is no folder {to.parent}.", numbers=str(to), hint="%nbkit export train.py")
    if to.exists() and not to.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise UsageError(f"{to} exists, and nbkit has not written it.", hint="%nbkit export another.py")


def _plan(switches: tuple[Switch, ...]) -> dict[str, str]:
    """Return step -> strategy for the last training. A smaller step number means that another training has begun."""
    last: list[Switch] = []
    for each in switches:
        last = [*last, each] if not last or each.step >= last[-1].step else [each]
    return {"0": last[0].old, **{str(each.step): each.new for each in last}}
