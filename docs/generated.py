"""The tables of the reference, made of the code at each build: options, arguments, keys, records, errors.

A page asks for a table by a comment, `<!-- generated: magics -->`; `TABLES` has the function of each name. The code is
read, not imported, where an import would need torch. A number without a unit and an argument without a meaning raise,
so that each new one gets both: the unit in `UNITS`, the meaning in the docstring.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import nbkit
from magics.arguments import PARSERS
from nbkit import errors, schedules, strategy, techniques
from nbkit.commands import prepare_parser, subcommands
from nbkit.records.records import FORMAT
from nbkit.strategy import Strategy

ROOT = Path(nbkit.__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "nbkit").rglob("*.py"), *(ROOT / "magics").rglob("*.py")])

UNITS = {
    "batch_size": "rows of all ranks",
    "batch": "rows of all ranks",
    "clip_norm": "norm of all gradients",
    "max_norm": "norm of all gradients",
    "eval_every": "steps",
    "every": "steps, or a time",
    "snapshot_every": "steps",
    "grad_norm_every": "steps",
    "backup_every": "steps",
    "keep": "checkpoints, a time, or both",
    "workers": "processes of each rank",
    "microbatch_size": "rows of a rank",
    "loss_chunks": "pieces of the positions",
    "hang_timeout": "seconds",
    "timeout": "seconds, or a time",
    "end_after": "seconds, or a time",
    "ttl": "seconds, or a time",
    "seed": "",
    "rank": "number of a rank",
    "n": "ranks",
    "nodes": "hosts",
    "spares": "devices of each host",
    "world_size": "ranks",
    "steps": "steps",
    "until": "finished steps",
    "step": "finished steps",
    "height": "pixels",
    "gpus": "GPUs of each node",
    "cpus": "cores of each node",
    "pack": "positions",
    "vocab": "tokens",
    "block": "positions",
    "layers": "blocks",
    "heads": "heads of each block",
    "width": "features",
    "dropout": "probability",
    "limit": "bytes",
    "tokens": "tokens",
    "temperature": "",
    "formula": "",
    "measured": "",
    "top_k": "tokens",
}
"""The unit of each argument that takes a number; "" if it has none."""

TYPES = {
    "Model": "nn.Module, or a callable that builds one",
    "Loss": "function",
    "Optimizer": "callable, or an optimizer",
    "SwitchSchedule": "dict, or a JSON file",
    "Any": "any",
    "Cost": "function, or list of numbers",
    "Group": "function, or list of labels",
    "StartRequest": "StartRequest",
    "Sink": "sink",
    "Prompt": "bytes, str or tensor",
    "Path": "path",
    "os.PathLike[str]": "path",
    "nn.Module": "nn.Module",
    "Callable[[nn.Module], nn.Module]": "function",
    "Callable[[], nn.Module]": "callable that builds one",
}
"""What to call a type in a table."""

CONSTANTS = {"FORMAT": str(FORMAT), "runs_dir.DEFAULT": '"runs"', "default_collate": "torch's default_collate"}
"""Values of names that are defaults."""


# Markdown


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Columns that are empty in all rows are left out.

    If the last column is the meaning, site.css puts it below the others on a phone.
    """
    rows = [list(row) for row in rows]
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    lines = [[heads[i] for i in kept], ["---" for _ in kept], *([row[i] for i in kept] for row in rows)]
    look = "{.arguments}\n" if heads[-1] == "meaning" else ""
    return look + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def code(text: str) -> str:
    """Return text as code in a table; "" for none."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def prose(text: str) -> str:
    """Return a text of the code as Markdown: what Markdown would read is escaped, and pages are links."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    plain = (
        re.sub(r"([\\*_<\[\]|])", r"\\\1", part) if i % 2 == 0 else part.replace("|", "\\|")
        for i, part in enumerate(parts)
    )
    return re.sub(r"docs/([\w/\\-]+)\.md", _link, "".join(plain))


def _link(found: re.Match[str]) -> str:
    page = found[1].replace("\\", "")
    return f"[{page.rpartition('/')[2].replace('_', ' ')}](/{page}.md)"


def sentence(text: str) -> str:
    """Return a text as a sentence, with a capital and a full stop."""
    text = text.strip().rstrip(";,")
    first = text[:1].upper() + text[1:] if re.match(r"[a-z-]+[ ,.;:]", text) else text
    return prose(first + ("" if text.endswith((".", "!", "?", ".)")) else "."))


# Magics and commands


def magics() -> Iterator[str]:
    """Yield a section for each magic and each of its verbs."""
    for name, make in PARSERS.items():
        yield from _typed(name, make(), "##")


def commands() -> Iterator[str]:
    """Yield a section for each subcommand of `nbkit`."""
    parser = prepare_parser(subcommands())
    below = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in below.choices.items():
        yield from _typed(f"nbkit {name}", command, "##")


def _typed(name: str, parser: argparse.ArgumentParser, level: str, said: str = "") -> Iterator[str]:
    verbs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    options = [a for a in parser._actions if a not in verbs and not isinstance(a, argparse._HelpAction)]
    yield f"{level} {name}\n"
    yield sentence(parser.description or said.replace("%%", "%")) + "\n"
    if not verbs:
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split()).replace(" [-h]", "")
        yield _shown(usage)
    if options:
        yield table(("argument", "values", "meaning"), (_option(parser, action) for action in options))
    if parser.epilog:
        yield sentence(parser.epilog) + "\n"
    for action in verbs:
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for verb, below in action.choices.items():
            yield from _typed(f"{name} {verb}", below, level + "#", helps.get(verb, ""))


def _shown(line: str) -> str:
    lines = textwrap.wrap(line, 88, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str]:
    names = [*action.option_strings] or [str(action.metavar or action.dest)]
    taken = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar or ())
    if action.choices:
        taken = " ".join(map(str, action.choices))
    if not action.option_strings:
        taken = "" if not action.choices else taken
        names = [f"{names[0]} ..." if action.nargs in ("*", "+") else names[0]]
    meaning = parser._get_formatter()._expand_help(action) if action.help else _WITHOUT_HELP[action.dest]
    if not isinstance(action.nargs, int) and action.option_strings and action.nargs is None and not taken:
        taken = action.dest.upper()
    return ", ".join(map(code, names)), code(taken), sentence(meaning)


_WITHOUT_HELP = {"names": "names of variables", "name": "the name of the cluster", "ranks": "these ranks"}


# Python


@cache
def module_of(name: str) -> ast.Module:
    """Return the syntax tree of a module of nbkit."""
    place = ROOT / name.replace(".", "/")
    return ast.parse((place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text())


def definition(name: str, module: str = "") -> ast.ClassDef | ast.FunctionDef:
    """Return the class or function of that name, by default one that `nbkit` offers."""
    for node in ast.walk(module_of(module or nbkit._HOME[name])):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"no {name} in {module or nbkit._HOME[name]}")


def parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[str, str, str | None]]:
    """Return (name, type, default) of each argument; the default is None if the argument is required."""
    if isinstance(node, ast.ClassDef):
        init = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if not init:
            return [
                (each.target.id, _type(each.annotation), None if each.value is None else _value(each.value))
                for each in node.body
                if isinstance(each, ast.AnnAssign)
                and isinstance(each.target, ast.Name)
                and "ClassVar" not in ast.unparse(each.annotation)
            ]
        node = init[0]
    given, after = node.args.args, node.args.kwonlyargs
    defaults: list[ast.expr | None] = [*[None] * (len(given) - len(node.args.defaults)), *node.args.defaults]
    pairs = [*zip(given, defaults, strict=True), *zip(after, node.args.kw_defaults, strict=True)]
    pairs = [pair for pair in pairs if pair[0].arg not in ("self", "cls")]
    return [(a.arg, _type(a.annotation), None if default is None else _value(default)) for a, default in pairs]


def _type(annotation: ast.expr | None) -> str:
    if isinstance(annotation, ast.BinOp):
        parts = [part for part in _union(annotation) if part != "None"]
        return " or ".join(dict.fromkeys(TYPES.get(part, part) for part in parts))
    text = "" if annotation is None else ast.unparse(annotation)
    return TYPES.get(text) or ("function" if text.startswith(("Callable", "Sequence[Callable")) else text)


def _union(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.BinOp):
        yield from _union(node.left)
        yield from _union(node.right)
    else:
        text = ast.unparse(node)
        yield "function" if text.startswith("Callable") and text not in TYPES else text


def _value(node: ast.expr) -> str:
    text = re.sub(
        r"field\(default_factory=(dict|list)\)", lambda made: "{}" if made[1] == "dict" else "[]", ast.unparse(node)
    )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return f'"{node.value}"'
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int)
        and node.value is not True
        and node.value >= 10_000
    ):
        return f"{node.value:_}"
    return CONSTANTS.get(text, f"nbkit.{text}" if text in (f"{each}()" for each in nbkit._HOME) else text)


def meanings(doc: str, names: Sequence[str]) -> tuple[str, dict[str, str], str]:
    """Return what a docstring says: first in general, then of each argument, and last which errors are raised."""
    general, said, raised = [], {}, []
    word = "|".join(map(re.escape, names)) or "(?!)"
    begin = re.compile(rf"(?:^|(?<=[.;:)] ))((?:{word})(?:, (?:{word}))*): ")
    for paragraph in re.split(r"\n\s*\n", doc):
        text = " ".join(paragraph.split())
        sentences = re.split(r"(?<=\.) (?=Raises? )", text)
        raised += [part for part in sentences if re.match(r"Raises? ", part)]
        text = " ".join(part for part in sentences if not re.match(r"Raises? ", part))
        parts = begin.split(text)
        general.append(parts[0])
        for these, meaning in zip(parts[1::2], parts[2::2], strict=True):
            said |= dict.fromkeys(these.split(", "), meaning.strip())
    return "\n\n".join(part for part in general if part), said, " ".join(raised)


def arguments(node: ast.ClassDef | ast.FunctionDef, also: dict[str, str] | None = None) -> str:
    """Return the table of the arguments. also: meanings of those that its own docstring leaves to another one."""
    found = parameters(node)
    _, said, _ = meanings(ast.get_docstring(node) or "", [name for name, *_ in found])
    rows = []
    for name, kind, default in found:
        meaning = said.get(name) or (also or {}).get(name)
        if meaning is None:
            raise LookupError(f"The docstring of {node.name} does not say what {name} is.")
        if re.search(r"\b(int|float)\b", kind) and name not in UNITS:
            raise LookupError(f"{node.name}({name}=) takes a number: give its unit in docs/generated.py.")
        unit = UNITS[name] if re.search(r"\b(int|float)\b", kind) else ""
        rows.append(
            (
                code(name),
                kind if " " in kind else code(kind),
                unit,
                "required" if default is None else code(default),
                sentence(meaning),
            )
        )
    return table(("argument", "type", "unit", "default", "meaning"), rows)


def called(name: str, module: str = "", also: dict[str, str] | None = None) -> Iterator[str]:
    """Yield what a class or function is for, the table of its arguments, and its errors."""
    node = definition(name, module)
    general, _, raised = meanings(ast.get_docstring(node) or "", [each for each, *_ in parameters(node)])
    yield from (prose(part) + "\n" for part in general.split("\n\n"))
    if parameters(node):
        yield arguments(node, also)
    if raised:
        yield prose(raised) + "\n"


def members(name: str, module: str, variable: str, wanted: str) -> Iterator[str]:
    """Yield a section for each of the wanted methods and properties of a class, as seen at a variable."""
    there = {each.name: each for each in definition(name, module).body if isinstance(each, _FUNCTION)}
    setters = {
        each.name
        for each in definition(name, module).body
        if isinstance(each, ast.FunctionDef) and any(ast.unparse(d).endswith(".setter") for d in each.decorator_list)
    }
    first = {each.name: each for each in reversed(definition(name, module).body) if isinstance(each, _FUNCTION)}
    for word in wanted.split():
        node = first[word] if word in setters else there[word]
        decorators = {ast.unparse(each) for each in node.decorator_list}
        owner = f"nbkit.{name}" if decorators & {"classmethod", "staticmethod"} else variable
        shown = (
            f"{owner}.{word}" if decorators & {"property", "cached_property"} else f"{owner}.{word}({_signature(node)})"
        )
        yield f"### {word}\n\n{_shown(shown)}"
        yield from _body(node)


def _body(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    doc = ast.get_docstring(node) or ""
    attributes = re.findall(r"(?:^|[.] )([a-z_]+): ", " ".join(doc.split())) if isinstance(node, ast.ClassDef) else []
    names = attributes or [name for name, *_ in parameters(node)]
    general, said, raised = meanings(doc, names)
    yield from (prose(part) + "\n" for part in general.split("\n\n"))
    if said:
        alike = {text: [name for name in names if said.get(name) == text] for text in dict.fromkeys(said.values())}
        yield "\n".join(f"- {', '.join(map(code, these))}: {prose(text)}" for text, these in alike.items()) + "\n"
    if raised:
        yield prose(raised) + "\n"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    words, only = [], {each.arg for each in node.args.kwonlyargs}
    star = [f"*{node.args.vararg.arg if node.args.vararg else ''}"] if node.args.vararg or only else []
    for name, _, default in parameters(node):
        if name in only:
            words, star = words + star, []
        words.append(name if default is None else f"{name}={default}")
    words += star
    words += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return ", ".join(words)


_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
OPTION_VALUES = ("Loading", "Compute", "Checkpoints", "Recovery", "ModelHints")
TRAINER = "nbkit.rank.train.trainer"


def trainer() -> Iterator[str]:
    """Yield the arguments of the Trainer."""
    yield arguments(definition("Trainer"))


def options() -> Iterator[str]:
    """Yield a section for each option value."""
    for name in OPTION_VALUES:
        yield f"### nbkit.{name}\n"
        yield from called(name)


def trainer_members() -> Iterator[str]:
    """Yield what a Trainer has."""
    yield from members(
        "Trainer",
        TRAINER,
        "trainer",
        "fit evaluate generate switch undo try_out compare save load rewind full_state_dict stop_if lr step strategy "
        "history model optimizer",
    )


def prepare() -> Iterator[str]:
    """Yield the arguments of prepare."""
    node = definition("Trainer")
    _, said, _ = meanings(ast.get_docstring(node) or "", [name for name, *_ in parameters(node)])
    yield from called("prepare", also=said)


def job() -> Iterator[str]:
    """Yield what a user's own loop calls of a job."""
    yield from members(
        "Job",
        "nbkit.rank.train.job",
        "job",
        "batches backward rows draw mean clip grad_norm log stop_if evaluate switch undo save opened load "
        "full_state_dict step strategy history",
    )


def _function(name: str) -> ast.FunctionDef:
    node = definition(name)
    assert isinstance(node, ast.FunctionDef)
    return node


def functions() -> Iterator[str]:
    """Yield a section for each function that needs no training."""
    for name in ("check", "plan", "export", "read_run", "listen", "from_pretrained"):
        yield f"## nbkit.{name}\n\n" + _shown(f"nbkit.{name}({_signature(_function(name))})")
        yield from called(name)


def models() -> Iterator[str]:
    """Yield a section for each class that a training is made of, beside the Trainer."""
    for name in ("Balanced", "TextDataset", "GPT", "GPTConfig"):
        yield f"## nbkit.{name}\n"
        yield from called(name)


def views() -> Iterator[str]:
    """Yield a section for each of the widgets."""
    for name in ("Dashboard", "StrategyPanel", "Board"):
        yield f"## nbkit.{name}\n"
        yield from _body(definition(name))


def cluster() -> Iterator[str]:
    """Yield what a cluster has."""
    yield from members(
        "Cluster",
        "nbkit.notebook.cluster.cluster",
        "cluster",
        "start submit attach list run run_async wait switch push pull sync resize status why debug trace restart stop",
    )


def handle() -> Iterator[str]:
    """Yield what the handle of a detached cell has."""
    yield from members("CellHandle", "nbkit.notebook.cluster.cells.handle", "handle", "wait stop output status show")


def questions() -> Iterator[str]:
    """Yield what `nbkit.lesson` offers to the writer of a lesson, and what a question has."""
    for name in ("predict", "collect", "judge"):
        node = definition(name, "nbkit.lesson")
        assert isinstance(node, ast.FunctionDef)
        yield f"## nbkit.lesson.{name}\n\n" + _shown(f"nbkit.lesson.{name}({_signature(node)})")
        yield from _body(node)
    yield "## A question\n"
    yield from members("Prediction", "nbkit.lesson", "question", "lock check within")


def sinks() -> Iterator[str]:
    """Yield a section for each sink that nbkit brings."""
    for name, module in nbkit.sinks._HOME.items():
        node = definition(name, f"nbkit.sinks.{module}")
        init = next(each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
        yield f"## nbkit.sinks.{name}\n\n" + _shown(f"nbkit.sinks.{name}({_signature(init)})")
        yield from (prose(part) + "\n" for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""))


def plugins() -> Iterator[str]:
    """Yield a section for what extends nbkit."""
    for name, module in (
        ("register", "nbkit.schedules"),
        ("register", "nbkit.techniques.registry"),
        ("use", "nbkit.techniques.mine"),
    ):
        node = definition(name, module if module != "nbkit.schedules" else _home_of_schedules())
        owner = "schedules" if "schedules" in module else "techniques"
        assert isinstance(node, ast.FunctionDef)
        yield f"## nbkit.{owner}.{name}\n\n" + _shown(f"nbkit.{owner}.{name}({_signature(node)})")
        yield from _body(node)
    for name in ("Launcher", "LauncherStatus", "GradientBucket"):
        yield f"## nbkit.{name}\n"
        yield from _body(definition(name))


def _home_of_schedules() -> str:
    return schedules.register.__module__


# Strategies


def presets() -> Iterator[str]:
    """Yield the presets, as they are spelled out on eight ranks."""
    rows = ((code(name), code(str(Strategy.parse(name, 8)))) for name in strategy.PRESETS)
    yield table(("preset", "on 8 ranks"), rows)


def axes() -> Iterator[str]:
    """Yield the axes of the mesh."""
    rows = (
        (
            code(f"{axis.name}="),
            axis.technique,
            axis.splits,
            " ".join(code(n) for n in techniques.DEGREES if n in axis.goes_with),
        )
        for axis in techniques.DEGREES.values()
    )
    yield table(("key", "name", "splits", "goes with"), rows)


def keys() -> Iterator[str]:
    """Yield the keys beside the axes."""
    rows = []
    for key in techniques.keys():
        node = module_of(type(key).__module__)
        example, _, meaning = (ast.get_docstring(node) or "").partition("\n\n")[0].partition(": ")
        doc = (type(key).__doc__ or "").partition("\n\n")[0].strip()
        rows.append((code(example), sentence(meaning), sentence(doc)))
    yield table(("key", "meaning", "value"), rows)


def pipelines() -> Iterator[str]:
    """Yield the built-in schedules, with their bubbles on four ranks."""
    rows = []
    for name in schedules.BUILT_IN:
        kind = schedules.type_of(name)
        shares = []
        for count in (4, 8, 16):
            made = schedules.Schedule.of(name, 4, count)
            shares.append(f"{schedules.simulate(made).bubble:.0%}")
        rows.append((code(name), sentence((kind.build.__doc__ or "").strip().removeprefix("Return ")), *shares))
    yield table(("schedule", "what it does", "4 micro-batches", "8", "16"), rows)


# Records


FIELDS = {
    "step": "number of finished steps at that time",
    "strategy": "the strategy in its canonical form",
    "reason": '"done", "stopped", or the name of the error that ended the run',
    "record": "loss, lr, seconds, tokens, ... In the dict, each of them is a field, and there is no `record`",
    "path": "the directory of the checkpoint",
    "old": "the value before",
    "new": "the value after",
    "old_ranks": "number of ranks before",
    "ranks": "number of ranks after",
    "rank": "number of the rank",
    "world_size": "number of ranks",
    "host": "name of the rank's host",
    "format": "number of the format; a reader skips files of another format",
    "axis": "the axis of the mesh that the group lies along",
    "group": "label of the group",
    "op": "name of the operation",
    "calls": "number of calls",
    "traffic": "a row for each operation, group and peer",
    "span": "number of steps that the line averages",
    "pipeline": "a row for each operation of the pipeline's schedule",
    "peer": "rank at the other end of a message; null for a collective",
    "bytes": "bytes that this rank contributed",
    "blocked": "ns in which this rank did nothing but wait for the call",
    "stage": "number of the stage",
    "micro": "number of the micro-batch",
    "start_ns": "time of the start, in ns",
    "stop_ns": "time of the end, in ns",
    "parameters": "bytes of parameters",
    "gradients": "bytes of gradients",
    "optimizer": "bytes of the optimizer's state",
    "buffers": "bytes of buffers",
    "ns": "time of the record by the rank's perf_counter, in ns",
    "cores": "number of cores of the host; 0 on all but the first rank of the host",
    "gpus": "a row for each GPU of the host",
    "uuid": "the GPU's own identifier",
    "index": "the GPU's number on the host",
    "mhz": "clock in MHz",
    "top_mhz": "highest clock in MHz",
    "celsius": "temperature in degrees Celsius",
    "watts": "power in watts",
    "limit_watts": "limit of the power in watts",
}
"""The meaning of a field, where the docstring of its class leaves it to the name."""


def records() -> Iterator[str]:
    """Yield a section for each kind of line in a record file."""
    yield from _schema(
        "nbkit.records.records",
        (
            "Header",
            "Group",
            "StepRecord",
            "Traffic",
            "Outside",
            "Detail",
            "TimedCall",
            "PipelineOp",
            "MemoryRecord",
            "MemoryPart",
            "HealthRecord",
            "GpuHealth",
            "EventRecord",
        ),
    )


def events() -> Iterator[str]:
    """Yield a section for each kind of event."""
    from nbkit.records import events as module

    found = [kind for kind in vars(module).values() if isinstance(kind, type) and getattr(kind, "kind", "")]
    yield from _schema("nbkit.records.events", [kind.__name__ for kind in found])


def _schema(module: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        node = definition(name, module)
        kinds = [
            ast.literal_eval(each.value)
            for each in node.body
            if isinstance(each, ast.AnnAssign) and getattr(each.target, "id", "") == "kind" and each.value
        ]
        yield f"### {name}\n" + (f'\n`"kind": "{kinds[0]}"`\n' if kinds and kinds[0] else "")
        found = parameters(node)
        general, said, _ = meanings(ast.get_docstring(node) or "", [each for each, *_ in found])
        yield prose(general) + "\n"
        rows = [
            (
                code(each),
                code(kind),
                "" if default is None else code(default),
                sentence(said.get(each) or FIELDS[each]),
            )
            for each, kind, default in found
        ]
        yield table(("field", "type", "default", "meaning"), rows)


# Errors


def error_kinds() -> Iterator[str]:
    """Yield the classes of errors."""
    rows = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        bases = ", ".join(code(base.__name__) for base in kind.__bases__)
        rows.append((code(name), bases, prose((kind.__doc__ or "").split("\n\n")[0])))
    yield table(("error", "is a", "meaning"), rows)


def error_texts() -> Iterator[str]:
    """Yield every text of an error in the source, by its class, with what to type next. Parts that vary read "…"."""
    found: dict[str, dict[str, str]] = {name: {} for name in errors.__all__}
    for path in SOURCES:
        module = ast.parse(path.read_text())
        for node in ast.walk(module):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if name in found and isinstance(node, ast.Call) and node.args:
                hints = [text for word in node.keywords if word.arg == "hint" for text in texts(word.value, module)]
                for text in texts(node.args[0], module):
                    if re.search(r"[a-z]{3,}.* [a-z]", text):
                        found[name].setdefault(text, hints[0] if hints else "")
    for name, rows in found.items():
        if rows:
            yield f"### {name}\n"
            yield table(
                ("text", "what to type next"), sorted((prose(text), _hint(hint)) for text, hint in rows.items())
            )


def _hint(text: str) -> str:
    parts = [part for part in re.split(r" {3,}", text) if part.strip()]
    typed = re.compile(r"[%\-]|(nbkit|pip|trainer|job|cluster|handle|squeue|sinfo)\b[ .]|\S+ ?\S*$")
    return " ".join(code(part) if "`" not in part and typed.match(part) else prose(part) for part in parts)


_followed: list[str] = []


def texts(node: ast.expr, module: ast.Module) -> list[str]:
    """Return the texts that an expression of the source can have. Parts that vary read "…"."""
    match node:
        case ast.Constant(str(text)):
            return [text]
        case ast.JoinedStr(parts):
            return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)]
        case ast.IfExp(_, first, second):
            return texts(first, module) + texts(second, module)
        case ast.BoolOp(_, values) | ast.List(values) | ast.Tuple(values) | ast.Dict(_, values):
            return [text for value in values for text in texts(value, module)]
        case ast.BinOp(first, ast.Add(), second):
            return [a + b for a, b in product(texts(first, module) or ["…"], texts(second, module) or ["…"])]
        case ast.Name(name) | ast.Attribute(attr=name) if name not in _followed:
            _followed.append(name)  # a name defined by itself adds no more texts
            try:
                return [text for value in _assigned(name, module) for text in texts(value, module)]
            finally:
                _followed.pop()
        case ast.Call(ast.Name(name)):
            found = (each for each in ast.walk(module) if isinstance(each, ast.FunctionDef) and each.name == name)
            returns = (each for one in found for each in ast.walk(one) if isinstance(each, ast.Return) and each.value)
            return [text for each in returns for text in texts(each.value, module)]
    return []


def _assigned(name: str, module: ast.Module) -> Iterator[ast.expr]:
    for each in ast.walk(module):
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets) and getattr(
            each, "value", None
        ):
            yield each.value


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    made.__name__: made
    for made in (
        *(magics, commands, trainer, options, trainer_members, prepare, job, functions, models, views, cluster, handle),
        *(questions, sinks, plugins, presets, axes, keys, pipelines, records, events, error_kinds, error_texts),
    )
}
"""The name of a table -> the function that yields its parts."""


def filled(page: str) -> str:
    """Return a page with its tables in the places of their comments. Raises KeyError for a table that nobody makes."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: "\n".join(TABLES[found[1]]()), page)
