"""A script whose job is put back in the queue goes on from the checkpoint that it made when it was told to end."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from slurm_nodes import SlurmNodes, scontrol_that_knows_hosts
from waiting import until

import nbkit
from nbkit.errors import UsageError

TRAINER = """
import json, os, time
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

def paced(trainer, record):
    print("step", record["step"], flush=True)
    time.sleep(PAUSE)

trainer = nbkit.Trainer(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), loss=F.mse_loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    data=[(x[i], x[i].sum().tanh().reshape(1)) for i in range(64)], batch_size=8, strategy="zero1",
    callbacks=[paced], log_dir=None, checkpoints=nbkit.Checkpoints(path=FOLDER, every=100_000), progress=False,
)
"""
LAST = 40
# Longer in all than the time until Slurm's signal; what is left afterwards takes no time.
PAUSE_UNTIL_SAVED = "5 if not os.path.isdir(FOLDER) else 0"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder to submit from. There the names of the nodes are names of hosts, both of them this machine."""
    monkeypatch.setenv("PATH", str(scontrol_that_knows_hosts(tmp_path)), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def notebook(folder: Path, *cells: str) -> str:
    made = [{"cell_type": "code", "metadata": {}, "source": source, "outputs": []} for source in cells]
    (folder / "lesson.ipynb").write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4}))
    return "lesson.ipynb"


def fit(folder: Path, pause: float | str) -> str:
    source = TRAINER.replace("PAUSE", str(pause)).replace("FOLDER", repr(str(folder / "saved")))
    write = f"if rank == 0:\n    json.dump(trainer.history, open({str(folder / 'history.json')!r}, 'w'))\n"
    return f'{source}trainer.fit(until={LAST}, resume="auto")\n{write}'


def alone(world: Any, folder: str) -> list[float]:
    """Return the losses of a training of one process that nobody ends."""
    import torch

    names: dict[str, Any] = {"torch": torch, "nbkit": nbkit}
    exec(TRAINER.replace("PAUSE", "0").replace("FOLDER", repr(folder)), names)
    return [record["loss"] for record in names["trainer"].fit(LAST)]


def assert_goes_on(slurm: SlurmNodes, job: str, folder: Path, log: Path, *, by_hand: bool = True) -> None:
    """Check that `job`, told to end after some steps, waits in the queue, and then makes the steps that are left.

    by_hand: send the signal from here; else Slurm sends it, near the limit.
    """
    until(lambda: "step 5\n" in log.read_text())
    if by_hand:
        slurm.command("scancel", "--batch", "--signal=USR2", job)
    until(lambda: slurm.jobs() == [f"{job} PENDING"])
    until(lambda: (folder / "saved").is_dir())
    found = re.search(r"has ended after step (\d+), saved to", log.read_text())
    assert found and int(found[1]) < LAST
    # Slurm's own pause is two minutes; without one it takes the job for the one that it has just ended.
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    until((folder / "history.json").exists)
    until(lambda: not slurm.jobs())
    assert "step 1\n" not in log.read_text().split(found[0])[1]  # not from the start
    losses = [record["loss"] for record in json.loads((folder / "history.json").read_text())]
    (expected,) = run_ranks(alone, 1, str(folder / "alone"))
    assert losses == pytest.approx(expected, abs=1e-10)


@pytest.mark.long
def test_an_exported_script_goes_on_when_its_job_runs_again(slurm: SlurmNodes, here: Path) -> None:
    lesson = notebook(here, "%cluster start -n 1", "%%distributed\n" + fit(here, 0.4))
    nbkit.export("train.py", lesson, slurm=True, nodes=2, cpus=1, time="30:00", requeue=True)
    job = slurm.command("sbatch", "--parsable", "train.sbatch").strip()
    log = here / f"train-{job}.log"
    until(log.exists)
    assert_goes_on(slurm, job, here, log)


@pytest.mark.long
def test_slurm_itself_signals_a_job_near_its_limit_and_the_script_goes_on(slurm: SlurmNodes, here: Path) -> None:
    lesson = notebook(here, "%cluster start -n 1", "%%distributed\n" + fit(here, PAUSE_UNTIL_SAVED))
    nbkit.export("train.py", lesson, slurm=True, nodes=2, cpus=1, time="3", requeue=True)
    file = here / "train.sbatch"
    assert file.read_text().count("--signal=B:USR2@120") == 1
    file.write_text(file.read_text().replace("USR2@120", "USR2@60"))
    job = slurm.command("sbatch", "--parsable", "train.sbatch").strip()
    log = here / f"train-{job}.log"
    until(log.exists)
    assert_goes_on(slurm, job, here, log, by_hand=False)


@pytest.mark.long
def test_a_notebook_goes_on_when_its_job_runs_again(
    slurm: SlurmNodes, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from nbkit.commands import main

    cells = ("%load_ext nbkit\n%cluster start -n 2 --cpu", "%%distributed\n" + fit(here, 0.4), "%cluster stop")
    words = ["--slurm", "--requeue", "--cpus", "2", "--time", "30:00", "--output", str(here / "run.ipynb")]
    assert main(["submit", notebook(here, *cells), *words]) == 0
    (job,) = (line.split()[0] for line in slurm.jobs())
    log = here / f"lesson-{job}.log"
    until(log.exists)
    assert_goes_on(slurm, job, here, log)


def test_what_would_begin_anew_is_not_put_back_in_the_queue(here: Path) -> None:
    lesson = notebook(here, "%cluster start -n 1", "%%distributed\nprint(1)")
    with pytest.raises(UsageError, match="no cell loads its checkpoint") as caught:
        nbkit.export("train.py", lesson, slurm=True, requeue=True)
    assert caught.value.hint == 'trainer.fit(until=1000, resume="auto")'
    assert not Path("train.sbatch").exists()
    with pytest.raises(UsageError, match="for an sbatch file"):
        nbkit.export("train.py", lesson, requeue=True)
