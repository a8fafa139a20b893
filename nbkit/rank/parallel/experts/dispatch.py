"""Send tokens to the ranks that hold their experts, and the outputs back.

A layer makes one dispatch and one combine, each an all-to-all of exactly the routed rows. Before that, ranks tell each
other the number of rows for each expert. The backward pass makes the same two exchanges in the other direction. A
rank has T tokens, each token goes to k experts, and a token consists of W numbers of b bytes. If the router is
balanced, each of n ranks then sends (n - 1) / n T k W b bytes in each exchange.

Every rank makes every exchange, whatever is routed to it. So no rank waits for a rank without tokens. A rank that runs
no forward, because it has no rows, calls `absent` for each layer instead.

An expert that no token chose is not called, and has no gradient. If experts are stacked, its part of the gradient is
zero. Both are as in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.device import accelerator
from nbkit.rank.loss.output_tensors import with_leaves
from nbkit.rank.parallel.experts.find import RoutedLayer, called_with, routing_of
from nbkit.rank.parallel.module.forward_wrapper import Wrapper, in_backward, recomputing, wrap
from nbkit.rank.parallel.module.kept_outputs import kept
from nbkit.rank.rng.keyed_dropout import again
from nbkit.rank.telemetry.phases import clock

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NONE, _OFF = -1, len(_DTYPES)
_NEGATIVE = (_OFF + 1) ** 2
"""A rank sends this if its router chose an expert with a negative number. It is larger than any dtype's number."""


@dataclass(frozen=True)
class RowCounts:
    """The numbers of rows in an exchange, as seen by one rank.

    here: its rows for each expert, in the order in which they are sent. there: for each rank, the rows for each expert
    of this rank. Both have -1 for an expert that is not called. sent, received: rows to and from each rank. arriving:
    `there` as a flat tensor on the device, with 0 for -1. dtype, autocast: the index of the rows' dtype, and of the
    autocast dtype. absent: True if the rank makes no forward.
    """

    here: list[int]
    there: list[list[int]]
    sent: list[int]
    received: list[int]
    arriving: Tensor
    dtype: int
    autocast: int
    absent: bool


Compute = Callable[[Tensor, RowCounts], Tensor]
"""Called with the rows that arrived, by rank and then by expert. Returns the output of each row, in the same order."""


def _nothing(rows: Tensor, row_counts: RowCounts) -> Tensor:
    raise TrainingError("The model of an earlier strategy was called.", hint="trainer.model, as it is now")


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows. Returns (the received rows, a token).

    after: the token of the previous exchange, or another scalar that requires a gradient. It makes every rank run the
    backward pass of the exchange, even if no row needs a gradient. It is also saved for backward: torch recomputes a
    block when a saved tensor is read, and runs until the last saved tensor. So all ranks recompute, up to the last
    exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, after: Tensor, sent: list[int], received: list[int], group: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        ctx.save_for_backward(after)
        return _all_to_all(rows, sent, received, group), torch.zeros_like(after)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None, None


class _Tied(torch.autograd.Function):
    """Passes a tensor on, and makes a backward pass through it also run the exchange of `token`."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, token: Tensor) -> Tensor:
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None


class _Taken(torch.autograd.Function):
    """Returns tokens[order // times]: a row for each slot. A token has `times` slots.

    Its backward pass adds the gradients of a token's slots along a dim of their own, so in the same order in every run.
    On a GPU, index_add does not promise an order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, times: int) -> Tensor:
        ctx.count, ctx.times = len(tokens), times
        ctx.save_for_backward(order)
        return tokens.index_select(0, order // times)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        slots = grad.new_zeros(ctx.count * ctx.times, grad.shape[1]).index_copy_(0, order, grad)
        return slots.view(ctx.count, ctx.times, grad.shape[1]).sum(1), None, None


@kept
def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


@dataclass
class SpreadLayer:
    """The experts of a layer, spread over the ranks of a group, as seen by rank `index`.

    held: the numbers of the experts on each rank, ascending. Rows are sent in this order, by rank and then by expert.
    Since the start of the step: forwards: the number of forwards with gradients on this rank. routed: the tokens
    received for each expert of this rank in forwards with gradients. times: when its experts began and ended to compute
    these, by the step clock.
    """

    layer: RoutedLayer
    group: dist.ProcessGroup | None
    held: Sequence[Sequence[int]]
    index: int
    compute: Compute
    forwards: int = 0
    routed: Counter[int] = field(default_factory=Counter)
    times: list[tuple[Any, Any]] = field(default_factory=list)
    _given: dict[tuple[int, int], torch.dtype] = field(default_factory=dict, init=False)
    _left: list[Tensor] = field(default_factory=list, init=False)

    @cached_property
    def order(self) -> list[int]:
        """Return the numbers of all experts in the order in which their rows are sent."""
        return [number for theirs in self.held for number in theirs]

    @kept
    def tell(self, counts: Tensor, like: Tensor | None, negative: Tensor | None = None) -> RowCounts:
        """Tell each rank the number of rows for its experts. All ranks of the group must call it.

        counts: this rank's rows for each expert, int64, in the order in which they are sent; -1 for an expert that is
        not called. like: a tensor with the dtype of the rows; None if this rank makes no forward. negative: a bool
        scalar, true if a token of this rank chose an expert with a negative number. Raises TrainingError on all ranks
        of the group if it is true on one.
        """
        kind = _NONE  # an absent rank does not know the dtypes
        if like is not None:
            if in_backward() and not recomputing():
                raise StrategyError(
                    f"The model recomputes {self.layer.name!r} in the backward pass by itself, and experts on other "
                    "ranks cannot take part.",
                    numbers=f"{len(self.held)} ranks share its experts",
                    hint="turn off this recomputation; compute=nbkit.Compute(recompute=True) does the same",
                )
            on = torch.is_autocast_enabled(like.device.type)
            cast = _DTYPES.index(torch.get_autocast_dtype(like.device.type)) if on else _OFF
            kind = _DTYPES.index(like.dtype) * (_OFF + 1) + cast
        sizes, mine = [len(theirs) for theirs in self.held], len(self.held[self.index])
        last = counts.new_full((1,), kind)
        if negative is not None:
            last.masked_fill_(negative, _NEGATIVE)
        given = torch.cat([part for own in counts.split(sizes) for part in (own, last)])
        heard = counts.new_empty(len(sizes), mine + 1)
        into = [mine + 1] * len(sizes)
        dist.all_to_all_single(heard.view(-1), given, into, [size + 1 for size in sizes], group=self.group)
        # For stacked experts, this is the only time that the host waits for the device.
        numbers = torch.cat([counts, heard.view(-1)]).tolist()
        here, rest = numbers[: len(counts)], numbers[len(counts) :]
        every = [rest[at : at + mine + 1] for at in range(0, len(rest), mine + 1)]
        # If no rank of the group has rows, any dtype will do.
        kind = max(each.pop() for each in every)
        if kind == _NEGATIVE:
            raise TrainingError(
                f"The router of {self.layer.name!r} chose an expert with a negative number.",
                numbers=f"the experts have the numbers 0 to {self.layer.count - 1}",
                hint=f"give a token that no expert computes the number {self.layer.count}; or the strategy without ep",
            )
        dtype, autocast = divmod(kind, _OFF + 1) if kind != _NONE else (_DTYPES.index(torch.get_default_dtype()), _OFF)
        ends = [*accumulate(sizes)]
        sent = [_total(here[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        received, arriving = [_total(each) for each in every], heard[:, :mine].clamp(min=0).flatten()
        return RowCounts(here, every, sent, received, arriving, dtype, autocast, like is None)

    def __call__(self, rows: Tensor, row_counts: RowCounts) -> tuple[Tensor, Tensor]:
        """Return (the experts' outputs for `rows`, a token; see `tied`). All ranks of the group must call it.

        rows: [sum(row_counts.sent), width], in the order in which they are sent. row_counts: the result of `tell`.
        """
        self.forwards += torch.is_grad_enabled() and not in_backward()
        return self._exchanged(rows, row_counts)

    def absent(self, device: torch.device, *, backward: bool) -> None:
        """Take part in a forward that this rank does not make. backward: True if `absent_backward` follows."""
        with torch.set_grad_enabled(backward):
            token = self._exchange_nothing(device)
        if backward:
            self._left.append(token)

    def absent_again(self, device: torch.device) -> None:
        """Take part in the recomputation of a forward that this rank has not made."""
        with torch.no_grad():
            self._exchange_nothing(device)

    def absent_backward(self) -> None:
        """Take part in the backward pass of the last `absent`."""
        self._left.pop().backward()

    def let_go(self) -> None:
        """Release the module, because another strategy is in force. No forward may follow."""
        self.begin_again()
        self.compute = _nothing

    def begin_again(self) -> None:
        """Forget all running operations."""
        self._left.clear()
        self.forwards = 0
        self.routed.clear()
        self.times.clear()

    def _exchange_nothing(self, device: torch.device) -> Tensor:
        """Take part in an exchange without rows of this rank. Return its token."""
        row_counts = self.tell(torch.full((self.layer.count,), _NONE, device=device), None)
        return self._exchanged(torch.empty(0, self.layer.width, device=device), row_counts)[1]

    def _exchanged(self, rows: Tensor, row_counts: RowCounts) -> tuple[Tensor, Tensor]:
        records = torch.is_grad_enabled() and not in_backward()
        if records:
            of_experts = zip(*row_counts.there, strict=True)
            self.routed.update({n: _total(counts) for n, counts in zip(self.held[self.index], of_experts, strict=True)})
        rows = rows.to(_DTYPES[row_counts.dtype])
        start = torch.zeros((), device=rows.device, requires_grad=torch.is_grad_enabled())
        arrived, token = _Exchange.apply(rows, start, row_counts.sent, row_counts.received, self.group)
        called = any(count != _NONE for counts in row_counts.there for count in counts)
        with self._as_others(row_counts.autocast, rows.device) if row_counts.absent else nullcontext():
            began = clock.stamp()
            computed = self.compute(arrived, row_counts) if called else rows.new_empty(0, self.layer.given)
        if began is not None and records:
            self.times.append((began, clock.stamp()))
        own = computed.dtype if called else None
        computed = computed.to(self._dtype_given((row_counts.dtype, row_counts.autocast), own, rows.device))
        returned, token = _Exchange.apply(computed, token, row_counts.received, row_counts.sent, self.group)
        return returned, token

    def _as_others(self, autocast: int, device: torch.device) -> Any:
        on = autocast < _OFF
        return torch.autocast(device.type, _DTYPES[autocast] if on else None, enabled=on)

    @kept
    def _dtype_given(self, kinds: tuple[int, int], own: torch.dtype | None, device: torch.device) -> torch.dtype:
        """Return the dtype of the outputs, the same on all ranks. A collective until it is known for these `kinds`."""
        if kinds not in self._given:
            number = torch.tensor(_NONE if own is None else _DTYPES.index(own), device=device)
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group)
            if int(number) == _NONE:
                return _DTYPES[kinds[0]]
            self._given[kinds] = _DTYPES[int(number)]
        return self._given[kinds]


def _total(counts: Iterable[int]) -> int:
    return sum(max(count, 0) for count in counts)


def tied(output: Any, token: Tensor) -> Any:
    """Return the output of a layer, changed so that its backward pass also runs the exchange of `token`."""
    if not torch.is_grad_enabled():
        return output
    done = False

    def of(_: str, tensor: Tensor) -> Tensor:
        nonlocal done
        if done or not tensor.is_floating_point():
            return tensor
        done = True
        passed: Tensor = _Tied.apply(tensor, token)
        return passed

    return with_leaves(output, of)


class _Stacked(Wrapper):
    """Replaces the forward of stacked experts. spread: the SpreadLayer, once it exists."""

    def __init__(self, module: nn.Module, layer: RoutedLayer) -> None:
        super().__init__(module.forward)
        self.module, self.layer = module, layer
        self.spread: SpreadLayer | None = None
        self._place_of: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routing = routing_of(args, kwargs)
        if routing is None or self.spread is None:
            raise TrainingError(
                f"{self.layer.name!r} must be called with tokens, the experts that they chose, and the weights of the "
                "experts.",
                numbers="as in the first run of the model",
                hint="the strategy without ep",
            )
        tokens, chosen, weights = routing
        places, order = self._places(chosen.reshape(-1)).sort(stable=True)
        ends = torch.searchsorted(places, torch.arange(self.layer.count + 1, device=places.device))
        # One process may raise an error for a negative number, or count it from the last expert: so it is refused.
        row_counts = self.spread.tell(ends.diff(), tokens, (chosen < 0).any())
        order = order[: sum(row_counts.sent)]  # the others chose no expert
        outputs, _ = self.spread(_Taken.apply(tokens, order, chosen.shape[1]), row_counts)
        slots = outputs.new_zeros(chosen.numel(), self.layer.given).index_copy_(0, order, outputs)
        return (slots.view(*chosen.shape, self.layer.given) * weights[..., None]).sum(1).to(tokens.dtype)

    def _places(self, chosen: Tensor) -> Tensor:
        """Return the place of each chosen expert in the order in which rows are sent, or the last place for no expert.

        A number larger than those of all experts means no expert. `tell` refuses negative ones.
        """
        assert self.spread is not None
        count = self.layer.count
        if self._place_of is None or self._place_of.device != chosen.device:
            place_of = {number: place for place, number in enumerate(self.spread.order)}
            self._place_of = torch.tensor([*(place_of[number] for number in range(count)), count], device=chosen.device)
        return self._place_of[chosen.clamp(-1, count)]

    def compute(self, rows: Tensor, row_counts: RowCounts) -> Tensor:
        """Run this rank's experts on their rows, all with weight 1. See `Compute`."""
        if not len(rows):
            # As in one process, weights that no token reaches have a gradient of zeros.
            reached = sum(param.narrow(0, 0, 0).sum() for param in self.module.parameters())
            return rows.new_zeros(0, self.layer.given) + reached
        held = len(row_counts.there[0])
        experts = torch.arange(held, device=rows.device).repeat(len(row_counts.there))
        chosen = experts.repeat_interleave(row_counts.arriving, output_size=len(rows))[:, None]
        args, kwargs = called_with(self.layer, (rows, chosen, rows.new_ones(len(rows), 1)))
        with self._counted(held):
            output: Tensor = self.plain(*args, **kwargs)
        return output

    @contextmanager
    def _counted(self, count: int) -> Iterator[None]:
        """Set attributes with the number of experts, such as `num_experts`, to the number on this rank."""
        held = vars(self.module)
        names = [name for name, value in held.items() if type(value) is int and value == self.layer.count]
        names = [name for name in names if "expert" in name]
        held.update(dict.fromkeys(names, count))
        try:
            yield
        finally:
            held.update(dict.fromkeys(names, self.layer.count))


class _Listed(Wrapper):
    """Replaces the forward of an expert in a list.

    The module around the list runs twice. The first time, experts only record their rows, and return zeros. Then all
    rows are sent, computed and sent back. The second time, experts return the received outputs. Gradients flow through
    the rows of the first run and the outputs of the second.
    """

    encloses = True

    def __init__(self, module: nn.Module, around: _Around, number: int) -> None:
        super().__init__(module.forward)
        self.around, self.number = around, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = self.around
        if around.state == "compute":
            return self.plain(*args, **kwargs)
        (rows,) = args
        if around.state == "answer":
            answer = around.answers[self.number]
            if answer is None or len(answer) != len(rows):
                raise around.refused("its experts get other rows when nbkit runs it again")
            around.answers[self.number] = None
            return answer
        if around.state != "note":
            raise around.refused("another module calls its experts")
        if around.rows[self.number] is not None:
            raise around.refused("it calls an expert twice")
        around.rows[self.number] = rows
        return rows.new_zeros(len(rows), around.layer.given)


class _Around(Wrapper):
    """Replaces the forward of the module around a list of experts; see `_Listed`."""

    def __init__(self, module: nn.Module, layer: RoutedLayer, experts: Sequence[nn.Module | None]) -> None:
        super().__init__(module.forward)
        self.module, self.layer, self.state, self.experts = module, layer, "", experts
        self.rows: list[Tensor | None] = []
        self.answers: list[Tensor | None] = []
        self.spread: SpreadLayer | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.spread is not None
        near = (*args, *kwargs.values(), *self.module.parameters())
        like = next(x for x in near if isinstance(x, Tensor) and x.is_floating_point())
        replayed, buffers = again(), {b: (b.clone(), b._version) for b in self.module.buffers()}
        self.rows = [None] * self.layer.count
        try:
            with accelerator().generators_kept([like.device]), self._in("note"):
                self.plain(*args, **kwargs)
            with torch.no_grad():
                for buffer, (before, version) in buffers.items():
                    if buffer._version != version:
                        buffer.copy_(before)
            rows, self.rows = self.rows, []
            noted, order = next((each for each in rows if each is not None), like), self.spread.order
            counts = torch.tensor([_NONE if (row := rows[n]) is None else len(row) for n in order], device=noted.device)
            row_counts = self.spread.tell(counts, noted)
            going = [row for n in order if (row := rows[n]) is not None]
            outputs, token = self.spread(torch.cat([noted.new_empty(0, self.layer.width), *going]), row_counts)
            returned = dict(zip(order, outputs.split([max(count, 0) for count in row_counts.here]), strict=True))
            self.answers = [None if row is None else returned[n] for n, row in enumerate(rows)]
            with replayed(), self._in("answer"):
                output = self.plain(*args, **kwargs)
            if any(answer is not None for answer in self.answers):
                raise self.refused("it does not call its experts when nbkit runs it again")
        finally:
            self.rows, self.answers = [], []
        # If no expert was called, nothing else connects the output to the exchange.
        return output if any(row is not None for row in rows) else tied(output, token)

    def compute(self, rows: Tensor, row_counts: RowCounts) -> Tensor:
        """Run this rank's experts on their rows. See `Compute`."""
        there, pieces = row_counts.there, rows.split([max(count, 0) for counts in row_counts.there for count in counts])
        made: list[Sequence[Tensor]] = []
        with self._in("compute"):
            for number, expert in enumerate(self.experts):
                counts = [each[number] for each in there]
                if expert is not None and any(count != _NONE for count in counts):
                    output = expert(torch.cat(pieces[number :: len(self.experts)]))
                    made.append(output.split([max(count, 0) for count in counts]))
        return torch.cat([of[rank] for rank in range(len(there)) for of in made])

    def refused(self, why: str) -> StrategyError:
        """Return the error for a module that cannot be run like this."""
        return StrategyError(
            f"The experts of {self.layer.name!r} cannot be spread over ranks: {why}.",
            numbers=f"{self.layer.count} experts",
            hint="the strategy without ep",
        )

    @contextmanager
    def _in(self, state: str) -> Iterator[None]:
        before, self.state = self.state, state
        try:
            yield
        finally:
            self.state = before


def spread_layers(
    model: nn.Module,
    layers: Sequence[RoutedLayer],
    group: dist.ProcessGroup | None,
    held: Sequence[Sequence[Sequence[int]]],
    index: int,
) -> list[SpreadLayer]:
    """Make the ranks that hold the experts of `layers` compute them. In place. Sends nothing.

    model: the parameters of other ranks' experts are still to be removed from it. held: the experts of each layer on
    each rank of `group`. index: the index of this rank.
    """
    made = []
    for layer, by_rank in zip(layers, held, strict=True):
        module = model.get_submodule(layer.name)
        if layer.stacked:
            wrapper: _Stacked | _Around = _Stacked(module, layer)
        else:
            experts = [model.get_submodule(path) for path in layer.experts]
            wrapper = _Around(module, layer, [experts[number] for number in by_rank[index]])
            for number, expert in enumerate(experts):
                wrap(expert, _Listed(expert, wrapper, number))
        wrap(module, wrapper)
        wrapper.spread = SpreadLayer(layer, group, by_rank, index, wrapper.compute)
        made.append(wrapper.spread)
    return made
