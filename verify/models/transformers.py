"""Architectures of `transformers` with random weights: two layers, width 32, four heads, and no dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verify.models.specimens import LENGTH, VOCAB, WIDTH, ZOO, Specimen, classes, next_tokens, object_cross_entropy

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * LENGTH,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DROPS = (
    *("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"),
    *("dropout_rate", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "resid_dropout"),
    *("embed_dropout", "residual_dropout", "embedding_dropout", "drop_path_rate", "encoder_layerdrop"),
    *("decoder_layerdrop", "layerdrop", "classifier_dropout"),
)
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
# The only way to run experts that works in double precision.
_ROUTED = {"output_router_logits": False, "experts_implementation": "eager"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, **_ROUTED}
_QWEN_MOE = {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "n_shared_experts": 1}
_DEEPSEEK |= {"first_k_dense_replace": 1, "num_key_value_heads": 4, **_LATENT, **_ROUTED}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SEQ2SEQ = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "decoder_start_token_id": 1,
}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": LENGTH, "max_target_positions": LENGTH}
_IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 3}
_SWIN = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 2, "image_size": 16, "patch_size": 2}


def _made(config: str, model: str, **changed: Any) -> Callable[[], nn.Module]:
    """Return what builds `model` with the common settings that its config knows."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, config)
        plain = kind()
        common = {key: value for key, value in _SIZES.items() if hasattr(plain, key)}
        common |= {key: 0.0 for key in _DROPS if hasattr(plain, key)}
        # Two names of one setting: the given one wins.
        common = {key: value for key, value in common.items() if plain.attribute_map.get(key, key) not in changed}
        return getattr(transformers, model)(kind(**(common | changed))).train()  # type: ignore[no-any-return]

    return make


def _causal(name: str, **changed: Any) -> Specimen:
    config = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    return Specimen(_made(config, f"{name}ForCausalLM", **changed), next_tokens, object_cross_entropy)


def _masked(name: str, **changed: Any) -> Specimen:
    return Specimen(_made(f"{name}Config", f"{name}ForMaskedLM", **changed), _ids_and_mask, object_cross_entropy)


def _classifier(name: str, **changed: Any) -> Specimen:
    make = _made(f"{name}Config", f"{name}ForImageClassification", num_labels=5, **changed)
    return Specimen(make, classes(3, 16, 16), object_cross_entropy)


def _seq2seq(name: str, sample: Any = None, **changed: Any) -> Specimen:
    make = _made(f"{name}Config", f"{name}ForConditionalGeneration", **changed)
    return Specimen(make, sample or _source_and_target, object_cross_entropy)


def _ids_and_mask(rows: int, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=draw)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=draw)
    return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < lengths).long()}, ids


def _source_and_target(rows: int, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    source, target = (torch.randint(3, VOCAB, (rows, LENGTH), generator=draw) for _ in range(2))
    return {"input_ids": source, "decoder_input_ids": target.roll(1, 1)}, target


def _sound_and_target(rows: int, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    target = torch.randint(3, VOCAB, (rows, LENGTH), generator=draw)
    sound = torch.randn(rows, 8, 2 * LENGTH, generator=draw)
    return {"input_features": sound, "decoder_input_ids": target.roll(1, 1)}, target


def _clip() -> nn.Module:
    text = {key: value for key, value in _SIZES.items() if key not in ("num_key_value_heads", "use_cache")}
    image = {key: _SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    image |= {"num_attention_heads": 4, **_IMAGES}
    return _made("CLIPConfig", "CLIPModel", text_config=text, vision_config=image, projection_dim=WIDTH)()


def _texts_and_images(rows: int, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    value = {
        "input_ids": torch.randint(3, VOCAB, (rows, LENGTH), generator=draw),
        "pixel_values": torch.randn(rows, 3, 16, 16, generator=draw),
    }
    return value, torch.rand(rows, generator=draw)


def _likeness(output: Any, target: Tensor) -> Tensor:
    """Return a loss for each pair by itself, because the contrastive loss of CLIP is not a mean over rows."""
    return F.mse_loss((output.image_embeds * output.text_embeds).sum(-1), target)


def _checkpointed() -> nn.Module:
    model: Any = _made("LlamaConfig", "LlamaForCausalLM")()
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


TRANSFORMERS: dict[str, Specimen] = {
    "gpt2": ZOO["gpt2"],
    "gpt_neo": _causal("GPTNeo", attention_types=[[["global", "local"], 1]], window_size=8),
    "gptj": _causal("GPTJ", rotary_dim=4),
    "neox": _causal("GPTNeoX"),
    "llama": ZOO["llama"],
    "llama_checkpoint": Specimen(_checkpointed, next_tokens, object_cross_entropy),
    "mistral": _causal("Mistral", sliding_window=8),
    "qwen2": _causal("Qwen2", tie_word_embeddings=True),
    "qwen3": _causal("Qwen3", head_dim=8),
    "phi": _causal("Phi"),
    "phi3": _causal("Phi3"),
    "falcon": _causal("Falcon"),
    "starcoder2": _causal("Starcoder2"),
    "olmo2": _causal("Olmo2"),
    "opt": _causal("OPT", ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH),
    "bloom": _causal("Bloom"),
    "gemma2": _causal("Gemma2", **_GEMMA),
    "gemma3": _causal("Gemma3", **_GEMMA),
    "mixtral": _causal("Mixtral", num_local_experts=4, **_ROUTED),
    "olmoe": _causal("Olmoe", **_EXPERTS),
    "qwen2_moe": _causal("Qwen2Moe", **_EXPERTS, **_QWEN_MOE),
    "qwen3_moe": _causal("Qwen3Moe", **_EXPERTS, moe_intermediate_size=WIDTH, head_dim=8),
    "gpt_oss": _causal("GptOss", **_EXPERTS, head_dim=8, sliding_window=8, rope_parameters=_PLAIN_ROPE),
    "deepseek_v2": _causal("DeepseekV2", **_DEEPSEEK),
    "deepseek_v3": _causal("DeepseekV3", **_DEEPSEEK, n_group=2, topk_group=1),
    "mamba": _causal("Mamba", state_size=4),
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta"),
    "distilbert": _masked("DistilBert", dim=WIDTH, n_heads=4, n_layers=2, hidden_dim=2 * WIDTH),
    "vit": _classifier("ViT", **_IMAGES),
    "dinov2": _classifier("Dinov2", **_IMAGES),
    "swin": _classifier("Swin", **_SWIN),
    "convnext": _classifier("ConvNext", hidden_sizes=(8, 16, 32, 32), depths=(1, 1, 2, 1), num_stages=4, patch_size=2),
    "clip": Specimen(_clip, _texts_and_images, _likeness),
    "t5": _seq2seq("T5", **_T5),
    "bart": _seq2seq("Bart", **_SEQ2SEQ),
    "whisper": _seq2seq("Whisper", _sound_and_target, **_SEQ2SEQ, **_WHISPER),
}
