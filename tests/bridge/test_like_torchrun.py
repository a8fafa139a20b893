"""Test that a script under `%run` behaves as under torchrun: environment, arguments, errors, event loops, children."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbkit import Cluster
from nbkit.errors import CellError

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME")
NAMES += ("ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
NAMES += ("TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS")

ENVIRONMENT = f"""
import os, sys
found = [os.environ[name] for name in {NAMES}]
found += [hasattr(sys, "ps1"), bool(sys.flags.interactive), "TORCHELASTIC_RUN_ID" in os.environ, sys.argv[1:], __name__]
with open(sys.argv[1] + os.environ["RANK"], "w") as file:
    file.write(repr(found))
"""


def written(folder: Path, name: str) -> list[object]:
    return [ast.literal_eval((folder / f"{name}{rank}").read_text()) for rank in range(2)]


def test_environment_and_arguments_equal_those_under_torchrun(two: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENVIRONMENT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    subprocess.run(
        [*command, str(tmp_path / "run"), "--lr", "0.1"], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )

    two.run(f"%run {script} {tmp_path / 'cell'} --lr 0.1")

    found, expected = written(tmp_path, "cell"), written(tmp_path, "run")
    assert [one[:-2] for one in found] == [one[:-2] for one in expected]
    assert [one[-2][1:] + one[-1:] for one in found] == [["--lr", "0.1", "__main__"]] * 2
    assert two.run("dist.is_torchelastic_launched()").values == {0: True, 1: True}


def test_wrong_arguments_end_the_script_with_its_usage_and_code_2(
    two: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\np.parse_args()\n")

    with pytest.raises(CellError, match="SystemExit: 2"):
        two.run(f"%run {script} --rate 1")
    shown = "".join(capsys.readouterr())
    assert "usage: " in shown and "unrecognized arguments: --rate 1" in shown


def test_an_error_inside_record_fails_the_cell_with_the_scripts_line(two: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('no such model')\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    with pytest.raises(CellError, match="Ranks 0-1 failed: ValueError: no such model"):
        two.run(f"%run {script}")


RUNS = "import asyncio\nasync def later():\n    await asyncio.sleep(0.01)\n    return 42\n"


def test_asyncio_run_works_in_a_cell_and_in_a_script(two: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RUNS + "answer = asyncio.run(later())\n")

    assert two.run(RUNS + "asyncio.run(later())").values == {0: 42, 1: 42}
    assert two.run(f"%run {script}\nanswer").values == {0: 42, 1: 42}
    # It also works in a later cell that awaits.
    assert two.run(RUNS + "await later()").values == {0: 42, 1: 42}


SPAWNS = """
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

class Rows:
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return i * i

def child(index, queue, rows):
    # A world of its own, as programs form one in what mp.spawn starts.
    import os, socket, torch, torch.distributed as dist
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert os.environ.setdefault("MASTER_PORT", str(port)) == str(port) and "RANK" in os.environ
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", rank=index, world_size=1)
    number = torch.tensor(index + 10)
    dist.all_reduce(number)
    queue.put([int(number), *(rows[i] for i in range(len(rows)))])

def main():
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(child, (queue, Rows()), nprocs=1)
    return queue.get()

if __name__ == "__main__":
    import os
    answer = main() if os.environ["RANK"] == "1" else None  # a process that is spawned imports torch
"""


@pytest.mark.long
def test_processes_spawned_by_a_script_import_its_names_and_form_a_world(two: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)

    assert two.run(f"%run {script}\nanswer", timeout=60).values[1] == [10, 0, 1, 4, 9, 16, 25, 36, 49]
    # The rank is still in its own world.
    assert two.run("import os\n(os.environ['MASTER_ADDR'], 'TORCHELASTIC_USE_AGENT_STORE' in os.environ)").values[1][1]


def test_a_script_that_spawns_processes_runs_repeatedly(two: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        "import multiprocessing as mp\ndef double(x):\n    return 2 * x\nif __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n        answer = pool.map(double, [21])\n"
    )
    for _ in range(3):
        assert two.run(f"%run {script}\nanswer", "1", timeout=60).values == {1: [42]}


@pytest.mark.long
def test_a_class_of_a_cell_in_a_spawned_worker_fails_with_a_hint(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = SPAWNS.partition("def child")[0] + (
        'loader = DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="spawn")\nlist(loader)'
    )
    # This comes first, because torch may report a failed worker again in the next cell.
    assert two.run(cell.replace('"spawn"', '"fork"'), "1").status == "ok"
    for _ in range(2):
        with pytest.raises(CellError):
            two.run(cell, "1")
        said = "".join(capsys.readouterr())
        assert "cannot import what a cell has defined" in said and 'multiprocessing_context="fork"' in said


def test_a_shell_command_of_a_cell_gets_no_variables_of_the_world(two: Cluster, tmp_path: Path) -> None:
    (tmp_path / "sees.py").write_text(
        "import os\nof = ('MASTER_', 'WORLD', 'TORCHEL')\n"
        "print(sorted(n for n in os.environ if 'RANK' in n or n.startswith(of)))"
    )
    command = f"{sys.executable} {tmp_path / 'sees.py'}"
    two.run("import os; os.environ['WORLD_SIZE'] = '9'", "1")
    two.run(f"def within(path):\n    seen = !{{path}} {tmp_path / 'sees.py'}\n    return seen")
    found = [
        two.run(f"x = !{command}\nx[0]").values,
        two.run(f"within({sys.executable!r})[0]").values,
        two.run(f"!{command} > {tmp_path}/of{{rank}}\nopen(f'{tmp_path}/of{{rank}}').read().strip()").values,
        two.run(f"%%bash --out y\n{command}").values and two.run("y.strip()").values,
    ]
    assert found == [{0: "[]", 1: "['WORLD_SIZE']"}] * 4, "what the user has set reaches it"
    assert two.run("import os; os.environ['WORLD_SIZE'] = '2'; os.environ['RANK']").values == {0: "0", 1: "1"}
