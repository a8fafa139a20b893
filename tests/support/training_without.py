"""A training on a torch without the private symbols whose paths are given; tests/test_private_symbols.py starts it.

python -m tests.support.training_without PATH ...    with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment
"""

from __future__ import annotations

import json
import sys
from typing import Any

from nbkit import private_symbols

STRATEGIES = ["ddp", "zero1", "zero3", "tp", "pp"]
LACKING = set(sys.argv[1:])
resolve = private_symbols.Symbol.resolve


def lacking(symbol: private_symbols.Symbol) -> Any:
    if symbol.path in LACKING:
        raise AttributeError(symbol.path)
    return resolve(symbol)


private_symbols.Symbol.resolve = lacking  # type: ignore[method-assign]

import torch  # noqa: E402
from torch import nn  # noqa: E402

import nbkit  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 3))


def losses(strategies: list[str]) -> list[float]:
    torch.manual_seed(0)
    data = [(torch.randn(4), torch.randint(3, ())) for _ in range(32)]
    trainer = nbkit.Trainer(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=data,
        batch_size=8,
        clip_norm=1.0,
        strategy=strategies[0],
        log_dir=None,
        progress=False,
    )
    trainer.fit(2)
    for strategy in strategies[1:]:
        trainer.switch(strategy)
        trainer.fit(2)
    return [record["loss"] for record in trainer.history]


if __name__ == "__main__":
    from tests.support.ranks import know_links

    know_links(2)
    print(json.dumps(losses(STRATEGIES)))
