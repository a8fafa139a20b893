"""IPython magics. Each parses its line, calls one function of nbkit and displays the result.

`%load_ext nbkit` loads them.
"""

from __future__ import annotations

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Register the magics with `shell`. A second call changes nothing."""
    from nbkit.notebook.cluster.cluster import observe_cells
    from nbkit.notebook.widgets import training_card

    from .board import BoardMagics
    from .cells import ALL_CELLS, CellMagics, rewrite
    from .cluster import ClusterMagics
    from .completion import complete
    from .dashboard import DashboardMagics
    from .debug import point_to_ranks
    from .nbkit import NbkitMagics
    from .strategy import StrategyMagics
    from .train import TrainMagics
    from .values import ValueMagics

    observe_cells(training_card.follow)
    point_to_ranks(shell)
    _say_who_is_replaced(shell)
    shell.register_magics(BoardMagics, CellMagics, ClusterMagics, DashboardMagics, StrategyMagics, TrainMagics)
    shell.register_magics(NbkitMagics, ValueMagics)
    if not hasattr(shell, ALL_CELLS):
        setattr(shell, ALL_CELLS, False)
    if rewrite not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(rewrite)
    if complete not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(complete)


def _say_who_is_replaced(shell: Any) -> None:
    for kind, name in (("cell", "distributed"), ("cell", "rank"), ("line", "distributed"), ("line", "cluster")):
        owner = shell.magics_manager.magics[kind].get(name)
        module = getattr(owner, "__module__", "")
        if owner is not None and not module.startswith(f"{__name__}."):
            sign = "%%" if kind == "cell" else "%"
            print(f"nbkit: {sign}{name} belonged to {module}; from now on it is nbkit's.")
