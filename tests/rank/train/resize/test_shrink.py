"""Test that on_failure="shrink" is not possible on several hosts: all ranks go on, and the reason is printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs import quiet
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

from nbkit.rank.train.replace.resume_fit import FitRange
from nbkit.rank.train.resize.plan_resize import ResizeAtBoundary, shrink

pytestmark = pytest.mark.usefixtures("known_to_be_right")


def shrunk(world: Any) -> dict[str, Any]:
    import torch

    rows = [(torch.full((4,), float(i)), torch.zeros(1)) for i in range(12)]
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=1e-3)  # noqa: E731
    trainer = quiet(model=lambda: nn.Linear(4, 1), loss=F.mse_loss, optimizer=sgd, data=rows, batch_size=6)
    said: list[str] = []
    with pytest.raises(ResizeAtBoundary) as asked:
        shrink(trainer, FitRange(0, 4, fewer=1), said.append)
    world.place = replace(world.place, local_rank=0, local_world_size=1)  # as on three hosts
    span = shrink(trainer, FitRange(0, 4, fewer=1), said.append)
    trainer.fit(span.goal)
    return {"wanted": asked.value.wanted.ranks, "span": span, "said": said, "step": trainer.step}


def test_all_ranks_on_several_hosts_go_on_and_the_reason_is_printed() -> None:
    for found in run_ranks(shrunk, 3):
        assert found["wanted"] == 2 and found["span"] == FitRange(0, 4, fewer=0) and found["step"] == 4
        (said,) = found["said"]
        assert said.startswith("on_failure='shrink': continues with 3 ranks.") and "3 ranks on several" in said
