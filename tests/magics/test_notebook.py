"""Test the magics in a real kernel: what a notebook shows, and how its buttons behave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kernel_client import Cell, Kernel, said


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("home")) as kernel:
        kernel.run("%load_ext nbkit")
        yield kernel
        kernel.run("%cluster stop")


@pytest.fixture(scope="module")
def started(kernel: Kernel) -> Kernel:
    cell = kernel.run("%cluster start -n 2 --cpu --name book")
    assert cell.status == "ok", cell.text
    return kernel


def test_a_cell_before_the_cluster_says_what_to_type(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed\n1")
    assert cell.status == "error"
    assert "%cluster start -n 2" in cell.text
    assert "Traceback" not in cell.text


def test_loading_does_not_import_torch(kernel: Kernel) -> None:
    assert "False" in kernel.run("import sys; 'torch' in sys.modules").text


def test_loading_twice_changes_nothing(kernel: Kernel) -> None:
    before = kernel.run("len(get_ipython().input_transformers_cleanup)").text
    assert kernel.run("%reload_ext nbkit").status == "ok"
    assert kernel.run("len(get_ipython().input_transformers_cleanup)").text == before


def test_starting_shows_a_table_with_the_reason_of_each_pin(started: Kernel) -> None:
    cell = started.run("%cluster status")
    assert "<text/html|text/plain>cluster book: 2 ranks over gloo, generation 1" in cell.text
    assert "core 0" in cell.text
    assert "rank 1 is on CPU: asked for with --cpu" in cell.text


def test_output_is_on_screen_while_the_cell_runs(started: Kernel) -> None:
    cell = started.run("%%distributed\nimport time\nprint('early')\ntime.sleep(1.5)\nprint('late')")
    assert cell.when("early") < cell.when("late") - 1
    assert cell.said("early")


def test_each_line_is_sent_once(started: Kernel) -> None:
    cell = started.run("%%distributed\nimport time\nfor i in range(50): print('line', rank, i); time.sleep(0.01)")
    sent = sum(len(content["text"]) for _, kind, content in cell.messages if kind == "stream")
    assert sent < 1.5 * len(cell.text)
    assert {kind for _, kind, _ in cell.messages} <= {"status", "execute_input", "stream"}
    assert all(f"line {rank} {i}\n" in cell.text for rank in range(2) for i in range(50))


def test_writes_to_file_descriptor_1_arrive(started: Kernel) -> None:
    cell = started.run("%%distributed\nimport os, time\nos.write(1, b'from fd 1\\n'); time.sleep(0.5)")
    assert "from fd 1" in cell.text


def test_rich_output_arrives_with_its_rank(started: Kernel) -> None:
    cell = started.run(
        "%%rank 1\nfrom IPython.display import HTML, display\nimport matplotlib.pyplot as plt\n"
        "plt.plot([1, 2]); plt.show()\nshown = display(HTML('<b>one</b>'), display_id='x')\n"
        "shown.update(HTML('<b>two</b>'))\nHTML('<i>last</i>')"
    )
    kinds = [kind for _, kind, _ in cell.messages]
    images = [content for _, _, content in cell.messages if "image/png" in content.get("data", {})]
    assert len(images) == 1
    assert kinds.count("update_display_data") == 1
    html = [content["data"]["text/html"] for _, _, content in cell.messages if "text/html" in content.get("data", {})]
    assert html == ["<b>one</b>", "<b>two</b>", "<i>last</i>"]
    assert "[1]:" in cell.text


CLEARS = "%%distributed\nimport time\nfrom IPython.display import clear_output, display\n"


def left_of(cell: Cell) -> str:
    """Return what the page shows after `cell` has ended. Handle clear_output as a front end does."""
    kept: list[tuple[float, str, dict[str, Any]]] = []
    waits = False
    for message in cell.messages:
        if message[1] == "clear_output":
            kept, waits = kept if message[2]["wait"] else [], message[2]["wait"]
        elif message[1] in ("stream", "display_data"):
            kept, waits = ([] if waits else kept) + [message], False
    return Cell(messages=kept).text


@pytest.mark.parametrize("who", [0, 1])
def test_clear_output_of_a_rank_keeps_the_output_of_others(started: Kernel, who: int) -> None:
    cell = started.run(
        f"{CLEARS}print('mine', rank); display({{'text/plain': f'shown by {{rank}}'}}, raw=True)\n"
        f"dist.barrier(); time.sleep(0.3)\nif rank == {who}: clear_output()\nprint('then', rank)"
    )
    left = left_of(cell)
    assert cell.status == "ok" and all(f"[{rank}] then {rank}" in left for rank in (0, 1)), left
    assert f"[{1 - who}] mine {1 - who}" in left and f"shown by {1 - who}" in left, left
    assert f"mine {who}" not in left and f"shown by {who}" not in left, left


def test_output_that_all_ranks_replace_in_steps_is_gone_at_the_end(started: Kernel) -> None:
    cell = started.run(
        f"{CLEARS}for i in range(4):\n    dist.barrier(); time.sleep(0.1 * rank)\n"
        "    clear_output(wait=True); print('step', i)\nclear_output(wait=True)\nrank + 40"
    )
    left = left_of(cell)
    assert cell.status == "ok" and "step" not in left and "Out[0]: 40" in left and "Out[1]: 41" in left, left
    before = [content["text"] for _, kind, content in cell.messages if kind == "stream"]
    assert said("".join(before), "step 3")


def test_a_failing_cell_is_an_error_of_the_notebook_so_run_all_stops(started: Kernel) -> None:
    cell = started.run("%%distributed\nx = 1\nif rank == 1: raise ValueError('boom')\ndist.barrier()")
    assert cell.status == "error"
    assert cell.text.count("ValueError: boom") == 2  # the traceback, and the error that ends the cell
    assert "Rank 1 failed: ValueError: boom, line 3" in cell.text
    assert "Rank 0: released at line 4" in cell.text
    after = started.run("%%distributed\nx")
    assert after.status == "ok"
    assert "formed anew" in after.text


def test_tracebacks_have_the_number_of_the_notebook_cell(started: Kernel) -> None:
    cell = started.run("%%distributed\na = 1\nundefined_name")
    number = next(content["execution_count"] for _, kind, content in cell.messages if kind == "execute_input")
    assert f"Cell In[{number}], line 3" in cell.text
    assert "# %%distributed" in cell.text or "a = 1" in cell.text


def test_a_semicolon_hides_the_last_value(started: Kernel) -> None:
    assert "Out" not in started.run("%%distributed\nrank;").text


def test_the_stop_button_ends_a_cell_with_an_error_and_keeps_variables(started: Kernel) -> None:
    started.run("%%distributed\nkept = rank")
    cell = started.run("%%distributed\ntime.sleep(60)", at={0.7: started.interrupt})
    assert cell.status == "error"
    assert "KeyboardInterrupt" in cell.text
    assert "Out[1]: 1" in started.run("%%distributed\nkept").text


def test_the_stop_button_ends_a_collective_that_other_ranks_never_join(started: Kernel) -> None:
    cell = started.run("%%rank 0\ndist.all_reduce(torch.ones(1))", at={0.7: started.interrupt})
    assert cell.status == "error"
    assert started.run("%%distributed\ndist.barrier()").status == "ok"


def test_a_missing_name_of_the_notebook_gets_a_hint_to_push_it(started: Kernel) -> None:
    started.run("lr = 0.25")
    cell = started.run("%%distributed\nlr * 2")
    assert "%push lr" in cell.text
    started.run("%push lr")
    assert "Out[0-1]: 0.5" in started.run("%%distributed\nlr * 2").text


def test_pull_returns_an_array_without_torch(started: Kernel) -> None:
    started.run("%%distributed\nweights = torch.arange(3.0) + rank")
    cell = started.run("%pull weights --rank 1")
    assert "array([1., 2., 3.], dtype=float32)" in cell.text
    assert "[array([0., 1., 2.]" in started.run("%pull weights --all").text
    assert "(array([0., 1., 2.], dtype=float32), 0)" in started.run("%pull weights rank").text
    started.run("del rank")
    assert "False" in started.run("'torch' in sys.modules").text


def test_the_ranks_names_do_not_change_the_kernels_names(started: Kernel) -> None:
    started.run("rank = 'mine'")
    started.run("%%distributed\nrank, secret = 5, 6")
    assert "'mine'" in started.run("rank").text
    assert "NameError" in started.run("secret").text
    started.run("%%distributed\nrank = dist.get_rank()")


def test_distributed_on_sends_each_cell_to_all_ranks_until_off(started: Kernel) -> None:
    assert "all 2 ranks" in started.run("%distributed on").text
    try:
        assert "Out[0-1]: 12" in started.run("# a comment\nover = 12\nover").text
        failed = started.run("1\n1 / 0").text
        assert "line 2" in failed and "ZeroDivisionError" in failed  # the line number that the user sees
        assert "True" in started.run("%timeit -n1 -r1 1\n'over' not in dir()").text  # a magic runs in the notebook
        reply = started.client.execute(
            "over = 0", silent=True, reply=True, timeout=60
        )  # a request of the front end itself
        assert reply["content"]["status"] == "ok"
    finally:
        assert "in this notebook again" in started.run("%distributed off").text

    assert started.run("over").text.strip().endswith("0")
    assert "Out[0-1]: 12" in started.run("%%distributed\nover").text
    assert "→ %distributed on" in started.run("%distributed").text


def test_here_also_runs_the_cell_in_the_notebook_and_as_keeps_results(started: Kernel) -> None:
    started.run("%%distributed --here --as outcome\nhere_too = 3\nhere_too * 2")
    assert "3" in started.run("here_too").text
    assert "{0: 6, 1: 6}" in started.run("dict(outcome.values)").text


def test_the_output_of_a_detached_cell_stays_with_that_cell(started: Kernel) -> None:
    message = started.send("%%distributed --detach\nimport time\nfor i in range(4): print('tick', i); time.sleep(0.4)")
    cell = started.collect(message)
    assert cell.seconds < 1.5
    between = started.run("1 + 1")
    assert "tick" not in between.text
    late = started.late(message, 2.5)
    assert "tick 3" in late.text
    assert "ok" in started.run("handle.status").text
    cards = [content["data"]["text/html"] for _, _, content in [*cell.messages, *late.messages] if "data" in content]
    assert "running" in cards[0]
    assert "ok" in cards[-1]  # the same card first shows "running", then the end


def test_detach_assigns_the_handle_to_the_given_name(started: Kernel) -> None:
    started.run("%%distributed --detach background --timeout 1min\n1 + 1")
    assert "{0: 2, 1: 2}" in started.run("dict(background.wait().values)").text


def test_train_wait_makes_run_all_wait(started: Kernel) -> None:
    started.run("%%distributed --detach\ntime.sleep(1); done = True")
    assert started.run("%train wait").seconds > 0.5
    assert "Out[0-1]: True" in started.run("%%distributed\ndone").text


def test_the_stop_button_ends_train_wait_but_not_the_detached_cell(started: Kernel) -> None:
    started.run("%%distributed --detach\ntime.sleep(2); finished = True")
    cell = started.run("%train wait", at={0.5: started.interrupt})
    assert cell.status == "error"
    assert "goes on" in cell.text
    assert started.run("%train wait").status == "ok"
    assert "Out[0-1]: True" in started.run("%%distributed\nfinished").text


@pytest.mark.parametrize("wrapper", ["%%capture held", "%%time"])
def test_distributed_works_inside_another_cell_magic(started: Kernel, wrapper: str) -> None:
    cell = started.run(f"{wrapper}\n%%distributed\nprint('inside')")
    assert cell.status == "ok"
    if "capture" in wrapper:
        assert "inside" not in cell.text
        assert started.run("held.stdout").said("inside")
    else:
        assert cell.said("inside")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("%%distributed --ranks 9\n1", "--ranks 0-1"),
        ("%%rank 9\n1", "%%rank 0-1"),
        ("%%time\n%%rank 9\n1", "%%rank 0-1"),
        ("%pull rank --rank 9", "--rank 0"),
        ("%%distributed --rnaks 0\n1", "unrecognized arguments"),
        ("%%distributed --timeout soon\n1", "'soon' is no length of time"),
        ("%%distributed --detach 7\n1", "not a name that a notebook variable can have"),
        ("%%distributed --detach run --as run\n1", "--detach run"),
        ("%%distributed --local\n1", "--here"),
        ("%strategy --pause", "%train pause"),
        ("%cluster wait", "%train wait"),
        ("%%distributed\nx = = 1", "SyntaxError"),
        ("%%distributed --at-step\n1", "No training is running"),
        ("%push not_defined_anywhere", "not_defined_anywhere is not defined"),
        ("%pull not_defined_anywhere", "NameError"),
        ("%cluster attach nobody", "running: book"),
        ("%cluster start -n 2 --cpu --name book", "attach book"),
        ("%cluster start -n 0 --cpu", "at least one rank"),
        ("%cluster start -n 2 --cpu --name a/b", "letters, digits"),
    ],
)
def test_bad_input_gives_one_message_that_says_what_to_type(started: Kernel, source: str, says: str) -> None:
    cell = started.run(source)
    assert cell.status == "error"
    assert says in cell.text
    assert "→" in cell.text
    assert "Traceback" not in cell.text


def test_help_lists_the_options_of_the_magic(started: Kernel) -> None:
    cell = started.run("%%distributed -h\npass")
    assert cell.status == "ok"
    assert "--at-step" in cell.text


def test_starting_a_second_cluster_says_how_to_return_to_the_first(started: Kernel) -> None:
    text = started.run("%cluster start -n 1 --cpu --name second --ttl 60").text
    back = started.run("%cluster stop\n%cluster attach book")

    assert "book goes on: %cluster attach book" in text
    assert back.status == "ok" and "second has ended: 1 rank\n" in back.text, back.text


def test_list_shows_the_cluster_with_its_time_to_live(started: Kernel) -> None:
    text = started.run("%cluster list").text
    assert "book" in text
    assert "attached" in text
    assert "2 h without notebook" in text


def test_a_pulled_value_is_kept_only_under_its_name(started: Kernel) -> None:
    """Check that Out does not keep the values of all pulls of a session."""
    started.run("%%distributed\npulled = [rank, 7]")
    assert "[0, 7]" in started.run("%pull pulled").text
    assert (
        "<text/plain>[0, 7]"
        in started.run("print(sum(kept is pulled for kept in [*Out.values(), _, __]))\npulled").text
    )
    assert started.run("%pull pulled\nprint(sum(kept is pulled for kept in [*Out.values(), _]))").text.startswith("0\n")
