"""Send tokens to the ranks that hold their experts, and the outputs back.

A layer makes one dispatch and one combine, each an all-to-all of exactly the routed rows. Before that, ranks tell each
other the number of rows for each expert. The backward pass makes the same two exchanges in the other direction. With T
tokens of k experts, W features of b bytes and n ranks, a rank sends (n - 1) / n of T k W b bytes each time, if the
router is balanced.

Every rank makes every exchange, whatever is routed to it. So no rank waits for a rank without tokens. A rank that runs
no forward, because it has no rows, calls `absent` for each layer instead.

An expert that no token chose is not called, and has no gradient, as in one process. Then stacked experts have a
gradient of zeros, also as in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
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
_NONE = -1

Compute = Callable[[Sequence[Tensor | None]], Tensor]
"""Called with the rows of each expert of this rank, None for an expert that is not called. Returns the outputs of all
experts, concatenated."""


def _nothing(rows: Sequence[Tensor | None]) -> Tensor:
    raise TrainingError("The experts of a strategy that is over were called.", hint="trainer.model, as it is now")


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


@kept
def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


@dataclass
class SpreadLayer:
    """The experts of a layer, spread over the ranks of a group, as seen by rank `index`.

    held: the numbers of the experts on each rank, ascending. Since the start of the step: forwards: the number of
    forwards with gradients on this rank. routed: the tokens received for each expert of this rank in forwards with
    gradients. times: when its experts began and ended to compute these, by the step clock.
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

    def __call__(self, rows: Sequence[Tensor | None], like: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return (the outputs of each expert for its rows, a token; see `tied`). All ranks of the group must call it.

        rows: for each expert of the layer, the rows of this rank, [n, width]; None if it is not called. like: a tensor
        with the dtype and device of the rows.
        """
        if in_backward() and not recomputing():
            raise StrategyError(
                f"The model itself recomputes {self.layer.name!r} in the backward pass, which experts on other ranks "
                "cannot follow.",
                numbers=f"{len(self.held)} ranks share its experts",
                hint="turn that off; compute=nbkit.Compute(recompute=True) does the same",
            )
        self.forwards += torch.is_grad_enabled() and not in_backward()
        return self._exchanged(rows, like)

    def absent(self, device: torch.device, *, backward: bool) -> None:
        """Take part in a forward that this rank does not make. backward: True if `absent_backward` follows."""
        with torch.set_grad_enabled(backward):
            _, token = self._exchanged([None] * self.layer.count, None, device)
        if backward:
            self._left.append(token)

    def absent_again(self, device: torch.device) -> None:
        """Take part in the recomputation of a forward that this rank has not made."""
        with torch.no_grad():
            self._exchanged([None] * self.layer.count, None, device)

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

    def _exchanged(
        self, rows: Sequence[Tensor | None], like: Tensor | None, device: torch.device | None = None
    ) -> tuple[list[Tensor], Tensor]:
        device = like.device if like is not None else device
        counts, dtype, autocast = self._told(rows, like, device)
        mine, ranks = self.held[self.index], range(len(self.held))
        order = [n for theirs in self.held for n in theirs]  # the order in which rows are sent
        here = [0 if each is None else len(each) for each in rows]
        sent = [sum(here[n] for n in theirs) for theirs in self.held]
        received = [sum(max(count, 0) for count in theirs) for theirs in counts]
        if torch.is_grad_enabled() and not in_backward():
            self.routed.update({n: sum(max(theirs[i], 0) for theirs in counts) for i, n in enumerate(mine)})
        nothing = torch.empty(0, self.layer.width, dtype=_DTYPES[dtype], device=device)
        going = [each.to(nothing.dtype) for n in order if (each := rows[n]) is not None]
        packed = torch.cat([nothing, *going])
        start = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
        arrived, token = _Exchange.apply(packed, start, sent, received, self.group)
        pieces = arrived.split([max(count, 0) for theirs in counts for count in theirs])
        gathered = [
            torch.cat(pieces[i :: len(mine)]) if any(theirs[i] != _NONE for theirs in counts) else None
            for i in range(len(mine))
        ]
        with self._as_others(autocast, nothing.device) if like is None else nullcontext():
            called, began = any(each is not None for each in gathered), clock.stamp()
            computed = self.compute(gathered) if called else nothing.new_empty(0, self.layer.given)
        if began is not None and torch.is_grad_enabled() and not in_backward():
            self.times.append((began, clock.stamp()))
        given = self._dtype_given((dtype, autocast), computed.dtype if called else None, nothing.device)
        parts = computed.to(given).split([max(theirs[i], 0) for i in range(len(mine)) for theirs in counts])
        back = [parts[i * len(ranks) + rank] for rank in ranks for i in range(len(mine))]
        back.append(nothing.new_empty(0, self.layer.given, dtype=given))  # a rank may have no expert
        returned, token = _Exchange.apply(torch.cat(back), token, received, sent, self.group)
        outputs = dict(zip(order, returned.split([here[n] for n in order]), strict=True))
        return [outputs[n] for n in range(self.layer.count)], token

    @kept
    def _told(
        self, rows: Sequence[Tensor | None], like: Tensor | None, device: torch.device | None
    ) -> tuple[list[list[int]], int, int]:
        """Tell each rank the number of rows for its experts. All ranks must call it.

        Return (the numbers from each rank, the index of the rows' dtype, the index of the autocast dtype). An absent
        rank does not know the dtypes.
        """
        kinds = [_NONE, _NONE]
        if like is not None:
            on = torch.is_autocast_enabled(like.device.type)
            cast = _DTYPES.index(torch.get_autocast_dtype(like.device.type)) if on else len(_DTYPES)
            kinds = [_DTYPES.index(like.dtype), cast]
        told = [_NONE if each is None else len(each) for each in rows]
        sent = [[*(told[n] for n in theirs), *kinds] for theirs in self.held]
        ranks, width = len(self.held), len(self.held[self.index]) + len(kinds)
        given = torch.tensor([number for each in sent for number in each], dtype=torch.int64, device=device)
        heard = torch.empty(ranks * width, dtype=torch.int64, device=device)
        sizes = [len(each) for each in sent]
        dist.all_to_all_single(heard, given, [width] * ranks, sizes, group=self.group)
        every: list[list[int]] = heard.view(ranks, width).tolist()
        dtype, autocast = (max(each[i] for each in every) for i in (-2, -1))
        if dtype == _NONE:  # no rank of the group has rows
            dtype, autocast = _DTYPES.index(torch.get_default_dtype()), len(_DTYPES)
        return [each[:-2] for each in every], dtype, autocast

    def _as_others(self, autocast: int, device: torch.device) -> Any:
        on = autocast < len(_DTYPES)
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routing = routing_of(args, kwargs)
        if routing is None or self.spread is None:
            raise TrainingError(
                f"{self.layer.name!r} is not called with tokens, the experts that they chose and their weights.",
                numbers="as it was when the model was first run",
                hint="the strategy without ep",
            )
        tokens, chosen, weights = routing
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.layer.count).tolist()
        order = order[: sum(counts[: self.layer.count])]  # a larger number means no expert
        of_token = order // chosen.shape[1]
        rows = tokens[of_token].split(counts[: self.layer.count])
        outputs, _ = self.spread(rows, tokens)
        weighted = torch.cat(outputs) * weights.reshape(-1)[order, None]
        summed = tokens.new_zeros(len(tokens), self.layer.given).index_add(0, of_token, weighted.to(tokens.dtype))
        return summed

    def compute(self, rows: Sequence[Tensor | None]) -> Tensor:
        """Run this rank's experts on their rows, all with weight 1."""
        held = [each for each in rows if each is not None]
        tokens = torch.cat(held)
        if not len(tokens):
            # As in one process, weights that no token reaches have a gradient of zeros.
            reached = sum(param.narrow(0, 0, 0).sum() for param in self.module.parameters())
            return tokens.new_zeros(0, self.layer.given) + reached
        sizes = torch.tensor([len(each) for each in held], device=tokens.device)
        chosen = torch.arange(len(held), device=tokens.device).repeat_interleave(sizes)[:, None]
        args, kwargs = called_with(self.layer, (tokens, chosen, tokens.new_ones(len(tokens), 1)))
        with self._counted(len(held)):
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
                raise around.refused("its experts are called with other rows when it runs again")
            around.answers[self.number] = None
            return answer
        if around.state != "note":
            raise around.refused("its experts are called from outside")
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
            noted = next((each for each in rows if each is not None), like)
            outputs, token = self.spread(rows, noted)
            self.answers = [None if row is None else output for row, output in zip(rows, outputs, strict=True)]
            with replayed(), self._in("answer"):
                output = self.plain(*args, **kwargs)
            if any(answer is not None for answer in self.answers):
                raise self.refused("its experts are not called when it runs again")
        finally:
            self.rows, self.answers = [], []
        # If no expert was called, nothing else connects the output to the exchange.
        return output if any(row is not None for row in rows) else tied(output, token)

    def compute(self, rows: Sequence[Tensor | None]) -> Tensor:
        """Run this rank's experts on their rows."""
        with self._in("compute"):
            pairs = zip(self.experts, rows, strict=True)
            return torch.cat([expert(each) for expert, each in pairs if expert is not None and each is not None])

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
