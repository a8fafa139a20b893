"""What a user may ask for beside the strategy, and what was found out about the model; the same for every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbkit.errors import StrategyError
from nbkit.rank.parallel.chain import Chain
from nbkit.strategy import Strategy

__all__ = ["Wishes", "need_chain"]


@dataclass(frozen=True)
class Wishes:
    """chain: the blocks of the model, None when none were found; no_chain: why not. costs: of its pieces, in seconds.

    tp_plan: see tensor.choose. checkpoint: recompute the blocks' activations in the backward pass.
    """

    chain: Chain | None = None
    no_chain: str = ""
    costs: tuple[float, ...] = ()
    tp_plan: Mapping[str, str] | None = None
    checkpoint: bool = False


def need_chain(wishes: Wishes, strategy: Strategy) -> None:
    """Raises StrategyError where `strategy` needs the model's blocks and none were found."""
    if wishes.chain is None and (strategy.pp > 1 or strategy.cp > 1):
        raise StrategyError(
            f"The model cannot be cut into blocks, which {strategy} needs.",
            numbers=wishes.no_chain or "no example batch was there to find them with",
            hint="stages=['name of the module that begins stage 1', ...]; with prepare(): example=batch",
        )
