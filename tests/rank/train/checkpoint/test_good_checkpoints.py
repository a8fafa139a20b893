"""Test that checkpoints belong to exactly the named run, all ranks can read them, and their weights are finite."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import flat, points, quiet
from ranks import run_ranks
from torch import nn

import nbkit
from nbkit.errors import NotFinite, TrainingError

pytestmark = pytest.mark.usefixtures("known_to_be_right")

NAMES = ["gpt-zero3", "gpt", "exp[1]", "a/../b", "new\nline", "lr=1e-3 $(x); 'y'", "größe", "-rf", "..", "*", "n" * 300]
"""Names of runs, which must never be confused with each other."""


def named(world: Any, runs: Path) -> list[Any]:
    told = []
    os.environ["HOME"] = str(runs.parent)
    for seed, name in enumerate(NAMES):
        quiet(log_dir="~/runs", name=name, checkpoints=nbkit.Checkpoints(every=1), seed=seed).fit(1)
    for name in NAMES:
        again = quiet(log_dir=str(runs), name=name, checkpoints=nbkit.Checkpoints(every=9), seed=99)
        again.fit(until=1, resume="auto")
        told.append((name, again.job.seed, again.step))
    other = quiet(log_dir=str(runs), name="gp", checkpoints=nbkit.Checkpoints(every=9))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        other.fit(1, resume="auto")
    return [told, printed.getvalue().strip()]


def test_a_run_resumes_only_from_checkpoints_of_exactly_its_name(tmp_path: Path) -> None:
    ((told, other),) = run_ranks(named, 1, tmp_path / "runs")

    assert told == [(name, seed, 1) for seed, name in enumerate(NAMES)]
    assert other == "there is no checkpoint yet: begins at step 0"
    folders = [path.name for path in (tmp_path / "runs").iterdir()]
    # Each has its own directory. None is hidden, nested, like an option, or in need of quotes.
    assert len(folders) == 2 * len(NAMES) + 1
    assert not [name for name in folders if name[0] in ".-" or set(name) & set("/*[]$;' \n")]


def apart(world: Any, folder: Path) -> list[Any]:
    rank = world.place.rank
    trainer = quiet()
    trainer.fit(1)
    (folder / f"r{rank}").mkdir()
    os.chdir(folder / f"r{rank}")
    told = []
    for saves in (lambda: trainer.save("c"), lambda: quiet(checkpoints=nbkit.Checkpoints(every=1, path="c")).fit(1)):
        try:
            saves()
        except TrainingError as error:
            told.append((error.what, error.numbers, error.hint))
    torch.distributed.barrier()  # each rank removes the files that it wrote
    left = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    trainer.save(folder / "whole")
    trainer.save("../whole")  # another path to the same folder
    os.environ["HOME"] = str(folder)
    trainer.save("~/whole")
    assert not Path("~").exists()
    whole = quiet()
    whole.load(folder / "whole")
    return [told, sorted(left), torch.equal(flat(whole.model), flat(trainer.model))]


def test_a_save_into_folders_that_ranks_do_not_share_is_an_error(tmp_path: Path) -> None:
    for told, left, equal in run_ranks(apart, 2, tmp_path):
        assert len(told) == 2 and equal
        for what, numbers, hint in told:
            assert what.startswith("A checkpoint cannot be written here: the ranks do not share this folder")
            paths = [str(tmp_path / f"r{rank}" / "c") for rank in range(2)]
            assert (
                numbers
                == f"rank 0 does not see what rank 1 wrote: rank 0 writes to {paths[0]!r}, rank 1 to {paths[1]!r}"
            )
            assert "/shared" in hint
        assert [path for path in left if "/" in path] == []


class Spoiled(nn.Module):
    """A model with a finite output and an infinite gradient at a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return out + out.pow(2).sum(1, keepdim=True).sqrt()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def spoiled(world: Any, folder: Path, strategy: str) -> dict[str, Any]:
    data = points()
    data[19] = (torch.zeros(6), data[19][1])  # in the third step
    asked: dict[str, Any] = {
        "model": Spoiled,
        "data": data,
        "loading": nbkit.Loading(shuffle=False),
        "strategy": strategy,
    }
    if strategy == "zero3":
        asked["optimizer"] = adam
    # With SGD there is only one tensor. Rank 0 writes it, and rank 1 has nothing to write.
    trainer = quiet(**asked, checkpoints=nbkit.Checkpoints(every=1, path=folder / "auto"))
    told: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        with pytest.raises(NotFinite) as raised:
            trainer.fit(6)
        error = raised.value
        told["error"] = error.what, error.numbers, error.hint, error.spoiled
        with pytest.raises(TrainingError) as refused:
            trainer.save(folder / "auto")
        told["refused"] = refused.value.what, refused.value.numbers
    told["printed"] = printed.getvalue()
    trainer.load(folder / "auto")
    told["step"] = trainer.step
    told["finite"] = all(bool(value.isfinite().all()) for value in trainer.full_state_dict().values())
    frozen = quiet()
    with torch.no_grad():
        frozen.model[3].bias.requires_grad_(False).fill_(-torch.inf)  # like a mask
    frozen.save(folder / "frozen")
    return told


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_weights_that_are_not_finite_are_not_saved_and_no_sample_is_blamed(tmp_path: Path, strategy: str) -> None:
    first, second = run_ranks(spoiled, 2, tmp_path, strategy)

    for told in (first, second):
        what, numbers, hint, lost = told["error"]
        assert what == "The loss of step 4 is not finite on ranks 0, 1, because the weights are not." and lost
        assert numbers.startswith("layer.weight on rank") and "not been touched" not in numbers
        assert "a step up to 3 had a finite loss, but gradients that were not; step 3: rank 0: samples 16," in numbers
        assert hint.startswith(f"trainer.load({str(tmp_path / 'auto')!r}), of step 2;")
        assert told["refused"][0].startswith("The weights are not finite, so this checkpoint is not written")
        assert "step 3: layer.weight on rank" in told["refused"][1]
        assert (told["step"], told["finite"]) == (2, True)
    assert "not saved at step 3, training continues: The weights are not finite" in first["printed"]
