"""Test the server of the Communication tab with recorded runs, through a real TensorBoard."""

from __future__ import annotations

import json
import os
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

import pytest
from fake_run import HIDDEN, LATE, WEIGHT, FakeRun
from tensorboard.plugins import base_plugin

from nbkit.notebook.board.board import Board
from nbkit.notebook.board.serve import following
from nbkit.notebook.run.follower import PARTS, Run, RunTimeline
from nbkit.notebook.run.step_picture import lateness, picture
from nbkit.records import record_file
from nbkit.records.record_file import Overview, RecordFile
from nbkit.records.records import Header, StepRecord

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs: 4 ranks, one late, that switch to pp; and 64 that switch to three axes."""
    folder = tmp_path_factory.mktemp("board") / "runs"
    small = FakeRun(folder / "small", 4, "ddp", late=2)
    for number in range(60):
        if number == 40:
            small.event("checkpoint", path="model.pt", action="saved")
            small.switch("pp")
        small.step()
    big = FakeRun(folder / "nested" / "big", 64, "ddp", late=37)
    for number in range(12):
        if number == 6:
            big.switch("dp=4 tp=4 pp=4")
        big.step()
    small.close()
    big.close()
    return folder


@pytest.fixture(scope="module")
def board(logdir: Path) -> Iterator[Board]:
    yield Board.start(logdir)
    Board.end()


def ask(board: Board, what: str, **values: object) -> Any:
    url = f"http://127.0.0.1:{board.port}/data/plugin/communication/{what}?{urlencode(values)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def text(board: Board, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{board.port}/{path}", timeout=20) as answer:
        return str(answer.read().decode())


def test_tensorboard_lists_the_tab_and_serves_its_page(board: Board) -> None:
    listing = json.loads(text(board, "data/plugins_listing"))["communication"]

    assert (listing["enabled"], listing["tab_name"]) == (True, "Communication")
    assert "export async function render" in text(board, "data/plugin/communication/static/index.js")
    for name in ("charts.js", "grids.js", "health.js", "tables.js", "paint.js", "live.js", "index.css"):
        page = text(board, f"data/plugin/communication/static/{name}")
        assert "http://" not in page and "https://" not in page  # it loads nothing from other servers
    with pytest.raises(urllib.error.HTTPError, match="404"):
        text(board, "data/plugin/communication/static/..%2Fplugin.py")


def test_the_first_page_has_the_script_that_refreshes_other_tabs(board: Board) -> None:
    assert "communication/static/live.js" in text(board, "")
    before = ask(board, "newest")["newest"]
    (board.logdir / "small" / "events.out.tfevents.1").write_bytes(b"")
    deadline = time.monotonic() + 20
    while ask(board, "newest")["newest"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_runs_are_found_and_summarized(board: Board) -> None:
    runs = {run["name"]: run for run in ask(board, "runs")["runs"]}

    assert set(runs) == {"small", "nested/big"}
    assert (runs["small"]["ranks"], runs["small"]["step"]) == (4, 60)
    assert runs["nested/big"]["ranks"] == 64
    assert sum(runs["small"]["parts"]) == pytest.approx(runs["small"]["seconds"], rel=1e-3)
    assert runs["small"]["strategy"] == "pp=4 schedule=1f1b microbatches=8"


def test_a_reader_with_a_cursor_gets_only_new_points(board: Board) -> None:
    first = ask(board, "poll", run="small")
    again = ask(board, "poll", run="small", epoch=first["epoch"], points=58, events=len(first["events"]))

    assert [point[0] for point in first["points"]] == list(range(1, 61))
    assert [event["kind"] for event in first["events"]] == ["run_started", "checkpoint", "switch"]
    assert (again["keep"], [point[0] for point in again["points"]], again["events"]) == (58, [59, 60], [])
    point = first["points"][10]
    assert sum(point[3 : 3 + len(PARTS)]) == pytest.approx(point[2], rel=1e-3)
    assert {one[-1] for one in first["points"]} == {"dp=4", "pp=4 schedule=1f1b microbatches=8"}


def test_a_missing_run_is_refused(board: Board) -> None:
    for name in ("", "nobody", "../small"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(board, "poll", run=name)


def test_a_step_shows_bars_the_late_rank_and_its_traffic_by_formula(board: Board) -> None:
    step = ask(board, "step", run="small", step=20)

    assert [values[0] for values in step["ranks"]] == [0, 1, 2, 3]
    for values in step["ranks"]:
        assert sum(values[2:]) == pytest.approx(values[1], rel=1e-3)
    assert step["late"]["rank"] == 2 and step["late"]["cause"] == "compute"
    assert step["late"]["seconds"] == pytest.approx(LATE, rel=0.2)
    assert "for rank 2" in step["reading"]
    (row,) = step["table"]
    assert (row["op"], row["axis"], row["calls"], row["bytes"]) == ("all_reduce", "dp", 1, 4 * WEIGHT)
    assert row["formula_bytes"] == 4 * WEIGHT
    # Table, formula and picture show the same bytes. In a ring, each rank sends 3/2 of the size.
    drawn = sum(size for _, _, size in step["traffic"]["modelled"])
    assert row["sent"] == row["formula_sent"] == drawn == 6 * WEIGHT
    assert step["traffic"]["sent"] == []
    assert {(i, j) for i, j, _ in step["traffic"]["modelled"]} == {(0, 1), (1, 2), (2, 3), (3, 0)}
    for memory in step["memory"]:
        assert sum(memory["formula"]) == memory["at_rest"] == memory["peak"] - memory["activations"]


def test_the_late_rank_after_a_switch_does_not_depend_on_steps_before_it(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 4, "ddp", late=2)
    for number in range(12):
        if number == 10:
            run.switch("dp=2 tp=2")
            run.late = None
        run.step()
    run.close()
    found = Run(tmp_path / "run")
    found.refresh()

    assert picture(found, 10)["late"]["rank"] == 2
    for step in (11, 12):
        shown = picture(found, step)
        assert (shown["strategy"], shown["late"]) == ("dp=2 tp=2", None)
        assert "rank 2" not in shown["reading"]
    assert list(found.late) == [None, None]  # the steps since the switch
    assert lateness(found) == {"of": 2, "rows": []}


@pytest.mark.parametrize("newest_only", [False, True])
def test_sentence_mark_and_bars_use_the_same_twenty_steps(tmp_path: Path, newest_only: bool) -> None:
    run, found = FakeRun(tmp_path / "run", 4, "ddp", late=2), Run(tmp_path / "run", newest_only=newest_only)
    for number in range(35):
        run.late = 2 if number < 30 else 0
        run.step()
    run.close()
    found.refresh()

    shown = picture(found, 35, usual=True)

    assert shown["of"] == "Steps 16 to 35, medians" and shown["late"]["rank"] == 2
    compute = {row[0]: row[2] for row in shown["ranks"]}
    elsewhere = median(compute[rank] for rank in (0, 1, 3))
    said = f"It computes for {compute[2] * 1e3:.3g} ms; ranks 0, 1, 3, with the same share, need"
    assert f"{said} {elsewhere * 1e3:.3g} ms" in shown["reading"]
    assert shown["late"]["seconds"] == pytest.approx(compute[2] - elsewhere, abs=1e-4)
    assert newest_only or lateness(found)["rows"][0] == {"rank": 2, "steps": 34, "cause": "compute"}


def test_steps_that_lack_a_record_of_a_rank_are_in_no_median(tmp_path: Path) -> None:
    run, found = FakeRun(tmp_path, 4, "ddp"), Run(tmp_path, newest_only=True)
    run.step()
    found.refresh()
    for _ in range(50):
        run.step()
    run.close()
    found.refresh()  # all 50 steps of the lowest rank are read, and the newest of the others

    assert len(found.near(51)) == 20 and {len(one) for one in found.near(51)} == {4}
    for step in (35, 40):
        del found.steps[step][3]
    shown = picture(found, 51, usual=True)
    assert shown["of"] == "Steps 31 to 50, medians of 18"


def test_memory_is_shown_with_the_formula_of_the_strategy_under_which_it_was_counted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 4, "dp=4")
    for number in range(6):
        if number == 4:
            run.switch("zero3")
        run.step()
    run.close()
    found = Run(tmp_path / "run")
    found.refresh()

    shown = picture(found, 6)
    assert shown["strategy"] == "dp=4 zero=3"
    for row in shown["memory"]:
        assert (row["step"], row["strategy"]) == (2, "dp=4")
        assert sum(row["formula"]) == row["at_rest"]


def test_the_picture_of_a_pipeline_shows_the_most_typical_kept_step(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 4, "pp=4 schedule=1f1b")
    for number in range(102):
        run.slow = number + 1 in (2, 100)
        run.step()
    run.close()
    found = Run(tmp_path / "run", newest_only=True)
    found.refresh()

    assert sorted(found.details) == [2, 3, 50, 100]
    assert picture(found, 102, usual=True)["moments"]["step"] in (3, 50)
    assert picture(found, 102)["moments"]["step"] == 100  # the step nearest to the one asked for
    found.curve.events.append({"kind": "switch", "step": 98})
    assert picture(found, 102, usual=True)["moments"]["step"] == 100  # the only kept step of this strategy


def test_a_long_run_that_is_opened_late_has_the_groups_of_its_last_switch(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 4, "ddp")
    for number in range(1200):
        if number == 20:
            run.switch("dp=2 tp=2")
        run.step()
    run.close()
    found = Run(tmp_path / "run")
    found.refresh()

    shown = picture(found, found.newest)
    assert {row["axis"]: row["busbw"] > 0 for row in shown["table"]} == {"dp": True, "tp": True}
    assert {(i, j) for i, j, _ in shown["traffic"]["modelled"]} >= {(0, 1), (2, 3), (0, 2), (1, 3)}


def test_a_step_without_timed_calls_shows_those_of_an_earlier_step(board: Board) -> None:
    shown = [ask(board, "step", run="small", step=step)["table"][0] for step in range(10, 16)]

    for name in ("seconds", "algbw", "busbw", "overlap"):
        values = [row[name] for row in shown]
        assert values[:5] == values[:1] * 5 and None not in values
    assert shown[0]["seconds"] != shown[5]["seconds"]


def test_the_newest_step_shows_exact_messages_and_the_planned_and_measured_pipeline(board: Board) -> None:
    step = ask(board, "step", run="small", step="newest")

    assert step["step"] == 60
    each = HIDDEN / 2
    assert sorted(step["traffic"]["sent"]) == [[i, j, each] for i in range(4) for j in (i - 1, i + 1) if 0 <= j < 4]
    row = next(row for row in step["table"] if row["op"] == "send")
    assert row["formula_bytes"] == row["bytes"] == row["sent"] == 6 * each
    assert (
        next(one["sent"] for one in ask(board, "runs")["runs"] if one["name"] == "small") == 2 * each
    )  # the busiest rank
    moments = step["moments"]
    assert (moments["kind"], moments["step"], moments["ranks"]) == ("pipeline", 50, [0, 1, 2, 3])
    # 1f1b: (p - 1) / (m + p - 1) is idle if transfers cost nothing.
    assert moments["planned_bubble"] == pytest.approx(3 / 11, abs=0.002)
    assert moments["planned_span"] == pytest.approx((8 + 3) * (0.4 + 0.8) / 1e3)
    assert moments["measured_bubble"] > moments["planned_bubble"] + 0.05
    assert [len(row) for row in moments["measured"]] == [len(row) for row in moments["planned"]] == [16] * 4


def test_a_step_of_64_ranks_with_several_pipelines_is_shown(board: Board) -> None:
    step = ask(board, "step", run="nested/big", step=12, replica=3)

    assert len(step["ranks"]) == 64 and step["traffic"]["world"] == 64
    assert len(set(step["hosts"])) == 8
    assert step["moments"]["kind"] == "laps"  # step 3 is the last that was kept, and had no pipeline
    assert ask(board, "step", run="nested/big", step=3)["moments"]["kind"] == "laps"
    assert {row["axis"] for row in step["table"]} == {"dp", "tp", "pp"}


def test_a_step_without_a_record_is_empty(board: Board) -> None:
    assert ask(board, "step", run="small", step=1000) == {"step": 1000, "ranks": []}


def test_a_run_is_followed_in_bounded_memory(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", 2, "ddp")
    run = Run(tmp_path / "run")
    fake.step()
    run.refresh()
    assert run.newest == 1
    epochs = {run.timeline.epoch}
    for number in range(2, 1201):
        fake.step()
        if number % 20 == 0:
            run.refresh()
            epochs.add(run.timeline.epoch)
    fake.close()

    assert run.newest == 1200
    assert len(run.steps) <= 64 and len(run.timeline.points) <= 480 and len(run.details) <= 4
    points = run.timeline.points
    assert [b[0] - b[1] for b in points[1:]] == [a[0] for a in points[:-1]]  # no step is missing or counted twice
    assert sum(point[1] for point in points) == 1200
    assert all(span == 1 for _, span, *_ in points[-200:])  # so each can be shown alone
    assert len(epochs) < 8  # a reader rarely gets everything again
    # A step that is no longer in memory is read from the files.
    shown = picture(run, 77)
    assert (shown["step"], shown["span"], len(shown["ranks"])) == (77, 1, 2)
    # A reader who opens it now sees the whole run too.
    opened = Run(tmp_path / "run")
    opened.refresh()
    assert opened.newest == 1200 and opened.timeline.points[0][0] <= 8
    assert [event["kind"] for event in opened.curve.events] == ["run_started"]
    assert sum(point[1] for point in opened.timeline.points) == 1200


def test_reading_only_the_newest_steps_gives_the_same_pictures(tmp_path: Path) -> None:
    fake, runs = FakeRun(tmp_path, 4, "ddp", late=1), [Run(tmp_path), Run(tmp_path, newest_only=True)]
    for steps in (3, 60, 1):
        if steps == 1:
            fake.switch("pp")
        for _ in range(steps):
            fake.step()
        for run in runs:
            run.refresh()
        whole, passing = (picture(run, run.newest) for run in runs)
        assert passing == whole and whole["step"] == fake.number and whole["reading"]
    assert runs[1].curve.events == runs[0].curve.events
    assert len(runs[0].steps) == 64 and len(runs[1].steps) < 64 // 2 and not runs[1].timeline.points
    fake.close()


def test_mark_and_sentence_name_the_same_rank_even_if_one_step_differs(tmp_path: Path) -> None:
    fake, run = FakeRun(tmp_path, 4, "ddp", late=2), Run(tmp_path)
    for late in (2, 2, 2, 2, 0):
        fake.late = late
        fake.step()
    run.refresh()
    seen = picture(run, 5, usual=True)
    assert seen["of"] == "Steps 2 to 5, medians" and picture(run, 5)["of"] == "Step 5"
    medians = {row[0]: row[2] for row in seen["ranks"]}
    assert max(medians, key=lambda rank: medians[rank]) == 2  # bars and sentence use the same steps
    assert picture(run, 5)["late"]["rank"] == 0
    assert "for rank 2" in seen["reading"] and seen["late"]["rank"] == 2
    fake.close()


def test_steps_that_are_repeated_after_a_checkpoint_replace_the_old_ones(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", 2, "ddp")
    run = Run(tmp_path / "run")
    for _ in range(10):
        fake.step()
    run.refresh()
    fake.number = 4
    fake.step()
    run.refresh()

    assert run.newest == 5
    assert [point[0] for point in run.timeline.points] == [1, 2, 3, 4, 5]


def test_a_rank_that_has_died_does_not_stop_the_picture(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path / "run", 3, "ddp")
    run = Run(tmp_path / "run")
    for number in range(30):
        if number == 10:
            fake.dead.add(1)
        fake.step()
    gone = fake.files[1].path
    os.utime(gone, (time.time() - 60,) * 2)  # nothing was written for a minute
    run.refresh()

    assert run.newest == 22
    shown = picture(run, 22)
    assert [values[0] for values in shown["ranks"]] == [0, 2] and shown["missing"] == [1]


def test_a_step_is_shown_only_after_the_slowest_rank_wrote_it(tmp_path: Path) -> None:
    """The ranks write a few times each second, and short steps are many by then."""
    fake = FakeRun(tmp_path / "run", 2, "ddp")
    run = Run(tmp_path / "run")
    for number in range(30):
        if number == 10:
            fake.dead.add(1)
        fake.step()
    run.refresh()
    assert run.newest == 10 and picture(run, run.newest, usual=True)["missing"] == []
    whole = picture(run, run.newest)["table"]
    for _ in range(60):
        fake.step()
    run.refresh()  # a rank that writes its steps no more, but its health, does not stop the picture
    assert run.newest > 30 and picture(run, run.newest)["table"][0]["bytes"] == whole[0]["bytes"] / 2


def test_a_step_that_only_the_overview_has_is_shown_as_a_mean(tmp_path: Path) -> None:
    path = tmp_path / "telemetry" / "rank0.jsonl"
    file = RecordFile(path, lambda part: [Header(0, 1, part)], part_bytes=4000)
    overview = Overview(path, lines=8)
    for number in range(31, 131):
        step = StepRecord(number, seconds=float(number), parts={"compute": float(number)})
        file.write([step])
        overview.add(step)
    file.close()

    newest, old = record_file.step_at(path, 130), record_file.step_at(path, 35)

    assert newest is not None and (newest.seconds, newest.span) == (130.0, 1)
    assert old is not None and old.step - old.span < 35 <= old.step
    assert old.seconds == pytest.approx(old.step - (old.span - 1) / 2)
    assert record_file.step_at(path, 131) is None and record_file.step_at(path, 5) is None


def test_folding_keeps_means_and_never_mixes_strategies() -> None:
    line = RunTimeline(points=10)
    for step in range(1, 101):
        line.add([step, 1, float(step), *[0.0] * len(PARTS), None, 1.0, "a" if step <= 45 else "b"])

    assert len(line.points) <= 10
    for point in line.points:
        assert point[2] == pytest.approx(point[0] - (point[1] - 1) / 2, rel=1e-3)
        assert point[-1] == ("a" if point[0] <= 45 else "b")
        assert point[-1] == ("a" if point[0] - point[1] + 1 <= 45 else "b")


def test_a_tensorboard_started_by_hand_finds_the_plugin(tmp_path: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["tensorboard_plugins"]
    entry = EntryPoint("communication", declared["communication"], "tensorboard_plugins")
    context = base_plugin.TBContext(logdir=str(tmp_path))

    plugin = entry.load()(context)
    assert plugin.is_active() and "/poll" in plugin.get_plugin_apps()


def test_other_pages_pass_unchanged() -> None:
    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Length", "4")])
        return [b"page"]

    seen: list[Any] = []
    for path in ("/", "/data/runs"):
        environ = {"PATH_INFO": path, "REQUEST_METHOD": "GET"}
        assert b"".join(following(app)(environ, lambda status, headers: seen.append((status, headers)))) == b"page"
    assert seen == [("200 OK", [("Content-Length", "4")])] * 2
