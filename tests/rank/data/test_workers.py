"""Test that workers read ahead the same samples as without them, with the same draws and losses, after errors too."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import threading
import time
import warnings
from typing import Any

import numpy
import pytest
import torch
from jobs import order, quiet
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.data.open_stream import open_stream
from nbkit.rank.train.trainer import Trainer


class Augmented:
    """A dataset of 32 points with noise of three kinds of generator. It remembers what this process read."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.epoch, self.fails_at, self.read = 0, fails_at, list[int]()

    def __len__(self) -> int:
        return 32

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i == self.fails_at:
            raise OSError(f"image {i} is truncated")
        self.read.append(i)
        noise = random.random() + float(numpy.random.rand()) + self.epoch
        return torch.full((6,), i / 32.0) + torch.randn(6) * 0.1 + noise * 0.01, torch.tensor(i % 3)


def stream(data: Any, **changed: Any) -> Any:
    asked = {"batch_size": 8, "rank": 0, "ranks": 1, "seed": 7, "shuffle": True, "drop_last": False, "collate": list}
    return open_stream(data, **(asked | changed))


def trained(job: Trainer) -> list[float]:
    """Train over an epoch's end, a switch, and a trial (which goes back and reads data again)."""
    job.fit(5)
    job.switch("tp" if job.strategy.dp > 1 else "ddp")
    job.fit(2)
    job.try_out("zero3", steps=2)
    job.fit(1)
    return [record["loss"] for record in job.history]


def with_and_without(world: Any) -> tuple[Any, ...]:
    data = Augmented()
    read = quiet(data=data, loading=nbkit.Loading(workers=2))
    known = list(data.read)
    losses = trained(read)
    return trained(quiet(data=Augmented())), losses, data.read == known, read._stream._ahead._thread is None


@pytest.mark.usefixtures("known_to_be_right")
def test_losses_with_and_without_workers_are_equal_after_switches_and_trials() -> None:
    for expected, found, read_elsewhere, ended in run_ranks(with_and_without, 2, timeout=180):
        assert found == expected
        assert read_elsewhere, "the rank itself has read samples"
        assert ended, "workers are left behind"


def test_workers_keep_the_order_over_epochs_and_after_seek() -> None:
    data = stream(list(range(21)), workers=2)
    epochs = [order(21, epoch) for epoch in range(3)]
    try:
        assert [data.next().data for _ in range(4)] == [*(epochs[0][at : at + 8] for at in (0, 8, 16)), epochs[1][:8]]
        data.seek(2, 8)
        assert data.next().data == epochs[2][8:16]
        data.rank, data.ranks = 1, 2
        assert data.next().data == epochs[2][16:][3:]
    finally:
        data.close()


def test_an_unreadable_sample_is_named_and_the_others_can_still_be_read() -> None:
    data = stream(Augmented(fails_at=21), workers=2, shuffle=False, collate=default_collate)
    try:
        assert [len(data.next((7, step, 1)).data[0]) for step in range(2)] == [8, 8]
        with pytest.raises(TrainingError, match=r"Sample 21 could not be read by worker [01]: OSError: image 21"):
            data.next((7, 2, 1))
        data.seek(0, 24)
        assert len(data.next((7, 3, 1)).data[0]) == 8
    finally:
        data.close()


def stacked(samples: list[Any]) -> Any:
    """Stack samples outside of shared memory. default_collate would put them there; here torch's queue does."""
    return tuple(map(torch.stack, zip(*samples, strict=True)))


def without_shared_memory(rank: int) -> list[str]:
    """Limit the size of a worker's files, so that a write fails as if shared memory were full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    told = []
    for collate in (default_collate, stacked, lambda samples: lambda: samples):
        data = stream([(torch.ones(500), torch.ones(1))] * 32, workers=1, collate=collate)
        try:
            with pytest.raises(TrainingError) as raised:
                data.next()
            told.append(str(raised.value))
        finally:
            data.close()
    return told


def test_full_shared_memory_and_unpicklable_batches_are_reported() -> None:
    ((by_collate, by_the_queue, unpacked),) = run_ranks(without_shared_memory, 1, join=False)

    for said in (by_collate, by_the_queue):
        assert said.startswith("The shared memory of this host is full, and workers need it")
        assert "\n/dev/shm has " in said and "worker 0: RuntimeError: " in said and "sample" not in said.lower()
    assert "A batch could not be read by worker 0: " in unpacked and "pickle" in unpacked


class Received:
    """A sample that unpickles to the name of the thread that receives it from a worker."""

    threads: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> Any:
        return _received, ()


def _received() -> str:
    Received.threads.append(threading.current_thread().name)
    return Received.threads[-1]


def test_the_next_batch_is_received_in_a_thread_during_the_step() -> None:
    Received.threads.clear()
    data = stream([Received() for _ in range(32)], workers=1)
    try:
        assert data.next().data == ["nbkit-batches"] * 8
        until = time.monotonic() + 60
        while len(Received.threads) < 16 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(Received.threads) == 16
    finally:
        data.close()


class Hanging(list[int]):
    def __getitem__(self, i: Any) -> Any:
        return super().__getitem__(i) if i < 8 or get_worker_info() is None else time.sleep(1000)


def test_close_ends_a_hanging_worker_and_the_thread_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    before = {*multiprocessing.active_children()}
    data = stream(Hanging(range(32)), workers=2, shuffle=False)
    assert data.next().data == [*range(8)]
    (receiving,) = (thread for thread in threading.enumerate() if thread.name == "nbkit-batches")
    time.sleep(0.3)  # now the thread waits for the batch that hangs
    data.close()
    receiving.join(60)
    assert not receiving.is_alive()
    assert {*multiprocessing.active_children()} <= before


def test_more_workers_than_cores_give_no_warning() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # like a pinned rank
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reading = stream(Augmented(), workers=2, collate=default_collate)
            assert reading.next().rows == 8
            reading.close()
    finally:
        os.sched_setaffinity(0, cores)


def iterated(world: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quiet(data=iter([(torch.zeros(6), torch.tensor(0))] * 32), loading=nbkit.Loading(workers=2))
    return [str(warning.message) for warning in said]


def test_workers_for_an_iterator_have_no_effect_and_warn() -> None:
    said = " ".join(run_ranks(iterated, 1)[0])
    assert "workers= has no effect on data that is not split" in said
    assert "nbkit cannot split an iterator; it splits an IterableDataset with num_shards = 8" in said
