"""Execute the lesson "From a laptop to a cluster" on a Slurm of two nodes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from clusters import assert_gone
from slurm_nodes import SlurmNodes, scontrol_that_knows_hosts

from nbkit.notebook.cluster import registry
from nbkit.notebook.headless import Headless, read_notebook, shown_by, tagged

LESSON = Path(__file__).resolve().parents[2] / "notebooks" / "20_laptop_to_cluster.ipynb"
SMALL = """\
HERE = "-n 2 --cpu --ttl 10min"
THERE = "--slurm -n 4 --nodes 2 --cpu --name lesson20 --ttl 10min"
JOB = "--slurm --nodes 2 --cpus 2 --time 30:00 --requeue"
STEPS, PACE, LOOK = 30, 0.2, 1.0
"""
GUESSES = {"20.1": 2.25, "20.2": 1}
SAID = {
    "laptop": r"30 losses",
    "export": r"sbatch train\.sbatch",
    "ranks": r"rank 1 of 4 is on n1\n(.*\n)*.*rank 2 of 4 is on n2|rank 2 of 4 is on n2\n(.*\n)*.*rank 1 of 4 is on n1",
    "between": r"you said: 2\.25 times · measured: 2\.1\d* times · formula .*: 2\.25 times → Right",
    "taken": r"job \d+ was cancelled[:;] the training has ended after step \d+, saved to .*saved-there",
    "again": r"went on from step [1-9]",
    "resumed": r"dp=4 zero=3 shard=2; dp=2 tp=2; dp=2 pp=2 .*\nyou said: 1 losses · measured: 0 losses → Look again",
    "submitted": r"RUNNING on n\[1-2\]",
    "requeued": r"the training has ended after step \d+, saved to .*saved-job\n0 of 30 losses differ",
}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_lesson_runs_on_this_machine_two_nodes_and_in_a_job(
    slurm: SlurmNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBKIT_GUESSES", json.dumps(GUESSES))
    monkeypatch.setenv("PATH", str(scontrol_that_knows_hosts(tmp_path)), prepend=os.pathsep)
    notebook = read_notebook(LESSON)
    (parameters,) = tagged(notebook, "parameters")
    parameters["source"] = SMALL
    (tmp_path / "reader").mkdir()
    with Headless(tmp_path / "reader", lambda cell, text: None) as kernel:
        kernel.run(notebook)  # raises for the first cell that fails
    for tag, words in SAID.items():
        (cell,) = tagged(notebook, tag)
        assert re.search(words, shown_by(cell)), (tag, shown_by(cell))
    assert registry.entries() == []
    assert_gone(slurm.jobs)
