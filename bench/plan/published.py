"""Published steps of large models beside what the planner says of them, one case of each hardware for calibration.

published.csv has what the papers report; nothing in it was fitted. Beside it, what one constant share of the peak
(recomputation counted, the kinder way), taken from the same case, would say. These runs keep the scores of attention,
which nbkit's GPT does not.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbkit.planner.choose.hardware import DEVICES, Hardware
from nbkit.planner.choose.load import Known
from nbkit.planner.choose.seconds import Load, calibrated, seconds
from nbkit.planner.gpt_config import GPTConfig
from nbkit.planner.peak.gpt_pieces import GPTPieces
from nbkit.planner.traffic import Traffic
from nbkit.strategy import Strategy

NODE, HALF, SCORES = 8, 2, 10
"""Devices of a node; bytes of an element; bytes that softmax, mask and dropout move for each score."""


@dataclass(frozen=True)
class Case:
    """A line of the file."""

    name: str
    on: Hardware
    strategy: Strategy
    load: Load
    all_flops: float
    measured: float


@dataclass(frozen=True)
class Found:
    """Seconds of a case: as published, as the planner says, and by one constant share of the peak."""

    name: str
    measured: float
    predicted: float
    constant: float

    def __str__(self) -> str:
        errors = f"{self.predicted / self.measured - 1:+7.1%} {self.constant / self.measured - 1:+7.1%}"
        return f"{self.name:44} {self.measured:7.2f} s  {self.predicted:7.2f} s  {self.constant:7.2f} s {errors}"


def run() -> list[Found]:
    """Every case but those that calibrate."""
    found, first = [], dict[str, Case]()
    for case in cases():
        name = case.on.device.name
        if name not in first:
            first[name] = case
            continue
        one = first[name]
        rates = calibrated(one.load, one.strategy, one.on, one.measured)
        share = one.all_flops / one.measured / one.on.devices
        found.append(
            Found(
                case.name,
                case.measured,
                seconds(case.load, case.strategy, case.on, rates).total,
                case.all_flops / share / case.on.devices,
            )
        )
        print(found[-1], flush=True)
    return found


def bars(found: Sequence[Found]) -> tuple[bool, str]:
    """Whether the mean error is at most half of the constant share's, and the figures."""
    ours = statistics.fmean(abs(one.predicted / one.measured - 1) for one in found)
    constant = statistics.fmean(abs(one.constant / one.measured - 1) for one in found)
    text = f"{len(found)} published steps: {ours:.1%} off on average, one constant share of the peak {constant:.1%}"
    return ours <= constant / 2, f"{text} (bar: half of it)"


def cases() -> list[Case]:
    """Of the file, in its order: the first of each hardware calibrates."""
    with Path(__file__).with_name("published.csv").open() as file:
        return [_case(line) for line in csv.DictReader(file)]


def _case(line: dict[str, str]) -> Case:
    layers, heads, width, vocab, length, tp, pp, dp, rounds, batch = (
        int(line[key])
        for key in ("layers", "heads", "width", "vocab", "sequence", "tp", "pp", "dp", "interleaved", "batch")
    )
    micros = batch // dp // int(line["micro"])
    schedule = None if pp == 1 else "interleaved" if rounds > 1 else "1f1b"
    strategy = Strategy(dp, tp, pp, 1, 0, dp, schedule, micros if pp > 1 else None)
    devices = strategy.mesh.size
    on = Hardware(max(devices // NODE, 1), min(devices, NODE), DEVICES[line["hardware"]])
    config = GPTConfig(vocab=vocab, block=length, layers=layers, heads=heads, width=width)
    subject, rows = GPTPieces(config, element=HALF), batch // dp
    attention = 2.0 * length * length * width * layers  # the half that a mask would save, computed here
    scores = float(SCORES * heads * length * length * layers)
    forward, touched = subject.flops() + attention, subject.touched() + scores
    full, spread = line["recompute"] == "full", line["sequence_parallel"] == "yes"
    # Without sequence parallelism norms and residual sums are computed on every tensor rank.
    shared = subject.touched() * (1.0 if spread else 0.5 + 0.5 * tp) + scores
    again = 1.0 if full else (2 * attention) / forward
    hidden = rows * length * width * HALF
    costs, each = subject.costs(), layers // (rounds * pp)
    calls, held = (12 if full else 10) * layers // pp, subject.parameters() / (tp * pp)
    terms = [Traffic("tp", "all_gather", tp, micros * calls, round(hidden * calls), "hidden states")]
    if pp > 1:
        # Megatron-LM waits for each message, whose sender waits as well: no "send", which nobody waits for.
        size = round(4 * rounds * hidden / tp)
        terms.append(Traffic("pp", "exchange", 2, 2 * rounds * micros, size, "hidden states and their gradients"))
    if dp > 1:
        terms.append(Traffic("dp", "all_reduce", dp, 1, round(HALF * held), "gradients"))
    load = Load(
        flops=forward * rows / tp,
        touched=(shared if not spread else touched) * rows / tp,
        again=again,
        stages=[sum(costs[i * each : (i + 1) * each]) / sum(costs) for i in range(layers // each)],
        terms=terms,
        # fp16 weights and gradients, fp32 master weights and moments, read and written.
        updated=held * (2 * 12 + 2 + 2),
        # Without a pipeline these runs had torch's DDP; with one, gradients wait for the end of backward.
        units=Known(subject).units(strategy) if pp == 1 and dp > 1 else (),
        passes=micros if pp == 1 else 1,
    )
    kind = "full recompute" if full else "selective, sequence parallel"
    name = f"{line['parameters_b']} B, {devices} {line['hardware']}, {kind}"
    return Case(name, on, strategy, load, (3 + again) * forward * batch, float(line["seconds"]))
