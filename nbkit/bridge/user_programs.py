"""Adapts a rank to programs that start processes of their own.

- `run_launched_in_place`: launchers run their function on the existing ranks instead of starting processes. Every rank
  of a cell calls the launcher, so every rank runs the function once, as under torchrun. This holds for
  `accelerate.notebook_launcher` and `debug_launcher`, torch's `elastic_launch`, and Lightning's strategies
  ddp_notebook, ddp_fork and ddp_spawn. Asking for another number of processes than there are ranks is an error:
  processes beside the ranks would share their devices.
- `as_first_program`: a script finds nothing in Accelerate that an earlier one has left.
- `hide_the_world`: processes that a cell starts, by multiprocessing or as shell commands, do not see the rank's world.
- `warn_of_cells`: explains why a spawned process does not find names from a cell.

Modules of libraries are changed at the moment when a program imports them. A rank imports none of them itself.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction, util
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import ipykernel.zmqshell
import IPython.core.interactiveshell

from nbkit.errors import UsageError
from nbkit.rank.device import accelerator
from nbkit.rank.world import world
from nbkit.wire.import_changes import Change, change_when_imported

LIGHTNING = (
    *(f"{package}.strategies.launchers.multiprocessing" for package in ("lightning.pytorch", "lightning.fabric")),
    *(f"{package}.strategies.launchers.multiprocessing" for package in ("pytorch_lightning", "lightning_fabric")),
)

_ACCELERATE_STATES = ("PartialState", "AcceleratorState", "GradientState")


def run_launched_in_place() -> None:
    """Make launchers run their function in place, from now on, in this process."""
    changes: dict[str, Change] = {
        "torch.distributed.launcher.api": _change_elastic_launch,
        "torch.multiprocessing": _change_start_processes,
    }
    change_when_imported(changes | dict.fromkeys(LIGHTNING, _change_lightning))


def _change_elastic_launch(module: ModuleType) -> None:
    """Change torch's `elastic_launch`, which `notebook_launcher` of Accelerate calls too."""
    plain = module.elastic_launch.__call__

    def __call__(self: Any, *args: Any) -> Any:
        """Run the function in place. Returns {rank: its return value} like torch's, for this rank only."""
        config, function = self._config, self._entrypoint
        if not callable(function):  # a command runs in its own process
            return plain(self, *args)
        least, most = (nodes * config.nproc_per_node for nodes in (config.min_nodes, config.max_nodes))
        here = _world_of(least, most, "num_processes={ranks}")
        with _as_launched(here):
            return {here.place.rank: function(*args)}

    module.elastic_launch.__call__ = __call__


def _change_start_processes(module: Any) -> None:
    """Change torch's `start_processes`, only for calls from Accelerate.

    These are `debug_launcher`, and the trial run of ACCELERATE_DEBUG_MODE.
    """
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
        """Run the function in place, like Lightning's launcher does when torchrun has started the processes."""
        if "fabric" not in module.__name__:
            kwargs.pop("trainer", None)  # only for the launcher; Fabric's launcher passes on all arguments
        number = self._strategy.num_processes * self._strategy.num_nodes
        _world_of(number, number, "devices={local}, num_nodes={hosts}")
        return function(*args, **kwargs)

    module._MultiProcessingLauncher.launch = launch


def _world_of(least: int, most: int, fits: str) -> world.World:
    """Return the world. Raises UsageError unless it has between `least` and `most` ranks.

    fits: the arguments to suggest in the hint, with {ranks}, {local} and {hosts}.
    """
    here = world.current()
    if here is None:
        raise UsageError("This rank has no world.", hint="%cluster restart")
    place = here.place
    if not least <= place.world_size <= most:
        ranks = place.world_size
        local = place.local_world_size
        if place.device != "cpu":
            local = min(local, accelerator().count())  # a rank that shares a GPU, or has a MIG instance, sees one
        raise UsageError(
            "A launcher in a cell runs its function on the ranks that are there.",
            numbers=f"{most} process{'es' * (most != 1)} asked for, {ranks} rank{'s' * (ranks != 1)} there",
            hint=fits.format(ranks=ranks, local=local, hosts=ranks // local),
        )
    return here


@contextmanager
def _as_launched(here: world.World) -> Iterator[None]:
    """Set this rank's environment inside, since launchers change it for the processes that they start."""
    outer = {name: os.environ.get(name) for name in here.environment}
    # There are no states before the function itself imports Accelerate.
    states = [dict(kind._shared_state) for kind in _accelerate_states()] or [{} for _ in _ACCELERATE_STATES]
    os.environ.update(here.environment)
    try:
        yield
    finally:
        for name, value in outer.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # `notebook_launcher` refuses to run again while an Accelerator exists. Normally it ends with its process.
        for kind, before in zip(_accelerate_states(), states, strict=False):
            kind._shared_state.clear()
            kind._shared_state.update(before)


@contextmanager
def as_first_program() -> Iterator[None]:
    """Let a script find no state and no variable of Accelerate that an earlier script has left, as in a new process.

    A script that trains in bf16 would make the next one train in bf16 too. What the script itself leaves stays in its
    objects, so that later cells can use them.
    """
    for kind in _accelerate_states():
        kind._shared_state = type(kind._shared_state)()  # each object keeps the dict that it was made with
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]
        os.environ.update(before)


def _accelerate_states() -> list[Any]:
    module = sys.modules.get("accelerate.state")
    return [getattr(module, name) for name in _ACCELERATE_STATES] if module else []


_SAID = (
    "a spawned process imports what it runs, and cannot import what a cell has defined. Put it into a .py file and "
    'import it; or fork: multiprocessing_context="fork" of a DataLoader, mp.get_context("fork")'
)


_OF_THE_WORLD = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def hide_the_world() -> None:
    """Hide this rank's world from processes that are started from now on, since they are not ranks of it.

    They are started by multiprocessing, or as shell commands of a cell.

    A program starts its own world with `mp.spawn`. If its processes found the last variable of `_OF_THE_WORLD`, they
    would all join a store that nobody serves. RANK and WORLD_SIZE stay: workers of a DataLoader read them.
    """
    os.register_at_fork(after_in_child=_leave_the_world)
    for module in (ipykernel.zmqshell, IPython.core.interactiveshell):  # used by `!`, `!!` and `%sx`
        for name in ("system", "getoutput", "get_output_error_code"):
            if hasattr(module, name):
                setattr(module, name, _outside_the_world(getattr(module, name)))
    change_when_imported({"IPython.core.magics.script": _change_scripts})
    plain: Any = getattr(util, "spawnv_passfds", None)
    if plain is None:  # another Python starts them in another way: they see the rank's variables
        return

    def spawnv_passfds(*args: Any) -> Any:
        held = {name: os.environ.pop(name) for name in _OF_THE_WORLD if name in os.environ}
        try:
            return plain(*args)
        finally:
            os.environ.update(held)

    util.spawnv_passfds = spawnv_passfds  # type: ignore[assignment]


def _change_scripts(module: Any) -> None:
    """Change `%%bash` and similar magics."""
    module.ScriptMagics.shebang = _outside_the_world(module.ScriptMagics.shebang)


def _outside_the_world(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, which starts a program, without the variables of this rank's world, as in a notebook's `!`."""

    @functools.wraps(run)
    def outside(*args: Any, **options: Any) -> Any:
        with _without_variables():
            return run(*args, **options)

    return outside


@contextmanager
def _without_variables() -> Iterator[None]:
    here = world.current()
    known = {} if here is None else here.variables
    held = {name: value for name, value in known.items() if os.environ.get(name) == value}  # not those the user set
    for name in held:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(held)


def _leave_the_world() -> None:
    for name in _OF_THE_WORLD:
        os.environ.pop(name, None)


def warn_of_cells() -> None:
    """Print an explanation, from now on, when a process is spawned that would need something defined in a cell."""
    plain = reduction.dump

    def dump(item: Any, file: io.BytesIO, protocol: int | None = None) -> None:
        begun = file.tell() if isinstance(file, io.BytesIO) else 0
        plain(item, file, protocol)
        # A script under %run has a file, from which the process can import it.
        if isinstance(item, BaseProcess) and isinstance(file, io.BytesIO) and not hasattr(_main(), "__file__"):
            if b"__main__" in file.getvalue()[begun:]:
                print(f"nbkit: {_SAID}", file=sys.stderr)  # in every cell; a warning would be shown only once

    reduction.dump = dump  # type: ignore[assignment]


def _main() -> Any:
    return sys.modules["__main__"]
