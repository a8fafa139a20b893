"""What ranks hold of a training's state, and of which step; and the newest step of which they hold everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.planner.reshard.exchange import Plan
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.checkpoint.write_plan import by_name
from nbkit.rank.train.switch.model_edits import Changes
from nbkit.strategy import Strategy
from nbkit.tensor_layout import Layout

Numbers = Mapping[str, Mapping[str, Any]]
"""See job_state.scalars."""


@dataclass(frozen=True)
class Part:
    """Of the state at one step: key -> layout and dtype, and what the optimizer keeps once per parameter."""

    layouts: Mapping[str, Layout]
    kinds: Mapping[str, torch.dtype]
    numbers: Numbers

    @classmethod
    def of(cls, state: JobState, numbers: Numbers) -> Part:
        """What there is of `state`. Equal layouts become one object: pickled once, and told apart by identity."""
        known: dict[Layout, Layout] = {}
        layouts = {key: known.setdefault(layout, layout) for key, (_, layout) in state.items()}
        return cls(layouts, {key: tensor.dtype for key, (tensor, _) in state.items()}, numbers)


@dataclass(frozen=True)
class Holding:
    """What a rank tells the others when ranks were lost; a new one has nothing to tell.

    finished: steps. parts: by step, what it can give of the state then.
    """

    strategy: Strategy | None = None
    changes: Changes | None = None
    finished: int | None = None
    parts: Mapping[int, Part] = field(default_factory=dict)


@dataclass(frozen=True)
class Restoration:
    """The newest step that is whole, who gives of it, and the exchange that brings all ranks there.

    kinds, numbers: of what the optimizer keeps, see job_state.allocate.
    """

    step: int
    sources: Sequence[int]
    plan: Plan
    kinds: Mapping[str, Mapping[str, torch.dtype]]
    numbers: Numbers


def newest(everyone: Sequence[Holding], strategy: Strategy, builder: Builder) -> Restoration:
    """The same on every rank, without a message. Raises TrainingError where no step is whole, naming what is lost."""
    why = ""
    for step in sorted({step for each in everyone for step in each.parts}, reverse=True):
        try:
            return _restoration(step, everyone, strategy, builder)
        except TrainingError as error:
            why = why or f"step {step}: {error.numbers}"
    finished = ", ".join("new" if each.finished is None else str(each.finished) for each in everyone)
    raise TrainingError(
        f"What the ranks that died held of the training under {strategy} is nowhere else.",
        numbers=f"finished steps of ranks 0-{len(everyone) - 1}: {finished}; missing of {why or 'every step'}",
        hint="trainer.load(path) of a checkpoint, after building the Trainer again",
    )


def _restoration(step: int, everyone: Sequence[Holding], strategy: Strategy, builder: Builder) -> Restoration:
    parts = [each.parts.get(step) for each in everyone]
    kinds = {key: kind for part in parts if part is not None for key, kind in part.kinds.items()}
    numbers = {name: dict(values) for part in parts if part is not None for name, values in part.numbers.items()}
    memory = by_name(kinds)
    old: list[dict[str, Layout]] = []
    given: set[str] = set()
    for part in parts:
        layouts = {} if part is None else part.layouts
        # Buffers that a forward pass changed differ between ranks of the same step: the first rank's count.
        buffers = {key for key in layouts if key.startswith("buffer/")}
        old.append({key: layout for key, layout in layouts.items() if key not in buffers & given})
        given |= buffers
    every = builder.plans.kinds(memory)
    plan = Plan.of(old, builder.plans.layouts_by_rank(strategy, every), {key: k.itemsize for key, k in every.items()})
    sources = [rank for rank, part in enumerate(parts) if part is not None]
    return Restoration(step, sources, plan, memory, numbers)
