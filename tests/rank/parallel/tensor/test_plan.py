"""Test that a plan shows how a model will be split, and names sizes that do not divide, with the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.parallel.tensor.plan.choose_plan import candidates, plan_of
from verify.models import tensor_odd as odd
from verify.models.specimens import ZOO, gpt, hf_llama


def rows(name: str) -> dict[str, str]:
    model = skeleton_of(ZOO[name].build())
    return {path: how for path, how, _ in plan_of(model, 2).describe(model)}


def test_plans_split_the_zoo_models_as_expected() -> None:
    assert rows("gpt") == {
        "tokens": "vocab",
        "positions": "whole",
        "blocks.*.norm1": "whole",
        "blocks.*.attention.q": "columns: 4 heads over 2",
        "blocks.*.attention.k": "columns: 4 heads over 2",
        "blocks.*.attention.v": "columns: 4 heads over 2",
        "blocks.*.attention.out": "rows: 4 heads over 2",
        "blocks.*.norm2": "whole",
        "blocks.*.up": "columns: 128 over 2",
        "blocks.*.down": "rows: 128 over 2",
        "norm": "whole",
        "head": "head",
    }
    assert rows("gpt2")["transformer.h.*.attn.c_attn"] == "columns: 4 heads over 2"
    assert rows("gpt2")["transformer.h.*.mlp.c_proj"] == "rows: 128 over 2"
    assert rows("qwen2")["lm_head"] == "head"
    assert rows("qwen2")["model.layers.*.mlp.gate_proj"] == "columns: 64 over 2"
    assert rows("encoder")["encoder.layers.*.self_attn"] == "heads: 4 heads over 2"
    assert rows("encoder")["head"] == rows("encoder")["tokens"] == "whole"
    shown = [how for _, how, _ in plan_of(ZOO["sequential"].build(), 2).describe(ZOO["sequential"].build())]
    assert shown == ["columns: 24 over 2", "rows: 24 over 2", "columns: 16 over 2", "rows: 16 over 2", "whole"]
    assert set(rows("ten_convs").values()) == {"whole"}


def test_a_plan_gives_reasons_for_modules_that_stay_whole() -> None:
    model = odd.Packed()
    plan = candidates(model, 2)
    assert "nbkit cannot find how query, key and value are packed" in plan.reasons["blocks.0.attn"]
    assert plan.singles["blocks.0.attn.c_attn"] == "colwise_gather"
    said = candidates(model, 2, {"blocks.*.attn.*": "replicate", "head": "replicate"})
    described = {path: (how, why) for path, how, why in said.describe(model)}
    assert described["blocks.*.attn.c_attn"] == ("whole", "tp_plan says so")
    assert described["head"][0] == "whole"


class Twins(nn.Module):
    """A model with a tied head. If the head stays whole, its embedding does too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight


def test_tied_weights_are_split_in_the_same_way() -> None:
    assert candidates(Twins(), 2).singles == {"tokens": "vocab", "head": "head"}
    assert candidates(Twins(), 2, {"head": "replicate"}).singles == {}


@pytest.mark.parametrize(
    ("make", "size", "plan", "expected"),
    [
        (
            lambda: gpt(2, heads=2),
            4,
            {},
            "blocks.0.attention is split by heads, and 2 heads cannot be divided by 4 ranks.",
        ),
        (lambda: gpt(2, heads=2), 4, {}, "2 / 4 = 0.5"),
        (
            lambda: hf_llama(2),
            4,
            {},
            "model.layers.0.self_attn is split by heads, and 2 key-value heads cannot be divided by 4 ranks",
        ),
        (lambda: gpt(2, vocab=3), 4, {}, "3 rows over 4 ranks"),
        (gpt, 2, {"blocks.*.up": "columns"}, "tp_plan has no role 'columns'."),
        (gpt, 2, {"layers.*.up": "colwise"}, "'layers.*.up' matches no module"),
        (gpt, 2, {"blocks.*.norm1": "colwise"}, "matches no module that can have the role 'colwise'"),
        (gpt, 2, {"blocks.*.attention.out": "colwise", "blocks.*.attention.q": "colwise"}, "in pairs"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(
    make: Any, size: int, plan: dict[str, str], expected: str
) -> None:
    with pytest.raises(StrategyError) as raised:
        plan_of(skeleton_of(make()), size, plan)
    assert expected in str(raised.value)


def test_experts_stay_whole_even_if_the_models_own_plan_splits_them() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes))
    plan = candidates(model, 2)

    assert [pair.owner for pair in plan.pairs] == ["model.layers.0.self_attn"]
    assert not any("mlp" in path for path in plan.singles)
