"""Test the GPU of a rank, and the warning when nccl cannot be used."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from nbkit.rank.world import rank_place
from nbkit.rank.world.rank_place import RankPlace


def test_a_rank_uses_the_gpu_of_its_user_or_else_of_its_local_rank() -> None:
    place = RankPlace(3, 4, 3, 4, "cuda", "nccl")

    assert place.gpu(num_gpus=4) == 3
    assert place.gpu(num_gpus=1) == 0
    assert place.gpu(num_gpus=8, bound=torch.device("cuda", 5)) == 5
    assert place.gpu(num_gpus=8, bound=torch.device("cuda", 0), current=2) == 0
    assert place.gpu(num_gpus=8, current=6) == 6


def test_gloo_on_gpus_warns_once_per_host() -> None:
    with pytest.warns(UserWarning, match="this host has 4 ranks, and this rank sees 1 GPU"):
        RankPlace(4, 8, 0, 4, "cuda", "gloo").warn_of_gloo(num_gpus=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RankPlace(5, 8, 1, 4, "cuda", "gloo").warn_of_gloo(num_gpus=1)
        RankPlace(4, 8, 0, 4, "cuda", "nccl").warn_of_gloo(num_gpus=4)
        RankPlace(4, 8, 0, 4, "cpu", "gloo").warn_of_gloo(num_gpus=0)


def test_messages_between_ranks_are_on_the_host_if_gloo_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # A replacement process once crashed when it got the training over gloo from a GPU.
    monkeypatch.setattr(rank_place, "accelerator", lambda: SimpleNamespace(device=lambda kind: kind))

    found = [
        RankPlace(0, 2, 0, 2, *how).message_device for how in (("cuda", "nccl"), ("cuda", "gloo"), ("cpu", "gloo"))
    ]

    assert found == ["cuda", "cpu", "cpu"]
