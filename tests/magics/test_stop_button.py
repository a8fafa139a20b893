"""Test the stop button of a real kernel on ranks that hold the interpreter lock, and text that cannot be encoded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_client import Kernel

REGEX = "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')"
# Taking a lock twice blocks in a C call that holds the interpreter, that no signal ends, and that uses no core.
C_CALL = "import ctypes; lock, take = bytes(64), ctypes.PyDLL(None).pthread_mutex_lock; take(lock); take(lock)"
SURVIVED = "%%distributed\nx = torch.ones(1); dist.all_reduce(x); (kept, x.item())"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("home")) as kernel:
        kernel.run("%load_ext nbkit")
        cell = kernel.run("%cluster start -n 3 --cpu --name stopped")
        assert cell.status == "ok", cell.text
        kernel.run("%%distributed\nkept = rank + 1")
        yield kernel
        kernel.run("%cluster stop")


@pytest.mark.parametrize(
    "first",
    ["%%distributed", pytest.param("%%time\n%%distributed", marks=pytest.mark.long)],
    ids=["awaited", "as a plain magic"],
)
def test_three_presses_of_stop_interrupt_a_rank_in_a_regex_without_ending_it(kernel: Kernel, first: str) -> None:
    source = f"{first}\nif rank == 1:\n    {REGEX}\nelse:\n    import time; time.sleep(60)"
    cell = kernel.run(source, at={0.7: kernel.interrupt, 1.1: kernel.interrupt, 1.5: kernel.interrupt})
    assert cell.status == "error"
    assert "interrupted from outside now (SIGINT)" in cell.text
    assert "variables live on" in cell.text
    assert "Out[2]: (3, 3.0)" in kernel.run(SURVIVED).text


@pytest.mark.parametrize(
    "source",
    [
        "print('odd ' + chr(0xd800))",
        "raise ValueError('odd ' + chr(0xd800))",
        "print(chr(0xdc80)); 'odd ' + chr(0xd800)",
    ],
    ids=["printed", "raised", "a value"],
)
def test_half_of_a_surrogate_pair_is_shown_as_an_escape(kernel: Kernel, source: str) -> None:
    cell = kernel.run(f"%%distributed\n{source}")
    assert r"odd \ud800" in cell.text
    assert kernel.run("%%distributed\nkept").status == "ok"


@pytest.mark.long
def test_warnings_of_stop_are_shown_where_it_was_called_and_at_the_cell(kernel: Kernel) -> None:
    cell = kernel.send(f"%%distributed --detach --ranks 0,2\nif rank == 2: {C_CALL}")
    kernel.collect(cell)
    # Presses have no effect until the warning has been shown for two seconds.
    presses = dict.fromkeys((1.0, 1.5, 9.0, 12.0, 15.0), kernel.interrupt)
    stopping = kernel.run("handle.stop().status", at=presses)
    rungs = (
        "nobody is ended yet",
        "Rank 2 has not answered for ",
        "Rank 2 has not ended, ",
        "press stop again, 2 s from now or later: that ends rank 2",
        "Rank 2 is ended now; its variables are lost.",
    )
    for text in (stopping.text, kernel.late(cell, 0.2).text):
        places = [text.find(rung) for rung in rungs]
        assert -1 not in places, text
        assert places == sorted(places)
    assert "'interrupted'" in stopping.text
    assert "Out[0]: 1" in kernel.run("%%rank 0\nkept").text


def test_stop_warns_in_the_cell_before_a_press_ends_a_rank_that_never_answers(kernel: Kernel) -> None:
    presses = dict.fromkeys((0.7, 1.1, 9.0, 12.0, 15.0), kernel.interrupt)
    cell = kernel.run(f"%%distributed --ranks 0-1\nif rank == 1: {C_CALL}", at=presses)
    assert cell.status == "error"
    rungs = ("nobody is ended yet", "press stop again", "Rank 1 is ended now", "Rank 1 had to be ended")
    places = [cell.text.find(rung) for rung in rungs]
    assert -1 not in places, cell.text
    assert places == sorted(places)
