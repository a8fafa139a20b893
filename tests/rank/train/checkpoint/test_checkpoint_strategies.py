"""Test that checkpoints load under other strategies and on other numbers of ranks, and plain torch can read them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from nbkit.commands import main
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.train.checkpoint.job_state import Everyone, shares
from nbkit.rank.train.trainer import Trainer
from nbkit.tensor_layout import Layout

pytestmark = pytest.mark.usefixtures("rows_are_known")

# In the first, a rank holds flat parts that another rank holds too; in the second, parts of tensors, and layers.
THROUGH = ("hsdp", "tp=2 pp=2 schedule=zbv")
ELSEWHERE = {2: "zero3", 1: "ddp"}
STEPS = len(THROUGH)


def gpt() -> nn.Module:
    made = GPT(GPTConfig(vocab=33, block=8, layers=4, heads=2, width=8, dropout=0.1)).double()
    made.head.weight = made.tokens.weight  # tied, so stages share it
    made.register_buffer("seen", torch.zeros(3))
    return made


def in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01, weight_decay=0.0)


def trainer(strategy: str) -> Trainer:
    draw = torch.Generator().manual_seed(1)
    data = [tuple(torch.randint(33, (8,), generator=draw) for _ in range(2)) for _ in range(24)]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return Trainer(
        model=gpt, loss=loss, optimizer=in_two_groups, data=data, batch_size=8, seed=5, strategy=strategy, log_dir=None,
        progress=False, clip_norm=1.0, lr_schedule=lambda step: 1 / (1 + 0.1 * step),
    )  # fmt: skip


def one_process(world: Any) -> list[float]:
    whole = trainer("ddp")
    whole.fit(STEPS + 2)
    return [record["loss"] for record in whole.history]


def led_through(world: Any, folder: Path) -> list[bool]:
    """Make a step under each strategy from the previous checkpoint. Return whether each load was bit-equal."""
    same, before = [], None
    for number, strategy in enumerate(THROUGH):
        current = trainer(strategy)
        if number:
            current.load(folder / str(number - 1))
            now = current.full_state_dict()
            same.append(all(torch.equal(now[name], before[name]) for name in before))
        current.fit(1)
        before = current.full_state_dict()
        current.save(folder / str(number))
    return same


def elsewhere(world: Any, saved: Path) -> tuple[list[float], list[str], dict[str, torch.Tensor]]:
    loaded = trainer(ELSEWHERE[world.place.world_size])
    loaded.load(saved)
    whole = loaded.full_state_dict()
    loaded.fit(2)
    return [r["loss"] for r in loaded.history], [r["strategy"] for r in loaded.history], whole


@pytest.mark.long
def test_a_checkpoint_resumes_under_any_strategy_and_number_of_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (losses,) = run_ranks(one_process, 1, timeout=120)
    assert run_ranks(led_through, 4, tmp_path, timeout=300) == [[True] * (STEPS - 1)] * 4

    saved = tmp_path / str(STEPS - 1)
    found = [each for number in ELSEWHERE for each in run_ranks(elsewhere, number, saved, timeout=120)]
    for resumed, strategies, _ in found:
        assert len(set(strategies)) >= STEPS
        assert resumed == pytest.approx(losses, rel=1e-10)
    whole = found[0][2]

    # Plain torch loads nbkit's file into the plain model.
    exported = str(tmp_path / "model.safetensors")
    assert main(["checkpoint", "export", str(saved), exported]) == 0
    told = capfd.readouterr().out
    model = gpt()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert list(model.state_dict()) == list(whole)
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    assert f"{len(whole)} tensors" in told

    # Torch's own tool reads the directory directly: weights and optimizer state.
    from torch.distributed.checkpoint.format_utils import (
        dcp_to_torch_save,  # an import at the top would cost each worker a second
    )

    dcp_to_torch_save(saved, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    assert torch.equal(plain["weight/tokens.weight"], whole["head.weight"])
    assert plain["exp_avg/tokens.weight"].shape == (33, 8)

    # The command starts another process; this runs the same module here.
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), exported])
    monkeypatch.delitem(sys.modules, "nbkit.rank.train.checkpoint.export_safetensors", raising=False)
    with pytest.raises(SystemExit, match="could not be exported"):
        runpy.run_module("nbkit.rank.train.checkpoint.export_safetensors", run_name="__main__")


def test_each_element_is_written_once_and_ranks_write_equal_amounts() -> None:
    whole, left, right = (
        Layout.whole((6, 4)),
        Layout.of_ranges((6, 4), 0, [(0, 3)]),
        Layout.of_ranges((6, 4), 0, [(2, 6)]),
    )
    spreads = {"everywhere": [whole] * 3, "halves": [left, right, None], "mixed": [left, whole, right]}
    spreads |= {f"same{i}": [whole] * 3 for i in range(5)}
    layouts = tuple({key: spread[rank] for key, spread in spreads.items() if spread[rank]} for rank in range(3))
    every = Everyone(layouts, dict.fromkeys(spreads, torch.float32), {})

    written = [shares(every, rank) for rank in range(3)]

    for key in spreads:
        count = torch.zeros(6, 4)
        for mine in written:
            for box in mine.get(key, ()):
                count[box.slices] += 1
        assert (count == 1).all(), key
    sizes = [sum(box.numel for boxes in mine.values() for box in boxes) for mine in written]
    assert sum(sizes) == 8 * 24 and max(sizes) - min(sizes) <= 24
