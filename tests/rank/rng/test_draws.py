"""Test that a model draws the same numbers under every strategy, for one row or the whole batch.

Seeding the streams is a small part of a step, and gives the same numbers again.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from jobs import quiet
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import nbkit
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.parallel.check_model import check
from nbkit.rank.rng.draw_plan import DrawPlan, extent
from nbkit.rank.rng.keyed_dropout import KeyedDropout, find_draws
from nbkit.rank.rng.seeding import seed_step

ROWS, LENGTH, WIDTH = 8, 4, 6


def functions(x: Tensor) -> list[Tensor]:
    """Return the numbers of each row, drawn by every function."""
    size = (len(x), 300)
    empty = x.new_empty(size)
    return [
        torch.rand(size),
        torch.rand(*size, dtype=torch.float64),
        torch.rand_like(empty),
        torch.randn(size),
        torch.randn_like(empty, dtype=torch.float32),
        torch.normal(1.0, 2.0, size),
        torch.normal(torch.ones(size), 2.0),
        torch.randint(7, size),
        torch.randint(3, 9, size, dtype=torch.int32),
        torch.randint_like(empty, 2, 5),
        torch.bernoulli(torch.full(size, 0.3)),
        torch.full(size, 0.3).bernoulli(),
        x.new_empty(size).bernoulli_(0.3),
        x.new_empty(size).uniform_(-1, 3),
        torch.empty(size).normal_(1, 2),
        torch.empty(size).exponential_(2),
        F.gumbel_softmax(torch.zeros(*size, 3), hard=True),
    ]


MEANS = [0.5, 0.5, 0.5, 0, 0, 1, 1, 3, 5.5, 3, 0.3, 0.3, 0.3, 1, 1, 0.5, 1 / 3]
SPREADS = [3**-0.5 / 2] * 3 + [1, 1, 2, 2, 2, 2.9166667**0.5, (2 / 3) ** 0.5, *[0.21**0.5] * 3]
SPREADS += [4 * 3**-0.5 / 2, 2, 0.5, (2 / 9) ** 0.5]


def drawn(keyed: KeyedDropout, rows: list[int], step: int = 0) -> list[Tensor]:
    with keyed.step(step, rows):
        return functions(torch.zeros(len(rows), 5, dtype=torch.float64))


def test_every_function_draws_keyed_numbers_of_the_right_distribution() -> None:
    keyed = KeyedDropout(nn.Module(), seed=1, plan=DrawPlan())
    whole = drawn(keyed, list(range(ROWS)))
    parts = [drawn(keyed, rows) for rows in ([0, 1, 2], [3, 4, 5, 6, 7])]
    later = drawn(keyed, list(range(ROWS)), step=1)

    for i, (all_rows, mean, spread) in enumerate(zip(whole, MEANS, SPREADS, strict=True)):
        assert torch.equal(torch.cat([part[i] for part in parts]), all_rows), i
        assert not torch.equal(all_rows, later[i]) and not torch.equal(all_rows[0], all_rows[1]), i
        n = all_rows.numel()
        assert abs(float(all_rows.double().mean()) - mean) < 5 * spread / n**0.5, i
        assert abs(float(all_rows.double().std()) - spread) < 0.06 * spread, i
    assert whole[1].dtype == torch.float64 and whole[8].dtype == torch.int32 and whole[7].dtype == torch.int64
    assert len({float(x) for x in whole[0].flatten()[:1000]}) > 990
    assert float(whole[0].min()) >= 0 and float(whole[0].max()) < 1


class Block(nn.Module):
    """A block with noise, dropped paths, and numbers for all rows together (as many as a batch may have rows)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        path = x.new_empty(len(x), 1, 1).bernoulli_(0.5)
        x = x + self.down(torch.tanh(self.up(x))) * path
        return x + 0.1 * torch.randn_like(x) + torch.rand(ROWS, 1, 1).mean()


class Noisy(nn.Module):
    """A model that draws before its blocks (a time per row), in them, and after them (once for all rows)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.times, self.blocks = nn.Embedding(10, WIDTH), nn.ModuleList([Block(), Block()])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.times(torch.randint(0, 10, (len(x),)))[:, None] + 0.1 * torch.randn_like(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + torch.rand(LENGTH, WIDTH, dtype=x.dtype) * torch.rand(())).mean(1)


class Skipping(nn.Module):
    """A model that skips blocks by Python's random, as LayerDrop does, and scales its output by numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in "1234"
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x) if random.random() < 0.8 else x
        return self.head(x * (1 + np.random.rand())).mean(1)


class Other(nn.Module):
    """A model whose random numbers cannot be keyed: it draws from Python's random for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.draw = nn.Linear(WIDTH, 3), torch.Generator().manual_seed(1)
        self.mixed = nn.Identity()
        self.mixed.forward = lambda x: x + torch.tensor([random.random() for _ in x])[:, None, None]  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.draw)
        return self.head(self.mixed(x) + noise[torch.randperm(len(x))])


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    one = [torch.randn(LENGTH, WIDTH, generator=draw, dtype=torch.float64) for _ in range(3 * ROWS)]
    return [(x, torch.randint(3, (), generator=draw)) for x in one]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


def test_the_draws_of_a_model_are_found_and_named() -> None:
    x = torch.randn(3, LENGTH, WIDTH)
    noisy = Noisy()
    plan = find_draws(noisy, lambda rows: noisy(x[:rows].double()))
    assert plan is not None and len(plan.shared) == 4 and plan.unkeyed == ()

    skipping = Skipping()
    drawn = find_draws(skipping, lambda rows: skipping(x[:rows].double()))
    assert drawn is not None and drawn.hosts == {""} and drawn.unkeyed == ()
    said = check(skipping, "pp=2 microbatches=2", [x[:2].double(), torch.zeros(2, dtype=torch.long)])
    assert not said.ok and "outside of its blocks" in str(said)
    # The ranks of the proof are threads, which share Python's generator: each has its own numbers all the same.
    for strategy in ("zero3", "tp=2"):
        assert (said := check(Skipping(), strategy, [x[:2].double(), torch.zeros(2, dtype=torch.long)], 2)).ok, said

    model = Other()
    plan = find_draws(model, lambda rows: model(x[:rows]))
    assert plan is not None and sorted(plan.unkeyed) == [
        "Python's random in mixed",
        "the model's own generator in the model",
        "torch's randperm in the model",
    ]
    said = str(check(Other(), "dp=2", [x[:2], torch.zeros(2, dtype=torch.long)]))
    assert "do not depend on the row" in said and "torch's randperm" in said and "fits" in said
    assert find_draws(nn.Linear(WIDTH, 3), lambda rows: None) is None


def test_numpy_is_seeded_before_its_generator_is_first_used() -> None:
    code = (
        "import sys, numpy; assert 'numpy.random' not in sys.modules; "
        "from nbkit.rank.rng.host_generators import seed_others; seed_others(3); print(numpy.random.rand())"
    )
    drawn = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(drawn) == np.random.RandomState(3).rand()


def test_a_part_of_a_tensor_draws_its_part_of_the_numbers() -> None:
    def noise(*size: int) -> Tensor:
        with KeyedDropout(nn.Module(), seed=1, plan=DrawPlan()).step(2, range(ROWS)):
            return torch.randn(*size)

    whole, path = noise(ROWS, LENGTH, WIDTH), noise(ROWS, 1, 1)
    with extent("sequence", 2, LENGTH), extent("feature", 3, WIDTH):
        assert torch.equal(noise(ROWS, 2, 3), whole[:, 2:, 3:])
        assert torch.equal(noise(ROWS, 1, 1), path)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


def gpt() -> nn.Module:
    """Return a GPT with noise in its blocks and before them."""
    model = GPT(GPTConfig(vocab=32, block=8, layers=2, heads=2, width=16)).double()
    for part in (model, *model.blocks):
        part.drop = Noise()
    return model


class Towers(nn.Module):
    """A model of two towers that attend by hand. It uses the first after the second, and has dropout at the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.drop, self.head = nn.Embedding(32, 16), nn.Dropout(0.3), nn.Linear(16, 32)
        self.one, self.other = (nn.ModuleList(Reader() for _ in range(2)) for _ in range(2))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        one, other = self.drop(self.tokens(ids)), self.drop(self.tokens(ids.flip(1)))
        for block in self.one:
            one = block(one)
        for block in self.other:
            other = block(other)
        return self.head(self.drop(one) * F.dropout(other, 0.3, self.training))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.up, self.down = Attend(), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.2, self.training))


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps, self.drop = nn.Linear(16, 48), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x).chunk(3, -1)
        return self.drop((q @ k.transpose(1, 2)).softmax(-1)) @ v


def texts() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    pairs = [torch.randint(32, (2, 8), generator=draw) for _ in range(3 * ROWS)]
    return [(one, other) for one, other in pairs]


def of_texts(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


MODELS: dict[str, dict[str, Any]] = {
    "noisy": {"model": Noisy, "data": data(), "loading": nbkit.Loading(shuffle=False)},
    # A stream has no example beforehand. On two ranks, a draw for all rows is as long as the rows of a rank.
    "streamed": {"model": Noisy, "data": Stream(), "loading": nbkit.Loading(shuffle=None)},
    "skipping": {"model": Skipping, "data": data(), "loading": nbkit.Loading(shuffle=False)},
    "gpt": {"model": gpt, "data": texts(), "loss": of_texts},
    "towers": {"model": Towers, "data": texts(), "loss": of_texts},
}

# (model, strategy) -> other arguments of the Trainer. tests/rank/train/switch/test_switch.py trains a GPT with dropout
# under every family.
STRATEGIES: dict[tuple[str, str], dict[str, Any]] = {
    ("noisy", "zero3"): {"compute": nbkit.Compute(microbatch_size=1)},
    ("noisy", "tp"): {},
    ("streamed", "zero3"): {},
    ("skipping", "zero3"): {"compute": nbkit.Compute(microbatch_size=1)},
    ("skipping", "tp"): {},
    ("towers", "pp"): {},
}
ALSO: dict[tuple[str, str], dict[str, Any]] = {
    ("noisy", "ddp"): {},
    ("noisy", "pp"): {},
    ("gpt", "tp"): {},
    ("gpt", "cp=2"): {},
    ("streamed", "ddp"): {},
    ("streamed", "tp"): {},
    ("towers", "cp=2"): {},
}
ALONE: dict[tuple[str, str], dict[str, Any]] = {
    ("noisy", "ddp"): {"compute": nbkit.Compute(microbatch_size=4)},
    ("skipping", "ddp"): {"compute": nbkit.Compute(microbatch_size=4)},
    ("gpt", "ddp"): {},
    ("towers", "ddp"): {},
}


def trained(world: Any, cells: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for (model, strategy), changed in cells.items():
        trainer = quiet(strategy=strategy, batch_size=ROWS, **MODELS[model], **changed)
        records = trainer.fit(2)
        weights = trainer.full_state_dict().values()
        found[model, strategy] = [*(record["loss"] for record in records), *(float(w.sum()) for w in weights)]
    return found


@pytest.mark.usefixtures("known_to_be_right")
@pytest.mark.parametrize("cells", [STRATEGIES, pytest.param(ALSO, marks=pytest.mark.long)])
def test_every_strategy_draws_what_one_rank_draws(cells: dict[tuple[str, str], dict[str, Any]]) -> None:
    models = {"noisy" if model == "streamed" else model for model, _ in cells}
    alone = run_ranks(trained, 1, {(model, how): more for (model, how), more in ALONE.items() if model in models})[0]
    for (model, strategy), numbers in run_ranks(trained, 2, cells)[0].items():
        same = "noisy" if model == "streamed" else model
        assert numbers == pytest.approx(alone[same, "ddp"], rel=1e-10, abs=1e-10), (model, strategy)


def test_seeding_a_step_is_repeatable_and_leaves_unused_devices_alone() -> None:
    """Check that no call is queued: torch.manual_seed would queue one, with a traceback, for each device."""
    queued = torch.cuda._lazy_seed_tracker.get_calls()
    drawn = []
    for rank in (0, 1, 0):
        seed_step(7, 3, rank)
        drawn.append(float(torch.rand(())))

    assert drawn[0] == drawn[2] != drawn[1]
    assert torch.cuda._lazy_seed_tracker.get_calls() is queued
