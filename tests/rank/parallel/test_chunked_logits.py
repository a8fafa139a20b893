"""Test head and cross entropy in pieces: same results as with all logits, and logits of only one piece at a time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import StrategyError, TrainingError
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.parallel.chunked_logits import chunk_logits, find_head
from nbkit.rank.train.job import prepare
from nbkit.rank.train.trainer import Trainer
from nbkit.rank.watching_mode import WatchingMode
from verify.models.specimens import cross_entropy, next_tokens

pytestmark = pytest.mark.usefixtures("rows_are_known")

_CLASSES, _CHUNKS = 50, 4


class Logits(WatchingMode):
    """A mode that notes the largest result with last dim `classes`, in elements, without weights."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.classes, self.width, self.most = classes, width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, tuple) else (out,):
            if (
                isinstance(leaf, Tensor)
                and leaf.ndim > 1
                and leaf.shape[-1] == self.classes
                and leaf.shape[0] != self.width
            ):
                self.most = max(self.most, leaf.numel())
        return out


_TARGET = torch.arange(21).view(3, 7) % _CLASSES
_TARGET[0, :3] = -100
_WEIGHTS = torch.linspace(1, 2, _CLASSES).double()

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda logits: F.cross_entropy(logits.flatten(0, -2), _TARGET.flatten()),
    "sum": lambda logits: F.cross_entropy(logits.view(-1, logits.size(-1)), _TARGET.view(-1), reduction="sum"),
    "shifted": lambda logits: F.cross_entropy(
        logits.float().double()[..., :-1, :].contiguous().view(-1, _CLASSES), _TARGET[..., 1:].reshape(-1)
    ),
    "transposed": lambda logits: F.cross_entropy((logits / 2).transpose(1, 2), _TARGET),
    "capped": lambda logits: F.cross_entropy((logits * 2).tanh().permute(0, 2, 1), _TARGET, reduction="none").mean(),
    "weighed": lambda logits: F.cross_entropy(logits.reshape(21, _CLASSES), _TARGET.reshape(21), _WEIGHTS),
    "smooth": lambda logits: F.cross_entropy(logits.flatten(0, 1), _TARGET.flatten(), label_smoothing=0.1),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_in_pieces_equals_the_loss_of_all_logits(name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(8, _CLASSES).double()
    head = copy.deepcopy(plain)
    chunk_logits(head, plain, _CHUNKS)
    hidden = torch.randn(3, 7, 8, dtype=torch.float64)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()

    with Logits(_CLASSES, 8) as seen:
        loss = LOSSES[name](head(ours))
        loss.backward()
    expected = LOSSES[name](plain(theirs))
    expected.backward()

    assert seen.most <= 6 * _CLASSES  # 6 of 21 rows
    pairs = (loss, expected), (ours.grad, theirs.grad), *zip(_grads(head), _grads(plain), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def _grads(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def test_other_operations_get_all_logits_and_in_place_changes_are_refused() -> None:
    plain = nn.Linear(8, _CLASSES)
    head = copy.deepcopy(plain)
    chunk_logits(head, plain, _CHUNKS)
    hidden = torch.randn(2, 3, 8)
    with pytest.warns(UserWarning, match="loss_chunks=4 has no effect: the loss computes log_softmax of all logits"):
        ours = head(hidden).log_softmax(-1)
    assert torch.equal(ours, plain(hidden).log_softmax(-1))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert torch.equal(head(hidden)[:, -1].argmax(-1), plain(hidden)[:, -1].argmax(-1))
    with pytest.raises(TrainingError, match="change all of them in place"):
        head(hidden)[..., 3:] = 0
    assert (
        find_head(GPT(GPTConfig(vocab=96, block=8, layers=2, heads=2, width=8)), ["blocks.0", "blocks.1"], 2) == "head"
    )
    with pytest.raises(StrategyError, match="whose last layer is linear"):
        find_head(nn.Sequential(nn.Embedding(3, 4)), [], 2)
    with pytest.raises(TrainingError, match="at least 1"):
        nbkit.Compute(loss_chunks=0)


def model() -> nn.Module:
    return GPT(GPTConfig(vocab=96, block=32, layers=4, heads=4, width=32)).double()


def data() -> list[tuple[Tensor, Tensor]]:
    ids, target = next_tokens(32, torch.Generator().manual_seed(4))
    return list(zip(ids, target, strict=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(world: Any, strategies: list[str]) -> dict[str, Any]:
    trainer = Trainer(
        model=model, loss=cross_entropy, optimizer=sgd, data=data(), batch_size=8, strategy=strategies[0], log_dir=None,
        progress=False, loading=nbkit.Loading(shuffle=False), compute=nbkit.Compute(loss_chunks=_CHUNKS),
    )  # fmt: skip
    most = []
    for number, strategy in enumerate(strategies):
        if number:
            trainer.switch(strategy)
        seen = [Logits(96, 32), Logits(48, 32)]
        with seen[0], seen[1]:
            trainer.fit(1)
        most.append((strategy, max(one.most for one in seen)))
    trainer.fit(1)
    with pytest.raises(TrainingError, match="needs a loss that nbkit calls"):
        prepare(model, sgd, compute=nbkit.Compute(loss_chunks=2))
    return {"losses": [record["loss"] for record in trainer.history], "most": most}


def test_training_with_logits_in_pieces_equals_one_process() -> None:
    strategies = ["ddp", "zero3", "tp", "pp microbatches=2", "cp=2"]
    torch.manual_seed(0)
    alone, rows, losses = model(), data() * 2, []
    optimizer = sgd(alone)
    for step in range(len(strategies) + 1):
        ids, target = (torch.stack(each) for each in zip(*rows[8 * step : 8 * step + 8], strict=True))
        loss = cross_entropy(alone(ids), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    for found in run_ranks(trained, 2, strategies, timeout=240):
        assert found["losses"] == pytest.approx(losses, rel=1e-12)
        rows_of = {"ddp": 4, "zero3": 4, "tp": 8, "pp microbatches=2": 4, "cp=2": 8}
        positions = data()[0][0].numel()
        for strategy, most in found["most"]:
            assert most <= 96 * -(-rows_of[strategy] * positions // _CHUNKS), (strategy, most)
        assert dict(found["most"])["ddp"] > 0
