"""The learning rate of several groups, changed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbkit.errors import TrainingError
from nbkit.rank.train.step.lr_schedule import LrSchedule


def groups(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_groups_keep_their_ratio_where_the_schedule_stands_at_zero() -> None:
    optimizer = groups(1e-3, 1e-2)
    rate = LrSchedule(optimizer, lambda step: min(1.0, step / 10))
    rate.prepare(0)
    assert rates(optimizer) == [0, 0]

    rate.set(2e-3)
    assert rates(optimizer) == pytest.approx([2e-3, 2e-2])
    rate.prepare(5)
    assert rates(optimizer) == pytest.approx([1e-3, 1e-2])
    rate.set(1e-4)
    rate.prepare(10)
    assert rates(optimizer) == pytest.approx([2e-4, 2e-3])


def test_a_first_group_that_stands_still_has_no_ratio() -> None:
    optimizer = groups(0.0, 1e-3)
    with pytest.raises(TrainingError, match="cannot keep their ratio to it"):
        LrSchedule(optimizer, None).set(1e-3)
    assert rates(optimizer) == [0.0, 1e-3]
    LrSchedule(still := groups(0.0, 0.0), None).set(1e-3)
    assert rates(still) == [1e-3, 1e-3]
