"""The selftest: items that are tried one after the other on one cluster. Nothing of it outlives the `with` block.

Each item of `nbkit selftest` uses cells and calls as a user of the cluster would. The report is one Markdown file, and
contains nothing that a stranger should not read.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

from nbkit.device_kinds import CPU, GLOO
from nbkit.errors import CellError, CellStopped, NbkitError, StrategyError
from nbkit.figures import seconds, size
from nbkit.notebook.bug_report import block, bug_report, without_secrets
from nbkit.notebook.cluster.cells.handle import CellHandle
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.cluster import Cluster
from nbkit.notebook.cluster.hosts.launcher import StartRequest
from nbkit.notebook.doctor import doctor
from nbkit.notebook.run.reader import read_run
from nbkit.notebook.user_files import uninterrupted, write_file
from nbkit.strategy import Strategy
from nbkit.wire.messages import GetStatus

SETUP = "from nbkit.rank.selftest import small_job, speed"
STEPS = 4
CELL_SECONDS = 300.0
LOSSES, WEIGHTS = {"cpu": 1e-10, "gpu": 1e-4}, {"cpu": 1e-9, "gpu": 2e-4}
"""The allowed distance from one process in float64 and in float32: LOSSES relative, WEIGHTS of which a step moves each
by 1e-3."""
BYTES = 0.05  # rows of the small model are padded
BF16 = 1e-2
"""The allowed relative distance of a loss in bf16 from that of one process in bf16."""
_PEERS = {"ddp": "DDP", "zero3": "FSDP2", "tp": "tensor.parallel", "pp": "Schedule1F1B"}
_PRETENDED_BYTES = 192 << 20  # of a device, for a large model on CPU ranks
_NCCL_LOG = "nccl-log"
_WAY = re.compile(r"-> \d+\[\w+\](?: \[\w+\])? via (NET/\w+|\w+)")
_APART = "small_job.apart(trainer)"
_TOGETHER = "total = torch.ones(1, device=device); dist.all_reduce(total); int(total)"


class SelftestFailed(Exception):
    """An item has found something that must not happen."""


class ItemSkipped(Exception):
    """An item cannot be tried here. The text says why."""


@dataclass(frozen=True)
class SelftestCluster:
    """The cluster that items run on. kind: "cpu" or "gpu". folder: for records. hosts: how many there are."""

    cluster: Cluster
    kind: str
    folder: Path
    hosts: int = 1

    @property
    def n(self) -> int:
        return self.cluster.entry.n

    @property
    def pipelines(self) -> bool:
        """Return True if stages can send to each other. gloo cannot send GPU tensors."""
        return self.kind == CPU or self.cluster.entry.backend != GLOO

    def cell(self, source: str) -> Results:
        """Run it on all ranks, and wait. Raises what it raised, or TimeoutError if it does not end."""
        # A detached cell, so that Ctrl-C ends the waiting, and the whole with it.
        results: Results = self.cluster.run(source, detach=True).wait(CELL_SECONDS)
        return results

    def as_one_process(self) -> str:
        """Return how far apart `trainer` and one process are. Raises SelftestFailed if it is too far."""
        every = self.cell(_APART).values.values()
        losses, weights = (max(one[what] for one in every) for what in ("losses", "weights"))
        said = f"losses {losses:.1e}, weights {weights:.1e} from one process"
        # So that NaN is wrong, too.
        if not (losses <= LOSSES[self.kind] and weights <= WEIGHTS[self.kind]):
            raise SelftestFailed(f"{said}; at most {LOSSES[self.kind]:.0e} and {WEIGHTS[self.kind]:.0e}")
        return said

    def training(self, strategy: str) -> CellHandle:
        """Run an endless training of `trainer` that has made a few steps. Raises SelftestFailed if it makes none."""
        # The Trainer is made in its own cell. Until it exists, the reported steps are those of the previous one.
        self.cell(f"trainer = small_job.trainer({strategy!r})")
        handle: CellHandle = self.cluster.run("trainer.fit(100_000)", detach=True)
        deadline = time.monotonic() + CELL_SECONDS
        while self._steps() < STEPS:
            if time.monotonic() > deadline or handle.status != "running":
                raise SelftestFailed(f"the training under {strategy} has not made {STEPS} steps")
            time.sleep(0.05)
        return handle

    def _steps(self) -> int:
        # Not `training.look()`, which has a rank compute a table of all strategies.
        told = self.cluster.connection.client.ask([0], GetStatus()).get(0, {})
        return int(told["progress"].get("step", 0)) if told.get("training") else 0


@dataclass(frozen=True)
class Item:
    """An item of the selftest.

    name: what `--only` accepts. try_it: returns a line about what was found; raises SelftestFailed, ItemSkipped, or
    what went wrong.
    """

    name: str
    try_it: Callable[[SelftestCluster], str]


def items(n: int) -> tuple[Item, ...]:
    """Return all items for `n` ranks."""
    strategies = {
        "ddp": "ddp",
        "zero1": "zero1",
        "zero2": "zero2",
        "zero3": "zero3",
        "hsdp": "hsdp",
        "tp": "tp",
        "1f1b": "pp schedule=1f1b",
        "gpipe": "pp schedule=gpipe",
        "interleaved": "pp schedule=interleaved",
        "zb": "pp schedule=zb",
        "cp": f"cp={n}",
        "dp-tp": f"dp=2 tp={n // 2}",
        "dp-pp": f"dp=2 pp={n // 2}",
    }
    return (
        *(Item(name, partial(trained, strategy)) for name, strategy in strategies.items()),
        Item("dropout", dropped),
        Item("switch", switched),
        Item("stop", stopped),
        Item("error", first_error),
        Item("death", death),
        Item("telemetry-ddp", partial(recorded, "ddp")),
        Item("telemetry-zero3", partial(recorded, "zero3")),
        Item("bf16", in_bf16),
        Item("torchrun", torchrun_script),
        Item("large", large),
        Item("transports", transports),
        Item("communicators", communicators),
        Item("bandwidth", bandwidth),
        *(Item(f"speed-{name}", partial(speed, name)) for name in _PEERS),
        Item("speed-cp", context),
    )


def trained(strategy: str, at: SelftestCluster) -> str:
    """Return a few steps under `strategy`, beside one process."""
    at.cell(f"trainer = small_job.under({_allowed(strategy, at)!r})\ntrainer.fit({STEPS})")
    return at.as_one_process()


def dropped(at: SelftestCluster) -> str:
    """Masks of dropout are the same on every device, so that a switch changes none."""
    if wrong := sum(at.cell("small_job.masks_differ()").values.values()):
        raise SelftestFailed(f"{wrong} elements of masks differ from those of the CPU")
    return "masks are those of the CPU"


def switched(at: SelftestCluster) -> str:
    """Live switches there and back while it trains, then as one process that was never switched."""
    _needs(2, at)
    handle = at.training("ddp")
    pauses = []
    for strategy in ("zero3", "tp", "zero3", "ddp", *(("pp", "ddp") if at.pipelines else ())):
        done = at.cluster.switch(strategy).result
        if done["identical"] is False:
            raise SelftestFailed(f"the state differs after the switch to {strategy}")
        pauses.append(done["pause_s"])
    handle.stop(end_after=CELL_SECONDS)
    return f"{len(pauses)} switches, pauses of {seconds(median(pauses))}; {at.as_one_process()}"


def stopped(at: SelftestCluster) -> str:
    """Stop in a training, which goes on in the next cell."""
    handle = at.training("ddp")
    began = time.monotonic()
    status = handle.stop(end_after=CELL_SECONDS).status
    took = time.monotonic() - began
    if status != "interrupted":
        raise SelftestFailed(f"the cell ended with the status {status!r}")
    at.cell("trainer.fit(2)")
    return f"within {seconds(took)}; {at.as_one_process()}"


def first_error(at: SelftestCluster) -> str:
    """Check that the error of one rank is named, and that the training goes on in the next cell."""
    rank = at.n - 1
    at.cell(f"trainer = small_job.trainer('ddp', callbacks=[small_job.Fails({rank}, after=2)])")
    try:
        at.cell("trainer.fit(4)")
    except CellError as error:
        if error.rank != rank or "PlannedError" not in f"{error}{error.traceback}":
            raise SelftestFailed(f"of rank {error.rank}: {error}") from None
    else:
        raise SelftestFailed("the cell did not fail")
    _all_answer(at)
    at.cell(f"trainer.fit(until={STEPS})")
    return f"rank {rank} named; {at.as_one_process()}"


def death(at: SelftestCluster) -> str:
    """Check that a rank that dies in a training is replaced, and that the next cell runs on all ranks."""
    _needs(2, at)
    rank = at.n - 1
    before = at.cell("import os\nos.getpid()").values
    at.cell(f"trainer = small_job.trainer('zero3', callbacks=[small_job.Dies({rank}, after=6)])")
    at.cell("history = trainer.fit(until=10)")
    after = _all_answer(at, "import os\nos.getpid()")
    if [other for other in before if before[other] != after[other]] != [rank]:
        raise SelftestFailed(f"processes before {dict(before)}, after {dict(after)}")
    return f"rank {rank} replaced; {at.as_one_process()}"


def recorded(strategy: str, at: SelftestCluster) -> str:
    """Check the bytes that telemetry has counted in a step against the formula."""
    _needs(2, at)
    if not all(at.cell(f"import os\nos.path.isdir({str(at.folder)!r})").values.values()):
        raise ItemSkipped("the hosts do not see the folder of the report")
    folder = at.folder / f"telemetry-{strategy}"
    at.cell(f"trainer = small_job.trainer({strategy!r}, log_dir={str(folder)!r}, name='run')\ntrainer.fit(6)")
    (run,) = folder.iterdir()
    rows = [row for row in read_run(run).picture(5)["table"] if row["formula_bytes"]]
    if not rows:
        raise SelftestFailed("no operation of a step was recorded")
    said = [f"{row['op']} {size(row['bytes'])} ({row['bytes'] / row['formula_bytes']:.3f})" for row in rows]
    if any(abs(row["bytes"] / row["formula_bytes"] - 1) > BYTES for row in rows):
        raise SelftestFailed(f"{', '.join(said)} of the formula; at most {BYTES:.0%} off")
    return f"{', '.join(said)} of the formula"


def in_bf16(at: SelftestCluster) -> str:
    """Return how far losses in bf16 are from those of one process in bf16."""
    found = {}
    for strategy in ("ddp", *(("zero3", "tp") if at.n > 1 else ())):
        found[strategy] = max(at.cell(f"small_job.in_bf16({strategy!r}, {STEPS})").values.values())
    said = f"losses {', '.join(f'{off:.1e} ({strategy})' for strategy, off in found.items())} from one process"
    if not all(off <= BF16 for off in found.values()):
        raise SelftestFailed(f"{said}; at most {BF16:.0e}")
    return said


def torchrun_script(at: SelftestCluster) -> str:
    """Run a program that was written for torchrun in a cell, as it is."""
    if not at.pipelines:
        raise ItemSkipped("ranks share a GPU, which torchrun does not do")
    run = "import runpy\n_ran = runpy.run_module('nbkit.rank.selftest.torchrun_script', run_name='__main__')"
    found = at.cell(f"{run}\n(_ran['saved'], _ran['losses'])").values.values()
    saved, losses = sum(saved for saved, _ in found), [each for _, each in found]
    if saved != at.hosts:
        raise SelftestFailed(f"{saved} ranks act as the first rank of their host, on {at.hosts} hosts")
    if any(each != losses[0] for each in losses) or losses[0] != sorted(losses[0], reverse=True):
        raise SelftestFailed(f"its losses are {losses}")
    _all_answer(at)  # it has destroyed the process group
    return f"losses {losses[0][0]:.3f} to {losses[0][-1]:.3f} on all ranks; the first of each host saves"


def large(at: SelftestCluster) -> str:
    """Build and train a model whose weights take over a third of a GPU."""
    found = at.cell(f"speed.large({_PRETENDED_BYTES if at.kind == CPU else None})").values
    if found[0] is None:
        raise ItemSkipped(f"too few: its weights, gradients and moments do not fit {at.n} rank{'s' * (at.n > 1)}")
    one, peak = found[0], max(each["peak"] for each in found.values())
    if any(each["loss"] != one["loss"] or each["loss"] != each["loss"] for each in found.values()):
        raise SelftestFailed(f"losses {[each['loss'] for each in found.values()]}")
    share = f"{one['weights'] / one['device']:.0%} of {'a pretended' if at.kind == CPU else 'the free'} memory"
    return f"{size(one['weights'])} of weights, {share}" + f"; {size(peak)} at the peak" * (at.kind != CPU)


def transports(at: SelftestCluster) -> str:
    """Return through what NCCL sends between ranks, from its log."""
    _needs(2, at)
    if at.kind == CPU or not at.pipelines:
        raise ItemSkipped("ranks send over gloo")
    if not (logs := sorted(at.folder.glob(f"{_NCCL_LOG}.*"))):
        raise ItemSkipped("NCCL logs elsewhere, or on hosts that do not see this folder")
    found = ways_of_nccl("\n".join(path.read_text(errors="replace") for path in logs))
    if not found:
        raise ItemSkipped("NCCL's log names none")
    return ", ".join(f"{way} {count} x" for way, count in found.items())


def ways_of_nccl(log: str) -> dict[str, int]:
    """Return transport -> how many connections NCCL's log names with it: P2P, SHM, NET/IB, NET/Socket."""
    return dict(Counter(_WAY.findall(log)).most_common())


def communicators(at: SelftestCluster) -> str:
    """Return the seconds and the memory of a device that one more communicator of all ranks takes."""
    _needs(2, at)
    every = at.cell("speed.communicators()").values.values()
    said = []
    for how in next(iter(every)):
        took, taken = (max(one[how][n] for one in every) for n in (0, 1))
        said.append(f"{how} in {seconds(took)}" + f", {size(taken)} of the GPU" * (at.kind != CPU))
    return "; ".join(said)


def bandwidth(at: SelftestCluster) -> str:
    """Return, for each operation, the bandwidth between all ranks and the seconds of a tiny one."""
    _needs(2, at)
    ways: Mapping[str, tuple[float, float]] = at.cell("speed.bandwidth()").values[0]
    wanted = {"all_reduce": "all_reduce", "all_gather": "all_gather", "send": "p2p"}
    return ", ".join(f"{wanted[op]} {size(ways[op][0])}/s and {seconds(ways[op][1])}" for op in wanted)


def speed(strategy: str, at: SelftestCluster) -> str:
    """Pace beside plain torch, in turns; nothing is judged."""
    if strategy in ("tp", "pp"):
        _allowed(strategy, at)
        _needs(2, at)
    peer = _PEERS[strategy]
    found: dict[str, Any] = at.cell(f"speed.compare({strategy!r}, {str(at.folder / 'speed')!r})").values[0]
    ratios = [ours / theirs for ours, theirs in zip(found["nbkit"], found["torch"], strict=True)]
    pace = f"{found['tokens'] / median(found['nbkit']):,.0f} tokens/s"
    pace += f", MFU {found['mfu']:.1%}" if found["mfu"] else ""
    model = f"{found['parameters'] / 1e6:,.1f} M parameters in {'bf16' if found['bf16'] else 'fp32'}"
    beside = f"a step takes {median(ratios):.3f} x torch's {peer} [{min(ratios):.3f}, {max(ratios):.3f}]"
    return f"{beside}; {pace}; {model}"


def context(at: SelftestCluster) -> str:
    """Return how long attention takes under cp, beside one device with as many tokens; nothing is judged."""
    _needs(2, at)
    said = []
    for degree in (degree for degree in (2, 4) if at.n % degree == 0):
        every = at.cell(f"speed.context({degree})").values
        first = every[0]
        ratios = [cp / one for cp, one in zip(first["cp"], first["one"], strict=True)]
        known = [one["hidden"] for one in every.values() if one["hidden"] is not None]
        hidden = f"{median(known):.0%} of its time hidden" if known else "not timed"
        said.append(
            f"cp={degree}: {seconds(median(first['cp']))}, {median(ratios):.3f} x one "
            f"{'CPU rank' if at.kind == CPU else 'GPU'} [{min(ratios):.3f}, {max(ratios):.3f}]; "
            f"{size(first['sent'])} sent, {hidden}"
        )
    if not said:
        raise ItemSkipped(f"{at.n} ranks are not divided by 2 or 4")
    return f"{'; '.join(said)}; {first['tokens']:,} tokens a rank"


def _all_answer(at: SelftestCluster, source: str = "") -> Mapping[int, Any]:
    """Return the values of a cell, after an all-reduce in it. Raises SelftestFailed if not all ranks took part."""
    totals = at.cell(_TOGETHER).values
    if set(totals.values()) != {at.n}:
        raise SelftestFailed(f"an all-reduce of ones gave {dict(totals)}")
    return at.cell(source).values if source else totals


def _allowed(strategy: str, at: SelftestCluster) -> str:
    n = at.n
    if n == 1 and strategy != "ddp":
        raise ItemSkipped("too few: 1 rank")
    try:
        made = Strategy.parse(strategy, n)
    except StrategyError as error:
        raise ItemSkipped(error.what) from None
    if made.pp > 1 and not at.pipelines:
        raise ItemSkipped("gloo sends no messages of a GPU")
    if strategy != "ddp" and made == Strategy.parse("ddp", n):
        raise ItemSkipped(f"too few: {n} ranks")
    return strategy


def _needs(ranks: int, at: SelftestCluster) -> None:
    if at.n < ranks:
        raise ItemSkipped(f"{at.n} rank")


TAIL = 60  # lines of what was printed before an item failed
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

State = Literal["ok", "FAILED", "left out"]


@dataclass(frozen=True)
class ItemOutcome:
    """Outcome of one item. tail: the last printed lines and the error, if it failed."""

    name: str
    state: State
    seconds: float
    said: str
    tail: str = ""

    @property
    def line(self) -> str:
        """Return the line for the terminal that follows the item's name."""
        took = f"{self.seconds:6.1f} s" if self.state != "left out" else " " * 8
        return f"{self.state:<8} {took}  {self.said.partition(chr(10))[0]}"


@dataclass(frozen=True)
class SelftestReport:
    """The report of a selftest. on: which ranks, in words. devices: what the ranks say about theirs."""

    on: str
    devices: str
    outcomes: tuple[ItemOutcome, ...]
    seconds: float
    began: float = field(default_factory=time.time)

    @property
    def failed(self) -> tuple[ItemOutcome, ...]:
        return tuple(one for one in self.outcomes if one.state == "FAILED")

    @property
    def verdict(self) -> str:
        """Return how many of what, in one line."""
        counts = {state: sum(one.state == state for one in self.outcomes) for state in ("ok", "FAILED", "left out")}
        words = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        return f"{words or 'nothing tried'}, in {self.seconds:.0f} s on {self.on}"

    def write(self, path: Path) -> None:
        """Write the report as Markdown."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, self._text())

    def _text(self) -> str:
        rows = [f"| {one.name} | {one.state} | {one.seconds:.1f} | {_cell(one.said)} |" for one in self.outcomes]
        parts = [
            f"# nbkit selftest: {self.verdict}",
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.began)),
            "\n".join(["| item | result | seconds | found |", "|---|---|---|---|", *rows]),
            *(f"## {one.name} failed\n\n{block(one.tail)}" for one in self.failed),
            f"## Ranks\n\n{block(self.devices)}",
            bug_report(doctor()),
        ]
        return without_secrets("\n\n".join(parts)) + "\n"


def tail_of(text: str) -> str:
    """Return the last lines, without colours."""
    return "\n".join(_COLOURS.sub("", text).splitlines()[-TAIL:])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# Ranks that outlive a killed selftest let go of their devices after this.
TTL_SECONDS = 60
_DEVICES = """
from nbkit.rank.device import accelerator
version = "" if device.type == "cpu" else f" {accelerator().backend_version()}"
f"{accelerator().name(device)}, {dist.get_backend()}{version}, {torch.get_num_threads()} threads"
"""


@contextmanager
def _logging_of_nccl(folder: Path) -> Iterator[None]:
    """Have ranks that start inside write to `folder` how NCCL connects, unless the user has NCCL log elsewhere."""
    if "NCCL_DEBUG_FILE" in os.environ:
        yield
        return
    before = os.environ.get("NCCL_DEBUG")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / f"{_NCCL_LOG}.%h.%p")}
    try:
        yield
    finally:
        del os.environ["NCCL_DEBUG_FILE"], os.environ["NCCL_DEBUG"]
        if before is not None:
            os.environ["NCCL_DEBUG"] = before


class Trial:
    """`with Trial(4, kind="cpu") as trial: trial.outcome(item)`. What cells print is kept for the report alone."""

    def __init__(self, n: int | None, *, cpu: bool, on: StartRequest | None = None, folder: Path | None = None) -> None:
        """Prepare a trial with `n` ranks of this machine, or `on` others. folder: for records, which all hosts see."""
        self._n, self._cpu, self._on, self._where = n, cpu, on, folder

    def __enter__(self) -> Trial:
        self._folder = tempfile.TemporaryDirectory(
            prefix="nbkit-selftest-", dir=self._where, ignore_cleanup_errors=True
        )
        folder, self._cluster = Path(self._folder.name), None
        try:
            with _kept(), _logging_of_nccl(folder):
                self._cluster = Cluster.start(self._n, cpu=self._cpu, ttl=TTL_SECONDS, on=self._on)
                hosts = 1 if self._on is None else self._on.num_hosts
                self._place = SelftestCluster(self._cluster, CPU, folder, hosts)
                kinds = set(self._place.cell("device.type").values.values())
        except BaseException:
            self.__exit__()
            raise
        self._place = replace(self._place, kind=CPU if kinds == {CPU} else "gpu")
        return self

    @property
    def ranks(self) -> str:
        """Return which ranks there are, in words."""
        n, hosts = self._place.n, self._place.hosts
        there = f"{n} {self._place.kind.upper()} rank{'s' * (n > 1)}"
        return there + (f" on {hosts} hosts" if hosts > 1 else "")

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            if self._cluster is not None:
                with _kept():
                    self._cluster.stop()
            self._folder.cleanup()

    def devices(self) -> str:
        """Return what each rank computes on."""
        with _kept():
            values = self._place.cell(_DEVICES).values
        return "\n".join(f"rank {rank}  {said}" for rank, said in values.items())

    def outcome(self, item: Item) -> ItemOutcome:
        """Try an item. After a failure the ranks are replaced by new ones."""
        began = time.monotonic()
        with _kept() as printed:
            try:
                self._place.cell(SETUP)
                found = item.try_it(self._place)
                return ItemOutcome(item.name, "ok", time.monotonic() - began, found)
            except ItemSkipped as why:
                return ItemOutcome(item.name, "left out", 0.0, str(why))
            except CellStopped:
                raise
            except Exception as error:
                took, said = time.monotonic() - began, _said(error)
                tail = "\n\n".join([tail_of(printed.getvalue()), said, *self._stuck(error)])
                self._place.cluster.restart()
                return ItemOutcome(item.name, "FAILED", took, said, tail)

    def _stuck(self, error: Exception) -> Iterator[str]:
        """Yield who is stuck where, if the error is a cell that did not end."""
        if isinstance(error, TimeoutError):
            yield tail_of(str(self._place.cluster.why()))


def _said(error: Exception) -> str:
    if isinstance(error, CellError):
        return tail_of(f"{error}\n{error.traceback}")
    if isinstance(error, NbkitError | SelftestFailed | TimeoutError):
        return str(error)
    return tail_of("".join(traceback.format_exception(error)))


@contextmanager
def _kept() -> Iterator[io.StringIO]:
    """Redirect everything printed inside, on any thread, to the yielded buffer."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        yield printed
