"""Measure how good the panel's recommendation is after its button "Measure all that fit", on ten models.

python -m tests.support.measured_choice [MODEL ...]      all of them, or these: about 10 minutes on two quiet cores

For each model two ranks train a few steps under ddp. They measure as the button does, and the row that the panel then
recommends is compared with the best measured one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_folder = Path(__file__).parent
if str(_folder) not in sys.path:
    sys.path.insert(0, str(_folder))

from ranks import run_ranks  # noqa: E402

MODELS = ("gpt", "gpt2", "llama_of_8_heads", "encoder", "sequential", "mixer", "resnet", "vit", "bert", "lstm")
RANKS, ROWS = 2, 16
BAR = 1.03


def choices(world: Any, names: Sequence[str]) -> list[tuple[str, str, float, str]]:
    """Return (model, recommended strategy, its measured step / the best measured step, what was measured)."""
    return [_choice(world, name) for name in names]


def _choice(world: Any, name: str) -> tuple[str, str, float, str]:
    import torch
    import torch.distributed as dist

    import nbkit
    from nbkit.notebook.widgets.panel.panel import SURE_STEPS
    from nbkit.notebook.widgets.panel.view import _to_measure
    from nbkit.planner.choose.search import recommended, undecided
    from nbkit.rank.train.estimate.strategy_table import findings, table
    from verify.training import MODELS as SPECIMENS

    warnings.simplefilter("ignore")
    specimen = SPECIMENS[name]
    trainer = nbkit.Trainer(
        model=specimen.build,
        loss=specimen.loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        data=specimen.rows(4 * ROWS, dtype=torch.float32),
        batch_size=ROWS,
        log_dir=None,
        progress=False,
    )
    trainer.fit(10)
    told: list[Any] = [None]
    if world.place.rank == 0:
        for _ in findings(trainer.job):  # as for an open panel
            pass
        now = table(trainer.job)
        told = [_to_measure(now["options"], now, now["limit_bytes"])]
    dist.broadcast_object_list(told, 0)
    found = trainer.compare(*told[0]["strategies"], steps=told[0]["steps"])
    if close := undecided(found["strategies"], str(trainer.strategy)):
        trainer.compare(*close, steps=SURE_STEPS)
    rows = table(trainer.job)["options"] if world.place.rank == 0 else []
    choice = recommended(rows, None, str(trainer.strategy))
    known = {row["strategy"]: row["step_s"] for row in rows if row["step_s"] is not None}
    if not known:
        return name, "", 0.0, ""
    words = ", ".join(f"{one} {1e3 * took:.1f} ms" for one, took in sorted(known.items(), key=lambda item: item[1]))
    ratio = known[choice.strategy] / min(known.values()) if choice.strategy in known else float("inf")
    return name, f"{choice.strategy} ({choice.why})", ratio, words


def main(names: list[str]) -> int:
    """Print a line for each model. Return 1 if a recommendation is worse than the best by more than the bar."""
    wrong = 0
    for name in names or MODELS:
        ((_, chosen, ratio, words),) = run_ranks(choices, RANKS, [name], timeout=600)[0]
        wrong += ratio > BAR
        print(f"{ratio:6.3f}  {name}: recommended {chosen}; {words}", flush=True)
    print(f"{len(names or MODELS) - wrong} of {len(names or MODELS)} within {BAR:g} of the best measured")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
