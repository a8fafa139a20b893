"""The table of messages between the processes of a cluster, and the dispatcher that calls their handlers.

Each message is a frozen dataclass. Its base classes say who receives it, and its docstring says who sends it and why:

    notebook  --Request----->  rank                     ipykernel's control channel
    notebook  <-ForNotebook--  rank                     its output channel
    rank      --ForParent--->  parent of its host       a socket pair
    rank      <-ForRank------  parent
    parent    --ForCoordinator->  coordinator           TCP between hosts, signed
    parent    <-ForHost---------  coordinator
    agent     --ForCoordinator->  coordinator           the same line, before the agent becomes the parent
    agent     <-ForAgent--------  coordinator
    notebook  --ForJob----->  rank of a program that listens     TCP on loopback, signed
    notebook  <-JobAnswer---  rank of a program that listens

To follow a message, look for its class: it is made where it is sent, and a method with `@handles(ItsClass)` receives
it. A new message is a class here, a `link.send(...)`, and a method with `@handles`.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from inspect import get_annotations
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Concatenate,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from nbkit.errors import ClusterError
from nbkit.wire.cells import CellRequest, Prompt
from nbkit.wire.processes import Process

_making = threading.Lock()


@dataclass_transform(frozen_default=True)
class Message:
    """A message. Its fields are plain values, tuples, messages, and dataclasses of these.

    A subclass needs no decorator: it becomes a frozen dataclass when its first message is made. A process uses only a
    few of them, and making all at import took 0.04 s in every notebook and rank.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        with _making:  # several threads send
            if "__dataclass_fields__" not in vars(cls):
                dataclass(frozen=True)(cls)
        return super().__new__(cls)


class Request(Message):
    """Sent by the notebook to a rank. The rank answers at once with plain values, even if its main thread is busy."""


class ForNotebook(Message):
    """Sent by a rank to every notebook that listens, over the same channel as the outputs of cells."""


class ForParent(Message):
    """Sent by a rank to the parent of its host."""


class ForRank(Message):
    """Sent by a parent to its rank."""


class ForCoordinator(Message):
    """Sent by a host of a cluster on several hosts: by its agent, or by the parent of its ranks."""


class ForAgent(Message):
    """Sent by the coordinator to a host whose ranks are not forked yet."""


class ForHost(Message):
    """Sent by the coordinator to the parent of the ranks of a host."""


class ForJob(Message):
    """Sent by a notebook or a command to a rank of a program that listens. The rank answers with one JobAnswer."""


class PassedOn(ForCoordinator, ForHost):
    """Sent by one host to others through the coordinator."""


@dataclass(frozen=True)
class Death:
    """The end of a rank's process.

    how: "SIGKILL", "it exited with code 1", ... when: time.time(). pid: 0 if unknown. cells: the cells that it ran, or
    None if that is unknown. failed: the error of its device if that does not compute any more, or "".
    """

    rank: int
    how: str
    when: float
    pid: int = 0
    cells: tuple[str, ...] | None = None
    failed: str = ""


@dataclass(frozen=True)
class RankEnd(Death):
    """The report of a death in the cluster's folder, which the notebook reads.

    replaced: "" if the rank is not replaced, "under way" or "done". by: the new process. cell: the cell with the
    training. said: a sentence for the user.
    """

    replaced: str = ""
    by: Process | None = None
    cell: str = ""
    said: str = ""


@dataclass(frozen=True)
class SizeChange:
    """The report of a finished resize in the cluster's folder, which the notebook reads.

    n: the number of ranks. pids, pins: of all ranks. newcomers: the new ranks. cell: the cell in which it was done.
    enters: True if new ranks run that cell. said: a sentence for the user. when: time.time().
    """

    n: int
    pids: tuple[int, ...]
    pins: tuple[dict[str, Any], ...]
    newcomers: tuple[int, ...]
    cell: str
    enters: bool
    said: str
    when: float


@dataclass(frozen=True)
class WantedSize:
    """The number of ranks that a resize wants. pins: of all ranks, () to keep them. cell: the cell that wants it."""

    size: int
    pins: tuple[dict[str, Any], ...]
    cell: str


# notebook -> rank: cells


class SayHello(Request):
    """The notebook asks for a Hello. If that arrives, outputs will arrive too."""


class GetStatus(Request):
    """The notebook asks for the process, device and world of a rank, and for what it is doing."""


class NotebookSeen(Request):
    """The notebook regularly says that it is there. cell: a cell whose outputs and records it has all got, or ""."""

    cell: str = ""


class FollowCell(Request):
    """The notebook asks for outputs of a cell that it has missed, from `cursor` on, and for the record of its end."""

    cell: str
    cursor: int


class StopCell(Request):
    """The notebook stops a cell for the user. number: the request's, the same on all ranks. live: see RunLiveCell."""

    cell: str
    number: int
    live: bool = False


class StopCall(Request):
    """The notebook stops one of its own calls, such as sending a value, because it does not wait for it any longer."""


class CompleteName(Request):
    """The notebook asks for the names on a rank that begin with this text, to complete them on Tab."""

    text: str


class AnswerPrompt(Request):
    """The notebook sends the line that a person has typed at prompt `number` of a rank."""

    number: int
    line: str


class RefusePrompts(Request):
    """The notebook says that nobody can type anything in a cell, and why."""

    cell: str
    why: str


# notebook -> rank: trainings. All ranks act on a request with a number after the same step.


class RunLiveCell(Request):
    """The notebook sends a cell that runs between two steps of a training."""

    number: int
    cell: CellRequest


class ControlTraining(Request):
    """The notebook sends an action on a training, such as "switch". GetControlResult asks for the result."""

    number: int
    id: str
    action: str
    args: dict[str, Any]


class GetControlResult(Request):
    """The notebook asks for the result of an action, and whether the rank knows of it."""

    id: str


class GetStrategies(Request):
    """The notebook asks for the progress of a training, and for the table of strategies if it is newer than `known`."""

    known: str = ""


class GetStrategyRow(Request):
    """The notebook asks for the row of one strategy, even if the table does not have it."""

    strategy: str


class GetRecords(Request):
    """The notebook asks for the newest run's directory, or a part of a rank's record file: see `recorded`."""

    rank: int
    file: str = ""
    offset: int = 0


# notebook -> rank: ranks that do not answer


class GetActivity(Request, ForJob):
    """The notebook asks where a rank's code is and what it waits for. stacks: True to get the stack of each thread."""

    stacks: bool = False


class GetProgress(Request):
    """The notebook asks for a value that changes with every operation and step of a rank."""


class LookAtProcesses(Request):
    """The notebook asks a rank for the state of the processes of silent ranks on the same host."""

    ranks: tuple[int, ...]
    processes: tuple[Process, ...]


# notebook -> rank of a program that listens


class GetJobState(ForJob):
    """The notebook asks for the progress of a rank: its step, seconds of a step, loss, memory."""


class PlanJobCell(ForJob):
    """The notebook asks a rank to stop after step number `step` for a live cell, and wait for a DecideJobCell."""

    source: str
    step: int


class DecideJobCell(ForJob):
    """The notebook tells a rank to run the planned cell, or not to. seconds: the time limit of the cell.

    It is sent when all ranks have planned the cell, so that all run it after the same step, or none does.
    """

    run: bool
    seconds: float = 60.0


class JobAnswer(Message):
    """A rank of a program that listens answers. error: an error in words; "" if `values` has the answer."""

    values: dict[str, Any]
    error: str = ""


# rank -> notebook


class Hello(ForNotebook):
    """A rank answers SayHello over its output channel."""


class LiveCellEnded(ForNotebook):
    """A live cell has ended on a rank. record: see `record_text`."""

    record: str


class PromptOpened(ForNotebook):
    """A rank waits for a line that a person types."""

    prompt: Prompt


# rank -> parent: cells and the life of the process


class RankReady(ForParent):
    """A rank has registered its engine, and can run cells."""


class SinksOpened(ForParent):
    """A training in the rank has opened sinks of the user. The parent has them closed before it ends the rank."""


class CellBegan(ForParent):
    """A rank begins a cell. ranks: all ranks that run it, so that the parent can release them when one fails."""

    cell: str
    ranks: tuple[int, ...]


class CellEnded(ForParent):
    """A cell has ended on a rank. status: if it is "error", the parent releases the other ranks of the cell."""

    cell: str
    status: str


class InUse(ForParent, ForCoordinator):
    """A notebook has shown that it is there. The cluster's time to live begins again."""


class InterruptRank(Request, ForParent, PassedOn):
    """The notebook asks to interrupt a cell of a rank that does not answer. Another rank passes this to the parents."""

    rank: int
    cell: str


class EndRank(Request, ForParent, PassedOn):
    """The notebook asks to end a rank that does not answer at all. Another rank passes this to the parents."""

    rank: int


class DeviceFailed(ForParent):
    """A rank ends because its device does not compute any more. said: the message of the device."""

    said: str


class TrainingEnded(ForParent, ForCoordinator):
    """A rank has ended and saved its training, because the cluster ends. saved: what was saved, or why nothing was."""

    why: str
    step: int
    saved: str


# rank -> parent: a training in which dead ranks are replaced. The first host's parent gets these from all hosts.


class FitEntered(ForParent):
    """A rank has begun a `fit`. A new rank can enter it at this statement of this cell."""

    cell: str
    statement: int


class FitLeft(ForParent):
    """A rank has left the `fit`. why: the error that has ended it, or ""."""

    why: str = ""


class ReadyToForm(ForParent):
    """A rank waits to form the next generation of the world: after a death, for a resize, or because it is new.

    generation: the newest that it was in; 0 if the rank is new. step: its number of finished steps; -1 if unknown.
    address, port: of the store, from rank 0. process: of a new rank. resize: the number of ranks that it waits for.
    """

    generation: int
    step: int
    address: str = ""
    port: int = 0
    process: Process | None = None
    resize: WantedSize | None = None


class TrainingGoesOn(ForParent):
    """A rank goes on after the world was formed again, so the replacement or resize is done. said: for the user."""

    said: str


class WaitsForOthers(ForParent):
    """A rank has waited for others in a step; 0 seconds: it goes on. due: end the ranks that do not wait: they hang."""

    seconds: float
    due: bool


# parent -> rank


class ReleaseCell(ForRank):
    """The parent ends a rank's part of a cell, because another rank of the cell has failed or died."""

    cell: str
    reason: str


class RankIsDead(ForRank, ForNotebook, PassedOn):
    """The parent reports that a rank is dead and is not replaced. The other ranks tell the notebook.

    unregister: True if the receiving parent has to tell the hub, since the rank's own parent is gone.
    """

    death: Death
    unregister: bool = False


class RankIsReplaced(ForRank):
    """The parent reports that a rank has died in a training and is replaced. The other ranks leave their step."""

    death: Death


class FormWorld(ForRank):
    """The parent tells all ranks to form a generation of the world, in which new ranks replace dead ones.

    address, port: of its store. statement: where new ranks enter the cell. how, since: which ranks died of what, and
    when. devices: a sentence about the devices of new ranks, or "".
    """

    generation: int
    address: str
    port: int
    newcomers: tuple[int, ...]
    statement: int
    how: str
    since: float
    devices: str


class FormResizedWorld(ForRank):
    """The parent tells ranks to form a generation of the world with another number of ranks. pins: of all of them."""

    generation: int
    address: str
    port: int
    newcomers: tuple[int, ...]
    statement: int
    size: int
    pins: tuple[dict[str, Any], ...]


class GivenUp(ForRank):
    """The parent tells waiting ranks that the dead rank is not replaced, or that the number of ranks stays."""

    why: str


class LeaveWorld(ForRank):
    """The parent tells a rank that the resized world goes on without it."""


class RanksChanged(ForRank, ForNotebook):
    """The parent has written the report of a finished replacement or resize. The ranks tell the notebook to read it."""


class EndTraining(ForRank, ForHost):
    """The coordinator tells trainings to save and end at their next step. The ranks live on. why: "" takes it back."""

    why: str


class CloseSinks(ForRank):
    """The parent tells a rank to close the user's sinks and to end. It is killed if that takes too long."""


class EndOfCluster(ForRank, ForHost):
    """A parent tells a rank, or the coordinator a parent, to save a training and end after the cell.

    now: end at once if there is no training.
    """

    why: str
    now: bool = True


# agent -> coordinator -> agent: the start of a cluster on several hosts


class HostJoined(ForCoordinator):
    """An agent describes its host, so that the coordinator can compare the hosts.

    ahead: seconds by which its clock is ahead of the coordinator's. labels, reasons: of its ranks' devices. spares:
    labels of devices in reserve. versions: package -> version. driver: version of the NVIDIA driver, or "".
    """

    index: int
    host: str
    driver: str
    ahead: float
    versions: dict[str, str]
    device: str
    backend: str
    labels: tuple[str, ...]
    reasons: tuple[str, ...]
    spares: tuple[str, ...]
    notes: tuple[str, ...]
    addresses: tuple[str, ...]


class HostUnfit(ForCoordinator):
    """An agent reports why its host cannot run its ranks. This ends the start. The fields are those of NbkitError."""

    host: str
    what: str
    numbers: str
    hint: str


class Listen(ForAgent):
    """The coordinator tells an agent to listen for a moment, to test if other hosts can connect to it."""


class Listening(ForCoordinator):
    """An agent listens at this address and port."""

    address: str
    port: int


class TryHosts(ForAgent):
    """The coordinator tells an agent to try to connect to hosts that listen: (number of the host, address, port)."""

    places: tuple[tuple[int, str, int], ...]


class HostsTried(ForCoordinator):
    """An agent reports the hosts that it could not connect to: (number of the host, the system's error)."""

    unanswered: tuple[tuple[int, str], ...]


class StartRanks(ForAgent):
    """The coordinator tells an agent to become the parent of its ranks, since all hosts are compatible."""

    backend: str
    device: str
    addresses: tuple[str, ...]


# parent -> coordinator -> parents of other hosts: cells, and the end


class StartFailed(ForCoordinator):
    """A parent reports that a rank ended before the cluster was ready. log: the last lines of the rank's log."""

    rank: int
    how: str
    log: tuple[str, ...]


class CellFailed(PassedOn):
    """A parent reports that a cell has failed on a rank. The parents of other hosts release the cell's other ranks."""

    cell: str
    rank: int


class ToldToEnd(ForCoordinator):
    """A parent has got SIGTERM. The coordinator knows more about the reason, and tells the other hosts."""


class EndNow(ForAgent, ForHost):
    """The coordinator ends all ranks, or an agent without ranks, at once: the cluster ends, or the host is surplus."""

    why: str


# parent -> coordinator -> first host's parent, which decides for the ranks of all hosts


class RankStarted(PassedOn):
    """A parent has started a rank of its host."""

    rank: int
    pid: int


class RankSaid(PassedOn):
    """A parent passes on a message about a training from a rank of its host."""

    rank: int
    pid: int
    said: ForParent


class RankPlaced(PassedOn):
    """A parent has given a rank another device. spares: labels of the spares that are left. said: for the user."""

    rank: int
    said: str
    label: str
    reason: str
    spares: tuple[str, ...]


class RankEnded(PassedOn):
    """A parent reports that a rank of its host has ended. The first host's parent decides if it is replaced."""

    death: Death


class ReplacementNoted(ForCoordinator):
    """The first host's parent reports the state of a replacement. The coordinator writes the report."""

    end: RankEnd


# first host's parent -> coordinator -> parent of the rank


class StartRank(PassedOn):
    """The first host's parent asks for a new rank, to replace one that died in a training in this cell."""

    rank: int
    cell: str
    death: Death


class TellRank(PassedOn):
    """The first host's parent sends a message to a rank of another host."""

    rank: int
    message: ForRank


class DismissRank(PassedOn):
    """The first host's parent asks to end a rank of another host, without declaring it dead."""

    rank: int


# Encoding

REQUEST, NEWS = "nbkit_request", "nbkit_news"
"""The types of Jupyter messages that carry a Request, and a message ForNotebook."""

_NAME, _PROTOCOL = "_message", "_protocol"  # keys beside the fields, whose names do not begin with an underscore
T = TypeVar("T")


class ProtocolError(ClusterError):
    """A message that cannot be read, usually because another release of nbkit has sent it."""


def encoded(message: Message) -> dict[str, Any]:
    """Return a message as plain values, with its name and the version of the protocol."""
    return {_NAME: type(message).__name__, _PROTOCOL: protocol(), **_values_of(message)}


def decoded(values: Mapping[str, Any]) -> Message:
    """Return the message from the values that `encoded` returned, also if they were sent as JSON.

    Raises ProtocolError for another version of the protocol, and for a name or fields that are not in this table.
    """
    values = dict(values)
    name, version = values.pop(_NAME, ""), values.pop(_PROTOCOL, "none")
    if version != protocol():
        raise ProtocolError(
            "A process of this cluster has another release of nbkit.",
            numbers=f"its messages are of protocol {version}; this release reads {protocol()}",
            hint="%cluster stop   with the release that has started it; then %cluster start",
        )
    if (kind := _table().get(name)) is None or not issubclass(kind, Message):
        raise ProtocolError(f"There is no message {name!r}.", numbers="see nbkit/wire/messages.py")
    return from_plain(kind, values)


def to_plain(value: Any) -> Any:
    """Return dataclasses, and tuples of them, as plain values for JSON."""
    if isinstance(value, Message):
        return encoded(value)
    if is_dataclass(value):
        return _values_of(value)
    return [to_plain(each) for each in value] if isinstance(value, tuple) else value


def from_plain(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return an object of `kind` from the values of `to_plain`. Raises ProtocolError for missing or unknown fields."""
    hints = _hints(kind)  # type: ignore[arg-type]
    try:
        return kind(**{name: _typed(value, hints.get(name)) for name, value in values.items()})
    except TypeError as error:
        raise ProtocolError(f"A {kind.__name__} has other fields.", numbers=str(error)) from None


def _values_of(value: Any) -> dict[str, Any]:
    return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}


def _typed(value: Any, hint: Any) -> Any:
    """Return a plain value as the type `hint`. JSON has turned tuples into lists, and dataclasses into dicts."""
    parts = get_args(hint)
    if value is None:
        return None
    if get_origin(hint) in (Union, UnionType):
        return _typed(value, next(part for part in parts if part is not NoneType))
    if get_origin(hint) is tuple:
        kinds = [parts[0]] * len(value) if parts[1:] == (...,) else parts
        return tuple(map(_typed, value, kinds))
    if isinstance(hint, type) and issubclass(hint, Message):
        return decoded(value)
    return from_plain(hint, value) if is_dataclass(hint) else value  # type: ignore[arg-type]


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _table() -> dict[str, type]:
    """Return all messages, and the dataclasses in their fields, by name."""
    kinds = {name: kind for name, kind in globals().items() if isinstance(kind, type)}
    return {name: kind for name, kind in kinds.items() if is_dataclass(kind) or is_sent(kind)}


def is_sent(kind: type) -> bool:
    """Return True for the class of a message, False for the base classes that say who receives a message."""
    return issubclass(kind, Message) and not kind.__subclasses__()


@cache
def protocol() -> str:
    """Return the version of the protocol: a digest of all names and fields. It must be equal in a whole cluster."""
    table = [(name, list(get_annotations(kind).items())) for name, kind in sorted(_table().items())]
    return hashlib.sha256(repr(table).encode()).hexdigest()[:8]


# Dispatching

Receiver = TypeVar("Receiver")
M = TypeVar("M", bound=Message)
Context = ParamSpec("Context")
Handler: TypeAlias = Callable[Concatenate[Receiver, M, Context], T]


def handles(*kinds: type[M]) -> Callable[[Handler[Receiver, M, Context, T]], Handler[Receiver, M, Context, T]]:
    """Mark a method as the handler of these messages. It is called with the message, and with `deliver`'s context."""

    def mark(method: Handler[Receiver, M, Context, T]) -> Handler[Receiver, M, Context, T]:
        method.handled_messages = kinds  # type: ignore[attr-defined]
        return method

    return mark


@cache
def handlers_of(receiver: type) -> dict[type[Message], str]:
    """Return {class of a message: name of the method of `receiver` that handles it}."""
    methods = {name: method for base in reversed(receiver.__mro__) for name, method in vars(base).items()}
    return {kind: name for name, method in methods.items() for kind in getattr(method, "handled_messages", ())}


def deliver(message: Message, receiver: object, *context: Any) -> Any:
    """Call the handler of a message with the message and `context`, and return what it returns.

    A message without a handler is dropped and named in the log, because a process must not end because of it. A test
    checks that each kind has a handler (tests/wire/test_messages.py).
    """
    kind: Any = type(receiver)
    if (name := handlers_of(kind).get(type(message))) is None:
        print(f"{kind.__name__} does not handle {message}", file=sys.__stderr__, flush=True)
        return None
    return getattr(receiver, name)(message, *context)
