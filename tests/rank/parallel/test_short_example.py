"""Test that a few positions of each row replace all only if the model runs the same operations on both."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.rank.parallel.model_facts import ModelFacts, ModelShapes
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.plan import make_plan
from nbkit.rank.parallel.proof.short_example import first_runs
from nbkit.rank.parallel.whole_step import StepProof, prove_step
from nbkit.strategy import Strategy


class Words(nn.Module):
    """A model of tokens. long: a longer row is joined from two parts."""

    def __init__(self, long: int = 1000) -> None:
        super().__init__()
        self.words, self.head, self.long = nn.Embedding(11, 8), nn.Linear(8, 11), long

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if ids.shape[1] > self.long:
            x = torch.cat([x[:, : self.long], x[:, self.long :]], 1)
        return self.head(x + x.mean(1, keepdim=True))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


IDS = torch.arange(2 * 99).view(2, 99) % 11


def short_of(
    model: nn.Module, ids: Tensor = IDS, target: Tensor | None = None, parts: int = 1
) -> tuple[int, ...] | None:
    look = first_runs(model, (ids, ids if target is None else target), inputs=None, loss=loss, parts=parts)
    if look.short is None:
        return None
    few, targets = look.short
    assert few.shape == targets.shape and len(few) == 2
    assert torch.equal(few[:, 0], ids[:, 0]) and torch.equal(few[:, -1], ids[:, -1])  # masks may leave out the ends
    return tuple(few.shape)


def test_few_positions_have_the_same_remainder_as_all() -> None:
    assert short_of(Words()) == (2, 16 + 99 % 16)
    assert short_of(Words(), parts=3) is None  # 48 + 3 of 99 would not be few
    assert short_of(Words(), torch.cat([IDS, IDS], 1), parts=3) == (2, 48 + 198 % 48)
    assert short_of(Words(), IDS[:, :47]) is None


def test_a_model_that_treats_long_rows_differently_is_tried_on_long_rows() -> None:
    assert short_of(Words(long=98)) is None
    assert short_of(Words(long=3)) == (2, 19)


def test_all_positions_are_used_if_the_few_have_no_targets() -> None:
    target = torch.full_like(IDS, -100)
    target[:, 50:] = 1
    assert short_of(Words(), target=target) == (2, 19)
    target = torch.full_like(IDS, -100)
    target[:, 1] = 1
    assert short_of(Words(), target=target) is None


def test_a_loss_that_is_a_mean_only_on_the_few_positions_is_refused() -> None:
    ids = torch.arange(4 * 64).view(4, 64) % 11
    target = ids.clone()
    target[1:, 1:3] = -100  # between the few positions: 0, 4, 8, ...

    def by_hand(logits: Tensor, target: Tensor) -> Tensor:
        counts = (target != -100).to(logits.dtype)
        each = F.mse_loss(logits[..., 0], target.to(logits.dtype), reduction="none")
        return (each * counts).sum() / counts.sum()

    look = first_runs(Words(), (ids, target), inputs=None, loss=by_hand)
    assert look.short is not None and (look.short[1] != -100).all()
    assert nbkit.check(Words(), "ddp", (ids, ids), 2, loss=by_hand).ok
    found = nbkit.check(Words(), "ddp", (ids, target), 2, loss=by_hand)
    assert not found.ok and "no mean over rows" in str(found), found


@pytest.mark.parametrize("short", [(IDS[:, :20] * 2, IDS[:, :20]), (IDS[:, :20], IDS[:, :19])])
def test_a_comparison_that_fails_on_few_positions_is_made_on_all(short: tuple[Tensor, Tensor]) -> None:
    plan = make_plan(Strategy(dp=2), ModelFacts(ModelShapes(skeleton_of(Words()))))

    assert prove_step(plan, (IDS, IDS), loss=loss, inputs=None, short=short) == StepProof()


@pytest.mark.long  # a separate process, which imports torch
def test_no_proof_imports_torchs_compiler() -> None:
    lines = """
import sys, torch, nbkit
ids = torch.arange(4 * 48).view(4, 48) % 11
for strategy in ("tp", "pp"):
    model = nbkit.GPT(nbkit.GPTConfig(vocab=11, block=48, layers=2, heads=2, width=8))
    assert nbkit.check(model, strategy, (ids, ids), world_size=2).ok, strategy
    assert "torch._dynamo" not in sys.modules, strategy
    assert strategy == "pp" or "sympy" not in sys.modules, strategy
"""
    subprocess.run([sys.executable, "-c", lines], check=True, timeout=300)
