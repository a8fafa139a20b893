"""Test that programs written for torchrun run unchanged in a cell by `%run`, with equal losses.

The programs have the structure of real ones, and call their libraries as real ones do. If a library is not installed,
its program is skipped.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks

from nbkit import Cluster

PROGRAMS = Path(__file__).parents[1] / "programs"
TAKES = {"lightning_fit": ("lightning", "torchmetrics"), "fabric_loop": ("lightning",), "metrics": ("torchmetrics",)}
REST = sorted({path.stem for path in PROGRAMS.glob("*.py")} - {"nanogpt"})


def under_torchrun(program: Path, losses: Path) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(program)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--losses", str(losses)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(ast.literal_eval(losses.read_text()))


def by_hand(rank: int, program: Path, losses: Path, port: int) -> None:
    """Run `program` as torchrun would run one of two processes, in a process that has already imported torch."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    sys.argv = [str(program), "--losses", str(losses)]
    runpy.run_path(str(program), run_name="__main__")


def as_under_torchrun(program: Path, losses: Path) -> list[float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run_ranks(by_hand, 2, program, losses, port, join=False)
    return list(ast.literal_eval(losses.read_text()))


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("nanogpt", as_under_torchrun),
        *(pytest.param(name, under_torchrun, marks=pytest.mark.long) for name in ("nanogpt", *REST)),
    ],
)
def test_losses_in_a_cell_equal_those_under_torchrun(
    two: Cluster, name: str, alone: Callable[[Path, Path], list[float]], tmp_path: Path
) -> None:
    for library in TAKES.get(name, ()):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    program, losses = PROGRAMS / f"{name}.py", tmp_path / "losses"
    expected = alone(program, tmp_path / "expected")
    assert len(expected) >= 4 and len(set(expected)) > 2

    two.run(f"%run {program} --losses {losses}")

    assert ast.literal_eval(losses.read_text()) == expected
    # The ranks are in the world as before, without settings of the program.
    assert two.run("y = torch.ones(1); dist.all_reduce(y); y.item()").values == {0: 2.0, 1: 2.0}


def test_a_program_runs_again_with_other_arguments(two: Cluster, tmp_path: Path) -> None:
    found = []
    for run in range(2):
        two.run(f"%run {PROGRAMS / 'nanogpt.py'} --losses {tmp_path / str(run)} --max_iters {4 + run}")
        found.append(ast.literal_eval((tmp_path / str(run)).read_text()))
    assert [len(each) for each in found] == [4 + 2, 5 + 2]
    assert found[0][:2] == found[1][:2]
