"""The notebook that runs: what its cluster was sent, in order, and what else stands in its history."""

from __future__ import annotations

import ast

from nbkit.errors import UsageError
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.notebook.cluster.naming import notebook_number, notebook_shell
from nbkit.notebook.cluster.sent_cells import SentCell
from nbkit.notebook.export.cell_source import masked
from nbkit.notebook.export.source import (
    Code,
    LeftOut,
    Source,
    Switch,
    Values,
    code_of,
    imports_of,
    plain_code,
    taken_out,
)


def read_running(cluster: Cluster) -> Source:
    """All that the ranks of `cluster` have run since they were started. Raises UsageError when that is nothing."""
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
        num_ranks=cluster.entry.n,
        gpus=gpus,
        threads=0 if gpus else threads,
        switches=tuple(
            Switch(one.step, one.args.get("strategy", one.strategy), one.result["old"], one.result["new"])
            for one in switched
        ),
        imports=imports,
    )


def _history(cluster: Cluster) -> tuple[list[LeftOut], dict[str, str]]:
    """The cells that did not go to these ranks, and what they import."""
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
        except UsageError:  # it never ran
            continue
        found += taken_out(number, plain)
        imports |= imports_of(plain)
        if any(not isinstance(node, ast.Pass) for node in plain.tree.body):
            found.append(plain_code(number, plain))
    return found, imports


def _own(source: str) -> str:
    """Without the comment that stands for the magic's own line."""
    return source.partition("\n")[2] if source.startswith("# %%") else source


def _shown(source: str) -> str:
    lines = [line for line in source.splitlines() if line.strip()]
    return lines[0].removeprefix("# ") + (f" | {lines[1].strip()} …" if len(lines) > 1 else "")
