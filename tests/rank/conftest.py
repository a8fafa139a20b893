"""Run each test of ranks in its own folder, with small models on one thread."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import torch

from nbkit.rank.loss.counted_targets import Counted
from nbkit.rank.loss.loss_check import Examined
from nbkit.rank.parallel.whole_step import StepProof


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into an empty folder, because a Trainer writes to runs/ in the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def known_to_be_right() -> Iterator[None]:
    """Skip the tiny whole step of each strategy in the jobs of this test, which takes half a second or more, and the
    check whether copies have their own parts. Use it only for models whose strategies are tested by
    tests/rank/parallel/test_whole_step.py and tests/verify."""
    ranks.left_out |= {"prove_step": StepProof(), "look_at_copies": [""]}
    yield
    ranks.left_out.clear()


@pytest.fixture
def rows_are_known(known_to_be_right: None) -> None:
    """Skip the check of the model's rows too, which costs a job of a transformer a third of a second.

    Use it only for losses that are a mean cross entropy of all targets. tests/rank/loss tests the check.
    """
    ranks.left_out["examine"] = Examined(counted=Counted("loss", 1.0))
