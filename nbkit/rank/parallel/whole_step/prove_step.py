"""Proves a composition: a step of a few rows by its ranks, in threads of one process, equals that of one process.

The proofs of blocks, splits and positions look at parts of a model. What is around them shows in a whole step alone:
weights that several places share, the head, the loss, modules called more than once, sums over dp, the norm. On drawn
weights, in float64 where the model computes in it. The ranks run the code that trains; they send nothing, and may do so
in any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import NbkitError, StrategyError
from nbkit.rank.data.batch import pick, rows_of
from nbkit.rank.loss.mean_over_rows import coarsest
from nbkit.rank.loss.output_tensors import leaves, with_leaves
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.module.meta_module import homes
from nbkit.rank.parallel.options import Options, parts_rows
from nbkit.rank.parallel.whole_step.drawn_model import drawn_model
from nbkit.rank.parallel.whole_step.steps import Batch, Stepped, step_of_one, steps_of_ranks
from nbkit.strategy import Strategy

_EXACT, _WIDE = 1 << 22, 1 << 26
"""Models of more parameters are run in float32 on fewer rows, and of still more not at all: for memory, and time."""

_RANKS = 16
_LEAST = 1e-3  # of the norm of all gradients: what is smaller than this is measured by it


def tiny(strategy: Strategy) -> Strategy:
    """The smallest strategy that is composed as `strategy` is: further ranks of dp do what two of them do."""
    groups = 2 if strategy.shard < strategy.dp else 1
    shard = min(strategy.shard, 2)
    dp = min(strategy.dp, groups * shard if strategy.zero else 2)
    return replace(strategy, dp=dp, shard=shard if strategy.zero else 0)


def refusal_of(
    skeleton: nn.Module,
    strategy: Strategy,
    options: Options,
    example: Any,
    *,
    loss: Loss | None,
    inputs: Sequence[str] | None,
    microbatch_size: int | None = None,
) -> NbkitError | None:
    """Why `strategy` does not train the model as one process does; None where it does, and where that cannot be told.

    skeleton: the shapes of the model, whose weights are drawn; example: some rows of the data. loss: None takes a sum
    over the first tensor that the model gives. Sends nothing.
    """
    small = tiny(strategy)
    alone = small.mesh.size == 1 and microbatch_size is None
    draws = options.draws is not None and options.draws.unkeyed
    # The mean of an auxiliary term over parts of a batch is not that of the whole, and is warned of.
    auxiliary = options.coupled is not None and parts_rows(options, strategy)
    if example is None or alone or draws or auxiliary or small.mesh.size > _RANKS:
        return None
    options = replace(options, compile=False)
    size = sum(getattr(*places[0]).numel() for places in homes(skeleton).values())
    for dtype in () if size > _WIDE else (torch.float64, torch.float32)[size > _EXACT :]:
        with suppress(Exception):
            rows = _rows(small, 1 if size > _EXACT else 2, microbatch_size)
            batch = _batch(example, rows, dtype, loss or _sum_of_output, inputs, microbatch_size)
            with coarsest() as seen:
                whole = step_of_one(drawn_model(skeleton, dtype), batch, options)
            if isfinite(whole.loss + whole.norm):
                refusal = _compared(drawn_model(skeleton, dtype), whole, strategy, small, batch, options, seen.eps)
                # One process may differ from itself: then its step says nothing about the ranks.
                again = step_of_one(drawn_model(skeleton, dtype), batch, options) if refusal is not None else whole
                return refusal if (again.loss, again.norm) == (whole.loss, whole.norm) else None
    return None  # what is wrong with the model is said where it trains


def _compared(
    model: nn.Module, whole: Stepped, strategy: Strategy, small: Strategy, batch: Batch, options: Options, eps: float
) -> NbkitError | None:
    try:
        ranks = steps_of_ranks(model, small, batch, options)
    except NbkitError as error:
        return error
    except Exception as error:
        return StrategyError(
            f"{strategy} does not run this model: a step of {batch.rows} rows fails.",
            numbers=f"{type(error).__name__}: {str(error).strip()[:200]}",
            hint=_hint(strategy),
        )
    found = [text for rank in ranks for text in _differences(whole, rank, max(1e-9, 64 * eps))]
    if not found:
        return None
    return StrategyError(
        f"{strategy} does not train this model as one process does.",
        numbers=f"a step of {batch.rows} rows: {'; '.join(list(dict.fromkeys(found))[:3])}",
        hint=_hint(strategy),
    )


def _hint(strategy: Strategy) -> str:
    if strategy.dp < strategy.mesh.size or strategy.zero:
        return "another strategy, such as 'ddp'"
    return "%cluster start -n 1   trains it on one rank"


def _differences(whole: Stepped, rank: Stepped, tolerance: float) -> Iterator[str]:
    if abs(whole.loss - rank.loss) > tolerance * max(abs(whole.loss), 1e-3):
        yield f"loss {rank.loss:.6g} instead of {whole.loss:.6g}"
    if abs(whole.norm - rank.norm) > 8 * tolerance * whole.norm:
        yield f"norm of the gradients {rank.norm:.6g} instead of {whole.norm:.6g}"
    for name, (grad, layout) in rank.gradients.items():
        expected = whole.gradients[name][0]
        if (off := _off(grad, expected, layout)) > 64 * tolerance * _scale(expected, whole.norm):
            yield f"gradient of {name!r} {off:.3g} off, of {_scale(expected, 0):.3g}"


def _scale(expected: Tensor | None, norm: float) -> float:
    largest = float(expected.abs().max()) if expected is not None and expected.numel() else 0.0
    return max(largest, _LEAST * norm)


def _off(grad: Tensor | None, expected: Tensor | None, layout: Any) -> float:
    """The largest difference of what a rank holds from the same part of the whole; none counts as zeros."""
    if grad is None and expected is None:
        return 0.0
    largest = 0.0
    for here, there in layout.pieces:
        own = grad[here.slices] if grad is not None else torch.zeros(())
        true = expected[there.slices] if expected is not None else torch.zeros(())
        if (away := (own.double() - true.double()).abs()).numel():
            largest = max(largest, float(away.max()))
    return largest if isfinite(largest) else float("inf")


def _sum_of_output(output: Any, _: Any) -> tuple[Tensor, int]:
    first = next(x for x in leaves(output).values() if x.is_floating_point() and x.ndim)
    weights = torch.randn(first.shape[-1], generator=torch.Generator().manual_seed(1)).to(first.dtype)
    return (first * weights).sum(), first.shape[0]


def _rows(strategy: Strategy, each: int, microbatch_size: int | None) -> int:
    """For a step of `strategy`, `each` for a rank; of two ranks that have two, one has less: weights are seen then."""
    if strategy.schedule == "dualpipev":
        return (strategy.microbatches or 1) * strategy.dp
    if strategy.pp > 1 or microbatch_size is not None:
        return 2 * strategy.dp
    return each * strategy.dp - (strategy.dp > 1 and each > 1)


def _batch(
    example: Any, rows: int, dtype: torch.dtype, loss: Loss, inputs: Sequence[str] | None, microbatch_size: int | None
) -> Batch:
    held = rows_of(example)
    data = pick(example, [row % held for row in range(rows)], rows=held)

    def of(_: str, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()

    return Batch(with_leaves(data, of), rows, loss, inputs, None if microbatch_size is None else 1)
