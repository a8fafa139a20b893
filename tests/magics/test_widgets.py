"""Test what a front end receives of the ranks' widgets and progress bars, in a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kernel_client import Cell, Kernel

BAR = (
    "import time\nfor i in tqdm(range(20), desc='epoch'): time.sleep(0.05)\n"
    "print('after the bar', rank); time.sleep(0.5); print('the end')"
)


def updates(cell: Cell, name: str) -> dict[str, list[tuple[float, Any]]]:
    """Return comm id -> (seconds, value) of each update of the state `name` that was sent to a page."""
    found: dict[str, list[tuple[float, Any]]] = {}
    for at, kind, content in cell.messages:
        state = content.get("data", {}).get("state", {}) if kind == "comm_msg" else {}
        if name in state:
            found.setdefault(content["comm_id"], []).append((at, state[name]))
    return found


def models(cell: Cell, name: str) -> list[str]:
    """Return the ids of the models of kind `name` that a page was told to make."""
    opened = [content for _, kind, content in cell.messages if kind == "comm_open"]
    return [content["comm_id"] for content in opened if content["data"]["state"].get("_model_name") == name]


def is_live(kernel: Kernel) -> bool:
    cell = kernel.run("%%distributed\nimport time; print('early'); time.sleep(1); print('late')")
    return cell.when("early") < cell.when("late") - 0.5


def test_a_widget_bar_moves_while_the_cell_runs_and_output_stays_live(kernel: Kernel) -> None:
    cell = kernel.run(f"%%distributed\nfrom tqdm.notebook import tqdm\n{BAR}")

    bars = models(cell, "FloatProgressModel")
    moved = {comm: [value for _, value in values] for comm, values in updates(cell, "value").items() if comm in bars}
    assert len(bars) == len(moved) == 2  # one for each rank
    for values in moved.values():
        assert len(values) > 4 and values == sorted(values) and values[-1] == 20
        assert len(values) < 25  # several changes share a message
    shown = [content["data"] for _, kind, content in cell.messages if kind == "display_data"]
    assert all("application/vnd.jupyter.widget-view+json" in data for data in shown) and len(shown) == 2
    assert cell.when("after the bar 0") < cell.when("the end") - 0.2
    assert is_live(kernel)


def test_a_tqdm_auto_bar_is_one_line_of_text_for_all_ranks(kernel: Kernel) -> None:
    cell = kernel.run(f"%%distributed\nfrom tqdm.auto import tqdm\n{BAR}")

    bars = [content["text"] for _, kind, content in cell.messages if kind == "stream" and "epoch:" in content["text"]]
    assert len(bars) > 4 and any("[0-1] epoch:" in text for text in bars)
    assert "100%" in cell.text
    assert not any(kind.startswith("comm_") for _, kind, _ in cell.messages)
    assert is_live(kernel)


def test_nested_bars_stay_on_one_line(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed\nfrom tqdm.auto import tqdm\nimport time\n"
        "for i in tqdm(range(3), desc='outer'):\n"
        "    for j in tqdm(range(5), desc='inner', leave=False): time.sleep(0.03)\n"
        "    time.sleep(0.2)"
    )
    texts = [content["text"] for _, kind, content in cell.messages if kind == "stream"]
    assert any("outer:" in text and "inner:" in text for text in texts)
    assert "\x1b[A" not in "".join(texts)
    assert "".join(texts).count("\n") <= 2  # only the outer bar remains: one line, or one for each rank


def test_an_output_widget_captures_only_what_its_rank_prints_inside_it(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed\nimport ipywidgets, time\nout = ipywidgets.Output()\ndisplay(out)\n"
        "with out:\n    print('inside', rank)\n    time.sleep(0.3)\n    print('more\\r 10%\\r 20%')\n"
        "    display(ipywidgets.HTML('<b>in it</b>'))\n"
        "print('outside', rank)"
    )
    areas = models(cell, "OutputModel")
    held = {comm: values[-1][1] for comm, values in updates(cell, "outputs").items()}
    assert sorted(held) == sorted(areas) and len(areas) == 2
    assert sorted(outputs[0]["text"] for outputs in held.values()) == ["inside 0\n 20%\n", "inside 1\n 20%\n"]
    assert all("widget-view" in str(outputs[1]["data"]) for outputs in held.values())
    assert "inside" not in cell.text and "[0] outside 0" in cell.text and "[1] outside 1" in cell.text
    assert not updates(cell, "msg_id")  # with it, a page would capture the output of all ranks

    kernel.run("%%distributed\nout.append_stdout('appended')")
    assert "Out[0-1]: (3, 'appended')" in kernel.run("%%distributed\nlen(out.outputs), out.outputs[-1]['text']").text
    cleared = kernel.run("%%distributed\nout.clear_output()\nwith out: print('anew')")
    assert {values[-1][1][0]["text"] for values in updates(cleared, "outputs").values()} == {"anew\n"}
    assert is_live(kernel)


def test_bars_of_rich_move_while_the_cell_runs(kernel: Kernel) -> None:
    pytest.importorskip("rich", reason="pip install rich")
    cell = kernel.run(
        "%%distributed\nimport time, rich.progress\nfor i in rich.progress.track(range(10)): time.sleep(0.1)"
    )
    told = updates(cell, "outputs")
    assert len(told) == 2
    for values in told.values():
        percent = [outputs[0]["data"]["text/plain"] for _, outputs in values if outputs]
        assert len({*percent}) > 3 and "100%" in percent[-1]
    assert is_live(kernel)


def test_a_message_of_a_page_to_a_widget_reaches_its_rank(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%rank 1\nimport ipywidgets\nheard = []\nbox = ipywidgets.IntSlider()\n"
        "box.observe(lambda change: heard.append(change['new']), 'value')\ndisplay(box)"
    )
    (slider,) = models(cell, "IntSliderModel")
    data = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    client = kernel.client
    client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": slider, "data": data}))
    kernel.run("%%distributed\nimport time; time.sleep(0.2)")
    assert "Out[1]: [7]" in kernel.run("%%rank 1\nheard").text


@pytest.mark.long
def test_a_notebook_that_attaches_later_shows_the_bar(kernel: Kernel) -> None:
    kernel.run(
        "%%distributed --detach\nfrom tqdm.notebook import tqdm\nimport time, os\n"
        "for i in tqdm(range(300)):\n    time.sleep(0.02 if i < 20 or os.path.exists('go on') else 0.1)"
    )
    kernel.restart(kill=True)
    kernel.run("%load_ext nbkit")
    message = kernel.send("%cluster attach shown")
    attached = kernel.collect(message)
    Path(kernel.environment["NBKIT_HOME"], "go on").write_text("")
    kernel.run("%train wait")
    seen = Cell(messages=[*attached.messages, *kernel.late(message, 1.0).messages])

    bars = models(seen, "FloatProgressModel")
    assert len(bars) == 2
    assert [updates(seen, "value")[bar][-1][1] for bar in bars] == [300, 300]
    assert all(len(updates(seen, "value")[bar]) > 3 for bar in bars)


def test_a_widget_whose_text_cannot_be_encoded_shows_it_as_an_escape(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%rank 0\nimport ipywidgets\ndisplay(ipywidgets.HTML('odd ' + chr(0xD800) + ' text')); print('on')"
    )

    assert cell.status == "ok", cell.text
    assert "on" in cell.text
    opened = [content["data"]["state"] for _, kind, content in cell.messages if kind == "comm_open"]
    assert any("odd \\ud800 text" in str(state.get("value")) for state in opened)
    assert is_live(kernel)
