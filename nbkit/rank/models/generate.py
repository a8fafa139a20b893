"""Text from a model that is spread over ranks: every rank takes part in each token, and all say the same.

The whole text so far goes through the model for each token: slow beside a cache of keys and values, and right under
every strategy without the model knowing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.sharded_model import ShardedModel

_LENGTHS = ("block", "block_size", "max_position_embeddings", "n_positions")


def generate(
    sharded_model: ShardedModel,
    prompt: str | bytes | Tensor,
    tokens: int,
    *,
    inputs: Sequence[str] | None,
    temperature: float,
    seed: int,
    device: torch.device,
) -> bytes | Tensor:
    """`prompt` continued by `tokens` tokens. Collective: every rank calls it with the same arguments.

    prompt: ids (T,) or (B, T), or text, whose UTF-8 bytes are the ids; then bytes come back. temperature 0 takes the
    likeliest token; else the draw depends on `seed` alone.
    Raises TrainingError when the model gives no logits (B, T, V).
    """
    raw = prompt.encode() if isinstance(prompt, str) else prompt
    ids = torch.tensor(list(raw or b"\n")) if isinstance(raw, bytes) else raw
    one_dim = ids.ndim == 1
    ids = ids.to(device=device, dtype=torch.long).view(-1, ids.shape[-1])
    longest, draw = _longest(sharded_model.module), torch.Generator().manual_seed(seed)
    with sharded_model.evaluating():
        for _ in range(tokens):
            seen = ids[:, -longest:]
            value: Any = seen if inputs is None else {inputs[0]: seen}

            def forward(stage: int, number: int, received: tuple[Tensor, ...], value: Any = value) -> tuple[Any, ...]:
                output = sharded_model.stage(stage, value, received)
                return (_last_logits(output),) if stage == sharded_model.last_stage else output

            found = sharded_model.outputs(1, forward, key=partial(_shape, tuple(seen.shape)))
            chosen = torch.empty(len(ids), 1, dtype=torch.long, device=device)
            if found:
                chosen = _pick(found[0], temperature, draw).to(device)
            if sharded_model.pipeline is not None:
                source = sharded_model.axes.mesh.ranks("pp", sharded_model.axes.rank)[
                    sharded_model.pipeline.schedule.rank_of(sharded_model.last_stage)
                ]
                dist.broadcast(chosen, src=source, group=sharded_model.axes.group("pp"))
            ids = torch.cat([ids, chosen], dim=1)
    if isinstance(raw, bytes):
        return bytes(ids[0].tolist())
    return ids[0] if one_dim else ids


def _shape(shape: tuple[int, ...], micro: int) -> tuple[Any, ...]:
    return ("generate", *shape)


def _last_logits(output: Any) -> Tensor:
    """(B, V), on the CPU, of the last position."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise TrainingError(
            "The model gives no logits to generate from.", numbers=f"got {got}", hint="a model of (B, T) -> (B, T, V)"
        )
    return torch.softmax(logits[:, -1].float(), dim=-1).cpu()


def _pick(chances: Tensor, temperature: float, draw: torch.Generator) -> Tensor:
    """(B, 1) token ids out of (B, V) probabilities."""
    if temperature > 0:
        return torch.multinomial(torch.softmax(chances.log() / temperature, dim=-1), 1, generator=draw)
    return chances.argmax(dim=-1, keepdim=True)


def _longest(module: nn.Module) -> int:
    """Positions that the model knows, as its config says; without one, no limit."""
    config = getattr(module, "config", None)
    known = [value for name in _LENGTHS if isinstance(value := getattr(config, name, None), int)]
    return min(known, default=1 << 30)
