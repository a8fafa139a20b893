"""Steps of Llamas in bf16 under FSDP and tensor parallelism, as torchtitan reports them: llama.csv.

FSDP2 gathers bf16 and reduces fp32. Tensor parallelism splits positions too, and none of its traffic is hidden.
"selective" recomputation selects operations. It keeps attention. It repeats three matrix multiplications of a block
(keys, the output of attention, one of the inner layer) and every operation that is not a matrix multiplication. The
pages do not say whether the steps on A100 were compiled (assumed: no), nor their network (assumed: the data sheet's).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.plan.published.case import HALF, NODE, Case
from nbkit.planner.choose.load import DEVICES, Hardware, Load
from nbkit.planner.step import StepUnit
from nbkit.planner.traffic import TrafficTerm
from nbkit.strategy import Strategy

# The H100 that the page describes: HBM2e and 500 W.
OWN = {"H100-500W": replace(DEVICES["H100"], name="H100-500W", memory=96e9, bandwidth=2.4e12)}

FULL = 4
"""Bytes of an element of weights at rest and of reduced gradients."""


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    inner: int
    vocab: int
    sequence: int

    @property
    def _keys(self) -> int:
        return self.width * self.kv_heads // self.heads

    @property
    def block(self) -> int:
        """Return the parameters of a block without its norms. A position needs as many multiplications."""
        return 2 * self.width * (self.width + self._keys) + 3 * self.width * self.inner

    @property
    def ends(self) -> int:
        """Return the parameters of embedding and head."""
        return 2 * self.vocab * self.width

    @property
    def again(self) -> int:
        """Return how many multiplications of a block "selective" recomputation repeats for a position."""
        return self.width * (self._keys + self.width + self.inner)

    @property
    def flops(self) -> float:
        """Return the FLOPs of a position's forward. Half of attention is masked."""
        maps = self.layers * (self.block + self.sequence * self.width) + self.vocab * self.width
        return 2.0 * maps

    def touched(self, compiled: bool) -> float:
        """Return the bytes that a position's forward reads and writes outside of matrix multiplications.

        If compiled, a norm is one pass with the residual sum before it. Rotary positions and the inner layer's
        activation are one pass each. Otherwise, each operation reads and writes; norms, positions and the loss do so in
        fp32.
        """
        attention = 2 * (self.width - self._keys) + 2 * self._keys + 4 * self.width
        turned = self.width + self._keys
        if compiled:
            each, logits = 8 * self.width + 2 * turned + attention + 3 * self.inner, 4
        else:
            each, logits = (36 + 6) * self.width + 10 * turned + attention + 5 * self.inner, 8
        return float(HALF * (self.layers * each + logits * self.vocab))


def cases() -> list[Case]:
    """Return the cases of llama.csv, in its order."""
    with Path(__file__).with_name("llama.csv").open() as file:
        return [_case(line) for line in csv.DictReader(file)]


def _case(line: Mapping[str, str]) -> Case:
    model = Llama(*(int(line[key]) for key in ("layers", "heads", "kv_heads", "width", "inner", "vocab", "sequence")))
    dp, tp, rows = int(line["dp"]), int(line["tp"]), int(line["rows"])
    strategy = Strategy(dp=dp, tp=tp, zero=3)
    on = Hardware(dp * tp // NODE, NODE, {**DEVICES, **OWN}[line["hardware"]])
    tokens = rows * model.sequence
    maps = {"none": 0.0, "full": 1.0, "selective": 2 * model.layers * model.again / model.flops}[line["recompute"]]
    # Weights and gradients are fp32. A gather sends bf16, half of these bytes. The ends are the root of FSDP.
    block, ends = FULL * model.block // tp, FULL * model.ends // tp
    share = model.block + model.sequence * model.width
    whole = model.layers * share + model.vocab * model.width
    blocks = (StepUnit(share / whole, (block,), gathered=HALF / FULL),) * model.layers
    root, head = StepUnit(0.0, (ends,), gathered=HALF / FULL), StepUnit(model.vocab * model.width / whole, ())
    held = model.layers * block + ends
    terms = [
        TrafficTerm(
            "dp", "all_gather", dp, 1, held, "parameters"
        ),  # only the bytes; the units give the number of operations
        TrafficTerm("dp", "reduce_scatter", dp, 1, held, "gradients"),
    ]
    if tp > 1:
        calls = {"none": 8, "selective": 10, "full": 12}[line["recompute"]] * model.layers + 4
        terms.append(TrafficTerm("tp", "all_gather", tp, calls, calls * tokens * model.width * HALF, "hidden states"))
    load = Load(
        flops=model.flops * tokens / tp,
        touched=model.touched(line["compiled"] == "yes") * tokens / tp,
        again=maps,
        touched_again=float(line["recompute"] != "none"),
        stages=[1.0],
        terms=terms,
        # fp32 weights and two moments are read and written; gradients are read.
        updated=held / FULL / dp * (2 * 12 + 4),
        units=(root, *blocks, head),
    )
    name = f"{line['model']}, {dp * tp} {line['hardware']}, dp={dp} tp={tp}, {line['recompute']}"
    name += ", compiled" if line["compiled"] == "yes" else ""
    measured = rows * dp * model.sequence / (dp * tp) / float(line["tokens_per_device"])
    return Case(name, on, strategy, load, (3 + maps) * model.flops * tokens * dp, measured)
