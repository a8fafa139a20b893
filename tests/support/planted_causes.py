"""Trainings whose steps are slow, each for another reason, and the headline that their run must have.

python -m tests.support.planted_causes [WORD ...]      all of them, or those with a word in their name

Blocks of the model sleep instead of computing, so that other load of the machine changes little. A cause is planted in
a whole training: on a rank, in its loader, on its link, in a stage or in its memory. The headline is the sentence that
the dashboard, TensorBoard's tab and `nbkit watch` show above the bars.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_folder = Path(__file__).parent
if str(_folder) not in sys.path:
    sys.path.insert(0, str(_folder))

from ranks import run_ranks  # noqa: E402

STEPS = 11
ROWS, BLOCKS, UNIT = 8, 4, 0.006
"""Rows of a global batch, blocks of the model, and the seconds that a block sleeps in the forward of a row."""
LONG = 0.3
"""Seconds that a cause costs a rank in a step. A step without a cause takes about as long."""


@dataclass(frozen=True)
class Cause:
    """A training with a cause. words: parts of the headline. late: the rank that must be named, or None.

    compute, data, faults, examining: the ranks whose blocks, samples, memory or panel take LONG more seconds of a step.
    link: rank -> delay in seconds of the messages that it sends. collectives: delay in seconds of each collective.
    heavy: blocks that take four times as long.
    """

    name: str
    strategy: str
    words: tuple[str, ...]
    late: tuple[int, ...] = ()
    compute: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    faults: tuple[int, ...] = ()
    examining: tuple[int, ...] = ()
    heavy: tuple[int, ...] = ()
    link: dict[int, float] = field(default_factory=dict)
    collectives: float = 0.0


_ALONE = "look at what else runs on its machine"
_LOADER = "The loader takes longer there"
_BUBBLE = "of the step is pipeline bubble: try more micro-batches"
_PP = "schedule=1f1b microbatches="
TWO = (
    Cause("slow rank", "ddp", ("The other rank waits for rank 1. It computes for", _ALONE), (1,), compute=(1,)),
    Cause(
        "slow rank, zero3", "zero3", ("The other rank waits for rank 0. It computes for", _ALONE), (0,), compute=(0,)
    ),
    Cause("slow link, ddp", "ddp", ("of the step is exposed all-reduce on dp",), collectives=LONG),
    Cause(
        "slow link of a pipeline", f"pp {_PP}4", ("Messages from rank 0 to rank 1 hold the pipeline up",), link={0: 0.1}
    ),
    Cause("slow loader of a rank", "ddp", ("The other rank waits for rank 0.", _LOADER), (0,), data=(0,)),
    Cause("slow loader of both ranks", "ddp", ("of the step is waiting for data",), data=(0, 1)),
    Cause("bubble", f"pp {_PP}2", (_BUBBLE,)),
    Cause(
        "uneven stages",
        f"pp {_PP}8",
        ("The other rank waits for rank 1. Compute takes longer there",),
        (1,),
        heavy=(2, 3),
    ),
    Cause(
        "memory pressure on a rank", "ddp", ("The other rank waits for rank 1.", "back from disk"), (1,), faults=(1,)
    ),
    Cause(
        "nbkit examines strategies",
        "ddp",
        ("nbkit examines strategies for the panel on rank 0",),
        (0,),
        compute=(0,),
        examining=(0,),
    ),
    Cause("nobody, ddp", "ddp", ("% of the step is compute.",)),
)
FOUR = (
    Cause("slow rank", "ddp", ("The others wait for rank 2. It computes for", _ALONE), (2,), compute=(2,)),
    Cause(
        "slow rank beside its twin",
        f"dp=2 pp=2 {_PP}4",
        ("The others wait for rank 1. It computes for", _ALONE),
        (1,),
        compute=(1,),
    ),
    Cause(
        "slow rank while nbkit examines on another",
        "ddp",
        ("The others wait for rank 3. It computes for", _ALONE),
        (3,),
        compute=(3,),
        examining=(0,),
    ),
    Cause("slow link, zero3", "zero3", ("of the step is exposed all-gather on dp",), collectives=0.06),
    Cause(
        "slow link of a pipeline", f"pp {_PP}4", ("Messages from rank 3 to rank 2 hold the pipeline up",), link={3: 0.1}
    ),
    Cause("slow loader of a rank", "ddp", ("The others wait for rank 1.", _LOADER), (1,), data=(1,)),
    Cause("slow loader of all ranks", "zero1", ("of the step is waiting for data",), data=(0, 1, 2, 3)),
    Cause("bubble", f"pp {_PP}4", (_BUBBLE,)),
    Cause("uneven stages", f"pp {_PP}8", ("The others wait for rank 3. Compute takes longer there",), (3,), heavy=(3,)),
    Cause(
        "uneven stages of two ranks",
        f"dp=2 pp=2 {_PP}4",
        ("Compute takes longer there, and on rank", "the share is large"),
        (2, 3),
        heavy=(2, 3),
    ),
    Cause("memory pressure on a rank", "ddp", ("The others wait for rank 2.", "back from disk"), (2,), faults=(2,)),
    Cause("memory pressure on all ranks", "ddp", ("back from disk",), faults=(0, 1, 2, 3)),
    Cause("nobody, ddp", "ddp", ("% of the step is compute.",)),
)
CAUSES = {2: TWO, 4: FOUR}


@dataclass(frozen=True)
class Headline:
    """The sentence that a run showed for a cause.

    late: the rank that the bars call late, or None. wrong: what the sentence lacks, or "".
    """

    cause: Cause
    ranks: int
    sentence: str
    late: int | None
    wrong: str


def ask(ranks: int, causes: Sequence[Cause], folder: Path) -> list[Headline]:
    """Train with each cause on this many ranks, and read the headline of each run as every view does."""
    from nbkit.notebook.run.reader import RunReader

    folders = [folder / f"{ranks} {place}" for place in range(len(causes))]
    run_ranks(train, ranks, list(causes), folders, timeout=120 + 60 * len(causes))
    found = []
    for cause, each in zip(causes, folders, strict=True):
        (run,) = [path.parent for path in each.rglob("telemetry")]
        step = RunReader(run).picture()
        late = step["late"]["rank"] if step["late"] else None
        found.append(Headline(cause, ranks, step["reading"], late, _wrong(cause, step["reading"], late)))
    return found


def _wrong(cause: Cause, sentence: str, late: int | None) -> str:
    if lacking := [text for text in cause.words if text not in sentence]:
        return f"lacks {lacking}"
    if cause.late and late not in cause.late:
        return f"the bars call {'nobody' if late is None else f'rank {late}'} late"
    return "" if cause.late or "wait for rank" not in sentence else "blames a rank"


# On the ranks


def train(world: Any, causes: Sequence[Cause], folders: Sequence[Path]) -> None:
    """Run the trainings in order, each with its cause."""
    from bench.rigs.slept_link import SleptLink

    warnings.simplefilter("ignore")
    link = SleptLink()  # delays messages where the trainer measures them
    for cause, folder in zip(causes, folders, strict=True):
        _train(world.place.rank, cause, folder, link)


class _Late:
    """The handle of a collective that ends `seconds` late."""

    def __init__(self, work: Any, seconds: float) -> None:
        self._work, self._due = work, time.perf_counter() + seconds

    def wait(self, *args: Any) -> bool:
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return bool(self._work.wait(*args))

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._due and bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def _late_collectives(seconds: float) -> Iterator[None]:
    from nbkit.rank.telemetry import collectives

    follow = collectives.follow

    def later(call: Any, work: Any, **how: Any) -> Any:
        return follow(call, _Late(work, seconds) if work is not None and call.peer is None else work, **how)

    if seconds:
        collectives.follow = later
    yield
    collectives.follow = follow


def _train(rank: int, cause: Cause, folder: Path, link: Any) -> None:
    import torch
    from torch import Tensor, nn

    import nbkit
    from bench.rigs.slept_link import Rate
    from nbkit.rank import background_threads

    planted = False

    class Sleep(torch.autograd.Function):
        """An identity that sleeps in forward, and twice as long in backward."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
            ctx.seconds = seconds
            time.sleep(seconds)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            time.sleep(2 * ctx.seconds)
            return grad, None

    class Block(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.place = place

        def forward(self, x: Tensor) -> Tensor:
            seconds = 0.0
            if planted:
                seconds = UNIT * len(x) * (4 if self.place in cause.heavy else 1)
                # Each block has the same number of rows, and each stage the same number of blocks.
                seconds += LONG / share * len(x) / 3 * (rank in cause.compute)
            slept: Tensor = Sleep.apply(x * self.weight, seconds)  # type: ignore[no-untyped-call]
            return slept + (faulty() if planted and rank in cause.faults else 0.0)

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8 * ROWS

        def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
            if planted and rank in cause.data:
                time.sleep(LONG / own)
            draw = torch.Generator().manual_seed(place)
            return torch.randn(4, generator=draw), torch.randn(4, generator=draw)

    trainer = nbkit.Trainer(
        model=lambda: nn.Sequential(*(Block(place) for place in range(BLOCKS))),
        loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        data=Rows(),
        batch_size=ROWS,
        strategy=cause.strategy,
        log_dir=str(folder),
        progress=False,
    )
    strategy = trainer.job.strategy
    own = ROWS / strategy.dp  # rows of this rank
    share = own * BLOCKS / strategy.pp
    with _memory(rank in cause.faults) as faulty:
        looking = background_threads.examining() if rank in cause.examining else nullcontext()
        with looking, _late_collectives(cause.collectives):
            planted = True
            link.rate = Rate(cause.link[rank], 1e12) if rank in cause.link else None
            trainer.fit(STEPS)
            link.rate, planted = None, False


@contextmanager
def _memory(pressed: bool) -> Iterator[Any]:
    """Yield a function that reads memory which the system has moved to disk, as it does under memory pressure.

    The pages are read back one at a time."""
    if not pressed:
        yield lambda: 0.0
        return
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        size = 1 << 23
        file.write(b"\1" * size)
        file.flush()
        os.fsync(file.fileno())  # because only pages on disk can be dropped from memory
        with mmap.mmap(file.fileno(), size) as memory:
            memory.madvise(mmap.MADV_RANDOM)
            lock = threading.Lock()

            def read() -> float:
                with lock:
                    memory.madvise(21)  # MADV_PAGEOUT
                    until = time.perf_counter() + LONG / BLOCKS
                    return 0.0 * sum(memory[at] for at in range(0, size, 4096) if time.perf_counter() < until)

            yield read


def main(words: list[str]) -> int:
    """Print each headline. Return 1 if any is wrong."""
    right = total = 0
    with tempfile.TemporaryDirectory() as home:
        for ranks, causes in CAUSES.items():
            wanted = [one for one in causes if not words or any(word in f"{ranks}, {one.name}" for word in words)]
            for found in ask(ranks, wanted, Path(home)) if wanted else ():
                right, total = right + (not found.wrong), total + 1
                print(f"{'WRONG' if found.wrong else 'right'}  {ranks} ranks, {found.cause.name}", flush=True)
                print(f"       {found.sentence}", flush=True)
                if found.wrong:
                    print(f"       {found.wrong}", flush=True)
    print(f"{right} of {total} right")
    return 0 if right == total else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
