"""Test that a diagnosis names what took the memory: the step, a leak, gaps or other processes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from jobs import Heard, heard, mean_loss, points, quiet
from pretend import join
from ranks import run_ranks
from torch import Tensor, nn

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.train.out_of_memory import tensor_limit
from nbkit.rank.train.out_of_memory.rescue import LEVELS, DeviceMemory
from nbkit.rank.train.trainer import Trainer

GB = 10**9


def test_a_step_that_is_too_large_has_no_other_cause() -> None:
    assert DeviceMemory(80 * GB, 79 * GB, 78 * GB, 77 * GB, levels=(2, 9, 9, 9, 9, 9)).findings() == []
    assert DeviceMemory().findings() == []


def test_live_tensors_that_grow_in_every_step_are_a_leak() -> None:
    levels = [(10 + i) * GB for i in range(6)]
    (found,) = DeviceMemory(80 * GB, 79 * GB, 78 * GB, 77 * GB, levels=levels).findings()
    assert "grew by 1,000 MB a step" in found
    # Optimizer state that comes once is no leak. Nor are a few more bytes.
    assert DeviceMemory(levels=levels[:5]).findings() == []
    assert DeviceMemory(levels=[10 * GB + i for i in range(6)]).findings() == []
    assert DeviceMemory(levels=[*levels[:5], levels[4]]).findings() == []


def test_gaps_and_other_processes_are_distinguished() -> None:
    (gaps,) = DeviceMemory(80 * GB, 79 * GB, 78 * GB, 60 * GB).findings()
    assert "1.8e+04 MB of 7.8e+04 MB" in gaps and "expandable_segments" in gaps
    (others,) = DeviceMemory(80 * GB, 79 * GB, 50 * GB, 49 * GB).findings()
    assert "2.8e+04 MB of 8e+04 MB are held by others" in others
    # CUDA and NCCL take memory outside torch's allocator, which is a large part of a small device.
    assert DeviceMemory(8 * GB, 8 * GB, 65 * GB // 10, 64 * GB // 10).findings() == []


STEPS, ROWS = LEVELS + 4, 16
kept: list[Tensor] = []


def blamed(what: str) -> list[str]:
    return [word for word in ("grew", "gaps", "others") if word in what]


def keeping(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss, and keep a tensor of each step."""
    kept.append(output.detach().repeat(1, 200))
    return mean_loss(output, target)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 3))


def made(**more: Any) -> tuple[Trainer, Heard]:
    trainer = quiet(
        model=wide,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=points(),
        batch_size=ROWS,
        strategy="ddp",
        recovery=nbkit.Recovery(on_oom="ask"),
        **more,
    )
    return trainer, heard(trainer, "out_of_memory")


def told(trainer: Trainer, events: Heard) -> str:
    """Train until memory runs out, and return the text of the event."""
    with pytest.raises(TrainingError) as caught:
        trainer.fit(STEPS)
    (event,) = events
    assert event.rank == 1 and event.what in str(caught.value)
    return str(event.what)


def on_cores(world: Any) -> list[str]:
    """Reach the limit on rank 1: first because a list grows, then without the list, in a step that is too large."""
    found = []
    for leaks in (True, False):
        kept.clear()
        os.environ.pop(tensor_limit.VARIABLE, None)
        assert tensor_limit.in_force() is None
        os.environ[tensor_limit.VARIABLE] = str(1 << 40)
        mine = world.place.rank == 1
        trainer, events = made(loss=keeping if leaks and mine else mean_loss)

        def tighten(_: Trainer, record: dict[str, Any], mine: bool = mine) -> None:
            limit = tensor_limit.in_force()
            if mine and limit is not None and record["step"] == LEVELS + 1:
                os.environ[tensor_limit.VARIABLE] = str(int(0.9 * limit.peak))

        trainer._callbacks = (tighten,)
        found.append(told(trainer, events))
    return found


@pytest.mark.long
def test_out_of_memory_blames_a_growing_list_but_not_a_large_step() -> None:
    for leaking, large in run_ranks(on_cores, 2, timeout=100):
        assert all(what.startswith("rank 1: OutOfMemoryError: CPU rank out of memory") for what in (leaking, large))
        assert "; live tensors grew by " in leaking and blamed(leaking) == ["grew"]
        assert blamed(large) == []


# name -> ((all, used by any process, reserved by torch's allocator), bytes of tensors)
DEVICES = {
    "the step": ((80 * GB, 79 * GB, 78 * GB), 77 * GB),
    "gaps": ((80 * GB, 79 * GB, 78 * GB), 60 * GB),
    "others": ((80 * GB, 79 * GB, 50 * GB), 49 * GB),
}


def on_a_device(rank: int) -> dict[str, str]:
    """Fail a step on the device of rank 1, with the numbers of DEVICES. The device of rank 0 has room."""
    _, gpu = join(rank, 2)
    found = {}
    for name, (occupied, taken) in DEVICES.items():
        fails = [rank == 1]

        def loss(output: Tensor, target: Tensor, fails: list[bool] = fails) -> Tensor:
            if fails[0] and output.requires_grad:
                fails[0] = False
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return mean_loss(output, target)

        gpu.occupied = lambda device, occupied=occupied: occupied if rank else (80 * GB, GB, GB)  # type: ignore
        gpu.memory = lambda device, taken=taken: (taken, taken) if rank else (GB, GB)  # type: ignore
        found[name] = told(*made(loss=loss))
    return found


@pytest.mark.long
def test_gaps_and_other_processes_are_found_on_the_rank_that_ran_out() -> None:
    for found in run_ranks(on_a_device, 2, join=False, timeout=100):
        assert all(what.startswith("rank 1: OutOfMemoryError: CUDA out of memory") for what in found.values())
        assert {name: blamed(what) for name, what in found.items()} == {
            "the step": [],
            "gaps": ["gaps"],
            "others": ["others"],
        }
