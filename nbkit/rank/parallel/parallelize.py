"""The order in which techniques are combined, from the outermost to the innermost split.

1. pipeline: parts of other stages are dropped first, so that later steps never touch them;
2. tensor: layers are split while their parameters are still placeholders, so that no whole weight is ever allocated;
3. experts: layers send tokens to the ranks that hold their experts, and other ranks drop these experts;
4. context: attention gathers keys and values, around layers that are already split;
5. recomputation: wraps blocks that contain their collectives, so that the second forward runs them too, or uses their
results (selective); or compilation of blocks that have no collectives; the head returns its logits in pieces;
6. data: sums and shards whatever is left on this rank, as one flat set of local parameters.

This is similar to torchtitan's `parallelize`. Here one function serves every model and every strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from nbkit.planner.stages import spelled
from nbkit.rank.parallel.chunked_logits import chunk_logits, find_head
from nbkit.rank.parallel.context.context_parallel import context_parallel
from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.parallel.data_parallel.data_axis import data_axis
from nbkit.rank.parallel.experts.data_axis import spread_axis
from nbkit.rank.parallel.experts.dispatch import SpreadLayer, spread_layers
from nbkit.rank.parallel.mine import own_linears
from nbkit.rank.parallel.model_facts import ModelFacts, needed_facts
from nbkit.rank.parallel.module.batch_norm import synchronised
from nbkit.rank.parallel.module.block_discovery import structural_blocks, within
from nbkit.rank.parallel.module.compile import compilable, compile_blocks
from nbkit.rank.parallel.module.copies import homes, replace_submodule
from nbkit.rank.parallel.module.forward_wrapper import mark_parts, recompute, refuse_copies
from nbkit.rank.parallel.module.fp8 import compute_in_fp8, fp8_layers, spelled_fp8
from nbkit.rank.parallel.pipeline.executor import Pipeline
from nbkit.rank.parallel.pipeline.stage_module import Staged
from nbkit.rank.parallel.plan import ParallelPlan, keeps_whole, need_chain, need_copies
from nbkit.rank.parallel.process_groups import Connections
from nbkit.rank.parallel.reshard.redistribute import hollow
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.parallel.tensor.apply import tensor_parallel
from nbkit.rank.parallel.whole_tensors import WholeTensors
from nbkit.rank.parallel.zero3.gather_plan import GatherPlan
from nbkit.schedules import Schedule
from nbkit.strategy import Strategy
from nbkit.techniques import chunks_of, class_in
from nbkit.tensor_layout import Layout


@dataclass
class ShardedSkeleton:
    """A module as changed by a plan on this rank, with shapes and without memory. It becomes one sharded model."""

    plan: ParallelPlan
    connections: Connections
    module: nn.Module
    layouts: Mapping[str, Layout]
    units: Sequence[nn.Module]
    staged: Staged | None
    schedule: Schedule | None
    split: bool
    partial: Mapping[str, Sequence[str]]
    notes: Sequence[str]
    spread: Sequence[SpreadLayer] = ()

    def build(self, device: torch.device) -> ShardedModel:
        """Allocate the memory of the module, and create the channels of a pipeline. Sends nothing."""
        axes, pipeline = self.connections.axes, None
        if self.schedule is not None:
            group, index = axes.group("pp"), axes.index("pp")
            line = axes.mesh.ranks("pp", axes.rank)
            peers = [sorted(line).index(rank) for rank in line]  # a group numbers its ranks in ascending order
            ordered = self.connections.ordered
            pipeline = Pipeline(self.schedule, group, index, device, ordered=ordered, split=self.split, peers=peers)
        strategy, found = self.plan.strategy, self.plan.facts.gathers
        gathers = found or GatherPlan()
        all_but_experts = partial(
            data_axis,
            self.module,
            self.layouts,
            axes,
            zero=strategy.zero,
            exchange=strategy.exchange,
            settings=strategy.settings,
            units=self.units,
            keep=pipeline is not None,
            ahead=gathers.ahead,
            rooted=gathers.rooted,
            proven=found is not None,
            casts=self.plan.casts,
            adaptive=self.plan.options.adaptive,
            owners=self.plan.places,
            own=class_in(strategy),
        )
        data: DataAxis
        if self.spread:
            zero, bucket, names = strategy.zero, strategy.exchange.bucket, self.plan.facts.routed.names
            at = self.module, self.layouts, axes, self.spread, names, all_but_experts
            data = spread_axis(*at, zero=zero, bucket=bucket, device=device, makes_up=pipeline is None)
        else:
            data = all_but_experts()
        if strategy.mesh.size > strategy.dp or strategy.ep > 1 or (strategy.zero == 3 and axes.size("shard") > 1):
            mark_parts(self.module, str(strategy))
            if strategy.tp > 1 or strategy.pp > 1 or strategy.zero == 3 or strategy.ep > 1:
                refuse_copies(self.module, str(strategy))
        owned = WholeTensors(self.plan, self.connections, data.held, data.layouts) if self.plan.owners else None
        return ShardedModel(
            self.plan, self.connections, self.module, data, self.staged, pipeline, self.partial, self.notes, owned
        )


def parallelize(
    plan: ParallelPlan, connections: Connections, *, device: torch.device, own: nn.Module | None
) -> ShardedModel:
    """Return a sharded model of `plan` on this rank. Its weights are not filled yet. Sends nothing.

    Arguments and errors: see `cut`.
    """
    return cut(plan, connections, device=device, own=own).build(device)


def parallelize_lean(plan: ParallelPlan, connections: Connections, *, device: torch.device) -> ShardedModel:
    """Return a sharded model like `parallelize`, with memory for its weights only.

    The first step allocates the memory of gradients. So a rank that fills the weights one by one needs memory for only
    one weight in addition.
    """
    with hollow() as spaces:
        sharded_model = parallelize(plan, connections, device=device, own=None)
        sharded_model.data.let_go()
    for tensor in sharded_model.data.tensors():
        storage = tensor.untyped_storage()
        if not storage.nbytes() and (space := spaces.get(storage._cdata)) is not None:
            storage.resize_(space[1])
    return sharded_model


def cut(
    plan: ParallelPlan, connections: Connections, *, device: torch.device, own: nn.Module | None = None
) -> ShardedSkeleton:
    """Return the model as changed by `plan` on this rank, without memory. Sends and draws nothing, and runs in any
    thread.

    own: the whole model itself, or None if it no longer exists. A strategy that splits nothing uses it unchanged.
    Otherwise a copy of the skeleton is split. Raises StrategyError or TrainingError, the same on every rank, for what
    cannot be split.
    """
    strategy, facts, options, axes = plan.strategy, plan.facts, plan.options, connections.axes
    if (module := own if keeps_whole(strategy) else None) is None:
        need_copies(strategy, facts)
        module = facts.shapes.copied()
    need_chain(strategy, facts, options)
    chain, notes = facts.chain, []

    own_class = class_in(strategy)
    linears = own_linears(own_class, axes.size("tp"), axes.index("tp")) if own_class and strategy.tp > 1 else None
    # With context parallelism, the positions are already split.
    in_sequence = strategy.cp == 1 and linears is None
    staged = schedule = None
    if strategy.pp > 1 and chain is not None:
        schedule = Schedule.of(strategy.schedule or "1f1b", strategy.pp, strategy.microbatches or 1)
        notes.append(f"stages of {spelled(plan.stages)} blocks")
        own_ranges = [plan.stages[stage] for stage in schedule.stages_of(axes.index("pp"))]
        staged = Staged(module, chain, own_ranges, team=axes.group("tp") if in_sequence else None)
    module = synchronised(module, axes=axes, micros=strategy.microbatches or 1, device=device)

    every = chain.units if chain is not None else structural_blocks(module)
    blocks = blocks_held(module, facts, module, strategy)
    layouts = {name: facts.shapes.whole[name] for name in homes(module)}
    partial_sums: dict[str, tuple[str, ...]] = {}
    if plan.tensor is not None:
        # Use the plan of the whole model, because one stage may not show what belongs together.
        chunks = chunks_of(strategy)
        parts = tensor_parallel(module, axes, plan=plan.tensor, sequence=in_sequence, own=linears, chunks=chunks)
        layouts.update(parts.layouts)
        partial_sums.update({name: ("tp",) for name in sorted(parts.partial)})
        notes += parts.notes
    spread: Sequence[SpreadLayer] = ()
    if strategy.ep > 1:
        index = axes.index("ep")
        held = [facts.routed.held(strategy, rank) for rank in range(strategy.ep)]
        spread = spread_layers(module, facts.routed.layers, axes.group("ep"), list(zip(*held, strict=True)), index)
        layouts = facts.routed.parts(layouts, strategy, index)
        for name, places in homes(module).items():
            if name not in layouts:
                replace_submodule(places, None)
        notes.append(f"the experts of {len(spread)} layers over {strategy.ep} ranks")
    if strategy.cp > 1:
        context = context_parallel(module, axes, every, held=blocks, tried=facts.positionwise)
        partial_sums.update({name: (*partial_sums.get(name, ()), "cp") for name in sorted(context.partial)})
        notes += context.notes
    if options.fp8:
        names = [name for name in fp8_layers(facts.shapes.skeleton)[0] if _holds(module, name)]
        compute_in_fp8(module, names, device)
        notes.append(spelled_fp8(facts.shapes.skeleton))
    gathers = plan.gathers
    if options.recompute:
        recompute(module, blocks, selective=options.recompute == "selective")
    gathered = gathers.units if gathers is not None else ()
    head = ""
    if options.loss_chunks > 1:
        head = find_head(facts.shapes.skeleton, every, options.loss_chunks)
        if _holds(module, head):
            chunk_logits(module.get_submodule(head), facts.shapes.skeleton.get_submodule(head), options.loss_chunks)
            notes.append(f"logits of {head} in {options.loss_chunks} pieces")
    compile_blocks(module, compilable(blocks, options, strategy, gathered), options.compile)

    if gathers is not None:
        # The loss uses the head after its forward, so the head stays gathered, with the root.
        blocks = [name for name in gathers.units if _holds(module, name) and (not head or name != head)]
        notes += gathers.notes
    if plan.casts is not None:
        notes.append(plan.casts.spelled(facts.shapes.skeleton))
    inside = [path for layer in facts.routed.layers for path in (layer.experts or (layer.name,))] if spread else []
    units = [module.get_submodule(name) for name in blocks if not within(name, inside)]
    split = not (options.recompute or options.loss_chunks > 1 or (chain is not None and chain.recomputes))
    return ShardedSkeleton(
        plan, connections, module, layouts, units, staged, schedule, split, partial_sums, tuple(notes), spread
    )


def blocks_held(module: nn.Module, facts: ModelFacts, whole: nn.Module, strategy: Strategy) -> list[str]:
    """Return the names of the blocks of `whole` that are in `module`, a part of it. These can be recomputed.

    Ranks that share experts recompute the same blocks. So do not use a chain that only some of them may know.
    """
    chain = facts.chain if strategy.ep == 1 or "chain" in needed_facts(strategy) else None
    every = chain.units if chain is not None else structural_blocks(whole)
    return [name for name in every if _holds(module, name)]


def _holds(module: nn.Module, name: str) -> bool:
    return any(True for _ in module.get_submodule(name).parameters())
