"""Test cells that end by exit(), a failing script or magic, or an interrupt, and that errors name the right rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbkit import Cluster
from nbkit.errors import CellError

SHOW = "from IPython.display import display\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script that assigns `made`, then fails in line 4."""
    path = tmp_path / "script.py"
    path.write_text("made = 5\ndef fail():\n    pass\n    raise ValueError('in the script')\nfail()\n")
    return path


def plain(text: str) -> str:
    """Return the text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_failing_script_fails_the_cell_with_the_scripts_file_and_line(
    two: Cluster, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CellError, match="Ranks 0-1 failed: ValueError: in the script, line 2"):
        two.run(f"made = 0\n%run {script}\nmade = 7")
    shown = plain(capsys.readouterr().err)
    assert f"File {script}:4, in fail()" in shown
    assert shown.count("ValueError: in the script") == 1
    assert "IPython" not in shown and "nbkit" not in shown.replace(str(script), "")
    assert two.run("made").values == {0: 5, 1: 5}  # names that it defined exist, as after any %run


def test_a_script_that_fails_on_one_rank_releases_the_others(two: Cluster, script: Path) -> None:
    with pytest.raises(CellError, match="Rank 1 failed: ValueError: in the script, line 2") as caught:
        two.run(f"if rank == 1:\n    %run {script}\ndist.barrier()")
    assert "Rank 0: released at line 3" in str(caught.value)
    assert caught.value.ranks == (1,)


def test_a_failing_module_fails_the_cell(two: Cluster, script: Path) -> None:
    with pytest.raises(CellError, match="ValueError: in the script"):
        two.run(f"import sys; sys.path.insert(0, {str(script.parent)!r})\n%run -m {script.stem}")


@pytest.mark.parametrize(("code", "says"), [("3", "SystemExit: 3"), ("'no data'", "SystemExit: no data")])
def test_a_script_that_exits_with_a_code_fails_the_cell(two: Cluster, script: Path, code: str, says: str) -> None:
    script.write_text(f"import sys\nsys.exit({code})\n")
    with pytest.raises(CellError, match=says):
        two.run(f"%run {script}")
    assert two.run(f"%run -e {script}\n'-e says that the code does not matter'").status == "ok"


@pytest.mark.parametrize("end", ["exit()", "quit(0)", "import sys; sys.exit()", "raise SystemExit(0)"])
def test_a_script_that_exits_without_an_error_lets_the_cell_continue(two: Cluster, script: Path, end: str) -> None:
    script.write_text(f"made = 1\n{end}\nmade = 2\n")
    assert two.run(f"%run {script}\nmade").values == {0: 1, 1: 1}


def test_an_error_under_capture_fails_the_cell_and_keeps_captured_text(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CellError, match="Rank 1 failed: ZeroDivisionError") as caught:
        two.run("%%capture held\nprint('caught')\nif rank == 1: 1 / 0\ndist.barrier()")
    assert "Rank 0: released at line 3" in str(caught.value)
    assert plain(capsys.readouterr().err).count("ZeroDivisionError: division by zero") == 1
    assert two.run("held.stdout").values == {0: "caught\n", 1: "caught\n"}


@pytest.mark.parametrize("magic", ["%%time", "%%timeit -n1 -r1", "%%prun", "%%capture", "%timeit -n1 -r1", "%prun"])
def test_an_error_within_a_magic_fails_the_cell(two: Cluster, magic: str) -> None:
    with pytest.raises(CellError, match="ZeroDivisionError"):
        two.run(f"{magic}{chr(10) if magic.startswith('%%') else ' '}1 / 0")


def test_an_extension_that_cannot_be_loaded_fails_the_cell(two: Cluster, script: Path) -> None:
    with pytest.raises(CellError, match="ValueError: in the script"):
        two.run(f"import sys; sys.path.insert(0, {str(script.parent)!r})\n%load_ext {script.stem}")


def test_an_error_in_a_callback_is_shown_without_frames_of_nbkit(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CellError, match="KeyError: 'weights'"):
        two.run("def broken(): return {}['weights']\nnbkit.check(broken, 'ddp')")
    shown = plain(capsys.readouterr().err)
    assert "nbkit.check(broken, 'ddp')" in shown and "in broken()" in shown and "File" not in shown
    assert re.search(r"frames of nbkit that are left out: [1-9]", shown)


def test_an_error_of_a_display_is_output_at_its_place(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    results = two.run(
        f"{SHOW}class Odd:\n    def _repr_html_(self): raise ValueError('no page')\n"
        "print('before'); display(Odd()); print('after'); Odd()"
    )
    assert results.status == "ok"
    printed = plain(results.output[0])
    assert printed.count("ValueError: no page") == 2
    assert printed.index("before") < printed.index("ValueError: no page") < printed.index("after")


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("exit()", "exit() has ended the cell; the rank lives on"),
        ("quit()", "%cluster stop ends the ranks"),
        ("get_ipython().ask_exit()", "the rank lives on"),
        ("import sys; sys.exit()", "sys.exit(0) has ended the cell"),
        ("import sys; sys.exit(0)", "sys.exit(0) has ended the cell"),
        ("raise SystemExit(None)", "sys.exit(0) has ended the cell"),
        ("import asyncio; await asyncio.sleep(0); exit()", "exit() has ended the cell"),
    ],
)
def test_a_cell_that_exits_without_an_error_ends_there_and_the_rank_survives(two: Cluster, end: str, says: str) -> None:
    results = two.run(f"left = rank\n{end}\nleft = 'not here'")
    assert results.status == "ok"
    assert says in results.output[0] and "To exit: use" not in results.output[0]
    assert two.run("x = torch.ones(1); dist.all_reduce(x); (left, x.item())").values == {0: (0, 2.0), 1: (1, 2.0)}


@pytest.mark.parametrize(
    ("end", "says"),
    [("sys.exit(3)", "3"), ("sys.exit('no data')", "no data"), ("exit(2)", "2"), ("sys.exit(True)", "True")],
)
def test_a_cell_that_exits_with_a_code_or_a_message_fails_with_it(two: Cluster, end: str, says: str) -> None:
    with pytest.raises(CellError, match=f"Ranks 0-1 failed: SystemExit: {says}, line 2"):
        two.run(f"import sys\n{end}")
    assert two.run("rank").values == {0: 0, 1: 1}


def test_the_process_survives_exit(two: Cluster) -> None:
    before = two.run("import os; os.getpid()").values
    two.run("exit()")
    two.run("import time; time.sleep(0.5)")  # enough time for exit to stop the engine's loop
    assert two.run("os.getpid()").values == before


@pytest.mark.parametrize(
    "interrupt",
    ["raise KeyboardInterrupt", "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"],
)
def test_an_interrupt_on_one_rank_releases_the_others_and_names_that_rank(two: Cluster, interrupt: str) -> None:
    with pytest.raises(CellError, match=r"Rank 1 interrupted the cell: KeyboardInterrupt, line 2") as caught:
        two.run(f"if rank == 1:\n    {interrupt}\ndist.barrier()")
    assert "Rank 0: released at line 3" in str(caught.value)


def test_a_rank_that_was_only_released_is_not_named_as_failed(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """End both ranks in the same line of the cell, with errors of the same name."""
    with pytest.raises(CellError, match=r"^Rank 1 failed: RuntimeError: mine, line 2") as caught:
        two.run("def step():\n    raise RuntimeError('mine') if rank == 1 else dist.barrier()\nstep()")
    assert "Rank 0: released at line 2, in barrier" in str(caught.value)
    assert caught.value.ranks == (1,)
    assert "[1] ------" in plain(capsys.readouterr().err)


def test_equal_failures_are_merged_even_if_one_comes_late(two: Cluster) -> None:
    source = (
        "import time\nuntil = time.time() + 1.5 * rank\n"
        "while time.time() < until:\n"
        "    try: time.sleep(0.05)\n"
        "    except KeyboardInterrupt: pass\n"
        "raise OSError('no such disk')"
    )
    handle = two.run(source, detach=True)
    with pytest.raises(CellError, match=r"Ranks 0-1 failed: OSError: no such disk, line 6"):
        handle.wait(timeout=60)


def test_a_warning_names_the_line_of_the_cell_once_for_all_ranks(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    two.run("import warnings\nwarnings.warn('mind this')")
    shown = plain(capsys.readouterr().err)
    assert re.search(r"Cell In\[\d+\], line 2: UserWarning: mind this\n", shown), shown
    assert "ipykernel" not in shown


def test_a_loader_given_as_data_is_refused_without_warnings(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CellError, match="The data is a DataLoader"):
        two.run(
            "loader = torch.utils.data.DataLoader([torch.ones(2)] * 8, batch_size=4)\n"
            "model = torch.nn.Linear(2, 1)\n"
            "nbkit.Trainer(model=model, loss=abs, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1),"
            " data=loader, batch_size=4, log_dir=None)"
        )
    assert "UserWarning" not in capsys.readouterr().err
