"""Test that the order of data is fixed, and a resumed stream returns every sample exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import net, order, points, quiet
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import IterableDataset

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.data.batch import Shard, bounds, shard_of, take
from nbkit.rank.data.open_stream import open_stream, shards


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset whose sample i contains the number i."""

    def __init__(self, num: int = 100) -> None:
        self.num = num

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.num):
            yield torch.full((6,), float(i)), torch.tensor(i % 3)


def stream(data: Any, **changed: Any) -> Any:
    asked = {"batch_size": 8, "rank": 0, "ranks": 1, "seed": 7, "shuffle": True, "drop_last": False, "collate": list}
    return open_stream(data, **(asked | changed))


def test_the_order_of_samples_is_fixed_over_epochs() -> None:
    data = stream(list(range(21)))
    epochs = [order(21, 0), order(21, 1)]

    found = [data.next().data for _ in range(6)]

    assert found == [epoch[at : at + 8] for epoch in epochs for at in (0, 8, 16)]


def test_shuffle_false_counts_up_and_drop_last_drops_the_short_batch() -> None:
    data = stream(list(range(21)), shuffle=False, drop_last=True)

    assert [data.next().data for _ in range(3)] == [list(range(8)), list(range(8, 16)), list(range(8))]


@pytest.mark.parametrize("total", [1, 3, 8, 10])
def test_ranks_take_contiguous_rows_that_cover_the_batch(total: int) -> None:
    cut = [bounds(total, 4, rank) for rank in range(4)]

    assert [i for start, stop in cut for i in range(start, stop)] == list(range(total))
    assert max(stop - start for start, stop in cut) - min(stop - start for start, stop in cut) <= 1


def test_one_pass_has_each_sample_once_for_lists_and_iterators() -> None:
    for data in (list(range(21)), iter(range(21))):
        seen = [shard.data or [] for shard in shards(data, batch_size=8, rank=0, ranks=1, collate=list)]
        assert list(chain.from_iterable(seen)) == list(range(21))


def test_rows_are_taken_from_every_part_of_a_batch() -> None:
    batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "deep": [torch.arange(8).view(4, 2)]}

    part = take(batch, 1, 3, rows=4)

    assert part["x"].tolist() == [1, 2]
    assert part["names"] == ["b", "c"]
    assert part["deep"][0].tolist() == [[2, 3], [4, 5]]


def test_lists_of_an_entry_per_row_are_cut_and_other_sizes_are_refused() -> None:
    boxes = [{"boxes": torch.zeros(n, 4)} for n in (2, 4, 4, 4)]
    batch = [torch.arange(8).view(4, 2), boxes]

    assert take(batch, 1, 3, rows=4)[1] == boxes[1:3]
    assert take([torch.zeros(4), 0.5], 0, 2, rows=4)[1] == 0.5
    # Two inputs of two rows, alone and with a third, are parts of the batch, not entries.
    two = [[torch.arange(2), (torch.arange(2) + 5, torch.arange(2))], torch.zeros(2)]
    assert [part.tolist() for part in (take(two, 1, 2, rows=2)[0][0], take(two, 1, 2, rows=2)[0][1][0])] == [[1], [6]]
    with pytest.raises(TrainingError, match=r"shape \(6, 6\), beside 4 rows"):
        take([torch.zeros(4, 6), torch.zeros(6, 6)], 0, 2, rows=4)
    assert isinstance(shard_of([torch.zeros(4, 6), torch.zeros(6, 6)], ranks=1, rank=0), Shard)


def trained(world: Any, path: Path) -> list[int]:
    """Make four runs of a few steps. A new Trainer resumes each from the file of the previous run."""
    seen: list[int] = []

    def collate(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        rows = [torch.stack(part) for part in zip(*samples, strict=True)]
        return rows

    for run, steps in enumerate((3, 2, 4, 3)):

        class Seen(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = net()

            def forward(self, x: Tensor) -> Any:
                # Count only whole shares: the check before the first step runs the model on fewer rows.
                seen.extend(int(i) for i in x[:, 0] if len(x) == 4)
                return self.inner(x)

        trainer = quiet(data=Numbers(), model=Seen, loading=nbkit.Loading(collate=collate))
        if run:
            trainer.load(path)
        trainer.fit(steps)
        trainer.save(path)
    return seen


def test_three_resumes_see_every_sample_of_a_stream_once(tmp_path: Path) -> None:
    found = run_ranks(trained, 2, tmp_path / "saved.pt")

    # 12 steps of 8 samples end within the epoch of 100 samples.
    assert sorted(chain.from_iterable(found)) == list(range(96))
    assert found[0][:4] == [0, 1, 2, 3] and found[1][:4] == [4, 5, 6, 7]


class Shuffled(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset that draws its order at the start, and an unused number with every sample."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in torch.randperm(64).tolist():
            torch.rand(())
            yield torch.full((6,), float(i)), torch.tensor(int(torch.randint(3, ())))


def drawn(world: Any, path: Path) -> list[Any]:
    seen: list[tuple[int, int]] = []

    def collate(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        seen.extend((int(x[0]), int(y)) for x, y in samples)
        return [torch.stack(part) for part in zip(*samples, strict=True)]

    # Every rank collates its own rows, and two rows of the whole batch to compare the streams.
    whole = quiet(data=Shuffled(), loading=nbkit.Loading(collate=collate))
    whole.fit(8)
    expected, seen[:] = list(seen), []
    quiet_steps = quiet(data=Shuffled(), loading=nbkit.Loading(collate=collate))
    quiet_steps.fit(4)
    quiet_steps.save(path)
    resumed = quiet(data=Shuffled(), loading=nbkit.Loading(collate=collate))
    resumed.load(path)
    torch.rand(3)
    resumed.fit(4)
    return [seen == expected, len({i for i, _ in seen}), whole.history[-1]["loss"] == resumed.history[-1]["loss"]]


def test_a_stream_that_draws_numbers_resumes_with_the_same_draws(tmp_path: Path) -> None:
    (found,) = run_ranks(drawn, 1, tmp_path / "saved.pt")

    assert found == [True, 64, True]


def over_epochs(world: Any) -> list[int]:
    data = stream(Numbers(20), rank=world.place.rank, ranks=2, collate=lambda rows: torch.stack([x for x, _ in rows]))
    return [shard.total for shard in (data.next() for _ in range(6))] + [data.epoch, data.offset]


def test_a_stream_that_ends_begins_its_next_epoch() -> None:
    assert run_ranks(over_epochs, 2) == [[8, 8, 4, 8, 8, 4, 1, 20]] * 2


def test_an_iterator_that_cannot_start_again_is_an_error() -> None:
    data = stream(iter(Numbers(8)), collate=lambda rows: torch.stack([x for x, _ in rows]))
    data.next()

    with pytest.raises(TrainingError, match="cannot start again"):
        data.next()


def different_streams(world: Any) -> str:
    class Own(Numbers):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            rows = list(super().__iter__())
            return iter(rows if world.place.rank != 1 else rows[::-1])

    with pytest.raises(TrainingError) as raised:
        quiet(data=Own(), batch_size=9).fit(2)
    return str(raised.value)


def test_ranks_that_read_different_streams_are_refused_before_training() -> None:
    found = run_ranks(different_streams, 3)

    assert len(set(found)) == 1
    assert "different data in step 1" in found[0] and "rank 1 had a different batch" in found[0]


def different_map_style(world: Any) -> list[str]:
    rank = world.place.rank
    found = []
    for asked in (
        {"data": points(32 + 9 * (rank == 1))},
        {"batch_size": 9 if rank != 1 else 12},
        {"seed": 7 + (rank == 1)},
    ):
        with pytest.raises(TrainingError) as raised:
            quiet(**({"batch_size": 9} | asked)).fit(2)
        found.append(str(raised.value))
    return found


def test_different_map_style_data_batch_size_or_seed_are_refused() -> None:
    for found in run_ranks(different_map_style, 3):
        *data, seed = found
        assert len(data) == 2
        assert all("different data in step 1" in one and "rank 1 had a different batch" in one for one in data)
        assert "'seed' differs" in seed


def drawn_by_all(world: Any) -> int:
    quiet().job.seed_data(own=False)
    return torch.initial_seed()


def test_draws_of_all_ranks_do_not_depend_on_the_number_of_ranks() -> None:
    assert len({*run_ranks(drawn_by_all, 1), *run_ranks(drawn_by_all, 2)}) == 1
