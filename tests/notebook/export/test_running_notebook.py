"""Test that the script of a running notebook has the cells and values that it sent to its ranks."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbkit.errors import CellError, UsageError
from nbkit.notebook.cluster.cells.results import Results
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.notebook.cluster.sent_cells import SentCell, SentValues
from nbkit.notebook.export import export as module
from nbkit.notebook.export.export import export
from nbkit.wire.cells import CellRequest
from nbkit.wire.processes import Process


def cell(number: int, source: str, outcome: str | Exception = "ok", *, ranks: Any = (0, 1), live: bool = False) -> Any:
    done: Future[Results] = Future()
    sent = SentCell(CellRequest("id", source, number, ranks), live, done)
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    elif outcome != "running":
        done.set_result(Results({}, {}, {}, outcome, 1))
    return sent


def switch(do: str, step: int, old: str, new: str, **args: str) -> Any:
    return SimpleNamespace(do=do, step=step, strategy=new, args=args, result={"old": old, "new": new})


def entry(*labels: str, **options: object) -> ClusterEntry:
    """Return the entry of a cluster whose ranks have these labels. on=...: it is on several hosts."""
    nobody = Process(0, 0)
    known: dict[str, Any] = {"controller": nobody, "parent": nobody, "kernel": nobody, "reasons": labels}
    known |= {"host": "here", "backend": "gloo", "ttl": 1.0, "born": 0.0, "options": options}
    return ClusterEntry(name="calm-lark", n=len(labels), labels=labels, **known)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    pins = [SimpleNamespace(kind="cores", threads=4)]
    made = SimpleNamespace(
        entry=entry("cores 0-3", "cores 4-7"),
        sent=[],
        pinning=SimpleNamespace(pins=pins),
        training=SimpleNamespace(switched=[]),
    )
    monkeypatch.setattr(module, "current", lambda: made)
    return made


def test_cells_that_did_not_fail_are_exported_in_order(cluster: Any, tmp_path: Path) -> None:
    cluster.sent += [
        cell(3, "# %%distributed\ntrainer = nbkit.Trainer(model=None)"),
        SentValues.of(4, (0, 1), {"STEPS": 5}),
        cell(5, "# %%distributed\nx = STEPS / 0", CellError("ZeroDivisionError on rank 0\nline", rank=0)),
        cell(6, "# %%distributed --detach\ntrainer.fit(STEPS)", "interrupted"),
        cell(7, "trainer.lr = 1", live=True),
        SentValues.of(8, (1,), {"STEPS": 6}),
        cell(9, "# %%rank 1\nprint(STEPS)", "running", ranks=(1,)),
    ]
    cluster.training.switched += [
        switch("switch", 9, "dp=2", "tp=2", strategy="tp"),  # of an earlier training
        switch("switch", 2, "dp=2", "dp=2 zero=3", strategy="zero3"),
        switch("undo", 4, "dp=2 zero=3", "dp=2"),
    ]

    script = export(tmp_path / "train.py", slurm=True, partition="debug", time="1:00")
    text = script.path.read_text()

    assert text.partition("\n# %% ")[2] == (
        "cell 3\ntrainer = nbkit.Trainer(model=None, strategy=args.strategy, switches=args.switches)\n"
        "\n\n# %% cell 4: pushed\nSTEPS = args.steps\n"
        "\n\n# %% cell 6\n# Somebody stopped it in the notebook; here it runs to its end.\ntrainer.fit(STEPS)\n"
        "\n\n# %% cell 8: pushed\nif rank == 1:\n    STEPS = 6\n"
        "\n\n# %% cell 9\nif rank == 1:\n    print(STEPS)\n"
    )
    assert "#   cell 5   x = STEPS / 0   (failed: ZeroDivisionError on rank 0)\n" in text
    assert "torch.set_num_threads(4)" in text
    assert json.loads((tmp_path / "train.switches.json").read_text()) == {"0": "dp=2", "2": "dp=2 zero=3", "4": "dp=2"}
    assert (
        "#SBATCH --cpus-per-task=8\n#SBATCH --partition=debug\n#SBATCH --time=1:00\n"
        in (tmp_path / "train.sbatch").read_text()
    )
    assert [note.partition(",")[0] for note in script.notes] == [
        "cell 6 was stopped in the notebook; in the script it runs to its end",
        "cell 7 ran inside a training (--at-step)",
        "cell 5 failed and is left out",
    ]


def test_a_node_of_the_job_has_as_many_ranks_as_a_host_of_the_cluster(cluster: Any, tmp_path: Path) -> None:
    cluster.sent.append(cell(1, "# %%distributed\nx = 1"))
    cluster.entry = entry("a: GPU 0 H100", "a: GPU 1 H100", "b: GPU 0 H100", "b: GPU 1 H100", on={})

    def asked(**options: int) -> list[str]:
        export(tmp_path / "train.py", slurm=True, **options)
        text = (tmp_path / "train.sbatch").read_text()
        return re.findall(r"(?<=#SBATCH --nodes=)\d+|(?<=per-node=)[2-9]|(?<=--nproc-per-node )\d+", text)

    assert asked() == asked(nodes=2) == ["2", "2", "2"]  # nodes, GPUs, ranks
    assert asked(nodes=4) == ["4", "2", "2"]
    assert asked(nodes=2, n=8) == ["2", "4", "4"]
    assert asked(nodes=1, n=4) == ["1", "4", "4"]
    cluster.entry = entry("GPU 0 H100", "GPU 1 H100")
    assert asked(nodes=2) == ["2", "2", "2"] and asked() == ["1", "2", "2"]


def test_a_job_with_another_number_of_ranks_gets_a_note(cluster: Any, tmp_path: Path) -> None:
    cluster.sent.append(cell(1, "# %%distributed\nx = 1"))
    cluster.entry = entry("a: cores 0-1", "a: cores 2-3", "b: cores 0-1", "b: cores 2-3", on={})
    same = export(tmp_path / "train.py", slurm=True)
    more = export(tmp_path / "train.py", slurm=True, nodes=4)

    typed = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    assert same.run == f"{typed} {tmp_path}/train.py" and f"    {typed} train.py\n" in same.path.read_text()
    alone = export(tmp_path / "train.py")
    assert alone.notes == ("type the torchrun command on each of the 2 hosts; HOST is the name of one of them",)
    assert same.notes == () and "the job has 8 ranks, the notebook had 4" in more.notes[0]


def test_ranks_that_do_not_divide_evenly_over_nodes_are_refused(cluster: Any, tmp_path: Path) -> None:
    cluster.sent.append(cell(1, "# %%distributed\nx = 1"))
    cluster.entry = entry("a: cores 0", "a: cores 1", "a: cores 2", "b: cores 0", on={})

    def refused(**options: int) -> str:
        with pytest.raises(UsageError) as error:
            export(tmp_path / "train.py", slurm=True, **options)
        assert not [*tmp_path.iterdir()]
        return f"{error.value.numbers}   {error.value.hint}"

    assert refused() == "ranks on the hosts of the notebook: 3, 1   --slurm --nodes 2 -n 4"
    assert refused(nodes=2, n=7) == "-n 7, --nodes 2   --slurm --nodes 2 -n 8"
    assert refused(nodes=2, n=0) == "-n 0, --nodes 2   --slurm --nodes 2 -n 2"
    export(tmp_path / "train.py", slurm=True, nodes=2, n=4)
    assert "--nproc-per-node 2 " in (tmp_path / "train.sbatch").read_text()


def test_export_before_any_cell_ran_is_refused(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No cell has run on the ranks"):
        export(tmp_path / "train.py")


def test_a_value_is_stored_as_it_was_sent_and_other_types_are_named(tmp_path: Path) -> None:
    sizes = [1, (2, None)]
    sent = SentValues.of(1, (0,), {"sizes": sizes, "far": float("inf"), "path": tmp_path, "many": [0] * 5000})
    sizes.append(3)

    assert sent.literals == {"sizes": "[1, (2, None)]"}
    assert sent.others == {"far": "float", "path": f"pathlib.{type(tmp_path).__name__}", "many": "a list of 5,000"}
