"""Test `%strategy` and `%train` in a real kernel without widgets, with and without a running training."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kernel_client import Cell, Kernel

# Trainings sleep in each step, so that the cores are free for other processes.
TRAINER = """%%distributed
import time
torch.set_num_threads(1)
trainer = nbkit.Trainer(
    model=lambda: nbkit.GPT(nbkit.GPTConfig(block=16, layers=2, heads=2, width=16)),
    loss=lambda logits, target: torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    data=nbkit.TextDataset(block=16, limit=20_000), batch_size=8, log_dir=None, progress=False,
    callbacks=[lambda *_: time.sleep(0.05)])"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("home")) as kernel:
        kernel.run("%load_ext nbkit")
        cell = kernel.run("%cluster start -n 2 --cpu --name steer --ttl 60")
        assert cell.status == "ok", cell.text
        yield kernel
        kernel.run("%cluster stop")


PANEL = "get_ipython().run_line_magic('strategy', '')"


def panel(kernel: Kernel, source: str) -> Cell:
    """Run a cell that shows the panel, until the ranks have computed the cost of each strategy. Return the cell."""
    deadline = time.monotonic() + 60
    while "look again" in (shown := kernel.run(source)).text:
        assert time.monotonic() < deadline, shown.text
        time.sleep(0.2)
    return shown


def test_strategy_and_plan_without_a_trainer_say_what_to_type(kernel: Kernel) -> None:
    assert "no Trainer on the ranks" in kernel.run(f"print(repr({PANEL}))").text
    refused = kernel.run("%strategy zero3")
    assert refused.status == "error"
    assert "There is no Trainer on the ranks" in refused.text
    unplanned = kernel.run("%nbkit plan")
    assert "There is no training to plan on the ranks yet." in unplanned.text and "Traceback" not in unplanned.text
    assert "missing: --batch, --on" in kernel.run("%nbkit plan config").text
    assert "missing: NAME" in kernel.run("%nbkit plan --batch 8 --on '2 A100'").text
    assert "Traceback" not in refused.text


def test_an_idle_trainer_is_switched_at_once(kernel: Kernel) -> None:
    assert kernel.run(TRAINER).status == "ok"

    shown = kernel.run("%strategy zero3")

    assert shown.status == "ok", shown.text
    assert "dp=2 → dp=2 zero=3 after step 0" in shown.text
    planned = panel(kernel, "%nbkit plan").text
    assert "steer: not training" in planned and "memory per rank" in planned and "nothing is recommended yet" in planned
    assert "state identical" in shown.text
    assert "'dp=2 zero=3'" in kernel.run("%%rank 0\nstr(trainer.strategy)").text


def test_json_prints_the_numbers_of_the_table_of_a_magic(kernel: Kernel) -> None:
    def told(line: str) -> Any:
        return json.loads(kernel.run(line).text)

    status = told("%cluster status --json")
    assert (status["name"], len(status["ranks"]), status["ranks"][1]["rank"]) == ("steer", 2, 1)
    assert [cluster["name"] for cluster in told("%cluster list --json")["clusters"]] == ["steer"]
    assert told("%nbkit why --json")["kind"] == "free"
    panel(kernel, "%nbkit plan")
    for line in ("%strategy --json", "%nbkit plan --json"):
        assert told(line)["job"] and told(line)["table"]
    switched = told("%strategy zero2 --json")
    assert switched["ok"] and switched["result"]["identical"] and switched["strategy"] == "dp=2 zero=2"
    assert switched["predicted"]["moved_bytes"] == switched["result"]["moved_bytes"]
    assert told("%strategy --undo --json")["strategy"] == "dp=2 zero=3"
    kernel.run("config = __import__('nbkit').GPTConfig(width=256, layers=4, heads=4)")
    plan = told("%nbkit plan config --batch 64 --on '2 A100' --json")
    assert plan["devices"] == 2 and plan["rows"][0]["seconds"] > 0


def test_the_panel_is_a_widget_with_a_text_version(kernel: Kernel) -> None:
    shown = panel(kernel, "%strategy")

    view, still = [content["data"] for _, kind, content in shown.messages if kind == "display_data"][:2]
    assert "application/vnd.jupyter.widget-view+json" in view
    assert "* dp=2 zero=3" in still["text/plain"]
    plain = panel(kernel, f"import sys\nsys.modules['anywidget'] = None\n{PANEL}")
    kernel.run("del sys.modules['anywidget']")
    bundle = next(content["data"] for _, kind, content in plain.messages if kind == "display_data")
    assert set(bundle) == {"text/plain", "text/html"}
    assert "* dp=2 zero=3" in bundle["text/plain"]


def test_the_panel_gets_heartbeats_of_the_kernel_while_a_cell_runs(kernel: Kernel) -> None:
    kernel.run("%strategy")
    kernel.others.clear()
    busy = kernel.run("import time\ntime.sleep(2.5)")

    came = [*busy.messages, *(message for those in kernel.others.values() for message in those)]
    told = [content["data"].get("content") for _, kind, content in came if kind == "comm_msg"]
    assert {"beat": True} in told


def test_a_running_training_obeys_each_control_and_continues(kernel: Kernel) -> None:
    kernel.run("%%distributed --detach\nrecords = trainer.fit(1_000_000)")
    # A switch moves the optimizer's state too, which exists only after the first step.
    kernel.run(
        "import time\nfrom nbkit.notebook.cluster.cluster import current\n"
        "while current().training.look()['step'] < 3: time.sleep(0.05)"
    )

    switched = kernel.run("%strategy tp").text
    assert "dp=2 zero=3 → tp=2 after step" in switched
    moved = next(line for line in switched.splitlines() if "bytes moved" in line).split()
    assert moved[moved.index("predicted") + 1] == moved[moved.index("measured") + 1]

    refused = kernel.run("%strategy dp=3")
    assert refused.status == "error"
    assert "the world has 2" in refused.text
    assert "tp=2 → dp=2 zero=3 after step" in kernel.run("%strategy --undo").text
    assert "tried tp=2 for 4 steps" in kernel.run("%strategy --try 4 tp").text
    compared = kernel.run("%compare tp --steps 2").text
    assert "2 steps each, in turns" in compared and "tp=2 " in compared and "sent in a step" in compared

    assert "paused after step" in kernel.run("%train pause").text
    assert "paused" in panel(kernel, f"print(repr({PANEL}))").text
    assert "going on" in kernel.run("%train resume").text
    not_paused = kernel.run("%train resume")
    assert "The training is not paused" in not_paused.text
    assert "running" in kernel.run("handle.status").text
    assert "saved" in kernel.run("%train save kept").text
    kernel.run("%train pause")
    assert "stopped after step" in kernel.run("%train stop").text
    assert "interrupted" in kernel.run("handle.status").text
    assert "No cell runs" in kernel.run("%train stop").text

    history = kernel.run(
        "%%rank 0\nsteps = [r['step'] for r in trainer.history]\n"
        "steps == list(range(1, len(steps) + 1)), sorted({r['strategy'] for r in trainer.history})"
    )
    assert "(True, ['dp=2 zero=3', 'tp=2'])" in history.text


FRAGILE = """%%distributed
import time
class Fragile(torch.nn.Module):
    def forward(self, x):
        if fragile is not None and rank == 1 and str(fragile.strategy) == "dp=2 zero=3":
            raise ValueError("wants the whole weight")
        return x

def build():
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), Fragile(), torch.nn.Linear(16, 3))

def made():
    draw = torch.Generator().manual_seed(3)
    data = [(torch.randn(6, generator=draw), torch.tensor(i % 3)) for i in range(64)]
    return nbkit.Trainer(
        model=build, loss=torch.nn.functional.cross_entropy, data=data, batch_size=8, log_dir=None, progress=False,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        callbacks=[lambda *_: time.sleep(0.05)])

fragile = None
fragile = made()"""


def test_a_strategy_whose_first_step_fails_is_undone_and_training_continues(kernel: Kernel) -> None:
    assert kernel.run(FRAGILE).status == "ok"
    training = kernel.send("%%distributed --detach\nrecords = fragile.fit(1_000_000)")
    kernel.collect(training)
    reached = (
        "import time\nfrom nbkit.notebook.cluster.cluster import current\n"
        "while current().training.look()['step'] < {}: time.sleep(0.05)"
    )
    kernel.run(reached.format(3))

    refused = kernel.run("%strategy zero3")
    assert refused.status == "error" and "Traceback" not in refused.text
    assert "SwitchError: dp=2 → dp=2 zero=3 was taken back after step" in refused.text
    assert "the first step under it failed, and training continues under dp=2" in refused.text
    assert "rank 1: ValueError: wants the whole weight" in refused.text
    asked = "taken = current().training.look()['step']; print(taken)"
    kernel.run(reached.format(int(kernel.run(asked).text) + 8))
    assert "running" in kernel.run("handle.status").text
    switched = kernel.run("%strategy zero1").text
    assert "dp=2 → dp=2 zero=1 after step" in switched and "state identical" in switched
    assert "interrupted" in kernel.run("handle.stop().status").text
    assert "UserWarning: dp=2 → dp=2 zero=3 was taken back after step" in kernel.late(training, 0.0).text

    compared = kernel.run(
        "%%rank 0\nunder = [r['loss'] for r in fragile.history if r['strategy'] == 'dp=2']\n"
        "len(under) > 8, [r['taken_back'] for r in fragile.history if 'taken_back' in r]"
    )
    assert "(True, ['dp=2 zero=3: rank 1: ValueError: wants the whole weight'])" in compared.text
    never = kernel.run(
        "%%distributed\nsteps = sum(r['strategy'] == 'dp=2' for r in fragile.history)\nfragile, old = None, fragile\n"
        "never = made()\nnever.fit(steps)\n"
        "[r['loss'] for r in never.history] == [r['loss'] for r in old.history[:steps]]"
    )
    assert never.status == "ok" and never.text.count("True") >= 1 and "False" not in never.text
    assert "formed anew" not in refused.text + compared.text + never.text


SQUEEZED = """%%distributed {}
import os
from nbkit.rank.train.out_of_memory import tensor_limit
os.environ["NBKIT_TENSOR_LIMIT"] = str(1 << 40)
trainer.fit(1)
if rank == 1:
    os.environ["NBKIT_TENSOR_LIMIT"] = str(int(0.9 * tensor_limit.in_force().peak))
    tensor_limit.in_force().levels.clear()
trainer.fit(1)"""


@pytest.mark.long
def test_a_training_that_runs_out_of_memory_offers_choices_and_continues(kernel: Kernel) -> None:
    kernel.run(TRAINER)

    ended = kernel.run(SQUEEZED.format(""))
    assert ended.status == "error"
    assert "A step ran out of memory, and was taken back: rank 1: OutOfMemoryError" in ended.text
    assert "%train fit 1" in ended.text and "microbatch_size=" in ended.text
    assert "There is no row 99" in kernel.run("%train fit 99").text
    taken = kernel.run("%train fit 1")
    assert "after step 1: trainer.fit(...) goes on" in taken.text, ended.text + taken.text
    assert kernel.run("%%distributed\ntrainer.fit(1)").status == "ok"
    assert "nothing to fit" in kernel.run("%train fit").text

    kernel.run(SQUEEZED.format("--detach"))
    kernel.run(
        "import time\nfrom nbkit.notebook.cluster.cluster import current\n"
        "while not current().training.look()['held']: time.sleep(0.05)"
    )
    assert "out of memory: %train fit" in kernel.run("%cluster status").text
    assert "out of memory: %train fit" in kernel.run(f"print(repr({PANEL}))").text
    assert "going on" in kernel.run("%train fit 1").text
    kernel.run("%train wait")
    assert "(4, [1, 2, 3, 4])" in kernel.run("%%rank 0\ntrainer.step, [r['step'] for r in trainer.history]").text
    kernel.run("%%distributed\ndel os.environ['NBKIT_TENSOR_LIMIT']")


def test_a_switch_while_another_cell_runs_is_refused(kernel: Kernel) -> None:
    kernel.run("%%distributed --detach\nimport time; time.sleep(60)")

    refused = kernel.run("%strategy ddp")

    assert refused.status == "error"
    assert "The ranks are busy" in refused.text
    kernel.run("handle.stop()")


def test_options_of_strategy_that_conflict_are_refused(kernel: Kernel) -> None:
    assert "--undo takes no strategy" in kernel.run("%strategy --undo zero3").text
    assert "--try needs a strategy" in kernel.run("%strategy --try 5").text


def test_a_switch_requested_before_fit_waits_for_the_training(kernel: Kernel) -> None:
    kernel.run(f"{TRAINER}")
    kernel.run("%%distributed --detach\nimport time; time.sleep(4)\ntrainer.fit(1_000_000)")
    switched = kernel.run("%strategy zero1")
    assert "dp=2 → dp=2 zero=1 after step" in switched.text, switched.text
    kernel.run("%train stop")


def test_a_switch_during_a_cell_without_training_is_refused_with_a_hint(kernel: Kernel) -> None:
    kernel.run("%%distributed --detach\nimport time; time.sleep(60)")
    refused = kernel.run("%strategy zero1")
    assert "→ %train wait" in refused.text and "--" not in refused.text.rpartition("→")[2]
    kernel.run("handle.stop()")
