"""Test that a checkpoint written by a thread has the state of its step, and resume finds the newest good one."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import flat, net, quiet
from ranks import run_ranks

import nbkit
from nbkit.errors import TrainingError, UsageError
from nbkit.rank.train.checkpoint.autosave import Keep, found


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(folder: Path, keep: int | None = None, **changed: Any) -> Any:
    saves = nbkit.Checkpoints(every=2, path=folder, keep=keep)
    return quiet(model=lambda: net(dropout=0.5), optimizer=adamw, checkpoints=saves, **changed)


def plain(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def beside(world: Any, folder: Path) -> dict[str, Any]:
    from nbkit.rank.train.checkpoint import dcp_io

    rank, write = world.place.rank, dcp_io.DcpWriter.write
    go, order, printed = threading.Event(), list[Any](), io.StringIO()

    def late(writer: Any, planner: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        go.wait()
        order.append("written")
        return write(writer, planner)

    def full(writer: Any, planner: Any) -> Any:
        if rank == 1:
            raise OSError("the disk is full")
        return write(writer, planner)

    def record(trainer: Any, record: dict[str, Any]) -> None:
        order.append(record["step"])
        if record["step"] == 3:
            go.set()

    class Saves:
        def write(self, event: dict[str, Any]) -> None:
            if event["kind"] == "checkpoint":
                order.append(event["path"][-6:])

    told: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        whole = trained(folder / "kept", callbacks=[record], keep=2)
        whole.job.ledger.bus.add(Saves())
        dcp_io.DcpWriter.write = late  # type: ignore[method-assign]
        whole.fit(4)
        dcp_io.DcpWriter.write = full  # type: ignore[method-assign]
        whole.fit(2)  # the save at step 6 fails
        dcp_io.DcpWriter.write = write  # type: ignore[method-assign]
        whole.fit(4)
        told["order"] = order
        torch.distributed.barrier()  # now rank 0 has deleted the old checkpoints
        told["kept"] = sorted(path.name for path in (folder / "kept").iterdir())
        torch.distributed.barrier()
        told["last"] = str(whole.saves.last.path), whole.saves.last.step
        if rank == 0:
            path = folder / "kept" / "step-10"
            chunk = dcp_io.DcpReader(path).tensors["weight/0.weight"].chunks[0]
            with (path / chunk.file).open("r+b") as file:
                file.seek(chunk.start)
                file.write(b"x")
            (folder / "kept" / "step-12").mkdir()
        torch.distributed.barrier()
        again = trained(folder / "kept", seed=9)
        told["resumed"] = [record["step"] for record in again.fit(until=12, resume="auto")]
        again.fit(1, resume="auto")  # this one has begun, so it goes on from its own step
        whole.fit(3)
    told["same"] = plain(whole.history) == plain(again.history), torch.equal(flat(whole.model), flat(again.model))
    told["printed"] = printed.getvalue()
    return told


def test_a_checkpoint_written_during_training_has_the_state_of_its_step(tmp_path: Path) -> None:
    first, second = run_ranks(beside, 2, tmp_path, timeout=120)

    for each in (first, second):
        # Steps went on while the first save waited; the next save waits for the first.
        order = each["order"]
        assert order.index(3) < order.index("written") < order.index("step-2") < order.index("step-4")
        assert each["kept"] == ["step-10", "step-8"] and each["last"] == (str(tmp_path / "kept" / "step-10"), 10)
        # The save at step 6 failed on one rank, and that of step 10 is damaged, so training resumes from step 8.
        assert each["resumed"] == [9, 10, 11, 12] and each["same"] == (True, True)
    assert second["printed"] == ""
    said = [" ".join(line.split()) for line in first["printed"].split("\r")[1:]]
    assert said[0].startswith("not saved at step 6, training continues: The checkpoint ")
    assert "could not be written. rank 1: OSError: the disk is full (" in said[0]
    passed = f"{tmp_path}/kept/step-12 is skipped: rank 0: FileNotFoundError", f"{tmp_path}/kept/step-10 is skipped"
    assert all(one.startswith(other) for one, other in zip(said[1:3], passed, strict=True))
    assert ".distcp is damaged: " in said[2]
    assert said[3:] == [f"continues from step 8: {tmp_path}/kept/step-8"]


def nowhere(world: Any, folder: Path) -> list[Any]:
    printed, told = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        for asked, settings in (("auto", {}), ("yes", {"checkpoints": nbkit.Checkpoints(path=folder / "a", every=9)})):
            with pytest.raises(TrainingError) as refused:
                quiet(**settings).fit(1, resume=asked)
            told.append(str(refused.value))
        runs = []
        for number in range(2):  # two runs of the same name, in two directories
            trainer = quiet(log_dir=str(folder / "runs"), name="gpt", checkpoints=nbkit.Checkpoints(every=2))
            runs.append(trainer.run_dir)
            told.append([record["step"] for record in trainer.fit(until=4 + number, resume="auto")])
        with pytest.raises(TrainingError) as refused:
            other = quiet(
                model=lambda: torch.nn.Linear(6, 3), checkpoints=nbkit.Checkpoints(path=runs[0] / "checkpoint", every=9)
            )
            other.fit(1, resume="auto")
        told.append(str(refused.value))
    return [*told, f"continues from step 4: {runs[0]}/checkpoint" in printed.getvalue(), printed.getvalue()]


def test_resume_auto_continues_an_earlier_run_of_the_same_name(tmp_path: Path) -> None:
    ((unnamed, unknown, first, second, other, went_on, printed),) = run_ranks(nowhere, 1, tmp_path)

    assert "name='gpt'" in unnamed and "resume='yes' is not possible" in unknown and "another model" in other
    assert (first, second) == ([1, 2, 3, 4], [5])
    assert went_on and printed.startswith("\rthere is no checkpoint yet")


def test_keep_limits_checkpoints_by_number_and_age(tmp_path: Path) -> None:
    def kept(asked: Any) -> list[str]:
        for number in range(1, 6):
            (tmp_path / f"step-{number}").mkdir(exist_ok=True)
            (tmp_path / f"step-{number}" / ".metadata").touch()
            os.utime(tmp_path / f"step-{number}" / ".metadata", (0, time.time() - 3600 * (5 - number)))
        limits = nbkit.Checkpoints(keep=asked).limits
        assert limits is not None
        Keep(*limits).prune(tmp_path, tmp_path / "step-5")
        return [path.name[5:] for path in found([tmp_path])]

    (tmp_path / "step-mine").mkdir()
    (tmp_path / "step-0").mkdir()  # an interrupted save
    assert kept(2) == ["5", "4"] and kept(1) == ["5"] and kept("150min") == ["5", "4", "3"]
    assert kept((4, "150min")) == ["5", "4", "3"] and kept((2, "1d")) == ["5", "4"] and kept("1min") == ["5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5", "step-mine"]
    with pytest.raises(TrainingError, match="keep=0"):
        nbkit.Checkpoints(keep=0)
    with pytest.raises(UsageError, match="soon"):
        nbkit.Checkpoints(keep="soon")
