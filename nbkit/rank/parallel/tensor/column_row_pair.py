"""The state that column-parallel and row-parallel maps of one pair share while a forward pass runs through them.

Between the first column map's output and the row map's input, a rank works on its heads or features, and on all
positions; before and after, on all features, and with sequence parallelism on its part of the positions. The ambient
extents (nbkit.rank.rng.shard_offsets) follow that, which is why dropout in between still draws what one process draws.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.parallel.module.forward_wrapper import Wrapper, wrap
from nbkit.rank.parallel.tensor.collectives import gather_seq, reduce_from, reduce_scatter_seq
from nbkit.rank.parallel.tensor.sequence_tensor import for_parts
from nbkit.rank.rng.shard_offsets import Present, _present, extent, extent_of, gathered, present, restored
from nbkit.tensor_layout import bounds


class Around(Wrapper):
    """Runs around the forward of `module`. state: becomes its attributes."""

    def __init__(self, module: nn.Module, **state: Any) -> None:
        super().__init__(module.forward)
        self.module = module
        vars(self).update(state)


def put_around(module: nn.Module, kind: type[Around], **state: Any) -> None:
    """Let `kind` run around the forward of `module`, which stays what it is (class, names, hooks)."""
    own = vars(module).get("forward")
    if own is not None and not isinstance(own, Wrapper):
        raise StrategyError(
            f"The forward of a {type(module).__name__} was replaced on the object itself, past its class.",
            numbers="the tensor axis cannot split what it computes",
            hint="subclass it; or tp_plan={'<that module>': 'replicate'}",
        )
    wrap(module, kind(module, **state))


@dataclass(frozen=True)
class Team:
    """The ranks of the tensor axis, and this one's place among them."""

    group: dist.ProcessGroup
    size: int
    index: int

    def bounds(self, total: int) -> tuple[int, int]:
        """First and one past the last of `total` things that this rank holds."""
        return bounds(total, self.size, self.index)

    def __deepcopy__(self, memo: dict[int, Any]) -> Team:
        return self


@dataclass
class Link:
    """One pair. kind, total: what is split between its maps, "head" or "feature", and how many there are; inner:
    features between the maps; sequence: positions are split around it; at_owner: the module around it gathers them."""

    team: Team
    kind: str
    total: int
    inner: int
    sequence: bool = False
    at_owner: bool = False
    _taken: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _outside: Present | None = None
    begun: bool = False
    ended: bool = False

    def reset(self) -> None:
        """A forward begins; the one before may have been broken off between the maps."""
        self._taken.clear()
        self._outside = None

    def take(self, x: Tensor, *, whole: bool = False) -> Tensor:
        """`x`, ready for a column map. The maps of a pair share it: one collective, in each direction.

        whole: it is not split over positions, whatever the sequence does (the memory of a cross-attention).
        """
        for before, after in self._taken:
            if x is before or x is after:
                return after
        if self.sequence and not whole:
            ready = gather_seq(x, self.team.group, 1, positions())
        else:
            ready = for_parts(x, self.team.group)
        self._taken.append((x, ready))
        return ready

    def column_input(self, x: Tensor) -> Tensor:
        """The same, from a column map itself."""
        return x if self.at_owner else self.take(x)

    def before(self) -> AbstractContextManager[None]:
        """Around a column map: LoRA's dropout there sees all positions and all features."""
        return restored(self._inside())

    def begin(self) -> None:
        """A column map is through."""
        self.begun = True
        inside = self._inside((self.kind, self.total))
        self._outside = present() if self._outside is None else self._outside
        _present.set(inside)

    def after(self) -> AbstractContextManager[None]:
        """Around the row map: LoRA's dropout there sees this rank's features, whatever they were made of."""
        return restored(self._inside(("feature", self.inner)))

    def _inside(self, *parts: tuple[str, int]) -> Present:
        with ExitStack() as stack:
            stack.enter_context(restored(present() if self._outside is None else self._outside))
            if self.sequence:
                stack.enter_context(gathered("sequence"))
            for kind, total in parts:
                stack.enter_context(extent(kind, self.team.bounds(total)[0], total))
            return present()

    def end(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        """The row map is through: `partial` summed over the ranks, and the bias once."""
        if self._outside is not None:
            _present.set(self._outside)
        self.reset()
        self.ended = True
        group = self.team.group
        y = reduce_scatter_seq(partial, group, 1) if self.sequence else reduce_from(partial, group)
        return y if bias is None else y + bias.to(y.dtype)


def positions() -> int:
    """How many positions the sequence has of which this rank works on a part."""
    here = extent_of("sequence")
    if here is None:
        raise TrainingError(
            "A block was called outside of the chain whose positions are split over the tensor axis.",
            hint="a strategy without tp; or call the blocks in the model's forward alone",
        )
    return here[1]


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` on every tensor in it; other objects (a cache, a config) as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(part, change) for part in value)
    if type(value) is dict:
        return {key: mapped(part, change) for key, part in value.items()}
    return value


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states among the arguments of a block: the first one, by place or by name."""
    value = args[0] if args else next(iter(kwargs.values()), None)
    if "hidden_states" in kwargs:
        value = kwargs["hidden_states"]
    return value if isinstance(value, Tensor) else None
