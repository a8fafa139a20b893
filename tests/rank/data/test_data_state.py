"""Test that data that knows its position resumes there, reads nothing before it again, and has the same losses.

The datasets are built like those of users: one like Hugging Face's with `shard()` and the state of an iteration, one
that asks for its worker and stores its own position, and an iterator with its own state, as torchdata's loaders take.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import net, quiet
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

import nbkit

LENGTHS = [13, 10, 17, 10]


def sample(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(6, generator=draw, dtype=torch.float64), torch.tensor(number % 3)


class Noted(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset that writes into a file which samples are read."""

    def __init__(self, read: Path) -> None:
        self.read = read

    def one(self, number: int) -> tuple[Tensor, Tensor]:
        with self.read.open("a") as file:
            file.write(f"{number}\n")
        return sample(number)


class HuggingFace(Noted):
    """A dataset like `datasets.IterableDataset`: its state is that of the newest iteration, valid for one epoch."""

    def __init__(self, read: Path, shards: list[int] | None = None) -> None:
        super().__init__(read)
        self.shards = list(range(len(LENGTHS))) if shards is None else shards
        self.num_shards, self.epoch, self.starting = len(self.shards), 0, None
        self.state: Any = None

    def shard(self, num_shards: int, index: int) -> Any:
        return type(self)(self.read, self.shards[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> Any:
        return deepcopy(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.starting = state

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert get_worker_info() is None, "it would divide its shards once more"
        begin = self.starting if self.starting and self.starting["epoch"] == self.epoch else {"at": 0, "shard": 0}
        self.state = {**begin, "epoch": self.epoch}
        for shard in range(begin["shard"], len(self.shards)):
            for i in range(self.state["at"], LENGTHS[self.shards[shard]]):
                self.state["at"] = i + 1
                yield self.one(100 * self.shards[shard] + i)
            self.state = {"shard": shard + 1, "at": 0, "epoch": self.epoch}


class OwnPlace(Noted):
    """A dataset that asks for its part and stores its own position. Three kinds of generator draw its samples."""

    num_shards = 4

    def __init__(self, read: Path) -> None:
        super().__init__(read)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        import numpy

        info = get_worker_info()
        shard = info.id if info is not None else 0
        while self.at < LENGTHS[shard]:
            self.at += 1
            x, y = self.one(100 * shard + self.at - 1)
            yield x + torch.randn(6) + random.random() + float(numpy.random.rand()), y
        self.at = 0


class Whole(Noted):
    """A dataset that cannot be divided; its iterator has the state."""

    class Iteration:
        def __init__(self, data: Whole) -> None:
            self.data, self.at = data, 0

        def __iter__(self) -> Whole.Iteration:
            return self

        def __next__(self) -> tuple[Tensor, Tensor]:
            if self.at == 50:
                raise StopIteration
            self.at += 1
            x, y = self.data.one(self.at - 1)
            return x + torch.randn(6), y

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "also": (torch.tensor([self.at]), "text")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["also"][0].item() == state["at"]
            self.at = state["at"]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.Iteration(self)


class Buffered(HuggingFace):
    """A dataset whose state leaves out the samples in its shuffle buffer, as in Hugging Face."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw, buffer = random.Random(0), []
        for one in super().__iter__():
            buffer.append(one)
            if len(buffer) > 4:
                yield buffer.pop(draw.randrange(5))
        yield from buffer


class WithoutState(HuggingFace):
    state_dict = load_state_dict = None  # type: ignore[assignment]


KINDS: dict[str, Any] = {"hf": HuggingFace, "own": OwnPlace, "whole": Whole}


def job(data: Any, **changed: Any) -> Any:
    model, sgd = (lambda: net().double()), (lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    return quiet(**({"data": data, "model": model, "optimizer": sgd} | changed))


def losses(trainer: Any) -> list[float]:
    return [record["loss"] for record in trainer.history]


def resumed(world: Any, kind: Any, folder: Path, steps: int, changed: dict[str, Any]) -> Any:
    """Return (losses of one run, losses of a resumed run, samples read after the resume, warnings)."""
    torch.set_num_threads(1)
    note = folder / f"rank{world.place.rank}"
    whole = job(kind(note), **changed)
    whole.fit(steps)
    whole.save(folder / "saved")
    whole.fit(6)
    again = job(kind(note), **changed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again.load(folder / "saved")
        note.write_text("")
        again.fit(1)
    read = [int(line) for line in note.read_text().splitlines()]
    again.fit(5)
    return losses(whole), losses(again), read, [str(each.message) for each in said]


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_reads_nothing_again_and_has_the_same_losses(kind: str, tmp_path: Path) -> None:
    (found,) = run_ranks(resumed, 1, KINDS[kind], tmp_path, 3, {})

    whole, again, read, said = found
    assert again == whole and len(set(whole)) == 9
    assert not any("is read again" in each for each in said)
    if kind == "whole":
        assert min(read) >= 16  # 24 samples were trained; the batch before the position is compared
    else:
        # At most one chunk of each of the four shards before the position. Each shard gave 6 of the 24 samples.
        assert all(number % 100 >= 2 for number in read)


@pytest.mark.usefixtures("known_to_be_right")
def test_ranks_and_workers_resume_in_a_later_epoch_after_some_shards_ended(tmp_path: Path) -> None:
    """Resume before step 13, in the second epoch: its 50 samples are unequally spread over the shards."""
    for whole, again, read, said in run_ranks(
        resumed, 2, HuggingFace, tmp_path, 12, {"loading": nbkit.Loading(workers=1)}, timeout=120
    ):
        assert again == whole
        assert not any("is read again" in each for each in said)
        assert all(number % 100 >= 6 for number in read)


def moved(world: Any, folder: Path) -> Any:
    """Save on two ranks that read different shards, and resume with one rank that reads all."""
    torch.set_num_threads(1)
    note = folder / f"rank{world.place.rank}"
    whole = job(HuggingFace(note))
    whole.fit(3)
    whole.save(folder / "saved")
    note.write_text("")
    whole.switch("tp")
    whole.fit(3)
    switched = [int(line) for line in note.read_text().splitlines()]
    again = job(HuggingFace(note), strategy="tp")
    again.load(folder / "saved")
    note.write_text("")
    again.fit(3)
    return losses(whole), losses(again), switched, [int(line) for line in note.read_text().splitlines()]


@pytest.mark.usefixtures("known_to_be_right")
def test_a_rank_resumes_in_shards_that_another_rank_has_read(tmp_path: Path) -> None:
    for whole, again, switched, read in run_ranks(moved, 2, tmp_path):
        assert again == pytest.approx(whole, abs=1e-12)
        for numbers in (switched, read):
            assert {number // 100 for number in numbers} == {0, 1, 2, 3}
            assert all(number % 100 >= 2 for number in numbers)


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Buffered, "the data gives different samples after its load_state_dict()"),
        (WithoutState, "the data has no state_dict() and load_state_dict()"),
    ],
)
def test_data_without_a_usable_state_is_read_again_with_a_warning(kind: Any, words: str, tmp_path: Path) -> None:
    (found,) = run_ranks(resumed, 1, kind, tmp_path, 3, {})

    whole, again, read, said = found
    assert again == whole
    assert {number % 100 for number in read} >= {0, 1}
    (told,) = [each for each in said if "is read again" in each]
    assert told == f"the data is read again up to sample 24 of epoch 0, and these samples are skipped: {words}"
