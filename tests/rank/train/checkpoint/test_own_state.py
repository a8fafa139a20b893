"""Test that a state dict with the model's own hooks and extra state equals that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import SEED, points, quiet
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.errors import NbkitError, StrategyError, TrainingError

STRATEGIES = ["ddp", "zero3", "dp=1 tp=2", "pp"]


class Block(nn.Module):
    """A block that stores a version and a tensor as extra state, and renames a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.version, self.seen = 0, torch.arange(3.0)
        self.register_state_dict_post_hook(renamed)
        self._register_load_state_dict_pre_hook(named_back)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def get_extra_state(self) -> Any:
        return {"version": self.version, "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.version, self.seen = state["version"], state["seen"]


def renamed(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    state[f"{prefix}out.bias"] = state.pop(f"{prefix}down.bias")


def named_back(state: Any, prefix: str, *_: Any) -> None:
    state[f"{prefix}down.bias"] = state.pop(f"{prefix}out.bias")


class Net(nn.Module):
    """A model that stores its head as two halves, and a norm that a hook computes from another module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(6, 3)
        self.register_buffer("mean", torch.full((3,), 0.5))
        self._register_state_dict_hook(halved)
        self._register_load_state_dict_pre_hook(whole_again)
        self.head.register_state_dict_post_hook(lambda *given: given[1].update(norm=self.blocks[1].up.weight.norm()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) + self.mean


def halved(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    weight = state.pop("head.weight")
    state["head.low"], state["head.high"] = weight[:, :3].clone(), weight[:, 3:] * module.blocks[0].version


def whole_again(state: Any, prefix: str, *_: Any) -> None:
    high = state.pop("head.high") / state["blocks.0._extra_state"]["version"]
    del state["norm"]
    state["head.weight"] = torch.cat([state.pop("head.low"), high], dim=1)


def built() -> nn.Module:
    torch.manual_seed(SEED)
    return Net().double()


DATA = [(x.double(), y) for x, y in points(64)]


def marked(model: nn.Module, version: int) -> None:
    for number, block in enumerate(model.blocks):
        block.version, block.seen = version + number, torch.arange(3.0) * version


def trainer_of(strategy: str) -> Any:
    return quiet(
        model=built,
        loss=F.cross_entropy,
        data=DATA,
        batch_size=8,
        loading=nbkit.Loading(shuffle=False),
        strategy=strategy,
        progress=False,
    )


def gathered(world: Any, folder: Path) -> list[Any]:
    """Return for each strategy (gathered state, state of a job that loaded it, error of its export)."""
    from nbkit.rank.train.checkpoint.export_safetensors import export  # at the top it would cost each worker a second

    found: list[Any] = []
    for strategy in STRATEGIES:
        trainer = trainer_of(strategy)
        trainer.fit(2)
        marked(trainer.model, 4)
        state = trainer.full_state_dict()
        trainer.save(folder)
        other = trainer_of("pp" if strategy == "ddp" else "ddp")
        other.load(folder)
        with pytest.raises(TrainingError) as raised:
            export(folder, folder / "weights.safetensors")
        found.append((state, other.full_state_dict(), str(raised.value)))
    return found


def alike(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
        else:
            assert found[name]["version"] == value["version"]
            assert torch.equal(found[name]["seen"], value["seen"])


@pytest.mark.long
@pytest.mark.usefixtures("known_to_be_right")
def test_a_state_dict_with_hooks_and_extra_state_equals_one_process(tmp_path: Path) -> None:
    plain = built()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        x, y = (torch.stack(part) for part in zip(*DATA[8 * step : 8 * step + 8], strict=True))
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    marked(plain, 4)
    expected = dict(plain.state_dict())
    assert {"blocks.0._extra_state", "blocks.0.out.bias", "head.high", "norm"} < expected.keys()
    for rank in run_ranks(gathered, 2, tmp_path / "saved", timeout=120):
        for state, loaded, said in rank:
            alike(state, expected)
            alike(loaded, expected)
            assert "the model (Net) makes the model's state dict in its own way" in said and "full_state_dict()" in said
            fresh = built()
            fresh.load_state_dict(state)
            alike(fresh.state_dict(), expected)


class Reading(Block):
    def get_extra_state(self) -> Any:
        return {"norm": float(self.up.weight.detach().norm())}


class Unwritable(Block):
    def get_extra_state(self) -> Any:
        return {"object": {type(self)}}


def refused(world: Any, folder: Path) -> list[str]:
    said = []
    for kind, strategy in ((Reading, "zero3"), (Reading, "dp=1 tp=2"), (Unwritable, "ddp")):
        trainer = quiet(model=lambda kind=kind: nn.Sequential(kind(), nn.Linear(6, 3)), strategy=strategy)
        for act in (trainer.full_state_dict, lambda trainer=trainer: trainer.save(folder)):
            try:
                act()
            except NbkitError as error:
                said.append(f"{type(error).__name__}: {error}")
            else:
                said.append("")
    return said


@pytest.mark.usefixtures("known_to_be_right")
def test_extra_state_that_is_wrong_or_unwritable_is_refused_by_name(tmp_path: Path) -> None:
    first, second = run_ranks(refused, 2, tmp_path / "saved")
    assert first == second
    *reading, gathered, unwritable = first
    for text in reading:
        assert (
            text.startswith(StrategyError.__name__)
            and "extra state of 0 reads weights" in text
            and "switch('ddp')" in text
        )
    assert gathered == "" and "extra state of 0 cannot be written" in unwritable
