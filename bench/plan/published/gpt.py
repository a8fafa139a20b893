"""Steps of Megatron-LM's GPTs, as papers report them: gpt.csv.

These runs keep the scores of attention. nbkit's GPT does not.
"""

from __future__ import annotations

import csv
from pathlib import Path

from bench.plan.published.case import HALF, NODE, Case
from nbkit.planner.choose.load import DEVICES, Hardware, Known, Load
from nbkit.planner.gpt_config import GPTConfig
from nbkit.planner.peak import GPTPieces
from nbkit.planner.traffic import TrafficTerm
from nbkit.strategy import Strategy

SCORES = 10
"""Bytes that softmax, mask and dropout move for each score."""


def cases() -> list[Case]:
    """Return the cases of gpt.csv, in its order."""
    with Path(__file__).with_name("gpt.csv").open() as file:
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
    attention = 2.0 * length * length * width * layers  # these runs also compute the half that a causal mask could save
    scores = float(SCORES * heads * length * length * layers)
    forward, touched = subject.flops() + attention, subject.touched() + scores
    full, spread = line["recompute"] == "full", line["sequence_parallel"] == "yes"
    # Without sequence parallelism, every tensor rank computes all norms and residual sums.
    shared = subject.touched() * (1.0 if spread else 0.5 + 0.5 * tp) + scores
    again = 1.0 if full else (2 * attention) / forward
    hidden = rows * length * width * HALF
    costs, each = subject.costs(), layers // (rounds * pp)
    calls, held = (12 if full else 10) * layers // pp, subject.parameters() / (tp * pp)
    terms = [TrafficTerm("tp", "all_gather", tp, micros * calls, round(hidden * calls), "hidden states")]
    if pp > 1:
        # In Megatron-LM both sides wait for each message. So this is not a "send" term, which means that nobody waits.
        size = round(4 * rounds * hidden / tp)
        terms.append(TrafficTerm("pp", "exchange", 2, 2 * rounds * micros, size, "hidden states and their gradients"))
    if dp > 1:
        terms.append(TrafficTerm("dp", "all_reduce", dp, 1, round(HALF * held), "gradients"))
    load = Load(
        flops=forward * rows / tp,
        touched=(shared if not spread else touched) * rows / tp,
        again=again,
        touched_again=again,
        stages=[sum(costs[i * each : (i + 1) * each]) / sum(costs) for i in range(layers // each)],
        terms=terms,
        # fp32 master weights and moments, fp16 weights and gradients: all are read and written.
        updated=held * (2 * 12 + 2 + 2),
        # Without a pipeline, these runs used torch's DDP. With one, gradients are sent at the end of backward.
        units=Known(subject).units(strategy) if pp == 1 and dp > 1 else (),
        passes=micros if pp == 1 else 1,
    )
    kind = "full recompute" if full else "selective, sequence parallel"
    name = f"{line['parameters_b']} B, {devices} {line['hardware']}, {kind}"
    return Case(name, on, strategy, load, (3 + again) * forward * batch, float(line["seconds"]))
