"""Test that when runs take max_disk, no run begins, no checkpoint is written, and a message names what to delete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs import quiet
from ranks import run_ranks

from nbkit.errors import TrainingError
from nbkit.rank.train import runs_dir

OLD = 3_000_000


def refused(act: Any) -> list[str]:
    try:
        act()
    except TrainingError as error:
        return [error.what, error.numbers, error.hint]
    return []


def filled(world: Any, runs: Path) -> list[Any]:
    runs_dir.MAX_BYTES = OLD
    trainer = quiet(log_dir=str(runs), name="going")
    trainer.fit(1)
    roomy = refused(lambda: trainer.save(runs / "going" / "checkpoint"))
    if trainer.job.rank == 0:
        (runs / "old").mkdir()
        (runs / "old" / "weights").write_bytes(b"0" * OLD)
    full = refused(lambda: trainer.save(trainer.run_dir / "second"))
    elsewhere = refused(lambda: trainer.save(runs.parent / "elsewhere"))
    begun = refused(lambda: quiet(log_dir=str(runs)))
    other = refused(lambda: quiet(log_dir=str(runs.parent / "others")))
    trainer.fit(1)
    return [roomy, full, elsewhere, begun, other, (trainer.run_dir / "second").exists(), trainer.step]


def test_a_full_folder_of_runs_refuses_a_checkpoint_and_a_run_on_every_rank(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first, second = run_ranks(filled, 2, runs)

    assert first == second
    roomy, full, elsewhere, begun, other, written, steps = first
    assert roomy == elsewhere == other == [] and not written and steps == 2
    assert full[0] == "The folder of runs is full: no checkpoint is written."
    assert f" MB in {runs}, max_disk is 3 MB; the largest: old 3 MB, going" in full[1]
    assert full[2] == begun[2] == f"!rm -r {runs / 'old'}   if you no longer need it"
    assert begun[0] == "The folder of runs is full: no run can begin."
    assert sorted(each.name for each in runs.iterdir()) == ["going", "going-dp2-b8", "old"]


def alone_and_full(world: Any, runs: Path) -> list[str]:
    runs_dir.MAX_BYTES = 1
    return refused(lambda: quiet(log_dir=str(runs)).save(runs / "kept"))


def test_a_run_that_fills_the_folder_itself_gets_another_hint(tmp_path: Path) -> None:
    ((what, numbers, hint),) = run_ranks(alone_and_full, 1, tmp_path)

    assert "no checkpoint" in what and "max_disk is 1e-06 MB" in numbers
    assert hint == f"trainer.save(...)   with a path outside of {tmp_path}"
