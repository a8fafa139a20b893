"""Linear maps and embeddings of which a rank holds a part: put around the forwards that the user wrote.

Column     output features split; input whole (or, under sequence parallelism, a part of the positions)
Row        input features split; output summed over the ranks, then the bias, once
Gathered   output features split and gathered at once: right anywhere, at the price of an all-gather
SplitRow   input features split at once, of an input that has all
Vocabulary rows of an embedding split; ids of other ranks give zero, and the sum is the row: of this rank's positions
           as a PositionShard, where blocks take such
Head       a Column whose output stays in parts as a VocabShard
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import StrategyError
from nbkit.rank.parallel.tensor.collectives import gather_from, reduce_from, reduce_scatter_seq, split_to
from nbkit.rank.parallel.tensor.column_row_pair import Around, Link, Team, first_tensor, mapped
from nbkit.rank.parallel.tensor.plan.linear_types import core, feature_dims
from nbkit.rank.parallel.tensor.sequence_tensor import PositionShard, for_parts
from nbkit.rank.parallel.tensor.sharded_tensor import whole
from nbkit.rank.parallel.tensor.vocab_tensor import VocabShard
from nbkit.rank.rng.shard_offsets import extent, present, restored
from nbkit.rank.torch_private import assert_async


class Column(Around):
    """Around a linear map of which this rank holds some output features."""

    _link: Link

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


class Row(Around):
    """Around a linear map of which this rank holds some input features. Its core is a RowCore."""

    _link: Link

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # What LoRA adds is a part of the sum too.
        with self._link.after():
            partial = self.plain(x, *args, **kwargs)
        return self._link.end(partial, core(self.module).bias)


class Gathered(Around):
    """Around a linear map of which this rank holds some output features, for readers who expect all of them."""

    _team: Team
    _total: int

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self.plain(for_parts(x, self._team.group), *args, **kwargs)
        return gather_from(y, self._team.group, -1, self._total)


class SplitRow(Around):
    """Around a linear map of which this rank holds some input features, for an input that has all of them."""

    _team: Team

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

    _team: Team
    _total: int

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self.plain(for_parts(x, self._team.group), *args, **kwargs)
        return VocabShard(y, self._team.group, self._total)


class Vocabulary(Around):
    """Around an embedding of which this rank holds some rows."""

    _team: Team
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

    _links: tuple[Link, ...]
    _attention: Link | None
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
    link: Link, takes: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
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
