"""What ranks hold of a training's state, and of which step; and the newest step of which they hold everything."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbkit.errors import TrainingError
from nbkit.planner.reshard.exchange import Plan
from nbkit.rank.train.builder import Builder
from nbkit.rank.train.checkpoint.job_state import JobState
from nbkit.rank.train.checkpoint.write_plan import by_name
from nbkit.rank.train.config import LastCheckpoint
from nbkit.rank.train.replace.backup import Generation
from nbkit.rank.train.switch.model_edits import Changes
from nbkit.rank.train.switch.optimizer_reports import unpacked
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

    @classmethod
    def kept(cls, generation: Generation, names: Sequence[str]) -> Part:
        """What there is of a backup. names: of the model's parameters."""
        contents, numbers = generation.contents, unpacked([pickle.loads(generation.about)], names).numbers
        return cls(contents.layouts, contents.kinds, numbers)


@dataclass(frozen=True)
class Holding:
    """What a rank tells the others when ranks were lost; a new one has nothing to tell.

    finished: steps. parts: by step, what it can give of the state then. wards: what it keeps of rank `ward`. asked:
    see Backups. saved: the last checkpoint.
    """

    strategy: Strategy | None = None
    changes: Changes | None = None
    finished: int | None = None
    parts: Mapping[int, Part] = field(default_factory=dict)
    wards: Mapping[int, Part] = field(default_factory=dict)
    ward: int | None = None
    asked: int | None = 0
    saved: LastCheckpoint | None = None


@dataclass(frozen=True)
class Restoration:
    """The newest step that is whole, who gives of it, and the exchange that brings all ranks there.

    given: by rank, what it gives; None where that is nothing. kinds, numbers: of what the optimizer keeps, see
    job_state.allocate.
    """

    step: int
    given: Sequence[Part | None]
    plan: Plan
    kinds: Mapping[str, Mapping[str, torch.dtype]]
    numbers: Numbers

    @property
    def sources(self) -> list[int]:
        """The ranks that give."""
        return [rank for rank, part in enumerate(self.given) if part is not None]


def newest(everyone: Sequence[Holding], strategy: Strategy, builder: Builder) -> Restoration:
    """Return the newest step that is whole. The same on every rank, without a message.

    Raises TrainingError where no step is whole, naming what is lost.
    """
    # What a buddy kept goes to the new rank itself, which then gives as it would have done.
    kept = {each.ward: each.wards for each in everyone if each.ward is not None}
    why = lacking = ""
    held = {step for each in everyone for step in each.parts}
    for step in sorted(held, reverse=True):
        parts = [each.parts.get(step) for each in everyone]
        more = [kept.get(rank, {}).get(step) if each.strategy is None else None for rank, each in enumerate(everyone)]
        for those in (parts, [own or its for own, its in zip(parts, more, strict=True)]):
            try:
                return _restoration(step, those, strategy, builder)
            except TrainingError as error:
                lacking = str(error.numbers)
        why = why or f"step {step}: {lacking}"
    finished = ", ".join("new" if each.finished is None else str(each.finished) for each in everyone)
    path = next((each.saved.path for each in everyone if each.saved is not None and each.saved.path), "path")
    unkept = "" if any(each.asked != 0 for each in everyone) else "; backup_every=1 keeps it with another rank"
    raise TrainingError(
        f"What the ranks that died held of the training under {strategy} is nowhere else.",
        numbers=f"finished steps of ranks 0-{len(everyone) - 1}: {finished}; missing of {why or 'every step'}",
        hint=f"build the Trainer again, and trainer.load({str(path)!r}){unkept}",
    )


def _restoration(step: int, parts: Sequence[Part | None], strategy: Strategy, builder: Builder) -> Restoration:
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
    return Restoration(step, parts, plan, memory, numbers)
