"""The one order in which techniques compose, from the outermost to the innermost split.

1. pipeline: what other stages hold is dropped first, so that nothing below ever touches it;
2. tensor: layers are cut while their parameters are still placeholders, so that no whole weight is ever made;
3. context: attention learns to gather keys and values, around layers that are already cut;
4. recomputation: wraps blocks whose collectives are in place, so that the second forward makes them too;
5. data: sums and shards whatever is left on this rank, as one flat set of local parameters.

After torchtitan's `parallelize`; here it is the same function for every model and every strategy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from nbkit.errors import StrategyError
from nbkit.layout import Layout
from nbkit.planner.partition import partition, spelled
from nbkit.rank.parallel.axes import Axes, group_of
from nbkit.rank.parallel.blocks import structural_blocks
from nbkit.rank.parallel.chain import Chain
from nbkit.rank.parallel.channels import edge_groups
from nbkit.rank.parallel.context import context_parallel
from nbkit.rank.parallel.norms import synchronised
from nbkit.rank.parallel.pipeline import Pipeline
from nbkit.rank.parallel.recompute import recompute
from nbkit.rank.parallel.shard import data_axis
from nbkit.rank.parallel.side import Side
from nbkit.rank.parallel.skeleton import homes
from nbkit.rank.parallel.stages import Staged
from nbkit.rank.parallel.tensor.choose import plan_of
from nbkit.rank.parallel.tensor.split import tensor_parallel
from nbkit.schedules import Schedule
from nbkit.strategy import Strategy

__all__ = ["Wishes", "parallelize"]


@dataclass(frozen=True)
class Wishes:
    """What a user may ask for beside the strategy, the same for every strategy of a job.

    chain: the blocks of the model, None when none were found; no_chain: why not. costs: of its pieces, in seconds.
    tp_plan: see tensor.choose. checkpoint: recompute the blocks' activations in the backward pass.
    """

    chain: Chain | None = None
    no_chain: str = ""
    costs: tuple[float, ...] = ()
    tp_plan: Mapping[str, str] | None = None
    checkpoint: bool = False


def parallelize(
    skeleton: nn.Module, strategy: Strategy, *, rank: int, wishes: Wishes, device: torch.device, own: nn.Module | None
) -> Side:
    """A side of `strategy` on this rank; its weights are to be filled. Collective over the world.

    skeleton: the whole model's shapes, copied, not touched. own: the whole model itself, which a strategy that splits
    nothing takes as it is; None when there is none any more.
    Raises StrategyError or TrainingError, the same on every rank, for what cannot be split.
    """
    axes = Axes.of(strategy.mesh, rank, shard=strategy.shard)
    whole = strategy.mesh.size == strategy.dp and strategy.zero == 0
    module = own if whole and own is not None else copy.deepcopy(skeleton)
    if strategy.pp > 1 or strategy.cp > 1:
        _need_chain(wishes, strategy)
    chain, notes = wishes.chain, []

    staged = pipeline = None
    if strategy.pp > 1 and chain is not None:
        schedule = Schedule.of(strategy.schedule or "1f1b", strategy.pp, strategy.microbatches or 1)
        ranges = partition(wishes.costs or [1.0] * len(chain), schedule.num_stages)
        notes.append(f"stages of {spelled(ranges)} blocks")
        staged = Staged(module, chain, [ranges[stage] for stage in schedule.stages_of(axes.index("pp"))])
        edges = edge_groups(strategy.mesh.groups("pp"), rank)
        pipeline = Pipeline(
            schedule, axes.group("pp"), axes.index("pp"), device, edges=edges, split=not wishes.checkpoint
        )
    module = synchronised(module, axes=axes, micros=strategy.microbatches or 1, device=device)

    every = chain.units if chain is not None else structural_blocks(module)
    blocks = [name for name in every if any(True for _ in module.get_submodule(name).parameters())]
    layouts = {name: Layout.whole(getattr(*places[0]).shape) for name, places in homes(module).items()}
    partial: dict[str, tuple[str, ...]] = {}
    if strategy.tp > 1:
        # Planned on the whole model: one stage alone may not show what belongs together.
        # Under context parallelism the positions are spread already.
        plan = plan_of(skeleton, strategy.tp, wishes.tp_plan)
        split = tensor_parallel(module, axes, plan=plan, sequence=strategy.cp == 1)
        layouts.update(split.layouts)
        partial.update({name: ("tp",) for name in split.partial})
        notes += split.notes
    if strategy.cp > 1:
        context = context_parallel(module, axes, every, held=blocks)
        partial.update({name: (*partial.get(name, ()), "cp") for name in context.partial})
        notes += context.notes
    if wishes.checkpoint:
        recompute(module, blocks)

    units = [module.get_submodule(name) for name in blocks]
    data = data_axis(module, layouts, axes, zero=strategy.zero, units=units, keep=pipeline is not None)
    ties, replication = _relations(data.layouts, axes, strategy)
    return Side(strategy, axes, module, data, staged, pipeline, partial, ties, replication, tuple(notes))


def _need_chain(wishes: Wishes, strategy: Strategy) -> None:
    if wishes.chain is None:
        raise StrategyError(
            f"The model cannot be cut into blocks, which {strategy} needs.",
            numbers=wishes.no_chain or "no example batch was there to find them with",
            hint="stages=['name of the module that begins stage 1', ...]; with prepare(): example=batch",
        )


def _relations(
    layouts: Mapping[str, Layout], axes: Axes, strategy: Strategy
) -> tuple[list[tuple[dist.ProcessGroup, tuple[str, ...]]], dict[str, int]]:
    """(ties, replication) of a Side, from what every rank of the world holds."""
    mesh = strategy.mesh
    everyone: list[dict[str, int]] = [{name: layout.numel for name, layout in layouts.items()}]
    if mesh.size > 1:
        mine, everyone = everyone[0], [{} for _ in range(mesh.size)]
        dist.all_gather_object(everyone, mine)
    replication = {
        name: max(1, round(sum(held.get(name, 0) for held in everyone) / max(Layout.whole(layout.shape).numel, 1)))
        for name, layout in layouts.items()
    }
    stages: dict[str, set[int]] = {}
    for rank, held in enumerate(everyone):
        for name in held:
            stages.setdefault(name, set()).add(mesh.index(rank)["pp"])
    tied: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(stages):
        if 1 < len(stages[name]):
            tied.setdefault(tuple(sorted(stages[name])), []).append(name)
    ties = []
    for where, names in sorted(tied.items()):
        group = group_of("pp", [tuple(line[stage] for stage in where) for line in mesh.groups("pp")], axes.rank)
        own: Sequence[str] = [name for name in names if name in layouts]
        if group is not None and own:
            ties.append((group, tuple(own)))
    return ties, replication
