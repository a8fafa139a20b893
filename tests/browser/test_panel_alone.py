"""Test the panel's JavaScript in its own page: the messages of keys and clicks, and 64 ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tables import answer_of, table_of

from nbkit.notebook.widgets import javascript
from nbkit.notebook.widgets.panel.panel import STATIC
from nbkit.notebook.widgets.panel.view import Looked, State, family_of, job_view, pulse_view, reduce
from nbkit.strategy import Strategy

MODEL = """
window.model = {
  state: STATE, sent: [], heard: {},
  get(name) { return this.state[name]; },
  set(name, value) { this.state[name] = value; this.heard[`change:${name}`]?.(); },
  on(event, act) { this.heard[event] = act; },
  off() {},
  send(message) { this.sent.push(message); },
};
panel.widget.render({ model: window.model, el: document.getElementById("here") });
"""


def shown(window: Any, table: dict[str, Any], **answer: Any) -> Any:
    """Return a page in this window with the panel of this table."""
    state = reduce(State("lesson", table["ranks"]), Looked(answer_of(table, **answer)))
    values = json.dumps({"job": job_view(state), "pulse": pulse_view(state), "note": ""})
    script = javascript.panel().replace("export default panel.widget;", "")
    script += MODEL.replace("STATE", values)
    page = window.new_page()
    page.set_content(
        f"<!doctype html><style>{(STATIC / 'panel.css').read_text()}</style>"
        f"<div id='here'></div><script type='module'>{script}</script>"
    )
    page.wait_for_selector(".nbkit-panel tbody tr")
    return page


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Any]:
    """Yield one window for all tests, because the browser makes a window more slowly than a page."""
    window = browser.new_context(viewport={"width": 1100, "height": 700})
    yield window
    window.close()


@pytest.fixture
def page(window: Any) -> Any:
    page = shown(window, table_of())
    yield page
    page.close()


def sent(page: Any) -> list[dict[str, Any]]:
    """Return the messages of the page to Python, without the numbers of its clicks."""
    return [{key: value for key, value in one.items() if key != "press"} for one in page.evaluate("model.sent")]


def test_arrows_choose_a_row_and_enter_moves_to_apply(page: Any) -> None:
    page.locator("tr.now").focus()
    page.keyboard.press("ArrowDown")
    chosen = page.locator("tr[aria-selected='true']").get_attribute("data-strategy")
    page.keyboard.press("Enter")

    assert chosen == "dp=4 zero=1"
    assert page.locator("input").input_value() == "dp=4 zero=1"
    assert "micro 4" in page.locator(".sum").inner_text()
    assert page.locator(".ghost").count() > 0
    assert sent(page) == []  # "choose a row, then Apply"
    assert focused(page) == "Apply"
    page.keyboard.press("Enter")
    assert sent(page) == [{"do": "switch", "strategy": "dp=4 zero=1"}]


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.textContent"))


def held(page: Any, key: str, times: int = 6) -> None:
    """Press a key, hold it so that it repeats, and release it."""
    for _ in range(times):
        page.keyboard.down(key)
    page.keyboard.up(key)


MODIFIED = [f"{modifier}+{key}" for modifier in ("Shift", "Control", "Alt", "Meta") for key in ("Enter", "Space")]


def test_keys_with_another_meaning_in_a_notebook_do_nothing(page: Any) -> None:
    for where in ("row", "line", "Apply", "Try 10 steps", "Undo", "Pause", "Save", "Stop"):
        there = focused_on(page, where)
        for keys in MODIFIED:
            page.keyboard.press(keys)
        for how in ({"isComposing": True}, {"keyCode": 229}, {"repeat": True}):
            there.dispatch_event("keydown", {"key": "Enter", "bubbles": True, "cancelable": True, **how})
        assert [one for one in sent(page) if one["do"] != "check"] == [], where


def focused_on(page: Any, where: str) -> Any:
    """Click the row of tp=4. Then focus this row, the input line or a button, and return it."""
    row = page.locator("tr[data-strategy='tp=4']")
    row.click()
    there = {"row": row, "line": page.locator("input")}.get(where) or page.get_by_role("button", name=where, exact=True)
    there.evaluate("element => { element.disabled = false; element.focus(); }")
    return there


@pytest.mark.parametrize(
    ("where", "acts"),
    [("row", 0), ("Apply", 1), *(pytest.param(also, 1, marks=pytest.mark.long) for also in ("line", "Undo", "Pause"))],
)
def test_a_key_that_is_held_down_acts_once(page: Any, where: str, acts: int) -> None:
    focused_on(page, where)

    held(page, "Enter")

    assert len(sent(page)) == acts
    held(page, "ArrowDown")  # a held arrow moves over several rows
    if where == "row":
        page.locator("tr.now").focus()
        held(page, "ArrowDown", 2)
        assert page.locator("tr[aria-selected='true']").get_attribute("data-strategy") != "dp=4 zero=1"


def test_a_column_names_the_ranks_of_its_figures(page: Any) -> None:
    heads = {head.split("\n")[0]: head for head in page.locator("thead th").all_inner_texts()}
    title = page.locator(".words").inner_text()

    assert "fullest rank" in heads["memory"] and "fullest rank" in heads["peak"]
    assert "busiest rank" in heads["sends"] and "all ranks" in heads["moves"]
    assert f"{page.locator('tbody tr').count()} strategies" in title


def test_a_typed_line_is_checked_before_it_can_be_applied(page: Any) -> None:
    page.locator("input").fill("zero3 tp=2")
    assert page.get_by_role("button", name="Apply").is_disabled()
    assert sent(page)[-1] == {"do": "check", "strategy": "zero3 tp=2"}

    told = {"text": "zero3 tp=2", "ok": True, "strategy": "dp=2 tp=2 zero=3", "why": ""}
    page.evaluate("told => window.model.heard['msg:custom']({ checked: told })", told)
    page.locator("input").press("Enter")
    assert sent(page)[-1] == {"do": "switch", "strategy": "zero3 tp=2"}

    page.locator("input").press("Escape")
    assert page.locator("input").input_value() == "dp=4"


def test_a_typed_strategy_without_a_row_gets_a_preview(page: Any) -> None:
    typed = "pp schedule=zbv"
    page.locator("input").fill(typed)
    strategy = "pp=4 schedule=zbv microbatches=8"
    told = {"text": typed, "ok": True, "strategy": strategy, "why": ""}
    likeness = page.evaluate("model.state.job.rows.find(row => row.strategy.startsWith('pp=4'))")
    row = {**likeness, "strategy": strategy, "label": "pp zbv", "peak": "7.77 MB", "arithmetic": "global 16"}
    rows, say = page.locator("tbody tr").count(), "told => window.model.heard['msg:custom']({ checked: told })"
    page.evaluate(say, told)
    assert page.locator("tbody tr").count() == rows and page.locator(".ghost").count() == 0
    page.evaluate(say, {**told, "row": row})

    first = page.locator("tbody tr").first
    assert first.get_attribute("data-strategy") == strategy and first.get_attribute("aria-selected") == "true"
    assert "7.77 MB" in first.inner_text() and page.locator(".ghost").count() > 0
    assert "global 16" in page.locator(".sum").inner_text()
    page.evaluate("model.set('job', { ...model.state.job, unsure: 'news' })")
    assert sent(page)[-1] == {"do": "check", "strategy": typed}  # because its figures may be old
    page.evaluate(say, {**told, "row": {**row, "peak": "8.88 MB"}})
    assert "8.88 MB" in page.locator("tbody tr").first.inner_text()
    first.click()
    assert page.locator("tbody tr").count() == rows + 1
    page.get_by_role("button", name="Apply").click()
    assert sent(page)[-1] == {"do": "switch", "strategy": strategy}
    page.locator("input").press("Escape")
    assert page.locator("tbody tr").count() == rows


def test_the_current_strategy_and_those_that_do_not_fit_cannot_be_applied(page: Any) -> None:
    assert page.get_by_role("button", name="Apply").is_disabled()
    page.locator("tr.no").first.click(force=True)  # it is marked as disabled for screen readers
    assert page.get_by_role("button", name="Apply").is_disabled()
    assert "which positions" in page.locator(".said").inner_text()


def test_a_row_shows_traffic_and_memory_and_marks_predictions(page: Any) -> None:
    row = page.locator("tr[data-strategy='pp=4 schedule=1f1b microbatches=8']")

    assert "≈ 20 ms" in row.inner_text()
    assert "while it switches" in (row.locator("td.memory").get_attribute("title") or "")
    rest, during = (row.locator(f"i.{part}").evaluate("i => i.offsetWidth") for part in ("rest", "during"))
    assert 0 < rest < during
    assert page.locator("tr[data-strategy='dp=4 zero=1'] td.sends").inner_text() == "≈ 250 kB"


def test_updates_do_not_disturb_the_users_choice(page: Any) -> None:
    page.locator("tr[data-strategy='tp=4']").click()
    state = reduce(State("lesson", 4), Looked(answer_of(table_of(step=8), held=True)))
    page.evaluate("job => window.model.set('job', job)", job_view(state))
    page.evaluate("pulse => window.model.set('pulse', pulse)", pulse_view(state))

    assert page.locator("input").input_value() == "tp=4"
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Try 10 steps").click()
    assert sent(page) == [{"do": "resume"}, {"do": "try", "strategy": "tp=4"}]


def test_a_row_is_chosen_even_if_the_table_is_redrawn_during_the_click(page: Any) -> None:
    page.locator("tr[data-strategy='tp=4']").hover()
    page.mouse.down()
    page.evaluate("model.set('job', { ...model.get('job') })")
    page.mouse.up()

    assert page.locator("tr[aria-selected='true']").get_attribute("data-strategy") == "tp=4"
    page.keyboard.press("Enter")
    assert focused(page) == "Apply"


def order(page: Any) -> list[str]:
    return list(page.evaluate("[...document.querySelectorAll('tbody tr')].map((row) => row.dataset.strategy)"))


def test_a_row_stays_the_same_element_when_its_figures_change(page: Any) -> None:
    changed = """() => {
      const rows = [...document.querySelectorAll("tbody tr")];
      const job = model.get("job");
      model.set("job", { ...job, rows: job.rows.map((row, place) => (place === 1 ? { ...row, step: "77 ms" } : row)) });
      const after = [...document.querySelectorAll("tbody tr")];
      return [after.every((row, place) => row === rows[place]), after[1].textContent.includes("77 ms")];
    }"""
    assert page.evaluate(changed) == [True, True]


NEWS = """() => {
  // As in a training: figures change, strategies are examined or refused, rows come and go, and texts get longer.
  const first = model.get("job");
  const figures = ["1.02 s", "77 ms", "≈ 8 ms", "unknown"];
  let turn = 0;
  const tell = () => {
    turn += 1;
    const rows = first.rows.filter((_, place) => place === 0 || (place + turn) % 13).map((row, place) => ({
      ...row, ok: row.ok && (row.current || (place + turn) % 7 > 0), untried: !row.current && (place + turn) % 14 === 0,
      step: figures[(place + turn) % 4], recommended: place === turn % 20,
      values: { ...row.values, peak: 1e6 * (1 + place % 5), step: 1 + ((place * 7 + turn) % 11) },
    }));
    model.set("job", { ...first, rows, because: "it is faster ".repeat(turn % 9) });
    model.set("pulse", { ...model.get("pulse"), headline: `training ${"· step ".repeat(turn % 30)}` });
    setTimeout(tell, 40);
  };
  tell();
}"""
SEEN_ROW = """() => {
  const frame = document.querySelector(".rows").getBoundingClientRect();
  const top = frame.top + document.querySelector("thead").offsetHeight;
  const seen = [...document.querySelectorAll("tbody tr")].filter((row) => {
    const box = row.getBoundingClientRect();
    return box.top > top && box.bottom < frame.bottom && row.getAttribute("aria-selected") === "false";
  });
  const row = seen[Math.floor(Math.random() * seen.length)];
  const box = row.getBoundingClientRect();
  return [row.dataset.strategy, box.left + 60, box.top + box.height / 2];
}"""


@pytest.mark.parametrize("width", [1100, pytest.param(700, marks=pytest.mark.long)])
def test_a_click_reaches_its_row_during_updates_of_8_ranks(window: Any, width: int) -> None:
    page = shown(window, table_of(ranks=8))
    page.set_viewport_size({"width": width, "height": 800})
    page.locator("th.step button").click()
    page.evaluate(NEWS)
    reached, orders, errors = 0, set(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    for number in range(50):
        if number % 5 == 0:
            page.mouse.move(3, 3)  # the pointer leaves, and the rows get their current order
            page.wait_for_timeout(60)
            orders.add(tuple(order(page)))
            page.locator(".rows").hover()
            page.eval_on_selector(".rows", f"rows => {{ rows.scrollTop = {12 * number}; }}")
        aimed, x, y = page.evaluate(SEEN_ROW)
        page.wait_for_timeout(60)
        page.mouse.click(x, y)
        reached += page.locator(".line input").input_value() == aimed
    page.close()

    assert errors == [] and reached == 50
    assert len(orders) > 5  # otherwise the updates would change nothing


def test_a_column_head_sorts_the_rows_with_unknown_values_last(page: Any) -> None:
    table = order(page)
    steps = {"pp=4 schedule=1f1b microbatches=8": 20, "tp=4": 30, "dp=4": 40, "dp=4 zero=3": 50}
    head = page.locator("th.step button")

    head.click()
    assert order(page)[:4] == list(steps) and head.get_attribute("aria-label") == "sort by step: sorted, least first"
    head.click()
    assert order(page)[:4] == list(reversed(steps))
    assert set(order(page)) == set(table) and page.locator("tbody tr").last.get_attribute("class") == "no"
    head.click()
    assert order(page) == table and head.get_attribute("aria-label") == "sort by step"


def test_a_chip_filters_table_and_picture_by_family(page: Any) -> None:
    names = page.locator(".chip").all_inner_texts()
    page.locator(".chip[data-family=zero]").click()

    assert names == ["dp", "zero", "tp", "pp", "cp", "mixed"]
    assert order(page) == ["dp=4 zero=1", "dp=4 zero=2", "dp=4 zero=3", "dp=4 zero=3 shard=2"]
    assert page.locator(".point").count() == 4 and "4 of 23 are shown" in page.locator(".chips").inner_text()
    page.locator(".chip[data-family=tp]").click()
    assert "tp=4" in order(page)
    for name in ("zero", "tp"):
        page.locator(f".chip[data-family={name}]").click()
    assert page.locator("tbody tr").count() == 23


@pytest.mark.parametrize("width", [700, 1600])
def test_each_strategy_has_one_line_and_unknown_values_are_explained_once(window: Any, width: int) -> None:
    table = table_of("zero3")
    for place, row in enumerate(table["options"]):
        row.update(step_s=None, predicted_step_s=None)
        if row["strategy"] != table["strategy"] and place % 3 == 0:
            row.update(ok=False, untried=True, memory={})
    page = shown(window, table)
    page.set_viewport_size({"width": width, "height": 900})

    heights = set(page.evaluate("[...document.querySelectorAll('tbody tr')].map((row) => row.offsetHeight)"))
    text = page.locator(".nbkit-panel").inner_text()
    wide = page.evaluate("document.documentElement.scrollWidth")
    page.close()
    assert len(heights) == 1 and max(heights) < 26
    assert text.count("not known yet") == text.count("not examined yet") == 1 and "?" not in text
    assert wide <= width


def test_the_picture_has_dots_a_ring_for_the_current_strategy_and_a_best_line(page: Any) -> None:
    fits = page.locator("tbody tr:not(.no)").count()

    assert page.locator(".point").count() == fits and page.locator(".point:not(.unknown)").count() == 4
    assert page.locator(".point:has(.ring)").get_attribute("data-strategy") == "dp=4"
    kinds = [page.locator(f".point[data-strategy^='{one}']").first.get_attribute("class") for one in ("pp=4", "tp=4")]
    assert kinds == ["point predicted", "point measured"]
    # A cross for each whose step time is not known, as the words below the picture say.
    crosses = page.locator(".point.unknown path.dot")
    assert page.locator(".point:not(.unknown) circle.dot").count() == 4 and crosses.count() == fits - 4 > 0
    assert crosses.first.get_attribute("d") == "M-3 -3 3 3M-3 3 3 -3"
    assert "× step time not known" in page.locator(".nbkit-panel").inner_text()
    # pp=4 is the fastest of the strategies with the least memory, so no other is on the line.
    at = page.locator(".point[data-strategy^='pp=4']").get_attribute("transform")
    x, y = at.removeprefix("translate(").removesuffix(")").split()
    path = page.locator(".frontier").get_attribute("d")
    assert path.startswith(f"M{x} ") and f"V{y}H" in path and path.count("V") == 1


def test_clicks_and_arrows_on_dots_choose_a_strategy(page: Any) -> None:
    dot, line = page.locator(".point[data-strategy='tp=4']"), page.locator(".line input")
    dot.scroll_into_view_if_needed()
    box = dot.locator(".dot").bounding_box()
    page.mouse.click(box["x"] - 1, box["y"] + 6)  # next to the dot

    assert line.input_value() == page.locator("tr[aria-selected=true]").get_attribute("data-strategy") == "tp=4"
    assert dot.get_attribute("aria-selected") == "true" and dot.get_attribute("role") == "option"
    assert dot.get_attribute("aria-label") == page.locator("tr[data-strategy='tp=4']").get_attribute("aria-label")
    page.locator("th.payback button").focus()
    page.keyboard.press("Tab")  # to the chosen row
    for _ in range(12):  # past the input line and the buttons, to its dot
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "g":
            break
    assert page.evaluate("[document.activeElement.tagName, document.activeElement.dataset.strategy]") == ["g", "tp=4"]
    page.keyboard.press("End")
    assert line.input_value() == "dp=4"  # the one with most memory
    page.keyboard.press("ArrowLeft")
    assert line.input_value() not in ("dp=4", "tp=4")
    page.keyboard.press("Enter")
    assert focused(page) == "Apply" and sent(page) == []


def test_python_and_the_page_give_a_strategy_the_same_family(page: Any) -> None:
    every = [str(one) for one in Strategy.every(8)] + ["dp=1", "dp=2 tp=2 cp=2 zero=1 bucket=4M"]
    script = javascript.panel().replace("export default panel.widget;", "")

    found = page.evaluate(f"() => {{ {script}\nreturn {json.dumps(every)}.map(paint.familyOf); }}")
    assert found == [family_of(one) for one in every] and set(found) == set(javascript.colours("FAMILIES"))


def test_a_click_that_the_kernel_has_not_received_is_shown_as_waiting(browser: Any) -> None:
    page = shown(browser, table_of())  # in its own window, whose clock is stopped
    page.clock.install()
    note = page.locator(".note")
    page.get_by_role("button", name="Pause", exact=True).click()
    page.clock.fast_forward(1500)
    assert note.inner_text() == ""
    page.clock.fast_forward(1700)
    assert "has not received this click" in note.inner_text() and "%%distributed --detach" in note.inner_text()
    page.evaluate("model.heard['msg:custom']({ heard: 0.5 })")  # a click in another page
    assert note.inner_text() != ""
    page.evaluate("model.heard['msg:custom']({ heard: model.sent[0].press })")
    assert note.inner_text() == ""
    page.get_by_role("button", name="Pause", exact=True).click()
    page.evaluate("model.heard['msg:custom']({ heard: model.sent[1].press })")
    page.clock.fast_forward(4000)
    assert note.inner_text() == ""
    page.close()


def test_a_silent_kernel_is_reported_and_clicks_are_disabled(browser: Any) -> None:
    page = shown(browser, table_of())  # in its own window, whose clock is stopped
    page.clock.install()
    root, row = page.locator(".nbkit-panel"), page.locator("tr[data-strategy='tp=4']")
    beat = "model.heard['msg:custom']({ beat: true })"
    for _ in range(3):  # as during a cell or a pause without other updates
        page.evaluate(beat)
        page.clock.fast_forward(3000)
    assert root.get_attribute("data-phase") == "training" and page.locator(".keys button:enabled").count() > 0
    page.clock.fast_forward(4000)

    assert root.get_attribute("data-phase") == "silent" and page.locator(".keys button:enabled").count() == 0
    note = page.locator(".note").inner_text()
    assert "%cluster attach lesson" in note and "%strategy" in note
    assert "nothing is heard from the kernel" in page.locator(".headline").inner_text()
    row.click()
    assert page.locator("input").is_disabled() and page.locator("input").input_value() == "dp=4"
    assert sent(page) == []

    page.evaluate(beat)
    assert root.get_attribute("data-phase") == "training" and page.locator(".note").inner_text() == ""
    row.click()
    page.get_by_role("button", name="Apply").click()
    assert sent(page) == [{"do": "switch", "strategy": "tp=4"}]
    page.evaluate("model.heard['comm:close']()")
    assert root.get_attribute("data-phase") == "silent" and page.locator(".keys button:enabled").count() == 0
    page.close()


def test_64_ranks_of_8_nodes_fit_without_scrolling_sideways(window: Any) -> None:
    page = shown(window, table_of("dp=8 tp=2 pp=4", ranks=64, nodes=8))

    page.locator("tr[data-strategy='dp=64 zero=3']").click()

    frame = page.locator(".frame").evaluate("frame => [frame.scrollWidth, frame.clientWidth]")
    assert frame[0] <= frame[1]
    assert page.locator(".cell").count() == 64 * 4
    assert page.locator(".grid .node").all_inner_texts() == [str(node) for node in range(8)]
    assert page.locator(".grid .apart").count() == 7 * (4 + 2)  # one gap between two nodes, in each row
    page.close()


def test_the_recommended_row_is_marked_and_keeps_its_place(page: Any) -> None:
    mark = page.locator(".recommended")
    row = page.locator("tbody tr:has(.recommended)")

    assert mark.all_inner_texts() == ["recommended"]
    assert row.get_attribute("data-strategy") == "pp=4 schedule=1f1b microbatches=8"
    assert order(page)[:2] == ["dp=4", "dp=4 zero=1"]
    heads = page.locator("th").all_inner_texts()[1:4]
    assert [head.split("\n")[0] for head in heads] == ["memory", "peak", "step"]
    assert row.locator("td").all_inner_texts()[1:4] == ["1 MB", "≈ 3 MB", "≈ 20 ms"]


def test_savings_of_levers_are_shown_under_the_link(window: Any) -> None:
    page = shown(window, table_of(levers={"strategy": "dp=4", "step_s": 0.04, "each": {"compress=int8": 0.02}}))

    assert page.locator(".legend .levers").inner_text() == (
        "dp=4 waits for its link: ≈ 40 ms a step. Not equal to one process: compress=int8 20 ms"
    )
    page.close()


def test_unmeasured_figures_say_how_to_measure_them(page: Any) -> None:
    assert "Try 10 steps" in page.locator("tr[data-strategy='dp=4 zero=1'] td.step").get_attribute("title")
    assert page.locator(".grid .side").all_inner_texts()[1:] == [
        "before blocks",
        "blocks.0",
        "blocks.1",
        "after blocks",
    ]


def test_the_table_has_margins_reasons_and_the_recommendation(window: Any) -> None:
    crowded = {"unpredicted": "the ranks share cores", "unpredicted_pause": "the first switch shows it"}
    table = table_of(**crowded)
    for row in table["options"]:
        row["switch_s"] = None
        if row["strategy"] == "dp=4":
            row |= {"step_low_s": 0.01, "step_high_s": 0.09}
        row["step_ago"] = 12 * (row["strategy"] == "tp=4")
    page = shown(window, table)

    now, earlier = page.locator("tr.now"), page.locator("tr[data-strategy='tp=4']")
    assert [now.locator(f"td.{one}").inner_text() for one in ("step", "interval")] == ["40 ms", "10–90 ms"]
    assert [earlier.locator(f"td.{one}").inner_text() for one in ("step", "interval")] == ["30 ms", "29–31 ms"]
    told = earlier.locator("td.step").get_attribute("title")
    assert told == "the median 29–31 ms of 20 steps, 12 steps ago; predicted ≈ 31 ms"
    title = page.locator(".words").inner_text()
    assert "is not known yet, and cannot be predicted (the ranks share cores): the button below measures it." in title
    assert "Recommended: ddp, not measurably slower than pp, and it runs now." in title
    assert title.endswith("No pause is predicted: the first switch shows it.")
    mark = page.locator("tr.now .recommended")
    assert mark.count() == 1 and mark.get_attribute("title").startswith("not measurably slower than pp")
    pause = page.locator("tr[data-strategy='dp=4 zero=1'] td.pause")
    assert (pause.inner_text(), pause.get_attribute("title")) == ("", "the first switch shows it")
    page.close()


@pytest.mark.parametrize(("width", "beside"), [(950, False), (1120, False), (1250, True)])
def test_the_widest_figures_fit_and_pictures_are_beside_the_table_if_possible(
    browser: Any, width: int, beside: bool
) -> None:
    table = table_of("pp")
    table["link"] = "0.287 GB/s within a node, 0.1 GB/s between nodes, 6.05 ms"
    for row in table["options"]:
        if row["ok"]:  # set the widest possible figures
            row |= {
                "step_s": 0.0676,
                "step_low_s": 0.0669,
                "step_high_s": 0.0683,
                "step_steps": 20,
                "predicted_step_s": 0.0687,
                "moved_bytes": 10_230_000,
                "step_bytes": 10_230_000,
                "between_bytes": 10_230_000,
                "switch_s": 0.0755,
                "peak_bytes": 10_230_000,
            }
            row["memory"] = {key: 10_230_000 for key in row["memory"]}
    page = shown(browser, table)
    page.set_viewport_size({"width": width, "height": 800})

    picture, rows = (page.locator(name).bounding_box() for name in (".picture", ".rows"))
    assert (picture["x"] >= rows["x"] + rows["width"]) == beside
    assert page.eval_on_selector(".rows", "rows => rows.scrollWidth <= rows.clientWidth")
    first = page.locator("tr.now")
    assert [first.locator(f"td.{one}").inner_text() for one in ("step", "between")] == ["67.6 ms", "≈ 10.2 MB"]
    page.close()


def test_without_a_trainer_the_panel_says_what_to_type(browser: Any) -> None:
    page = shown(browser, table_of())
    state = reduce(State("lesson", 4), Looked({"training": False, "held": False, "job": False}))
    page.evaluate("pulse => window.model.set('pulse', pulse)", pulse_view(state))
    page.evaluate("window.model.set('job', {})")

    assert "nbkit.Trainer(" in page.locator(".headline").inner_text()
    assert not page.get_by_role("button", name="Apply").is_visible()
    page.close()


# JupyterLab has these rules, like many web pages that show a saved notebook.
FONT_AWESOME = ".fa, .fab, .fad, .fal, .far, .fas, .fat { font-family: 'Font Awesome 5 Free', serif; }"


def test_icon_fonts_of_the_page_do_not_change_the_fonts_of_the_panel(page: Any) -> None:
    page.add_style_tag(content=FONT_AWESOME)
    strange = page.evaluate("""() => {
      const panel = document.querySelector(".nbkit-panel");
      const font = (element) => getComputedStyle(element).fontFamily;
      const others = [...panel.querySelectorAll("*:not(input, small)")].filter((one) => font(one) !== font(panel));
      return others.map((one) => one.outerHTML);
    }""")

    assert strange == []


def test_no_figure_reaches_into_the_next_column(window: Any) -> None:
    table = table_of()
    for option in table["options"]:
        option["memory"] = {"now": 104_000_000, "during": 226_400_000, "after": 102_600_000}
        option["peak_bytes"] = 178_000_000
    page = shown(window, table)
    page.set_viewport_size({"width": 900, "height": 700})

    # A range has the box of the text itself, wherever its cell ends.
    apart = page.evaluate("""[...document.querySelectorAll("tbody tr:not(.no)")].map((row) => {
      const boxes = [...row.cells].slice(1).filter((cell) => cell.textContent).map((cell) => {
        const written = document.createRange();
        written.selectNodeContents(cell.lastChild);
        return [written.getBoundingClientRect(), cell.querySelector(".bar")?.getBoundingClientRect()];
      });
      const gaps = boxes.slice(1).map(([box], i) => box.left - boxes[i][0].right);
      return Math.min(boxes[0][0].left - boxes[0][1].right, ...gaps);
    })""")
    page.close()
    assert len(apart) > 3 and min(apart) >= 4


def test_a_screen_reader_gets_outcomes_once_and_rows_with_column_names(
    page: Any,
) -> None:
    page.evaluate(
        """() => {
          window.drawn = [];
          const regions = document.querySelectorAll("[role='status'], [aria-live]");
          const named = ({ target }) => target.className || target.parentElement?.className;
          new MutationObserver((news) => drawn.push(...news.map(named))).observe(
            document.querySelector(".nbkit-panel"), { subtree: true, childList: true, characterData: true });
          const live = () => drawn.filter((name) => [...regions].some((region) => region.className === name)).length;
          const pulse = (more) => model.set("pulse", { ...model.get("pulse"), ...more });
          window.heard = async () => { await new Promise((done) => setTimeout(done)); return live(); };
          window.step = (number) => pulse({ headline: `training · step ${number}` });
          window.outcome = (line) => pulse({ results: [{ ok: true, line, figures: [], proof: "" }] });
        }"""
    )
    page.evaluate("step(1); step(2)")
    assert page.evaluate("heard()") == 0
    page.evaluate("outcome('dp=4 → tp=4 after step 3')")
    once = page.evaluate("heard()")
    page.evaluate("step(4); step(5)")
    assert once > 0 and page.evaluate("heard()") == once
    assert "tp=4 after step 3" in page.locator(".told[role='status']").inner_text()

    row = page.locator("tr[data-strategy='tp=4']")
    spoken = row.get_attribute("aria-label")
    titles = [title.split("\n")[0] for title in page.locator("th:not(.interval)").all_inner_texts()[1:]]
    assert [title for title in titles if f", {title} " not in spoken] == []
    assert row.locator("td").nth(1).inner_text().strip() in spoken
