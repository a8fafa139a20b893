"""Test nbkit on known bugs of other notebook tools: odd prints, floods on stderr, names, other extensions."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_client import Kernel


def test_prints_arrive_unchanged(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed\nprint('a', 'b', 3)\nprint('    indented')\nprint()\nprint({'cell_id': 3})\nprint('漢字 🚀')"
    )
    for line in ("a b 3", "    indented", "", "{'cell_id': 3}", "漢字 🚀"):
        assert f"[0-1] {line}\n" in cell.text


def test_a_flood_on_stderr_blocks_no_rank(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed\nimport sys\nfor i in range(4000): print('x' * 50, rank, i, file=sys.stderr)")
    assert cell.status == "ok"
    assert all(f"{rank} 3999" in cell.text for rank in range(2))


def test_progress_bars_arrive_in_few_messages(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed\nfrom tqdm import tqdm\nimport time\nfor _ in tqdm(range(300)): time.sleep(0.002)")
    assert "100%" in cell.text
    assert sum(kind == "stream" for _, kind, _ in cell.messages) < 40


def test_warnings_and_logging_are_seen(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed\nimport logging, warnings\nwarnings.warn('careful')\nlogging.error('bad news')")
    assert "careful" in cell.text
    assert "bad news" in cell.text


@pytest.mark.long
def test_a_cell_of_four_seconds_does_not_time_out(kernel: Kernel) -> None:
    assert kernel.run("%%distributed\nimport time\nfor i in range(4): time.sleep(1)\n'done'").status == "ok"


def test_notebook_variables_keep_their_values(kernel: Kernel) -> None:
    kernel.run("rank_lr = 0.5; names = ['a', 'b']; cfg = {'lr': 3}")
    kernel.run("%%distributed\nrank_lr, names, cfg, model = 0, [], {}, torch.nn.Linear(1, 1)")
    assert "(0.5, ['a', 'b'], {'lr': 3})" in kernel.run("rank_lr, names, cfg").text
    assert "NameError" in kernel.run("model").text


def test_tab_completes_names_of_the_ranks(kernel: Kernel) -> None:
    kernel.run("%%distributed\nlearning_rate_of_ranks = 1\nnet = torch.nn.Linear(2, 2)")
    assert "learning_rate_of_ranks" in kernel.complete("%%distributed\nlearning_rate_of")
    assert "net.weight" in kernel.complete("%%distributed\nprint(net.wei")
    assert "learning_rate_of_ranks" not in kernel.complete("learning_rate_of")


@pytest.mark.long
def test_tab_completes_verbs_and_options_of_a_magic(kernel: Kernel) -> None:
    assert kernel.complete("%train ") == ["fit", "lr", "pause", "resume", "save", "stop", "wait"]
    assert kernel.complete("x = 1\n%cluster start --g") == ["--gpus"]


def test_tab_completes_names_while_the_ranks_are_busy(kernel: Kernel) -> None:
    kernel.run("%%distributed --detach\nfound_while_busy = 1\nwhile found_while_busy: pass")
    assert "found_while_busy" in kernel.complete("%%distributed\nfound_while")
    kernel.run("handle.stop()")


@pytest.mark.long
def test_loading_names_the_extension_whose_magic_is_replaced(tmp_path: Path) -> None:
    with Kernel(tmp_path) as kernel:
        kernel.run("%load_ext nbdistributed")
        cell = kernel.run("%load_ext nbkit")
        assert "%%distributed belonged to nbdistributed" in cell.text
        assert "%cluster start" in kernel.run("%%distributed\n1").text
