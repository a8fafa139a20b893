"""`nbkit.check(model, strategy)` shows how each module would be split, and why not, before training runs.

It runs in one process, with the same code that builds a job: the tensor plan, the chain of blocks, the partition into
stages, and the planner's arithmetic on the module tree. It sends nothing and needs no process group.
"""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbkit.errors import StrategyError, TrainingError
from nbkit.old_keywords import regrouped
from nbkit.planner.job_facts import Facts
from nbkit.planner.stages import ranks_of_stages, spelled, stage_ranges
from nbkit.planner.validate import Finding, refuse, validate
from nbkit.rank.comm.delegating_group import stand_in
from nbkit.rank.comm.thread_group import Alone
from nbkit.rank.data.batch import check_inputs, pair, rows_of, take
from nbkit.rank.data.sample_rows import Sample
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.fact_finder import FactFinder, ModelExample
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import ModelFacts, ModelShapes, needed_facts
from nbkit.rank.parallel.module.batch_norm import batch_norms
from nbkit.rank.parallel.module.block_discovery import structural_blocks
from nbkit.rank.parallel.module.compile import not_compiled
from nbkit.rank.parallel.module.copies import (
    classes_kept,
    homes,
    skeleton_of,
)
from nbkit.rank.parallel.plan import ParallelPlan, parts_rows, refusals
from nbkit.rank.parallel.tensor.plan.plan import TensorPlan, folded
from nbkit.rank.parallel.whole_step import prove_step
from nbkit.rank.torch_private import DropoutNd
from nbkit.strategy import Strategy
from nbkit.techniques import DEGREES
from nbkit.trainer_options import OPTIONS, ModelHints, check_options
from nbkit.unfit_calls import says_what_it_takes


def planner_facts(plan: ParallelPlan, *, batch: int | None = None, world: int | None = None) -> Facts:
    """Return the facts that the planner needs. Heads and vocabulary come from the tensor plan.

    The blocks come from the chain, or are guessed by structure if there is no chain.
    """
    strategy, model = plan.strategy, plan.facts.shapes.skeleton
    heads = kv_heads = vocab = None
    if strategy.tp > 1:
        undivided = plan.facts.tensor_plan(1, plan.options.tp_plan)
        counted = [pair.heads for pair in undivided.pairs if pair.heads is not None]
        # If there are several attentions, use one whose heads do not divide.
        counted.sort(key=lambda each: not (each.heads % strategy.tp or each.kv_heads % strategy.tp))
        if counted:
            heads = counted[0].heads
            kv_heads = None if counted[0].kv_heads == heads else counted[0].kv_heads
        tables = [model.get_submodule(path) for path, role in undivided.singles.items() if role == "vocab"]
        vocab = min((part.num_embeddings for part in tables if isinstance(part, nn.Embedding)), default=None)
    chain = plan.facts.chain
    blocks = len(chain) if chain is not None else len(structural_blocks(model)) or None
    return Facts(heads=heads, kv_heads=kv_heads, vocab=vocab, blocks=blocks, batch=batch, world=world)


def findings(plan: ParallelPlan, *, batch: int | None = None, world: int | None = None) -> list[Finding]:
    """Return all findings, errors first. An error in the plan of the model is also returned as a finding."""
    try:
        found = validate(plan.strategy, planner_facts(plan, batch=batch, world=world))
        return [*found, *_unproven(plan)]
    except StrategyError as error:
        return [Finding(True, error.what, error.numbers or "", error.hint or "")]


def _unproven(plan: ParallelPlan) -> Iterator[Finding]:
    """Yield findings for modules that stay whole although a tensor axis looks able to split them.

    Equal modules of one list are named once.
    """
    if plan.strategy.tp == 1:
        return
    said: dict[str, list[str]] = {}
    for path, why in plan.facts.tensor_plan(1, plan.options.tp_plan).unproven.items():
        said.setdefault(why, []).append(folded(path) or type(plan.facts.shapes.skeleton).__name__)
    for why, paths in said.items():
        names = list(dict.fromkeys(paths))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if plan.facts.proof.of(1) is None:
            hint = "hints=nbkit.ModelHints(example=batch); nbkit.check(model, strategy, batch)"
        else:
            hint = f"to split its weights anyway: hints=nbkit.ModelHints(tp_plan={{'{names[0]}.*': 'colwise_gather'}})"
        yield Finding(False, f"{shown}: every rank of the tensor axis keeps this whole.", why, hint)


def warn_of(plan: ParallelPlan) -> None:
    """Warn about findings that do not stop the run. Raise StrategyError, with the arithmetic, for what cannot run."""
    strategy, options = plan.strategy, plan.options
    found = [*refuse(strategy, planner_facts(plan)), *_unproven(plan)]
    if strategy.microbatches is not None and options.cut:
        numbers = f"microbatch_size= has no effect under {strategy}: microbatches= sets the micro-batches of a pipeline"
        found.append(Finding(False, "A setting has no effect.", numbers))
    found += [*warn_of_coupled(plan), *warn_of_draws(plan)]
    dropping = any(isinstance(part, DropoutNd) and part.p > 0 for part in plan.facts.shapes.skeleton.modules())
    why = "with dropout, whose random numbers depend on the sample" if dropping else not_compiled(options, strategy)
    if options.compile and why:
        numbers = f"compile= has no effect {why}: the blocks run as they are"
        found.append(Finding(False, "A setting has no effect.", numbers))
    for finding in found:
        warnings.warn(f"{finding.what} {finding.numbers}", stacklevel=2)


def warn_of_draws(plan: ParallelPlan) -> list[Finding]:
    """Return findings about random numbers that each rank and each forward pass draws itself."""
    draws = plan.facts.draws
    unkeyed = draws.unkeyed if draws is not None else ()
    if not unkeyed or (plan.strategy.mesh.size == 1 and not plan.options.cut):
        return []
    what = "The model draws random numbers that do not depend on the row: each rank and each micro-batch draws its own."
    shown = ", ".join(unkeyed[:4]) + (f" and {len(unkeyed) - 4} more" if len(unkeyed) > 4 else "")
    return [
        Finding(False, what, shown, "torch.rand, randn, randint, bernoulli and similar functions, without generator=")
    ]


def warn_of_coupled(plan: ParallelPlan) -> list[Finding]:
    """Return findings about an auxiliary term that the strategy computes in parts."""
    found = plan.facts.coupled
    if found is None or not found.trains or not parts_rows(plan.strategy, plan.options):
        return []
    what = (
        f"{found.what}: under {plan.strategy}, it is the mean of the values that each forward pass computes for its "
        "rows."
    )
    return [Finding(False, what, found.numbers)]


_SHARDS = {1: "optimizer state", 2: "gradients, optimizer state", 3: "parameters, gradients, optimizer state"}


@dataclass(frozen=True)
class Check:
    """The result of `check`: what a strategy does to a model.

    rows: the rows of the table. findings: errors first, then other remarks. ok: True if there is no error. It is
    displayed as a table, as text and in a notebook.
    """

    strategy: Strategy
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.error for finding in self.findings)

    @property
    def _title(self) -> str:
        return f"{self.strategy} on {self.strategy.mesh.size} ranks: " + ("fits" if self.ok else "does not fit")

    def __str__(self) -> str:
        table = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        said = [("✗ " if finding.error else "· ") + str(finding).replace("\n", "\n  ") for finding in self.findings]
        return "\n".join([self._title, *said, "", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        said = "".join(
            f"<div>{'✗' if finding.error else '·'} {html.escape(str(finding)).replace(chr(10), '<br>')}</div>"
            for finding in self.findings
        )
        body = "".join(row(cells, "td") for cells in self.rows)
        return f"<b>{html.escape(self._title)}</b>{said}<table>{row(self.columns, 'th')}{body}</table>"


@says_what_it_takes(hint="nbkit.check(model, 'tp=2', batch)", options=OPTIONS, accept=regrouped)
def check(
    model: nn.Module | Callable[[], nn.Module],
    strategy: str | Strategy,
    batch: Any = None,
    world_size: int | None = None,
    *,
    inputs: Sequence[str] | None = None,
    hints: ModelHints = ModelHints(),
    loss: Loss | None = None,
) -> Check:
    """Return how `strategy` would split `model`, module by module, and why it leaves modules unsplit.

    It runs in this process and does not change the model. `findings` of the result lists what does not fit the
    strategy.

    model: the model, or a callable that builds it. strategy: a text such as "dp=2 tp=2", or a Strategy. batch: a global
    batch, or only its number of rows; default: the example of `hints`. nbkit runs two rows of the batch once, to find
    where the model can be cut. Without a batch, nbkit guesses the blocks from the structure of the model. It divides
    stages as if all blocks had equal costs, because only a job measures the costs. world_size: the number of ranks;
    default: the current world, or else the product of the strategy's degrees. inputs, hints: as for the Trainer. loss:
    as for the Trainer. If the strategy divides the rows of a batch, nbkit runs the model and this loss on some rows
    together and on each row alone.

    Raises StrategyError for a strategy that cannot be parsed, and TrainingError if the batch lacks an entry that
    inputs= names.
    """
    check_options(hints=hints)
    check_inputs(inputs)
    batch = hints.example if batch is None else batch
    world = world_size or (dist.get_world_size() if dist.is_initialized() else None)
    with classes_kept(), stand_in(Alone()):  # collectives of the model or the loss do not wait for other ranks
        return _checked(model, strategy, batch, world, inputs, hints, loss)


def _checked(
    model: nn.Module | Callable[[], nn.Module],
    strategy: str | Strategy,
    batch: Any,
    world: int | None,
    inputs: Sequence[str] | None,
    hints: ModelHints,
    loss: Loss | None,
) -> Check:
    chosen, misfit = _chosen(strategy, world)
    module = model if isinstance(model, nn.Module) else model()
    found, rows = list(misfit), batch if isinstance(batch, int) else None
    options, example = JobOptions(tp_plan=hints.tp_plan), None
    if batch is not None and rows is None:
        rows = rows_of(batch)
        example = take(batch, 0, min(2, rows), rows=rows)
        pair(example, inputs)  # raises TrainingError if nothing matches
    elif chosen.pp > 1:
        found.append(
            Finding(
                False,
                "nbkit chose the stages from the structure of the model, without running it.",
                "there is no batch",
                "check(..., batch=batch)",
            )
        )
    finder = FactFinder(
        module,
        ModelFacts(ModelShapes(skeleton_of(module))),
        ModelExample(example, loss, inputs, lambda: Sample(batch), False, hints.stages, hints.tp_plan),
        device=next((p.device for p in module.parameters()), torch.device("cpu")),
        ranks=chosen.mesh.size,
    )
    wanted = needed_facts(chosen) - {"costs"} - (set() if chosen.pp > 1 or chosen.cp > 1 else {"chain"})
    try:
        finder.begin(None if model is module else model, wanted)
    except TrainingError as error:
        found.append(Finding(True, error.what, error.numbers or "", error.hint or ""))
    except Exception as error:
        finder.set_facts(no_chain=f"{type(error).__name__}: {error}")
    facts = replace(finder.facts, looked=None)
    plan = ParallelPlan(chosen, facts, options)  # reasons of make_plan to refuse are among the findings
    found += [*findings(plan, batch=rows), *warn_of_coupled(plan), *warn_of_draws(plan)]
    if facts.gathers is not None and chosen.shard > 1:
        found += [
            Finding(False, "Some parameters are gathered for longer than one block.", note, "")
            for note in facts.gathers.notes
        ]
    refused = refusals(chosen, facts, options, guessed=example is None)
    found += [Finding(True, error.what, error.numbers, error.hint) for error in refused]
    found += _norms(module, chosen)
    if not any(finding.error for finding in found):
        many = None if example is None else batch
        step = prove_step(
            plan, example, loss=loss, inputs=inputs, short=finder.short, many=many, reference=finder.reference
        )
        found += [finding] if (finding := step.finding(chosen)) is not None else []
    columns = ("module", *(["tensor axis"] if chosen.tp > 1 else []), *(["stage"] if chosen.pp > 1 else []))
    columns += (*(["over dp"] if chosen.dp > 1 else []), "why not")
    found.sort(key=lambda finding: not finding.error)
    return Check(chosen, columns, tuple(_rows(plan, found)), tuple(found))


def _chosen(strategy: str | Strategy, world: int | None) -> tuple[Strategy, list[Finding]]:
    """Return the strategy and why it does not fit the world. Such a strategy is still shown."""
    try:
        if world is not None:
            return Strategy.parse(strategy, world), []
        misfit = []
    except StrategyError as error:
        misfit = [Finding(True, error.what, error.numbers, error.hint)]
    if isinstance(strategy, Strategy):
        return strategy, misfit
    degrees = dict(word.split("=", 1) for word in strategy.split() if "=" in word)
    size = 1
    for axis in DEGREES:
        size *= int(degrees[axis]) if degrees.get(axis, "").isdecimal() else 1
    if size == 1 and world is None and not degrees.keys() & DEGREES.keys():
        raise StrategyError(
            f"{strategy!r} needs the number of ranks, and there is no world.",
            numbers="no process group",
            hint="world_size=4",
        )
    return Strategy.parse(strategy, size), misfit


def _norms(module: nn.Module, strategy: Strategy) -> Iterator[Finding]:
    norms = batch_norms(module)
    if norms and (strategy.dp > 1 or (strategy.microbatches or 1) > 1):
        yield Finding(
            (strategy.microbatches or 1) > 1,
            f"BatchNorm {norms[0]!r} computes its statistics from the whole batch.",
            f"{len(norms)} such modules; under {strategy}, each forward pass gets a part of the batch. Over dp, "
            "statistics are synchronised",
            "nn.GroupNorm or nn.LayerNorm; or module.eval() on it, which freezes its statistics",
        )


def _rows(plan: ParallelPlan, found: Sequence[Finding]) -> Iterator[tuple[str, ...]]:
    """Yield one table row for each kind of module. Numbers in module paths are folded into *."""
    strategy, skeleton = plan.strategy, plan.facts.shapes.skeleton
    tensor, refused = None, {}
    if strategy.tp > 1:
        try:
            tensor = replace(plan.facts.tensor_plan(1, plan.options.tp_plan), size=strategy.tp)
            refused = _undivided(tensor)
        except StrategyError as error:
            refused = {"": error.what}
    split = (tensor or TensorPlan(1, (), {}, {})).describe(skeleton)
    stages = _stages(plan)
    routed = {folded(name.rpartition(".")[0]) for name in plan.facts.routed.names} if strategy.ep > 1 else set()
    frozen = {folded(name.rpartition(".")[0]) for name, p in skeleton.named_parameters() if not p.requires_grad}
    for module, how, reason in split:
        cells = [module]
        whys = [reason] if strategy.tp > 1 and reason else []
        whys += [text for path, text in refused.items() if module == path or module.startswith(f"{path}.") or not path]
        if strategy.tp > 1:
            cells.append(how if not whys or reason else "not split")
        if strategy.pp > 1:
            cells.append(stages.get(module, "none"))
        if strategy.dp > 1:
            cells.append(_experts_over_dp(strategy) if module in routed else _over_dp(strategy))
        if module in frozen:
            whys.append("frozen: no gradient, no optimizer state")
        yield (*cells, "; ".join(whys))


def _undivided(plan: TensorPlan) -> dict[str, str]:
    """Return folded owner -> why its heads cannot be divided over the ranks."""
    found = {}
    for owner, heads in ((each.owner, each.heads) for each in plan.pairs if each.heads is not None):
        for count, what in ((heads.kv_heads, "key and value heads"), (heads.heads, "heads")):
            if count % plan.size:
                found[folded(owner)] = f"{count} {what} / tp {plan.size} = {count / plan.size:.3g}"
    return found


def _stages(plan: ParallelPlan) -> dict[str, str]:
    """Return folded module -> the stages that hold it."""
    strategy, chain, skeleton = plan.strategy, plan.facts.chain, plan.facts.shapes.skeleton
    if strategy.pp == 1:
        return {}
    count = len(ranks_of_stages(strategy))
    blocks = chain.blocks if chain is not None else tuple(structural_blocks(skeleton))
    if len(blocks) < count:
        return {}
    ranges = stage_ranges([1.0] * len(blocks), strategy)
    names = list(homes(skeleton))
    found: dict[str, set[int]] = {}
    for name in names:
        if chain is not None:
            where = {stage for stage, (lo, hi) in enumerate(ranges) if name in chain.holds(lo, hi)}
        else:
            where = {_guessed(name, names, blocks, ranges)}
        found.setdefault(folded(name.rpartition(".")[0]), set()).update(where)
    return {module: _spelled(where, spelled(ranges)) for module, where in found.items()}


def _guessed(name: str, names: Sequence[str], blocks: Sequence[str], ranges: Sequence[tuple[int, int]]) -> int:
    """Return the stage of a parameter by its position: in a block, before the blocks, or after them."""
    for stage, (lo, hi) in enumerate(ranges):
        if any(name.startswith(f"{block}.") for block in blocks[lo:hi]):
            return stage
    first = next((i for i, other in enumerate(names) if other.startswith(f"{blocks[0]}.")), 0)
    return 0 if names.index(name) < first else len(ranges) - 1


def _spelled(where: set[int], all_of: str) -> str:
    ordered = sorted(where)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]} (blocks {all_of})"
    return ", ".join(map(str, ordered))


def _experts_over_dp(strategy: Strategy) -> str:
    copies = strategy.dp // strategy.ep
    return f"experts over {strategy.ep}" + (f", {copies} copies" if copies > 1 else "")


def _over_dp(strategy: Strategy) -> str:
    if not strategy.zero:
        return f"a copy on each of {strategy.dp}"
    copies = strategy.dp // strategy.shard
    return f"{_SHARDS[strategy.zero]} over {strategy.shard}" + (f", {copies} copies" if copies > 1 else "")
