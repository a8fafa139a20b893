"""What a user may ask for beside the strategy, and what was found out about the model; the same for every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbkit.errors import StrategyError
from nbkit.rank.parallel.chain import Chain
from nbkit.strategy import Strategy

__all__ = ["Wishes", "need_chain", "need_rows"]


@dataclass(frozen=True)
class Wishes:
    """chain: the blocks of the model, None when none were found; no_chain: why not. costs: of its pieces, in seconds.

    tp_plan: see tensor.choose. checkpoint: recompute the blocks' activations in the backward pass.
    experts: the first mixture of experts, "" without one. coupled: the numbers that show that the loss is no mean over
    rows, "" when it is. cut: a rank cuts its rows into several forwards, whatever the strategy. compile: blocks are
    compiled where that is sound. hidden: (positions, width) of what goes from block to block, None where it is not one
    tensor of that kind.
    """

    chain: Chain | None = None
    no_chain: str = ""
    costs: tuple[float, ...] = ()
    tp_plan: Mapping[str, str] | None = None
    checkpoint: bool = False
    experts: str = ""
    coupled: str = ""
    cut: bool = False
    compile: bool | str = False
    hidden: tuple[int, int] | None = None


def need_chain(wishes: Wishes, strategy: Strategy) -> None:
    """Raises StrategyError where `strategy` needs the model's blocks and none were found."""
    if wishes.chain is None and (strategy.pp > 1 or strategy.cp > 1):
        raise StrategyError(
            f"The model cannot be cut into blocks, which {strategy} needs.",
            numbers=wishes.no_chain or "no example batch was there to find them with",
            hint="stages=['name of the module that begins stage 1', ...]; with prepare(): example=batch",
        )


def need_rows(wishes: Wishes, strategy: Strategy) -> None:
    """Raises StrategyError where `strategy` parts rows that the model or its loss hold together."""
    if wishes.experts and strategy.mesh.size > 1:
        raise StrategyError(
            f"{wishes.experts!r} is a mixture of experts, and those are not split yet.",
            numbers=f"{strategy}: which expert a token takes, and how evenly, depends on the whole batch",
            hint="one rank; or a model with dense layers",
        )
    if wishes.coupled and (strategy.dp > 1 or (strategy.microbatches or 1) > 1 or wishes.cut):
        raise StrategyError(
            f"The loss is no mean over rows, and {strategy} computes it on parts of a batch.",
            numbers=wishes.coupled,
            hint="for masked tokens: return (loss.sum(), mask.sum()); a contrastive loss needs whole batches: "
            "strategy='tp', without microbatch=",
        )
