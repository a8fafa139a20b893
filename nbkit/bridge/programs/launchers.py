"""Launchers that a program calls run its function on the ranks that are there, instead of starting processes.

Every rank of a cell calls the launcher, so every rank runs the function once, in place, as under torchrun. This holds
for `accelerate.notebook_launcher` and `debug_launcher`, torch's `elastic_launch`, and Lightning's strategies
ddp_notebook, ddp_fork and ddp_spawn. A number of processes that is not that of the ranks is an error: processes beside
the ranks would share their devices.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from nbkit.bridge.programs.when_imported import Change, change_when_imported
from nbkit.errors import UsageError
from nbkit.rank.world import world

LIGHTNING = (
    *(f"{package}.strategies.launchers.multiprocessing" for package in ("lightning.pytorch", "lightning.fabric")),
    *(f"{package}.strategies.launchers.multiprocessing" for package in ("pytorch_lightning", "lightning_fabric")),
)

_ACCELERATE_STATES = ("PartialState", "AcceleratorState", "GradientState")


def run_launched_in_place() -> None:
    """From now on, in this process."""
    changes: dict[str, Change] = {
        "torch.distributed.launcher.api": _change_elastic_launch,
        "torch.multiprocessing": _change_start_processes,
    }
    change_when_imported(changes | dict.fromkeys(LIGHTNING, _change_lightning))


def _change_elastic_launch(module: ModuleType) -> None:
    """Of torch, which `notebook_launcher` of Accelerate calls too."""
    plain = module.elastic_launch.__call__

    def __call__(self: Any, *args: Any) -> Any:
        """As torch's, in place: {rank: what the function returned}, of this rank alone."""
        config, function = self._config, self._entrypoint
        if not callable(function):  # a command is a process of its own
            return plain(self, *args)
        least, most = (nodes * config.nproc_per_node for nodes in (config.min_nodes, config.max_nodes))
        here = _world_of(least, most, "num_processes={ranks}")
        with _as_launched(here):
            return {here.place.rank: function(*args)}

    module.elastic_launch.__call__ = __call__


def _change_start_processes(module: Any) -> None:
    """Of torch; only where Accelerate calls it: `debug_launcher`, and the trial that ACCELERATE_DEBUG_MODE asks for."""
    plain = module.start_processes

    @functools.wraps(plain)
    def start_processes(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, *more: Any, **options: Any) -> Any:
        if f"{type(fn).__module__}.{type(fn).__name__}" != "accelerate.utils.launch.PrepareForLaunch":
            return plain(fn, args, nprocs, *more, **options)
        with _as_launched(_world_of(nprocs, nprocs, "num_processes={ranks}")):
            fn.launcher(*args)

    module.start_processes = start_processes


def _change_lightning(module: ModuleType) -> None:
    def launch(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's launcher does where torchrun has started the processes."""
        if "fabric" not in module.__name__:
            kwargs.pop("trainer", None)  # is for the launcher; Fabric's hands on all that it gets
        number = self._strategy.num_processes * self._strategy.num_nodes
        _world_of(number, number, "devices={local}, num_nodes={hosts}")
        return function(*args, **kwargs)

    module._MultiProcessingLauncher.launch = launch


def _world_of(least: int, most: int, fits: str) -> world.World:
    """The world, which must have between `least` and `most` ranks. fits: what to write, with {ranks} and the like."""
    here = world.current()
    if here is None:
        raise UsageError("This rank has no world.", hint="%cluster restart")
    place = here.place
    if not least <= place.world_size <= most:
        ranks = place.world_size
        local = 1 if place.device != "cpu" else place.local_world_size  # each rank sees its own GPU alone
        raise UsageError(
            "A launcher in a cell runs its function on the ranks that are there.",
            numbers=f"{most} process{'es' * (most != 1)} asked for, {ranks} rank{'s' * (ranks != 1)} there",
            hint=fits.format(ranks=ranks, local=local, hosts=ranks // local),
        )
    return here


@contextmanager
def _as_launched(here: world.World) -> Iterator[None]:
    """With this rank's environment, which launchers change for the processes that they start."""
    outer = {name: os.environ.get(name) for name in here.environment}
    # None is there before the function itself imports Accelerate.
    states = [dict(state) for state in _accelerate_states()] or [{} for _ in _ACCELERATE_STATES]
    os.environ.update(here.environment)
    try:
        yield
    finally:
        for name, value in outer.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # `notebook_launcher` refuses to run again where an Accelerator is left, which ends with a process otherwise.
        for state, before in zip(_accelerate_states(), states, strict=False):
            state.clear()
            state.update(before)


def _accelerate_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    return [getattr(module, name)._shared_state for name in _ACCELERATE_STATES] if module else []
