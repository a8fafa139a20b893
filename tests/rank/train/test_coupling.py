"""Losses that are no means over rows are told from those that are."""

from __future__ import annotations

from typing import Any

import torch
from jobs import mean_loss, net, points, weighted_loss
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from nbkit.rank.train.coupling import coupled

BATCH = default_collate(points(4))


def of(loss: Any, batch: Any = BATCH) -> str:
    torch.manual_seed(0)
    return coupled(net(), loss, batch, None)


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    unit = F.normalize(output, dim=1)
    return F.cross_entropy(unit @ unit.T, torch.arange(len(output)))


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    return weighted_loss(output, target)[0] / 2


def test_means_and_weighted_sums_are_none_and_what_cannot_be_told_is_not_said() -> None:
    assert of(mean_loss) == of(weighted_loss) == of(lambda out, target: mean_loss(out.bfloat16(), target)) == ""
    assert of(lambda out, target: mean_loss(out, target) * torch.rand(())) == ""
    assert of(lambda out, target: out.log().sum()) == of(lambda out, target: 1 / 0) == ""
    assert of(contrastive, default_collate(points(1))) == ""


def test_what_couples_rows_is_told_with_its_numbers() -> None:
    assert of(contrastive).startswith("4 rows together: ") and "each alone: 0, 0, 0, 0" in of(contrastive)
    assert of(masked_mean) and of(lambda out, target: out.square().sum())
