"""Test that a split is planned from the flow of data, so the names of the modules do not matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nbkit.rank.data.batch import call
from nbkit.rank.models import gpt
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from nbkit.rank.parallel.tensor.plan.linear_types import is_linear
from nbkit.rank.parallel.tensor.plan.plan import TensorPlan
from nbkit.rank.parallel.tensor.proof.prove import prove
from verify.models import specimens, tensor_odd
from verify.models.renamed import renamed
from verify.models.specimens import VOCAB, WIDTH, ZOO
from verify.training import ARCHITECTURES

IDS = torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(0))


def proven(model: nn.Module, value: Any = IDS, size: int = 2) -> TensorPlan:
    proof = prove(model, lambda: call(model, value), [size])
    assert proof.why == ""
    return plan_of(model, size, None, proof)


def shown(plan: TensorPlan, old: dict[str, str]) -> Any:
    """Return the modules that are split and how, with the old names."""

    def named(value: Any) -> str:
        return re.sub(r"a[0-9a-f]{10}", lambda found: old[found[0]], str(value))

    pairs = [(p.owner, p.kind, p.columns, p.rows, dict(p.widths), p.heads, set(p.counts), p.views) for p in plan.pairs]
    return [named(pair) for pair in pairs], named(dict(plan.singles)), named(dict(plan.positions))


def split_share(model: nn.Module, plan: TensorPlan, alone: Sequence[str] = ()) -> float:
    """Return the fraction of parameters of linear maps and attentions that is split.

    alone: maps with no map after them. They do not count, because their split would need an extra collective.
    """
    split = {path for pair in plan.pairs for path in (*pair.columns, *pair.rows)} | set(plan.singles)
    split |= {pair.owner for pair in plan.pairs if pair.kind == "module"}
    whole = {p for p, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    maps = {p for p, m in model.named_modules() if is_linear(m) and p.rpartition(".")[0] not in whole} | whole
    assert set(alone) <= maps - split, "a map is split, or is none"
    sizes = {p: sum(w.numel() for w in model.get_submodule(p).parameters()) for p in maps - set(alone)}
    return sum(size for path, size in sizes.items() if path in split) / sum(sizes.values())


@pytest.mark.parametrize(
    "names",
    [("gpt", "pairs", "packed", "config"), pytest.param(("uneven", "encoder", "sequential"), marks=pytest.mark.long)],
)
def test_random_names_give_the_same_plan(names: tuple[str, ...]) -> None:
    models, old = renamed(gpt, 1)
    parts = {name: vars(models)[name] for name in ("GPT", "GPTConfig", "Attention", "Block")}
    zoo, more = renamed(specimens, 2, **parts)
    odd, most = renamed(tensor_odd, 3)
    old |= more | most
    alone = {"pairs": [f"blocks.{i}.mix" for i in range(4)], "encoder": ["head"], "sequential": ["8"]}
    cases: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Any]] = {
        name: (ZOO[name].build, zoo.ZOO[name].build, ZOO[name].batch(3)[0]) for name in names if name in ZOO
    }
    cases["packed"] = (tensor_odd.Packed, odd.Packed, IDS)
    cases["config"] = (lambda: tensor_odd.Configured(norm=True), lambda: odd.Configured(norm=True), IDS)
    for name in names:
        make, make_renamed, value = cases[name]
        first, second = make(), make_renamed()
        plan, other = proven(first, value), proven(second, value)
        assert shown(plan, {}) == shown(other, old), name
        share = split_share(first, plan, alone.get(name, ()))
        assert share >= 0.95, (name, share)
        assert not other.unproven, name


class Unusual(nn.Module):
    """A block with its MLP in f1 and f2, its number of heads in `h`, and attention written in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.h = way, 4
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.f1, self.f2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        if self.way == "einsum":
            q, k, v = (m(x).reshape(rows, length, self.h, -1) for m in (self.a, self.b, self.c))
            scores = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
            y = torch.einsum("bhts,bshd->bthd", scores, v).reshape(rows, length, -1)
        elif self.way == "constant":
            q, k, v = (m(x).view(rows, length, 4, 8).transpose(1, 2) for m in (self.a, self.b, self.c))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        elif self.way == "checkpoint":
            y = checkpoint(self.attended, x, use_reentrant=False)
        else:
            q, k, v = (torch.stack(m(x).chunk(self.h, -1), 1) for m in (self.a, self.b, self.c))
            y = torch.cat(((q @ k.mT / 8**0.5).softmax(-1) @ v).unbind(1), -1)
        x = x + self.d(y)
        return x + self.f2(F.silu(self.f1(x)))

    def attended(self, x: Tensor) -> Tensor:
        """Compute attention with the sizes of all heads as constants."""
        q, k, v = (m(x).view(*x.shape[:2], 4, 8).transpose(1, 2) for m in (self.a, self.b, self.c))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


class Both(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.e = nn.Embedding(VOCAB, WIDTH)
        self.s = nn.ModuleList(Unusual(way) for _ in range(2))
        self.z = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        for part in self.s:
            x = part(x)
        return self.z(x)


@pytest.mark.parametrize("way", ["einsum", "constant", "chunks"])
def test_heads_are_found_in_every_way_to_write_attention(way: str) -> None:
    model = Both(way)
    plan = proven(model, size=4)

    assert split_share(model, plan) == 1.0 and plan.singles == {"e": "vocab", "z": "head"}
    assert {pair.heads.heads for pair in plan.pairs if pair.heads is not None} == {4}
    assert [pair.kind for pair in plan.pairs] == ["attention", "mlp"] * 2


def test_a_checkpointed_attention_with_constant_sizes_stays_whole() -> None:
    plan = proven(Both("checkpoint"))

    assert [pair.kind for pair in plan.pairs] == ["mlp", "mlp"]
    assert "s.0" in plan.unproven


def test_an_attention_that_cannot_be_split_as_a_pair_is_gathered() -> None:
    specimen = ARCHITECTURES["phi3"]
    model = specimen.build(torch.float64)
    plan = proven(model, specimen.batch(2)[0])

    assert {pair.owner.rpartition(".")[2] for pair in plan.pairs} == {"mlp"}
    assert plan.singles["model.layers.0.self_attn.qkv_proj"] == "colwise_gather"  # a config counts its heads
    assert plan.singles["model.layers.0.self_attn.o_proj"] == "rowwise_split"
    assert split_share(model, plan) == 1.0 and not plan.unproven


def test_a_map_whose_weight_is_read_elsewhere_is_not_gathered() -> None:
    specimen = ARCHITECTURES["phi3"]
    model = specimen.build(torch.float64)
    value, layer = specimen.batch(2)[0], model.model.layers[0]

    def read(module: nn.Module, args: Any, output: Any) -> Any:
        return output + layer.self_attn.o_proj.weight.mean()

    layer.register_forward_hook(read)
    plan = proven(model, value)
    assert "model.layers.0.self_attn.o_proj" not in plan.singles and "model.layers.0.self_attn" in plan.unproven
    assert plan.singles["model.layers.1.self_attn.o_proj"] == "rowwise_split"
