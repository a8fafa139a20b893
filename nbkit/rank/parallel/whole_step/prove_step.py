"""Proves a composition: a step of a few rows by its ranks, in threads of one process, equals that of one process.

The proofs of blocks, splits and positions look at parts of a model. What is around them shows in a whole step alone:
weights that several places share, the head, the loss, modules called more than once, sums over dp, the norm. On drawn
weights, in float64 where the model computes in it. The ranks run the code that trains; they send nothing, and may do so
in any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import NbkitError, StrategyError
from nbkit.levers import NONE
from nbkit.planner.validate import Finding
from nbkit.rank.data.batch import pick, rows_of
from nbkit.rank.host_memory import free_on_host
from nbkit.rank.loss.mean_over_rows import coarsest
from nbkit.rank.loss.output_tensors import leaves, with_leaves
from nbkit.rank.loss.reads_model import ReadsParameters
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.module.batch_norm import batch_norms
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.options import Options, parts_rows
from nbkit.rank.parallel.proof.outside_state import OutsideState, outside_kept
from nbkit.rank.parallel.whole_step.compare_steps import buffers_off, differences, updates_off
from nbkit.rank.parallel.whole_step.drawn_model import Reference, drawn_model
from nbkit.rank.parallel.whole_step.steps import Batch, Optimizer, Stepped, step_of_one, steps_of_ranks
from nbkit.schedules import type_of
from nbkit.strategy import Strategy, divisors

_EXACT, _EXACT_NORMS, WIDE = 1 << 22, 1 << 26, 1 << 30
"""Models of more parameters than _EXACT are run in float32 on fewer rows, of more than WIDE not at all: it takes
minutes. With BatchNorm, of up to _EXACT_NORMS in float64 as a last trial."""

_OF_HOST = 0.5
"""The part of the host's free memory that the step may take: other ranks make their models at the same time."""

_MANY = 8
"""Rows of a rank where few say nothing."""

_RANKS = 32


@dataclass(frozen=True)
class StepProof:
    """What a whole step of a strategy showed beside one process; nothing where it makes the step of one process.

    refusal: why the strategy does not train; unproven: what could not be compared and why, where it trains all the
    same.
    """

    refusal: NbkitError | None = None
    unproven: str = ""

    def finding(self, strategy: Strategy) -> Finding | None:
        """What is to be said of it beforehand."""
        if self.refusal is not None:
            return Finding(True, self.refusal.what, self.refusal.numbers or "", self.refusal.hint or "")
        if self.unproven:
            return Finding(False, f"Not all of {strategy} was compared with one process.", self.unproven)
        return None


def tiny(strategy: Strategy) -> Strategy:
    """The smallest strategy that is composed as `strategy` is: further ranks of dp do what two of them do.

    Levers are left out: how gradients are sent is none of it. Where it still has more ranks than are run, fewer stages
    and fewer parts of the positions.
    """
    groups = 2 if strategy.shard < strategy.dp else 1
    shard = min(strategy.shard, 2)
    dp = min(strategy.dp, groups * shard if strategy.zero else 2)
    small = replace(strategy, dp=dp, shard=shard if strategy.zero else 0, speeds=(), levers=NONE)
    for axis in ("pp", "cp"):
        for degree in reversed(divisors(getattr(strategy, axis))):
            if small.mesh.size > _RANKS and 1 < degree < getattr(small, axis):
                fewer: dict[str, Any] = {axis: degree}
                small = replace(small, **fewer)
    return small


def prove_step(
    skeleton: nn.Module,
    strategy: Strategy,
    options: Options,
    example: Any,
    *,
    loss: Loss | None,
    inputs: Sequence[str] | None,
    optimizer: Optimizer | None = None,
    microbatch_size: int | None = None,
    short: Any = None,
    many: Any = None,
    reference: Reference | None = None,
) -> StepProof:
    """Whether `strategy` trains the model as one process does. Sends nothing.

    skeleton: the shapes of the model, whose weights are drawn; example: some rows of the data. loss: None takes a sum
    over the first tensor that the model gives; optimizer: None takes SGD. A cut of the model (tp, pp, cp, zero 3) is
    refused where one process makes no step that could be compared; what only parts the rows trains, and the reason is
    given. reference: the same model, built again, to make the step of one process; None takes a copy. short: few
    positions of those rows, which prove as much (see short_example.py): where positions are split, blocks were compared
    on all of them. What the few do not prove, all may. many: more rows than example has, where they are known, for a
    model whose BatchNorm takes its statistics of them: of two rows with one position it divides by the difference of
    two numbers, and layer by layer a rounding grows to a misfit. In float64, as a last trial.
    """
    if options.astray:
        return StepProof(unproven=options.astray)
    how: dict[str, Any] = {"loss": loss, "inputs": inputs, "optimizer": optimizer, "microbatch_size": microbatch_size}
    how["reference"] = reference
    proof = None
    if short is not None:
        proof = _proof(skeleton, strategy, options, short, **how)
    if proof != StepProof():
        proof = _proof(skeleton, strategy, options, example, **how)
    if proof != StepProof() and batch_norms(skeleton):
        proof = _proof(
            skeleton, strategy, options, example if many is None else many, each=_MANY, exact=_EXACT_NORMS, **how
        )
    return proof


def _proof(
    skeleton: nn.Module,
    strategy: Strategy,
    options: Options,
    example: Any,
    *,
    loss: Loss | None,
    inputs: Sequence[str] | None,
    optimizer: Optimizer | None,
    microbatch_size: int | None,
    reference: Reference | None,
    each: int = 2,
    exact: int = _EXACT,
) -> StepProof:
    """On `each` rows of a rank; of more than `exact` parameters on one, in float32."""
    small = tiny(strategy)
    if small.mesh.size == 1 and microbatch_size is None:
        return StepProof()
    size = sum(getattr(*places[0]).numel() for places in homes(skeleton).values())
    if beforehand := _unmakeable(small, options, example, size):
        return StepProof(unproven=f"no whole step: {beforehand}")
    options = replace(options, compile=False)
    # The mean of an auxiliary term over parts of a batch is not that of the whole: one process takes the same parts.
    in_parts = options.coupled is not None and parts_rows(options, strategy)
    rows = _rows(small, 1 if size > exact or in_parts else each, microbatch_size)
    if options.collectives:
        rows = max(each, 2) * small.dp * (small.microbatches or 1)  # every rank calls them as often, on as many rows
    # The models of one process and of the ranks share what is outside of them.
    outside = OutsideState(skeleton, loss) if options.outside is not None or options.changes else None
    why = ""
    for dtype, positive in _DRAWS[size > exact :]:
        try:
            data = _data(example, rows, dtype)
            how = (loss or _sum_of_output, inputs, optimizer or _Descent, microbatch_size and 1)
            batch = Batch(data, rows, *how, outside)
            with coarsest() as seen:
                whole = _alone(skeleton, reference, dtype, positive, batch, options, in_parts)
        except ReadsParameters as error:
            return StepProof(error)
        except Exception as error:
            why = why or f"a step of {rows} rows in one process fails: {_told(error)}"
            continue
        if not isfinite(whole.loss + whole.norm):
            why = why or f"on drawn weights the loss is {whole.loss:.3g}, the norm of its gradients {whole.norm:.3g}"
            continue
        model = drawn_model(skeleton, dtype, positive=positive)
        refusal = _compared(model, whole, strategy, small, batch, options, seen.eps)
        if refusal is None:
            return StepProof(unproven=whole.unmade and f"the optimizer makes no step on the CPU: {whole.unmade}")
        # One process may differ from itself: then its step says nothing about the ranks.
        again = _alone(skeleton, reference, dtype, positive, batch, options, in_parts)
        if not any(differences(whole, again, max(1e-9, 64 * seen.eps))):
            return StepProof(refusal)
        why = f"one process does not repeat its own step: loss {whole.loss:.6g}, then {again.loss:.6g}"
        break
    unknown = _cuts(strategy) or options.collectives
    return StepProof(_unprovable(strategy, why) if unknown else None, f"no whole step: {why}")


_DRAWS = ((torch.float64, False), (torch.float32, False), (torch.float32, True))
"""(dtype, weights above zero alone), tried in this order. Who takes logarithms of weights needs the last."""


def _cuts(strategy: Strategy) -> bool:
    """Whether a rank computes with a part of the model, or of a row."""
    return strategy.dp < strategy.mesh.size or strategy.zero == 3


def _unmakeable(small: Strategy, options: Options, example: Any, size: int) -> str:
    """Why no step is made of `small`, of a model of `size` parameters; "" where one is."""
    if example is None:
        return (
            "no example batch to run: example=batch, for prepare() and the Trainer; nbkit.check(model, strategy, batch)"
        )
    if options.draws is not None and options.draws.unkeyed:
        return f"the model draws numbers that are not keyed: {options.draws.unkeyed[0]}"
    if small.mesh.size > _RANKS:
        return f"{small.mesh.size} ranks in one process, of which at most {_RANKS} are run"
    if size > WIDE:
        return f"{size / 1e6:,.0f} M parameters, more than {WIDE / 1e6:,.0f} M; blocks were run by themselves"
    if size > _EXACT:
        needed, free = size * _bytes_of_parameter(small), free_on_host()
        if free is not None and needed > _OF_HOST * free:
            return (
                f"{size / 1e6:,.0f} M parameters take about {needed / 1e9:.1f} GB, more than half of the "
                f"{free / 1e9:.1f} GB that are free on the host; blocks were run by themselves"
            )
    return ""


def _bytes_of_parameter(small: Strategy) -> int:
    """Of float32, with AdamW: the weights that are drawn and those of one process; of each rank what it holds."""
    return 12 + 16 * small.mesh.size // (small.tp * small.pp)


def _unprovable(strategy: Strategy, why: str) -> StrategyError:
    return StrategyError(
        f"{strategy} cannot be compared with one process before it trains this model.",
        numbers=why,
        hint=_hint(strategy),
    )


def _alone(
    skeleton: nn.Module,
    reference: Reference | None,
    dtype: torch.dtype,
    positive: bool,
    batch: Batch,
    options: Options,
    in_parts: bool,
) -> Stepped:
    """By one process; in_parts: a forward for each row, as the ranks make them."""
    if reference is not None and not in_parts:
        with reference.drawn(skeleton, dtype, positive=positive) as model:
            # It is run again for the next proof.
            with outside_kept(model) if options.outside is not None else nullcontext():
                return step_of_one(model, batch, options)
    model = drawn_model(skeleton, dtype, positive=positive)
    if not in_parts:
        return step_of_one(model, batch, options)
    (stepped,) = steps_of_ranks(model, Strategy(), replace(batch, microbatch_size=1), replace(options, cut=True), None)
    return stepped


def _compared(
    model: nn.Module, whole: Stepped, strategy: Strategy, small: Strategy, batch: Batch, options: Options, eps: float
) -> NbkitError | None:
    try:
        ranks = steps_of_ranks(model, small, batch, options, whole.norm / 2, updated=not whole.unmade)
    except NbkitError as error:
        return error
    except Exception as error:
        return StrategyError(
            f"{strategy} does not run this model: a step of {batch.rows} rows fails.",
            numbers=_told(error) + _called(options),
            hint=_hint(strategy, options),
        )
    tolerance, before = max(1e-9, 64 * eps), {name: p.detach() for name, p in model.named_parameters()}
    found = [text for rank in ranks for text in differences(whole, rank, tolerance)]
    # A wrong gradient is told as such, not as what becomes of it.
    found = found or [*updates_off(whole, ranks, before, tolerance), *buffers_off(whole, ranks, tolerance)]
    if not found:
        return None
    return StrategyError(
        f"{strategy} does not train this model as one process does.",
        numbers=f"a step of {batch.rows} rows: {'; '.join(list(dict.fromkeys(found))[:3])}{_called(options)}",
        hint=_hint(strategy, options),
    )


def _called(options: Options) -> str:
    return f"; the model or the loss makes an {options.collectives} itself" if options.collectives else ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _hint(strategy: Strategy, options: Options | None = None) -> str:
    sends = options is not None and options.collectives  # on the same ranks under ddp
    if strategy.dp < strategy.mesh.size or (strategy.zero and not sends):
        return "another strategy, such as 'ddp'"
    return "%cluster start -n 1   trains it on one rank"


def _sum_of_output(output: Any, _: Any) -> tuple[Tensor, int]:
    first = next(x for x in leaves(output).values() if x.is_floating_point() and x.ndim)
    weights = torch.randn(first.shape[-1], generator=torch.Generator().manual_seed(1)).to(first.dtype)
    return (first * weights).sum(), first.shape[0]


def _rows(strategy: Strategy, each: int, microbatch_size: int | None) -> int:
    """For a step of `strategy`, `each` for a rank; of two ranks that have two, one has less: weights are seen then."""
    if strategy.schedule and type_of(strategy.schedule).microbatches_per_rank > 1:
        return (strategy.microbatches or 1) * strategy.dp
    if strategy.pp > 1 or microbatch_size is not None:
        return max(2, each) * strategy.dp
    return each * strategy.dp - (strategy.dp > 1 and each > 1)


class _Descent:
    """SGD by hand: the first step of an optimizer of torch's imports its compiler, which takes seconds."""

    def __init__(self, held: Mapping[str, nn.Parameter], plainly: bool) -> None:
        self._held = held

    @torch.no_grad()
    def step(self) -> None:
        for p in self._held.values():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


def _data(example: Any, rows: int, dtype: torch.dtype) -> Any:
    held = rows_of(example)

    def of(_: str, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()

    return with_leaves(pick(example, [row % held for row in range(rows)], rows=held), of)
