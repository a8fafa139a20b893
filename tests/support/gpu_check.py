"""Check strategies, switches, errors, deaths and features of a training on the pretended GPU against one process, and
what the host waits for in a steady step.

python -m tests.support.gpu_check            as make gpu-check; some of it: ... "llama zero3", ... switches fp16
python -m tests.support.gpu_check --real=nccl            on the GPU of this machine, which all ranks share
python -m tests.support.gpu_check --real=gloo ddp tp     without pipelines, whose messages gloo does not send from a GPU
"""

from __future__ import annotations

import _thread
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import nbkit

_TESTS = Path(__file__).resolve().parents[1]
for _folder in (_TESTS / "support", _TESTS.parent):
    sys.path.insert(0, str(_folder))
for _word in sys.argv[1:]:
    if _word.startswith("--real="):
        os.environ["NBKIT_CHECK_REAL_GPU"] = _word.removeprefix("--real=")  # ranks read it as well

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_features import FEATURES, check_features  # noqa: E402
from gpu_training import REAL, begun, looked_at, place, trainer_of  # noqa: E402
from pretend import Communicator  # noqa: E402
from ranks import RankFailed, next_generation, run_ranks  # noqa: E402
from replaced_ranks import Seat, run_replaced  # noqa: E402

from nbkit.errors import NbkitError, TrainingError  # noqa: E402
from nbkit.rank.device import accelerator  # noqa: E402
from nbkit.rank.telemetry import collectives  # noqa: E402
from nbkit.rank.train.replace.recover import recover  # noqa: E402
from nbkit.rank.train.trainer import Trainer  # noqa: E402
from nbkit.rank.world import failure_alarm  # noqa: E402
from verify.cases import Case, parity_matrix  # noqa: E402
from verify.compare import judged  # noqa: E402
from verify.models.specimens import ZOO  # noqa: E402
from verify.rank_sets import truths  # noqa: E402
from verify.training import BATCH, Outcome, train  # noqa: E402

STRATEGIES = tuple(
    name for name in ("ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "pp", "cp=4") if (REAL, name) != ("gloo", "pp")
)
PER_SET = 8  # cases in one set of processes: a bug that ends a process loses at most these
_RELEASED_S = 1.0
_COPIED = 3  # a step: input and target, once for all micro-batches; the vector of the step's numbers


def trained(rank: int, ranks: int, cases: Sequence[Case]) -> list[Outcome]:
    """Train every case, on a rank. Move its tensors to the host."""
    begun(rank, ranks)
    found = []
    for case in cases:
        outcome = train(case)
        outcome.grads = {name: (tensor.cpu(), layout) for name, (tensor, layout) in outcome.grads.items()}
        outcome.state = {name: tensor.cpu() for name, tensor in outcome.state.items()}
        found.append(outcome)
    return found


def switched(rank: int, ranks: int, walk: Sequence[str]) -> list[float]:
    """Train a step under each strategy of `walk`, with every second switch during the training. Return the losses."""
    begun(rank, ranks)
    trainer = trainer_of(walk[0])
    trainer.fit(1)
    for number, strategy in enumerate(walk[1:]):
        trainer.switch(strategy, beside=bool(number % 2))
        trainer.fit(1)
    return [record["loss"] for record in trainer.history]


def failed(rank: int, ranks: int, strategies: Sequence[str]) -> dict[str, list[float] | str]:
    """Return the losses under each strategy. Rank 1 fails after step 2, and the others are told later."""
    world, _ = begun(rank, ranks)
    found: dict[str, list[float] | str] = {}
    for strategy in strategies:
        reached = threading.Event()
        trainer = trainer_of(strategy, callbacks=[_error_after(2, rank, reached)])
        _broken_off(partial(trainer.fit, 4), reached)
        Communicator.give_up()
        next_generation(world)
        trainer._callbacks = ()
        try:
            trainer.fit(until=4)
        except TrainingError as error:
            found[strategy] = str(error)  # no step was complete on any rank
            continue
        found[strategy] = [record["loss"] for record in trainer.history]
    return found


def died(seat: Seat, strategies: Sequence[str]) -> dict[str, list[float]]:
    """Return the losses under each strategy. Rank 1 is killed after step 2; the new rank has only later losses."""
    found: dict[str, list[float]] = {}
    for number, strategy in enumerate(strategies):
        if number < seat.deaths - seat.new:
            continue
        if seat.new:
            trainer, seat.new = _recovered(None, seat.replaced), False
        else:
            kill = [_kill_after(2)] if seat.world.place.rank == 1 else [_nothing]
            trainer = trainer_of(strategy, callbacks=kill, recovery=nbkit.Recovery(backup_every=1))
            with pytest.raises((RuntimeError, NbkitError)) as broken:
                trainer.fit(4)
            if trainer.step < 2:
                raise broken.value
            again = seat.form_again()
            Communicator.give_up()
            trainer = _recovered(trainer, again)
        trainer._callbacks = ()
        trainer.fit(until=4)
        found[strategy] = [record["loss"] for record in trainer.history]
    return found


def _recovered(trainer: Trainer | None, newcomers: Sequence[int]) -> Trainer:
    gpu: Any = accelerator()
    with looked_at(gpu):
        return recover(trainer, newcomers)


def _kill_after(step: int) -> Callable[[Any, dict[str, Any]], None]:
    def kill(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def _nothing(trainer: Any, record: dict[str, Any]) -> None:
    pass


class _Error(Exception):
    pass


def _error_after(step: int, rank: int, reached: threading.Event) -> Callable[[Any, dict[str, Any]], None]:
    def error(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == step:
            reached.set()
            if rank == 1:
                raise _Error

    return error


def _broken_off(train: Callable[[], Any], reached: threading.Event) -> None:
    """Train, and stop as the bridge does if a peer fails: leave the collectives, then interrupt."""
    ended = threading.Event()

    def release() -> None:
        reached.wait()
        if not ended.wait(_RELEASED_S):
            failure_alarm.break_out("rank 1 failed")
        if not ended.wait(1.0):
            _thread.interrupt_main()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        train()
    except (_Error, KeyboardInterrupt, RuntimeError, NbkitError):
        pass
    finally:
        ended.set()
        reached.set()
    try:
        thread.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        thread.join()


def every_pair(strategies: Sequence[str]) -> list[str]:
    """Return a walk with each ordered pair of `strategies` once."""
    left = {one: [other for other in strategies if other != one] for one in strategies}
    stack, walk = [strategies[0]], list[str]()
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop(0))
        else:
            walk.append(stack.pop())
    return walk[::-1]


def cases(models: Sequence[str] = ("gpt", "llama_of_8_heads", "ten_convs")) -> list[Case]:
    """Return a case for each strategy on each of `models`."""
    every = (case for case in parity_matrix("float64", 3) if case.model in models)
    return [case for case in every if not (REAL == "gloo" and "pp" in case.strategy)]


def check_cases(some: Sequence[Case]) -> Iterator[str]:
    """Yield a line for each case, which ends with what is wrong, if anything is."""
    known = truths(some, device="cuda" if REAL else "cpu")
    for ranks in sorted({case.ranks for case in some}):
        alike = [case for case in some if case.ranks == ranks]
        for first in range(0, len(alike), PER_SET):
            part = alike[first : first + PER_SET]
            try:
                found = run_ranks(trained, ranks, ranks, part, join=False, timeout=60 + 60 * len(part))
            except RankFailed as error:
                yield from (f"{case}: failed in the set: {str(error)[-600:]}" for case in part)
                continue
            for number, case in enumerate(part):
                verdict = judged(case, [one[number] for one in found], known[case.truth])
                yield f"{case}: {'equal' if verdict.kind == 'equal' else f'{verdict.kind}: {verdict.text}'}"


def check_switches(strategies: Sequence[str] = STRATEGIES, *, ranks: int = 4) -> Iterator[str]:
    """Yield one line about all switches."""
    walk = every_pair(strategies)
    yield _lines(f"{len(walk) - 1} switches", len(walk), lambda: run_ranks(
        switched, ranks, ranks, walk, join=False, timeout=120 + 20 * len(walk)))  # fmt: skip


def check_errors(strategies: Sequence[str] = STRATEGIES, *, ranks: int = 4) -> Iterator[str]:
    """Yield a line for each strategy."""
    for strategy in strategies:

        def run(strategy: str = strategy) -> list[Any]:
            found = run_ranks(failed, ranks, ranks, [strategy], join=False, generations=2, timeout=150)
            return [one[strategy] for one in found]

        yield _lines(f"an error under {strategy}", 4, run)


def steady(rank: int, ranks: int, strategies: Sequence[str]) -> dict[str, Counter[str]]:
    """Count the host's work in the third step of each strategy, with clipping, micro-batches and records.

    See PretendAccelerator.counts.
    """
    _, gpu = begun(rank, ranks)
    collectives.set_mode("time")
    gpt, found = ZOO["gpt"], dict[str, Counter[str]]()
    host: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu if REAL else gpu.host
    items = [tuple(host(part) for part in row) for row in gpt.rows(BATCH, dtype=torch.float64)]
    for strategy in strategies:
        counted: list[Counter[str]] = []

        def look(trainer: Any, record: dict[str, Any], counted: list[Counter[str]] = counted) -> None:
            counted.append(Counter(gpu.counts))
            for state in trainer.optimizer.state.values():
                gpu.host(state["step"])  # torch keeps it there unless the optimizer is capturable

        waits: Counter[str] = Counter()

        def watch(trainer: Trainer, record: dict[str, Any], waits: Counter[str] = waits) -> None:
            torch.cuda.set_sync_debug_mode("warn" if record["step"] in (2, 3) else "default")
            warnings.simplefilter("always" if record["step"] in (2, 3) else "ignore")

            def note(message: Any, *_: Any) -> None:
                frames = traceback.extract_stack()[:-1]
                own = [one for one in frames if "nbkit/" in one.filename] or frames
                waits[f"wait at {own[-1].filename.rpartition('nbkit/')[2]}:{own[-1].lineno}"] += 1

            warnings.showwarning = note

        more: dict[str, Any] = (
            {} if strategy.startswith("pp") else {"compute": nbkit.Compute(microbatch_size=BATCH // 4)}
        )
        with tempfile.TemporaryDirectory() as folder:
            more |= {
                "model": lambda: gpt.build(torch.float64, layers=ranks),
                "data": items,
                "loading": nbkit.Loading(shuffle=False),
            }
            trainer_of(strategy, **more, log_dir=folder, clip_norm=1.0, callbacks=[watch if REAL else look]).fit(6)
            dist.barrier()  # all ranks write to the folder of rank 0
        # On a real GPU torch reports waits, and copies from pinned memory are not counted.
        found[strategy] = Counter({"pinned copy": _COPIED}) + waits if REAL else counted[2] - counted[1]
    return found


def check_steps(strategies: Sequence[str] = STRATEGIES, *, ranks: int = 4, together: bool = False) -> Iterator[str]:
    """Yield a line for each strategy: a step must copy the batch once, from pinned memory, and not wait on the host.

    together: use one set of processes. A strategy that ends them then also loses the results of the others.
    """
    for some in [strategies] if together else [[strategy] for strategy in strategies]:
        try:
            every = run_ranks(steady, ranks, ranks, some, join=False, timeout=100 * len(some))
        except RankFailed as error:
            yield from (f"a steady step under {strategy}: failed: {str(error)[-1500:]}" for strategy in some)
            continue
        for strategy in some:
            counts = [one[strategy] for one in every]
            right = all(found == {"pinned copy": _COPIED} for found in counts)
            yield f"a steady step under {strategy}: {'equal' if right else f'wrong: {[dict(one) for one in counts]}'}"


def check_deaths(
    strategies: Sequence[str] = STRATEGIES, *, ranks: int = 4, late: Sequence[float] = (0.0,) if REAL else (0.0, 3.0)
) -> Iterator[str]:
    """Yield a line for each strategy and each delay in seconds until the others are told of the death."""
    for strategy, late_s in itertools.product(strategies, late):

        def run(strategy: str = strategy, late_s: float = late_s) -> list[Any]:
            found = run_replaced(died, ranks, [strategy], deaths=1, timeout=200, place=place, late_s=late_s)
            return [one[strategy] for one in found]

        yield _lines(f"a death under {strategy}{', heard of late' * bool(late_s)}", 4, run)


def _lines(what: str, steps: int, run: Callable[[], list[Any]]) -> str:
    known = Case("gpt", "", steps=steps)
    losses = truths([known])[known.truth].losses
    try:
        found = run()
    except RankFailed as error:
        return f"{what}: failed: {str(error)[-1500:]}"
    if any(isinstance(one, str) for one in found):
        said = all(isinstance(one, str) and "no step is whole" in one for one in found)
        return f"{what}: {'refused on every rank, since no step is whole: right' if said else f'wrong: {found}'}"
    off = [max(abs(a - b) for a, b in zip(one, losses, strict=True)) if len(one) == steps else 9.0 for one in found]
    return f"{what}: {'equal' if max(off) < 1e-10 else f'wrong: losses {max(off):.3g} off'}"


def main(words: Sequence[str]) -> int:
    """Print a line for each check. Return how many are not equal."""
    started, wrong = time.monotonic(), 0
    words = [word for word in words if not word.startswith("--real=")]
    parts = {"switches", "errors", "steps", "deaths", *FEATURES}
    chosen = [case for case in cases() if not words or any(word in str(case) for word in words if word not in parts)]
    lines: list[Iterator[str]] = [check_cases(chosen)] if chosen else []
    if not words or "switches" in words:
        lines.append(check_switches())
    if not words or "errors" in words:
        lines.append(check_errors())
    if REAL != "gloo" and (not words or "steps" in words):  # gloo makes the host wait for the device
        lines.append(check_steps())
    if not words or "deaths" in words:
        lines.append(check_deaths())
    if names := [name for name in FEATURES if not words or name in words]:
        lines.append(check_features(STRATEGIES, names))
    for each in lines:
        for line in each:
            wrong += not line.endswith((": equal", ": right"))
            print(line, flush=True)
    print(f"{wrong} not equal, {time.monotonic() - started:.0f} s")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
