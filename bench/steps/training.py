"""A training step in a cell beside the same under torchrun: DDP by hand, and nbkit's Trainer with default arguments."""

from __future__ import annotations

from bench.settings import Settings, shuffled
from bench.stats import ratio
from bench.steps.cluster_and_torchrun import Block, CellArm, TorchrunArm
from bench.table import Row, compared

RANKS = 2
ROUNDS = 40
STEPS = 5  # in a block
BAR = 1.02
COMPARISONS = (
    ("DDP GPT step, by hand in a cell / under torchrun", "by hand, cell", "by hand, torchrun"),
    ("DDP GPT step, Trainer in a cell / under torchrun", "Trainer, cell", "Trainer, torchrun"),
    ("DDP GPT step, Trainer in a cell / by hand under torchrun", "Trainer, cell", "by hand, torchrun"),
)


def run(settings: Settings) -> list[Row]:
    """Three rows."""
    folder = settings.folder
    with (
        CellArm(folder / "cell", RANKS) as cell,
        TorchrunArm(folder / "by-hand", "by_hand", cell.cores, cell.threads) as by_hand,
        TorchrunArm(folder / "trainer", "trainer", cell.cores, cell.threads) as trainer,
    ):
        arms = {
            "by hand, cell": lambda: cell.block("by_hand", STEPS),
            "by hand, cell again": lambda: cell.block("by_hand", STEPS),
            "by hand, torchrun": lambda: by_hand.block(STEPS),
            "Trainer, cell": lambda: cell.block("trainer", STEPS),
            "Trainer, cell again": lambda: cell.block("trainer", STEPS),
            "Trainer, torchrun": lambda: trainer.block(STEPS),
        }
        blocks: dict[str, list[Block]] = {arm: [] for arm in arms}
        for order in [list(arms), *shuffled(list(arms), settings.count(ROUNDS))]:
            for arm in order:
                blocks[arm].append(arms[arm]())
    # The first round warmed up.
    seconds = {arm: [block.seconds for block in of[1:]] for arm, of in blocks.items()}
    rows = []
    for what, ours, theirs in COMPARISONS:
        note = _cpu(blocks[ours][1:], blocks[theirs][1:])
        again = seconds[f"{ours} again"]
        rows.append(compared(what, seconds[ours], theirs, seconds[theirs], again, BAR, "ms", note=note))
    return rows


def _cpu(ours: list[Block], theirs: list[Block]) -> str:
    """CPU-seconds, steadier than wall time; all processes: also the notebook's, the controller's, torchrun's."""
    rank = ratio([block.cpu for block in ours], [block.cpu for block in theirs])
    whole = ratio([block.whole_cpu for block in ours], [block.whole_cpu for block in theirs])
    return (
        f"; CPU-seconds of rank 0 {rank.middle:.3f} x [{rank.low:.3f}, {rank.high:.3f}],"
        f" of all processes {whole.middle:.3f} x [{whole.low:.3f}, {whole.high:.3f}]"
    )
