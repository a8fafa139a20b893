"""The moving picture of README, drawn from a real run: four ranks, four switches, and the same training without them.

python -m tests.support.live_switch           draws docs/pictures/live-switch.svg from live_switch.json
python -m tests.support.live_switch record    makes the run first: about four minutes on two cores
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import nbkit
from tests.support.svg_drawing import Drawing

FILE = Path(__file__).with_name("live_switch.json")
STEPS, PART = 150, 30
PICTURE = FILE.parents[2] / "docs" / "pictures" / "live-switch.svg"
SWITCHES = ("zero3", "tp", "pp=2 schedule=1f1b microbatches=4", "tp=2")
WIDTH, HEIGHT = 480, 404
SECONDS, PAUSE = 20.0, 4.0  # of the curve, and of the whole picture after it
KINDS = ("dp", "zero", "tp", "pp", "cp")
LEFT, RIGHT, TOP, BOTTOM = 40.0, 468.0, 236.0, 362.0
PREPARE = """
from torch.nn import functional as F

text = nbkit.TextDataset(block=64, limit=1_000_000)

def make_trainer():
    return nbkit.Trainer(
        model=lambda: nbkit.GPT(nbkit.GPTConfig(block=64, layers=4, heads=8, width=96, dropout=0.05)).double(),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
        data=text,
        batch_size=16,
        clip_norm=1.0,
        log_dir=None,
    )

trainer = make_trainer()
"""


def record() -> dict[str, Any]:
    """Return the losses with and without switches, what each switch did, and what each rank held."""
    cluster = nbkit.Cluster.start(n=4, cpu=True, name="picture")
    try:
        cluster.run(PREPARE)
        cell = cluster.run(f"records = trainer.fit({STEPS})", detach=True)
        held, switches = [], []
        for number in range(len(SWITCHES) + 1):
            if number:
                while cluster.training.look().get("step", 0) < number * PART - 5:
                    time.sleep(0.1)
                done = cluster.switch(SWITCHES[number - 1])
                switches.append({"asked": SWITCHES[number - 1], "predicted": dict(done.predicted), **done.result})
            held.append(_held(cluster, switches[-1]["new"] if switches else "dp=4"))
        cell.wait()
        history = cluster.run("[(r['loss'], r['strategy']) for r in trainer.history]").values[0]
        alone = cluster.run(f"[r['loss'] for r in make_trainer().fit({STEPS})]").values[0]
    finally:
        cluster.stop()
    losses, strategies = zip(*history, strict=True)
    return {"losses": losses, "strategies": strategies, "alone": alone, "switches": switches, "held": held}


def _held(cluster: nbkit.Cluster, strategy: str) -> dict[str, Any]:
    """Return the names of the blocks, and the share of each that each rank holds, as in the panel."""
    while True:
        table = cluster.training.look().get("table") or {}
        if table.get("strategy") == strategy and len(table["blocks"]) > 1:
            names = [block["name"] for block in table["blocks"]]
            return {"blocks": names, "ranks": [table["held"]["rows"][row] for row in table["held"]["ranks"]]}
        time.sleep(0.1)


def draw(run: dict[str, Any]) -> Drawing:
    """Return the moving picture: commands, what each rank holds, and the loss over the run."""
    losses, alone, switches = run["losses"], run["alone"], run["switches"]
    starts = [0, *(switch["step"] for switch in switches)]
    ends = [*starts[1:], len(losses)]
    apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    words = (
        f"A training of {len(losses)} steps on 4 ranks changes its strategy {len(switches)} times. "
        f"Its loss is that of a training that was never switched, to {apart:.0e}."
    )
    windows = [(start / len(losses), end / len(losses)) for start, end in zip(starts, ends, strict=True)]
    d = Drawing(words, HEIGHT, _style(windows), WIDTH)
    for number, held in enumerate(run["held"]):
        d.begin(f"phase phase{number}")
        _command(d, number, switches[number - 1] if number else None)
        _ranks(d, run["strategies"][starts[number]], held, KINDS[number])
        d.end()

    def at(step: float, loss: float) -> tuple[float, float]:
        low, high = min(losses), max(losses)
        return LEFT + (RIGHT - LEFT) * step / len(losses), TOP + 4 + (BOTTOM - TOP - 8) * (high - loss) / (high - low)

    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        x, until = at(start, 0)[0], at(end, 0)[0]
        d.box(x, TOP, until - x, BOTTOM - TOP, f"{KINDS[number]} band")
        name = run["strategies"][start].split(" schedule")[0].replace("dp=4 zero", "zero")
        d.text((x + until) / 2, TOP + 20, name, "small bold")
    d.line(*(at(step + 0.5, loss) for step, loss in enumerate(alone)), kind="alone")
    d.line(*(at(step + 0.5, loss) for step, loss in enumerate(losses)), kind="loss")
    d.begin("cover")
    d.box(LEFT, TOP - 1, RIGHT - LEFT + 2, BOTTOM - TOP + 2, "paper")
    d.end()
    d.text(18, (TOP + BOTTOM) / 2, "loss", "small soft")
    d.text((LEFT + RIGHT) / 2, BOTTOM + 19, f"{len(losses)} steps", "small soft")
    legend = f"grey: the same training, never switched; apart by at most {apart:.0e}"
    d.text(WIDTH / 2, HEIGHT - 6, legend, "small soft")
    return d


def _style(windows: list[tuple[float, float]]) -> str:
    """Return the CSS rules that animate the picture. With reduced motion it shows the end of the run."""
    whole = SECONDS + PAUSE
    share = 100 * SECONDS / whole
    rules = [
        "svg { --cp: #cfeaf0; --cp-line: #2a7f93; }",
        "@media (prefers-color-scheme: dark) { svg { --cp: #17525f; --cp-line: #62bfd4; } }",
        ".band { stroke: none; } .alone, .loss { fill: none; stroke-linejoin: round; }",
        ".alone { stroke: var(--soft); stroke-width: 7; opacity: 0.4; }",
        ".loss { stroke: var(--ink); stroke-width: 1.6; }",
        f".phase {{ opacity: 0; }} .phase{len(windows) - 1} {{ opacity: 1; }}",
        f".cover {{ transform: translateX({WIDTH}px); }}",
        "@media (prefers-reduced-motion: no-preference) {",
        "@keyframes cover { from { transform: translateX(0); }",
        f"{share:.2f}%, to {{ transform: translateX({RIGHT - LEFT:g}px); }} }}",
        f".cover {{ animation: cover {whole:g}s linear infinite; }}",
    ]
    for number, (start, end) in enumerate(windows):
        shown = f"{start * share + 0.01:.2f}%, {end * share if end < 1 else 100:.2f}% {{ opacity: 1; }}"
        before = f"0%, {start * share:.2f}% {{ opacity: 0; }} " if start else ""
        after = f" {end * share + 0.01:.2f}%, to {{ opacity: 0; }}" if end < 1 else ""
        rules.append(
            f"@keyframes phase{number} {{ {before}{shown if start else shown.replace('0.01%', '0%')}{after} }}"
        )
        rules.append(f".phase{number} {{ animation: phase{number} {whole:g}s linear infinite; }}")
    return "\n".join([*rules, "}"])


def _command(d: Drawing, number: int, switch: dict[str, Any] | None) -> None:
    d.box(12, 12, WIDTH - 24, 32)
    d.left(24, 33, f"%strategy {switch['asked'].split(' schedule')[0]}" if switch else f"trainer.fit({STEPS})", "code")
    if switch:
        proof = "identical, bit for bit" if switch["identical"] else "not compared"
        moved = f"{switch['moved_bytes'] / 1e6:.1f} MB" if switch["moved_bytes"] else "0 bytes"
        d.text(
            WIDTH / 2,
            68,
            f"step {switch['step']}: {moved} moved, {switch['pause_s']:.2f} s pause, state {proof}",
            "small",
        )
    else:
        d.text(WIDTH / 2, 68, "data parallel: every rank holds the whole model", "small")


def _ranks(d: Drawing, strategy: str, held: dict[str, Any], kind: str) -> None:
    """Draw which share of each block each rank holds: slices side by side under zero, on top of each other under tp."""
    degrees = dict(word.split("=") for word in strategy.split())
    for rank, shares in enumerate(held["ranks"]):
        x, width = 92 + rank * 96, 86
        d.text(x + width / 2, 94, f"rank {rank}", "small")
        for row, share in enumerate(shares):
            y, height = 102 + row * 20, 16
            d.box(x, y, width, height, "gone")
            if "zero" in degrees and share:
                d.box(x + rank * width / 4, y, width * share, height, kind)
            elif "tp" in degrees and share:
                part = rank % int(degrees["tp"])
                d.box(x, y + part * height / int(degrees["tp"]), width, height / int(degrees["tp"]), kind)
            elif share:
                d.box(x, y, width, height, kind)
    for row, name in enumerate(held["blocks"]):
        shown = {"before": "tokens", "after": "head"}.get(name, name.replace("blocks.", "block "))
        d.left(12, 115 + row * 20, shown, "small")


if __name__ == "__main__":
    if "record" in sys.argv[1:]:
        FILE.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(json.loads(FILE.read_text(encoding="utf-8"))).svg(), encoding="utf-8")
