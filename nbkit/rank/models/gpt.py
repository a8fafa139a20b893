"""A small GPT (Radford et al. 2019, pre-norm, learned positions) of plain modules, without any parallel code.

Shapes: B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.planner.gpt_config import GPTConfig as GPTConfig


class Attention(nn.Module):
    """Causal self-attention: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=drop, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a four times wider MLP: (B, T, D) -> (B, T, D). Each follows a norm and has a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, **mask: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), **mask))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return x


class GPT(nn.Module):
    """A GPT: token ids (B, T) -> logits (B, T, V). config: the sizes of the model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_init_weights)
        # Each block adds twice to the residual stream. With this scale, its variance does not grow with depth.
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "down.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) for ids (B, T).

        positions: (B, T), the position of each token in its document, if documents are packed. Position 0 begins a
        document.
        """
        mask = {} if positions is None else {"mask": _within_documents(positions)}
        places = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
        x = self.tokens(ids) + self.positions(places)
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, **mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, prompt: bytes | str | Tensor, tokens: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Return `prompt` continued by `tokens` sampled tokens, as bytes (vocabulary of 256).

        temperature: 0 takes the likeliest token. The draw depends only on `seed`, so every rank returns the same text.
        """
        device = self.head.weight.device
        raw = prompt.encode() if isinstance(prompt, str) else prompt
        ids = torch.tensor(list(raw or b"\n")) if isinstance(raw, bytes) else raw.flatten()
        ids = ids.to(device=device, dtype=torch.long)[None]
        draw = torch.Generator().manual_seed(seed)
        was_training = self.training
        self.eval()
        try:
            for _ in range(tokens):
                logits = self(ids[:, -self.config.block :])[0, -1].float().cpu()
                if temperature > 0:
                    chosen = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draw)
                else:
                    chosen = logits.argmax(0, keepdim=True)
                ids = torch.cat([ids, chosen.to(device)[None]], dim=1)
        finally:
            self.train(was_training)
        return bytes(ids[0].tolist())


def _within_documents(positions: Tensor) -> Tensor:
    """Return a mask (B, 1, T, T). A position attends to its own document, up to itself."""
    document = (positions == 0).cumsum(1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
