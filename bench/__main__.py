"""Measure nbkit and its peers and print the table.

python -m bench                    run everything: more than an hour; writes bench/results.json and .md
python -m bench cells startup      run these only; writes nothing without --out
python -m bench --join A.json ...  join the results of separate runs; writes bench/results, or --out
python -m bench --docs             copy the comparisons of bench/results.md into the manual's pages compared-*.md
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from bench import isolation, table
from bench.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
COMPARED = sorted((ROOT / "docs" / "evidence").glob("compared-*.md"))
GROUPS = {
    "notebook": (
        "loadext",
        "cells",
        "line",
        "stream",
        "startup",
        "transfer",
        "recovery",
        "click",
        "dashboard",
        "control_plane",
    ),
    "steps": ("training", "memory", "wire", "steps", "step_cpu", "owners", "experts"),
    "overlap": ("hidden_gather", "backup_step", "chunked_sums"),
    "pipeline": ("pipeline_stages", "balance"),
    "switch": ("switch", "switch_many", "switch_large", "switch_full", "predicted", "switch_bytes"),
    "telemetry": (
        "telemetry",
        "telemetry_truth",
        "telemetry_long",
        "long_run",
        "collective_overhead",
        "listening",
        "attached",
    ),
    "slow": ("slow_link", "slow_rank"),
    "": ("checkpoint_pause", "generate", "loading", "proof_seconds"),
}
"""Folder ("" is this one) -> its benchmarks. Each is a module: `run` measures, and its ranks hold a `Worker`."""
BY_NAME = ("switch_bytes",)
"""Run only when named. `switch_bytes` measures the exchange alone, without a model; `switch` measures it in a job."""
BENCHMARKS = tuple(name for names in GROUPS.values() for name in names if name not in BY_NAME)


def main(arguments: list[str]) -> int:
    """Run what `arguments` ask for and return the exit status.

    The status is 1 if a benchmark could not run. A missed bar does not change it; the table shows the bar.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join((*BENCHMARKS, *BY_NAME)))
    parser.add_argument("--quick", action="store_true", help="a few rounds of each: does it run, not what is it")
    parser.add_argument("--rounds", type=int, help="this many rounds of each")
    parser.add_argument("--ranks", type=int, nargs="+", help="only these of the cluster sizes of `cells`")
    parser.add_argument("--steps", type=int, help="of `long_run`: until so many steps are made, such as 1000000; hours")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md (a full run: bench/results)")
    parser.add_argument("--join", nargs="+", type=Path, metavar="A.json", help="write these into OUT; measure nothing")
    parser.add_argument("--docs", action="store_true", help="write the tables of the manual; measure nothing")
    asked = parser.parse_args(arguments)
    unknown = set(asked.names) - {*BENCHMARKS, *BY_NAME}
    if unknown:
        parser.error(
            f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join((*BENCHMARKS, *BY_NAME))}"
        )
    if asked.docs:
        for page in COMPARED:
            table.quote(page, RESULTS.with_suffix(".md").read_text())
        return 0
    if asked.join:
        table.write(*table.joined(asked.join), asked.out or RESULTS)
        return 0
    if isolation.is_inside():
        isolation.bring_up_loopback()
    elif (status := isolation.enter(arguments)) is not None:
        return status
    full = not (asked.names or asked.quick or asked.rounds or asked.ranks or asked.steps)
    return _measure(asked, asked.out or (RESULTS if full else None))


def _module(name: str) -> str:
    group = next(group for group, names in GROUPS.items() if name in names)
    return ".".join(filter(None, ("bench", group, name)))


def _measure(asked: argparse.Namespace, out: Path | None) -> int:
    # Peers that set no interface look up the address of the host's name. A private network has none.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = table.machine()
    rows: list[table.Row] = []
    failed = 0
    for name in asked.names or BENCHMARKS:
        began = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="nbkit-bench-", ignore_cleanup_errors=True) as folder:
            settings = Settings(
                folder=Path(folder),
                isolated=isolation.is_inside(),
                quick=asked.quick,
                rounds=asked.rounds,
                ranks=tuple(asked.ranks) if asked.ranks else None,
                steps=asked.steps,
            )
            try:
                rows += importlib.import_module(_module(name)).run(settings)
            except Exception as error:  # go on with the others; the table shows that this one failed
                failed += 1
                rows.append(table.skipped(name, "failed", f"{type(error).__name__}: {str(error).splitlines()[0]}"))
                traceback.print_exc()
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(table.markdown(rows, where))
    if out is not None:
        table.write(rows, where, out)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
