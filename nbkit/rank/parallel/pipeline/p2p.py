"""Send and receive tensors between the stages of a pipeline: activations one way, their gradients the other.

Each micro-batch sends over each boundary between two ranks the tensors that the stage returns, and the gradient of each
tensor that needs one. The first time that a micro-batch of a new shape crosses a boundary, a header with shapes and
dtypes is sent before it (two messages of a few hundred bytes). Both sides remember it.

A channel is one direction between two ranks. The sender sends everything on it in the order of its list of operations.
The receiver has all lists, so it knows this order and receives in it. Sends never block, and receives are posted in
advance. So any order of operations that `simulate` can run is free of deadlocks. Messages of gloo have their number as
a tag.

NCCL has no tags and runs the operations of one communicator one after the other. A send ends only when its receive
runs. A receive that was posted early would block the sends after it. If this happens at both ends, it is a deadlock. A
communicator for each channel avoids this, but then a rank has four, each with its own buffers. So with NCCL a pipeline
has one communicator, and all ranks issue their messages in one order: the order in which a simulated run sends them. A
message depends only on earlier messages in this order. So the first message that has not arrived can always arrive,
because nothing is before it at either end. A send and the receive after it are issued as one batch, because two
neighbours often send to each other at the same time.

The route of each message is computed from the lists of operations, and is the same on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.comm.delegating_group import DelegatingGroup
from nbkit.rank.device import accelerator
from nbkit.schedules import Op

_met: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Group -> the number of the formation (see `_formed`) since which it has run a collective."""


def meet_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run a first collective in `group`, unless it has run one since it was formed. All its ranks must call it.

    NCCL connects at the first collective and blocks until all members take part. In the middle of a run, a rank that
    blocks early could delay a message that other ranks need to get there.
    """
    if not _meets_again(group):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def sum_between(tensor: Tensor, members: Sequence[int], group: dist.ProcessGroup) -> None:
    """Sum `tensor` over `members`, some ranks of `group`, in one batch of messages. All members must call it.

    members: ranks including this one, in the same order on all members. The sums are bitwise equal, because each rank
    adds in this order. Two members send as much as in an all-reduce.
    """
    mine, ways = group.rank(), cast(Any, group)
    # With two members, both add the same two numbers, whatever the order.
    own = tensor if len(members) == 2 else tensor.clone()
    parts = {member: own if member == mine else torch.empty_like(tensor) for member in members}
    ways._start_coalescing(tensor.device)
    for member in members:
        if member != mine:
            group.send([parts[mine]], member, 0)
            group.recv([parts[member]], member, 0)
    ways._end_coalescing(tensor.device).wait()
    if len(members) == 2:
        tensor.add_(parts[sum(members) - mine])
        return
    tensor.copy_(parts[members[0]])
    for member in members[1:]:
        tensor.add_(parts[member])


def has_met(group: dist.ProcessGroup) -> bool:
    """Return True if the group has run a collective since it was formed."""
    return _met.get(group) == _formed(group)


def _meets_again(group: dist.ProcessGroup) -> bool:
    """Return True if the group has run a collective since it was formed. Record that it now has."""
    before, _met[group] = has_met(group), _formed(group)
    return before


def _formed(group: dist.ProcessGroup) -> int:
    return group.formed if isinstance(group, DelegatingGroup) else 1


class StageMessage(NamedTuple):
    """A message that an operation of `stage` on micro-batch `micro` needs from a neighbour.

    It contains activations or their gradient.
    """

    gradient: bool
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{'the gradient' if self.gradient else 'the input'} of stage {self.stage}, micro-batch {self.micro}"


class OpPlace(NamedTuple):
    """The position of an operation: the rank of the pipeline, and the index in this rank's list."""

    rank: int
    at: int


@dataclass(frozen=True)
class Routes:
    """The messages of one rank.

    needs, gives: for each of its operations, the message that must arrive before it, and the message that it sends.
    None if there is none, or if the neighbour is on this rank. source, target: the operation at the other end.
    arrivals: for each rank that sends to this rank, its messages in the order of its list. order: the messages that
    this rank sends and receives, in the order that all ranks share.
    """

    needs: tuple[StageMessage | None, ...]
    gives: tuple[StageMessage | None, ...]
    source: dict[StageMessage, OpPlace]
    target: dict[StageMessage, OpPlace]
    arrivals: dict[int, tuple[StageMessage, ...]]
    order: tuple[StageMessage, ...]

    @classmethod
    def of(
        cls,
        lists: Sequence[Sequence[Op]],
        rank: int,
        rank_of: Callable[[int], int],
        num_stages: int,
        sequences: int | None = None,
    ) -> Routes:
        """Return the messages of `rank` in a pipeline whose ranks follow `lists`.

        sequences: number of sequences of a generation. Then a micro-batch waits for the token of the micro-batch
        `sequences` before it.
        """
        user: dict[StageMessage | None, OpPlace] = {
            _need(op): OpPlace(r, i) for r, ops in enumerate(lists) for i, op in enumerate(ops)
        }

        def crossing(message: StageMessage | None, sender: int) -> StageMessage | None:
            """Return `message` if it goes from `sender` to another rank that uses it."""
            return message if message is not None and user[message].rank != sender else None

        gives = tuple(crossing(_give(op, num_stages), rank) for op in lists[rank])
        source: dict[StageMessage, OpPlace] = {}
        arrivals: dict[int, list[StageMessage]] = {}
        for peer, ops in enumerate(lists):
            for i, op in enumerate(ops):
                message = crossing(_give(op, num_stages), peer)
                if message is not None and user[message].rank == rank:
                    source[message] = OpPlace(peer, i)
                    arrivals.setdefault(peer, []).append(message)
        needs = tuple(need if (need := _need(op)) in source else None for op in lists[rank])
        target = {message: user[message] for message in gives if message is not None}
        made = _when_made(lists, num_stages, sequences)
        # Of messages sent at the same time, those of every second rank come first. Then each message waits for at most
        # one of the others, instead of forming a chain along the whole pipeline.
        sender = {message: place.rank for message, place in source.items()} | dict.fromkeys(target, rank)
        order = sorted(sender, key=lambda message: (made[message], sender[message] % 2, sender[message]))
        ends = {peer: tuple(some) for peer, some in arrivals.items()}
        return cls(needs, gives, source, target, ends, tuple(order))


_COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}


def _when_made(lists: Sequence[Sequence[Op]], num_stages: int, sequences: int | None) -> dict[StageMessage, int]:
    """Return the time at which a simulated run sends each message: later than all messages on which it depends."""
    gives = {give for ops in lists for op in ops if (give := _give(op, num_stages)) is not None}
    made, tokens = dict[StageMessage, int](), dict[int, int]()
    waiting, clocks, moved = [deque(ops) for ops in lists], [0] * len(lists), True
    while moved:
        moved = False
        for rank, ops in enumerate(waiting):
            while ops:
                op, need, start = ops[0], _need(ops[0]), clocks[rank]
                before = op.micro - sequences if sequences is not None else -1
                if (need in gives and need not in made) or (before >= 0 and before not in tokens):
                    break
                start = max(start, made.get(need, 0) if need is not None else 0, tokens.get(before, 0))
                clocks[rank] = stop = start + _COSTS[op.kind]
                if (give := _give(op, num_stages)) is not None:
                    made[give] = stop
                if op.kind == "F" and op.stage == num_stages - 1:
                    tokens[op.micro] = stop
                ops.popleft()
                moved = True
    if any(waiting):
        raise StrategyError(
            "The ranks of this schedule would wait for each other.",
            numbers=f"first at {[str(ops[0]) for ops in waiting if ops]}",
            hint="nbkit.schedules.simulate(schedule) checks a schedule",
        )
    return made


def _need(op: Op) -> StageMessage | None:
    return StageMessage(op.kind != "F", op.stage, op.micro) if op.kind != "W" else None


def _give(op: Op, num_stages: int) -> StageMessage | None:
    if op.kind == "F":
        return StageMessage(False, op.stage + 1, op.micro) if op.stage + 1 < num_stages else None
    return StageMessage(True, op.stage - 1, op.micro) if op.kind != "W" and op.stage else None


_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
)
_HEADER = 64  # numbers in the first message of a header; a second message contains the rest
_TURNS, _PER_TURN = 1 << 10, 1 << 20  # tags: number of the run, then number of the message in this run


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor, and whether it needs a gradient, as known at both ends of a boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool

    def serves(self, now: TensorSpec) -> bool:
        """Return True if a tensor like `now` may be sent as this one. It may no longer need a gradient."""
        return self[:2] == now[:2] and self.wants_grad >= now.wants_grad


@dataclass
class _Sent:
    """A message that is being sent. used_at: index, in the receiver's list, of the operation that needs it."""

    used_at: int
    works: list[dist.Work]
    tensors: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class _Posted:
    """A message that is being received, and its buffers."""

    works: list[dist.Work]
    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


class Channels:
    """This rank's ends of all channels of a pipeline.

    A run calls `begin`. Then, in the order of this rank's list, it calls `post` in advance, `receive` and `send`. It
    ends with `finish`, or with `abandon` after an error.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        ordered: dist.ProcessGroup | None = None,
        peers: Sequence[int] = (),
    ) -> None:
        """ordered, peers: see Pipeline."""
        # Other kinds of groups, such as those of threads, do not send over a network.
        if isinstance(group, DelegatingGroup) and ordered is None and accelerator().holds(device):
            raise StrategyError(
                "A pipeline on GPUs needs the backend nccl, but these ranks use gloo.",
                numbers="several ranks on one GPU, or dist.init_process_group('gloo')",
                hint="a strategy without pp, or one GPU for each rank",
            )
        self.device, self.in_order = device, ordered is not None
        self._group = group if ordered is None else ordered
        self._peers = peers or range(0 if group is None else group.size())
        self._batched: list[_Posted | _Sent] | None = None
        self._left_over: list[_Posted | _Sent] = []
        self._forget()

    def begin_again(self) -> None:
        """Forget all shapes and numbers, because ranks may differ after an interrupt. Call it on every rank."""
        self._forget()
        self._meet()

    def _meet(self) -> None:
        if self.in_order and self._group is not None:
            meet_all(self._group, self.device)

    def _forget(self) -> None:
        self._turn = 0
        self._specs: dict[tuple[int, tuple[bool, Hashable]], tuple[TensorSpec, ...]] = {}

    def begin(self, routes: Routes, keys: Sequence[tuple[bool, Hashable]]) -> None:
        """Begin a run along `routes`. keys: (whether gradients are wanted, what the shapes depend on) of each
        micro-batch."""
        self._meet()  # an error in a cell forms the world again, even if no step was aborted
        self._turn = (self._turn + 1) % _TURNS
        # If nothing needed a gradient, something may need it now, because parameters were unfrozen. So send the header
        # again.
        self._specs = {
            key: spec for key, spec in self._specs.items() if not key[1][0] or any(one.wants_grad for one in spec)
        }
        self._routes, self._keys = routes, keys
        self._coming = {peer: deque(arrivals) for peer, arrivals in routes.arrivals.items()}
        self._order = deque(routes.order)
        self._headers: dict[int, _Posted] = {}
        self._posted: dict[StageMessage, _Posted] = {}
        self._outbox: dict[int, list[_Sent]] = {}
        self._numbers: dict[tuple[str, int], int] = {}

    @property
    def tag_of_end(self) -> int:
        """Return a tag that no message of this run has."""
        return self._turn * _PER_TURN + _PER_TURN - 1

    def post(self, message: StageMessage) -> None:
        """Begin to receive `message` and those before it, as far as the shapes are known.

        If messages go in order, those before it are on all channels, and nothing is received before what this rank has
        yet to send.
        """
        while message not in self._posted:
            first = self._order[0] if self.in_order else message
            if first in self._routes.target or not self._post_next(self._routes.source[first].rank, wait=False):
                return

    def receive(self, message: StageMessage) -> list[Tensor]:
        """Return the tensors of `message`.

        Activations that need a gradient have requires_grad=True. On a GPU only the stream waits.
        """
        peer, made_at = self._routes.source[message]
        while message not in self._posted:
            first = self._order[0] if self.in_order else message
            self._post_next(self._routes.source[first].rank, wait=True)
        tensors = self._posted.pop(message).wait()
        self._release(peer, made_at)
        return tensors

    def send(self, message: StageMessage, tensors: Sequence[Tensor]) -> list[int]:
        """Send `message` without waiting. `requires_grad` of an activation says whether a gradient comes back.

        Return the numbers of the tensors for which a gradient comes back. They include tensors that no longer need one
        because parameters were frozen. Raises TrainingError if a stage returns other shapes than before for the same
        key.
        """
        peer, used_at = self._routes.target[message]
        if self.in_order:
            while (first := self._order[0]) != message:
                self._post_next(self._routes.source[first].rank, wait=True)
            self._order.popleft()
        sent, expected = _Sent(used_at, [], []), list[int]()
        if not message.gradient:
            key, spec = self._key(message), _spec(tensors)
            known = self._specs.setdefault(key, spec)
            expected = [number for number, one in enumerate(known) if one.wants_grad]
            if known is spec:
                for part in _header(spec, self.device):
                    with self._batch(sent):
                        self._isend(sent, peer, part)
            elif len(known) != len(spec) or not all(one.serves(now) for one, now in zip(known, spec, strict=True)):
                raise TrainingError(
                    f"Stage {message.stage - 1} returned tensors of another shape or dtype than before, for the same "
                    "kind of micro-batch.",
                    numbers=f"before: {_described(known)}; now: {_described(spec)}",
                    hint="shapes between stages may depend only on the shape of the input",
                )
        with self._batch(sent):
            for tensor in tensors:
                self._isend(sent, peer, _raw(tensor))
            if self.in_order and self._order and (first := self._order[0]) in self._routes.source:
                if self._key(first) in self._specs:
                    self._post_next(self._routes.source[first].rank, wait=False)
        self._outbox.setdefault(peer, []).append(sent)
        return expected

    def finish(self) -> None:
        """Wait, after the last operation, until everything that was sent has arrived."""
        for some in self._outbox.values():
            for sent in some:
                sent.wait()
        self._outbox.clear()
        self._left_over.clear()

    def abandon(self) -> None:
        """Abort a run after an error. Keep the buffers until a later run has ended: a peer may still write to them."""
        self._left_over += [*self._posted.values(), *self._headers.values()]
        for some in self._outbox.values():
            self._left_over += some

    def _post_next(self, peer: int, *, wait: bool) -> bool:
        """Post the next message from `peer`. Return False if its shapes are not known yet and `wait` is False."""
        message = self._coming[peer][0]
        key = self._key(message)
        spec = self._specs.get(key)
        if spec is None:
            if message.gradient:
                assert not wait, f"{message} is expected before the forward pass"
                return False
            if peer not in self._headers:
                first = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
                self._headers[peer] = self._irecv(peer, [first])
            if not wait:
                return False
            spec = self._specs[key] = self._read_header(peer)
        self._coming[peer].popleft()
        if self.in_order:
            self._order.popleft()
        wanted = [one for one in spec if one.wants_grad] if message.gradient else spec
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in wanted]
        self._posted[message] = self._irecv(peer, tensors)
        if not message.gradient:
            self._posted[message].tensors = [
                t.requires_grad_(one.wants_grad) for t, one in zip(tensors, spec, strict=True)
            ]
        return True

    def _key(self, message: StageMessage) -> tuple[int, tuple[bool, Hashable]]:
        """Return the key of a boundary. A boundary is identified by the stage after it."""
        return message.stage + message.gradient, self._keys[message.micro]

    def _read_header(self, peer: int) -> tuple[TensorSpec, ...]:
        numbers: list[int] = self._headers.pop(peer).wait()[0].tolist()
        if (more := numbers[0] - len(numbers)) > 0:
            rest = torch.empty(more, dtype=torch.int64, device=self.device)
            numbers += self._irecv(peer, [rest]).wait()[0].tolist()
        return _parsed(numbers)

    @contextmanager
    def _batch(self, message: _Sent | _Posted) -> Iterator[None]:
        """Issue the parts of `message` as one operation, if messages go in order. A batch inside another one joins it.

        Outside of a batch, torch would create an NCCL communicator for each pair of ranks.
        """
        if not self.in_order:
            yield
            return
        if self._batched is not None:
            self._batched.append(message)
            yield
            return
        group: Any = self._group
        self._batched = [message]
        group._start_coalescing(self.device)
        try:
            yield
        finally:
            joined, self._batched = self._batched, None
            work = group._end_coalescing(self.device)
        for one in joined if work is not None else ():
            one.works.append(work)

    def _isend(self, sent: _Sent, peer: int, tensor: Tensor) -> None:
        if tensor.numel() and self._group is not None:
            if (work := self._group.send([tensor], *self._next("to", peer))) is not None:
                sent.works.append(work)
            sent.tensors.append(tensor)

    def _irecv(self, peer: int, tensors: list[Tensor]) -> _Posted:
        posted = _Posted([], tensors)
        with self._batch(posted):
            for tensor in tensors:
                if tensor.numel() and self._group is not None:
                    if (work := self._group.recv([_raw(tensor)], *self._next("from", peer))) is not None:
                        posted.works.append(work)
        return posted

    def _next(self, direction: str, peer: int) -> tuple[int, int]:
        """Return the rank of `peer` in the group, and the tag of the next message to, or from, it."""
        number = self._numbers[direction, peer] = self._numbers.get((direction, peer), -1) + 1
        return self._peers[peer], self._turn * _PER_TURN + number

    def _release(self, peer: int, made_at: int) -> None:
        """Release the messages that `peer` has used: those that its operations up to index `made_at` needed."""
        waiting = self._outbox.get(peer, [])
        for sent in waiting:
            if sent.used_at <= made_at:
                sent.wait()
        self._outbox[peer] = [sent for sent in waiting if sent.used_at > made_at]


def _raw(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because gloo supports neither bool nor every float."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _spec(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)


def _described(spec: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{str(one.dtype)[6:]}{list(one.shape)}{' with gradient' * one.wants_grad}" for one in spec)


def _header(spec: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
    numbers = [0, len(spec)]
    for one in spec:
        numbers += [_DTYPES.index(one.dtype), int(one.wants_grad), len(one.shape), *one.shape]
    numbers[0] = len(numbers)
    numbers += [0] * (_HEADER - len(numbers))
    sent = accelerator().send(torch.tensor(numbers, dtype=torch.int64), device)
    return [part.clone() for part in (sent[:_HEADER], sent[_HEADER:]) if part.numel()]


def _parsed(numbers: Sequence[int]) -> tuple[TensorSpec, ...]:
    reading = iter(numbers[1:])
    specs = []
    for _ in range(next(reading)):
        dtype, wants_grad, dims = next(reading), next(reading), next(reading)
        specs.append(TensorSpec(tuple(next(reading) for _ in range(dims)), _DTYPES[dtype], bool(wants_grad)))
    return tuple(specs)
