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
from nbkit.notebook.cluster.launch.pins import pins_within
from nbkit.notebook.cluster.machine.machine import read_machine
from nbkit.notebook.json_text import add_json_option, json_text
from nbkit.notebook.selftest import Item, ItemOutcome, SelftestReport, Trial, items

CPU_RANKS = 4


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, metavar="N", help="ranks; default: the idle GPUs, else four on the CPU")
    parser.add_argument("--cpu", action="store_true", help="use CPU ranks, even if there are GPUs")
    names = ", ".join(item.name for item in items(CPU_RANKS))
    parser.add_argument(
        "--only", action="append", metavar="NAME", help=f"test only this item; may be repeated: {names}"
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
        "It takes about two minutes on the CPU, ten on GPUs. The exit status is 1 if an item fails. The report has the "
        "results, versions, the output of nbkit doctor, and only environment variables of torch, NCCL and CUDA."
    )


def run(arguments: argparse.Namespace) -> int:
    pins = pins_within(site_settings.read(), read_machine(), arguments.n, cpu=arguments.cpu).pins
    kind = pins[0].kind
    n = arguments.n or (len(pins) if kind == "gpu" else CPU_RANKS)
    chosen = _chosen(items(n), arguments.only)
    on = f"{n} {kind.upper()} rank{'s' * (n > 1)}"
    say = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    say(f"{len(chosen)} items on {on}; the report: {arguments.output}\n")
    # A closed terminal or a `kill` ends it like Ctrl-C, with everything that it started. SIGINT is in the list because
    # a shell that starts it in the background ignores it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    began, devices = time.monotonic(), "no rank has started"
    outcomes: list[ItemOutcome] = []
    try:
        with Trial(n, kind=kind) as trial:
            devices = trial.devices()
            for item in chosen:
                say(f"  {item.name:<16}", end="")
                outcomes.append(trial.outcome(item))
                say(outcomes[-1].line)
    except KeyboardInterrupt:
        say("\nStopped. Nothing is left running.")
        raise
    finally:
        report = SelftestReport(on, devices, tuple(outcomes), time.monotonic() - began)
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
