"""Test that launchers of libraries run their function on the existing ranks, with the same losses as torchrun."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from nbkit import Cluster
from nbkit.errors import CellError
from tests.bridge.test_programs import PROGRAMS, under_torchrun

LAUNCHES = """
from accelerate import Accelerator, notebook_launcher
import os

def train(factor):
    accelerator = Accelerator(cpu=True)
    mine = torch.tensor(float(factor * (accelerator.process_index + 1)))
    sums.append((accelerator.num_processes, accelerator.reduce(mine).item(), os.environ["MASTER_PORT"] == port))

port, sums = os.environ["MASTER_PORT"], []
"""


def test_notebook_launcher_runs_a_function_on_the_ranks_and_works_repeatedly(
    two: Cluster,
) -> None:
    cell = LAUNCHES + "for factor in (1, 10):\n    notebook_launcher(train, (factor,), num_processes=2)\n"
    # Accelerate's own port, 29500, is for processes that it would start.
    assert two.run(cell + "sums").values == {0: [(2, 3.0, True), (2, 30.0, True)], 1: [(2, 3.0, True), (2, 30.0, True)]}
    assert two.run("os.environ['MASTER_PORT'] == port, 'NPROC' in os.environ").values[1] == (True, False)
    assert two.run("y = torch.ones(1); dist.all_reduce(y); y.item()").values == {0: 2.0, 1: 2.0}


def test_an_error_in_the_launched_function_fails_the_cell_with_its_line(two: Cluster) -> None:
    cell = LAUNCHES + "def bad():\n    raise ValueError('no such model')\nnotebook_launcher(bad, num_processes=2)"
    # A rank may be released before it reaches the error, so the error may come from one rank or from both.
    with pytest.raises(CellError, match=r"(Ranks 0-1|Rank [01]) failed: ValueError: no such model"):
        two.run(cell)
    # The next launch works.
    assert two.run(LAUNCHES + "notebook_launcher(train, (1,), num_processes=2); len(sums)").values == {0: 1, 1: 1}


def test_a_wrong_number_of_processes_is_refused_with_what_to_write(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CellError, match="runs its function on the ranks that are there"):
        two.run(LAUNCHES + "notebook_launcher(train, (1,), num_processes=3)")
    said = "".join(capsys.readouterr())
    assert "3 processes asked for, 2 ranks there" in said and "num_processes=2" in said
    assert two.run("sums").values == {0: [], 1: []}


def test_debug_launcher_and_elastic_launch_run_on_the_existing_ranks(two: Cluster) -> None:
    assert two.run(
        LAUNCHES + "from accelerate import debug_launcher\ndebug_launcher(train, (1,), num_processes=2)\nsums"
    ).values == {0: [(2, 3.0, True)], 1: [(2, 3.0, True)]}
    cell = (
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend='c10d')\n"
        "elastic_launch(config, lambda base: base + dist.get_rank())(40)"
    )
    assert two.run(cell).values == {0: {0: 40}, 1: {1: 41}}


SCRIPT = """
import os, sys
from accelerate import Accelerator
if sys.argv[1:]:
    os.environ["ACCELERATE_MIXED_PRECISION"] = sys.argv[1]  # as transformers 4 does for bf16=True
accelerator = Accelerator(cpu=True)
"""


def test_a_script_does_not_see_the_precision_of_the_previous_script(two: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    two.run(f"import os; os.environ['ACCELERATE_LOG_LEVEL'] = 'error'\n%run {script} bf16\nfirst = accelerator")
    used = two.run("accelerator.state.mixed_precision, accelerator.reduce(torch.ones(1)).item()").values
    assert used[0] == ("bf16", 2.0)  # cells can use objects of the script

    two.run(f"%run {script}")

    found = two.run("[each.state.mixed_precision for each in (first, accelerator)]").values
    assert found == {0: ["bf16", "no"], 1: ["bf16", "no"]}
    left = two.run("{name: os.environ.pop(name) for name in [*os.environ] if name.startswith('ACCELERATE_')}").values
    assert left[1] == {"ACCELERATE_LOG_LEVEL": "error"}


LIGHTNING = '''
"""The launcher of a strategy that starts processes, as in Lightning: it forks, and reads what rank 0 has put."""
import torch.multiprocessing as mp


class _MultiProcessingLauncher:
    def __init__(self, strategy):
        self._strategy = strategy

    def launch(self, function, *args, trainer=None, **kwargs):
        queue = mp.get_context("fork").SimpleQueue()
        mp.start_processes(
            self._wrapping_function, (function, args, kwargs, queue), self._strategy.num_processes, start_method="fork"
        )
        return queue.get()

    def _wrapping_function(self, index, function, args, kwargs, queue):
        result = function(*args, **kwargs)
        if index == 0:
            queue.put(result)
'''


@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning_fabric"])
def test_strategies_that_start_processes_use_the_existing_ranks(
    two: Cluster, package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This module replaces Lightning, which may not be installed: `import` takes what is first in sys.path.
    folder = tmp_path.joinpath(*package.split("."), "strategies", "launchers")
    folder.mkdir(parents=True)
    (folder / "multiprocessing.py").write_text(LIGHTNING)
    launch = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from {package}.strategies.launchers.multiprocessing import _MultiProcessingLauncher as Launcher\n"
        "sys.path.pop(0)\n"
        "from types import SimpleNamespace as Strategy\n"
        "def fit(base):\n    return base + dist.get_rank(), os.getpid() == here\n"
        "import os; here = os.getpid()\n"
    )
    options = ", trainer=None" if "pytorch" in package else ""  # only the launcher of the Trainer takes it
    cell = launch + "Launcher(Strategy(num_processes={}, num_nodes=1)).launch(fit, 40" + options + ")"
    assert two.run(cell.format(2)).values == {0: (40, True), 1: (41, True)}
    with pytest.raises(CellError):
        two.run(cell.format(4))
    said = "".join(capsys.readouterr())
    assert "4 processes asked for, 2 ranks there" in said and "devices=2, num_nodes=1" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("accelerate_loop", "--notebook_launcher 2"),
        *(
            (name, f"--strategy ddp_{how}")
            for name in ("lightning_fit", "fabric_loop")
            for how in ("notebook", "spawn")
        ),
    ],
)
def test_losses_of_launched_programs_equal_those_under_torchrun(
    two: Cluster, name: str, option: str, tmp_path: Path
) -> None:
    if name != "accelerate_loop" and importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    program, losses = PROGRAMS / f"{name}.py", tmp_path / "losses"
    expected = under_torchrun(program, tmp_path / "expected")

    two.run(f"%run {program} --losses {losses} {option}")

    assert ast.literal_eval(losses.read_text()) == expected
