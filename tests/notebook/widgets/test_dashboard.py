"""Test the content of a dashboard without a widget: messages, text and a page, made from record files."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import os
import re
import shutil
import sys
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest

from nbkit.commands import main
from nbkit.durations import text_of
from nbkit.errors import UsageError
from nbkit.notebook.run.follower import COLUMNS, Curve, Run, packed
from nbkit.notebook.run.reader import RunReader, read_run
from nbkit.notebook.widgets.dashboard.dashboard import Dashboard, RefreshThread
from nbkit.notebook.widgets.dashboard.svg_view import svg_of
from nbkit.notebook.widgets.dashboard.text_view import lines_of, plain
from nbkit.notebook.widgets.javascript import joined
from nbkit.notebook.widgets.run_report import about, write_report
from nbkit.notebook.widgets.training_card import card_text
from nbkit.records.event_words import GREAT, mark_of
from nbkit.records.events import Event, Rebalanced, Resized, RunStarted, RunStopped, StepDone, Switched
from nbkit.records.record_file import newest_run
from nbkit.records.records import EventRecord, Header, StepRecord

SVG = "{http://www.w3.org/2000/svg}"
SOURCE = Path(__file__).resolve().parents[2] / "support" / "fake_run.py"


def fake_run(folder: Path, world: int, strategy: str, **how: Any) -> Any:
    spec = importlib.util.spec_from_file_location("fake_run", SOURCE)
    assert spec is not None and spec.loader is not None
    module = sys.modules.get("fake_run") or importlib.util.module_from_spec(spec)
    if "fake_run" not in sys.modules:
        sys.modules["fake_run"] = module
        spec.loader.exec_module(module)
    return module.FakeRun(folder, world, strategy, **how)


def drawn_in(bundle: dict[str, Any]) -> str:
    """Return the SVG of the image in a bundle."""
    (data,) = re.findall(r"<img src='data:image/svg\+xml;base64,([^']*)'", bundle["text/html"])
    return base64.b64decode(data).decode()


def step(number: int, **numbers: Any) -> StepRecord:
    told = {"loss": 1.0 / number, "tokens": 10, "seconds": 0.5, "strategy": "dp=2", **numbers}
    return StepRecord(number, start_ns=number * 10**9, seconds=0.5, numbers=told)


def curve_of(num: int, at_most: int = 4000) -> Curve:
    curve = Curve(at_most)
    curve.take(Header(0, 2, 1, unix_s=100.0))
    for number in range(1, num + 1):
        curve.take(step(number))
    return curve


def test_a_point_has_a_value_for_each_axis() -> None:
    curve = curve_of(3)
    point = dict(zip(COLUMNS, curve.points[-1], strict=True))
    assert point == {"step": 3, "span": 1, "time": 2.5, "tokens": 30, "loss": 1 / 3, "rate": 20, "strategy": 0}
    assert array("d", packed(curve.points)).tolist() == [value for one in curve.points for value in one]


def test_a_missing_loss_or_rate_is_nan() -> None:
    curve = curve_of(1)
    curve.take(StepRecord(2))
    loss, rate = curve.points[-1][4:6]
    assert math.isnan(loss) and math.isnan(rate) and curve.points[-1][3] == 10


def test_all_views_keep_the_same_rate_and_sentence_for_a_few_steps(tmp_path: Path) -> None:
    run = fake_run(tmp_path, 4, "ddp", late=2)
    run.switch("dp=4 zero=3")
    for _ in range(31):
        run.step()
    reader, told = RunReader(tmp_path), []
    for _ in range(4):
        shown = reader.snapshot()
        told.append(shown["step"]["reading"])
        rate = shown["state"]["rate"]
        last = int(shown["points"][-1][0]) // 5 * 5  # the same steps until five more are made
        usual = [point[5] for point in shown["points"] if last - 20 < point[0] <= last]
        assert rate == pytest.approx(median(usual), rel=1e-4)
        words = f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"
        for view in (plain(lines_of(shown)), svg_of(shown), card_text(shown)):
            assert f"{words} tokens/s" in view
            assert " ".join(told[0].split()[:5]) in " ".join(re.sub("<[^>]*>", " ", view).split())
        run.step()
    assert len(set(told)) == 1
    run.close()


def test_the_rate_of_data_without_tokens_is_in_rows_in_every_view(tmp_path: Path) -> None:
    run = fake_run(tmp_path, 2, "ddp")
    run.of_rows = True
    for _ in range(3):
        run.step()
    run.close()
    shown = RunReader(tmp_path).snapshot()

    assert shown["state"]["unit"] == "rows"
    for view in (plain(lines_of(shown)), svg_of(shown), card_text(shown), card_text(shown, ended=True)):
        assert " rows/s" in view and "tokens" not in view
    assert "\nrows/s   " in plain(lines_of(shown))  # its curve, as wide as that of the loss
    curve = curve_of(2)
    curve.take(step(3, samples=10))
    curve.take(StepRecord(4))
    assert curve.unit == "rows"


def test_the_steps_that_a_sentence_uses_change_only_every_five_steps(tmp_path: Path) -> None:
    run = fake_run(tmp_path, 2, "ddp")
    for _ in range(32):
        run.step()
    run.switch("dp=2 zero=3")
    for _ in range(6):
        run.step()
    run.close()
    read = Run(tmp_path)
    read.refresh()
    steps = {step: [one[0].step for one in read.near(step)] for step in (3, 5, 9, 25, 29, 33, 37, 38)}
    assert steps[3] == [2, 3] and steps[5] == steps[9] == [
        2,
        3,
        4,
        5,
    ]  # not the first step: it makes what later ones reuse
    assert steps[25] == steps[29] == list(range(6, 26))
    assert steps[33] == [33] and steps[37] == steps[38] == [34, 35]  # only steps of the same strategy


def test_a_reader_gets_only_new_points() -> None:
    curve = curve_of(3)
    grown = curve.since(curve.epoch, 2, 0)
    assert (grown.keep, [point[0] for point in grown.points]) == (2, [3])
    assert curve.since(curve.epoch - 1, 2, 0).keep == 0


def test_a_training_that_goes_back_loses_its_later_points() -> None:
    curve = curve_of(5)
    before = curve.epoch
    curve.take(step(3, loss=9.0))
    assert [point[0] for point in curve.points] == [1, 2, 3] and curve.points[-1][4] == 9.0
    assert curve.epoch > before


def test_the_points_of_a_long_run_are_bounded_and_never_mix_strategies() -> None:
    curve = curve_of(1000, at_most=100)
    for number in range(1001, 3000):
        curve.take(step(number, strategy="tp=2"))
    assert len(curve.points) <= 100
    assert sum(point[1] for point in curve.points) == 2999
    assert curve.points[-1][0] == 2999 and curve.points[-1][3] == pytest.approx(29990)
    ends = [point[0] for point in curve.points if curve.strategies[int(point[6])] == "dp=2"]
    assert ends[-1] == 1000


def test_an_event_has_its_own_time() -> None:
    curve = curve_of(2)
    curve.take(EventRecord(2, ns=5 * 10**9, event={"kind": "switch", "new": "tp=2"}))
    (event,) = curve.events
    assert event.items() >= {"step": 2, "time": 4.0, "kind": "switch", "new": "tp=2", "name": "tp=2"}.items()


@pytest.fixture
def run(tmp_path: Path) -> Any:
    made = fake_run(tmp_path / "runs" / "one", 4, "dp=4", late=2)
    for _ in range(20):
        made.step()
    yield made
    made.close()


class Page:
    """Assembles messages as the page does."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []
        self.events: list[Any] = []
        self.kinds: list[str] = []
        self.sent = 0  # points in the last message
        self.step: dict[str, Any] = {}
        self.state: dict[str, Any] = {}

    def take(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.kinds.append(content["kind"])
        if content["kind"] == "curve":
            values = array("d", buffers[0]).tolist()
            self.sent = len(values) // len(COLUMNS)
            new = [values[i : i + len(COLUMNS)] for i in range(0, len(values), len(COLUMNS))]
            assert content["keep"] <= len(self.points) and content["events_keep"] <= len(self.events)
            self.points = self.points[: content["keep"]] + new
            self.events = self.events[: content["events_keep"]] + content["events"]
        elif content["kind"] in ("step", "state"):
            setattr(self, content["kind"], content[content["kind"]])


def test_messages_add_up_to_the_run_and_stop_when_nothing_is_new(run: Any) -> None:
    page = Page()
    pump = RefreshThread(lambda: run.folder, page.take)
    pump.turn(1.0)
    assert [point[0] for point in page.points] == list(range(1, 21))
    assert page.step["step"] == 20 and len(page.step["ranks"]) == 4 and page.state["world"] == 4
    assert "rank 2" in page.step["reading"]

    page.kinds.clear()
    pump.turn(100.0)
    assert page.kinds == []

    run.switch("pp=4 schedule=1f1b microbatches=8")
    run.step()
    pump.turn(200.0)
    assert [point[0] for point in page.points] == list(range(1, 22)) and page.sent == 1
    assert page.events[-1]["kind"] == "switch" and page.step["moments"] is not None
    assert sorted(page.kinds) == ["curve", "state", "step"]  # the rate has changed

    late = Page()
    pump._send = late.take
    pump.again()
    pump.turn(201.0)
    assert late.points == page.points and late.events == page.events and late.step and late.state == page.state


def test_the_refresh_waits_for_a_run_and_follows_the_next_one(tmp_path: Path, run: Any) -> None:
    page, where = Page(), [None]
    pump = RefreshThread(lambda: where[0], page.take)
    pump.turn(1.0)
    assert page.state["stands"] == "waiting" and page.points == []
    where[0] = run.folder
    pump.turn(2.5)
    assert len(page.points) == 20
    other = fake_run(tmp_path / "runs" / "two", 2, "dp=2")
    other.step()
    other.close()
    where[0] = other.folder
    pump.turn(5.0)
    assert len(page.points) == 1 and page.state["run"] == "two"


def test_a_run_whose_first_parts_are_deleted_begins_with_its_overview(tmp_path: Path) -> None:
    made = fake_run(tmp_path / "long", 2, "dp=2")
    for file in made.files:
        file._part_bytes = 40_000
    for _ in range(900):
        made.step()
    made.close()
    points = RunReader(made.folder).snapshot()["points"]
    numbers = [point[0] for point in points]
    assert numbers == sorted(set(numbers)) and numbers[0] < 10 and numbers[-1] == 900
    assert sum(point[1] for point in points) == 900


def test_the_text_of_a_dashboard_has_the_run_the_late_rank_and_the_bytes(run: Any) -> None:
    run.event("run_stopped", reason="done")
    text = plain(lines_of(RunReader(run.folder).snapshot(), 100))
    assert "dp=4   4 ranks, ended: done" in text and "step 20" in text
    assert "rank 2" in text and "◀ late" in text and "waiting for peers" in text
    assert re.search(r"dp +measured 25.2 MB +by formula 25.2 MB", text) and "Memory, counted in step 2" in text
    assert max(len(line) for line in text.splitlines()) <= 130


def test_tokens_of_experts_are_shown_by_rank_and_their_imbalance_over_the_run(tmp_path: Path) -> None:
    run = fake_run(tmp_path, 4, "dp=4 ep=2 experts=0:1-5")
    for _ in range(1000):
        run.step()
    run.close()
    seen = RunReader(tmp_path).snapshot()

    assert seen["strategies"] == ["dp=4 ep=2 experts=…"]  # the numbers of all experts may not fit
    experts = seen["step"]["experts"]
    assert experts["ranks"][1] == [1, [[4, 2000.0], [5, 2250.0], [6, 2500.0], [7, 2750.0]]]
    assert "rank 1   9,500   4 experts, 127% of the mean" in plain(lines_of(seen))
    steps = [number for number, _ in experts["imbalance"]]
    assert steps == sorted(steps) and steps[-1] == 1000 and 200 <= len(steps) < 400
    assert experts["imbalance"][0][1] > 1.6 and experts["imbalance"][-1][1] == pytest.approx(1.5, abs=1e-3)


def test_many_ranks_are_shown_in_few_lines(tmp_path: Path) -> None:
    made = fake_run(tmp_path / "big", 64, "dp=8 tp=8", late=37)
    for _ in range(3):
        made.step()
    made.close()
    assert len(plain(lines_of(RunReader(made.folder).snapshot())).splitlines()) < 45


def test_another_run_can_be_chosen_or_shown_beside_the_current_one(tmp_path: Path) -> None:
    for name, steps in (("first", 3), ("second", 5)):
        run = fake_run(tmp_path / name, 2, "ddp")
        for _ in range(steps):
            run.step()
        run.close()
    sent: list[dict[str, Any]] = []
    refresh = RefreshThread(lambda: tmp_path / "second", lambda content, buffers: sent.append(content | {"b": buffers}))

    def last(kind: str) -> dict[str, Any]:
        return next(one for one in reversed(sent) if one["kind"] == kind)

    refresh.turn(0.0)
    assert last("runs")["runs"] == ["second", "first"] and last("state")["state"]["run"] == "second"
    refresh.choose(beside="first")
    refresh.turn(1.0)
    assert (last("beside")["run"], len(last("beside")["b"][0])) == ("first", 3 * len(COLUMNS) * 8)
    refresh.choose(run="first", beside="")
    refresh.turn(2.0)
    assert last("runs")["pinned"] == "first" and last("runs")["beside"] == ""
    assert last("state")["state"]["run"] == "first" and len(last("curve")["b"][0]) == 3 * len(COLUMNS) * 8
    refresh.choose(run="")
    refresh.turn(3.0)
    assert last("state")["state"]["run"] == "second"
    refresh.choose(run="../elsewhere")  # only runs of the list can be chosen
    refresh.turn(4.0)
    assert last("state")["state"]["run"] == "second"


def test_a_dashboard_keeps_the_pinned_run_and_steps(tmp_path: Path) -> None:
    first = fake_run(tmp_path / "first", 2, "ddp")
    for number in range(30):
        if number == 20:
            first.switch("zero3")
        first.step()
    first.close()
    where = [tmp_path / "first"]
    sent: list[dict[str, Any]] = []
    board = Dashboard(tmp_path / "first", steps=(5, 12))
    board.close()
    board._refresh = refresh = RefreshThread(lambda: where[0], lambda content, buffers: sent.append(content))
    refresh.pin((5, 12))
    refresh.turn(0.0)
    second = fake_run(tmp_path / "second", 2, "tp")
    for _ in range(4):
        second.step()
    second.close()
    where[0] = tmp_path / "second"  # another training begins
    refresh.turn(2.0)

    runs = [one for one in sent if one["kind"] == "runs"][-1]
    assert (runs["pinned"], runs["steps"]) == ("first", [5, 12])
    snapshot = board.snapshot()
    assert [point[0] for point in snapshot["points"]] == list(range(5, 13))
    assert snapshot["events"] == [] and (snapshot["state"]["run"], snapshot["state"]["left"]) == ("first", "")
    assert [one for one in sent if one["kind"] == "step"][-1]["step"]["asked"] == 12
    assert "first · steps 5 to 12" in drawn_in(board.still()) and "zero3" not in drawn_in(board.still())
    assert "step 12" in str(board)

    refresh.unpin()
    refresh.turn(4.0)
    assert board.snapshot()["state"]["run"] == "second" and len(board.snapshot()["points"]) == 4
    with pytest.raises(UsageError, match="no such steps"):
        Dashboard(tmp_path / "first", steps=(9, 3))


def test_a_report_is_one_page_that_loads_nothing(run: Any, tmp_path: Path) -> None:
    assert about(RunReader(run.folder).snapshot()) == []  # as in records of an older release
    run.event("checkpoint", path="</script><b>")
    run.event("run_started", strategy="dp=4", arithmetic="global 8", total=9, about={"model": "Net", "seed": "3"})
    run.switch("zero3")
    run.event("lr_changed", old=0.002, new=0.000123456)
    told = dict(about(RunReader(run.folder).snapshot()))
    assert (told["model"], told["batch"]) == ("Net", "global 8, under dp=4")
    again = told["to repeat it"].splitlines()
    assert again[0] == 'Trainer(..., strategy="dp=4", seed=3)'
    assert again[-3:] == [
        "trainer.fit(9)   after step 20",
        "after step 20: %strategy dp=4 zero=3",
        "after step 20: trainer.lr = 0.000123456",
    ]
    page = write_report(run.folder, tmp_path / "run.html").read_text()
    assert (
        not re.search(r"(?:src|href)=|@import|https?://(?!www\.w3\.org/2000/svg)", page) and "</script><b>" not in page
    )
    assert page.count("</script>") == 2 and "dp=4" in page
    assert str(tmp_path) not in page.replace("<\\/script>", "")


def test_the_joined_script_has_no_imports_and_only_two_exports() -> None:
    script = joined()
    assert not re.search(r"^import ", script, re.M)
    assert re.findall(r"^export .*$", script, re.M) == [
        "export const { show } = dashboard;",
        "export default dashboard.widget;",
    ]
    assert "jpThemeLight" in script and 'classList.contains("dark");' not in script


def test_a_dashboard_of_a_recorded_run_has_a_text_and_a_picture(run: Any) -> None:
    board = Dashboard(run.folder)
    try:
        bundle = board._repr_mimebundle_()
        assert "step 20" in bundle["text/plain"] and "step 20" in drawn_in(bundle)
    finally:
        board.close()


def test_a_missing_run_is_refused_with_the_names_of_the_newest_five(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(act: Callable[[], object]) -> tuple[str, str]:
        with pytest.raises(UsageError, match="There is no such run") as caught:
            act()
        return caught.value.numbers, caught.value.hint

    here = run.folder.parent
    monkeypatch.chdir(here)
    name = run.folder.name
    for number in range(5):
        copy = shutil.copytree(run.folder, here / f"older {number}")
        for file in (copy / "telemetry").iterdir():
            os.utime(file, (number, number))
    exist = f"runs that exist, the newest first: {name}, older 4, older 3, older 2, older 1 and 1 more"
    assert refused(lambda: read_run("none")) == (f"none; {exist}", f"nbkit.read_run({name!r})")
    assert refused(lambda: Dashboard("none")) == (f"none; {exist}", f"%dashboard {name}")
    assert refused(lambda: Dashboard(run.folder, beside="none")) == (f"none; {exist}", f"%dashboard --beside {name}")
    assert main(["watch", "none", "--once"]) == 2
    assert f"none; {exist}\n→ nbkit watch {name}\n" in capsys.readouterr().err
    shutil.rmtree(run.folder)
    assert refused(lambda: Dashboard("none"))[1] == "%dashboard 'older 4'"
    monkeypatch.chdir(here.parent)
    shutil.rmtree(here)
    assert refused(lambda: read_run("none")) == (
        f"none; no run exists in {here.parent / 'runs'}",
        "trainer.fit(...)   in a %%distributed cell records a run",
    )


def test_the_picture_has_the_curve_switches_and_a_bar_for_each_part_of_a_rank(run: Any) -> None:
    run.switch("zero3")
    run.event("checkpoint", path="</svg>")
    snapshot = RunReader(run.folder).snapshot()
    picture = ElementTree.fromstring(svg_of(snapshot | {"state": snapshot["state"] | {"run": "<b>&"}}))
    words = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    (line,) = picture.iter(f"{SVG}polyline")
    bars = [one for one in picture.iter(f"{SVG}rect") if float(one.get("height", "0").rstrip("%")) == 16]
    longest = max(float(one.get("x", 0)) + float(one.get("width", 0)) for one in bars)

    assert len(line.get("points", "").split()) == 20
    assert {"⇄ dp=4 zero=3", "rank 0", "rank 3"} <= set(words)
    shares = {found[1]: int(found[2]) for word in words if (found := re.fullmatch(r"([a-z ]+) (\d+)%", word))}
    assert {"compute", "exposed communication", "other"} <= set(shares) and 98 <= sum(shares.values()) <= 102
    assert any(word.endswith("<b>&") for word in words)
    assert len(bars) == sum(part > 0 for row in snapshot["step"]["ranks"] for part in row[2:])
    assert longest <= float(picture.get("width", 0)) - 100  # the seconds are beside the bar
    assert svg_of({**snapshot, "points": []}) == ""


def test_watch_prints_the_newest_run(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert newest_run(tmp_path / "runs") == run.folder
    assert main(["watch", str(tmp_path / "runs"), "--once"]) == 0
    assert "step 20" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "runs"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["points"][-1][0] == 20 and told["state"]["run"] == run.folder.name and told["events"]
    assert main(["watch", str(tmp_path / "nothing")]) == 2


def test_the_health_of_ranks_and_hosts_is_shown_if_recorded(run: Any, tmp_path: Path) -> None:
    assert RunReader(run.folder).snapshot()["step"]["health"] is None
    assert "Ranks and hosts" not in plain(lines_of(RunReader(run.folder).snapshot()))

    run.health()
    run.step()
    snapshot = RunReader(run.folder).snapshot()
    rows, hosts = snapshot["step"]["health"]["ranks"], snapshot["step"]["health"]["hosts"]
    assert [(row["rank"], row["mhz"], row["slowed"]) for row in rows][1:3] == [
        (1, 1980, ""),
        (2, 1400, "thermal slowdown"),
    ]
    assert hosts == [{"host": "node0", "load": 3.2, "cores": 16, "mhz": 2400}]
    said = plain(lines_of(snapshot))
    assert "GPU 97% busy, 1400 MHz, 62 °C, 640 W, slowed by thermal slowdown" in said
    assert "node0, load 3.2 on 16 cores, 2400 MHz" in said

    big = fake_run(tmp_path / "big", 32, "dp=32", late=21)
    big.step()
    big.health()
    seen = RunReader(tmp_path / "big").snapshot()["step"]["health"]
    assert (len(seen["ranks"]), seen["ranks"][0]["rank"], len(seen["hosts"]), seen["more_hosts"]) == (8, 21, 4, 0)
    assert seen["more"] == "24 ranks more, none of them slowed"
    big.close()

    small = fake_run(tmp_path / "cpu", 2, "dp=2")
    small.step()
    small.health(gpus=False)
    said = plain(lines_of(RunReader(tmp_path / "cpu").snapshot()))
    assert "rank 0   CPU 99%, 315 MB" in said and "GPU" not in said
    small.close()


def test_every_kind_of_event_has_one_text_in_all_views(run: Any) -> None:
    marks = {}
    for kind in Event.__subclasses__():
        mark = mark_of(kind(7).as_dict())
        marks[kind.kind] = mark
        assert kind in (StepDone, RunStarted, RunStopped) or "after step 7" in mark["text"], kind
    assert not marks["step"] and len({mark["sign"] for mark in marks.values() if mark}) == 9
    curves = (SOURCE.parents[2] / "nbkit/notebook/widgets/static/curves.js").read_text()
    assert f"const GREAT = {json.dumps(list(GREAT))};" in curves

    moved = mark_of(Rebalanced(7, experts=5, gain=0.21).as_dict())
    assert moved["name"] == "experts moved"
    assert moved["text"] == "5 experts moved to other ranks after step 7: 21% less computing"
    switched = mark_of(Switched(7, old="ddp", new="ep=4 experts=0:1-5+1:2-3").as_dict())
    assert switched["name"] == "ep=4 experts=…"

    run.event("out_of_memory", rank=1, what="too large", changes="recompute=True")
    snapshot = RunReader(run.folder).snapshot()
    text = snapshot["events"][-1]["text"]
    assert text == "rescued after step 20, goes on with recompute=True: too large"
    assert text in plain(lines_of(snapshot)) and "▤ rescued: recompute=True" in svg_of(snapshot)


def test_a_failure_is_shown_once_with_the_most_details(run: Any) -> None:
    reader = RunReader(run.folder)
    reader.snapshot()
    for rank, told in enumerate(({}, {"error": "ValueError", "what": "odd"}, {}, {})):
        event = {"kind": "failure", "step": 20, "rank": 1, "error": "", "what": "rank 1 failed", **told}
        run._write(rank, EventRecord(20, ns=run.now, event=event))
        reader.snapshot()
    found = [event for event in reader.snapshot()["events"] if event["kind"] == "failure"]
    assert [(event["rank"], event["error"], event["what"]) for event in found] == [(1, "ValueError", "odd")]
    assert "✕ failure after step 20: rank 1: ValueError: odd" in plain(lines_of(reader.snapshot()))
    run.event("run_started", strategy="dp=4", arithmetic="", total=0)
    run.event("failure", rank=1, error="ValueError", what="odd")  # again, in the next run
    assert [event["kind"] for event in reader.snapshot()["events"]].count("failure") == 2


def test_a_replaced_rank_is_shown_in_text_and_picture(run: Any) -> None:
    reader = RunReader(run.folder)
    run.event("replaced", ranks="2", why="rank 2 died (SIGKILL)", steps_lost=0, seconds=2.2)
    snapshot = reader.snapshot()
    said = plain(lines_of(snapshot))
    assert "rank 2 died (SIGKILL), replaced after step 20: 0 steps and 2.2 s lost" in said, said
    assert "✚ rank 2" in svg_of(snapshot)
    devices = "rank 2 is on the spare GPU 3 A100 now, since it died twice on GPU 2 A100; no spare is left"
    run.event("replaced", ranks="2", why="rank 2 died (SIGKILL)", steps_lost=0, seconds=2.2, devices=devices)
    assert f"2.2 s lost; {devices}" in plain(lines_of(reader.snapshot()))


def test_a_resize_is_shown_in_text_and_picture(run: Any) -> None:
    reader = RunReader(run.folder)
    changed = {"old_ranks": 4, "ranks": 2, "moved_bytes": 1, "pause_s": 1.2}
    changed |= {"old": "dp=4 ep=4 experts=0:1-5,2-7+3:0-4", "new": "dp=2 ep=2 experts=0:1-5,2-7+3:0-4"}
    run.event("resized", **changed)
    snapshot = reader.snapshot()
    said = plain(lines_of(snapshot))
    short = "4 → 2 ranks after step 20, now dp=2 ep=2 experts=…: 1 B moved, 1.2 s without a step"
    assert short in said, said
    assert Resized(20, **changed).said == f"{short}."
    assert "⤢ 2 ranks" in svg_of(snapshot)


def test_an_undone_switch_does_not_end_the_run(run: Any) -> None:
    reader = RunReader(run.folder)
    what = "dp=4 → dp=4 zero=3 was taken back after step 20: the first step under it failed"
    run.event("run_started", strategy="dp=4", arithmetic="", total=0)
    run.step()
    run.event("failure", rank=1, error="SwitchError", what=what)
    said = plain(lines_of(reader.snapshot()))
    assert f"rank 1: SwitchError: {what}" in said
    for path in run.folder.rglob("*.jsonl"):
        os.utime(path, (0, 0))  # as if no record came for a long time
    assert reader.state()["stands"] == "quiet"
    run.step()
    run.event("run_stopped", reason="done")
    assert "taken back" not in card_text(reader.snapshot(), ended=True)
    run.event("run_started", strategy="dp=4", arithmetic="", total=0)
    run.step()
    run.event("failure", rank=1, error="ValueError", what="odd")
    run.event("run_stopped", reason="ValueError")
    assert "ended by an error: rank 1: ValueError: odd" in card_text(reader.snapshot(), ended=True)


def test_the_remaining_time_follows_from_the_newest_steps_of_the_strategy(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "long", 2, "dp=2")
    reader = RunReader(tmp_path / "long")
    run.event("run_started", strategy="dp=2", arithmetic="", total=100_000)
    for _ in range(3):
        run.now += 10**9  # a second of compilation
        run.step()
    run.switch("zero3")
    run.step()
    assert reader.snapshot()["state"]["left"] == ""  # one step is not enough
    for _ in range(5):
        run.step()
    seen = reader.snapshot()
    newest = [after[2] - before[2] for before, after in pairwise(seen["points"][-6:])]

    left = f"{text_of((100_000 - 9) * median(newest))} to go"
    assert seen["state"]["left"] == left and re.match(r"[\d.]+ (min|h) to go", left)
    assert all(f"step 9 of 100,000 · {left} · " in said for said in (card_text(seen), plain(lines_of(seen))))
    run.event("run_stopped", reason="done")
    assert reader.snapshot()["state"]["left"] == ""


def test_all_views_count_steps_from_the_first_training_and_show_the_last_step(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "again", 2, "dp=2")
    reader = RunReader(tmp_path / "again")

    def fit(total: int, *, until: int) -> set[str]:
        """Return what card, terminal and dashboard say in such a training."""
        run.event("run_started", strategy="dp=2", arithmetic="", total=total)
        return make(until)

    def make(until: int) -> set[str]:
        while run.number < until:
            run.step()
        seen = reader.snapshot()
        goal = seen["state"]["goal"]  # dashboard and report build the same words in the page
        step = f"step {int(seen['points'][-1][0])}"
        words = [card_text(seen), plain(lines_of(seen)), f"{step} of {goal} · " if goal else f"{step} · "]
        return {found[0] if (found := re.search(r"step \d+( of \d+)? · ", text)) else text for text in words}

    assert fit(4, until=3) == {"step 3 of 4 · "}
    make(4)
    run.event("run_stopped", reason="done")
    assert make(4) == {"step 4 · "}
    assert fit(4, until=7) == {"step 7 of 8 · "}
    run.event("run_stopped", reason="stopped")
    before, run.number = run.number, 2
    run.event("checkpoint", path="model", action="loaded", before=before)
    assert fit(10, until=5) == {"step 5 of 12 · "}
    before, run.number = run.number, 1  # loaded by a live cell: fit still makes all its remaining steps
    run.event("checkpoint", path="model", action="loaded", before=before)
    assert make(3) == {"step 3 of 8 · "}
    run.event("run_stopped", reason="done")
    assert fit(0, until=5) == {"step 5 · "}  # a loop over job.batches
    run.close()


def test_the_last_step_is_sent_even_if_the_picture_has_read_it_first(run: Any) -> None:
    page = Page()
    refresh = RefreshThread(lambda: run.folder, page.take)
    refresh.turn(1.0)
    run.step()
    assert refresh.reader is not None
    refresh.reader.picture()
    refresh.turn(100.0)
    assert page.points[-1][0] == 21
