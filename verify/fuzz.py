"""Split random models over two ranks, as the proof allows, and compare them with one process.

python -m verify fuzz 500          prints the seeds that differ from one process; make fuzz-tp runs this
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from ranks import run_ranks
from torch.nn import functional as F

from verify.models.random_blocks import LENGTH, VOCAB, random_model
from verify.tensor_split import compared

IDS = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
TARGET = IDS.roll(-1, 1).flatten()

Answer = tuple[str, int, int]
"""(the error, or ""; number of pairs that were split; number of pairs that can be split by hand)."""


def tried(world: Any, seeds: list[int]) -> dict[int, Answer]:
    """Return the answer for each seed, on a rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[int, Answer] = {}
    for seed in seeds:
        model, possible = random_model(seed)
        split = 0
        try:
            _, apart, cut, _ = compared(world, model, IDS, lambda y: F.cross_entropy(y.flatten(0, 1), TARGET))
            rows = [layout for name, layout in cut.layouts.items() if name.endswith(("m4.weight", "p2.weight"))]
            split, why = (
                sum(not layout.is_whole for layout in rows),
                "" if apart < 1e-10 else f"the loss is {apart} off",
            )
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:300]}"
        found[seed] = (why, split, possible)
    return found


def told(found: dict[int, Answer]) -> str:
    """Return the answers as text."""
    wrong = [f"seed {seed}: {why}" for seed, (why, _, _) in found.items() if why]
    by_hand = sum(possible for _, _, possible in found.values())
    split = sum(min(split, possible) for _, split, possible in found.values())
    short = Counter(possible - split for _, split, possible in found.values() if split < possible)
    share = f"{split} of {by_hand} pairs that can be split by hand are split: {split / max(by_hand, 1):.0%}"
    less = [seed for seed, (_, split, possible) in found.items() if split < possible]
    return "\n".join([f"{len(found)} models, {len(wrong)} wrong or failed", *wrong, share, f"less: {less} {short}"])


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 1 if a model differs from one process."""
    many = int(arguments[0]) if arguments else 500
    first = int(arguments[1]) if len(arguments) > 1 else 0
    found: dict[int, Answer] = {}
    for start in range(first, first + many, 50):
        found |= run_ranks(tried, 2, list(range(start, min(start + 50, first + many))), timeout=1500)[0]
        print(told(found), flush=True)
    return int(any(why for why, _, _ in found.values()))
