"""Test that ranks of unequal speed get rows and stages to match, and train as one process."""

from __future__ import annotations

import random
import time
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from jobs import SEED, heard, net, points, quiet, weighted_loss
from ranks import run_ranks
from torch import nn

import nbkit
from nbkit.device_speeds import of_replicas, of_stages, rows_by_speed
from nbkit.errors import StrategyError
from nbkit.mesh import Mesh
from nbkit.planner.stages import partition
from nbkit.rank.data.balanced.balanced import Balanced
from nbkit.rank.data.balanced.equal_shares import equal_shares
from nbkit.rank.parallel.pipeline.stage_module import Absent
from nbkit.rank.train.control.rebalance import better
from nbkit.strategy import Strategy


def test_rows_follow_the_speeds_as_closely_as_whole_numbers_allow() -> None:
    for speeds, total in (((2, 1), 64), ((1, 1, 1, 2), 10), ((7, 3, 5), 17)):
        fractions = tuple(map(Fraction, speeds))
        rows = rows_by_speed(total, fractions)
        longest = max((stop - start) / speed for (start, stop), speed in zip(rows, fractions, strict=True))
        every = (c for c in product(range(total + 1), repeat=len(speeds) - 1) if sum(c) <= total)
        best = min(max(n / s for n, s in zip((*c, total - sum(c)), fractions, strict=True)) for c in every)

        assert longest == best and rows[0][0] == 0 and rows[-1][1] == total
        assert all(before[1] == after[0] for before, after in pairwise(rows))


@pytest.mark.parametrize("seed", range(12))
def test_stages_for_unequal_speeds_are_the_fastest_possible(seed: int) -> None:
    draw = random.Random(seed)
    costs = [Fraction(draw.randint(1, 9)) for _ in range(draw.randint(4, 9))]
    speeds = [draw.randint(1, 4) for _ in range(4)]

    def longest(ranges: Any) -> Fraction:
        return max(sum(costs[a:b]) / speed for (a, b), speed in zip(ranges, speeds, strict=True))

    every = [list(pairwise([0, *cuts, len(costs)])) for cuts in combinations(range(1, len(costs)), 3)]
    assert longest(partition([float(cost) for cost in costs], 4, speeds)) == min(map(longest, every))


def test_replicas_and_stages_have_the_speeds_of_their_ranks() -> None:
    mesh = Mesh(pp=2, dp=2)  # ranks 0, 1 are the first stage of two replicas
    assert of_stages((4, 2, 1, 1), mesh) == (3, 1)
    assert of_replicas((4, 4, 1, 1), mesh) == (1, 1)
    assert of_replicas((4, 2, 2, 1), mesh) == (Fraction(4, 3), Fraction(2, 3))
    assert equal_shares([4, 3, 2, 2, 1], 2, speeds=(Fraction(2), Fraction(1))) == ((0, 2, 3), (1, 4))


def test_a_strategy_prints_its_speeds_and_refuses_those_that_do_not_fit() -> None:
    strategy = Strategy.parse("ddp speeds=4:2:2:2", 4)

    assert str(strategy) == "dp=4 speeds=2:1:1:1" and Strategy.parse(str(strategy), 4) == strategy
    assert list(strategy.rows(10)) == [(0, 4), (4, 6), (6, 8), (8, 10)]
    assert Strategy.parse("ddp speeds=3:3", 2) == Strategy(dp=2)
    assert "equally fast" in Strategy.parse("ddp speeds=3:3", 2).without_effect[0]
    with pytest.raises(StrategyError, match="2 x 1 of 3, so that 33% is lost") as raised:
        Strategy.parse("tp speeds=2:1", 2)
    assert raised.value.hint == "ddp speeds=2:1" and Strategy.parse(raised.value.hint, 2)
    # If groups of equal speed are possible, the hint says how.
    with pytest.raises(StrategyError, match="2 x 1 of 3, so that 33% is lost") as raised:
        Strategy.parse("dp=2 tp=2 speeds=2:1:2:1", 4)
    apart = Strategy.parse(f"dp=2 tp=2 speeds=2:1:2:1 {raised.value.hint}", 4)
    assert apart.mesh.groups("tp") == [(0, 2), (1, 3)] and list(apart.rows(9)) == [(0, 6), (6, 9)]
    assert apart.composed.speeds == (2, 2, 1, 1)
    assert list(Strategy.parse("tp=2 speeds=2:2:1:1", 4).rows(9)) == [(0, 6), (6, 9)]
    for text in ("ddp speeds=2:1:1", "ddp speeds=2", "ddp speeds=0:1", "ddp speeds=fast"):
        with pytest.raises(StrategyError):
            Strategy.parse(text, 2)


def deep(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(6, 3))


class Late(nn.Module):
    """A block that takes a fixed time. The last block has most of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 512)
        self.out = nn.Linear(512, 6)

    def forward(self, x: torch.Tensor) -> Any:
        time.sleep(0.01)
        return self.out(torch.tanh(self.layer(x)))


def steep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), Late(), nn.Linear(6, 3))


def held_here(trainer: Any) -> int:
    """Count the elements of the parameters on this rank. A pipeline also lists those of other stages."""
    return sum(p.numel() for p in trainer.model.parameters() if not isinstance(p, Absent))


def losses(world: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    balanced = {"data": Balanced(points(52), cost=[1.0 + i % 7 for i in range(52)])}
    cases: dict[str, dict[str, Any]] = {
        "ddp": {},
        "ddp speeds=3:1": {"compute": nbkit.Compute(microbatch_size=2)},
        "zero3 speeds=3:1": {"compute": nbkit.Compute(microbatch_size=2)},
        "zero1 speeds=1:9": {},
        "pp speeds=3:1": {},
        "pp speeds=3:1 places=1:0": {},
    }
    for strategy, changed in cases.items():
        if world.place.world_size == 1 and strategy != "ddp":
            continue
        trainer = quiet(strategy=strategy, model=lambda: deep(0.2), loss=weighted_loss, **changed)
        rows: list[int] = []
        trainer.model.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(len(args[0]) if args else 0))
        trainer.fit(3)
        held = held_here(trainer)
        found[strategy] = [record["loss"] for record in trainer.history], sum(rows), str(trainer.arithmetic), held
    trainer = quiet(strategy="ddp", model=lambda: net(0.2), loss=weighted_loss, **balanced)
    trainer.fit(2)
    if world.place.world_size > 1:
        trainer.switch("ddp speeds=1:3")
    trainer.fit(2)
    found["switched"] = [record["loss"] for record in trainer.history]
    trainer = quiet(strategy="ddp", model=steep, loss=weighted_loss)
    trainer.fit(2)
    for text in ("pp", "pp speeds=1:4", "pp speeds=4:1", "ddp") if world.place.world_size > 1 else ():
        trainer.switch(text)
        trainer.fit(1)
    if world.place.world_size == 1:
        trainer.fit(4)
    texts = [record["strategy"] for record in trainer.history]
    held = [held_here(trainer)]
    if world.place.world_size > 1:
        trainer.switch(texts[3])
        held += [held_here(trainer)]
    found["placed"] = [record["loss"] for record in trainer.history], texts, held
    return found


def test_losses_equal_one_process_for_all_speeds_and_their_changes() -> None:
    torch.manual_seed(SEED)
    (alone,) = run_ranks(losses, 1)
    found = run_ranks(losses, 2, timeout=120)

    for rank, one in enumerate(found):
        for strategy in (
            "ddp",
            "ddp speeds=3:1",
            "zero3 speeds=3:1",
            "zero1 speeds=1:9",
            "pp speeds=3:1",
            "pp speeds=3:1 places=1:0",
        ):
            assert one[strategy][0] == pytest.approx(alone["ddp"][0], rel=1e-5), strategy
        assert one["ddp speeds=3:1"][1] == (18, 6)[rank]
        assert one["ddp speeds=3:1"][2] == "global 8 = 6 + 2 rows by speed, micro 2 at most"
        # There are six equal layers of 42 parameters, and a head. Rank 0 gets about three quarters of them.
        assert (one["pp speeds=3:1"][3] >= 4 * 42) == (rank == 0)
        assert one["switched"] == pytest.approx(alone["switched"], rel=1e-5)
        assert one["placed"][0] == pytest.approx(alone["placed"][0], rel=1e-5)
        # Most of the model's cost is in its last block, which the faster rank always takes.
        texts, (all_of_it, here) = one["placed"][1:]
        assert "places" not in texts[2] + texts[3] and texts[4].endswith("places=1:0 speeds=4:1")
        assert (here > all_of_it / 2) == (rank == 1)


def slept(world: Any, path: Any, strategy: str) -> dict[str, Any]:
    """Train on rows that take 4 ms in each block. From step 5 to step 14 rank 1 takes twice as long."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

        def forward(self, x: torch.Tensor) -> Any:
            slow = world.place.rank == 1 and 4 <= len(trainers[0].history) < 14 if trainers else False
            time.sleep(0.004 * len(x) * (1 + slow) if trainers else 0.0005 * len(x))
            return self.layer(x)

    trainers: list[Any] = []
    trainer = quiet(
        strategy=strategy,
        model=lambda: nn.Sequential(*(Slow() for _ in range(6)), nn.Linear(6, 3)),
        batch_size=12,
        data=points(48),
        log_dir=str(path / str(world.place.world_size)),
        recovery=nbkit.Recovery(balance=True),
    )
    trainers.append(trainer)
    events = heard(trainer, "rebalanced")
    trainer.fit(24 if world.place.world_size > 1 else 1)
    return {
        "events": [(event.step, event.speeds, event.gain) for event in events],
        "strategies": [record["strategy"] for record in trainer.history],
        "loss": [record["loss"] for record in trainer.history],
        "seconds": [record["seconds"] for record in trainer.history],
    }


def test_a_slowed_rank_gets_fewer_rows_within_three_steps_until_it_recovers(tmp_path: Any) -> None:
    found = run_ranks(slept, 2, tmp_path, "ddp", timeout=120)

    assert found[0]["events"] == found[1]["events"] and found[0]["loss"] == found[1]["loss"]
    # There are 12 rows. The slow steps are 5 to 14; two of them are measured before the rows are divided again.
    rows = [Strategy.parse(text, 2).rows(12) for text in found[0]["strategies"]]
    of_slow = [stop - start for _, (start, stop) in rows]
    assert of_slow[7] < 6 and of_slow[-1] > of_slow[12]
    assert all(gain > 0.05 for _, _, gain in found[0]["events"])


def test_measured_times_become_speeds_if_that_saves_enough() -> None:
    ddp, half = better(Strategy(dp=2), 12, (1.0,), (0.6, 1.2)), better(Strategy(dp=2), 12, (1.0,), (1.0, 1.04))
    assert ddp is not None and str(ddp[0]) == "dp=2 speeds=2:1" and ddp[1] == pytest.approx(1 / 3)
    assert half is None
    # Ranks are compared per row: 8 rows in 0.8 s are as fast as 4 in 0.4 s.
    back = better(Strategy(dp=2, speeds=(2, 1)), 12, (1.0,), (0.8, 0.4))
    assert back is not None and str(back[0]) == "dp=2" and back[1] == pytest.approx(1 / 4)
    stages = better(Strategy(pp=2), 12, (1.0,) * 6, (0.5, 1.0))
    assert stages is not None and stages[0].speeds == (2, 1)
    # Four micro-batches: (3 + 6) x 0.5 / 4 + 6 x ... before, five of equal consecutive stages afterwards.
    assert stages[1] == pytest.approx(1 - 5 * 4 / (4 * 6 + 3))
    # A group of tp has one speed, that of its slowest rank.
    groups = better(Strategy(dp=2, tp=2), 12, (1.0,), (1.0, 0.5, 0.5, 0.5))
    assert groups is not None and groups[0].speeds == (1, 1, 2, 2)
