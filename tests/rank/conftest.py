"""Each test of ranks stands in a folder of its own, and its small models run on one thread."""

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
    """Change into an empty folder, because a Trainer writes to runs/ where it stands."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def known_to_be_right() -> Iterator[None]:
    """Make the jobs of this test without a tiny whole step of each strategy, which takes half a second or more, and
    without a look whether copies have parts of their own. Only for models whose strategies are proven by
    tests/rank/parallel/test_whole_step.py and tests/verify."""
    ranks.left_out |= {"prove_step": StepProof(), "look_at_copies": [""]}
    yield
    ranks.left_out.clear()


@pytest.fixture
def rows_are_known(known_to_be_right: None) -> None:
    """Leave out the look at the rows of the model too, which takes a job of a transformer a third of a second.

    Only for losses that are a mean cross entropy of all targets: this is what the look finds. tests/rank/loss looks.
    """
    ranks.left_out["examine"] = Examined(counted=Counted("loss", 1.0))
