"""A process group of ranks that are threads of one process: its collectives copy and add in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.comm.thread_ranks import ThreadRanks


@dataclass
class _Call:
    """A collective on its way. sent, received: by rank, of those who have come to it."""

    operation: str
    sent: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    done: bool = False


@dataclass
class _Message:
    """From one rank to another, and where it goes, whichever is known first."""

    sent: Tensor | None = None
    received: Tensor | None = None
    done: bool = False


class Meeting:
    """What the ranks of one group have in common. members: of `ranks`, in the order of the group."""

    def __init__(self, ranks: ThreadRanks[Any], members: Sequence[int]) -> None:
        self.ranks, self.members = ranks, tuple(members)
        self.calls: dict[int, _Call] = {}
        self.messages: dict[tuple[int, int, int], deque[_Message]] = {}

    def group_of(self, rank: int) -> ThreadGroup:
        """The group as `rank`, one of the members, sees it."""
        return ThreadGroup(self, self.members.index(rank))


class _Work(dist.Work):
    def __init__(self, ranks: ThreadRanks[Any], what: _Call | _Message) -> None:
        super().__init__()
        self._ranks, self._what = ranks, what

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._ranks.wait(lambda: self._what.done)
        return True

    def is_completed(self) -> bool:
        return self._what.done


class ThreadGroup(dist.ProcessGroup):
    """One rank's end of a Meeting. Has the operations that strategies use."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, len(meeting.members))  # type: ignore[call-arg,arg-type]
        self._meeting, self._me, self._made = meeting, rank, 0

    def getBackendName(self) -> str:
        return "threads"

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        combine = torch.add if opts.reduceOp == dist.ReduceOp.SUM else torch.maximum
        if combine is torch.maximum and opts.reduceOp != dist.ReduceOp.MAX:
            raise NotImplementedError(f"all_reduce with {opts.reduceOp}")

        def reduced(all_sent: list[Tensor]) -> list[Tensor]:
            # In the first one's, which is to hold it anyway: gradients of a model are large.
            for other in all_sent[1:]:
                combine(all_sent[0], other, out=all_sent[0])
            return all_sent[:1] * self.size()

        return self._collective("all_reduce", tensors[0], tensors[0], reduced)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        return self._collective(
            "broadcast", tensors[0], tensors[0], lambda all_sent: [all_sent[root].clone()] * self.size()
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Inputs of all ranks behind one another, in `output`."""
        return self._collective("all_gather", input, output, lambda all_sent: [torch.stack(all_sent)] * self.size())

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """In `output`, the part of the sum of all inputs that is this rank's."""
        return self._collective(
            "reduce_scatter", input, output, lambda all_sent: list(reduce(torch.add, all_sent).view(self.size(), -1))
        )

    # As torch before 2.13 calls them.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        message = self._message(self._me, peer, tag, "sent")
        message.sent = tensors[0].clone()
        return self._delivered(message)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        message = self._message(peer, self._me, tag, "received")
        message.received = tensors[0]
        return self._delivered(message)

    def _message(self, source: int, target: int, tag: int, end: str) -> _Message:
        queue = self._meeting.messages.setdefault((source, target, tag), deque())
        message = next((each for each in queue if getattr(each, end) is None), None)
        if message is None:
            queue.append(message := _Message())
        else:
            queue.remove(message)  # its other end was known
        return message

    def _delivered(self, message: _Message) -> dist.Work:
        if message.sent is not None and message.received is not None:
            # As bytes: one end may see numbers where the other sees bytes.
            message.received.view(-1).view(torch.uint8).copy_(message.sent.view(-1).view(torch.uint8))
            message.done = True
            self._meeting.ranks.tell()
        elif message.sent is not None:
            # Sends do not wait: the copy is made.
            return _Work(self._meeting.ranks, _Message(done=True))
        return _Work(self._meeting.ranks, message)

    @torch.no_grad()
    def _collective(
        self, operation: str, sent: Tensor, received: Tensor, give: Callable[[list[Tensor]], Sequence[Tensor]]
    ) -> dist.Work:
        """give: inputs by rank -> outputs by rank."""
        number, self._made = self._made, self._made + 1
        call = self._meeting.calls.setdefault(number, _Call(operation))
        if call.operation != operation or any(other.shape != sent.shape for other in call.sent.values()):
            raise RuntimeError(f"the ranks make other collectives: {call.operation} and {operation} {list(sent.shape)}")
        call.sent[self._me], call.received[self._me] = sent, received
        if len(call.sent) == self.size():
            del self._meeting.calls[number]
            members = range(self.size())
            for rank, given in enumerate(give([call.sent[member] for member in members])):
                call.received[rank].copy_(given.view_as(call.received[rank]))
            call.done = True
            self._meeting.ranks.tell()
        return _Work(self._meeting.ranks, call)
