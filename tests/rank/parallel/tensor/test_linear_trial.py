"""Test that a subclass of nn.Linear is split only if its forward equals a linear map."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.rank.parallel.tensor.plan.linear_types import computes_linear
from verify.models.specimens import VOCAB, object_cross_entropy
from verify.tensor_split import compared, proven

IDS = torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(0))


class ByHand(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Scaled(ByHand):
    def __init__(self, *sizes: int, gain: float) -> None:
        super().__init__(*sizes)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Standardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight, dim=1), self.bias)


class Detached(nn.Linear):
    """A linear map without a gradient of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach() + 0 * self.weight, self.bias)


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class Gated(nn.Linear):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class WithMatrix(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.zeros(sizes[0]))


@pytest.mark.parametrize(
    ("module", "linear"),
    [
        (nn.Linear(4, 6), True),
        (ByHand(4, 6), True),
        (ByHand(4, 6, bias=False), True),
        (Scaled(4, 6, gain=1.0), True),
        (Scaled(4, 6, gain=2.0), False),
        (Standardized(4, 6), False),
        (Detached(4, 6), False),
        (Dropping(4, 6), False),
        (Gated(4, 6), False),
        (WithMatrix(4, 6), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_computes_linear_accepts_only_modules_that_compute_a_linear_map(module: nn.Linear, linear: bool) -> None:
    drawn = torch.get_rng_state()
    mode = module.training
    assert computes_linear(module) is linear
    assert torch.equal(drawn, torch.get_rng_state()) and module.training is mode
    assert (module.in_features, module.out_features, *module.weight.shape) == (4, 6, 6, 4)


def falcon(**changed: Any) -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(5)
    asked = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return FalconForCausalLM(FalconConfig(**asked | changed)).double()


def loss_of(output: Any) -> Tensor:
    return object_cross_entropy(output, IDS.roll(-1, 1))


def falcons(world: Any) -> dict[str, tuple[float, float, list[str]]]:
    found = {}
    kinds: dict[str, dict[str, Any]] = {
        "grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "all heads": {"multi_query": False},
        "one head for keys": {},
    }
    for name, changed in kinds.items():
        plan = proven(falcon(**changed), IDS)
        worst, difference, _, _ = compared(world, falcon(**changed), IDS, loss_of, plan=plan)
        found[name] = worst, difference, sorted({pair.owner.rpartition(".")[2] for pair in plan.pairs})
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_falcons_linear_maps_are_split_and_a_single_key_value_head_is_not() -> None:
    for rank in run_ranks(falcons, 2, timeout=150):
        for name, (worst, difference, owners) in rank.items():
            assert worst <= 1e-12 and difference <= 1e-12, name
            assert owners == (["mlp"] if name == "one head for keys" else ["mlp", "self_attention"]), name
