"""Test that a job whose strategy changes during training has the losses of a job without switches."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import NbkitError, SwitchError
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.train.estimate import strategy_table
from nbkit.rank.train.trainer import Trainer
from nbkit.strategy import Strategy

pytestmark = pytest.mark.usefixtures("rows_are_known")

# Each family except hsdp, which test_switch_nodes.py has. tests/rank/parallel/reshard has every pair, and make parity
# and make zoo have long chains.
THROUGH = ("zero3", "tp", "dp=2 pp=2 schedule=zbv", "cp=2 tp=2", "ddp")
STEPS = len(THROUGH) + 2  # one before, one under each, and one more under tp, whose first step is not timed


def trainer(**changed: Any) -> Trainer:
    draw = torch.Generator().manual_seed(1)
    data = [tuple(torch.randint(32, (8,), generator=draw) for _ in range(2)) for _ in range(32)]

    def model() -> GPT:
        made = GPT(GPTConfig(vocab=32, block=8, layers=4, heads=4, width=16, dropout=0.1)).double()
        made.head.weight = made.tokens.weight  # tied, so stages share it
        return made

    asked: dict[str, Any] = {
        "model": model,
        "loss": lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "data": data,
        "batch_size": 16,
        "clip_norm": 1.0,
        "seed": 3,
        "log_dir": None,
        "progress": False,
    }
    return Trainer(**(asked | changed))


def losses(job: Trainer) -> list[float]:
    return [record["loss"] for record in job.history]


def never_switched(world: Any) -> tuple[list[float], list[int]]:
    job = trainer()
    job.fit(STEPS)
    return losses(job), job.generate(torch.tensor([1, 2, 3]), 4).tolist()


@cache
def expected_of_one() -> tuple[list[float], list[int]]:
    """Return the losses and the generated text of a job without switches."""
    found: tuple[list[float], list[int]] = run_ranks(never_switched, 1)[0]
    return found


def through_all(world: Any) -> dict[str, Any]:
    job = trainer()
    job.fit(1)
    said = []
    for text in THROUGH:
        new = Strategy.parse(text, 4)
        job.job.builder.finder.sync([new])
        predicted, _ = strategy_table.moved_bytes(job.job, new)
        done = job.switch(text)
        # The rank order that moves the fewest bytes depends on the cut of the stages, and so on measured costs of
        # blocks.
        rank_layouts = job.job.builder.plan(job.strategy).layouts
        held = {name: layout.local for name, layout in job.job.sharded_model.data.layouts.items()}
        said.append(
            {
                "strategy": str(new),
                "identical": done.identical,
                "bytes": (predicted, done.moved_bytes),
                "outline": {name: layout.local for name, layout in rank_layouts.held[world.place.rank].items()} == held,
            }
        )
        job.fit(2 if text == "tp" else 1)
    return {
        "losses": losses(job),
        "strategies": [record["strategy"] for record in job.history],
        "said": said,
        "generated": job.generate(torch.tensor([1, 2, 3]), 4).tolist(),
        "options": strategy_table.table(job.job)["options"] if world.place.rank == 0 else [],
    }


def test_switches_through_every_family_do_not_change_the_losses() -> None:
    expected, generated = expected_of_one()
    found = run_ranks(through_all, 4, timeout=150)

    for rank in found:
        assert rank["losses"] == found[0]["losses"]
        assert rank["generated"] == generated
        assert max(abs(a - b) for a, b in zip(rank["losses"], expected, strict=True)) <= 1e-10
        assert [each["identical"] for each in rank["said"]] == [True] * len(THROUGH)
        assert [each["strategy"] for each in rank["said"] if not each["outline"]] == []
        assert [each for each in rank["said"] if each["bytes"][0] != each["bytes"][1]] == []
    assert found[0]["strategies"][2] == "tp=4"
    options = {option["strategy"]: option for option in found[0]["options"]}
    assert options["tp=4"]["ok"] and options["tp=4"]["step_s"] > 0 and options["tp=4"]["moved_bytes"] == 0
    assert options["dp=4 zero=2"]["step_s"] is None


def undone_tried_and_failed(world: Any) -> dict[str, Any]:
    """Undo a switch, try a strategy out, and let some switches fail."""
    job = trainer(strategy="zero3")
    job.fit(2)
    job.switch("tp")
    back = job.undo()
    tried = job.try_out("dp=2 pp=2", steps=3)
    job.fit(2)
    messages = []
    for stage in ("parallelize", "allocate", "exchange", "refresh"):
        with pytest.MonkeyPatch.context() as patch:
            if world.place.rank == 1:
                _break(patch, stage)
            try:
                job.switch("pp microbatches=4")
            except SwitchError as error:
                messages.append(str(error))
        job.fit(1)
    return {
        "losses": losses(job),
        "back": (back.new, back.identical),
        "tried": (tried["strategy"], tried["steps"], tried["step_s"] > 0),
        "messages": messages,
        "strategy": str(job.strategy),
    }


def _break(patch: pytest.MonkeyPatch, stage: str) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"planted in {stage}")

    from nbkit.rank.parallel.data_parallel.base import DataAxis
    from nbkit.rank.train import builder
    from nbkit.rank.train.checkpoint import job_state
    from nbkit.rank.train.switch.exchange_cache import ExchangeCache

    if stage == "parallelize":
        patch.setattr(builder, "parallelize", broken)
    elif stage == "allocate":
        patch.setattr(job_state, "allocate", broken)
    elif stage == "exchange":
        patch.setattr(ExchangeCache, "exchange", broken)
    else:
        patch.setattr(DataAxis, "refresh", broken)


@pytest.mark.long
def test_undo_try_out_and_failed_switches_do_not_change_the_losses() -> None:
    expected, _ = expected_of_one()
    found = run_ranks(undone_tried_and_failed, 4, timeout=150)

    for rank in found:
        assert max(abs(a - b) for a, b in zip(rank["losses"], expected, strict=False)) <= 1e-10
        assert len(rank["losses"]) == 8
        assert rank["back"] == ("dp=4 zero=3", True)
        assert rank["tried"] == ("dp=2 pp=2 schedule=1f1b microbatches=4", 3, True)
        assert len(rank["messages"]) == 4 and all("rank 1: RuntimeError: planted" in text for text in rank["messages"])
        assert rank["strategy"] == "dp=4 zero=3"


def by_hand(world: Any) -> tuple[list[float], list[str]]:
    """Run a user's own loop with prepare, switched in the middle."""

    draw = torch.Generator().manual_seed(1)
    data = [tuple(torch.randint(32, (8,), generator=draw) for _ in range(2)) for _ in range(32)]
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab=32, block=8, layers=4, heads=4, width=16)).double()
    job = nbkit.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        hints=nbkit.ModelHints(example=torch.utils.data.default_collate(data[:2])),
        log_dir=None,
    )
    through = iter(["zero3", "pp=2", "ddp"] if world.place.world_size > 1 else ["ddp"] * 3)
    for batch in job.batches(torch.utils.data.DataLoader(data * 2, batch_size=16)):
        job.backward(batch)
        job.clip(1.0)
        job.optimizer.step()
        job.optimizer.zero_grad()
        if job.step < 4:
            job.switch(next(through))
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in job.model.named_parameters()}
    return [record["loss"] for record in job.history], [record["strategy"] for record in job.history]


def test_a_users_own_loop_can_be_switched() -> None:
    expected, _ = run_ranks(by_hand, 1)[0]
    for losses_, strategies in run_ranks(by_hand, 2, timeout=150):
        assert max(abs(a - b) for a, b in zip(losses_, expected, strict=True)) <= 1e-10
        assert strategies == ["dp=2", "dp=2 zero=3", "pp=2 schedule=1f1b microbatches=4", "dp=2"]


class Labels(nn.Module):
    """An embedding of labels. Each step drops some labels by its own draw."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 12)

    def forward(self, label: Tensor) -> Tensor:
        left_out = torch.rand(len(label)) < 0.2
        return self.table(torch.where(left_out, 4, label))


class CrossedBlock(nn.Module):
    """A block of two streams of unequal widths that read each other. Only the narrow one's first token changes."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        narrow, wide = sizes["narrow"], sizes["wide"]
        self.up, self.down = nn.Linear(narrow, wide), nn.Linear(wide, narrow)
        self.mlp = nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, 2 * wide), nn.GELU(), nn.Linear(2 * wide, wide))
        self.labels, self.drop = Labels(), nn.Dropout(0.1)

    def forward(self, streams: tuple[Tensor, Tensor], label: Tensor) -> tuple[Tensor, Tensor]:
        narrow, wide = streams
        kept = (torch.rand(len(wide), 1, 1) < 0.8).to(wide) / 0.8 if self.training else 1.0
        wide = wide + kept * self.mlp(wide) + self.labels(label)[:, None]
        query = self.up(narrow[:, :1])
        read = torch.softmax(query @ wide.transpose(1, 2), -1) @ wide
        first = narrow[:, :1] + self.drop(self.down(read))
        return torch.cat((first, narrow[:, 1:]), 1), wide


class Crossed(nn.Module):
    """A model of two streams through blocks. The head uses the labels of the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.head = nn.Linear(6, 8), nn.Linear(6, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(CrossedBlock(narrow=8, wide=12) for _ in range(3))
        self.out = nn.Linear(8, 12)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        streams = self.narrow(x), self.wide(x)
        for block in self.blocks:
            streams = block(streams, label)
        mixed = self.out(streams[0]).mean(1) + streams[1].mean(1)
        return self.head(mixed * (1 + self.blocks[0].labels(label)))


def crossed(world: Any) -> tuple[list[float], list[str]]:
    draw = torch.Generator().manual_seed(1)
    rows = [
        {
            "x": torch.randn(5, 6, generator=draw, dtype=torch.float64),
            "label": torch.randint(4, (), generator=draw),
            "target": torch.randint(3, (), generator=draw),
        }
        for _ in range(16)
    ]
    job = trainer(
        model=lambda: Crossed().double(),
        loss=lambda output, batch: F.cross_entropy(output, batch["target"]),
        data=rows,
        batch_size=8,
        inputs=["x", "label"],
    )
    job.fit(1)
    for strategy in ("zero1", "tp", "pp", "zero2", "ddp"):
        if world.place.world_size > 1:
            with suppress(NbkitError):  # this test is not about its refusals
                job.switch(strategy)
        job.fit(1)
    return losses(job), [record["strategy"].split()[0] for record in job.history]


@pytest.mark.long
def test_crossed_streams_and_own_draws_are_the_same_through_switches() -> None:
    expected, _ = run_ranks(crossed, 1)[0]
    for found, strategies in run_ranks(crossed, 2):
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1e-10
        assert "tp=2" in strategies and "dp=2" in strategies
