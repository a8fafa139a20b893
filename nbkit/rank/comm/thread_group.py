"""A process group whose ranks are threads of one process. Its collectives copy and add in memory.

It runs a complete strategy in one process, without any communication. Only one thread runs at a time: a rank runs until
it waits for another rank. So threads never use the state in a model's modules or in torch at the same time, and a
deadlock of all ranks is noticed at once. It works on the CPU only, where a backward pass runs in the calling thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class ThreadRanks(Generic[T]):
    """`size` ranks that are threads, for one `run`. ThreadMeeting makes groups of them."""

    def __init__(
        self,
        size: int,
        *,
        leave: Callable[[], Any] = lambda: None,
        enter: Callable[[Any], None] = lambda left: None,
    ) -> None:
        """leave: called when a rank pauses. enter: called with the result of `leave` when the rank continues."""
        self.size, self._leave, self._enter = size, leave, enter
        self._turn = threading.Condition()  # held by the rank that runs
        self._awaited: list[Callable[[], bool]] = []
        self._running = 0
        self._error: BaseException | None = None

    def run(self, of_rank: Callable[[int], T]) -> list[T]:
        """Run of_rank(rank) for every rank, and return the results by rank. Raises the first error of any rank."""
        results: dict[int, T] = {}

        def body(rank: int) -> None:
            with self._turn:
                try:
                    if self._error is None:
                        results[rank] = of_rank(rank)
                except BaseException as error:
                    self._error = self._error or error
                finally:
                    self._running -= 1
                    self._turn.notify_all()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        self._running = self.size
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt: waiting ranks end now, the running rank ends at its next wait
            self._error = error
            raise
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(self.size)]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let the other ranks run until ready() is true. A rank calls this, and another rank makes ready() true.

        Raises RuntimeError if another rank has failed, or if all remaining ranks wait.
        """
        left = self._leave()
        self._awaited.append(ready)
        try:
            while not ready():
                if len(self._awaited) == self._running and not any(each() for each in self._awaited):
                    self._error = self._error or RuntimeError("the ranks wait for each other")
                if self._error is not None:
                    self._turn.notify_all()
                    raise RuntimeError("another rank has failed")
                self._turn.wait()
        finally:
            self._awaited.remove(ready)
            self._enter(left)

    def tell(self) -> None:
        """Wake the other ranks, so that they check what they wait for. A rank calls this."""
        self._turn.notify_all()


@dataclass
class _Call:
    """A collective under way. sent, received: rank -> tensor, for the ranks that have called it so far.

    An entry of `sent` may be a tuple of the parts for each rank.
    """

    operation: str
    sent: dict[int, Any] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    done: bool = False


@dataclass
class _Message:
    """A message between two ranks. sent, received: the sent tensor and the tensor to receive into, None until known."""

    sent: Tensor | None = None
    received: Tensor | None = None
    done: bool = False


class ThreadMeeting:
    """The state that the ranks of a group share. members: the members' numbers in `ranks`, in the group's order."""

    def __init__(self, ranks: ThreadRanks[Any], members: Sequence[int]) -> None:
        self.ranks, self.members = ranks, tuple(members)
        self.calls: dict[int, _Call] = {}
        self.messages: dict[tuple[int, int, int], deque[_Message]] = {}

    def group_of(self, rank: int) -> ThreadGroup:
        """Return the group as seen by `rank`, one of the members."""
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


_COMBINE: tuple[tuple[Any, Callable[..., Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.PRODUCT, torch.mul),
)


class ThreadGroup(dist.ProcessGroup):
    """The process group that one rank of a ThreadMeeting uses. It has the operations that strategies use."""

    def __init__(self, meeting: ThreadMeeting, rank: int) -> None:
        super().__init__(rank, len(meeting.members))  # type: ignore[call-arg,arg-type]
        self._meeting, self._me, self._made = meeting, rank, 0

    def getBackendName(self) -> str:
        return "threads"

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        mean = opts.reduceOp == dist.ReduceOp.AVG
        combine = torch.add if mean else next((how for op, how in _COMBINE if opts.reduceOp == op), None)
        if combine is None:
            raise NotImplementedError(f"all_reduce with {opts.reduceOp}")

        def reduced(all_sent: list[Tensor]) -> list[Tensor]:
            # Reduce into the first rank's tensor, which needs no further memory. It receives the result anyway.
            for other in all_sent[1:]:
                combine(all_sent[0], other, out=all_sent[0])
            if mean:
                all_sent[0].div_(self.size())
            return all_sent[:1] * self.size()

        return self._collective("all_reduce", tensors[0], tensors[0], reduced)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        return self._collective(
            "broadcast", tensors[0], tensors[0], lambda all_sent: [all_sent[root].clone()] * self.size()
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Concatenate the inputs of all ranks in `output`."""
        return self._collective("all_gather", input, output, lambda all_sent: [torch.stack(all_sent)] * self.size())

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Write this rank's part of the sum of all inputs into `output`."""
        return self._collective(
            "reduce_scatter", input, output, lambda all_sent: list(reduce(torch.add, all_sent).view(self.size(), -1))
        )

    # A user's forward or loss may call these operations. Each waits at once.

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        found = inputs[0].new_empty(self.size(), *inputs[0].shape)
        work = self.all_gather_single(found, inputs[0])
        work.wait()
        for output, given in zip(outputs[0], found, strict=True):
            output.copy_(given)
        return work

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        here = outputs if self._me == opts.rootRank else [[torch.empty_like(inputs[0]) for _ in range(self.size())]]
        return self.allgather(here, inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        sent = torch.stack(inputs[0]) if self._me == root else outputs[0].new_zeros(self.size(), *outputs[0].shape)
        return self._waited("scatter", sent, outputs[0], lambda all_sent: list(all_sent[root]))

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        found = tensors[0].clone()
        work = self.allreduce([found], opts)
        work.wait()
        if self._me == opts.rootRank:
            tensors[0].copy_(found)
        return work

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:  # type: ignore[override]
        found = torch.stack(inputs[0])
        work = self.allreduce([found], opts)
        work.wait()
        outputs[0].copy_(found[self._me])
        return work

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        found = torch.empty_like(sent := torch.stack(inputs))
        work = self.alltoall_base(found, sent, (), ())
        for output, given in zip(outputs, found, strict=True):
            output.copy_(given)
        return work

    def barrier(self, opts: Any = None) -> dist.Work:  # type: ignore[override]
        nothing = torch.zeros(())
        return self._waited("barrier", nothing, nothing, lambda all_sent: [nothing.clone()] * self.size())

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Concatenate part `i` of every rank's input in the output of rank `i`. Sizes are lengths along dim 0."""
        parts = input.split(list(input_sizes) or [input.shape[0] // self.size()] * self.size())
        return self._waited(
            "all_to_all",
            parts,
            output,
            lambda all_sent: [torch.cat(given) for given in zip(*all_sent, strict=True)],
        )

    def _waited(self, *call: Any) -> dist.Work:
        work = self._collective(*call)
        work.wait()
        return work

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    # The names of these operations in torch before 2.13.
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
            queue.remove(message)  # the other rank has already called send or recv
        return message

    def _delivered(self, message: _Message) -> dist.Work:
        if message.sent is not None and message.received is not None:
            # Copy as bytes: the two tensors may have different dtypes.
            message.received.view(-1).view(torch.uint8).copy_(message.sent.view(-1).view(torch.uint8))
            message.done = True
            self._meeting.ranks.tell()
        elif message.sent is not None:
            # A send does not wait, because the data was copied.
            return _Work(self._meeting.ranks, _Message(done=True))
        return _Work(self._meeting.ranks, message)

    @torch.no_grad()
    def _collective(
        self, operation: str, sent: Any, received: Tensor, give: Callable[[list[Any]], Sequence[Tensor]]
    ) -> dist.Work:
        """Take part in a collective, which the last rank computes. give: inputs by rank -> outputs by rank."""
        number, self._made = self._made, self._made + 1
        call = self._meeting.calls.setdefault(number, _Call(operation))
        shape = None if isinstance(sent, tuple) else list(sent.shape)  # parts may differ in size: see alltoall_base
        if call.operation != operation or any(shape and list(each.shape) != shape for each in call.sent.values()):
            raise RuntimeError(f"the ranks make other collectives: {call.operation} and {operation} {shape}")
        call.sent[self._me], call.received[self._me] = sent, received
        if len(call.sent) == self.size():
            del self._meeting.calls[number]
            members = range(self.size())
            for rank, given in enumerate(give([call.sent[member] for member in members])):
                call.received[rank].copy_(given.view_as(call.received[rank]))
            call.done = True
            self._meeting.ranks.tell()
        return _Work(self._meeting.ranks, call)


class _Nobody(ThreadRanks[Any]):
    """The ranks of a world of one. A wait raises RuntimeError if it is not ready, because there is no other rank."""

    def wait(self, ready: Callable[[], bool]) -> None:
        if not ready():
            raise RuntimeError("it waits for another rank, and there is none")

    def tell(self) -> None:
        pass


class Alone(ThreadGroup):
    """A world of one process, used to examine a model. heard: the operations that user code ran in it."""

    def __init__(self) -> None:
        super().__init__(ThreadMeeting(_Nobody(1), (0,)), 0)
        self.heard: list[str] = []

    def _collective(self, operation: str, *args: Any) -> dist.Work:
        self.heard.append(operation)
        return super()._collective(operation, *args)
