"""Features of a training on the pretended GPU under every strategy: they must not change the losses.

Each of `FEATURES` trains in its own way and returns numbers, which must be equal to those of one process.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_training import begun, trainer_of
from ranks import RankFailed, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import nbkit
from nbkit.errors import NbkitError, Stopped
from nbkit.notebook.run.reader import read_run
from nbkit.rank.train.control import step_boundary
from nbkit.rank.train.trainer import Trainer

STEPS = 4
Feature = Callable[[str, int, Path], list[float]]


def stop(strategy: str, rank: int, folder: Path) -> list[float]:
    """Stop a training. The ranks are told after different steps, and continue afterwards."""

    def post(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 1 + rank % 2:
            step_boundary.inbox.post(step_boundary.inbox.acted + 1, "stop")

    trainer = trainer_of(strategy, callbacks=[post])
    with pytest.raises(Stopped):
        trainer.fit(50)
    stood = trainer.step
    assert 2 <= stood <= STEPS + 4
    trainer._callbacks = ()
    trainer.fit(until=max(stood + 1, STEPS))
    return _losses(trainer)[:STEPS]


def checkpoint(strategy: str, rank: int, folder: Path) -> list[float]:
    """Save under `strategy`, load in another job under another strategy, and continue."""
    trainer = trainer_of(strategy)
    trainer.fit(STEPS - 2)
    trainer.save(folder / "saved")
    other = trainer_of("zero2" if strategy == "zero3" else "zero3")
    other.load(folder / "saved")
    other.fit(1)
    other.save(folder / "again")
    back = trainer_of(strategy)
    back.load(folder / "again")
    back.fit(1)
    return _losses(back)


def telemetry(strategy: str, rank: int, folder: Path) -> list[float]:
    """Train with records. Check that the bytes of a step are those of the formula, if there is one."""
    trainer = trainer_of(strategy, log_dir=str(folder), name="run")
    trainer.fit(STEPS)
    (run,) = folder.iterdir()
    dist.barrier()  # the other ranks write, too
    # The formula ignores small sums, but they are a large part of the tp traffic here.
    rows = [row for row in read_run(run).picture(STEPS - 1)["table"] if row["formula_bytes"]]
    off = {(row["axis"], row["op"]): row["bytes"] / row["formula_bytes"] for row in rows}
    assert off and all(0.95 < one < 1.05 for what, one in off.items() if what != ("tp", "all_reduce")), off
    return _losses(trainer)


def offload(strategy: str, rank: int, folder: Path) -> list[float]:
    """Train with the optimizer's state in memory of the host."""
    trainer = trainer_of(strategy, compute=nbkit.Compute(offload="cpu"))
    trainer.fit(STEPS)
    return _losses(trainer)


def generate(strategy: str, rank: int, folder: Path) -> list[float]:
    """Generate greedy and sampled tokens between two steps. Return the tokens and the losses."""
    trainer = trainer_of(strategy)
    trainer.fit(1)
    prompt = torch.arange(6).view(2, 3)
    said = [trainer.generate(prompt, 4), trainer.generate(prompt, 4, temperature=0.9, seed=3)]
    trainer.fit(1)
    return [float(token) for ids in said for token in ids.flatten().tolist()] + _losses(trainer)


def bf16(strategy: str, rank: int, folder: Path) -> list[float]:
    """Train float32 weights under autocast to bfloat16."""
    return _in_precision("bf16", strategy)


def fp16(strategy: str, rank: int, folder: Path) -> list[float]:
    """Train float32 weights under autocast to float16, with a scale on the loss."""
    return _in_precision("fp16", strategy)


def _in_precision(precision: str, strategy: str) -> list[float]:
    trainer = trainer_of(strategy, dtype="float32", precision=precision)
    trainer.fit(STEPS)
    return _losses(trainer)


def batch_norm(strategy: str, rank: int, folder: Path) -> list[float]:
    """Train a convolution net with torch's SyncBatchNorm. Return its running statistics too."""
    draw = torch.Generator().manual_seed(3)
    images = torch.randn(36, 1, 6, 6, dtype=torch.float64, generator=draw) * 3 + 1
    trainer = trainer_of(
        strategy,
        model=lambda: Image().double(),
        loss=F.cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data=TensorDataset(images, torch.arange(36) % 3),
        batch_size=8,  # the last of an epoch has four rows
    )
    trainer.fit(6)
    state = trainer.full_state_dict()
    return _losses(trainer) + [float(state[name].sum()) for name in sorted(state) if "running" in name]


class Image(nn.Module):
    """Convolutions with BatchNorm between, with and without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, affine=affine), nn.GELU())
            for affine in (True, False)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


FEATURES: dict[str, tuple[Feature, float]] = {
    "stop": (stop, 1e-10),
    "checkpoint": (checkpoint, 1e-10),
    "telemetry": (telemetry, 1e-10),
    "offload": (offload, 1e-10),
    "generate": (generate, 1e-10),
    "batch_norm": (batch_norm, 1e-9),
    # Strategies round differently; tests/verify has bars for that. Here, only look for wrong sums and NaN.
    "bf16": (bf16, 1e-2),
    "fp16": (fp16, 1e-3),
}
"""Name -> (what trains, how far from one process it may be, relatively)."""

DATA_ONLY = ("ddp", "zero1", "zero2", "zero3", "hsdp")
"""BatchNorm under a split model, or a pipeline, is refused or needs no sums: see docs/reference/refused.md."""


def check_features(
    strategies: Sequence[str], names: Sequence[str] = tuple(FEATURES), *, ranks: int = 4
) -> Iterator[str]:
    """Yield a line for each feature and strategy."""
    for name in names:
        bar = FEATURES[name][1]
        some = [one for one in strategies if name != "batch_norm" or one in DATA_ONLY]
        with tempfile.TemporaryDirectory(prefix="nbkit-gpu-check-") as folder:
            known = run_ranks(_alone, 1, name, Path(folder) / "alone", timeout=200)[0]
            how: dict[str, Any] = {"join": False, "timeout": 90 + 40 * len(some)}
            try:
                every = run_ranks(_each, ranks, ranks, name, some, Path(folder), **how)
            except RankFailed as error:
                yield f"{name}: failed in the set: {str(error)[-1500:]}"
                continue
        for strategy in some:
            yield f"{name} under {strategy}: {_verdict([found[strategy] for found in every], known, bar)}"


def _verdict(every: Sequence[list[float] | str], known: Sequence[float], bar: float) -> str:
    if why := next((one for one in every if isinstance(one, str)), ""):
        return f"failed: {why}"
    if any(len(one) != len(known) for one in every):
        return f"wrong: {[len(one) for one in every]} numbers, not {len(known)}"
    off = max(abs(a - b) / max(abs(b), 1e-9) for one in every for a, b in zip(one, known, strict=True))
    return "equal" if off <= bar else f"wrong: {off:.3g} off"


def _alone(world: Any, name: str, folder: Path) -> list[float]:
    # These features add nothing in one process.
    plain: dict[str, Feature] = {"telemetry": _plain, "checkpoint": _plain, "stop": _plain, "offload": _plain}
    folder.mkdir()
    return plain.get(name, FEATURES[name][0])("ddp", 0, folder)


def _plain(strategy: str, rank: int, folder: Path) -> list[float]:
    trainer = trainer_of(strategy)
    trainer.fit(STEPS)
    return _losses(trainer)


def _each(rank: int, ranks: int, name: str, strategies: Sequence[str], folder: Path) -> dict[str, list[float] | str]:
    begun(rank, ranks)
    warnings.simplefilter("ignore")
    found: dict[str, list[float] | str] = {}
    for number, strategy in enumerate(strategies):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        try:
            found[strategy] = FEATURES[name][0](strategy, rank, own)
        except (NbkitError, AssertionError) as error:
            found[strategy] = f"{type(error).__name__}: {error}"
    return found


def _losses(trainer: Trainer) -> list[float]:
    return [record["loss"] for record in trainer.history]
