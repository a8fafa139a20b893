"""Test that documents in packed blocks train as they do one by one, and blocks are full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from code_files import code_files, lengths
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import TrainingError
from nbkit.rank.data.balanced.balanced import Balanced, check_packed
from nbkit.rank.data.balanced.packing import DocumentPiece, Packed, best_fit
from nbkit.rank.models.gpt import GPT, GPTConfig

torch.set_num_threads(1)


def documents(number: int = 12, vocab: int = 50) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 30, (number,), generator=draw).tolist()
    return [torch.randint(vocab, (length,), generator=draw) for length in lengths]


def same_loss_and_gradients(
    model: nn.Module, one: Callable[[Any], Tensor], alone: list[Any], blocks: list[Any]
) -> None:
    """Assert that single documents and blocks have the same loss and gradients. one: the summed loss of either."""
    losses, grads = [], []
    for parts in (alone, blocks):
        model.zero_grad()
        loss = sum((one(part) for part in parts), torch.zeros((), dtype=torch.float64))
        loss.backward()
        losses.append(loss.item())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


def test_a_gpt_has_the_same_loss_and_gradients_on_packed_blocks() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=50, block=32, layers=2, heads=2, width=16)).double()
    docs = documents()
    packed = Packed(docs, 32)
    assert len(packed) < len(docs)

    def one(part: Any) -> Tensor:
        if isinstance(part, Tensor):
            ids, targets = part[None, :-1], part[1:]
            return F.cross_entropy(model(ids)[0], targets, reduction="sum")
        (ids, positions), targets = part
        return F.cross_entropy(model(ids[None], positions[None])[0], targets, reduction="sum")

    same_loss_and_gradients(model, one, docs, [packed[i] for i in range(len(packed))])


@pytest.mark.long
def test_a_llama_has_the_same_loss_and_gradients_on_packed_blocks() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, use_cache=False, **sizes)).double()
    docs = [{"input_ids": ids.tolist()} for ids in documents()]
    packed = Packed(docs, 40)

    def one(part: Any) -> Tensor:
        if "labels" not in part:
            ids = torch.tensor(part["input_ids"])
            part = {"input_ids": ids, "labels": ids}
        inputs = {key: value[None] for key, value in part.items() if key != "labels"}
        # This shifts like the model's own loss, which would round to float32.
        return F.cross_entropy(model(**inputs).logits[0, :-1], part["labels"][1:], reduction="sum")

    same_loss_and_gradients(model, one, docs, [packed[i] for i in range(len(packed))])
    model.config.use_cache = True
    with pytest.raises(TrainingError, match="attend to other documents"):
        check_packed(Balanced(docs, pack=40), model)


def test_blocks_of_real_code_waste_under_two_percent_and_have_every_token_once() -> None:
    whole = [path.read_bytes() for path in code_files()[:60]]
    packed = Packed([torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in whole], 2048)
    tokens = sum(len(text) - 1 for text in whole)
    sizes = lengths()
    cut = best_fit([DocumentPiece(i, 0, size) for i, size in enumerate(sizes)], 2048)

    assert packed.waste <= 0.02
    assert sum(len(piece) for block in packed.blocks for piece in block) == tokens
    assert sum(sizes) / (len(cut) * 2048) >= 0.98
    assert sorted(piece.document for block in cut for piece in block) == list(range(len(sizes)))
    (_, positions), targets = packed[len(packed) - 1]
    assert (positions == 0).sum() >= 1 and positions.max() < 2048 and targets.shape == (2048,)


def test_a_block_has_one_group_and_the_cost_of_its_pieces() -> None:
    docs = [torch.arange(n) for n in (5, 6, 9, 3, 17)]
    data = Balanced(docs, cost=lambda ids: len(ids) ** 2, group=["a", "b", "a", "b", "a"], pack=8)

    assert sorted(zip(data.groups or (), data.costs, strict=True)) == [
        ("a", 16.0), ("a", 64.0), ("a", 64.0), ("a", 64.0), ("b", 5.0**2 + 2.0**2),
    ]  # fmt: skip
    assert data.waste == pytest.approx(1 - 35 / 40)
    with pytest.raises(TrainingError, match="a function of the ids of one piece"):
        Balanced(docs, cost=[1.0] * 5, pack=8)
