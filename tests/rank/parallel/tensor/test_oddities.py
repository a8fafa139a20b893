"""Test that unusual models are split, left whole with a reason, or refused, and never silently different."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import NbkitError
from nbkit.rank.parallel.tensor.apply import tensor_parallel
from nbkit.rank.parallel.tensor.plan.choose_plan import candidates
from verify.models import tensor_odd as odd
from verify.models.specimens import HEADS, VOCAB, WIDTH, ZOO, cross_entropy, hf_gpt2, object_cross_entropy
from verify.tensor_split import axes_of, compared

IDS = torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(0))
NEXT = IDS.roll(-1, 1)
PADDING = torch.arange(16) >= torch.tensor([16, 12, 9])[:, None]


def token_loss(output: Any) -> Tensor:
    return cross_entropy(output, NEXT[:, : output.shape[1]])


def object_loss(output: Any) -> Tensor:
    return object_cross_entropy(output, NEXT)


def class_loss(output: Any) -> Tensor:
    return F.cross_entropy(output, torch.tensor([1, 2, 3]))


ALSO = ("lora, positions whole", "cross-attention, positions whole", "packed by head", "masks and weights")


def ways(world: Any, also: bool) -> dict[str, tuple[float, float, tuple[str, ...]]]:
    """Return the results of each way to write a model. also: take those of ALSO, else all others."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(3, 16, WIDTH, generator=draw, dtype=torch.float64).requires_grad_()
    mask = torch.zeros(3 * HEADS, 16, 16, dtype=torch.float64)
    mask.masked_fill_(torch.rand(mask.shape, generator=draw) < 0.3, -5.0)
    said = {"*.c_attn": "colwise", "*.c_proj": "rowwise"}
    source = (IDS, PADDING, IDS.flip(1)[:, :11])
    runs: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
        "lora": (odd.lora_llama, IDS, object_loss, {}),
        "lora, positions whole": (odd.lora_llama, IDS, object_loss, {"sequence": False}),
        "lora on Conv1D": (odd.lora_gpt2, IDS, object_loss, {}),
        "packed": (odd.Packed, IDS, token_loss, {}),
        "packed by head": (odd.per_head, IDS, token_loss, {}),
        "packed by head, said": (odd.per_head, IDS, token_loss, {"plan": said}),
        "config": (lambda: odd.Configured(norm=True), IDS, class_loss, {}),
        "config, residual inside": (lambda: odd.Configured(norm=False), IDS, class_loss, {}),
        "cross-attention": (odd.Translator, source, token_loss, {}),
        "cross-attention, positions whole": (odd.Translator, source, token_loss, {"sequence": False}),
        "positions first": (lambda: odd.Translator(batch_first=False), source, token_loss, {}),
        "heads in the code": (odd.Hidden, x, lambda y: (y**2).sum(), {}),
        "masks and weights": (odd.Looks, (x, mask), lambda y: (y**2).sum(), {}),
    }
    found = {}
    for name, (make, value, loss, options) in runs.items():
        if (name in ALSO) != also:
            continue
        torch.manual_seed(5)
        worst, difference, split, _ = compared(world, make().double(), value, loss, **options)
        found[name] = (worst, difference, split.notes)
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("also", [False, pytest.param(True, marks=pytest.mark.long)])
def test_unusual_ways_to_write_a_model_give_the_same_results(also: bool) -> None:
    answers = run_ranks(ways, 2, also, timeout=150)[0]
    for name, (worst, difference, _) in answers.items():
        assert worst <= 1e-12, name
        assert difference <= 1e-12, name
    split = {"lora", "lora on Conv1D", "packed", "packed by head", "packed by head, said", "cross-attention"}
    for name in split & answers.keys():
        assert [note for note in answers[name][2] if "97 over 2" not in note] == [], name
    if also:
        assert answers.keys() == {*ALSO}
        return
    assert "blocks.0 contains more than an attention" in answers["config, residual inside"][2][0]
    assert "batch_first=False" in answers["positions first"][2][0]


def said(act: Any) -> str:
    try:
        act()
    except NbkitError as error:
        return str(error)
    return "nothing was raised"


def refusals(world: Any) -> dict[str, str]:
    axes = axes_of(world)
    x = torch.randn(2, 6, WIDTH)
    looks = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    tensor_parallel(looks, axes)
    replaced = hf_gpt2(2)
    replaced.transformer.h[0].mlp.c_fc.forward = lambda x: x
    model = ZOO["gpt"].build()
    tensor_parallel(model, axes)
    logits = model(IDS)
    by_hand = odd.ByHand()
    # This one was never run, so the wrappers of its maps check it again.
    tensor_parallel(by_hand, axes, plan=candidates(by_hand, 2))
    plain = ZOO["gpt"].build()
    tensor_parallel(plain, axes)
    halving = ZOO["gpt"].build()
    halving.blocks[1].__class__ = odd.Halving  # type: ignore[union-attr]
    tensor_parallel(halving, axes, plan=candidates(halving, 2))
    decides = ZOO["gpt"].build()
    decides.blocks[0].__class__ = odd.Deciding  # type: ignore[union-attr]
    return {
        "decides": said(lambda: tensor_parallel(decides, axes, plan=candidates(decides, 2))),
        "by hand": said(lambda: by_hand(x)),
        "weights": said(lambda: looks(x, x, x)[1].mean()),
        "dora": said(lambda: tensor_parallel(odd.lora_llama(use_dora=True), axes)),
        "bias": said(lambda: tensor_parallel(odd.lora_llama(lora_bias=True, targets=["o_proj"]), axes)),
        "replaced": said(lambda: tensor_parallel(replaced, axes)),
        "in place": said(lambda: logits.masked_fill_(IDS[..., None] == 0, 0.0)),
        "no positions": said(lambda: plain.blocks[0](x[0])),
        "changed positions": said(lambda: halving(IDS)),
    }


@pytest.mark.filterwarnings("ignore")
def test_unusual_models_that_cannot_be_split_are_refused() -> None:
    answers = run_ranks(refusals, 2, timeout=120)[0]
    assert "The class Deciding computes its attribute forward" in answers["decides"]
    assert "without calling the layer" in answers["by hand"]
    assert "need_weights=False" in answers["weights"]
    assert "This variant of LoRA needs the whole matrix" in answers["dora"]
    assert "would be added once per rank" in answers["bias"]
    assert "replaced on the object, not in its class" in answers["replaced"]
    assert "masked_fill_" in answers["in place"]
    assert "found (6, 32)" in answers["no positions"]
    assert "(3, 4, 32), from (3, 8, 32) of 16 positions" in answers["changed positions"]
