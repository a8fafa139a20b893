"""The plan of a strategy for one model: the parts on each rank, the groups of ranks, and the changes to the model.

`make_plan` is a pure function of the strategy, the facts about the model, the user's options and the nodes of the
ranks. It refuses, with the reason, what would not train as one process does. Nothing is built or sent.

`parallelize.py` builds what a plan describes. Both use the same functions, so a sharded model has the layouts of its
plan. The tests compare them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from nbkit.errors import StrategyError
from nbkit.planner.owners import owners
from nbkit.planner.stages import spelled
from nbkit.rank.parallel.device_mesh import groups_along
from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.model_facts import Layouts, ModelFacts, needed_facts
from nbkit.rank.parallel.module.compile import not_compiled
from nbkit.rank.parallel.module.fp8 import spelled_fp8
from nbkit.rank.parallel.tensor.plan.plan import TensorPlan, folded
from nbkit.rank.parallel.value_digest import digest_of
from nbkit.rank.parallel.zero3.gather_plan import GatherPlan
from nbkit.rank.parallel.zero3.unit import Casts
from nbkit.strategy import Strategy, divisors
from nbkit.tensor_layout import Layout

RankGroups = list[tuple[int, ...]]
"""The groups along one axis, each as its ranks."""


@dataclass(frozen=True)
class RankLayouts:
    """The layouts of every rank, each as name -> layout.

    weights: the weights between steps. summed: the gradients that a rank has after they are summed. held: the tensors
    that the optimizer updates, with its state. It differs from `summed` if a tensor has an owner. buffers: the buffers
    that a checkpoint saves.
    """

    weights: tuple[Layouts, ...]
    summed: tuple[Layouts, ...]
    held: tuple[Layouts, ...]
    buffers: tuple[Layouts, ...]


@dataclass(frozen=True)
class Tie:
    """Parameters shared by exactly the same stages. groups: the ranks that hold them, for each line of stages."""

    groups: RankGroups
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ParallelPlan:
    """The plan of a strategy for one model, as made by `make_plan`.

    Plans are equal if ranks that follow them hold and send the same, on this rank or on another. `digest` expresses
    this in a few bytes. Properties are computed from the four fields when they are first used. A printed plan is a
    short table.

    node_of: the node of each rank; () for one node.
    """

    strategy: Strategy
    facts: ModelFacts
    options: JobOptions
    node_of: tuple[int, ...] = ()

    @cached_property
    def layouts(self) -> RankLayouts:
        """Return what every rank holds. Ranks that hold the same share a dict."""
        strategy, shapes, stages = self.strategy, self.facts.shapes, self.facts.stages(self.strategy)
        known: dict[tuple[int, int, int], Layouts] = {}
        sharded: dict[tuple[int, ...], Layouts] = {}
        routed, copies = self.facts.routed.names if strategy.ep > 1 else (), strategy.dp // strategy.ep
        weights, summed, buffers = [], [], []
        for rank in range(strategy.mesh.size):
            at = strategy.mesh.index(rank)
            here, place = stages[at["pp"]] if stages else None, (at["pp"], at["tp"], at["dp"] % strategy.ep)
            if place not in known:
                whole = self.facts.parts(strategy.tp, at["tp"], self.options.tp_plan)
                if strategy.ep > 1:
                    whole = self.facts.routed.parts(whole, strategy, at["dp"] % strategy.ep)
                known[place] = whole if here is None else {n: whole[n] for n in whole if n in here.parameters}
            mine = shards = known[place]
            if strategy.zero:
                part, copy = at["dp"] % strategy.shard, at["dp"] // strategy.ep if strategy.ep > 1 else 0
                if (*place, part, copy) not in sharded:
                    sharded[*place, part, copy] = {
                        n: each
                        if n in self.places
                        else shapes.shard(each, copies, copy)
                        if n in routed
                        else shapes.shard(each, strategy.shard, part)
                        for n, each in mine.items()
                        if self.places.get(n, part) == part
                    }
                shards = sharded[*place, part, copy]
            # The ranks that hold the same experts keep their weights whole.
            experts = {n: mine[n] for n in routed if n in mine}
            weights.append({**shards, **experts} if strategy.zero == 3 else mine)
            summed.append(shards)
            buffers.append(shapes.buffers if here is None else here.buffers)
        held = _with_owners(summed, self._owners_of(summed))
        return RankLayouts(tuple(weights), tuple(summed), held, tuple(buffers))

    @cached_property
    def places(self) -> dict[str, int]:
        """Return name -> position in its sharding group of the rank that updates the whole tensor, for ZeRO 1 and 2.

        With ZeRO 1 and 2 every rank has the whole weight. So the gradient is summed at the owner instead of being split
        first: see owned_bucket.py.
        """
        strategy, mesh, stages = self.strategy, self.strategy.mesh, self.facts.stages(self.strategy)
        if strategy.zero not in (1, 2) or strategy.tp > 1 or strategy.shard == 1 or not self._whole:
            return {}
        candidates: dict[str, list[list[int]]] = {}
        for rank, at in enumerate(map(mesh.index, range(mesh.size))):
            here = self._whole & stages[at["pp"]].parameters if stages else self._whole
            here -= self.facts.routed.names if strategy.ep > 1 else frozenset()
            for name in here:
                places = candidates.setdefault(name, [[] for _ in range(strategy.shard)])
                places[at["dp"] % strategy.shard].append(rank)
        shapes = {name: self.facts.shapes.whole[name].shape for name in candidates}
        together = {name: list(map(tuple, places)) for name, places in candidates.items() if shapes[name]}
        return owners(together, shapes, mesh.size)

    @cached_property
    def owners(self) -> dict[str, int]:
        """Return name -> the rank that updates the whole tensor, for split tensors that the optimizer needs whole.

        See whole_tensors.py. Tensors in `places` are not included, because they are not split.
        """
        return self._owners_of(self.layouts.summed) if self._whole else {}

    @property
    def _whole(self) -> frozenset[str]:
        return self.options.whole_in_tp if self.strategy.tp > 1 else self.options.whole

    @property
    def owned(self) -> frozenset[str]:
        """Return the tensors that one rank, or one rank in each group, updates for other ranks too."""
        return frozenset(self.owners).union(self.places)

    def _owners_of(self, summed: Sequence[Layouts]) -> dict[str, int]:
        if not (whole := self._whole):
            return {}
        cut = {name for part in {id(each): each for each in summed}.values() for name in part.keys() & whole
               if not part[name].is_whole}  # fmt: skip
        holders: dict[str, list[int]] = {}
        for rank, part in enumerate(summed):
            for name in part.keys() & cut:
                if part[name].numel:
                    holders.setdefault(name, []).append(rank)
        shapes = {name: self.facts.shapes.whole[name].shape for name in holders}
        alone = {name: [(rank,) for rank in ranks] for name, ranks in holders.items()}
        return {name: holders[name][n] for name, n in owners(alone, shapes, self.strategy.mesh.size).items()}

    @cached_property
    def groups(self) -> dict[str, RankGroups]:
        """Return axis -> all its groups. Collectives run in groups of several ranks."""
        strategy = self.strategy
        summed = strategy.summed_axis
        return groups_along(strategy.mesh, strategy.shard, summed=summed, node_of=self.node_of, ep=strategy.ep)

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """Return the parameters that several stages share, whose gradients are summed over these stages."""
        mesh = self.strategy.mesh
        if mesh.pp == 1:
            return ()
        stages: dict[str, set[int]] = {}
        for rank, summed in enumerate(self.layouts.summed):
            for name in summed:
                stages.setdefault(name, set()).add(mesh.index(rank)["pp"])
        found: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(stages):
            if len(stages[name]) > 1:
                found.setdefault(tuple(sorted(stages[name])), []).append(name)
        lines = mesh.groups("pp")
        return tuple(
            Tie([tuple(line[stage] for stage in where) for line in lines], tuple(names))
            for where, names in sorted(found.items())
        )

    @cached_property
    def copies(self) -> dict[str, int]:
        """Return name -> the number of ranks that hold the same elements of the tensors that the optimizer updates."""
        total: dict[str, int] = {}
        whole: dict[str, Layout] = {}
        for held in self.layouts.held:
            for name, layout in held.items():
                total[name] = total.get(name, 0) + layout.numel
                whole[name] = layout
        return {name: max(1, round(total[name] / max(Layout.whole(whole[name].shape).numel, 1))) for name in total}

    @cached_property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Return (first piece, one past the last piece) of each stage; () without a pipeline."""
        return tuple(self.facts.stage_ranges(self.strategy)) if self.strategy.pp > 1 and self.facts.chain else ()

    @cached_property
    def tensor(self) -> TensorPlan | None:
        """Return how layers are split over the tensor axis, or None without one."""
        return self.facts.tensor_plan(self.strategy.tp, self.options.tp_plan) if self.strategy.tp > 1 else None

    @property
    def gathers(self) -> GatherPlan | None:
        """Return what ZeRO 3 gathers together, or None without ZeRO 3 or if the model could not be run."""
        return self.facts.gathers if self.strategy.zero == 3 else None

    @property
    def casts(self) -> Casts | None:
        """Return the parameters that are gathered in the dtype of autocast."""
        return self.facts.casts(self.strategy)

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """Return the changes to the model, in the order of `parallelize`, in words."""
        return tuple(_steps(self))

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything that ranks hold, send and choose with this plan; see the class.

        It leaves out facts that this strategy does not use. For plain data parallelism this includes the chain of
        blocks. Rank 0 may know the chain before the other ranks, but which blocks a rank recomputes or compiles then
        affects only this rank. With a tensor axis the chain is included, because recomputed blocks send again.
        """
        strategy, facts = self.strategy, self.facts
        parts: list[Any] = [str(strategy), strategy.slowest, self.node_of, facts.shapes.digest]
        parts += [
            self.options.recompute,
            self.options.fp8,
            self.options.loss_chunks,
            self.options.compile,
            self.options.cut,
            self.options.adaptive,
        ]
        if "chain" in needed_facts(strategy):
            parts.append(facts.digest("chain"))
        parts += [self.stages, self.tensor, sorted(self.owners.items()), sorted(self.places.items())]
        parts += [facts.digest("routed")] * (strategy.ep > 1)
        parts += [facts.digest("positionwise")] * (strategy.cp > 1) + [facts.digest("gathers")] * (strategy.zero == 3)
        return digest_of(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParallelPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        rows = [("strategy", str(self.strategy)), ("ranks", str(self.strategy.mesh.size))]
        for axis, every in self.groups.items():
            if several := [ranks for ranks in every if len(ranks) > 1]:
                rows.append((f"groups of {axis}", " ".join("-".join(map(str, ranks)) for ranks in several)))
        rows += [("" if number else "parameters", line) for number, line in enumerate(_parameters(self))]
        rows += [("" if number else "steps", step) for number, step in enumerate(self.steps)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {what}" for name, what in rows)


def make_plan(
    strategy: Strategy, facts: ModelFacts, options: JobOptions | None = None, node_of: Sequence[int] = ()
) -> ParallelPlan:
    """Return the plan of `strategy`. It is a pure function and takes little time.

    Raises StrategyError, with the reason, if the model cannot be split like this or was not run to check it.
    """
    plan = ParallelPlan(strategy, facts, options or JobOptions(), tuple(node_of))
    for refusal in refusals(strategy, facts, plan.options):
        raise refusal
    facts.stages(strategy)
    facts.parts(strategy.tp, 0, plan.options.tp_plan)
    return plan


def refusals(
    strategy: Strategy, facts: ModelFacts, options: JobOptions, *, guessed: bool = False
) -> Iterator[StrategyError]:
    """Yield the reasons why `strategy` would not train this model as one process does.

    guessed: True if there is no batch to run, so that the blocks of the model are guessed by its structure.
    """
    needs = [_need_stages, _need_facts, _need_blocks_that_run, _need_copies, _need_whole_gradients, need_rows]
    needs += [_need_outside, _need_one_gradient, _need_equal_tables, _need_experts, *([] if guessed else [need_chain])]
    for need in [*needs, _need_gathers, _need_positionwise, _need_whole_layers]:
        try:
            need(strategy, facts, options)
        except StrategyError as error:
            yield error


def keeps_whole(strategy: Strategy) -> bool:
    """Return True if each rank holds the whole model as the user built it. A job may then begin with this model."""
    return strategy.mesh.size == strategy.dp and strategy.zero == 0 and strategy.ep == 1


def parts_rows(strategy: Strategy, options: JobOptions) -> bool:
    """Return True if the rows of a batch go through several forward passes, on one rank or many."""
    return strategy.dp > 1 or (strategy.microbatches or 1) > 1 or options.cut


def _need_stages(strategy: Strategy, _: ModelFacts, options: JobOptions) -> None:
    """Raise StrategyError if the user calls the model, but each rank would hold only some stages of it."""
    if options.own_forward and strategy.pp > 1:
        raise StrategyError(
            f"Under {strategy}, a rank cannot run the forward pass alone, because it holds only some of the stages.",
            numbers=f"{strategy.pp} stages, and a loop that calls job.model",
            hint="job.backward(batch), with loss= or forward_step= of nbkit.prepare, which follows the schedule; or "
            "a strategy without pp",
        )


def _need_facts(strategy: Strategy, facts: ModelFacts, _: JobOptions) -> None:
    """Raise StrategyError if the model was not yet run for `strategy`."""
    facts.require(strategy)


def need_chain(strategy: Strategy, facts: ModelFacts, _: JobOptions) -> None:
    """Raise StrategyError if `strategy` needs the model's blocks and none were found, or if it cannot run them."""
    if facts.chain is None and (strategy.pp > 1 or strategy.cp > 1):
        raise StrategyError(
            f"{strategy} needs a model that can be cut into blocks, and nbkit found no blocks.",
            numbers=facts.no_chain or "there was no example batch to find them",
            hint="hints=nbkit.ModelHints(stages=['name of the module that begins stage 1', ...]); with prepare(): "
            "hints=nbkit.ModelHints(example=batch)",
        )
    if strategy.pp > 1 and facts.chain is not None and facts.chain.unrepeated is not None:
        block, how = facts.chain.unrepeated
        raise StrategyError(
            f"The model recomputes {block!r} by itself, and a stage of {strategy} cannot do this.",
            numbers=how,
            hint="checkpoint(block, x, use_reentrant=False) around each block; or "
            "compute=nbkit.Compute(recompute=True)",
        )


def _need_blocks_that_run(strategy: Strategy, facts: ModelFacts, _: JobOptions) -> None:
    """Raise StrategyError if a random number of Python or numpy may decide whether a block runs."""
    if strategy.pp == 1 or facts.chain is None or facts.draws is None:
        return
    inside = tuple(f"{unit}." for unit in facts.chain.units if unit)
    outside = sorted(name for name in facts.draws.hosts if not f"{name}.".startswith(inside))
    if outside:
        raise StrategyError(
            f"{outside[0] or 'The model'} draws numbers from Python's or numpy's generator outside of its blocks. "
            f"Such a number could skip a block, but the stages of {strategy} run every block.",
            numbers=f"{len(inside)} blocks, first {facts.chain.units[0]!r}",
            hint="torch.rand(()) in the block itself; or a strategy without pp",
        )


def _need_copies(strategy: Strategy, facts: ModelFacts, _: JobOptions) -> None:
    """Raise StrategyError if `strategy` must copy the model and no copy is correct."""
    if not keeps_whole(strategy):
        need_copies(strategy, facts)


def need_copies(strategy: Strategy, facts: ModelFacts) -> None:
    """Raise StrategyError if a copy of the model, which `strategy` uses, reads parts of the original."""
    if facts.astray:
        raise StrategyError(
            f"{strategy} needs a copy of the model, and a copy does not compute the same.",
            numbers=facts.astray,
            hint="self.part = part, instead of a global name or a class; or model=lambda: MyModule(...)",
        )


def _need_whole_gradients(strategy: Strategy, facts: ModelFacts, options: JobOptions) -> None:
    """Raise StrategyError if hooks on gradients would get parts of the gradients, or would not be called."""
    if facts.hooked and (strategy.mesh.size > 1 or options.cut):
        raise StrategyError(
            f"The gradient of {facts.hooked!r} has a hook. Under {strategy}, the hook would get a part of the "
            "gradient, or would not be called.",
            numbers="by Tensor.register_hook or register_post_accumulate_grad_hook; hooks of modules are called",
            hint="remove the hook; under 'ddp' with nbkit.prepare, change p.grad after job.backward(batch)",
        )


def _need_one_gradient(strategy: Strategy, facts: ModelFacts, options: JobOptions) -> None:
    """Raise StrategyError if replicas train independently while one rank updates tensors that are split over tp."""
    if strategy.tp > 1 and strategy.exchange.every > 1 and options.whole_in_tp:
        raise StrategyError(
            f"Under {strategy}, replicas train separately, but one rank would update the tensors that tp splits for "
            "all replicas.",
            numbers=f"{len(options.whole_in_tp)} tensors, {strategy.dp} replicas",
            hint=f"'tp={strategy.tp}' without sync_every, or an optimizer such as AdamW",
        )


def _need_equal_tables(strategy: Strategy, facts: ModelFacts, _: JobOptions) -> None:
    """Raise StrategyError if ranks read different rows of a table, and change the rows that they read."""
    if strategy.dp == 1 and strategy.cp == 1:
        return
    for name, part in facts.shapes.skeleton.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            weight = f"{name}.weight".lstrip(".")
            raise StrategyError(
                f"The forward pass changes the parameter {weight!r} in place, and each rank of {strategy} would "
                "change other rows of it.",
                numbers=f"{type(part).__name__} with max_norm={part.max_norm:g}",
                hint="remove max_norm, and call this in a callback of the Trainer: "
                f"trainer.model.get_parameter('{weight}').detach().renorm_({part.norm_type:g}, 0, "
                f"{part.max_norm:g}); or %cluster start -n 1",
            )


def _need_experts(strategy: Strategy, facts: ModelFacts, _: JobOptions) -> None:
    """Raise StrategyError if `strategy` spreads experts, but the model has no experts that it can spread."""
    if strategy.ep == 1:
        return
    without = str(replace(strategy, ep=1))
    if not facts.routed.layers:
        raise StrategyError(
            f"{strategy} spreads experts over ranks, and nbkit found no experts that it can spread.",
            numbers=facts.routed.why or "there was no example batch to find them",
            hint=f"'{without}'; with prepare(): hints=nbkit.ModelHints(example=batch)",
        )
    if facts.routed.fewest < strategy.ep:
        raise StrategyError(
            f"ep of {strategy} is larger than the number of experts of a layer.",
            numbers=f"ep {strategy.ep}, {facts.routed.fewest} experts in a layer",
            hint=f"ep={max(n for n in divisors(strategy.dp) if n <= facts.routed.fewest)}",
        )
    layers = facts.routed.layers
    for number, cycles in strategy.experts:
        most = max(expert for cycle in cycles for expert in cycle)
        if number >= len(layers) or most >= layers[number].count:
            raise StrategyError(
                f"{strategy} exchanges an expert that the model does not have.",
                numbers=f"layer {number}, expert {most}; the model has "
                + "; ".join(f"{layer.count} experts in layer {n}" for n, layer in enumerate(layers)),
                hint=f"'{replace(strategy, experts=())}'",
            )


def need_rows(strategy: Strategy, facts: ModelFacts, options: JobOptions) -> None:
    """Raise StrategyError if `strategy` separates rows that the model or its loss couples."""
    if facts.experts and (why := _experts_unproven(strategy, facts)):
        raise StrategyError(
            f"{facts.experts!r} is a mixture of experts, and nbkit cannot show that {strategy} trains it as one "
            "process does.",
            numbers=why,
            hint="strategy='ddp', or 'zero3', which splits its memory",
        )
    if (found := facts.coupled) is not None and not found.trains and parts_rows(strategy, options):
        cut = f"{strategy} with microbatch_size=" if options.cut and strategy.mesh.size == 1 else str(strategy)
        raise StrategyError(
            f"{found.what}, and {cut} computes parts of a batch.", numbers=found.numbers, hint=found.hint
        )


def _experts_unproven(strategy: Strategy, facts: ModelFacts) -> str:
    """Return why it is unknown how a mixture of experts trains with `strategy`, or "" if a run has shown it."""
    if strategy.tp > 1 and facts.proof.of(strategy.tp) is None:
        return f"tp {strategy.tp}: {facts.proof.why or 'the model was not run in parts'}"
    if strategy.cp > 1 and facts.positionwise is None:
        return f"cp {strategy.cp}: a router that compares positions would see only some of them"
    if strategy.pp > 1 and facts.chain is None:
        return f"pp {strategy.pp}: {facts.no_chain or 'the model was not run to find its blocks'}"
    return ""


def _need_outside(strategy: Strategy, facts: ModelFacts, options: JobOptions) -> None:
    """Raise StrategyError if state outside the model's parameters and buffers would differ from one process."""
    if (found := facts.outside) is None:
        return
    if found.unseen:
        raise StrategyError(
            "The model or the loss has a state that nbkit can neither see nor restore, so each test run of the model "
            f"would change what {strategy} trains.",
            numbers=f"with the same rows, weights and random numbers, a second pass differs by {found.unseen:.2g}"
            + (f"; it may be {found.names[0]}" if found.names else ""),
            hint="self.calls += 1 and self.scales[self.calls % 3]: a number in an attribute, in place of an iterator",
        )
    if found.drawn or (strategy.mesh.size == 1 and not options.cut and not options.recompute):
        return
    why, hint = "", "a buffer (register_buffer), summed over the ranks in forward; or strategy='ddp', or one rank"
    if found.on_tensors and not keeps_whole(strategy):
        why = f"{found.on_tensors[0]!r} is set on a parameter or buffer, which the strategy replaces"
        hint = "self.calls = ..., an attribute of the module; or strategy='ddp'"
    elif options.cut or options.recompute or strategy.pp > 1 or (strategy.microbatches or 1) > 1:
        why = "a strategy can make more or fewer forward passes, so it would change at other times"
    elif strategy.dp > 1 and found.by_rows and not found.per_row:
        why = "it is computed from all rows of a batch, and a rank has only some of them"
        hint = "a buffer (register_buffer), summed over the ranks in forward; or %cluster start -n 1"  # not ddp
    elif (strategy.tp > 1 or strategy.cp > 1) and (found.by_rows or found.tensors):
        why = "it holds tensors, and a rank computes only a part of them"
    if why:
        raise StrategyError(
            f"The model or the loss changes {found.spelled} in each pass and reads it in the next pass. Under "
            f"{strategy}, its values would differ from those of one process.",
            numbers=why,
            hint=hint,
        )


def _need_whole_layers(strategy: Strategy, _: ModelFacts, options: JobOptions) -> None:
    """Raise StrategyError for fp8 if `strategy` divides rows of weights, because each row has one scale."""
    if options.fp8 and strategy.tp > 1:
        raise StrategyError(
            f"With fp8=True, {strategy} does not give the results of one process.",
            numbers=f"the scale of a row comes from its largest number, and tp={strategy.tp} divides rows",
            hint="a strategy without tp; or compute=nbkit.Compute(fp8=False)",
        )


def _need_gathers(strategy: Strategy, facts: ModelFacts, _: JobOptions) -> None:
    """Raise StrategyError if `strategy` shards parameters and a run showed that the model then trains differently."""
    refused = facts.gathers.refused if facts.gathers is not None else None
    if strategy.zero == 3 and strategy.shard > 1 and refused is not None:
        raise StrategyError(refused.what, numbers=refused.numbers, hint=refused.hint)


def _need_positionwise(strategy: Strategy, facts: ModelFacts, _: JobOptions) -> None:
    """Raise StrategyError if `strategy` splits the positions, but a run showed that the model needs them together."""
    found = facts.positionwise
    if strategy.cp > 1 and found is not None and found.refused is not None:
        raise found.refused
    if strategy.cp > 1 and strategy.pp > 1 and found is not None and found.begins:
        raise StrategyError(
            "The model has several chains of blocks, and a stage cannot find out how many positions each of them has.",
            numbers=f"cp={strategy.cp} pp={strategy.pp}; the other chains begin with {', '.join(sorted(found.begins))}",
            hint="cp without pp, or pp without cp",
        )


def _with_owners(summed: Sequence[Layouts], owned: Mapping[str, int]) -> tuple[Layouts, ...]:
    """Return the layouts of the tensors that each rank updates: `summed`, with whole tensors only at their owners."""
    if not owned:
        return tuple(summed)
    shapes = {name: layout.shape for part in summed for name, layout in part.items() if name in owned}
    whole = {name: Layout.whole(shape) for name, shape in shapes.items()}
    return tuple(
        {name: whole.get(name, layout) for name, layout in part.items() if owned.get(name, rank) == rank}
        for rank, part in enumerate(summed)
    )


def _steps(plan: ParallelPlan) -> Iterator[str]:
    """Yield what `parallelize` does, in its order."""
    strategy, facts = plan.strategy, plan.facts
    if plan.stages:
        micros = f"{strategy.schedule} of {strategy.microbatches} micro-batches"
        yield f"pipeline: stages of {spelled(plan.stages)} blocks, {micros}"
    if plan.tensor is not None:
        yield f"tensor: {len(plan.tensor.pairs)} pairs of layers and {len(plan.tensor.singles)} single ones are split"
    if strategy.cp > 1:
        count = len(facts.chain.units) if facts.chain is not None else 0
        yield f"context: {count} blocks see 1/{strategy.cp} of the positions"
    if strategy.ep > 1:
        count = len(facts.routed.layers)
        yield f"experts: those of {count} layer{'s' * (count != 1)} are spread over {strategy.ep} ranks"
    if plan.options.recompute:
        but = ", without matrix products, attention and collectives" * (plan.options.recompute == "selective")
        yield f"recomputation: blocks run again in the backward pass{but}"
    if plan.options.fp8:
        yield spelled_fp8(facts.shapes.skeleton)
    if plan.options.loss_chunks > 1:
        yield f"loss: head and cross entropy in {plan.options.loss_chunks} pieces"
    if plan.options.compile and not not_compiled(plan.options, strategy):
        yield "compilation: of blocks"
    if strategy.dp > 1:
        shards = ("nothing", "optimizer state", "optimizer state and gradients", "all")[strategy.zero]
        copies = strategy.dp // strategy.shard if strategy.zero else strategy.dp
        over = f" over {strategy.shard} ranks" if strategy.zero else ""
        yield f"data: {shards} sharded{over}, {copies} {'copies' if copies > 1 else 'copy'}"
    if count := len(plan.owners) or len(plan.places):
        yield f"optimizer: {count} tensors are updated whole, each by the rank that owns it"


def _parameters(plan: ParallelPlan) -> Iterator[str]:
    """Yield the part of the parameters on rank 0, then a line for each kind of parameter that a tensor axis splits."""
    strategy, whole, held = plan.strategy, plan.facts.shapes.whole, plan.layouts.held
    if all(each == whole for each in held):
        yield f"{len(whole)}, whole on every rank"
        return
    own, every = (sum(layout.numel for layout in some.values()) for some in (held[0], whole))
    yield f"{len(held[0])} of {len(whole)} on rank 0, which updates {own:,} of {every:,} elements"
    parts = (
        plan.layouts.weights[0]
        if strategy.ep > 1 and strategy.zero < 3
        else plan.facts.parts(strategy.tp, strategy.mesh.index(0)["tp"], plan.options.tp_plan)
    )
    cut = Counter((folded(name), parts[name].shape, parts[name].local) for name in held[0] if not parts[name].is_whole)
    for (name, shape, local), count in cut.items():
        yield f"{name}{f' ({count})' if count > 1 else ''}: {_shape(local)} of {_shape(shape)}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
