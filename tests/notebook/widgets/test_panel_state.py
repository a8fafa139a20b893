"""Test the state and the content of the panel without a widget."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from tables import answer_of, table_of

from nbkit.errors import NbkitError, NotFinite, StrategyError
from nbkit.notebook.cluster.training_control import ControlResult
from nbkit.notebook.widgets.panel import panel
from nbkit.notebook.widgets.panel.panel import _WORDS
from nbkit.notebook.widgets.panel.svg_view import svg_of
from nbkit.notebook.widgets.panel.view import (
    Asked,
    Finished,
    Looked,
    Lost,
    State,
    SwitchedElsewhere,
    _to_measure,
    checked,
    family_of,
    in_table,
    job_view,
    previewed,
    pulse_view,
    reduce,
    text_of,
)
from nbkit.records.event_words import recorded

SVG = "{http://www.w3.org/2000/svg}"


def state_of(*news: Any) -> State:
    state = State("lesson", 4)
    for one in news:
        state = reduce(state, one)
    return state


def verdict_of(**changed: Any) -> ControlResult:
    result = {"old": "dp=4", "new": "tp=4", "moved_bytes": 1_500_000, "pause_s": 0.25, "identical": True}
    asked = {"id": "a", "do": "switch", "args": {"strategy": "tp"}, "step": 9, "strategy": "tp=4", "ok": True}
    told: dict[str, Any] = {**asked, "error": "", "what": "", "numbers": "", "hint": "", "result": result}
    return ControlResult(**{**told, **changed})


def test_the_phase_follows_the_answer_of_a_rank() -> None:
    table = table_of()
    assert state_of(Looked(answer_of(table))).phase == "training"
    assert state_of(Looked(answer_of(table, held=True))).phase == "held"
    assert state_of(Looked(answer_of(table, training=False))).phase == "idle"
    assert state_of(Looked({"training": False, "held": False, "job": False})).phase == "none"
    assert state_of(Looked({})).phase == "gone"
    assert state_of(Lost("the cluster was stopped")).why == "the cluster was stopped"


def test_a_cluster_that_answers_again_is_shown_again() -> None:
    state = state_of(Lost("the cluster has ended"), Looked(answer_of(table_of())))

    assert (state.phase, state.why) == ("training", "")


def test_only_stop_can_be_pressed_while_a_request_runs() -> None:
    looked = Looked(answer_of(table_of(previous="tp=4")))
    idle, busy = pulse_view(state_of(looked)), pulse_view(state_of(looked, Asked("switching to tp …")))

    can = [name for name, yes in idle["can"].items() if yes]
    assert can == ["apply", "try", "measure", "undo", "pause", "save", "stop"]
    assert [name for name, yes in busy["can"].items() if yes] == ["stop"]
    assert busy["asked"] == "switching to tp …"
    assert pulse_view(state_of(looked, Asked("…"), Finished(verdict_of())))["can"]["apply"]
    # Ranks that do not answer for a moment may still work on the request.
    assert not pulse_view(state_of(looked, Asked("…"), Lost("no answer"), looked))["can"]["apply"]


def test_the_rows_of_an_unchanged_table_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[State] = []
    monkeypatch.setattr(panel, "job_view", lambda state: (made.append(state), job_view(state))[1])
    listeners: list[Any] = []
    widget = panel._widget(SimpleNamespace(listen=listeners.append, leave=listeners.remove))  # type: ignore[arg-type]
    table = table_of()
    for step, found in ((7, table), (8, table), (8, table_of(previous="tp=4"))):
        answer = answer_of(found)
        answer["progress"]["step"] = answer["step"] = step
        listeners[0](state_of(Looked(answer)))
    widget.close()
    assert [state.table is table for state in made] == [True, False]
    assert "step 8" in widget.pulse["headline"] and widget.job["previous"] == "tp=4"


def test_requests_promise_a_step_boundary_and_not_the_next_step() -> None:
    told = {do: words.format(strategy="zero3", steps=10, number=5) for do, words in _WORDS.items()}

    assert not any("next step" in words for words in told.values())
    assert {do for do, words in told.items() if "at a step boundary" in words} == set(told) - {"resume"}
    assert "zero3" in told["switch"] and "zero3 for 10 steps" in told["try"]


def test_a_switch_from_elsewhere_is_shown_and_ends_no_request_of_the_panel() -> None:
    other, own = verdict_of(id="b"), verdict_of()
    state = state_of(Asked("switching to tp …"), SwitchedElsewhere(other))
    assert (state.asked, state.results) == ("switching to tp …", (other,))
    assert reduce(reduce(state, SwitchedElsewhere(own)), Finished(own)).results == (own, other)


def test_undo_needs_a_previous_strategy_and_pause_needs_a_training() -> None:
    can = pulse_view(state_of(Looked(answer_of(table_of(), training=False))))["can"]

    assert not can["undo"]
    assert not can["pause"]
    assert not can["stop"]
    assert can["apply"]
    assert pulse_view(state_of(Looked(answer_of(table_of(), held=True))))["can"]["resume"]


def test_a_result_shows_predicted_beside_measured_figures() -> None:
    predicted = {"moved_bytes": 1_500_000, "switch_s": 0.2}
    told = pulse_view(state_of(Finished(verdict_of(predicted=predicted))))["results"][0]

    assert told["figures"] == [("bytes moved", "1.5 MB", "1.5 MB"), ("pause", "200 ms", "250 ms")]
    assert told["identical"] is True
    assert told["proof"] == "state identical, bit for bit" and told["deviations"] == []
    rounded = verdict_of(deviations=["losses are not those of one process"])
    assert pulse_view(state_of(Finished(rounded)))["results"][0]["deviations"] == rounded.deviations
    assert "predicted unknown" in repr(verdict_of())
    first = verdict_of(predicted={"moved_bytes": 1, "switch_s": None, "why": "the first switch shows it"})
    assert "predicted unknown    measured 250 ms" in repr(first)
    assert repr(first).endswith("\n  pause not predicted: the first switch shows it")
    assert pulse_view(state_of(Finished(first)))["results"][0]["deviations"] == first.notes[1:] != []


def test_a_refusal_is_shown_and_raised() -> None:
    refused = verdict_of(ok=False, error="StrategyError", what="No.", numbers="3 x 2 = 6", hint="tp=2", result={})

    told = pulse_view(state_of(Finished(refused)))["results"][0]
    assert (told["ok"], told["line"], told["figures"]) == (False, "No. (3 x 2 = 6)", [])
    with pytest.raises(StrategyError, match="No"):
        refused.check()
    with pytest.raises(NbkitError) as raised:
        verdict_of(ok=False, error="NotFinite", what="NaN.", result={}).check()
    assert not isinstance(raised.value, NotFinite)  # NotFinite needs numbers that a result lacks


def test_the_rows_list_the_strategies_that_fit_first() -> None:
    rows = job_view(state_of(Looked(answer_of(table_of()))))["rows"]

    fits = [row["ok"] for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert not all(fits)
    by_name = {row["strategy"]: row for row in rows}
    assert by_name["dp=4"]["current"]
    assert by_name["dp=4"]["moved"] == ""
    assert by_name["dp=4"]["memory_part"] == 0.25  # 4 MB of the 16 MB that a rank has room for
    assert by_name["dp=4 zero=3"]["during_part"] == 5 / 16
    assert "4 MB now and 1 MB after the switch, and 5 MB while" in by_name["dp=4 zero=3"]["memory_words"]
    assert by_name["dp=4 zero=1"]["sends"] == "≈ 250 kB"
    assert by_name["dp=4 zero=3"]["payback"] == "never"
    assert by_name["tp=4"]["payback"] == "50 steps"
    assert by_name["dp=4 zero=1"]["step"] == "unknown"
    assert by_name["pp=4 schedule=1f1b microbatches=8"]["step"] == "≈ 20 ms"
    steps = [(by_name[name]["step"], by_name[name]["predicted"]) for name in ("tp=4", "dp=4 zero=3")]
    assert steps == [("30 ms", "≈ 31 ms"), ("50 ms", "")]
    assert by_name["pp=4 schedule=1f1b microbatches=8"]["payback"] == "25 steps"


def test_a_row_has_the_numbers_for_sorting_and_drawing() -> None:
    rows = rows_of(state_of(Looked(answer_of(table_of()))))
    values = rows["tp=4"]["values"]

    assert (values["step"], values["low"], values["high"]) == (0.03, 0.029, 0.031)
    assert (values["peak"], values["memory"], values["payback"]) == (3_000_000, 1_000_000, 50)
    assert rows["pp=4 schedule=1f1b microbatches=8"]["values"]["step"] == 0.02
    assert rows["dp=4"]["values"]["pause"] is rows["dp=4 zero=1"]["values"]["step"] is None
    assert rows["dp=4 zero=3"]["payback"] == "never" and rows["dp=4 zero=3"]["values"]["payback"] is None
    assert "Infinity" not in json.dumps(list(rows.values())) and rows["cp=4"]["values"] == {}


def test_bars_are_relative_to_the_memory_limit_if_it_is_near() -> None:
    roomy, tight = (
        {row["strategy"]: row for row in job_view(state_of(Looked(answer_of(table_of(limit_bytes=limit)))))["rows"]}
        for limit in (1_000_000_000, 4_500_000)
    )

    assert max(row["during_part"] for row in roomy.values()) == 1.0
    assert not roomy["dp=4 zero=1"]["tight"] and tight["dp=4 zero=1"]["tight"]


def test_ranks_of_different_nodes_are_shown_apart() -> None:
    lines = text_of(state_of(Looked(answer_of(table_of(nodes=2))))).splitlines()

    assert "          node 0  node 1" in lines
    assert "rank      0  1    2  3" in lines


def test_a_strategy_that_does_not_fit_shows_the_reason() -> None:
    by_name = {row["strategy"]: row for row in job_view(state_of(Looked(answer_of(table_of()))))["rows"]}
    assert by_name["cp=4"]["why"].startswith("The blocks")


@pytest.mark.parametrize(
    ("strategy", "family"),
    [
        ("dp=4", "dp"),
        ("dp=4 zero=3", "zero"),
        ("dp=2 tp=2 zero=1", "tp"),
        ("pp=4 schedule=1f1b microbatches=8", "pp"),
        ("dp=2 cp=2", "cp"),
        ("tp=2 pp=2 schedule=1f1b", "mixed"),
    ],
)
def test_the_family_is_the_axis_that_divides_the_model(strategy: str, family: str) -> None:
    assert family_of(strategy) == family


def test_a_typed_strategy_is_checked() -> None:
    state = state_of(Looked(answer_of(table_of())))

    assert checked(state, "zero3") == {"text": "zero3", "ok": True, "strategy": "dp=4 zero=3", "why": ""}
    assert "the world has 4" in checked(state, "dp=3")["why"]
    assert not checked(state, "cp=4")["ok"]
    assert "no effect" in checked(state, "ddp schedule=1f1b")["why"]
    assert not checked(state, "")["ok"]


def test_a_typed_strategy_without_a_row_shows_the_predictions_of_ranks() -> None:
    state = state_of(Looked(answer_of(table_of())))
    verdict = checked(state, "pp schedule=zbv")
    like = next(row for row in state.table["options"] if row["strategy"].startswith("pp=4"))
    option = {**like, "strategy": verdict["strategy"], "step_bytes": 7_000_000}

    assert verdict["ok"] and not in_table(state, verdict["strategy"]) and in_table(state, like["strategy"])
    row = previewed(state, verdict, option)["row"]
    shown = next(one for one in job_view(state)["rows"] if one["strategy"] == like["strategy"])
    values = {**shown["values"], "sends": 7_000_000}
    assert row == {**shown, "strategy": verdict["strategy"], "sends": "≈ 7 MB", "recommended": False, "values": values}
    assert previewed(state, verdict, {}) == verdict
    refused = previewed(state, verdict, {**option, "ok": False, "untried": False, "why": "no two blocks", "memory": {}})
    assert not refused["ok"] and refused["why"] == refused["row"]["why"] == "no two blocks"


def test_a_strategy_that_was_not_examined_yet_can_be_chosen() -> None:
    table = table_of()
    for row in table["options"]:
        if row["strategy"] == "tp=4":
            row.update(ok=False, untried=True, why="not known yet", memory={})
    state = state_of(Looked(answer_of(table)))

    assert checked(state, "tp=4") == {"text": "tp=4", "ok": True, "strategy": "tp=4", "why": "not known yet"}
    assert "  not examined yet, a switch does it first: tp=4" in text_of(state).splitlines()


def test_the_text_of_the_panel_has_the_same_content() -> None:
    text = text_of(state_of(Looked(answer_of(table_of("zero3", previous="dp=4"))), Finished(verdict_of())))

    assert "training · step 7 of 100 · loss 2.5" in text
    assert "global 16 = micro 4 x accum 1 x dp 4" in text
    assert "blocks.1  ▂▂ ▂▂ ▂▂ ▂▂  12.7 k" in text
    assert "* dp=4 zero=3" in text
    assert "back to dp=4" in text
    assert "state identical" in text
    assert "being worked out" in text_of(state_of(Looked({**answer_of(table_of()), "table": {}})))
    assert "no Trainer" in text_of(state_of(Looked({"training": False, "held": False, "job": False})))


def test_the_picture_of_the_panel_has_the_same_content_within_its_size() -> None:
    table = table_of()
    state = state_of(Looked(answer_of(table)), Finished(verdict_of(what="</svg>")))
    job = job_view(state)
    # Under zero=1 each rank holds all weights.
    assert "zero=2: gradients too; 3: weights too" in job["legend"]["zero"]
    picture = ElementTree.fromstring(svg_of(pulse_view(state)["headline"], job, state.results[0].line))
    words = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]

    now, best = (next(row for row in job["rows"] if row[key]) for key in ("current", "recommended"))
    assert {f"{now['label']} · now", f"{best['label']} · recommended", now["step"], now["peak"]} <= set(words)
    assert f"Recommended: {best['label']}, {job['because']}." in words
    known = [row for row in job["rows"] if row["ok"] and row["values"]["step"] and row["values"]["peak"]]
    assert len([one for one in picture.iter(f"{SVG}circle") if one.get("r") == "5"]) == len(known) > 2
    assert "7 cannot be used here" in words
    assert any(line.startswith("last: ") for line in words)
    # This is also true for many ranks and strategies.
    for ranks, nodes in ((64, 8), (2, 1)):
        many = job_view(state_of(Looked(answer_of(table_of(ranks=ranks, nodes=nodes)))))
        picture = ElementTree.fromstring(svg_of("training", many, ""))
        wide, high = float(picture.get("width", 0)), float(picture.get("height", 0))
        assert all(float(one.get("x", 0)) <= wide and float(one.get("y", 0)) <= high for one in picture.iter())


def test_strategies_with_the_same_name_get_different_labels() -> None:
    rows = job_view(state_of(Looked(answer_of(table_of(ranks=8, nodes=2)))))["rows"]
    labels = [row["label"] for row in rows]

    assert len(set(labels)) == len(labels)
    assert {"ddp", "zero3", "hsdp shard=4", "hsdp shard=2", "ddp+tp tp=2", "ddp+tp tp=4"} <= set(labels)


def test_payback_is_a_whole_number_of_steps() -> None:
    def payback(pause: float) -> str:
        rows = table_of()
        for row in rows["options"]:
            row["switch_s"] = pause
        (tp,) = [row for row in job_view(state_of(Looked(answer_of(rows))))["rows"] if row["strategy"] == "tp=4"]
        return str(tp["payback"])

    # Each step saves 10 ms.
    assert [payback(pause) for pause in (0.0, 0.002, 0.01, 0.012)] == ["1 step", "1 step", "1 step", "2 steps"]


def test_steps_and_goal_are_counted_from_the_first_training() -> None:
    def headline(finished: int, **progress: int | str) -> str:
        answer = answer_of(table_of())
        answer |= {"step": finished, "progress": answer["progress"] | progress}
        return str(pulse_view(state_of(Looked(answer)))["headline"])

    assert "training · step 7 of 100 · loss" in headline(7)
    assert "training · step 7 of 100 · loss" in headline(8)  # step 8 is running
    assert "training · step 1,307 of 1,400 · loss" in headline(1308, step=1307, goal=1400)
    assert "training · step 1,308 · loss" in headline(1308, step=1307, goal=0)  # a loop over job.batches
    assert headline(7, eta_s=540).endswith(" tokens/s · 9 min to go")
    assert headline(7, unit="rows").endswith(" 1,234 rows/s")


def test_a_mistyped_strategy_gets_a_suggestion() -> None:
    assert checked(state_of(Looked(answer_of(table_of()))), "zer3")["why"].endswith("→ zero3")


def test_a_trial_before_any_other_step_has_no_time_to_compare_with() -> None:
    tried = {"strategy": "tp=4", "steps": 1, "step_s": 0.76, "before_step_s": None}
    line = verdict_of(do="try", strategy="dp=4", result=tried).line

    assert line == "tried tp=4 for 1 step: 760 ms a step, dp=4 is not measured yet"


def test_no_button_can_be_pressed_if_the_cluster_is_gone() -> None:
    assert not any(pulse_view(state_of(Looked(answer_of(table_of())), Lost("the cluster has ended")))["can"].values())


def test_the_recommended_strategy_keeps_its_place_and_is_named_with_its_peak() -> None:
    state = reduce(State("c", 4), Looked(answer_of(table_of())))
    rows = job_view(state)["rows"]
    (found,) = [row for row in rows if row["recommended"]]
    assert found["strategy"].startswith("pp=4") and found["peak"] == "≈ 3 MB"
    assert [row["strategy"] for row in rows if row["ok"]] == [
        row["strategy"] for row in state.table["options"] if row["ok"]
    ]
    assert "recommended: pp=4" in text_of(state) and "→ pp=4" in text_of(state)


def test_the_savings_of_levers_and_their_cost_are_shown_under_the_table() -> None:
    levers = {"strategy": "dp=4", "step_s": 0.04, "each": {"bucket=4M": 0.035, "compress=int8": 0.02}}
    state = reduce(State("c", 4), Looked(answer_of(table_of(levers=levers))))
    said = (
        "dp=4 waits for its link: ≈ 40 ms a step. With the same sums: bucket=4M 35 ms. Not equal to one process: "
        "compress=int8 20 ms"
    )
    assert job_view(state)["levers"] == said and said in text_of(state)
    none = reduce(State("c", 4), Looked(answer_of(table_of())))
    assert job_view(none)["levers"] == "" and "waits for its link" not in text_of(none)


def paced(
    seconds: float, low: float | None = None, high: float | None = None, strategy: str = "dp=4", step: int = 100
) -> dict[str, Any]:
    table = table_of()
    pace = {"strategy": strategy, "seconds": seconds, "low": low, "high": high, "steps": 20, "ago": 0}
    return answer_of(table, progress={**answer_of(table)["progress"], "step": step, "pace": pace})


def rows_of(state: State) -> dict[str, Any]:
    return {row["strategy"]: row for row in job_view(state)["rows"]}


def test_the_current_row_payback_and_recommendation_use_the_newest_pace() -> None:
    state = state_of(Looked(paced(0.0201, 0.02, 0.0202)))
    rows = rows_of(state)
    assert rows["dp=4"]["step"] == "20.1 ms" and rows["dp=4"]["margin"] == "20–20.2 ms of 20 steps"
    assert rows["tp=4"]["payback"] == "never"  # 30 ms; by the table's 40 ms it would be 50 steps
    assert job_view(state)["recommended"] == "dp=4"  # within 2 % of the pipeline's 20 ms, and simpler
    assert (
        rows_of(state_of(Looked(paced(0.02, strategy="tp=4"))))["dp=4"]["step"] == "40 ms"
    )  # the pace is from before a switch


def test_the_panel_says_that_step_times_come_from_a_comparison() -> None:
    answer = paced(0.0201, 0.02, 0.0202)
    assert not job_view(state_of(Looked(answer)))["compared"]
    answer["progress"]["pace"]["compared"] = True
    assert job_view(state_of(Looked(answer)))["compared"]


def test_a_pace_belongs_to_the_strategy_with_its_full_list_of_experts() -> None:
    answer, whole = paced(0.0201, 0.02, 0.0202), "dp=4 ep=2 experts=0:1-5"
    rows = [answer["table"], *(row for row in answer["table"]["options"] if row["strategy"] == "dp=4")]
    for one in rows:
        one["strategy"] = whole
    answer["progress"]["pace"]["strategy"] = recorded(whole)

    assert rows_of(state_of(Looked(answer)))[whole]["step"] == "20.1 ms"


def test_a_small_change_of_the_pace_keeps_the_table() -> None:
    first = state_of(Looked(paced(0.05, 0.049, 0.051)))
    assert job_view(reduce(first, Looked(paced(0.0505, 0.0495, 0.051, step=130)))) == job_view(first)
    assert rows_of(reduce(first, Looked(paced(0.06, 0.059, 0.061, step=120))))["dp=4"]["step"] == "60 ms"
    # A large change keeps the table too, if some of its steps were in the previous look.
    assert job_view(reduce(first, Looked(paced(0.06, 0.059, 0.061, step=119)))) == job_view(first)


def test_within_noise_nothing_pays_back_and_the_present_strategy_is_recommended() -> None:
    state = state_of(Looked(paced(0.04, 0.015, 0.055)))
    assert rows_of(state)["tp=4"]["payback"] == "within noise"
    assert rows_of(state)["tp=4"]["margin"] == "29–31 ms of 20 steps"
    assert rows_of(state)["dp=4"]["recommended"]
    assert "recommended: dp=4, not measurably slower than pp, and it runs now" in text_of(state)
    few = state_of(Looked(paced(0.04)))
    assert rows_of(few)["dp=4"]["margin"] == "of 20 steps" and rows_of(few)["tp=4"]["payback"] == "within noise"
    assert job_view(few)["recommended"] == ""  # too few steps of what runs now


def test_old_measurements_show_their_age_and_have_a_wider_margin() -> None:
    def row(ago: int, now: float) -> dict[str, Any]:
        answer = paced(now, 0.999 * now, 1.001 * now)
        for one in answer["table"]["options"]:
            one["step_ago"] = ago * (one["strategy"] == "tp=4")
        state = state_of(Looked(answer))
        assert rows_of(state)["tp=4"]["margin"] in text_of(state)
        return dict(rows_of(state)["tp=4"])

    fresh, old, far = row(1, 0.033), row(1500, 0.033), row(1500, 0.04)
    assert (fresh["step"], fresh["margin"]) == ("30 ms", "29–31 ms of 20 steps, 1 step ago")
    assert (old["step"], old["margin"]) == ("30 ms", "26.4–34.1 ms of 20 steps, 1,500 steps ago")
    assert [one["payback"] for one in (fresh, old, far)] == ["167 steps", "within noise", "50 steps"]


def test_among_strategies_within_noise_the_one_with_least_memory_is_recommended() -> None:
    table = table_of("zero3")
    for row in table["options"]:
        if row["strategy"] in ("dp=4", "tp=4"):
            row.update(step_s=0.03, step_low_s=0.02, step_high_s=0.04, predicted_step_s=None)
        row["predicted_step_s"] = None
    state = state_of(Looked(answer_of(table)))
    assert job_view(state)["recommended"] == "tp=4"  # its peak is 3 MB, that of ddp 12 MB; the present zero3 is slower
    assert job_view(state)["because"] == "not measurably slower than ddp, and it needs the least memory"
    table["limit_bytes"] = 2_000_000
    assert job_view(state_of(Looked(answer_of(table))))["recommended"] == ""


def test_without_evidence_nothing_is_recommended_and_a_button_measures_what_fits() -> None:
    table = table_of("ddp")
    for row in table["options"]:
        row.update(step_s=None, predicted_step_s=None)
    said = job_view(state_of(Looked(answer_of(table))))
    assert said["recommended"] == "" and not any(row["recommended"] for row in said["rows"])

    by_name = {row["strategy"]: row for row in table["options"]}
    by_name["dp=4"].update(step_s=0.1, step_low_s=0.09, step_high_s=0.11)
    by_name["tp=4"].update(step_s=0.05, step_low_s=None, step_high_s=None, step_steps=1)  # one step is no evidence
    by_name["dp=4 zero=3"].update(step_s=None, predicted_step_s=0.01)  # nor is a prediction that was never compared
    said = job_view(state_of(Looked(answer_of(table))))
    assert said["recommended"] == ""
    fits = [row["strategy"] for row in table["options"] if row["ok"] and row["strategy"] != "dp=4"]
    assert set(said["measure"]["strategies"]) <= set(fits) and said["measure"]["label"].startswith("Measure ")
    assert "(about " in said["measure"]["label"]

    by_name["tp=4"].update(step_low_s=0.049, step_high_s=0.051, predicted_step_s=0.055)
    said = job_view(state_of(Looked(answer_of(table))))  # predictions of this job are known to be wrong by 10 %
    assert said["recommended"] == "dp=4 zero=3" and said["because"].startswith("the fastest")


def test_the_reason_for_missing_predictions_is_shown_once() -> None:
    table = table_of(unpredicted="the ranks share cores")
    assert text_of(state_of(Looked(answer_of(table)))).count("No step time is predicted: the ranks share cores") == 1


def test_the_button_first_measures_strategies_without_a_measured_step() -> None:
    table = {"strategy": "dp=4", "limit_bytes": None}
    row = {"ok": True, "peak_bytes": 1, "step_bytes": 5, "step_s": 0.1, "predicted_step_s": None, "switch_s": None}
    options = [row | {"strategy": name} for name in ("dp=4", *map(str, range(14)))]
    asked = _to_measure(options, table, None)
    assert len(asked["strategies"]) == 12 and asked["label"].startswith("Measure 12 of 14 that fit")
    for option in options[:14]:
        option["step_s"] = None
    asked = _to_measure(options, table, None)
    assert len(asked["strategies"]) == 12 and asked["label"].startswith("Measure 12 of 14 that fit")
    for option in options:
        option["step_s"] = 0.1
    options[3]["step_s"] = options[14]["step_s"] = None
    asked = _to_measure(options, table, None)
    assert asked["strategies"] == ["2", "13"] and asked["label"].startswith("Measure the other 2")
    assert _to_measure(options[:5], table, None)["label"].startswith("Measure all that fit")
