"""Test the script of a saved notebook, and which notebooks are refused."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nbkit
from nbkit.errors import UsageError

TRAINER = "%%distributed\ntrainer = nbkit.Trainer(model=m, data=d, strategy='zero1')"


def saved(folder: Path, *sources: str, outputs: dict[int, dict[str, Any]] | None = None) -> Path:
    """Save a notebook of these cells. A cell that begins with "# " is markdown. outputs: cell -> its only output."""
    cells: list[dict[str, Any]] = []
    for number, source in enumerate(sources):
        kind = "markdown" if source.startswith("# ") else "code"
        stored = [outputs[number]] if outputs and number in outputs else []
        cells.append({"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True), "outputs": stored})
    (folder / "lesson.ipynb").write_text(json.dumps({"cells": cells}))
    return folder / "lesson.ipynb"


def exported(folder: Path, *sources: str, outputs: dict[int, dict[str, Any]] | None = None) -> str:
    nbkit.export(folder / "train.py", saved(folder, *sources, outputs=outputs))
    text = (folder / "train.py").read_text()
    ast.parse(text)
    return text


def refused(folder: Path, *sources: str) -> str:
    with pytest.raises(UsageError) as error:
        exported(folder, *sources)
    assert not (folder / "train.py").exists()
    return str(error.value)


def test_cells_are_copied_unchanged_into_sections_with_their_headings(tmp_path: Path) -> None:
    text = exported(
        tmp_path,
        "# The data",
        "%%distributed\n\n# Why: it is small.\nx = [\n    1,  # one\n]\n\n\ny = '''a\n%b\n'''\n",
        "%%rank 0\ntext = '''first\nsecond'''\nprint(x, text)",
        "%%distributed --ranks 0,2-3 --detach\nfor one in x:\n    print(one)",
    )
    sections = text.partition("\n# %% ")[2]

    assert sections == (
        "cell 1: The data\n# Why: it is small.\nx = [\n    1,  # one\n]\n\n\ny = '''a\n%b\n'''\n"
        "\n\n# %% cell 2\nif rank == 0:\n    text = '''first\nsecond'''\n    print(x, text)\n"
        "\n\n# %% cell 3\nif rank in (0, 2, 3):\n    for one in x:\n        print(one)\n"
    )


def test_magics_are_removed_but_the_statements_that_they_time_stay(tmp_path: Path) -> None:
    text = exported(
        tmp_path,
        "%%distributed\n%%time\n%matplotlib inline\nfrom IPython.display import display\n!ls it's\n"
        "for i in range(3):\n    !echo {i}\n    %time print(i)\ndisplay(i)  # shown\nplt.show()\ntorch?\nfiles = !ls\n"
        "left = 7 \\\n    % 4",
        "%%distributed\n%%bash\nls",
        "%%distributed --at-step\ntrainer.lr = 1",
    )
    header, _, body = text.partition("import argparse")

    assert body.partition("# %% cell 1\n")[2] == "for i in range(3):\n    pass\n    print(i)\nleft = 7 \\\n    % 4\n"
    for line in ("%%time", "!ls it's", "files = !ls", "display(i)  # shown", "%%bash"):
        assert f"   {line}\n" in header
    assert "%%distributed --at-step | trainer.lr = 1 …   (ran inside a training (--at-step))\n" in header


def test_pushed_values_become_arguments_of_their_types(tmp_path: Path) -> None:
    text = exported(
        tmp_path,
        "STEPS, RATE = 2 * 150, -1e-3  # many\nNAME: str = 'it'\nFAST = True\nSIZES = [1, (2, None)]",
        "%push STEPS RATE NAME FAST SIZES",
        "STEPS, MORE = 7, 1\n%push STEPS MORE",
        "%%distributed\nprint(STEPS, RATE, NAME, FAST, SIZES)",
    )
    parsed: dict[str, Any] = {}
    exec(text[text.index("parser = ") : text.index("# What every")].replace("parse_args()", "parse_args(ARGV)"),
         {"argparse": __import__("argparse"), "ast": ast, "ARGV": ["--no-fast", "--sizes", "[3]"]}, parsed)  # fmt: skip

    assert list(vars(parsed["args"]).items()) == [
        ("steps", 300), ("rate", -1e-3), ("name", "it"), ("fast", False), ("sizes", [3]), ("more", 1)
    ]  # fmt: skip
    assert "STEPS = args.steps\nRATE = args.rate\nNAME = args.name\n" in text
    assert "# %% cell 3: pushed\nSTEPS = 7\nMORE = args.more\n" in text


def test_the_last_strategy_is_the_default_and_switches_are_in_a_file(tmp_path: Path) -> None:
    shown = {"output_type": "execute_result", "data": {"text/plain": "dp=2 → dp=2 zero=3 after step 12\n  bytes moved"}}
    text = exported(
        tmp_path,
        "%%distributed\nm = d = None\nargs = 3\nbase = nbkit.Trainer(model=m, data=d)",
        TRAINER,
        "%strategy zero3   # less memory",
        outputs={2: shown},
    )

    assert "trainer = nbkit.Trainer(model=m, data=d, strategy=options.strategy, switches=options.switches)\n" in text
    assert "base = nbkit.Trainer(model=m, data=d)\n" in text
    assert 'add_argument("--strategy", default="zero3"' in text
    assert json.loads((tmp_path / "train.switches.json").read_text()) == {"0": "dp=2", "12": "dp=2 zero=3"}


def test_a_computed_strategy_and_the_trainer_of_another_library_are_kept(tmp_path: Path) -> None:
    script = nbkit.export(
        tmp_path / "train.py",
        saved(
            tmp_path,
            "%%distributed\nfrom transformers import Trainer\nS = 'ddp'\none = Trainer(model=S)\n"
            "job = nbkit.prepare(\n    one,  # the model\n    S,\n    loss=S, strategy=S,\n)",
        ),
    )
    text = script.path.read_text()

    assert "one = Trainer(model=S)\n" in text
    assert "    one,  # the model\n    S,\n    loss=S, strategy=S, switches=args.switches,\n)" in text
    assert "--strategy is left out" in repr(script)


def test_a_failed_cell_is_left_out_and_a_stopped_one_runs_to_its_end(tmp_path: Path) -> None:
    text = exported(
        tmp_path,
        "%%distributed\nx = 1",
        "%%distributed\nx = 1 / 0",
        "%%distributed\nprint(x)",
        outputs={
            1: {"output_type": "error", "ename": "CellError", "traceback": []},
            2: {"output_type": "error", "ename": "CellStopped", "traceback": []},
        },
    )

    assert "#   cell 2   x = 1 / 0   (failed: CellError)\n" in text
    assert "# %% cell 3\n# Somebody stopped it in the notebook; here it runs to its end.\nprint(x)\n" in text


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["import math"], ["has no cell for the ranks", "1 code cells"]),
        (["%%distributed\nname = input('who? ')"], ["Cell 1 cannot be exported", "input()", "no keyboard"]),
        (["%%distributed\nawait later()"], ["Cell 1 cannot be exported", "it awaits"]),
        (["%%distributed\nif True:\nprint(1)"], ["Cell 1 is not Python", "line 2"]),
        (["data = load()\n%push data", "%%distributed\nprint(data)"],
         ["data (cell 2; pushed, and no literal: computed in cell 1: data = load())"]),
        (["import math", "%%distributed\ndef f():\n    return math.pi * unknown"], ["define.\nunknown (cell 2)\n"]),
    ],
)  # fmt: skip
def test_cells_that_a_script_cannot_run_are_refused(cells: list[str], words: list[str], tmp_path: Path) -> None:
    said = refused(tmp_path, *cells)

    assert [word for word in words if word not in said] == []


def test_an_import_of_the_notebook_that_ranks_need_is_in_the_script(tmp_path: Path) -> None:
    own = "%matplotlib inline\nimport math, os.path\nfrom IPython import display\nfrom json import dumps as text"
    notebook = saved(tmp_path, own, "%%distributed\nprint(math.pi, text(3))")

    script = nbkit.export(tmp_path / "train.py", notebook)

    assert (
        "the ranks use it.\nimport math, os.path\nfrom json import dumps as text\n\n\n# %% " in script.path.read_text()
    )
    assert "the ranks need what a cell of the notebook itself imports: import math, os.path; from json" in repr(script)


def test_a_file_that_nbkit_did_not_write_is_not_overwritten(tmp_path: Path) -> None:
    notebook = saved(tmp_path, "%%distributed\nprint(rank)")
    (tmp_path / "mine.py").write_text("x = 1\n")

    with pytest.raises(UsageError, match="nbkit has not written it"):
        nbkit.export(tmp_path / "mine.py", notebook)
    nbkit.export(tmp_path / "train.py", notebook)
    nbkit.export(tmp_path / "train.py", notebook)
    with pytest.raises(UsageError, match="for an sbatch file"):
        nbkit.export(tmp_path / "train.py", notebook, nodes=2)


@pytest.mark.parametrize(
    ("typed", "each"),
    [
        ("-n 8", "nodes=1 8"),
        ("--slurm -n 8 --nodes 2 --name n9 -- --mem=64G -n 3", "nodes=2 4"),
        ("--launcher lsf -n8 --nodes=4", "nodes=4 2"),
        ("--hosts node1:4,node2:4", "nodes=2 4"),
        ("", "nodes=1 2"),
    ],
)
def test_the_job_of_a_saved_notebook_has_the_hosts_that_it_asks_for(typed: str, each: str, tmp_path: Path) -> None:
    nbkit.export(tmp_path / "train.py", saved(tmp_path, f"%cluster start {typed}", "%%distributed\nx = 1"), slurm=True)
    batch = (tmp_path / "train.sbatch").read_text()

    assert " ".join(re.findall(r"nodes=\d+|(?<=--nproc-per-node )\d+", batch)) == each


def test_a_hosts_file_is_searched_in_the_folder_of_the_notebook_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, here = tmp_path / "book", tmp_path / "here"
    for folder, hosts in ((book, "node1 slots=4\nnode2 slots=4\n"), (here, "node1 slots=8\n")):
        folder.mkdir()
        (folder / "hosts.txt").write_text(hosts)
    monkeypatch.chdir(here)
    notebook = saved(book, "%cluster start --hosts hosts.txt", "%%distributed\nx = 1")

    assert "--nnodes 2 --nproc-per-node 4" in nbkit.export("train.py", notebook).run
    (book / "hosts.txt").unlink()
    assert "--nproc-per-node 8" in nbkit.export("train.py", notebook).run


def test_help_of_a_script_for_several_hosts_is_shown_by_one_process(tmp_path: Path) -> None:
    text = exported(tmp_path, "%cluster start --hosts node1:2,node2:2", "%%distributed\nm = d = None", TRAINER)
    (typed,) = (line.strip() for line in text.splitlines() if line.endswith(" --help"))
    shown = subprocess.run(
        [sys.executable, *typed.split()[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert typed == "python train.py --help" and shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage: train.py ") and "--strategy" in shown.stdout


def test_the_lessons_can_be_exported(tmp_path: Path) -> None:
    for path in sorted((Path(nbkit.__file__).parents[1] / "notebooks").glob("*.ipynb")):
        script = nbkit.export(tmp_path / f"lesson{path.stem[:2]}.py", path)
        ast.parse(script.path.read_text())
