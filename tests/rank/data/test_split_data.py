"""Test data in shards: only one rank reads each sample, and every step equals that of one process.

The datasets are built like those of users: a list of files whose `__iter__` asks for its worker, one like Hugging
Face's with `shard()`, and a pipeline like webdataset's with a splitter of workers and one of nodes.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import mean_loss, net, quiet
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.data.open_stream import open_stream

LENGTHS = [13, 10, 17, 10]
"""The lengths of the shards. Sample i of shard s has the number 100 s + i."""


def sample(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(6, generator=draw, dtype=torch.float64)
    return x, torch.tensor(number % 3)


class Files(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset whose `__iter__` takes the shards of the asking worker. read: a file that lists each read sample."""

    def __init__(self, lengths: list[int], read: Path) -> None:
        self.lengths, self.read, self.num_shards = lengths, read, len(lengths)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        mine = range(len(self.lengths)) if info is None else range(info.id, len(self.lengths), info.num_workers)
        for shard in mine:
            yield from self.of(shard)

    def of(self, shard: int) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.lengths[shard]):
            with self.read.open("a") as file:
                file.write(f"{100 * shard + i} {os.getpid()}\n")
            yield sample(100 * shard + i)


class HuggingFace(Files):
    """A dataset like `datasets.IterableDataset`: its parts are such datasets too, and it knows its epoch."""

    def __init__(self, lengths: list[int], read: Path, shards: list[int] | None = None) -> None:
        super().__init__(lengths, read)
        self.shards = list(range(len(lengths))) if shards is None else shards
        self.num_shards, self.epoch = len(self.shards), 0

    def shard(self, num_shards: int, index: int) -> HuggingFace:
        return HuggingFace(self.lengths, self.read, self.shards[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert get_worker_info() is None, "it would divide its shards once more"
        for shard in self.shards:
            yield from self.of(shard)


class Pipeline(IterableDataset[Any]):
    """A pipeline like `webdataset.WebDataset`: urls, splitters of nodes and of workers, and a reader."""

    def __init__(self, lengths: list[int], read: Path) -> None:
        class Urls:
            urls = tuple(range(len(lengths)))

            def __iter__(self) -> Iterator[int]:
                return iter(self.urls)

        files = Files(lengths, read)
        self.pipeline: list[Any] = [Urls(), by_node, by_worker, lambda urls: (x for url in urls for x in files.of(url))]

    def __iter__(self) -> Iterator[Any]:
        found = self.pipeline[0]
        for stage in self.pipeline[1:]:
            found = stage(found)
        return iter(found)


def by_node(urls: Any) -> Any:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert ranks == 1, "a splitter of nodes that was not given is an error there"
    return islice(urls, rank, None, ranks)


def by_worker(urls: Any) -> Any:
    info = get_worker_info()
    return urls if info is None else islice(urls, info.id, None, info.num_workers)


KINDS: dict[str, Callable[[list[int], Path], Any]] = {"files": Files, "hf": HuggingFace, "web": Pipeline}


def in_turns(lengths: list[int]) -> list[int]:
    """Return the numbers of the samples of an epoch: one sample of each shard in turn."""
    rows = sorted((i, shard) for shard, length in enumerate(lengths) for i in range(length))
    return [100 * shard + i for i, shard in rows]


def expected(lengths: list[int], steps: int, batch: int = 8, *, drop_last: bool = False) -> list[float]:
    """Return the losses of one process in plain torch."""
    torch.manual_seed(7)
    model = net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole, at, losses = in_turns(lengths), 0, list[float]()
    while len(losses) < steps:
        chosen = whole[at : at + batch]
        at += len(chosen)
        if not chosen or (drop_last and len(chosen) < batch):
            at = 0
            continue
        x, y = (torch.stack(part) for part in zip(*map(sample, chosen), strict=True))
        loss = mean_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def job(data: Any, **changed: Any) -> Any:
    model, sgd = (lambda: net().double()), (lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    return quiet(**({"data": data, "model": model, "optimizer": sgd} | changed))


def losses(trainer: Any) -> list[float]:
    return [record["loss"] for record in trainer.history]


def trained(world: Any, kind: str, folder: Path, steps: int, changed: dict[str, Any]) -> tuple[list[float], int]:
    """Return the losses, and the number of processes that read for this rank."""
    torch.set_num_threads(1)
    note = folder / f"rank{world.place.rank}"
    note.touch()
    trainer = job(KINDS[kind](LENGTHS, note), **changed)
    note.write_text("")  # forget the samples that were read to compare the ranks' data
    trainer.fit(steps)
    return losses(trainer), len({line.split()[1] for line in note.read_text().splitlines()})


def numbers(folder: Path, rank: int) -> list[int]:
    return [int(line.split()[0]) for line in (folder / f"rank{rank}").read_text().splitlines()]


def read_once(folder: Path, ranks: int) -> bool:
    """Return True if every sample of the epoch was read exactly once, by one rank."""
    found = [numbers(folder, rank) for rank in range(ranks)]
    return all(found) and Counter(chain.from_iterable(found)) == Counter(in_turns(LENGTHS))


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_read_each_sample_once_and_train_as_one_process(kind: str, tmp_path: Path) -> None:
    steps = -(-sum(LENGTHS) // 8)  # one epoch, whose last steps take from the remaining shards

    found = run_ranks(trained, 2, kind, tmp_path, steps, {})

    assert found[0][0] == found[1][0] == pytest.approx(expected(LENGTHS, steps), abs=1e-12)
    assert read_once(tmp_path, 2)


@pytest.mark.usefixtures("known_to_be_right")
def test_workers_read_the_same_samples_as_a_rank_without_workers(tmp_path: Path) -> None:
    steps = -(-sum(LENGTHS) // 8)

    found = run_ranks(trained, 2, "hf", tmp_path, steps, {"loading": nbkit.Loading(workers=2)})

    assert found[0][0] == found[1][0] == pytest.approx(expected(LENGTHS, steps), abs=1e-12)
    assert read_once(tmp_path, 2)
    assert [pids for _, pids in found] == [2, 2]


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize(
    ("ranks", "drop_last"), [(1, False), (2, True), pytest.param(3, False, marks=pytest.mark.long)]
)
def test_epochs_end_and_begin_at_the_same_steps_on_any_number_of_ranks(
    ranks: int, drop_last: bool, tmp_path: Path
) -> None:
    changed = {"loading": nbkit.Loading(drop_last=drop_last), "batch_size": 12}

    found = run_ranks(trained, ranks, "files", tmp_path, 13, changed)

    wanted = expected(LENGTHS, 13, 12, drop_last=drop_last)
    assert all(one == pytest.approx(wanted, abs=1e-12) for one, _ in found)


def switched(world: Any, folder: Path, workers: int) -> tuple[list[float], list[float], list[int]]:
    torch.set_num_threads(1)
    note = folder / f"rank{world.place.rank}"
    trainer = job(HuggingFace(LENGTHS, note), loading=nbkit.Loading(workers=workers))
    trainer.fit(2)
    trainer.switch("tp")
    trainer.fit(1)
    note.write_text("")
    trainer.switch("pp")  # the rank keeps its part of each batch, so nothing is read again
    again = numbers(folder, world.place.rank)
    trainer.fit(1)
    trainer.save(folder / "saved")
    trainer.switch("zero3")
    trainer.fit(4)
    trainer.try_out("ddp", steps=2)
    resumed = job(HuggingFace(LENGTHS, note), strategy="ddp", loading=nbkit.Loading(workers=workers))
    resumed.load(folder / "saved")
    trainer.fit(2)
    resumed.fit(2)
    return losses(trainer), losses(resumed), again


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_live_switches_and_a_checkpoint_continue_with_the_same_samples(workers: int, tmp_path: Path) -> None:
    for whole, resumed, again in run_ranks(switched, 2, tmp_path, workers, timeout=120):
        wanted = expected(LENGTHS, 10)
        assert whole == pytest.approx(wanted, abs=1e-12)
        assert resumed == pytest.approx(wanted[:6], abs=1e-12)
        assert again == []


def evaluated(world: Any, folder: Path) -> tuple[float, float]:
    trainer, every = job(Files(LENGTHS, folder / "read")), [sample(n) for n in in_turns(LENGTHS)]
    return trainer.evaluate(Pipeline(LENGTHS, folder / "read")), trainer.evaluate(every)


@pytest.mark.usefixtures("known_to_be_right")
def test_evaluate_uses_all_samples_of_data_in_shards(tmp_path: Path) -> None:
    for found, wanted in run_ranks(evaluated, 2, tmp_path):
        assert found == pytest.approx(wanted, abs=1e-12)


class Drawing(Files):
    """A dataset with noise of three kinds of generator in each sample."""

    def of(self, shard: int) -> Iterator[tuple[Tensor, Tensor]]:
        import numpy

        for x, y in super().of(shard):
            yield x + torch.randn(6) + random.random() + float(numpy.random.rand()), y


def noisy(world: Any, folder: Path, workers: int) -> list[float]:
    trainer = job(Drawing(LENGTHS, folder / "read"), loading=nbkit.Loading(workers=workers))
    trainer.fit(3)
    trainer.try_out("zero1" if world.place.world_size > 1 else "ddp", steps=1)  # goes back, and reads data again
    trainer.fit(2)
    return losses(trainer)


@pytest.mark.usefixtures("known_to_be_right")
def test_draws_of_reading_do_not_depend_on_ranks_or_workers(tmp_path: Path) -> None:
    (alone,) = run_ranks(noisy, 1, tmp_path, 0)

    for found in run_ranks(noisy, 2, tmp_path, 1):
        assert found == pytest.approx(alone, abs=1e-12)


class Anew(HuggingFace):
    """A dataset that an unseeded generator shuffles, as webdataset's `shuffle` does."""

    def shard(self, num_shards: int, index: int) -> HuggingFace:
        return Anew(self.lengths, self.read, self.shards[index::num_shards])

    def of(self, shard: int) -> Iterator[tuple[Tensor, Tensor]]:
        rows = list(super().of(shard))
        random.SystemRandom().shuffle(rows)
        return iter(rows)


def drawn_anew(world: Any, folder: Path) -> tuple[str, str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = job(Anew(LENGTHS, folder / "read"))
    trainer.fit(2)
    with pytest.raises(TrainingError) as raised:
        job(Anew(LENGTHS, folder / "read"), strategy="tp").fit(1)
    return " ".join(str(each.message) for each in said), str(raised.value)


@pytest.mark.usefixtures("known_to_be_right")
def test_an_unseeded_shuffle_warns_and_is_refused_if_ranks_share_rows(tmp_path: Path) -> None:
    for said, refused in run_ranks(drawn_anew, 2, tmp_path):
        assert "the data yields different samples each time it is read" in said
        assert "2 ranks, 2 of them work on each row together" in refused


class Broken(Files):
    def of(self, shard: int) -> Iterator[tuple[Tensor, Tensor]]:
        for i, one in enumerate(super().of(shard)):
            if (shard, i) == (1, 9):
                raise OSError("the archive is truncated")
            yield one


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_cannot_be_read_is_named(workers: int, tmp_path: Path) -> None:
    data = opened(Broken(LENGTHS, tmp_path / "read"), workers=workers)
    try:
        with pytest.raises(TrainingError, match="Shard 1 of the data could not be read: OSError: the archive"):
            for _ in range(4):
                data.next()
        assert data.offset < 40
    finally:
        data.close()


def opened(data: Any, **changed: Any) -> Any:
    asked: dict[str, Any] = {"batch_size": 8, "rank": 0, "ranks": 1, "seed": 7, "shuffle": True, "drop_last": False}
    return open_stream(data, **(asked | {"collate": torch.utils.data.default_collate} | changed))


def test_shards_that_all_have_the_same_samples_are_refused(tmp_path: Path) -> None:
    class Whole(Files):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            if os.environ.get("NEVER"):
                get_worker_info()
            return self.of(0)

    with pytest.raises(TrainingError, match="yields the same samples for each"):
        opened(Whole(LENGTHS, tmp_path / "read"))


def test_data_in_shards_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    """Refuse it, because two shards would be read through one object, which may store a position."""

    class Uncopied(Files):
        def __copy__(self) -> Files:
            raise TypeError("a handle is open")

    with pytest.raises(TrainingError, match="must copy the data, and the copy failed: TypeError"):
        opened(Uncopied(LENGTHS, tmp_path / "read"))


def of_its_own(world: Any, folder: Path) -> str:
    class Own(HuggingFace):
        def of(self, shard: int) -> Iterator[tuple[Tensor, Tensor]]:
            return super().of(shard + world.place.rank)

        def shard(self, num_shards: int, index: int) -> HuggingFace:
            return Own(self.lengths, self.read, self.shards[index::num_shards])

    with pytest.raises(TrainingError) as raised:
        job(Own([*LENGTHS, 9], folder / "read", [0, 1, 2, 3]))
    return str(raised.value)


def test_ranks_with_different_shards_are_refused_before_training(tmp_path: Path) -> None:
    assert all("The ranks hold different data" in text for text in run_ranks(of_its_own, 2, tmp_path))


def said_of(world: Any, folder: Path) -> list[list[str]]:
    class Plain(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([sample(i) for i in range(32)])

    found = []
    for data in (Plain(), HuggingFace([32], folder / "read"), HuggingFace(LENGTHS, folder / "read")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            job(data)
        found.append([str(each.message) for each in said if "every rank reads" in str(each.message)])
    return found


def test_data_read_whole_warns_once_and_names_the_fix(tmp_path: Path) -> None:
    plain, one_shard, split = run_ranks(said_of, 2, tmp_path)[0]

    assert len(plain) == 1 and "num_shards = 8" in plain[0] and "get_worker_info()" in plain[0]
    assert len(one_shard) == 1 and "to_iterable_dataset(num_shards=8)" in one_shard[0]
    assert split == []
