"""Test the sbatch files with replacements of Slurm's commands, which run them on this machine."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nbkit
from nbkit.commands import main
from nbkit.notebook.export.sbatch_file import SlurmOptions, script_job

STAND_INS = {
    "sbatch": "shift; export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1; "
    'export SLURM_NNODES=$(sed -n "s/^#SBATCH --nodes=//p" "$1"); bash "$@" >job.log 2>&1; echo 7',
    "scontrol": "echo localhost",
    "srun": 'for node in $(seq "$SLURM_NNODES"); do "$@" & done; wait',
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def notebook(folder: Path, *sources: str, name: str = "my lesson") -> None:
    cells = [{"cell_type": "code", "metadata": {}, "source": source, "outputs": []} for source in sources]
    (folder / f"{name}.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_sbatch_file_of_a_script_starts_its_ranks_and_passes_arguments(nodes: int, slurm: Path) -> None:
    start = f"%cluster start --slurm -n 2 --nodes {nodes}"
    notebook(slurm, start, "STEPS = 3\n%push STEPS", "%%rank 1\nprint('steps', STEPS, 'of', world_size)")
    script = nbkit.export("my train.py", "my lesson.ipynb", slurm=True, time="1:00")

    subprocess.run(["sbatch", "--parsable", "my train.sbatch", "--steps", "4"], check=True, capture_output=True)

    assert "steps 4 of 2\n" in Path("job.log").read_text()
    assert "sbatch 'my train.sbatch'" in repr(script)


def test_a_notebook_is_submitted_with_its_parameters(slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notebook(slurm, "WORD = 'old'  # said", "print(WORD)")

    assert main(["submit", "my lesson.ipynb", "-p", "WORD=it's", "--slurm", "--gpus", "2"]) == 0

    (ran,) = slurm.glob("my lesson-7.ipynb")
    assert json.loads(ran.read_text())["cells"][1]["outputs"][0]["text"] == "it's\n"
    assert "#SBATCH --gpus-per-node=2\n" in Path("my lesson.sbatch").read_text()
    assert "job 7, from my lesson.sbatch" in capfd.readouterr().out


def test_a_job_that_slurm_refuses_and_a_missing_slurm_are_reported(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    notebook(slurm, "1")
    (slurm / "bin" / "sbatch").write_text("#!/bin/bash\necho 'invalid partition specified: gpu' >&2; exit 1\n")
    refused = main(["submit", "my lesson.ipynb", "--slurm", "--partition", "gpu"])
    monkeypatch.setenv("PATH", str(slurm))
    missing = main(["submit", "my lesson.ipynb", "--slurm"])
    said = capfd.readouterr().err

    assert (refused, missing) == (1, 2)
    assert "Slurm has refused the job.\ninvalid partition specified: gpu" in said
    assert "There is no sbatch on this machine." in said


NAMES = [
    "two words",
    "new\nline",
    "a\n#SBATCH --exclusive",
    "it's",
    '"b"',
    "$(touch made)",
    "c;touch made",
    "-rf",
    "%j",
    "größe",
    "d\\e",
    '"""; assert 0; """',
]


def test_odd_file_names_are_quoted_and_add_no_lines_to_a_batch_script(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # This srun writes its arguments into a file for each job.
    (slurm / "bin" / "srun").write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.dump(sys.argv[1:], open(os.environ['SRUN'], 'w'))\n"
    )
    (slurm / "bin" / "sbatch").write_text(
        f'#!/bin/bash\n[ $# = 2 ] && [ -f "$2" ] || exit 1\n{STAND_INS["sbatch"].replace("job.log", "/dev/null")}\n'
    )
    for number, name in enumerate(NAMES):
        notebook(slurm, "%cluster start -n 2", "WORD = 'old'", "%%distributed\nprint(1)", name=name)
        monkeypatch.setenv("SRUN", str(slurm / f"srun-{number}.json"))

        assert main(["submit", "-p", f"WORD={name}", "--slurm", "--", f"{name}.ipynb"]) == 0
        script = nbkit.export(f"{name}.py", f"{name}.ipynb", slurm=True)
        submitted = json.loads((slurm / f"srun-{number}.json").read_text())
        typed = script.beside[-1][1].replace("sbatch ", "sbatch --parsable ", 1)
        subprocess.run(["bash", "-c", typed], check=True, stdout=subprocess.DEVNULL)
        exported = json.loads((slurm / f"srun-{number}.json").read_text())

        file = f"./{name}" if name.startswith("-") else name
        words = [sys.executable, "-P", "-m", "nbkit", "submit", f"{file}.ipynb", "-p", f"WORD={name}"]
        assert submitted == [*words, "--output", f"{file}-7.ipynb"]
        assert exported[-1] == f"{file}.py"
        compile(Path(f"{name}.py").read_text(), "script", "exec")
        for batch in (Path(f"{name}.sbatch").read_text(), script_job("train.py", name, 2, SlurmOptions())):
            # Slurm stops at the first line that is neither empty nor a comment.
            comments = itertools.takewhile(lambda line: not line or line[0] == "#", batch.splitlines()[1:])
            asked = [line for line in comments if line.startswith("#SBATCH")]
            assert asked and all(re.fullmatch(r"#SBATCH --[\w-]+=[\w.%=+@,-]+", line) for line in asked)
    assert not (slurm / "made").exists() and capfd.readouterr().err == ""
