"""The options of a job beside its strategy, and the facts about its model. They are the same for every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from nbkit.errors import StrategyError
from nbkit.rank.loss.counted_targets import Counted
from nbkit.rank.parallel.context.context_parallel import Positionwise
from nbkit.rank.parallel.pipeline.layer_chain import LayerChain
from nbkit.rank.parallel.proof.outside_state import OutsideUse
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from nbkit.rank.parallel.tensor.plan.plan import TensorPlan
from nbkit.rank.parallel.tensor.proof.verdict import Proof
from nbkit.rank.parallel.zero3.gather_plan import GatherPlan
from nbkit.rank.parallel.zero3.unit import Casts
from nbkit.rank.rng.draw_plan import DrawPlan
from nbkit.strategy import Strategy


@dataclass(frozen=True)
class Coupled:
    """A reason why a batch computed in parts differs from the whole batch. It is found by computing both.

    what: the cause. numbers: the evidence. hint: what to write instead. trains: the cause is an auxiliary term. The
    mean over the parts is taken, so the job trains with a warning.
    """

    what: str
    numbers: str
    hint: str
    trains: bool = False


@dataclass(frozen=True)
class Options:
    """The options of a job beside its strategy, and the facts about its model.

    chain: the blocks of the model, None if none were found. no_chain: why not. costs: the seconds of its pieces.
    tp_plan: see tensor.choose. recompute: compute the activations of the blocks again in the backward pass. experts:
    the first mixture of experts, "" without one. astray: what in a copy of the model reads the original, "" if nothing
    does. again: the callable that built the model can build it again. rebuilt: the callable builds the copies too,
    because no copy is right. hooked: the first parameter with a hook on its gradient. coupled: what couples the rows of
    a batch, None if nothing was found. counted: the loss weighs the targets that count, None if it weighs rows. draws:
    what the model draws itself, None if nothing was found. cut: a rank cuts its rows into several forwards, whatever
    the strategy. compile: compile blocks where that is safe. hidden: (positions, width) of the tensor that goes from
    block to block, None if it is not one such tensor. proof: the ways to split the model over a tensor axis, found by
    running them. gathers: what ZeRO 3 gathers together. positionwise: what running the model on parts of the positions
    has shown. Both are None if nothing could be run. adaptive: the optimizer's steps do not grow with the gradients, as
    with Adam. collectives: the first collective that the model or the loss makes itself, "" if none was seen. outside:
    what they change and read beside parameters and buffers. changes: they change something there, whether they read it
    or not. caches: attributes that describe what the model caches, which is made again after a switch. looked: the
    facts that were looked for (see model_facts.py), None if all were, or if nothing can be run.
    """

    chain: LayerChain | None = None
    no_chain: str = ""
    costs: tuple[float, ...] = ()
    tp_plan: Mapping[str, str] | None = None
    recompute: bool = False
    experts: str = ""
    astray: str = ""
    rebuilt: bool = False
    again: bool = False
    hooked: str = ""
    coupled: Coupled | None = None
    counted: Counted | None = None
    draws: DrawPlan | None = None
    cut: bool = False
    compile: bool | str = False
    hidden: tuple[int, int] | None = None
    proof: Proof = field(default_factory=Proof)
    gathers: GatherPlan | None = None
    positionwise: Positionwise | None = None
    adaptive: bool = False
    collectives: str = ""
    outside: OutsideUse | None = None
    changes: bool = False
    caches: frozenset[tuple[str, str]] = frozenset()
    looked: frozenset[str] | None = None

    def plan(self, model: nn.Module, size: int) -> TensorPlan:
        """Return how `model` is split over `size` ranks of a tensor axis; see `plan_of`."""
        return plan_of(model, size, self.tp_plan, self.proof)


def need_chain(options: Options, strategy: Strategy) -> None:
    """Raise StrategyError if `strategy` needs the model's blocks and none were found, or if it cannot run them."""
    if options.chain is None and (strategy.pp > 1 or strategy.cp > 1):
        raise StrategyError(
            f"The model cannot be cut into blocks, which {strategy} needs.",
            numbers=options.no_chain or "no example batch was there to find them with",
            hint="hints=nbkit.ModelHints(stages=['name of the module that begins stage 1', ...]); "
            "with prepare(): hints=nbkit.ModelHints(example=batch)",
        )
    if strategy.pp > 1 and options.chain is not None and options.chain.unrepeated is not None:
        block, how = options.chain.unrepeated
        raise StrategyError(
            f"{block!r} is recomputed by the model in a way that no stage of {strategy} can repeat.",
            numbers=how,
            hint="checkpoint(block, x, use_reentrant=False) around each block; or "
            "compute=nbkit.Compute(recompute=True)",
        )


def keeps_whole(strategy: Strategy) -> bool:
    """Return True if each rank holds the whole model, as the user built it. A job may then begin with that model
    itself."""
    return strategy.mesh.size == strategy.dp and strategy.zero == 0


def need_copies(options: Options, strategy: Strategy) -> None:
    """Raise StrategyError if `strategy` would compute with a copy of the model that uses parts of the original."""
    if options.astray:
        raise StrategyError(
            f"{strategy} computes with a copy of the model, and no copy is right.",
            numbers=options.astray,
            hint="self.part = part, in place of a global name or a class of its own; or model=lambda: MyModule(...)",
        )


def parts_rows(options: Options, strategy: Strategy) -> bool:
    """Return True if the rows of a batch go through several forwards, on one rank or many."""
    return strategy.dp > 1 or (strategy.microbatches or 1) > 1 or options.cut


def need_rows(options: Options, strategy: Strategy) -> None:
    """Raise StrategyError if `strategy` separates rows that the model or its loss couples."""
    if options.experts and (why := _experts_unproven(options, strategy)):
        raise StrategyError(
            f"{options.experts!r} is a mixture of experts, which {strategy} is not known to train as one process does.",
            numbers=why,
            hint="strategy='ddp', or 'zero3', which splits its memory",
        )
    if (found := options.coupled) is not None and not found.trains and parts_rows(options, strategy):
        cut = f"{strategy} with microbatch_size=" if options.cut and strategy.mesh.size == 1 else str(strategy)
        raise StrategyError(
            f"{found.what}, and {cut} computes parts of a batch.", numbers=found.numbers, hint=found.hint
        )


def need_outside(options: Options, strategy: Strategy) -> None:
    """Raise StrategyError if state that the model keeps beside its parameters and buffers would differ."""
    if (found := options.outside) is None:
        return
    if found.unseen:
        raise StrategyError(
            "The model or the loss remembers something that nbkit can neither see nor put back: each look at the model "
            f"would change what {strategy} trains.",
            numbers=f"from the same rows, weights and random numbers a second pass is {found.unseen:.2g} off"
            + (f"; it may be {found.names[0]}" if found.names else ""),
            hint="self.calls += 1 and self.scales[self.calls % 3]: a number in an attribute, in place of an iterator",
        )
    if found.drawn or (strategy.mesh.size == 1 and not options.cut and not options.recompute):
        return
    why, hint = "", "a buffer (register_buffer), summed over the ranks in forward; or strategy='ddp', or one rank"
    if found.on_tensors and not keeps_whole(strategy):
        why = f"{found.on_tensors[0]!r} is set on a parameter or buffer, in whose place the strategy puts another"
        hint = "self.calls = ..., an attribute of the module; or strategy='ddp'"
    elif options.cut or options.recompute or strategy.pp > 1 or (strategy.microbatches or 1) > 1:
        why = "several forwards of a step, or one of a part of the model, change it more often or less"
    elif strategy.dp > 1 and found.by_rows and not found.per_row:
        why = "it is computed of all rows of a batch, and a rank has some of them"
        hint = "a buffer (register_buffer), summed over the ranks in forward; or %cluster start -n 1"  # not ddp
    elif (strategy.tp > 1 or strategy.cp > 1) and (found.by_rows or found.tensors):
        why = "it holds tensors, and a rank computes a part of them"
    if why:
        raise StrategyError(
            f"The model or the loss changes {found.spelled} in each pass and reads it in the next, which {strategy} "
            "would not do as one process does.",
            numbers=why,
            hint=hint,
        )


def need_whole_gradients(options: Options, strategy: Strategy) -> None:
    """Raise StrategyError if hooks on gradients would get parts of them, or would not be called."""
    if options.hooked and (strategy.mesh.size > 1 or options.cut):
        raise StrategyError(
            f"The gradient of {options.hooked!r} has a hook, which {strategy} would give a part of it, or never call.",
            numbers="by Tensor.register_hook or register_post_accumulate_grad_hook; hooks of modules are called",
            hint="without the hook; under 'ddp' and nbkit.prepare, change p.grad behind job.backward(batch)",
        )


def _experts_unproven(options: Options, strategy: Strategy) -> str:
    """Return why it is not known how a mixture of experts trains under `strategy`; "" if a run has shown it."""
    if strategy.tp > 1 and options.proof.of(strategy.tp) is None:
        return f"tp {strategy.tp}: {options.proof.why or 'the model was not run in parts'}"
    if strategy.cp > 1 and options.positionwise is None:
        return f"cp {strategy.cp}: a router that compares positions would see a part of them"
    if strategy.pp > 1 and options.chain is None:
        return f"pp {strategy.pp}: {options.no_chain or 'the model was not run to find its blocks'}"
    return ""


def need_gathers(options: Options, strategy: Strategy) -> None:
    """Raise StrategyError if `strategy` shards parameters and a run showed that the model then trains differently."""
    refused = options.gathers.refused if options.gathers is not None else None
    if strategy.zero == 3 and strategy.shard > 1 and refused is not None:
        raise StrategyError(refused.what, numbers=refused.numbers, hint=refused.hint)


def casts_of(options: Options, strategy: Strategy) -> Casts | None:
    """Return what `strategy` gathers in the dtype of autocast.

    Under tp it is None, because the split layers are not the ones that were seen.
    """
    if strategy.zero < 3 or strategy.shard == 1 or strategy.tp > 1 or options.gathers is None:
        return None
    return options.gathers.casts


def need_positionwise(options: Options, strategy: Strategy) -> None:
    """Raise StrategyError if `strategy` splits the positions and a run showed that the model needs them together."""
    found = options.positionwise
    if strategy.cp > 1 and found is not None and found.refused is not None:
        raise found.refused
    if strategy.cp > 1 and strategy.pp > 1 and found is not None and found.begins:
        raise StrategyError(
            "The model has several chains of blocks, of which a stage cannot tell the number of positions.",
            numbers=f"cp={strategy.cp} pp={strategy.pp}; further ones begin with {', '.join(sorted(found.begins))}",
            hint="cp without pp, or pp without cp",
        )
