"""BatchNorm over several ranks: never silently different, never waiting for a rank that does not come."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.norms import check_level, synchronised

CPU = torch.device("cpu")


def test_what_does_not_couple_samples_passes_as_it_is() -> None:
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    for model in (nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3)), frozen):
        assert synchronised(model, world_size=4, device=CPU) is model
    assert synchronised(alone := nn.BatchNorm1d(3), world_size=1, device=CPU) is alone


def test_on_cpu_ranks_it_is_refused_and_on_cuda_synchronised() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(TrainingError, match="BatchNorm '1'"):
        synchronised(model, world_size=2, device=CPU)

    assert isinstance(synchronised(model, world_size=2, device=torch.device("cuda"))[1], nn.SyncBatchNorm)


@pytest.mark.parametrize(("total", "microbatch"), [(8, None), (8, 1), (5, None)])
def test_the_same_number_of_forwards_passes(total: int, microbatch: int | None) -> None:
    check_level(total, ranks=4, microbatch=microbatch)


@pytest.mark.parametrize(("total", "microbatch"), [(3, None), (5, 1), (9, 2)])
def test_an_uneven_number_of_forwards_is_refused(total: int, microbatch: int | None) -> None:
    with pytest.raises(TrainingError, match="drop_last=True"):
        check_level(total, ranks=4, microbatch=microbatch)
