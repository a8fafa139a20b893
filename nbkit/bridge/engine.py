"""The life of a rank after its fork: it binds to its device and cores, joins the world, becomes an ipyparallel engine.

The order matters. The rank binds to its device and cores before CUDA or any thread starts. On one host the world is
formed before the engine registers, so that the world is up when the hub hears the first heartbeat. On several hosts the
engines register first, because they get the address of the world through the notebook.

When the cluster ends and its user has not asked for it, `Ending` saves a training at its next step boundary. This
happens when the parent or the controller was killed, or when a batch system has sent SIGTERM to the parent or to all
processes of the job. A batch system does not wait for long. Without a controller no message of a rank reaches the
notebook. So the rank writes how it ended to the cluster's folder, where the notebook reads it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import ipykernel.debugger  # noqa: F401  # every kernel imports it: half of the CPU time of a rank's start
from ipyparallel.engine.app import IPEngine

from nbkit.bridge import calls
from nbkit.bridge.output import OutputCapture, draw_as_text
from nbkit.bridge.parent.spec import EngineSpec
from nbkit.bridge.replacing.replacement_rank import ReplacementRank
from nbkit.bridge.replacing.surviving_rank import SurvivingRank
from nbkit.bridge.requests import Requests
from nbkit.bridge.runner import Runner
from nbkit.bridge.stopping import Stopping
from nbkit.bridge.user_programs import hide_the_world, run_launched_in_place, warn_of_cells
from nbkit.device_kinds import CPU
from nbkit.errors import ClusterError
from nbkit.mpi_variables import forget_mpi
from nbkit.rank.comm.background_creation import forming
from nbkit.rank.device import accelerator
from nbkit.rank.telemetry import sinks
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.replace import resume_fit
from nbkit.rank.world import failure_alarm, world
from nbkit.rank.world.rank_place import RankPlace
from nbkit.wire import cluster_end
from nbkit.wire.cells import ENGINE_OPTIONS
from nbkit.wire.cluster_end import ClusterEnd, end_signals
from nbkit.wire.link import Link
from nbkit.wire.messages import (
    CloseSinks,
    EndOfCluster,
    EndTraining,
    FormResizedWorld,
    FormWorld,
    ForParent,
    ForRank,
    GivenUp,
    LeaveWorld,
    RankIsDead,
    RankIsReplaced,
    RankReady,
    RanksChanged,
    ReleaseCell,
    SinksOpened,
    TrainingEnded,
    deliver,
    handles,
)
from nbkit.wire.user_code import look_in

PARENT_SECONDS = 1.0
SEND_SECONDS = 0.5  # to send the record of the last cell before this process ends


class Ending:
    """Ends this rank when its cluster ends. There is one object per rank. loop: the engine's, in the main thread."""

    def __init__(self, runner: Runner, folder: Path, loop: Any) -> None:
        self.runner, self.folder, self._loop = runner, folder, loop
        self._began, self._pid, self._why = False, os.getpid(), ""
        step_boundary.handlers["ended"] = self._training_ended
        self._signals = {signal.SIGTERM, *end_signals()}
        for number in self._signals:
            signal.signal(number, self._on_signal)
        self._masks = threading.local()  # signal masks of threads that fork
        os.register_at_fork(
            before=self._block_signals, after_in_parent=self._unblock_signals, after_in_child=self._reset_in_fork
        )

    def end_training(self, why: str) -> None:
        """End the training at its next boundary, and any later training too. The rank lives on. Any thread may call it.

        why: the reason; "" takes the request back.
        """
        self._why = why
        step_boundary.tell_to_end(why)

    def begin(self, why: str, *, now: bool) -> None:
        """End this rank when the running cell has ended. A training in the cell ends at its next step boundary.

        now: do not wait for a cell that does not train. A later call replaces the reason, since it may know more. Any
        thread may call this.
        """
        self._why = why
        trains = step_boundary.training() is not None
        if now and not trains and not self._began:
            sinks.close_all()
            os._exit(1)
        if trains and cluster_end.read(self.folder) is None:
            cluster_end.write(self.folder, ClusterEnd(why))
        step_boundary.tell_to_end(why)
        if not self._began:
            self._began = True
            threading.Thread(target=self._end, name="nbkit-end", daemon=True).start()

    def _training_ended(self, told: tuple[str, int, str]) -> None:
        why, step, saved = told
        cluster_end.write(self.folder, ClusterEnd(why, step, saved))
        self.runner.link.send(TrainingEnded(why, step, saved))

    def _end(self) -> None:
        for running in list(self.runner.running):
            running.ended.wait()
        sinks.close_all()
        self._loop.add_callback(self._loop.call_later, SEND_SECONDS, os._exit, 1)

    # These signals must end a fork of this rank, such as a worker of a pool, like any process. But with a handler set,
    # Python loses signals that reach a fork before it is ready. So they are blocked until the fork has removed it.

    def _block_signals(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def _unblock_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _reset_in_fork(self) -> None:
        for number in self._signals:
            if signal.getsignal(number) == self._on_signal:  # a fork that forks again may have set its own handler
                signal.signal(number, signal.SIG_DFL)
        self._unblock_signals()

    def _on_signal(self, number: int, _: object) -> None:
        # Use another thread: a signal can interrupt any code of this thread, even this class.
        why = f"the ranks were told to end ({signal.Signals(number).name})"
        threading.Thread(target=self._begin_by_signal, args=(why,), name="nbkit-signal", daemon=True).start()

    def _begin_by_signal(self, why: str) -> None:
        if step_boundary.training() is None:
            # A batch system signals all processes at once, so the parent ends this rank too. If the rank ended first,
            # the parent would report it as dead.
            time.sleep(PARENT_SECONDS)
        self.begin(self._why or why, now=True)


class RankEngine(IPEngine):  # type: ignore[misc]
    """ipyparallel's engine. It becomes a rank as soon as it has a kernel."""

    spec: EngineSpec
    rank: int
    link: Link[ForParent, ForRank]
    replaces: bool

    async def register(self) -> None:
        """Register like ipyparallel's engine. If this rank replaces a dead engine, unregister the dead one first.

        Both messages use the same socket, so the hub hears them in order. It gives nobody an id that is still taken.
        """
        if self.replaces:
            send = self.session.send

            def send_after(stream: Any, *message: Any, **options: Any) -> Any:
                self.session.send = send
                send(stream, "unregistration_request", content={"id": self.rank})
                return send(stream, *message, **options)

            self.session.send = send_after
        await super().register()

    async def complete_registration(self, *args: Any, **kwargs: Any) -> None:
        await super().complete_registration(*args, **kwargs)
        # The call above does not return to the event loop, so no message has been handled yet.
        capture = OutputCapture(self.rank, Path(self.spec.folder) / "output")
        capture.install(self.kernel.session)
        draw_as_text()
        look_in("")
        warn_of_cells()
        hide_the_world()
        run_launched_in_place()
        self.runner = calls.runner = Runner(self.kernel.shell, capture, self.link, self.rank)
        self.stopping = Stopping(self.runner)
        self.ending = Ending(self.runner, Path(self.spec.folder), self.loop)
        Requests(self.runner, self.stopping).install(self.kernel)
        _fill_namespace(self.kernel.shell.user_ns, self.spec.place(self.rank))
        self.survivor = resume_fit.host = SurvivingRank(self.runner)
        self.newcomer = ReplacementRank(self.runner) if self.replaces else None
        self.link.listen(lambda message: deliver(message, self), self._orphaned)
        sinks.announce = lambda: self.link.send(SinksOpened())
        self.link.send(RankReady())
        if self.newcomer is not None:
            self.newcomer.announce()

    # Messages of the parent, on the link's thread

    @handles(ReleaseCell)
    def _on_release(self, message: ReleaseCell) -> None:
        self.stopping.release(message.cell, message.reason)

    @handles(FormWorld, FormResizedWorld)
    def _on_form(self, message: ForRank) -> None:
        newcomer, self.newcomer = self.newcomer, None
        if newcomer is not None:
            self.loop.add_callback(self._take_over, newcomer, message)
        else:
            self.survivor.hear(message)

    @handles(RankIsReplaced, GivenUp, LeaveWorld)
    def _on_training(self, message: ForRank) -> None:
        self.survivor.hear(message)

    @handles(RanksChanged)
    def _on_ranks_changed(self, message: RanksChanged) -> None:
        self.runner.capture.publish(message, self.kernel.iopub_socket)

    @handles(RankIsDead)
    def _on_rank_died(self, message: RankIsDead) -> None:
        rank = message.death.rank
        calls.dead.add(rank)
        # Forming a world belongs to no cell, so nothing else would end the wait for the dead rank.
        if forming.deadline is not None:
            failure_alarm.break_out(f"rank {rank} died")
        self.runner.capture.publish(message, self.kernel.iopub_socket)

    @handles(EndTraining)
    def _on_end_training(self, message: EndTraining) -> None:
        self.ending.end_training(message.why)

    @handles(CloseSinks)
    def _on_close_sinks(self, _: CloseSinks) -> None:
        sinks.close_all()
        os._exit(0)

    @handles(EndOfCluster)
    def _on_end_of_cluster(self, message: EndOfCluster) -> None:
        self.ending.begin(message.why, now=message.now)

    def _take_over(self, newcomer: ReplacementRank, message: FormWorld | FormResizedWorld) -> None:
        try:
            newcomer.take_over(message)
        except BaseException:  # a rank that is only half ready is useless; the parent starts another one
            traceback.print_exc(file=sys.__stderr__)
            sys.__stderr__.flush()  # type: ignore[union-attr]
            os._exit(1)

    def _orphaned(self) -> None:
        """End this rank because its parent is gone and nobody would reap it.

        On one host it ends after its cell; a training is saved and ends at its next step boundary. In a cluster on
        several hosts it ends at once: it counts as dead, and nobody could end it later.
        """
        if self.spec.line is not None:
            shutil.rmtree(self.spec.folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)
        self.ending.begin("the parent of the ranks has ended", now=False)


def main(
    spec: EngineSpec,
    rank: int,
    listener: socket.socket | None,
    link: Link[ForParent, ForRank],
    *,
    replaces: bool = False,
) -> None:
    """Be rank `rank` until the cluster stops. Never returns.

    replaces: the other ranks already have a world, and this rank joins it later. Either the rank of this number has
        died in a training, or the number of ranks grows.
    """
    pin = spec.pin(rank)
    log = Path(spec.folder) / "logs" / f"rank{rank}.log"
    _redirect_to_log(log)
    failure_alarm.dump_on_signal(log)
    forget_mpi(os.environ)
    os.environ.update(spec.environment(rank))
    os.environ["OMP_NUM_THREADS"] = str(pin.threads)  # for processes that this rank starts
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    if pin.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, pin.cores)
    import torch

    # libgomp read OMP_NUM_THREADS when the parent loaded it, so setting the variable alone has no effect here.
    torch.set_num_threads(pin.threads)
    _draw_own_numbers()
    calls.place, calls.address, calls.hosts = spec.place(rank), spec.address, spec.hosts
    if spec.device != CPU:
        accelerator().choose(calls.place.local_rank)
    # On several hosts the ranks first learn each other's addresses through the notebook. A new rank joins later.
    if spec.line is None and not replaces:
        world.World.join(calls.place, listen=listener, address=spec.address, port=spec.port)
    _verify_device(pin.env.get("CUDA_VISIBLE_DEVICES", ""), spec.device)
    sys.argv = ["ipengine"]  # user code sees this instead of nbkit's own arguments
    RankEngine.spec, RankEngine.rank, RankEngine.link, RankEngine.replaces = spec, rank, link, replaces
    RankEngine.launch_instance(
        [
            f"--profile-dir={spec.profile_dir}",
            f"--IPEngine.url_file={spec.engine_file}",
            f"--IPEngine.id={rank}",
            *ENGINE_OPTIONS,
            "--log-level=30",
        ]
    )
    os._exit(0)


def _draw_own_numbers() -> None:
    """Seed the random generators of torch and numpy anew.

    Without this, all forks of one parent would draw the same random numbers, unlike processes of torchrun. Python seeds
    its own generator anew in every fork. The generator of a GPU starts when this process first uses CUDA.
    """
    import torch

    torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def _verify_device(pinned: str, device: str) -> None:
    """Raise ClusterError if torch uses another GPU than this rank was given, by UUID.

    MIG instances have other names and are not checked.
    """
    if device == CPU or not pinned.startswith("GPU-"):
        return
    used = accelerator().uuid(accelerator().device(device))
    if not used.startswith(pinned):
        raise ClusterError("A rank is not on the GPU that it was given.", numbers=f"given {pinned}, torch uses {used}")


def _fill_namespace(user_ns: dict[str, Any], place: RankPlace) -> None:
    import torch
    import torch.distributed as dist

    import nbkit

    user_ns.update(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        device=accelerator().device(place.device),
        torch=torch,
        dist=dist,
        nbkit=nbkit,
    )


def _redirect_to_log(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
