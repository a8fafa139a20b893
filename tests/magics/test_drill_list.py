"""A sample of `make drills`, the mistakes of people in a notebook; and the faults that the drills must notice."""

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
def test_a_drill_is_answered_and_leaves_nothing(kernel: Kernel, name: str) -> None:
    assert drills.perform(kernel, next(drill for drill in DRILLS if drill.name == name)).wrong == ""


def test_there_are_sixty_drills_and_no_two_of_one_name() -> None:
    assert len({drill.name for drill in DRILLS}) == len(DRILLS) >= 60


def test_each_drill_is_on_one_page_of_the_manual() -> None:
    pages = [(EVIDENCE / f"{page}.md").read_text() for page in drills.PAGES]
    shown = [line.split(" | ")[0] for page in pages for line in page.splitlines() if line.startswith("| ")]
    named = sorted(name.removeprefix("| ") for name in shown if name != "| mistake or failure")

    assert named == sorted(drill.name for drill in DRILLS)
    assert drills.pages([drills.Outcome(drill, "", 0.0) for drill in DRILLS]).keys() == {"drills", *drills.PAGES}


def test_the_ranks_are_among_the_processes_that_are_looked_at(kernel: Kernel) -> None:
    kernel.run("%%distributed --as pids\nimport os; os.getpid()")
    pids = json.loads(kernel.run("import json; print(json.dumps(list(pids.values.values())))").text)
    assert len(pids) == 2 and {*pids} <= {process.pid for process in drills.processes(kernel)}


def test_a_process_that_is_left_running_is_noticed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drills, "GONE_SECONDS", 0.3)
    leaves = "%%rank 0\nimport subprocess\nchild = subprocess.Popen(['sleep', '300'])"
    try:
        assert "left running" in drills.perform(kernel, Drill("leaves a process", "", leaves, fails=False)).wrong
    finally:
        kernel.run("%%rank 0\nchild.kill(); child.wait()")


def test_an_answer_without_the_words_and_a_cluster_that_is_not_as_before_are_noticed(kernel: Kernel) -> None:
    drill = Drill("takes a function away", "words that are nowhere", "%%distributed\ndel dist.all_reduce", fails=False)
    try:
        wrong = drills.perform(kernel, drill).wrong
        assert "is not shown" in wrong and "the next cell" in wrong
    finally:
        if kernel.run("%%distributed\ndist.all_reduce = dist.distributed_c10d.all_reduce").status != "ok":
            kernel.run("%cluster restart")  # on a busy machine one rank failed first, and the world cannot form again
