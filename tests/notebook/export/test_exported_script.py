"""Test that an exported script has the losses of its notebook, under torchrun and without Jupyter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from clusters import end_clusters
from forked_parents import forked_parents_of_kernels

from nbkit.notebook.headless import Headless, text_of

TRAINING = """
%time import time
from torch.nn import functional as F

def make(strategy):
    return nbkit.Trainer(
        model=lambda: nbkit.GPT(nbkit.GPTConfig(block=16, layers=2, width=32, dropout=0.1)),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
        data=nbkit.TextDataset(block=16, limit=20_000),
        batch_size=8,
        clip_norm=1.0,
        callbacks=[lambda *_: time.sleep(0.04)],
        log_dir=None,
        progress=False,
        strategy=strategy,
        checkpoints=nbkit.Checkpoints(every=False),
        compute=nbkit.Compute(microbatch_size=2),
    )

# Never switched.
first = make("zero1")
first.fit(STEPS // 5)
"""
MADE = TRAINING[TRAINING.index("    return") : TRAINING.index("# Never")].replace("\n    ", "\n").strip()
SWITCHED = MADE.replace("return", "trainer =").replace("strategy=strategy,", 'strategy="ddp",  # to begin with')
# The script keeps these old keywords.
SWITCHED = SWITCHED.replace("compute=nbkit.Compute(microbatch_size=2)", "microbatch_size=2")
SWITCHED = SWITCHED.replace("checkpoints=nbkit.Checkpoints(every=False)", "save_every=False")
LOSSES = """
%%rank 0
import json
for one in (first, trainer):
    print(json.dumps([[record["loss"].hex(), record["strategy"]] for record in one.history]))
"""
CELLS = (
    "%load_ext nbkit\nSTEPS, LR = 25, 2e-3",
    "%cluster start -n 2 --cpu --ttl 60",
    "%push STEPS LR",
    f"%%distributed\n{TRAINING}",
    f"%%distributed\n{SWITCHED}",
    "%%distributed --detach\ntrainer.fit(STEPS)",
    "import math",
    "%train pause",
    "%strategy zero3",
    "%train resume",
    "%train wait",
    LOSSES.strip(),
    "%nbkit export live.py",
)
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("IPython", "ipykernel", "ipyparallel", "jupyter_client", "ipywidgets", "zmq"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocker())
"""


@dataclass(frozen=True)
class Ran:
    """A notebook that ran in `folder`. cells: with outputs. losses: (loss, strategy) of each step of both trainings."""

    folder: Path
    cells: list[dict[str, Any]]
    losses: list[list[tuple[str, str]]]


def losses_in(text: str) -> list[list[tuple[str, str]]]:
    lines = (line.removeprefix("[0] ") for line in text.splitlines())
    return [[(loss, strategy) for loss, strategy in json.loads(line)] for line in lines if line.startswith("[[")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("export")
    made: dict[str, Any] = {"cell_type": "code", "metadata": {}, "execution_count": None}
    cells = [{**made, "id": f"c{i}", "outputs": [], "source": source} for i, source in enumerate(CELLS)]
    notebook: dict[str, Any] = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
            patch.setenv(name, str(folder / name))
        try:
            forked = forked_parents_of_kernels(folder / "IPYTHONDIR")
            with forked, Headless(folder, lambda cell, text: None) as kernel:
                kernel.run(notebook)
            (folder / "saved.ipynb").write_text(json.dumps(notebook))
            yield Ran(folder, cells, losses_in(text_of(cells[CELLS.index(LOSSES.strip())])))
        finally:
            end_clusters(folder / "NBKIT_HOME")


def torchrun(folder: Path, script: str, *arguments: str) -> str:
    (folder / "blocked").mkdir(exist_ok=True)
    (folder / "blocked" / "sitecustomize.py").write_text(BLOCKED)
    path = os.pathsep.join([str(folder / "blocked"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_script_has_the_losses_of_the_notebook_with_its_switch(ran: Ran) -> None:
    script = (ran.folder / "live.py").read_text()
    switched = [strategy for _, strategy in ran.losses[1]]

    assert [len(losses) for losses in ran.losses] == [5, 25]
    assert len(set(switched)) == 2, "no switch in the middle"
    assert losses_in(torchrun(ran.folder, "live.py", "--switches", "live.switches.json")) == ran.losses
    assert "# Never switched.\nfirst = make(" in script
    assert "strategy=args.strategy,  # to begin with\n    switches=args.switches,\n" in script
    assert 'parser.add_argument("--strategy", default="zero3"' in script


def test_the_saved_notebook_gives_the_same_script_and_the_same_plan(ran: Ran) -> None:
    command = [sys.executable, "-m", "nbkit", "export", "saved.ipynb", "saved.py"]
    done = subprocess.run(command, cwd=ran.folder, capture_output=True, text=True)

    def body(name: str) -> str:
        return (ran.folder / name).read_text().partition("import argparse")[2].replace(name, "")

    assert done.returncode == 0, done.stderr
    assert body("saved.py") == body("live.py")
    assert (ran.folder / "saved.switches.json").read_text() == (ran.folder / "live.switches.json").read_text()
    assert "torchrun --nproc-per-node 2 saved.py --switches saved.switches.json" in done.stdout


def test_lines_that_are_left_out_are_listed(ran: Ran) -> None:
    header = (ran.folder / "live.py").read_text().partition("import argparse")[0]

    assert "#   cell 2   %cluster start -n 2 --cpu --ttl 60\n" in header
    assert "#   cell 7   import math   (ran in the notebook alone)\n" in header
    assert "#   cell 9   %strategy zero3\n" in header
    assert "%push" not in header
    assert "live.py   4 cells for the ranks, 8 lines of the notebook left out" in str(ran.cells[-1]["outputs"])
