"""`compile=True`: each block of a model compiled by itself, where what runs inside of it is the user's code alone.

So it is on the data axis with whole parameters (zero 0 to 2). Not where blocks hold collectives of ours (tp, cp), are
gathered and let go (zero 3), stand still for stages (pp) or run twice (recompute=True): there they run as they are.
Nor while dropout is keyed, which torch.compile would replace by its own: such a pass, and the first one of a job, which
finds out whether there is any, runs as it is. So do evaluation and generation, whose shapes vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from nbkit.rank.parallel.module.forward_wrapper import Wrapper
from nbkit.rank.parallel.options import Options
from nbkit.rank.rng.keyed_dropout import keyed
from nbkit.strategy import Strategy


def compiles(options: Options, strategy: Strategy) -> bool:
    """Whether `compile=` was asked for and is sound."""
    return bool(options.compile) and not options.recompute and strategy.mesh.size == strategy.dp and strategy.zero < 3


def compile_blocks(module: nn.Module, blocks: Iterable[str], backend: bool | str) -> None:
    """Compile the blocks of these names when they train, with the backend named, or torch.compile's own. In place.

    Only `forward` is replaced, so names, hooks and signatures stay.
    """
    chosen = backend if isinstance(backend, str) else "inductor"
    for name in blocks:
        block = module.get_submodule(name)
        block.forward = _Compiled(block, chosen)  # type: ignore[method-assign]


class _Compiled(Wrapper):
    def __init__(self, block: nn.Module, backend: str) -> None:
        super().__init__(block.forward)
        self.block, self.backend = block, backend
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()) or keyed():
            return self.plain(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self.plain, backend=self.backend)
        return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # What is compiled is of this block's weights: a copy compiles its own.
        return {**self.__dict__, "_compiled": None}
