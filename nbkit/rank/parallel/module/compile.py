"""`compile=True`: compile each block of a model separately, if only the user's code runs inside it.

This is the case on the data axis and in a pipeline. ZeRO 3 gathers a block around its forward, in hooks that are not
compiled. A block that contains smaller gathered units runs uncompiled. So do all blocks if layers contain collectives
of nbkit (tp, cp), if a schedule splits the backward pass, and if blocks run twice (recompute=): see `not_compiled`.

A pass with keyed dropout runs uncompiled, because torch.compile would replace the dropout by its own. The first pass of
a job, which detects dropout, runs uncompiled too. Evaluation and generation run uncompiled, because their shapes vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from nbkit.rank.parallel.job_options import JobOptions
from nbkit.rank.parallel.module.forward_wrapper import Wrapper
from nbkit.rank.rng.keyed_dropout import keyed
from nbkit.schedules import Schedule
from nbkit.strategy import Strategy


def not_compiled(options: JobOptions, strategy: Strategy) -> str:
    """Return why blocks are not compiled under `strategy` although this was requested, or ""."""
    if options.recompute:
        return f"with recompute={options.recompute!r}, which runs blocks twice"
    if strategy.tp > 1 or strategy.cp > 1:
        return f"under {strategy}, whose layers hold collectives, which torch.compile does not trace"
    if strategy.pp > 1:
        name = strategy.schedule or "1f1b"
        if Schedule.of(name, strategy.pp, strategy.microbatches or 1).splits:
            return f"under {strategy}, which runs the backward pass of a block in halves: a compiled one is whole"
    return ""


def compilable(blocks: Sequence[str], options: JobOptions, strategy: Strategy, gathered: Sequence[str]) -> list[str]:
    """Return the `blocks` that are compiled under `strategy`. gathered: the blocks that ZeRO 3 gathers."""
    if not options.compile or not_compiled(options, strategy):
        return []
    return [name for name in blocks if not any(unit.startswith(f"{name}.") for unit in gathered)]


def compile_blocks(module: nn.Module, blocks: Iterable[str], backend: bool | str) -> None:
    """Compile the named blocks for training, with `backend` if it is a name, else with torch.compile's default. In
    place.

    Only `forward` is replaced, so names, hooks and signatures do not change.
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
        # The compiled code refers to this block's weights, so a copy compiles its own code.
        return {**self.__dict__, "_compiled": None}
