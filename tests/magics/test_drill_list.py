"""Test a sample of `make drills` (mistakes in a notebook), and that the drills notice faults."""

from __future__ import annotations

import json
from pathlib import Path

import drills
import pytest
from drill_list import DRILLS, Drill
from kernel_client import Kernel

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
SAMPLE = (
    "an old name of an option",
    "one rank fails, and the other waits for it",
    "an endless recursion",
    "a message to a rank that does not exist",
    "a barrier on one rank alone, and Stop",
    "a push of an object whose class the notebook defines",
    "a model that fails",
    "a live cell that fails",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_drill_gets_its_answer_and_leaves_nothing_behind(kernel: Kernel, name: str) -> None:
    assert drills.perform(kernel, next(drill for drill in DRILLS if drill.name == name)).wrong == ""


def test_there_are_at_least_sixty_drills_with_different_names() -> None:
    assert len({drill.name for drill in DRILLS}) == len(DRILLS) >= 60


def test_each_drill_is_on_exactly_one_page_of_the_manual() -> None:
    pages = [(EVIDENCE / f"{page}.md").read_text() for page in drills.PAGES]
    shown = [line.split(" | ")[0] for page in pages for line in page.splitlines() if line.startswith("| ")]
    named = sorted(name.removeprefix("| ") for name in shown if name != "| mistake or failure")

    assert named == sorted(drill.name for drill in DRILLS)
    assert drills.pages([drills.Outcome(drill, "", 0.0) for drill in DRILLS]).keys() == {"drills", *drills.PAGES}


def test_drills_check_the_processes_of_the_ranks(kernel: Kernel) -> None:
    kernel.run("%%distributed --as pids\nimport os; os.getpid()")
    pids = json.loads(kernel.run("import json; print(json.dumps(list(pids.values.values())))").text)
    assert len(pids) == 2 and {*pids} <= {process.pid for process in drills.processes(kernel)}


def test_drills_notice_a_process_that_is_left_running(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drills, "GONE_SECONDS", 0.3)
    leaves = "%%rank 0\nimport subprocess\nchild = subprocess.Popen(['sleep', '300'])"
    try:
        assert "left running" in drills.perform(kernel, Drill("leaves a process", "", leaves, fails=False)).wrong
    finally:
        kernel.run("%%rank 0\nchild.kill(); child.wait()")


def test_drills_notice_a_wrong_answer_and_a_changed_cluster(kernel: Kernel) -> None:
    drill = Drill("takes a function away", "words that are nowhere", "%%distributed\ndel dist.all_reduce", fails=False)
    try:
        wrong = drills.perform(kernel, drill).wrong
        assert "is not shown" in wrong and "the next cell" in wrong
    finally:
        if kernel.run("%%distributed\ndist.all_reduce = dist.distributed_c10d.all_reduce").status != "ok":
            kernel.run("%cluster restart")  # on a busy machine, one rank fails first, and the world cannot form again
