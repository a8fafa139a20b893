"""Makes a torch.distributed program that nbkit did not start visible. Its ranks answer requests of its user.

    nbkit.listen()                                             # one line, before init_process_group; or unchanged:
    torchrun --nproc-per-node 4 -m nbkit run train.py --lr 1e-3

Each rank has a thread that waits for requests on loopback, and a file in the job's folder (nbkit/job_folder.py).
Requests are signed with the job's secret and a nonce. Each request is written to the audit log.

While the program trains, nbkit records its collectives (rank/comm) and the phases of its steps, as for a Trainer. A
step ends when the step of the program's first optimizer ends. At that moment a live cell can run:

1. The notebook asks each rank for its step, and chooses a later step.
2. Each rank plans the cell for that step (PlanJobCell). If a rank is past the step, it refuses, and the notebook
   withdraws the cell from all ranks.
3. When all ranks have planned it, the notebook tells each of them to run it (DecideJobCell). A rank that reaches the
   step earlier waits for this.

So the cell runs after the same step on all ranks, or on no rank, and its collectives match.
"""

from __future__ import annotations

import ast
import atexit
import base64
import contextlib
import functools
import hashlib
import io
import linecache
import math
import os
import pickle
import secrets
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbkit import job_folder
from nbkit.errors import NbkitError, UsageError
from nbkit.job_folder import ListeningRank
from nbkit.quoting import path_part
from nbkit.rank.comm import group_creation
from nbkit.rank.telemetry import collectives
from nbkit.rank.telemetry.health import bytes_held, element_bytes
from nbkit.rank.telemetry.phases import OUTSIDE, clock, phase
from nbkit.rank.telemetry.session import Session
from nbkit.rank.torch_private import DataLoaderIterator
from nbkit.rank.world import world
from nbkit.rank.world.activity import activity
from nbkit.records.events import RunStarted, RunStopped
from nbkit.records.records import MemoryRecord
from nbkit.wire.import_changes import change_when_imported
from nbkit.wire.link import SignedLink, key_of
from nbkit.wire.messages import (
    DecideJobCell,
    ForJob,
    GetActivity,
    GetJobState,
    JobAnswer,
    PlanJobCell,
    deliver,
    encoded,
    handlers_of,
    handles,
)
from nbkit.wire.processes import Process, node_name
from nbkit.wire.user_code import is_users

LONGEST = 1 << 20  # bytes of a request
FIRST_SECONDS = 10.0  # a connection is closed if its first request takes longer
SILENT_SECONDS = 600.0  # a connection is closed if no request comes for this long
CONNECTIONS = 8  # maximum at the same time; others wait
DECIDE_SECONDS = 10.0  # a rank waits this long at the step of a planned cell
_REFUSED_SECONDS = 1.0  # a refused connection keeps its place for this long, so that the log cannot be flooded
_OUTPUT = 1 << 18  # maximum number of characters of a cell's output that are sent
_MEMORY_EVERY = 100  # steps from one measurement of memory to the next
_CELL = "<live cell>"

_listener: Listener | None = None


def listen(job: str | None = None, *, cells: bool = True) -> str:
    """Let nbkit examine this program: `nbkit why --job NAME`, `%cluster attach --job NAME`. Return the NAME.

    Call it on every rank, before the process group is made. A second call changes nothing. In a cell of a cluster, and
    in a process that a rank has spawned, the call does nothing and returns "".

    job: the name, the same on all ranks. Default: the name of the program and four letters that change with each start.
    cells: allow the user to run live cells between two steps.

    Raises UsageError if the process group exists already, and ClusterError if other users can access the job's folder.
    """
    global _listener
    if _listener is not None:
        return _listener.folder.name
    if world.current() is not None or sys._getframe(1).f_globals.get("__name__") == "__mp_main__":
        return ""
    if dist.is_initialized():
        raise UsageError(
            "A program listens before it makes its process group, so that nbkit sees its collectives.",
            numbers=f"rank {dist.get_rank()} has a process group already",
            hint="nbkit.listen()   in the line before init_process_group()",
        )
    rank, size, local_rank = place(os.environ)
    launch = launch_of(os.environ)
    folder = job_folder.make(_name(job, launch))
    secret = job_folder.made_secret(folder)
    sock = socket.create_server(("127.0.0.1", 0))
    process, port, command = Process.of(os.getpid()), sock.getsockname()[1], " ".join(sys.argv)
    here = ListeningRank(rank, size, node_name(), process, port, launch, command, time.time(), cells)
    _drop_old(folder, rank, size)
    group_creation.install(unlimited=False)
    _listener = Listener(folder, here, secret, sock, Steps(folder, rank, size, first_of_host=local_rank == 0))
    _listener.steps.install()
    _listener.start()
    job_folder.save(folder, here)
    if rank == 0:
        print(f"nbkit: this program listens.   nbkit why --job {folder.name}", file=sys.stderr, flush=True)
    return folder.name


_PLACES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Return (rank, world size, rank on its host) as set by torchrun, mpirun or srun; (0, 1, 0) without these."""
    for rank, size, local in _PLACES:
        if rank in environment and size in environment:
            number = int(environment[rank])
            return number, int(environment[size]), int(environment.get(local, number))
    return 0, 1, 0


def launch_of(environment: Mapping[str, str]) -> str:
    """Return a short text that is equal on all ranks of one start of the program, and differs between starts."""
    known = [environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")]
    known.append(environment.get("TORCHELASTIC_RUN_ID", ""))
    alone = place(environment)[1] == 1
    return hashlib.sha256(repr(os.getpid() if alone else known).encode()).hexdigest()[:8]


def _name(job: str | None, launch: str) -> str:
    if job is not None:
        other = job_folder.ranks_in(job_folder.folder_of(job)).values()
        if not any(rank.launch != launch and rank.is_alive() for rank in other):
            return path_part(job)
        print(f"nbkit: another program listens as {job!r}; this one adds {launch[:4]}", file=sys.stderr, flush=True)
    return f"{path_part(job or Path(sys.argv[0]).stem or 'python')}-{launch[:4]}"


def _drop_old(folder: Path, rank: int, size: int) -> None:
    """Remove this rank's records from an earlier start of the same name. Rank 0 also removes ranks beyond `size`."""
    for path in [*folder.glob("rank*.json"), *folder.glob("telemetry/rank*")]:
        number = path.name.removeprefix("rank").partition(".")[0]
        if number.isdecimal() and (int(number) == rank or (rank == 0 and int(number) >= size)):
            path.unlink(missing_ok=True)


class Listener:
    """The thread of a rank that accepts connections, and starts a thread for each."""

    def __init__(self, folder: Path, here: ListeningRank, secret: str, sock: socket.socket, steps: Steps) -> None:
        self.folder, self.here, self.secret, self.sock, self.steps = folder, here, secret, sock, steps
        self._places = threading.Semaphore(CONNECTIONS)

    def start(self) -> None:
        """Start to accept connections."""
        threading.Thread(target=self._accept, name="nbkit-listen", daemon=True).start()

    def note(self, **entry: Any) -> None:
        """Write a line to the audit log. A full disk does not end the training."""
        with contextlib.suppress(OSError):
            job_folder.note(self.folder, {"rank": self.here.rank, **entry})

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                sock, _ = self.sock.accept()
            except OSError:  # such as too many open files, which may be temporary
                self._places.release()
                time.sleep(_REFUSED_SECONDS)
                continue
            threading.Thread(target=self._converse, args=(sock,), name="nbkit-asked", daemon=True).start()

    def _converse(self, sock: socket.socket) -> None:
        try:
            if fault := Conversation(self, sock).run():
                self.note(refused=fault)
                time.sleep(_REFUSED_SECONDS)
        except OSError as error:
            self.note(refused=f"{type(error).__name__}: {error}")
        finally:
            sock.close()
            self._places.release()


class Conversation:
    """A connection of the job's user. It answers requests one after the other."""

    def __init__(self, listener: Listener, sock: socket.socket) -> None:
        self.listener, self.steps, self.sock = listener, listener.steps, sock
        self.cell: PlannedCell | None = None

    def run(self) -> str:
        """Answer requests until the other end closes. Returns why the connection was refused, "" if it was not."""
        nonce = secrets.token_hex(16)
        self.sock.settimeout(FIRST_SECONDS)
        self.sock.sendall(nonce.encode() + b"\n")
        key = key_of(self.listener.secret, nonce)
        link: SignedLink[JobAnswer, ForJob] = SignedLink(self.sock, key, opened=False)
        link.longest = LONGEST
        try:
            while (requests := link.receive()) is not None:
                self.sock.settimeout(SILENT_SECONDS if link.received else FIRST_SECONDS)
                for request in requests:
                    link.send(self._answer(request))
        finally:
            if self.cell is not None:
                self.steps.withdraw(self.cell)
        return link.fault or ("" if link.received else "no signed request came")

    def _answer(self, request: ForJob) -> JobAnswer:
        entry = {key: value for key, value in encoded(request).items() if key != "_protocol"}
        asked = entry.pop("_message")
        try:
            if type(request) not in handlers_of(Conversation):  # type: ignore[comparison-overlap]
                raise UsageError(f"A program that listens does not answer {asked}.")
            if isinstance(request, PlanJobCell):  # logged before the cell runs, because it may end the process
                self.listener.note(asked=asked, **entry)
            values = deliver(request, self)
        except Exception as error:
            said = str(error) if isinstance(error, NbkitError) else f"{type(error).__name__}: {error}"
            self.listener.note(asked=asked, **entry, outcome=f"refused: {said}")
            return JobAnswer({}, said)
        outcome = values.get("outcome", "done") if isinstance(values, dict) else "done"
        self.listener.note(asked=asked, **entry, outcome=outcome)
        return JobAnswer(values)

    @handles(GetJobState)
    def _on_state(self, _: GetJobState) -> dict[str, Any]:
        return self.steps.state()

    @handles(GetActivity)
    def _on_activity(self, asked: GetActivity) -> dict[str, Any]:
        """Return what this rank is doing now, in the form in which a rank of a cluster reports it."""
        step = self.steps.count if self.steps.count else None
        found = activity(self.listener.here.rank, {}, stacks=asked.stacks, cell=0, step=step)
        return {"activity": base64.b64encode(pickle.dumps(found)).decode()}

    @handles(PlanJobCell)
    def _on_plan(self, planned: PlanJobCell) -> dict[str, Any]:
        if not self.listener.here.cells:
            raise UsageError("This program runs no live cells.", hint="nbkit run ...   without --no-cells")
        self.cell = self.steps.plan(planned)
        return {"step": self.steps.count}

    @handles(DecideJobCell)
    def _on_decision(self, decided: DecideJobCell) -> dict[str, Any]:
        cell, self.cell = self.cell, None
        if cell is None:
            raise UsageError("No live cell is planned.")
        if not decided.run:
            self.steps.withdraw(cell)
            return {"outcome": "withdrawn"}
        cell.run = True
        cell.decided.set()
        if not cell.ended.wait(decided.seconds):
            self.steps.withdraw(cell)  # has no effect if the cell has begun
            cell.ended.wait(0.1)
        return cell.result or {"outcome": f"did not end within {decided.seconds:g} s", "output": ""}


class PlannedCell:
    """A cell that is planned for the end of a step. result: its outcome and output, None before it has ended."""

    def __init__(self, planned: PlanJobCell) -> None:
        self.source, self.step, self.run = planned.source, planned.step, False
        self.decided, self.ended = threading.Event(), threading.Event()
        self.result: dict[str, Any] | None = None

    def end(self, outcome: str, output: str = "", value: str = "") -> None:
        self.result = {"outcome": outcome, "output": output[-_OUTPUT:], "value": value[-_OUTPUT:]}
        self.ended.set()


class Steps:
    """Counts and records the steps of the program's optimizer, and runs live cells between them."""

    def __init__(self, folder: Path, rank: int, size: int, *, first_of_host: bool) -> None:
        self._folder, self._rank, self._size, self._first_of_host = folder, rank, size, first_of_host
        self.count = 0
        self._session: Session | None = None
        self._device = torch.device("cpu")
        self._optimizer: weakref.ref[Any] | None = None
        self._failed = False
        self._inside: int | None = None  # id of the outermost optimizer that is in its step now
        self._outer = ""
        self._numbers: dict[str, Any] = {}
        self._times: deque[float] = deque(maxlen=20)
        self._lock = threading.Lock()
        self._cell: PlannedCell | None = None
        self._names: dict[str, Any] = {}  # names that live cells have defined

    def install(self) -> None:
        """Watch the program's optimizers, backward passes, data loaders and loggers from now on."""
        register_optimizer_step_pre_hook(self._before)  # type: ignore[arg-type]
        register_optimizer_step_post_hook(self._after)  # type: ignore[arg-type]
        torch.autograd.backward = _timed_backward(torch.autograd.backward)
        DataLoaderIterator.__next__ = _in_phase("data", DataLoaderIterator.__next__)
        change_when_imported({module: functools.partial(_watch, *at, self.log) for module, at in _LOGGERS.items()})
        atexit.register(self.end)

    def state(self) -> dict[str, Any]:
        """Return step, median seconds of a step, loss (if the program logs it), learning rate and bytes of memory."""
        held, peak, _ = bytes_held(self._device)
        times = list(self._times)
        seconds = median(b - a for a, b in pairwise(times)) if len(times) > 1 else None
        numbers = {name: self._numbers.get(name) for name in ("loss", "lr")}
        return {"step": self.count, "seconds": seconds, **numbers, "memory": held, "peak": peak}

    def log(self, values: Mapping[str, Any]) -> None:
        """Keep the loss of the numbers that the program logs. A loss on a device is ignored, since reading it waits."""
        for name, value in values.items():
            if name.rpartition("/")[2] in ("loss", "train_loss", "training_loss"):
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
                    value = value.item()
                if isinstance(value, int | float) and math.isfinite(value):
                    self._numbers["loss"] = float(value)

    def plan(self, planned: PlanJobCell) -> PlannedCell:
        """Plan a cell. Raises UsageError if its step is over, or if another cell is planned."""
        ast.parse(planned.source)
        with self._lock:
            if self._cell is not None:
                raise UsageError("Another live cell is planned.", numbers=f"after step {self._cell.step}")
            if planned.step <= self.count:
                raise UsageError("The step is over.", numbers=f"asked for step {planned.step}, now at {self.count}")
            self._cell = cell = PlannedCell(planned)
        return cell

    def withdraw(self, cell: PlannedCell) -> None:
        """Forget a cell that has not begun."""
        with self._lock:
            if self._cell is cell:
                self._cell = None
                cell.run = False
                cell.decided.set()
                cell.end("withdrawn")

    def end(self) -> None:
        """Write the remaining records, at the end of the program."""
        session, self._session = self._session, None
        if session is not None:
            self._write_numbers(session)
            session.write(RunStopped(self.count).as_dict())
            session.close()

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._safely(self._enter, optimizer)
        # A closure may contain the whole step, as in Lightning. Its forward and backward are not the optimizer's work.
        if self._inside != id(optimizer) or (closure := kwargs.get("closure", args[1:] and args[1])) is None:
            return None
        if not callable(closure):
            return None
        inside = _in_phase("forward", closure)
        return (args, {**kwargs, "closure": inside}) if "closure" in kwargs else ((args[0], inside, *args[2:]), kwargs)

    def _after(self, optimizer: Any, *_: Any) -> None:
        self._safely(self._leave, optimizer)

    def _safely(self, act: Callable[[Any], None], optimizer: Any) -> None:
        """Call `act`. An error in it does not end the training, but stops all recording."""
        if self._failed:
            return
        try:
            act(optimizer)
        except Exception as error:
            self._failed = True
            said = "".join(traceback.format_exception_only(type(error), error)).strip()
            print(f"nbkit: rank {self._rank} records no more steps: {said}", file=sys.stderr, flush=True)

    def _enter(self, optimizer: Any) -> None:
        if self._inside not in (None, id(optimizer)) or torch.compiler.is_compiling():
            return  # this optimizer runs inside another one, or its step is being compiled
        self._inside = id(optimizer)
        if self._session is not None and (self.count == 1 or self.count % _MEMORY_EVERY == 0):
            self._measure(optimizer)
        self._outer = clock.switch("optimizer")

    def _leave(self, optimizer: Any) -> None:
        if self._inside != id(optimizer):
            return
        self._inside = None
        clock.back(self._outer)
        first = self._optimizer() if self._optimizer is not None else None
        if first is None:
            self._optimizer = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        self._step(optimizer)

    def _step(self, optimizer: Any) -> None:
        if self._session is not None:
            self._write_numbers(self._session)
            clock.step(self.count + 1)
        elif self.count == 0 and clock.laps is None and collectives.mode() != "off":
            self._begin(optimizer)
        self.count += 1
        self._times.append(time.monotonic())
        self._numbers["lr"] = _number(optimizer.param_groups[0].get("lr"))
        if self._cell is not None:
            self._serve(self._cell, optimizer)

    def _write_numbers(self, session: Session | None) -> None:
        """Write the numbers of the last step. Call it at the end of the next step, because programs log in between."""
        if session is not None and self.count > 1:  # the first step is not recorded
            session.write({"kind": "step", "step": self.count, **self._numbers})

    def _begin(self, optimizer: Any) -> None:
        """Start to record. It is called at the end of the first step, when the device is known from the parameters."""
        device = next((param.device for group in optimizer.param_groups for param in group["params"]), None)
        self._device = device or self._device
        try:
            self._session = Session(
                self._folder, rank=self._rank, world_size=self._size, device=device, first_of_host=self._first_of_host
            )
        except OSError as error:
            print(f"nbkit: rank {self._rank} records nothing: {error}", file=sys.stderr, flush=True)
            return
        self._session.write(RunStarted(1).as_dict())
        clock.switch("forward")  # time without any other state is the program's own computation

    @torch.no_grad()
    def _measure(self, optimizer: Any) -> None:
        assert self._session is not None
        params = [param for group in optimizer.param_groups for param in group["params"]]
        seen: set[tuple[int, int]] = set()
        held, peak, source = bytes_held(self._device)
        self._session.memory(
            MemoryRecord(
                self.count + 1,
                parameters=element_bytes(map(_local, params), seen),
                gradients=element_bytes((_local(param.grad) for param in params), seen),
                optimizer=element_bytes(_kept(optimizer), seen),
                now=held,
                peak=0 if source == "rss" else peak,
                source="storages" if source == "rss" else source,
            )
        )

    def _serve(self, cell: PlannedCell, optimizer: Any) -> None:
        """Run a planned cell if its step has come. The training thread calls it."""
        if self.count < cell.step:
            return
        with phase(OUTSIDE):
            cell.decided.wait(DECIDE_SECONDS)
            with self._lock:
                if self._cell is not cell:
                    return
                self._cell = None
            if not cell.run:
                cell.end("nobody decided, so it did not run")
                return
            frame = sys._getframe(1)
            users: FrameType | None = frame
            while users is not None and not is_users(users.f_code.co_filename):
                users = users.f_back
            names = {"torch": torch, "dist": dist, **self._names}
            names |= {**users.f_globals, **users.f_locals} if users is not None else {}
            names |= {"optimizer": optimizer, "rank": self._rank, "world_size": self._size}
            given = dict(names)
            cell.end(*_ran(cell.source, names))
            self._names |= {name: value for name, value in names.items() if given.get(name, names) is not value}


def _ran(source: str, names: dict[str, Any]) -> tuple[str, str, str]:
    """Run a cell with the namespace `names`. Returns (outcome, printed output, text of its last value)."""
    linecache.cache[_CELL] = (len(source), None, source.splitlines(keepends=True), _CELL)
    printed, value, outcome = io.StringIO(), None, "ran"
    body = ast.parse(source, _CELL)
    last = body.body[-1] if body.body else None
    if isinstance(last, ast.Expr):
        body.body.pop()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            exec(compile(body, _CELL, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), _CELL, "eval"), names)
            shown = "" if value is None else repr(value)
        except (Exception, SystemExit) as error:
            shown, outcome = "", f"failed: {type(error).__name__}: {error}"
            trace = error.__traceback__.tb_next if error.__traceback__ else None
            printed.write("".join(traceback.format_exception(type(error), error, trace)))
    return outcome, printed.getvalue(), shown


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):  # in a captured step, the learning rate may be a tensor
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _local(tensor: Any) -> Any:
    """Return the part of a DTensor that this rank holds; return anything else unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _kept(optimizer: Any) -> Iterable[Any]:
    for state in list(optimizer.state.values()):
        if isinstance(state, dict):
            yield from (_local(value) for key, value in state.items() if key != "step")


def _in_phase(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        outer = clock.switch(name)
        try:
            return function(*args, **kwargs)
        finally:
            clock.back(outer)

    return inside


def _timed_backward(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's backward with the phase "backward". It also records the waits that happen in C++."""

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        ring = collectives.ring
        before, ring.backward = ring.backward, ring.end
        outer = clock.switch("backward")
        try:
            return plain(*args, **kwargs)
        finally:
            _mark_wait_in_cpp(ring.backward)
            ring.backward = before  # None, except in a backward pass inside another one
            clock.back(outer)

    return backward


def _mark_wait_in_cpp(begun: int) -> None:
    """Record the wait of torch's DDP at the end of a backward pass.

    DDP waits for its buckets in C++, without calling our handles. It issues the last bucket when the last gradient is
    ready. From that moment to the end of the pass it waits, or copies the sums into the gradients.

    With find_unused_parameters, DDP also sums which parameters were used. It waits for this sum after the buckets, and
    by our handle. The beginning of this recorded wait is moved to the beginning of the wait for the buckets.
    """
    end = collectives.ring.end
    calls, _ = collectives.ring.between(max(begun, end - 2), end)
    last, laps = calls[-1] if calls else None, clock.laps
    if laps is None or last is None or last.peer is not None:
        return
    moved = last.waited is not None
    if moved:
        states = [state for state, _ in laps[-2:]]
        last = calls[0]
        if last.waited is not None or last.peer is not None or states != [last.group.blocked, "backward"]:
            return
    if last.on_device is not None:
        first, stop = last.on_device.ended_in_stream()
        if moved:
            laps[-2] = last.group.blocked, first
        else:
            clock.insert(last.group.blocked, first, stop)
    elif laps[-3 if moved else -1][1] <= last.issued:
        stop = laps[-2][1] if moved else time.perf_counter_ns()
        last.waited, last.blocked = last.issued, stop - last.issued
        if moved:
            laps[-2] = last.group.blocked, last.issued
        else:
            clock.insert(last.group.blocked, last.issued, stop)


# The methods by which libraries log: module -> (class, method, index of the first argument of interest).
_LOGGERS = {
    "transformers.trainer": ("Trainer", "log"),
    "accelerate.accelerator": ("Accelerator", "log"),
    "wandb.sdk.wandb_run": ("Run", "log"),
    "torch.utils.tensorboard.writer": ("SummaryWriter", "add_scalar"),
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": ("_LoggerConnector", "log_metrics"),
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector": ("_LoggerConnector", "log_metrics"),
}


def _watch(owner: str, method: str, tell: Callable[[Mapping[str, Any]], None], module: ModuleType) -> None:
    """Make a library's method call `tell` with what it logs: a dict of numbers, or a tag and a number."""
    kind = getattr(module, owner, None)
    plain = getattr(kind, method, None)
    if kind is None or plain is None:
        return

    @functools.wraps(plain)
    def log(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args[:2], *kwargs.values()]
        if given and isinstance(given[0], Mapping):
            tell(given[0])
        elif len(given) > 1 and isinstance(given[0], str):
            tell({given[0]: given[1]})
        return plain(self, *args, **kwargs)

    setattr(kind, method, log)
