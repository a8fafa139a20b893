"""Sends and receives between the stages of a pipeline: activations one way, their gradients the other.

On the wire, per micro-batch and boundary between two ranks: the tensors that the stage returns, and the gradient of
each that needs one. The first time that a micro-batch of a new shape passes a boundary, a header with shapes and dtypes
goes before it (two messages of a few hundred bytes). Both sides remember it.

A channel is one direction between two ranks. The sender sends everything on it in the order of its list of operations.
The receiver knows this order, since it has all lists, and receives in it. Sends never block and receives are posted
ahead. So no order of operations that `simulate` can run will deadlock. Messages of gloo carry their number as a tag.
NCCL has no tags and runs operations on one communicator one after the other. There a receive that was posted early
would block the sends behind it; at both ends that is a deadlock. So under NCCL each channel has a group of its own, in
which both ends have the same order.

The route of each message is read from the lists of operations, and is the same on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.comm.delegating_group import DelegatingGroup
from nbkit.rank.device import accelerator, is_device_backend
from nbkit.rank.parallel.device_mesh import group_of
from nbkit.schedules import Op

Edges = dict[tuple[int, int], dist.ProcessGroup]
"""(sender, receiver), as ranks of the world -> the group of this channel."""


def edge_groups(pipelines: Sequence[tuple[int, ...]], rank: int, *, always: bool = False) -> Edges:
    """Return the groups of this rank's channels if the backend needs them; none on gloo. Collective over the world.

    pipelines: the ranks of every pipeline, such as `mesh.groups("pp")`. always: make them on gloo too.
    """
    edges: Edges = {}
    for axis, every in ranks_of_edges(pipelines, always=always):
        group = group_of(axis, every, rank)
        for low, high in every:
            if rank in (low, high) and group is not None:
                edges[(low, high) if axis == "pp up" else (high, low)] = group
    return edges


def ranks_of_edges(
    pipelines: Sequence[tuple[int, ...]], *, always: bool = False
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Yield (axis, the ranks of each group along it) of `edge_groups`, in the order in which they are made."""
    if len(pipelines[0]) == 1 or not (always or is_device_backend(dist.get_backend())):
        return
    for a, b in _pairs(len(pipelines[0])):
        for axis in ("pp up", "pp down"):
            yield axis, [(ranks[a], ranks[b]) for ranks in pipelines]


_met: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Group -> the number of its formation that has met."""


def meet(edges: Edges, device: torch.device) -> None:
    """Send a number over each of this rank's `edges` that has not met since it was formed.

    Collective over the pipelines, before a run. It does nothing without edges, or if all have met. NCCL connects at the
    first message and blocks until both ends are there. So all ranks go through their edges in one order.
    """
    for edge in sorted(edges, key=lambda pair: (min(pair), max(pair), pair)):
        group = edges[edge]
        if _meets_again(group):
            continue
        token = torch.zeros(1, device=device)
        if edge[0] == dist.get_rank():
            dist.send(token, edge[1], group=group)
        else:
            dist.recv(token, edge[0], group=group)


def meet_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Reduce a number over `group`, unless it has met since it was formed. Collective over the group, before a run.

    NCCL connects at the first collective and blocks until all members are there. In the middle of a run, a rank that
    blocks there early could keep back what the others need to get there.
    """
    if not _meets_again(group):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def has_met(group: dist.ProcessGroup) -> bool:
    """Return True if the group has met since it was formed."""
    return _met.get(group) == _formed(group)


def _meets_again(group: dist.ProcessGroup) -> bool:
    """Return True if the group has met since it was formed. Note that it now has."""
    before, _met[group] = has_met(group), _formed(group)
    return before


def _formed(group: dist.ProcessGroup) -> int:
    return group.formed if isinstance(group, DelegatingGroup) else 1


def _pairs(ranks: int) -> list[tuple[int, int]]:
    """Return the pairs of neighbours, and the pair of the first and the last rank."""
    return sorted({(i, i + 1) for i in range(ranks - 1)} | {(0, ranks - 1)})


class StageMessage(NamedTuple):
    """A message that an operation of `stage` on micro-batch `micro` needs from a neighbour.

    It holds activations or their gradient.
    """

    gradient: bool
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{'the gradient' if self.gradient else 'the input'} of stage {self.stage}, micro-batch {self.micro}"


class OpPlace(NamedTuple):
    """The place of an operation: the rank of the pipeline, and the position in that rank's list."""

    rank: int
    at: int


@dataclass(frozen=True)
class Routes:
    """The messages of one rank.

    needs, gives: for each of its operations, the message that must arrive before it and the one that it sends. None if
    there is none, or if the neighbour is on this rank. source, target: the operation at the other end. arrivals: for
    each rank that sends to this one, its messages in the order of its list.
    """

    needs: tuple[StageMessage | None, ...]
    gives: tuple[StageMessage | None, ...]
    source: dict[StageMessage, OpPlace]
    target: dict[StageMessage, OpPlace]
    arrivals: dict[int, tuple[StageMessage, ...]]

    @classmethod
    def of(cls, lists: Sequence[Sequence[Op]], rank: int, rank_of: Callable[[int], int], num_stages: int) -> Routes:
        """Return the messages of `rank` in a pipeline whose ranks follow `lists`."""
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
        return cls(needs, gives, source, target, {peer: tuple(some) for peer, some in arrivals.items()})


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
_HEADER = 64  # numbers in the first message of a header; a second one carries what is left
_TURNS, _PER_TURN = 1 << 10, 1 << 20  # tags: number of the run, then number of the message in it


class TensorSpec(NamedTuple):
    """The shape, dtype and need of a gradient of one tensor, as known at both ends of a boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool

    def serves(self, now: TensorSpec) -> bool:
        """Return True if a tensor like `now` may be sent as this one. It may need no gradient any more."""
        return self[:2] == now[:2] and self.wants_grad >= now.wants_grad


@dataclass
class _Sent:
    """A message under way. used_at: the place, in the receiver's list, of the operation that needs it."""

    used_at: int
    works: list[dist.Work]
    tensors: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass
class _Posted:
    """A message that is awaited, and its buffers."""

    works: list[dist.Work]
    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


class Channels:
    """This rank's ends of all channels of a pipeline.

    A run calls `begin`. Then, in the order of this rank's list, it calls `post` ahead, `receive` and `send`. It ends
    with `finish`, or with `abandon` after an error.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        edges: Edges | None = None,
        peers: Sequence[int] = (),
    ) -> None:
        """peers: see Pipeline."""
        # Groups of other kinds, such as those of ranks that are threads, send over no wire.
        if isinstance(group, DelegatingGroup) and not edges and accelerator().holds(device):
            raise StrategyError(
                "A pipeline sends the tensors of GPUs over nccl, and these ranks have gloo.",
                numbers="several ranks on one GPU, or dist.init_process_group('gloo')",
                hint="a strategy without pp, or a GPU for each rank",
            )
        self.device, self.edges = device, edges or {}
        self._ends = _ends(group, self.edges, peers) if group is not None else {}
        self._left_over: list[_Posted | _Sent] = []
        self._forget()

    def begin_again(self) -> None:
        """Forget all shapes and numbers, on every rank alike. After an interrupt the ranks may know different ones."""
        self._forget()
        meet(self.edges, self.device)

    def _forget(self) -> None:
        self._turn = 0
        self._specs: dict[tuple[int, tuple[bool, Hashable]], tuple[TensorSpec, ...]] = {}

    def begin(self, routes: Routes, keys: Sequence[tuple[bool, Hashable]]) -> None:
        """Begin a run along `routes`. keys: (whether gradients are wanted, what the shapes depend on) of each
        micro-batch."""
        if self.edges:
            meet(self.edges, self.device)  # an error in a cell forms the world again, even if no step was broken off
        self._turn = (self._turn + 1) % _TURNS
        # If nothing needed a gradient, something may now, because parameters were thawed. So it is sent again.
        self._specs = {
            key: spec for key, spec in self._specs.items() if not key[1][0] or any(one.wants_grad for one in spec)
        }
        self._routes, self._keys = routes, keys
        self._coming = {peer: deque(arrivals) for peer, arrivals in routes.arrivals.items()}
        self._headers: dict[int, _Posted] = {}
        self._posted: dict[StageMessage, _Posted] = {}
        self._outbox: dict[int, list[_Sent]] = {}
        self._numbers: dict[tuple[str, int], int] = {}

    @property
    def tag_of_end(self) -> int:
        """Return a tag that no message of this run has."""
        return self._turn * _PER_TURN + _PER_TURN - 1

    def post(self, message: StageMessage) -> None:
        """Begin to receive `message`, and those before it on its channel, as far as the shapes are known."""
        peer = self._routes.source[message].rank
        while message not in self._posted and self._post_next(peer, wait=False):
            pass

    def receive(self, message: StageMessage) -> list[Tensor]:
        """Return the tensors of `message`.

        Activations that need a gradient require it. On a GPU only the stream waits.
        """
        peer, made_at = self._routes.source[message]
        while message not in self._posted:
            self._post_next(peer, wait=True)
        tensors = self._posted.pop(message).wait()
        self._release(peer, made_at)
        return tensors

    def send(self, message: StageMessage, tensors: Sequence[Tensor]) -> list[int]:
        """Send `message` without waiting. `requires_grad` of an activation says whether a gradient comes back.

        Returns the numbers of the tensors for which one does. They include those that need none any more because
        parameters were frozen. Raises TrainingError if a stage returns other shapes than it did for the same key.
        """
        peer, used_at = self._routes.target[message]
        sent, expected = _Sent(used_at, [], []), list[int]()
        if not message.gradient:
            key, spec = self._key(message), _spec(tensors)
            known = self._specs.setdefault(key, spec)
            expected = [number for number, one in enumerate(known) if one.wants_grad]
            if known is spec:
                for part in _header(spec, self.device):
                    self._isend(sent, peer, part)
            elif len(known) != len(spec) or not all(one.serves(now) for one, now in zip(known, spec, strict=True)):
                raise TrainingError(
                    f"Stage {message.stage - 1} returned other tensors than before for micro-batches of the same kind.",
                    numbers=f"before: {_described(known)}; now: {_described(spec)}",
                    hint="shapes between stages may depend on the shape of the input only",
                )
        for tensor in tensors:
            self._isend(sent, peer, _raw(tensor))
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
        """Give up a run after an error. Buffers are kept until a later run has ended, since a peer may still write to
        them."""
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
                assert not wait, f"{message} is awaited before the forward"
                return False
            if peer not in self._headers:
                first = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
                self._headers[peer] = self._irecv(peer, [first])
            if not wait:
                return False
            spec = self._specs[key] = self._read_header(peer)
        self._coming[peer].popleft()
        wanted = [one for one in spec if one.wants_grad] if message.gradient else spec
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in wanted]
        self._posted[message] = self._irecv(peer, tensors)
        if not message.gradient:
            self._posted[message].tensors = [
                t.requires_grad_(one.wants_grad) for t, one in zip(tensors, spec, strict=True)
            ]
        return True

    def _key(self, message: StageMessage) -> tuple[int, tuple[bool, Hashable]]:
        """Return the key of a boundary. A boundary is named by the stage behind it."""
        return message.stage + message.gradient, self._keys[message.micro]

    def _read_header(self, peer: int) -> tuple[TensorSpec, ...]:
        numbers: list[int] = self._headers.pop(peer).wait()[0].tolist()
        if (more := numbers[0] - len(numbers)) > 0:
            rest = torch.empty(more, dtype=torch.int64, device=self.device)
            numbers += self._irecv(peer, [rest]).wait()[0].tolist()
        return _parsed(numbers)

    def _isend(self, sent: _Sent, peer: int, tensor: Tensor) -> None:
        if tensor.numel():
            group, end, tag = self._next("to", peer)
            sent.works.append(group.send([tensor], end, tag))
            sent.tensors.append(tensor)

    def _irecv(self, peer: int, tensors: list[Tensor]) -> _Posted:
        posted = _Posted([], tensors)
        for tensor in tensors:
            if tensor.numel():
                group, end, tag = self._next("from", peer)
                posted.works.append(group.recv([_raw(tensor)], end, tag))
        return posted

    def _next(self, direction: str, peer: int) -> tuple[dist.ProcessGroup, int, int]:
        """Return the group of the channel to, or from, `peer`; the peer's rank in it; the tag of the next message."""
        number = self._numbers[direction, peer] = self._numbers.get((direction, peer), -1) + 1
        return *self._ends[direction, peer], self._turn * _PER_TURN + number

    def _release(self, peer: int, made_at: int) -> None:
        """Release what `peer` has used: all that its operations up to the place `made_at` needed."""
        waiting = self._outbox.get(peer, [])
        for sent in waiting:
            if sent.used_at <= made_at:
                sent.wait()
        self._outbox[peer] = [sent for sent in waiting if sent.used_at > made_at]


def _ends(
    group: dist.ProcessGroup, edges: Edges, peers: Sequence[int]
) -> dict[tuple[str, int], tuple[dist.ProcessGroup, int]]:
    """Return, for each direction and peer of the pipeline, the group to use and the peer's rank in it."""
    peers = peers or range(group.size())
    if not edges:
        return {(direction, peer): (group, at) for peer, at in enumerate(peers) for direction in ("to", "from")}
    members, me = dist.get_process_group_ranks(group), dist.get_rank()
    ends = {}
    for peer, at in enumerate(peers):
        other = members[at]
        for direction, edge in (("to", (me, other)), ("from", (other, me))):
            own = edges.get(edge, group)
            ends[direction, peer] = own, dist.get_group_rank(own, other) if other != me else peer
    return ends


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
