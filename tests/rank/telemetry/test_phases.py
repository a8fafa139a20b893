"""Test the phases of a step on CUDA: they follow the device, and autograd works in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nbkit.rank.device import Accelerator
from nbkit.rank.telemetry import phases
from nbkit.rank.telemetry.collectives import CollectiveCall, DeviceCall, GroupInfo, Timed
from nbkit.rank.telemetry.phases import clock, phase

MS = 1_000_000


class Device:
    """The time of a GPU, in ms. Enqueued work takes some of it."""

    ms = 0.0

    @classmethod
    def computes(cls, ms: float) -> None:
        cls.ms += ms


class Stamp:
    """A stand-in for torch.Event."""

    def __init__(self) -> None:
        self.ms = Device.ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Stamp) -> float:
        return later.ms - self.ms


class Slow:
    """The work of a collective for which the stream waits 5 ms."""

    def wait(self) -> None:
        Device.computes(5)

    def is_completed(self) -> bool:
        return False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[phases.StepPhases]]:
    """Yield the list of the steps that this thread makes, as if on a GPU."""
    monkeypatch.setattr(Accelerator, "stamp", lambda self: Stamp())
    monkeypatch.setattr(Device, "ms", 0.0)
    steps: list[phases.StepPhases] = []
    monkeypatch.setattr(clock, "listeners", [steps.append])
    clock.begin(on_device=True)
    yield steps
    clock.end()


def in_another_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def waits() -> None:
    group = GroupInfo("dp 1 [0,1]", "dp", (0, 1))
    call = CollectiveCall("all_reduce", group, None, 0, 8)
    call.on_device = DeviceCall()
    Timed(Slow(), call, group.blocked).wait()


def laps(step: phases.StepPhases) -> list[tuple[str, float]]:
    return [(state, (stop - start) / MS) for state, start, stop in step.intervals()]


def test_computation_of_the_autograd_thread_after_a_wait_is_backward(made: list[phases.StepPhases]) -> None:
    def backward() -> None:
        for _ in range(2):
            Device.computes(20)
            waits()
        Device.computes(30)

    with phase("forward"):
        Device.computes(10)
    with phase("backward"):
        in_another_thread(backward)
        waits()
        Device.computes(1)
    clock.step(1)

    dp, again = [("backward", 20.0), ("wait dp", 5.0)], ("backward", 1.0)
    assert laps(made[0]) == [("forward", 10.0), *dp, *dp, ("backward", 30.0), ("wait dp", 5.0), again]


def test_a_pipeline_operation_lasts_as_long_as_the_device_computes(made: list[phases.StepPhases]) -> None:
    for micro in range(2):
        Device.computes(4)
        done = clock.on_op("F", 0, micro)
        Device.computes(20)
        done()
    clock.step(1)

    begun = made[0].base
    times = [(start - begun, stop - begun) for *_, start, stop in made[0].operations()]
    assert times == [(4 * MS, 24 * MS), (28 * MS, 48 * MS)]


def test_other_threads_change_the_phase_only_in_backward(made: list[phases.StepPhases]) -> None:
    with phase("backward"):
        with phase("forward"):
            in_another_thread(waits)
        Device.computes(20)
    with phase("optimizer"):
        in_another_thread(waits)
    clock.step(1)

    assert laps(made[0]) == [("forward", 5.0), ("backward", 20.0), ("optimizer", 5.0)]
