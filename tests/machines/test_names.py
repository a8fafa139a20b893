"""Test that Slurm itself runs jobs of notebooks and clusters with any characters in names and folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_nodes import SlurmNodes
from waiting import until

from nbkit.commands import main

NAME = "it's $(touch made);\n#SBATCH --exclusive\n%j -größe"


def test_slurm_runs_a_notebook_with_any_characters_in_its_name(
    slurm: SlurmNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [{"cell_type": "code", "metadata": {}, "source": "W = ''\nprint(W)", "outputs": []}]
    Path(f"{NAME}.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))

    assert main(["submit", f"{NAME}.ipynb", "-p", f"W={NAME}", "--slurm", "--partition", "small"]) == 0

    said = capsys.readouterr().out
    job = said.split()[1].strip(",")
    kept, log = Path(f"{NAME}-{job}.ipynb"), Path(f"it_s_touch_made_SBATCH_--exclusive_j_-größe-{job}.log")
    asked = slurm.command("scontrol", "show", "job", job)
    until(lambda: f"JobId={job}" not in slurm.command("squeue", "-h", "-o", "JobId=%i", "-j", job), 100)
    assert json.loads(kept.read_text())["cells"][0]["outputs"][0]["text"] == f"{NAME}\n"
    assert f"{log}" in said and log.exists() and not Path("made").exists()
    assert "OverSubscribe=" in asked and "OverSubscribe=NO" not in asked  # --exclusive would set it to NO
