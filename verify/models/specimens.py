"""Small models without any nbkit code, and the results of one process with each.

`ZOO[name]` is a Specimen. `build()` gives the same weights every time, `batch(rows)` an input and a target. Sizes:
vocabulary 96, width 32, 4 heads (2 key-value heads if there are groups), T = 16 positions. Importing transformers takes
seconds, so only the builders that need it do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.rank.data.batch import call
from nbkit.rank.models.gpt import GPT, Attention, Block, GPTConfig

VOCAB, WIDTH, HEADS, KV_HEADS, LENGTH = 96, 32, 4, 2, 16


@dataclass(frozen=True)
class Specimen:
    """A model and its data.

    make: builds it; some take `layers` and `dropout`. sample: (rows, generator) -> (model input, target). loss:
    (output, target) -> mean over rows (and positions). blocks: the modules that can begin a stage. padded: as sample,
    with padding, if the model takes a mask for it. loss_of: model -> its loss, if the loss reads the model.
    """

    make: Callable[..., nn.Module]
    sample: Callable[[int, torch.Generator], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    blocks: tuple[str, ...] = ()
    padded: Callable[[int, torch.Generator], tuple[Any, Any]] | None = None
    loss_of: Callable[[nn.Module], Callable[[Any, Any], Tensor]] | None = None

    def build(self, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
        """Return the model in training mode, initialized from seed 0. In float64 it does not round to float32."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make(**settings)
            _disturb(model)
        return exact(model.to(dtype)) if dtype == torch.float64 else model.to(dtype)

    def batch(
        self, rows: int = 4, *, seed: int = 0, dtype: torch.dtype = torch.float32, padded: bool = False
    ) -> tuple[Any, Any]:
        """Return (model input, target) of `rows` rows. padded: with padding, if the model takes a mask."""
        sample = (self.padded if padded else None) or self.sample
        value, target = sample(rows, torch.Generator().manual_seed(seed))
        return _as(value, dtype), _as(target, dtype)

    def rows(self, num: int, *, dtype: torch.dtype, padded: bool = False) -> list[tuple[Any, Any]]:
        """Return `num` samples: (model input, target) of one row each."""
        value, target = self.batch(num, dtype=dtype, padded=padded)
        return [(_row(value, i), target[i]) for i in range(num)]

    def gradients(self, model: nn.Module, value: Any, target: Any) -> tuple[Any, dict[str, Tensor | None]]:
        """Return (output, name -> gradient) of `model` in one process."""
        model.zero_grad()
        output = call(model, value)
        self.loss(output, target).backward()
        return output, {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _as(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _as(part, dtype) for key, part in value.items()}
    return tuple(_as(part, dtype) for part in value) if isinstance(value, tuple) else value


def _row(value: Any, i: int) -> Any:
    if isinstance(value, dict):
        return {key: _row(part, i) for key, part in value.items()}
    return tuple(_row(part, i) for part in value) if isinstance(value, tuple) else value[i]


@torch.no_grad()
def _disturb(model: nn.Module) -> None:
    """Change biases from zero and norms from one, so that a forgotten parameter changes the result."""
    for param in model.parameters():
        if param.ndim == 1:
            param.add_(torch.randn(param.shape) * 0.1)


_EXACT: dict[type[nn.Module], type[nn.Module]] = {}


def exact(model: nn.Module) -> nn.Module:
    """Stop HF's RMS norms from rounding to float32, in place, so that a bar of 1e-12 can be met."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = _EXACT.setdefault(kind, type(kind.__name__, (kind,), {"forward": _rms_norm}))
    return model


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden_states * scale)


def gpt(layers: int = 4, **changed: Any) -> nn.Module:
    sizes: dict[str, Any] = {"vocab": VOCAB, "block": LENGTH, "layers": layers, "heads": HEADS, "width": WIDTH}
    return GPT(GPTConfig(**(sizes | changed)))


def gpt_no_key_bias(layers: int = 4, **changed: Any) -> nn.Module:
    """Return a GPT with frozen key biases: their true gradient is 0, and the computed one is rounding error.

    An optimizer that takes the sign of a gradient would make a full step of it.
    """
    model = gpt(layers, **changed)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith(".k.bias"))
    return model


def gpt_tied(layers: int = 4, **changed: Any) -> nn.Module:
    model = gpt(layers, **changed)
    model.head.weight = model.tokens.weight
    return model


def hf_gpt2(layers: int = 4, dropout: float = 0.0, **changed: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_positions": LENGTH,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_layer": layers,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "attn_implementation": "sdpa",
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return GPT2LMHeadModel(GPT2Config(**(sizes | changed))).train()


def llama_sizes(layers: int, **changed: Any) -> dict[str, Any]:
    """Return the keywords of a LlamaConfig, and of the configs that are like it."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": LENGTH,
        "attn_implementation": "sdpa",
        "use_cache": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return sizes | changed


def hf_llama(layers: int = 4, dropout: float = 0.0, **changed: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**llama_sizes(layers, attention_dropout=dropout, **changed))).train()


def hf_llama_of_8_heads(layers: int = 4, **changed: Any) -> nn.Module:
    """Return a Llama with two query heads for each of four key-value heads, which four ranks can divide."""
    return hf_llama(layers, num_attention_heads=8, num_key_value_heads=4, **changed)


def hf_qwen2(layers: int = 4, **changed: Any) -> nn.Module:
    """Return a Qwen2: a Llama with biases on query, key and value, and a tied head, as in the small Qwens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**llama_sizes(layers, tie_word_embeddings=True, **changed))).train()


def lora(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """Return `model` with peft's adapters, none of which is zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    conv = any(type(part).__name__ == "Conv1D" for part in model.modules())
    wrapped: Any = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=6, target_modules=targets, fan_in_fan_out=conv, **options)
    )
    for name, p in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return wrapped.train()  # type: ignore[no-any-return]


def gpt_frozen() -> nn.Module:
    """Return a GPT whose embedding, first two blocks and biases are frozen."""
    model = gpt()
    for name, p in model.named_parameters():
        p.requires_grad_(not (name.startswith(("tokens", "blocks.0", "blocks.1")) or name.endswith("bias")))
    return model


class Encoder(nn.Module):
    """Token ids (B, T), padding (B, T) -> class scores (B, 5), through an nn.TransformerEncoder."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(WIDTH, 5)
        for param in self.encoder.parameters():  # the stack's layers are copies: make them differ
            if param.ndim > 1:
                nn.init.xavier_uniform_(param)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


class TenConvs(nn.Module):
    """Images (B, 3, 12, 12) -> class scores (B, 5): ten convolutions, children of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 8, 8, 12, 12, 12, 12, 16, 16, 16]
        self.convs = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in pairwise(widths))
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convs(x).mean((2, 3)))


class Uneven(nn.Module):
    """Token ids (B, T) -> logits (B, T, V). The costs of its layers differ: every third is three layers."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        config = GPTConfig(vocab=VOCAB, block=LENGTH, heads=HEADS, width=WIDTH)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(*(Block(config) for _ in range(3))) if i % 3 == 1 else Block(config) for i in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class PairBlock(nn.Module):
    """Carries two tensors, and takes a mask by keyword: (x, memory), scale -> (x, memory)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(GPTConfig(vocab=VOCAB, heads=HEADS, width=WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor], *, keep: Tensor) -> tuple[Tensor, Tensor]:
        x, memory = pair
        x = x + self.attention(x) * keep
        return x, memory + torch.tanh(self.mix(x))


class Pairs(nn.Module):
    """Token ids (B, T) -> logits (B, T, V), through blocks with a tuple between them."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.memory = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(PairBlock() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        pair = (x, self.memory.expand_as(x))
        keep = (ids != 0).to(x.dtype)[..., None]
        for block in self.blocks:
            pair = block(pair, keep=keep)
        return self.head(pair[0] * pair[1])


def sequential() -> nn.Module:
    """Return an nn.Sequential: points (B, 6) -> class scores (B, 5)."""
    linears = [nn.Linear(a, b) for a, b in pairwise([6, 24, 40, 16, 24])]
    return nn.Sequential(*(part for linear in linears for part in (linear, nn.Tanh())), nn.Linear(24, 5))


def next_tokens(rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (rows, LENGTH + 1), generator=draw)
    return ids[:, :-1], ids[:, 1:]


def padded_tokens(rows: int, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Return rows as HF's tokenizers do: at padding, attention_mask is 0, and the target is -100."""
    ids, target = next_tokens(rows, draw)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows,), generator=draw)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}, target.masked_fill(mask == 0, -100)


def classes(*shape: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def sample(rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, *shape, generator=draw), torch.randint(5, (rows,), generator=draw)

    return sample


def encoder_rows(rows: int, draw: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    value, _ = padded_tokens(rows, draw)
    return (value["input_ids"], value["attention_mask"] == 0), torch.randint(5, (rows,), generator=draw)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def object_cross_entropy(output: Any, target: Tensor) -> Tensor:
    """Return the cross entropy of the output of an HF model, which is an object."""
    return cross_entropy(output.logits, target)


def _named(path: str, num: int) -> tuple[str, ...]:
    return tuple(f"{path}.{i}" if path else str(i) for i in range(num))


ZOO: dict[str, Specimen] = {
    "gpt": Specimen(gpt, next_tokens, cross_entropy, _named("blocks", 4)),
    "gpt_tied": Specimen(gpt_tied, next_tokens, cross_entropy, _named("blocks", 4)),
    "gpt2": Specimen(hf_gpt2, next_tokens, object_cross_entropy, _named("transformer.h", 4), padded_tokens),
    "gpt2_padded": Specimen(hf_gpt2, padded_tokens, object_cross_entropy, _named("transformer.h", 4)),
    "llama": Specimen(hf_llama, next_tokens, object_cross_entropy, _named("model.layers", 4)),
    "llama_tied": Specimen(
        lambda: hf_llama(tie_word_embeddings=True), padded_tokens, object_cross_entropy, _named("model.layers", 4)
    ),
    "llama_of_8_heads": Specimen(
        hf_llama_of_8_heads, next_tokens, object_cross_entropy, _named("model.layers", 4), padded=padded_tokens
    ),
    "llama_of_8_heads_tied": Specimen(
        lambda **settings: hf_llama_of_8_heads(tie_word_embeddings=True, **settings),
        next_tokens,
        object_cross_entropy,
        _named("model.layers", 4),
        padded=padded_tokens,
    ),
    "qwen2": Specimen(hf_qwen2, next_tokens, object_cross_entropy, _named("model.layers", 4)),
    "encoder": Specimen(Encoder, encoder_rows, cross_entropy, _named("encoder.layers", 4)),
    "ten_convs": Specimen(TenConvs, classes(3, 12, 12), cross_entropy, _named("convs", 10)),
    "uneven": Specimen(Uneven, next_tokens, cross_entropy, _named("layers", 6)),
    "pairs": Specimen(Pairs, next_tokens, cross_entropy, _named("blocks", 4)),
    "sequential": Specimen(sequential, classes(6), cross_entropy, ("0", "2", "4", "6", "8")),
}
