"""Test nbkit on this machine: strategies, switches, errors, speed. Write a report."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nbkit.errors import UsageError
from nbkit.notebook.cluster import site_settings
from nbkit.notebook.cluster.hosts.start_options import add_place_options, requested, with_kept_options
from nbkit.notebook.cluster.launch.pins import pins_within
from nbkit.notebook.cluster.machine.machine import read_machine
from nbkit.notebook.json_text import add_json_option, json_text
from nbkit.notebook.selftest import Item, ItemOutcome, SelftestReport, Trial, items

CPU_RANKS = 4


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", type=int, metavar="N", help="number of ranks; default: one per idle GPU, or four on the CPU"
    )
    parser.set_defaults(gpus=None, spares=0, detach=False, requeue=False, save_before=None, rest=())
    add_place_options(parser)
    names = ", ".join(item.name for item in items(CPU_RANKS))
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help=f"test only this item; repeat the option for more items: {names}",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("nbkit-selftest.md"),
        metavar="FILE",
        help="where to write the report (%(default)s)",
    )
    add_json_option(parser)
    parser.epilog = (
        "The test takes about three minutes on the CPU, and fifteen on GPUs. The exit status is 1 if an item fails. "
        "The report has the results, the versions, and the output of nbkit doctor. "
        "Of the environment, it has only variables of torch, NCCL and CUDA."
    )


def run(arguments: argparse.Namespace) -> int:
    with_kept_options(arguments)
    on, n, cpu = requested(arguments), arguments.n, arguments.cpu
    if on is None:
        pins = pins_within(site_settings.read(), read_machine(), n, cpu=cpu).pins
        n = n or (len(pins) if pins[0].kind == "gpu" else CPU_RANKS)
    chosen = _chosen(items(n if on is None else on.num_ranks), arguments.only)
    say = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    # A closed terminal or a `kill` ends it like Ctrl-C, with everything that it started. SIGINT is in the list because
    # a shell that starts it in the background ignores it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    began, devices, ranks = time.monotonic(), "no rank has started", "no rank"
    outcomes: list[ItemOutcome] = []
    try:
        # Hosts that share files share the folder of the report rather than /tmp.
        folder = None if on is None else arguments.output.absolute().parent
        with Trial(n, cpu=cpu, on=on, folder=folder) as trial:
            ranks = trial.ranks
            say(f"{len(chosen)} items on {ranks}; the report: {arguments.output}\n")
            devices = trial.devices()
            for item in chosen:
                say(f"  {item.name:<16}", end="")
                outcomes.append(trial.outcome(item))
                say(outcomes[-1].line)
    except KeyboardInterrupt:
        say("\nStopped. Nothing is left running.")
        raise
    finally:
        report = SelftestReport(ranks, devices, tuple(outcomes), time.monotonic() - began)
        report.write(arguments.output)
    if arguments.json:
        print(json_text(report))
    say(f"\n{report.verdict}")
    say("".join(f"  {one.name}: {one.said}\n" for one in report.failed) + f"  the report   {arguments.output}")
    return 1 if report.failed else 0


def _chosen(every: Sequence[Item], only: Sequence[str] | None) -> list[Item]:
    names = [item.name for item in every]
    if unknown := set(only or ()) - set(names):
        raise UsageError(
            f"There is no item {min(unknown)!r} in the selftest.", numbers=", ".join(names), hint=f"--only {names[0]}"
        )
    return [item for item in every if not only or item.name in only]
