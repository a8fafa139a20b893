"""Linear maps and embeddings of which a rank holds a part: put around the forwards that the user wrote.

Column     output features split; input whole (or, under sequence parallelism, a part of the positions)
Row        input features split; output summed over the ranks, then the bias, once
Gathered   output features split and gathered at once: right anywhere, at the price of an all-gather
SplitRow   input features split at once, of an input that has all
Vocabulary rows of an embedding split; ids of other ranks give zero, and the sum is the row: of this rank's positions
           as a PositionShard, where blocks take such
Head       a ColumnParallel whose output stays in parts as a VocabShard

The state that column-parallel and row-parallel maps of one pair share while a forward pass runs through them.

Between the first column map's output and the row map's input, a rank works on its heads or features, and on all
positions; before and after, on all features, and with sequence parallelism on its part of the positions. The ambient
extents (nbkit.rank.rng.draw_plan) follow that, which is why dropout in between still draws what one process draws.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.parallel.module.forward_wrapper import Wrapper, wrap
from nbkit.rank.parallel.tensor.collectives import gather_from, gather_seq, reduce_from, reduce_scatter_seq, split_to
from nbkit.rank.parallel.tensor.plan.linear_types import core, feature_dims
from nbkit.rank.parallel.tensor.sharded_tensor import PositionShard, VocabShard, for_parts, whole
from nbkit.rank.rng.draw_plan import Present, _present, extent, extent_of, gathered, present, restored
from nbkit.rank.torch_private import assert_async
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
class TpGroup:
    """The ranks of the tensor axis, and this one's place among them."""

    group: dist.ProcessGroup
    size: int
    index: int

    def bounds(self, total: int) -> tuple[int, int]:
        """First and one past the last of `total` things that this rank holds."""
        return bounds(total, self.size, self.index)

    def __deepcopy__(self, memo: dict[int, Any]) -> TpGroup:
        return self


@dataclass
class PairState:
    """One pair. kind, total: what is split between its maps, "head" or "feature", and how many there are; inner:
    features between the maps; sequence: positions are split around it; at_owner: the module around it gathers them."""

    team: TpGroup
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
        """Return the same, from a column map itself."""
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
    """Return how many positions the sequence has of which this rank works on a part."""
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
    """Return the hidden states among the arguments of a block: the first one, by place or by name."""
    value = args[0] if args else next(iter(kwargs.values()), None)
    if "hidden_states" in kwargs:
        value = kwargs["hidden_states"]
    return value if isinstance(value, Tensor) else None


class ColumnParallel(Around):
    """Around a linear map of which this rank holds some output features."""

    _link: PairState

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = self._link.column_input(x)
        with self._link.before():
            y = self.plain(x, *args, **kwargs)
        self._link.begin()
        return y


class RowCore(Around):
    """A linear map without its bias."""

    def __call__(self, x: Tensor) -> Tensor:
        itself: Any = self.module
        weight = itself.weight if feature_dims(itself)[0] == 1 else itself.weight.t()
        return F.linear(x, weight)


class RowParallel(Around):
    """Around a linear map of which this rank holds some input features. Its core is a RowCore."""

    _link: PairState

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # What LoRA adds is a part of the sum too.
        with self._link.after():
            partial = self.plain(x, *args, **kwargs)
        return self._link.end(partial, core(self.module).bias)


class GatheredOutputs(Around):
    """Around a linear map of which this rank holds some output features, for readers who expect all of them."""

    _team: TpGroup
    _total: int

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self.plain(for_parts(x, self._team.group), *args, **kwargs)
        return gather_from(y, self._team.group, -1, self._total)


class SplitRow(Around):
    """Around a linear map of which this rank holds some input features, for an input that has all of them."""

    _team: TpGroup

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        total = x.shape[-1]
        x = whole(x)
        with extent("feature", self._team.bounds(total)[0], total):
            partial = self.plain(split_to(x, self._team.group, -1), *args, **kwargs)
        y = reduce_from(partial, self._team.group)
        bias = core(self.module).bias
        return y if bias is None else y + bias.to(y.dtype)


class Head(Around):
    """Around the map to the vocabulary."""

    _team: TpGroup
    _total: int

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self.plain(for_parts(x, self._team.group), *args, **kwargs)
        return VocabShard(y, self._team.group, self._total)


class Vocabulary(Around):
    """Around an embedding of which this rank holds some rows."""

    _team: TpGroup
    _total: int
    _in_sequence: bool

    def __call__(self, ids: Tensor) -> Tensor:
        itself: Any = self.module
        start, stop = self._team.bounds(self._total)
        assert_async(((ids >= 0) & (ids < self._total)).all(), "an id lies outside of the vocabulary")
        elsewhere = (ids < start) | (ids >= stop)
        padding = itself.padding_idx
        local = padding - start if padding is not None and start <= padding < stop else None
        rows = F.embedding((ids - start).masked_fill(elsewhere, 0), itself.weight, padding_idx=local)
        rows = rows.masked_fill(elsewhere[..., None], 0)
        if self._in_sequence and ids.ndim == 2:
            return PositionShard(reduce_scatter_seq(rows, self._team.group, 1), self._team.group, ids.shape[1])
        return reduce_from(rows, self._team.group)


class Owner(Around):
    """Around the module that holds a pair: what the pair keeps during a forward ends with it."""

    _links: tuple[PairState, ...]
    _attention: PairState | None
    _takes: bool
    _sizes: Callable[[], AbstractContextManager[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for link in self._links:
            link.reset()
        with restored(present()), self._sizes():
            if self._attention is not None:
                args, kwargs = _taken(self._attention, self._takes, args, kwargs)
            out = self.plain(*args, **kwargs)
        if any(link.begun != link.ended for link in self._links):
            raise StrategyError(
                f"A {type(self.module).__name__} uses the weight of a linear map without calling the map.",
                numbers="of a pair split over the tensor axis, only one side was called",
                hint="tp_plan={'<its maps>': 'replicate'}; or call the modules",
            )
        return out


def _taken(
    link: PairState, takes: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an attention, each heads' share of whose gradients has to be summed: learned masks, if it takes any.

    The hidden states, and a memory, are left to the column maps, which know that they project; only where positions
    are split they are gathered here, before the attention reads their shape.
    """
    hidden = first_tensor(args, kwargs)

    def change(x: Tensor) -> Tensor:
        if x is hidden:
            return link.take(x) if link.at_owner else x
        return link.take(x, whole=True) if x.requires_grad and (takes or link.at_owner) else x

    return tuple(mapped(arg, change) for arg in args), {key: mapped(value, change) for key, value in kwargs.items()}
