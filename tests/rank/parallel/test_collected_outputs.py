"""Test that outputs collected by transformers' hooks, installed in the first forward, equal those of plain torch."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import nbkit
from nbkit.rank.train.trainer import Trainer

pytestmark = pytest.mark.long

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
IMAGES: dict[str, Any] = {"image_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS: dict[str, Any] = {"num_key_value_heads": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
STEPS, ROWS = 2, 8
CHAIN, WHOLE = "ddp > zero3 > tp > zero1 > ddp", "ddp > zero3 > zero2 > ddp"


def model_of(kind: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    layers = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    layers["intermediate_size"] = 32
    if kind == "llama":
        config = hf.LlamaConfig(**SIZES, num_key_value_heads=2, output_attentions=True, attn_implementation="eager")
        return hf.LlamaForCausalLM(config)
    if kind == "gpt2":
        none: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32, output_hidden_states=True, **none
            )
        )
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4))
    if kind == "vit":
        config = hf.ViTConfig(**layers, **IMAGES, patch_size=8, num_labels=5, output_hidden_states=True)
        return hf.ViTForImageClassification(config)
    if kind == "segformer":
        sizes = {"hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2]}
        shape = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
        drops = dict.fromkeys(("classifier_dropout_prob", "drop_path_rate"), 0.0) | IMAGES
        drops.pop("image_size")
        config = hf.SegformerConfig(**sizes, **shape, **drops, decoder_hidden_size=16, num_labels=5)
        return hf.SegformerForSemanticSegmentation(config)
    vision = hf.CLIPVisionConfig(**layers | {"num_hidden_layers": 3}, image_size=16, patch_size=8, projection_dim=16)
    text = hf.LlamaConfig(**SIZES, num_key_value_heads=2)
    seen: dict[str, Any] = {"image_token_id": 3, "image_seq_length": 4, "vision_feature_layer": -2}
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=vision, text_config=text, **seen))


def data_of(kind: str) -> list[dict[str, Tensor]]:
    draw, rows = torch.Generator().manual_seed(5), []
    for _ in range(STEPS * ROWS):
        image, ids = torch.randn(3, 16, 16, generator=draw), torch.randint(4, 60, (8,), generator=draw)
        kinds = torch.randint(5, (8, 8) if kind == "segformer" else (), generator=draw)
        if kind == "llava":
            rows.append({"pixel_values": image, "input_ids": torch.cat([ids[:1], torch.full((4,), 3), ids[1:]])})
        else:
            rows.append({"pixel_values": image, "kind": kinds} if kind in ("vit", "segformer") else {"input_ids": ids})
    return rows


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss with all collected tensors."""
    if "kind" in batch:
        loss = F.cross_entropy(output.logits, batch["kind"])
    else:
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    for name in ("hidden_states", "attentions", "router_logits"):
        loss = loss + sum(part.pow(2).mean() for part in getattr(output, name, None) or ())
    return loss


def with_balance(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss with its load-balancing term, which couples all rows."""
    return loss_of(output, batch) + output.aux_loss  # type: ignore[no-any-return]


def inputs_of(kind: str) -> list[str]:
    return [name for name in data_of(kind)[0] if name != "kind"]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def collected(world: Any, kind: str, chain: str, loss: Any) -> list[float]:
    warnings.simplefilter("ignore")
    first, *later = chain.split(" > ")
    trainer = Trainer(
        model=partial(model_of, kind),
        loss=loss,
        inputs=inputs_of(kind),
        optimizer=sgd,
        data=data_of(kind),
        batch_size=ROWS,
        loading=nbkit.Loading(shuffle=False),
        strategy=first,
        log_dir=None,
        progress=False,
    )
    trainer.fit(2)
    for strategy in later:
        trainer.switch(strategy)
        trainer.fit(2)
    return [record["loss"] for record in trainer.history]


@pytest.mark.parametrize(
    ("kind", "chain", "loss"),
    [
        ("llama", WHOLE, loss_of),  # a tensor axis has a part of the heads, and is refused
        ("gpt2", CHAIN, loss_of),
        ("mixtral", WHOLE, loss_of),
        ("mixtral", "tp", with_balance),
        ("mixtral", "zero3 > tp", loss_of),
        ("vit", CHAIN, loss_of),
        ("segformer", CHAIN, loss_of),
        ("llava", CHAIN, loss_of),
    ],
)
def test_collected_outputs_equal_those_of_one_process_through_switches(kind: str, chain: str, loss: Any) -> None:
    pytest.importorskip("transformers")
    found = run_ranks(collected, 2, kind, chain, loss, timeout=300)[0]

    model, wanted = model_of(kind).train(), list[float]()
    optimizer, rows = sgd(model), data_of(kind)
    for step in range(len(found)):
        part = rows[step % STEPS * ROWS :][:ROWS]
        batch = {name: torch.stack([row[name] for row in part]) for name in part[0]}
        value = loss(model(**{name: batch[name] for name in inputs_of(kind)}), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        wanted.append(value.item())
    assert found == pytest.approx(wanted, rel=2e-5)
