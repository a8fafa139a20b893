"""Test that all ranks learn and agree on the costs of samples, from seconds or losses, if none are given."""

from __future__ import annotations

import pickle
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Recording, mean_loss, points, quiet
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import TrainingError
from nbkit.rank.comm.agree import all_gather_objects
from nbkit.rank.data.balanced.balanced import Shares, rates_of
from nbkit.rank.data.balanced.equal_shares import equal_shares, unevenness
from nbkit.rank.data.open_stream import open_stream
from nbkit.rank.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("known_to_be_right")
CONFIG = GPTConfig(vocab=20, block=12, layers=2, heads=2, width=8)
# The loss of a sample is on one rank (zero3), on the last stage (pp), or in parts on all ranks (cp). The resumed run
# switches from pp to ddp.
STRATEGIES, ALSO = ("zero3", "pp", "cp=2"), ("ddp", "tp")
SAMPLES, BATCH, EPOCH = 26, 8, 4  # 7, 7, 6 and 6 samples


def texts() -> list[tuple[Tensor, Tensor]]:
    """Return texts of different difficulty: some repeat one token, others use up to 20."""
    draw = torch.Generator().manual_seed(2)
    ids = [torch.randint(1 + n % 20, (13,), generator=draw) for n in range(SAMPLES)]
    return [(row[:-1], row[1:]) for row in ids]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def watched(trainer: Any) -> list[Any]:
    """Return a list that receives each shard that `trainer` reads from now on."""
    seen, read = [], trainer._stream.next

    def following(draws: Any = None) -> Any:
        seen.append(read(draws))
        return seen[-1]

    trainer._stream.next = following
    return seen


def by_loss(world: Any, folder: Path, strategies: tuple[str, ...] = ("ddp",)) -> dict[str, Any]:
    """Train nine steps (two epochs and one step). Then train six, save, and continue in another job."""
    found: dict[str, Any] = {}

    def trainer(strategy: str) -> tuple[Any, Any]:
        data = nbkit.Balanced(texts(), cost="loss")
        how = {"model": lambda: GPT(CONFIG).double(), "loss": token_loss, "batch_size": BATCH}
        how["compute"] = nbkit.Compute(microbatch_size=2)
        return quiet(data=data, strategy=strategy, **how), data

    for strategy in strategies:
        made, data = trainer(strategy)
        shards = watched(made)
        made.fit(2 * EPOCH + 1)
        batches = [list(shard.indices) for shard in shards]
        found[strategy] = [record["loss"] for record in made.history], batches, data.costs, data.why
    first, _ = trainer("ddp")
    first.fit(EPOCH + 2)
    first.save(folder / str(world.place.world_size))
    second, data = trainer("pp" if world.place.world_size > 1 else "ddp")
    second.load(folder / str(world.place.world_size))
    shards = watched(second)
    second.fit(1)
    if world.place.world_size > 1:
        second.switch("ddp")
    second.fit(2)
    found["resumed"] = [record["loss"] for record in second.history], [list(shard.indices) for shard in shards]
    return found


def in_plain_torch(batches: list[list[int]]) -> tuple[list[float], list[list[float]]]:
    """Train a model on these batches. Return (losses, for each epoch the loss of each sample)."""
    torch.manual_seed(7)
    model, data = GPT(CONFIG).double(), texts()
    optimizer, losses, each = Recording(model), [], [[0.0] * SAMPLES for _ in range(3)]
    for step, batch in enumerate(batches):
        inputs, targets = (torch.stack([data[i][part] for i in batch]) for part in (0, 1))
        own = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none").mean(1)
        for i, value in zip(batch, own.tolist(), strict=True):
            each[step // EPOCH][i] = value
        optimizer.zero_grad()
        own.mean().backward()
        optimizer.step()
        losses.append(float(own.detach().mean()))
    return losses, each


@pytest.mark.long
@pytest.mark.parametrize("strategies", [STRATEGIES, ALSO])
def test_every_strategy_orders_an_epoch_by_the_losses_of_the_previous_epoch(
    tmp_path: Path, strategies: tuple[str, ...]
) -> None:
    (alone,) = run_ranks(by_loss, 1, tmp_path)
    losses, batches, costs, why = alone["ddp"]
    plain, each = in_plain_torch(batches)

    assert losses == pytest.approx(plain, rel=1e-9)
    assert costs == pytest.approx(each[1], rel=6e-3)  # three digits
    assert "26 of 26" in why and "from epoch 2 on" in why
    for epoch in range(2):
        assert sorted(i for batch in batches[epoch * EPOCH :][:EPOCH] for i in batch) == list(range(SAMPLES))
    # The second epoch is balanced by the losses of the first. All sizes are equal, so they could not balance it.
    spread = []
    for epoch in range(2):
        means = [sum(each[0][i] for i in batch) / len(batch) for batch in batches[epoch * EPOCH :][:EPOCH]]
        spread.append(max(means) - min(means))
    assert spread[1] < 0.5 * spread[0]

    for found in run_ranks(by_loss, 2, tmp_path, strategies, timeout=150):
        for strategy in strategies:
            assert found[strategy][1] == batches, strategy
            assert found[strategy][0] == pytest.approx(losses, rel=1e-9), strategy
            assert found[strategy][2] == costs, strategy
        assert found["resumed"][0] == pytest.approx(losses, rel=1e-9)
        assert found["resumed"][1] == batches[EPOCH + 2 :]


# The time of a row grows with the square of its size, as in attention.
SLEPT = [(12, 14, 16, 40)[(i * 7 + i // 5) % 4] for i in range(144)]
TOOK = [size**2 / 4 for size in SLEPT]


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 3)

    def forward(self, x: Tensor, size: Tensor) -> Any:
        time.sleep(float((size**2).sum()) / 40_000)
        return self.map(x)


def padless(samples: list[Any]) -> Any:
    inputs = torch.stack([x for x, _, _ in samples]), torch.tensor([len(pad) for _, pad, _ in samples])
    return inputs, torch.stack([y for _, _, y in samples])


def by_seconds(world: Any, given: bool) -> Any:
    samples = [(x, torch.zeros(size), y) for (x, y), size in zip(points(144), SLEPT, strict=True)]
    data = nbkit.Balanced(samples, cost=[float(size) for size in SLEPT] if given else None)
    trainer = quiet(
        model=Slow, loss=mean_loss, data=data, loading=nbkit.Loading(collate=padless), batch_size=12, log_dir="runs"
    )
    shards = watched(trainer)
    trainer.fit(24)
    uneven = [unevenness([TOOK[i] for i in shard.indices], shard.parts) for shard in shards]
    batches = [list(shard.indices) for shard in shards]
    return [record["loss"] for record in trainer.history], batches, uneven, data.why


@pytest.mark.long
def test_measured_seconds_divide_the_rows_but_do_not_change_batches() -> None:
    (alone,) = run_ranks(by_seconds, 1, True)
    by_size = [
        unevenness([TOOK[i] for i in batch], equal_shares([float(SLEPT[i]) for i in batch], 2)) for batch in alone[1]
    ]
    for losses, batches, uneven, why in run_ranks(by_seconds, 2, False):
        assert batches == alone[1] and losses == pytest.approx(alone[0], rel=1e-5)
        assert uneven[:8] == by_size[:8]
        # nbkit updates the costs after eight steps, and at the end of the epoch, which has twelve.
        assert sum(uneven[12:]) / 12 - 1 < 0.75 * (sum(by_size[12:]) / 12 - 1)
        assert "learned from the seconds of" in why and why.endswith("is 3.33 times as large")


def test_rates_are_estimated_from_both_stages_of_two_replicas() -> None:
    true, draw = torch.tensor([5.0, 1.0, 2.0], dtype=torch.float64), torch.Generator().manual_seed(0)
    everyone = []
    # Replica 1 always has more of the slow class.
    for replica, stage in ((0, 1.0), (1, 1.0), (0, 3.0), (1, 3.0)):
        own = Shares.none(3)
        for _ in range(40):
            sizes = torch.randint(1, 30, (3,), generator=draw).double() + torch.tensor([20.0 * replica, 0.0, 0.0])
            own = own.and_one(sizes, stage * 1e-3 * float(sizes @ true))
        everyone.append((replica, own))
    found = rates_of(everyone, torch.ones(3, dtype=torch.float64))
    found = rates_of(everyone, found)

    torch.testing.assert_close(found / found[1], true, rtol=0.05, atol=0)
    same = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    assert torch.equal(rates_of([(0, Shares.none(3))], same), same)


def joins(world: Any, cost: str) -> list[float]:
    """Give the state of rank 0's data to a new stream on rank 1. Return the next samples and the costs."""
    gather = partial(all_gather_objects, world_size=2, device=torch.device("cpu"))
    rank, asked = world.place.rank, {"ranks": 2, "seed": 7, "shuffle": True, "drop_last": False, "workers": 0}
    asked |= {"rank": rank, "batch_size": BATCH, "collate": padless, "gather": gather}
    samples = [(x, torch.zeros(7 + n % 3), y) for n, (x, y) in enumerate(points(SAMPLES))]
    data = nbkit.Balanced(samples, cost=cost)
    old = open_stream(data, **asked)
    for _ in range(EPOCH):
        shard = old.next()
        if shard.hears is not None:
            own = list(shard.indices)[rank::2]
            shard.hears(own, torch.tensor([1.0 + i for i in own]))
    old.next()
    handed = pickle.loads(gather(pickle.dumps(data))[0])
    data = handed if rank else data
    new = open_stream(data, **asked)
    if not rank:
        new.follow(old)
    new.agree()
    new.seek(old.epoch, old.offset)
    return [*map(float, new.next().indices), *data.costs]


@pytest.mark.parametrize("cost", ["loss", "seconds"])
def test_a_rank_that_joins_gets_the_learned_costs(cost: str) -> None:
    first, second = run_ranks(joins, 2, cost)

    assert first == second
    if cost == "loss":
        assert second[-SAMPLES:] == [1.0 + i for i in range(SAMPLES)]


def test_an_unknown_cost_is_refused_and_why_describes_the_costs() -> None:
    with pytest.raises(TrainingError, match="seconds loss"):
        nbkit.Balanced(points(4), cost="tokens")
    data = nbkit.Balanced([(torch.zeros(n), torch.zeros(2, 4)) for n in (4, 20)])
    assert data.why == "cost: the size of a sample, 8 to 20; a training learns its seconds"
    assert nbkit.Balanced(points(2), cost=[3, 1]).why == "cost: as given, 1 to 3"
