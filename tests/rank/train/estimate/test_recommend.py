"""Test that strategy="auto" uses the first row of a plan that all ranks share, and prints it."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.nn import functional as F

from nbkit.errors import StrategyError
from nbkit.rank.models.gpt import GPT, GPTConfig
from nbkit.rank.train.trainer import Trainer

CONFIG = GPTConfig(vocab=64, block=16, layers=2, heads=2, width=32)


def trained(world: Any, limits: tuple[int, ...]) -> list[tuple[str, str, float]]:
    """Return for each limit (strategy, printed text, loss of a step), or ("", the error, 0)."""
    found = []
    ids = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
    for limit in limits:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
            if limit:
                # The limit is below the free memory: see free_memory.left, which subtracts the held bytes.
                patch.setattr("nbkit.rank.train.estimate.free_memory.left", lambda device, *, ranks, limit=limit: limit)
            try:
                trainer = Trainer(
                    model=lambda: GPT(CONFIG),
                    loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
                    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
                    data=[(row[:-1], row[1:]) for row in ids],
                    batch_size=8,
                    strategy="auto",
                    log_dir=None,
                    progress=False,
                )
            except StrategyError as error:
                found.append(("", error.what + error.numbers, 0.0))
                continue
        patch.undo()
        found.append((str(trainer.strategy), said.getvalue(), trainer.fit(1)[0]["loss"]))
    return found


def test_auto_uses_a_strategy_that_fits_or_reports_what_is_missing() -> None:
    per_parameter = sum(p.numel() for p in GPT(CONFIG).parameters()) * 4
    one, other = run_ranks(trained, 2, (0, 4 * per_parameter, 1000), timeout=120)
    for (strategy, said, loss), (theirs, silent, same) in zip(one, other, strict=True):
        assert (strategy, loss) == (theirs, same)
        if strategy:
            assert said.startswith(f"strategy=auto: {strategy}; ") and silent == ""
    # Parameters, gradients and two moments leave no room for more, so they must be split.
    assert one[1][0] not in ("", "dp=2")
    assert "No strategy of 2 ranks fits" in one[2][1] and "needs least" in one[2][1]
