"""Split linear maps and embeddings: wrappers around the forward methods of the user's modules.

ColumnParallel   output features are split; the input is whole (with sequence parallelism: a part of the positions)
RowParallel      input features are split; the output is summed over the ranks, then the bias is added once
GatheredOutputs  output features are split and gathered at once: correct everywhere, but costs an all-gather
SplitRow         input features are split, and the wrapper takes its part of an input that has all features
Vocabulary       rows of an embedding are split; ids of other ranks give zero, and the sum over the ranks is the row;
                 with sequence parallelism the result is a PositionShard with this rank's positions
Head             output features are split and stay split, as a VocabShard

`PairState` is the state that the maps of one pair share during a forward pass. Between the output of the first column
map and the input of the row map, a rank works on its heads or features and on all positions. Before and after, it works
on all features and, with sequence parallelism, on its part of the positions. The ambient extents
(nbkit.rank.rng.draw_plan) follow this, so that dropout in between draws the same numbers as in one process.
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
from nbkit.rank.parallel.module.kept_outputs import used_up
from nbkit.rank.parallel.tensor.chunked_sum import chunked_sum
from nbkit.rank.parallel.tensor.collectives import gather_from, gather_seq, reduce_from, reduce_scatter_seq, split_to
from nbkit.rank.parallel.tensor.plan.linear_types import core, feature_dims
from nbkit.rank.parallel.tensor.sharded_tensor import PositionShard, VocabShard, for_parts, whole
from nbkit.rank.rng.draw_plan import Present, _present, extent, extent_of, gathered, present, restored
from nbkit.rank.torch_private import assert_async
from nbkit.tensor_layout import bounds


class Around(Wrapper):
    """A wrapper around the forward of `module`. state: attributes of the wrapper."""

    def __init__(self, module: nn.Module, **state: Any) -> None:
        super().__init__(module.forward)
        self.module = module
        vars(self).update(state)


def put_around(module: nn.Module, kind: type[Around], **state: Any) -> None:
    """Wrap the forward of `module` in `kind`. The module keeps its class, names and hooks."""
    own = vars(module).get("forward")
    if own is not None and not isinstance(own, Wrapper):
        raise StrategyError(
            f"The forward of a {type(module).__name__} was replaced on the object, not in its class.",
            numbers="tensor parallelism cannot split such a module",
            hint="subclass it; or hints=nbkit.ModelHints(tp_plan={'<that module>': 'replicate'})",
        )
    wrap(module, kind(module, **state))


@dataclass(frozen=True)
class TpGroup:
    """The ranks of the tensor axis, and the position of this rank among them."""

    group: dist.ProcessGroup
    size: int
    index: int

    def bounds(self, total: int) -> tuple[int, int]:
        """Return (start, stop) of this rank's share of `total` items."""
        return bounds(total, self.size, self.index)

    def __deepcopy__(self, memo: dict[int, Any]) -> TpGroup:
        return self


@dataclass
class PairState:
    """State of one pair of maps.

    kind: what is split between the maps, "head" or "feature". total: number of heads or features. inner: number of
    features between the maps. sequence: True if positions are split around the pair. at_owner: True if the module
    around the pair gathers them. chunks: the pieces in which the output of the row map is summed.
    """

    team: TpGroup
    kind: str
    total: int
    inner: int
    sequence: bool = False
    at_owner: bool = False
    chunks: int = 1
    _taken: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _outside: Present | None = None
    begun: bool = False
    ended: bool = False

    def reset(self) -> None:
        """Reset at the start of a forward pass. The previous one may have stopped between the maps."""
        self._taken.clear()
        self._outside = None

    def take(self, x: Tensor, *, whole: bool = False) -> Tensor:
        """Return `x`, prepared for a column map. The maps of a pair share it, so there is one collective per direction.

        whole: True if `x` has all positions even with sequence parallelism, like the memory of a cross-attention.
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
        """Return the input of a column map, prepared unless the owner has done so."""
        return x if self.at_owner else self.take(x)

    def before(self) -> AbstractContextManager[None]:
        """Return a context for a column map, in which LoRA dropout applies to all positions and all features."""
        return restored(self._inside())

    def begin(self) -> None:
        """Note that a column map has run."""
        self.begun = True
        inside = self._inside((self.kind, self.total))
        self._outside = present() if self._outside is None else self._outside
        _present.set(inside)

    def after(self) -> AbstractContextManager[None]:
        """Return a context for the row map, in which LoRA dropout applies to this rank's features."""
        return restored(self._inside(("feature", self.inner)))

    def _inside(self, *parts: tuple[str, int]) -> Present:
        with ExitStack() as stack:
            stack.enter_context(restored(present() if self._outside is None else self._outside))
            if self.sequence:
                stack.enter_context(gathered("sequence"))
            for kind, total in parts:
                stack.enter_context(extent(kind, self.team.bounds(total)[0], total))
            return present()

    def leave(self) -> None:
        """Note that the row map has run."""
        if self._outside is not None:
            _present.set(self._outside)
        self.reset()
        self.ended = True

    def end(self, partial: Tensor, bias: Tensor | None) -> Tensor:
        """Note that the row map has run. Return the sum of `partial` over the ranks, plus the bias once."""
        self.leave()
        used_up(partial)
        group = self.team.group
        return _with(bias, reduce_scatter_seq(partial, group, 1) if self.sequence else reduce_from(partial, group))

    def end_in_pieces(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute the row map and its sum piece by piece, as `end` does at once. Return None if this is not possible.

        x: the input of the row map. weight: (output features, input features of this rank).
        """
        y = chunked_sum(x, weight, self.team.group, self.chunks, sequence=self.sequence)
        if y is None:
            return None
        self.leave()
        return _with(bias, y)


def _with(bias: Tensor | None, y: Tensor) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def positions() -> int:
    """Return the number of positions of the whole sequence. This rank works on a part of them."""
    here = extent_of("sequence")
    if here is None:
        raise TrainingError(
            "A block was called outside of the chain of blocks, whose positions are split over the tensor axis.",
            hint="a strategy without tp; or call the blocks only in the model's forward",
        )
    return here[1]


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `change` applied to every tensor in it. Other objects (a cache, a config) stay the same."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(part, change) for part in value)
    if type(value) is dict:
        return {key: mapped(part, change) for key, part in value.items()}
    return value


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the hidden states of a block: the argument `hidden_states`, or else the first one if it is a tensor."""
    value = args[0] if args else next(iter(kwargs.values()), None)
    if "hidden_states" in kwargs:
        value = kwargs["hidden_states"]
    return value if isinstance(value, Tensor) else None


class ColumnParallel(Around):
    """Wrapper of a linear map. This rank holds some of its output features."""

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
        return F.linear(x, self.weight)

    @property
    def weight(self) -> Tensor:
        """Return the weight (output features, input features of this rank)."""
        itself: Any = self.module
        return itself.weight if feature_dims(itself)[0] == 1 else itself.weight.t()  # type: ignore[no-any-return]


class RowParallel(Around):
    """Wrapper of a linear map. This rank holds some of its input features. Its core is a RowCore."""

    _link: PairState

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        link, plain, bias = self._link, self.plain, core(self.module).bias
        if link.chunks > 1 and isinstance(plain, RowCore) and not (args or kwargs):  # without LoRA
            if (y := link.end_in_pieces(x, plain.weight, bias)) is not None:
                return y
        # The output of LoRA is a part of the sum too.
        with link.after():
            partial = plain(x, *args, **kwargs)
        return link.end(partial, bias)


class GatheredOutputs(Around):
    """Wrapper of a linear map for code that expects all output features. This rank holds some of them."""

    _team: TpGroup
    _total: int

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.of_ready(self.ready(x), *args, **kwargs)

    def ready(self, x: Tensor) -> Tensor:
        """Return all positions of `x`, prepared for the map."""
        return for_parts(x, self._team.group)

    def of_ready(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs for an input from `ready`, or for a part of it."""
        return gather_from(self.plain(x, *args, **kwargs), self._team.group, -1, self._total)


class SplitRow(Around):
    """Wrapper of a linear map for an input with all features. This rank holds some of the input features."""

    _team: TpGroup

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        total = x.shape[-1]
        x = whole(x)
        with extent("feature", self._team.bounds(total)[0], total):
            partial = self.plain(split_to(x, self._team.group, -1), *args, **kwargs)
        return _with(core(self.module).bias, reduce_from(partial, self._team.group))


class Head(Around):
    """Wrapper of the map to the vocabulary."""

    _team: TpGroup
    _total: int

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.of_ready(self.ready(x), *args, **kwargs)

    def ready(self, x: Tensor) -> Tensor:
        """Return all positions of `x`, prepared for the map."""
        return for_parts(x, self._team.group)

    def of_ready(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs for an input from `ready`, or for a part of it."""
        return VocabShard(self.plain(x, *args, **kwargs), self._team.group, self._total)


class Vocabulary(Around):
    """Wrapper of an embedding. This rank holds some of its rows."""

    _team: TpGroup
    _total: int
    _in_sequence: bool

    def __call__(self, ids: Tensor) -> Tensor:
        itself: Any = self.module
        start, stop = self._team.bounds(self._total)
        assert_async(((ids >= 0) & (ids < self._total)).all(), "an id is outside of the vocabulary")
        elsewhere = (ids < start) | (ids >= stop)
        padding = itself.padding_idx
        local = padding - start if padding is not None and start <= padding < stop else None
        rows = F.embedding((ids - start).masked_fill(elsewhere, 0), itself.weight, padding_idx=local)
        rows = rows.masked_fill(elsewhere[..., None], 0)
        if self._in_sequence and ids.ndim == 2:
            return PositionShard(reduce_scatter_seq(rows, self._team.group, 1), self._team.group, ids.shape[1])
        return reduce_from(rows, self._team.group)


class Owner(Around):
    """Wrapper of the module that contains a pair. It resets the state of the pair in each forward pass."""

    _links: tuple[PairState, ...]
    _attention: PairState | None
    _takes: bool
    _sizes: Callable[[], AbstractContextManager[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for link in self._links:
            link.reset()
        try:
            with restored(present()), self._sizes():
                if self._attention is not None:
                    args, kwargs = _taken(self._attention, self._takes, args, kwargs)
                out = self.plain(*args, **kwargs)
        except BaseException:
            # Recomputation stops early in this way. The tensors of the pair hold the activations of the whole block.
            for link in self._links:
                link.reset()
            raise
        if any(link.begun != link.ended for link in self._links):
            raise StrategyError(
                f"A {type(self.module).__name__} uses the weight of a linear layer without calling the layer.",
                numbers="only one layer of a pair was called, and the pair is split over the tensor axis",
                hint="hints=nbkit.ModelHints(tp_plan={'<its layers>': 'replicate'}); or call the layers",
            )
        return out


def _taken(
    link: PairState, takes: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an attention. Learned masks are wrapped, because their gradients are sums over the heads.

    The column maps prepare the hidden states and a memory, which they project. Only if positions are split, they are
    gathered here, because the attention reads their shape.
    """
    hidden = first_tensor(args, kwargs)

    def change(x: Tensor) -> Tensor:
        if x is hidden:
            return link.take(x) if link.at_owner else x
        return link.take(x, whole=True) if x.requires_grad and (takes or link.at_owner) else x

    return tuple(mapped(arg, change) for arg in args), {key: mapped(value, change) for key, value in kwargs.items()}
