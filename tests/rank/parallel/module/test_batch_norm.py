"""BatchNorm over several ranks: never silently different, never waiting for a rank that does not come."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbkit.errors import TrainingError
from nbkit.mesh import AXES, Mesh
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.module.batch_norm import check_level, synchronised

CPU = torch.device("cpu")


def ranks(dp: int, pp: int = 1) -> Axes:
    """As seen from rank 0, without groups: nothing is sent here."""
    return Axes(Mesh(dp=dp, pp=pp), 0, dp, dict.fromkeys((*AXES, "shard", "replicate")))


def test_what_does_not_couple_samples_passes_as_it_is() -> None:
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    for model in (nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3)), frozen):
        assert synchronised(model, axes=ranks(4), micros=8, device=CPU) is model
    for alone in (ranks(1), ranks(1, pp=4)):
        assert synchronised(norm := nn.BatchNorm1d(3), axes=alone, micros=1, device=CPU) is norm


def test_on_cpu_ranks_it_is_refused_and_on_cuda_synchronised() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(TrainingError, match="BatchNorm '1'"):
        synchronised(model, axes=ranks(2), micros=1, device=CPU)

    cuda = torch.device("cuda")
    assert isinstance(synchronised(model, axes=ranks(2), micros=1, device=cuda)[1], nn.SyncBatchNorm)


def test_micro_batches_of_a_pipeline_are_parts_of_a_batch_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(TrainingError, match="one micro-batch of the pipeline"):
        synchronised(model, axes=ranks(1, pp=2), micros=4, device=CPU)


@pytest.mark.parametrize(("total", "microbatch_size"), [(8, None), (8, 1), (5, None)])
def test_the_same_number_of_forwards_passes(total: int, microbatch_size: int | None) -> None:
    check_level(total, ranks=4, microbatch_size=microbatch_size)


@pytest.mark.parametrize(("total", "microbatch_size"), [(3, None), (5, 1), (9, 2)])
def test_an_uneven_number_of_forwards_is_refused(total: int, microbatch_size: int | None) -> None:
    with pytest.raises(TrainingError, match="drop_last=True"):
        check_level(total, ranks=4, microbatch_size=microbatch_size)
