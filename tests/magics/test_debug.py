"""Test the prompt on a rank: `breakpoint()` in a cell, and `%nbkit debug` after a cell that failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from kernel_client import Kernel

FAILS = """%%distributed
def divided(by):
    numerator = torch.ones(3) * 7
    kept = numerator
    return numerator[0].item() / by

dist.barrier()
if rank == 1:
    divided(0)
dist.barrier()
"""

GENERATION = "%%distributed\nfrom nbkit.rank.world import world\nworld.current().generation"


def test_a_breakpoint_shows_a_prompt_on_its_rank_while_the_others_wait(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed\n"
        "def doubled(x):\n"
        "    y = 2 * x\n"
        "    if rank == 1:\n"
        "        breakpoint()\n"
        "    z = y + 1\n"
        "    return z\n"
        "total = torch.tensor([doubled(rank + 20)])\n"
        "dist.all_reduce(total)\n"
        "total.item()",
        typed=["p y", "n", "n", "p z", "u", "p rank + 100", "d", "y = 1000", "w", "l", "c"],
    )
    assert cell.status == "ok", cell.text
    assert "Rank 1 is at a breakpoint, cell" in cell.text
    assert cell.prompts == ["(Pdb rank 1) "] * 11
    for shown in ("[1] 42", "[1] 43", "[1] 101", "doubled(rank + 20)", "-> breakpoint()", "-> return z"):
        assert shown in cell.text, cell.text
    assert "ipykernel" not in cell.text  # frames of ipykernel, which runs the cell, are hidden
    assert "Out[0-1]: 84" in cell.text  # (40 + 1) + (42 + 1): y was set after z was computed


def test_n_at_a_prompt_steps_through_the_statements_to_the_end_of_the_cell(kernel: Kernel) -> None:
    cell = kernel.run("%%rank 0\nbreakpoint()\na = 1\nb = a + 1\nb", typed=["n", "n", "n", "n", "n", "n", "n", "n"])
    assert cell.status == "ok", cell.text
    for shown in ("-> a = 1", "-> b = a + 1", "Out[0]: 2"):
        assert shown in cell.text, cell.text
    assert "ipykernel" not in cell.text and "site-packages" not in cell.text
    assert kernel.run("%%distributed\nimport sys; print(sys.gettrace())").said("None")


@pytest.mark.long
def test_prompts_on_two_ranks_are_answered_in_turn_or_together(kernel: Kernel) -> None:
    # Rank 0 reaches its prompt first. Both ranks are at a prompt before the first line is typed.
    source = (
        "%%distributed\nimport time\nx = rank * 10\ntime.sleep(rank / 2)\nbreakpoint()\n"
        "y = torch.ones(1)\ndist.all_reduce(y)\ny.item()"
    )
    cell = kernel.run(source, typed=[lambda: time.sleep(2) or "p x", "rank 1", "p x", "rank 7", "all c"])
    assert cell.status == "ok", cell.text
    assert cell.prompts[2].startswith("(Pdb rank 1")
    for shown in ("[0] 0", "[1] 10", "Rank 7 is at no prompt; asking: 0-1.", "Out[0-1]: 2.0"):
        assert shown in cell.text, cell.text
    assert kernel.run(source, typed=["c", "c"]).status == "ok"


@pytest.mark.long
def test_q_stops_the_cell_on_all_ranks_and_the_next_cell_runs(kernel: Kernel) -> None:
    source = "%%distributed\nif rank == 0:\n    breakpoint()\ndist.barrier()\nprint('not reached')"
    cell = kernel.run(source, typed=["q"])
    assert cell.status == "error" and "KeyboardInterrupt" in cell.text, cell.text
    assert "not reached" not in cell.text
    assert "Out[0-1]: 1" in kernel.run("%%distributed\nx = torch.ones(1); dist.all_reduce(x); int(x.item()) // 2").text


def test_the_stop_button_ends_a_prompt(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed\nif rank == 0:\n    breakpoint()\ndist.barrier()", typed=[kernel.interrupt])
    assert cell.status == "error" and "variables live on" in cell.text, cell.text
    cell = kernel.run("%%distributed\nif rank == 1:\n    breakpoint()\nrank", typed=["p 5 + 6", "c"])
    assert cell.status == "ok" and "[1] 11" in cell.text, cell.text


def test_a_prompt_ends_when_another_rank_fails(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed\nimport time\nif rank == 0:\n    breakpoint()\nelse:\n    time.sleep(1)\n"
        "    raise ValueError('meanwhile')",
        typed=[lambda: None],
    )
    assert cell.status == "error" and "ValueError: meanwhile" in cell.text, cell.text


def test_debug_opens_a_failed_cell_on_the_rank_that_failed(kernel: Kernel) -> None:
    assert "ZeroDivisionError" in kernel.run(FAILS).text
    cell = kernel.run("%nbkit debug", typed=["p by, numerator.sum().item()", "u", "p rank", "w", "q"])
    assert cell.status == "ok", cell.text
    assert cell.prompts == ["(Pdb rank 1) "] * 5
    for shown in ("ZeroDivisionError: float division by zero (cell", "[1] (0, 21.0)", "[1] 1\n", "-> divided(0)"):
        assert shown in cell.text, cell.text
    refused = kernel.run("%nbkit debug 0").text
    assert "Rank 0 keeps no frames" in refused and "%nbkit debug 1" in refused


@pytest.mark.long
def test_ipythons_debug_names_the_failed_rank_and_still_debugs_other_errors(kernel: Kernel) -> None:
    kernel.run(FAILS)
    cell = kernel.run("%debug")
    assert cell.status == "ok" and cell.prompts == [] and "→ %nbkit debug 1" in cell.text, cell.text
    assert "ZeroDivisionError" in kernel.run("%nbkit debug 1", typed=["q"]).text
    kernel.run("here = 1 / 0")
    assert kernel.run("%debug", typed=["q"]).prompts == ["ipdb> "]


@pytest.mark.long
def test_frames_are_kept_only_until_the_next_cell(kernel: Kernel) -> None:
    kernel.run(
        "%%distributed\nclass Kept: pass\nimport weakref\n"
        "def holds():\n    kept = Kept()\n    globals()['seen'] = weakref.ref(kept)\n    raise ValueError('held')"
    )
    kernel.run("%%distributed\nholds()")
    assert "held" in kernel.run("%nbkit debug 0", typed=["p seen() is kept", "q"]).text
    cell = kernel.run("%%distributed\nprint(seen())")
    assert cell.said("None"), cell.text
    gone = kernel.run("%nbkit debug")
    assert gone.status == "error" and "No rank keeps the frames of a failed cell" in gone.text, gone.text
    kernel.run("%%distributed\nholds = None\nraise MemoryError('none left')")
    assert "nor where memory ran out" in kernel.run("%nbkit debug").text


def test_a_detached_cell_waits_at_its_breakpoint_for_nbkit_debug(kernel: Kernel) -> None:
    sent = kernel.run(
        "%%distributed --detach\nimport time\nif rank == 1:\n    breakpoint()\ny = torch.ones(1)\ndist.all_reduce(y)"
    )
    assert sent.status == "ok"
    deadline = time.monotonic() + 30
    while "at a prompt" not in (why := kernel.run("%nbkit why").text) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "rank 1 is at a breakpoint, cell" in why, why
    cell = kernel.run("%nbkit debug 1", typed=["p rank + 50", "c"])
    assert cell.status == "ok", cell.text
    assert "51" in kernel.run("handle.wait()\nprint(handle.output[1])").text
    assert kernel.run("print(handle.status)").text == "ok\n"


@pytest.mark.long
def test_a_training_stopped_at_a_breakpoint_runs_to_its_step_boundary(kernel: Kernel) -> None:
    generation = kernel.run(GENERATION).text
    kernel.run(
        "%%distributed --detach\n"
        "def loss(output, target):\n"
        "    if rank == 1 and armed:\n"
        "        breakpoint()\n"
        "    return ((output - target) ** 2).mean()\n"
        "armed = False\n"
        "data = [(torch.ones(4) * i, torch.zeros(2)) for i in range(32)]\n"
        "trainer = nbkit.Trainer(model=lambda: torch.nn.Linear(4, 2), loss=loss, data=data, batch_size=8,\n"
        "    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3))\n"
        "trainer.fit(2)\n"
        "armed = True\n"
        "trainer.fit(10_000)"
    )
    deadline = time.monotonic() + 60
    while "at a prompt" not in (why := kernel.run("%nbkit why").text) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "rank 1 is at a breakpoint, cell" in why, kernel.run("print(handle.output, handle.wait())").text
    stopped = kernel.run("%nbkit debug", typed=["p tuple(output.shape)", "q"])
    assert stopped.status == "error" and "KeyboardInterrupt" in stopped.text, stopped.text
    # An interrupt within the step would force the ranks to form another generation of the world.
    assert kernel.run(GENERATION).text == generation
    steps = kernel.run("%%distributed\narmed = False\nprint('at', trainer.step)\nlen(trainer.fit(2))").text
    # The output is one line, or two on a busy machine.
    assert "[0-1] at " in steps or ("[0] at " in steps and "[1] at " in steps), steps
    assert "Out[0-1]: 2" in steps, steps


@pytest.mark.long
def test_a_prompt_that_waits_for_input_is_not_reported_as_a_hang(kernel: Kernel) -> None:
    kernel.run("from nbkit.notebook.cluster import why as stall\nstall.QUIET_SECONDS, stall._LOOK_SECONDS = 0.5, 0.2")

    def after_a_while() -> str:
        time.sleep(4)
        return "c"

    cell = kernel.run("%%distributed\nif rank == 1:\n    breakpoint()\ndist.barrier()", typed=[after_a_while])
    kernel.run("stall.QUIET_SECONDS, stall._LOOK_SECONDS = 30.0, 5.0")
    assert cell.status == "ok" and "Nothing has moved" not in cell.text, cell.text


def test_breakpoints_of_torch_and_pdb_show_the_same_prompt(kernel: Kernel) -> None:
    for asks in ("dist.breakpoint(1)", "import pdb\nif rank == 1: pdb.set_trace()"):
        cell = kernel.run(f"%%distributed\nhere = rank * 3\n{asks}\nhere", typed=["p here", "c"])
        assert cell.status == "ok" and "[1] 3" in cell.text, cell.text


def test_a_cell_without_a_keyboard_warns_and_continues(kernel: Kernel) -> None:
    cell = kernel.collect(
        str(
            kernel.client.execute(
                "%%distributed\nfor i in range(3):\n    breakpoint()\nx = torch.ones(1); dist.all_reduce(x); x.item()",
                allow_stdin=False,
            )
        )
    )
    assert cell.status == "ok" and "Out[0-1]: 2.0" in cell.text, cell.text
    assert "No prompt is possible at cell" in cell.text and "runs without a keyboard" in cell.text, cell.text
    kernel.run(FAILS)
    cell = kernel.collect(str(kernel.client.execute("%nbkit debug", allow_stdin=False)))
    assert cell.status == "error" and "No prompt is possible here." in cell.text, cell.text


@pytest.mark.long
def test_a_program_without_standard_input_passes_its_breakpoint(kernel: Kernel) -> None:
    program = (
        "from nbkit import Cluster\n"
        "cluster = Cluster.start(2, cpu=True, ttl=60)\n"
        "try:\n"
        "    print(cluster.run('if rank == 1:\\n    breakpoint()\\nrank * 2').values)\n"
        "finally:\n"
        "    cluster.stop()\n"
    )
    environment = {**os.environ, "NBKIT_HOME": kernel.environment["NBKIT_HOME"]}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert "{0: 0, 1: 2}" in ended.stdout, ended.stdout + ended.stderr
    assert "No prompt is possible" in ended.stdout + ended.stderr, ended.stdout + ended.stderr
