"""Measure push and pull of 100 MB between the notebook and two ranks, with nbkit and an ipyparallel DirectView.

The receiver reads every element within the measured time, because memory that is only mapped has not arrived.
"""

from __future__ import annotations

from bench.rigs.kernel import Kernel
from bench.rigs.peers import start_nbkit, start_px, stop_nbkit, stop_px
from bench.settings import Settings, shuffled
from bench.table import Row, compared

RANKS = 2
ROUNDS = 15
BAR = 0.5  # of the DirectView's seconds: nbkit must be at least twice as fast
KINDS = {"numpy array": "numpy.random.rand(25_000_000).astype('float32')", "torch tensor": "torch.rand(25_000_000)"}
READ = "seen = float(big.sum())"
NBKIT = {
    "push": f"%push big\n_cluster.run({READ!r})",
    "pull": f"%pull big\n{READ}",
}
DIRECT_VIEW = {
    "push": f"px_view.push(dict(big=big), block=True)\npx_view.execute({READ!r}, block=True)",
    "pull": f"big = px_view.pull('big', targets=0, block=True)\n{READ}",
}
CHECK = "assert abs(float(big.sum()) - truth) < 1e-3 * truth and len(big) == 25_000_000"


def run(settings: Settings) -> list[Row]:
    """Return one row for each direction and kind of value."""
    rows = []
    with Kernel(settings.folder / "transfer-nbkit") as ours, Kernel(settings.folder / "transfer-px") as theirs:
        start_nbkit(ours, RANKS)
        ours.run("from nbkit.notebook.cluster.cluster import current\n_cluster = current()")
        start_px(theirs, RANKS)
        theirs.run("%%px\nimport numpy, torch\ntorch.set_num_threads(1)")
        sources = {"nbkit": (ours, NBKIT), "nbkit again": (ours, NBKIT), "DirectView": (theirs, DIRECT_VIEW)}
        for kind, made in KINDS.items():
            for kernel in (ours, theirs):
                kernel.run(f"import numpy, torch\ntorch.set_num_threads(1)\nbig = {made}\ntruth = float(big.sum())")
            seconds: dict[str, dict[str, list[float]]] = {way: {arm: [] for arm in sources} for way in NBKIT}
            for order in shuffled(list(sources), settings.count(ROUNDS)):
                for arm in order:
                    kernel, ways = sources[arm]
                    for way, source in ways.items():
                        seconds[way][arm].append(kernel.run(source).seconds)
            for kernel in (ours, theirs):
                kernel.run(CHECK)
            for way, of in seconds.items():
                what = f"{way} 100 MB {kind}, {RANKS} ranks"
                rows.append(compared(what, of["nbkit"], "DirectView", of["DirectView"], of["nbkit again"], BAR, "s"))
        stop_nbkit(ours)
        stop_px(theirs)
    return rows
