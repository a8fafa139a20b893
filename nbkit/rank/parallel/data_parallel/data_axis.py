"""The data axis of a strategy: which parts of a module each rank holds, and how gradients are summed (ZeRO 0-3, hsdp).

See Rajbhandari et al. 2020. The table shows the bytes at rest per fp32 parameter with Adam over N ranks, and the bytes
that each rank sends per step, where the gradients (and the parameters) have S bytes:

    zero   at rest     parameters, gradients, two moments      per step
    0      16          4       4       8                       2 (N - 1) / N S     all-reduce
    1      8 + 8/N     4       4       8/N                     2 (N - 1) / N S     reduce-scatter, all-gather
    2      4 + 12/N    4       4/N     8/N                     2 (N - 1) / N S     reduce-scatter, all-gather
    3      16/N        4/N     4/N     8/N                     3 (N - 1) / N S     all-gather twice, reduce-scatter

With several micro-batches, ZeRO 1 and 2 reduce once, after the last one, and hold whole gradients until then. ZeRO 3
sends its bytes for each micro-batch, or once if it keeps the parameters gathered. Frozen parameters are never reduced,
and are gathered only by ZeRO 3. The root unit of ZeRO 3 (the parameters outside all units) is gathered once, not twice.
Under autocast, ZeRO 3 gathers parameters that only matrix products read in the dtype of autocast, with half the bytes
(zero3/unit.py). ZeRO 1 and 2 gather all parameters in their own dtype (zero1_2.py says why). Gradients are reduced in
the dtype of the parameters. Keys of a strategy can change what ZeRO 0 sends: nbkit/techniques/.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nbkit.errors import StrategyError
from nbkit.plugins import described
from nbkit.rank.parallel.data_parallel.base import DataAxis
from nbkit.rank.parallel.data_parallel.buckets import Links
from nbkit.rank.parallel.data_parallel.ddp import Replicas, ReplicaSetup
from nbkit.rank.parallel.data_parallel.zero1_2 import ShardedOptimizer
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.mine import OwnShards, own_replicas
from nbkit.rank.parallel.module.copies import homes, is_placeholder, parameter_like, replace_submodule
from nbkit.rank.parallel.reshard.redistribute import emptied
from nbkit.rank.parallel.zero3.unit import Casts
from nbkit.rank.parallel.zero3.zero3 import ShardedParameters
from nbkit.techniques import GradientExchange, Settings, engine_of, key_of
from nbkit.tensor_layout import Layout

_PLAIN, _NONE = GradientExchange(), Settings()
_NOBODY: Mapping[str, int] = {}


def data_axis(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    axes: Axes,
    *,
    zero: int,
    exchange: GradientExchange = _PLAIN,
    settings: Mapping[str, Any] = _NONE,
    units: Sequence[nn.Module] = (),
    keep: bool = False,
    ahead: int = 1,
    rooted: Collection[str] = (),
    proven: bool = False,
    casts: Casts | None = None,
    adaptive: bool = False,
    owners: Mapping[str, int] = _NOBODY,
    own: type | None = None,
) -> DataAxis:
    """Allocate the memory of the skeleton `module`, and return its data axis. Sends nothing.

    layouts: canonical name -> the part of the global tensor that tensor parallelism and the pipeline leave to this
    rank. exchange, settings: of the strategy. adaptive: see JobOptions. own: for ZeRO 0 and 1, a user's class
    (nbkit/techniques/mine.py). owners: for ZeRO 1 and 2, name -> position in the sharding group of the rank that
    updates the whole tensor.

    For ZeRO 3: units: the blocks that are gathered one at a time, in forward order. keep: gather once, in the first
    forward, and free in `finish` (for pipelines, whose forwards precede their backwards). ahead: number of units that
    are gathered before backward reaches them. rooted: names of parameters in units that are gathered with the root, and
    stay as long. proven: forward and backward have worked with these units, so the first pass need not be watched.
    casts: parameters that are gathered in the dtype of autocast, if it is on.
    """
    if zero == 0 or axes.size("shard") == 1:
        return _replicated(module, layouts, axes, exchange, settings, adaptive, own)
    if zero < 3:
        make: Callable[..., DataAxis] = ShardedOptimizer if own is None else partial(OwnShards, own=own)
        return make(module, layouts, Links.of(axes), zero=zero, bucket=exchange.bucket, owners=owners)
    links = Links.of(axes)
    return ShardedParameters(
        module, layouts, links, units=units, keep=keep, ahead=ahead, rooted=rooted, proven=proven, casts=casts
    )


def _changed(setup: ReplicaSetup, engine: Callable[..., Any], name: str, value: Any) -> ReplicaSetup:
    """Return `setup` as changed by the torch half of a key. Raises StrategyError if that returns something else."""
    try:
        found = engine(value, setup)
    except Exception as error:
        raise StrategyError(
            f"The torch half of {name}={value} raised an error.",
            numbers=described(error),
            hint="def apply(value, setup): return setup   (changed by dataclasses.replace)",
        ) from error
    if not isinstance(found, ReplicaSetup):
        raise StrategyError(
            f"The torch half of {name}={value} did not return a ReplicaSetup.",
            numbers=f"it gave {found!r}",
            hint="return setup   (changed by dataclasses.replace) in the torch half",
        )
    return found


def _replicated(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    axes: Axes,
    exchange: GradientExchange,
    settings: Mapping[str, Any],
    adaptive: bool,
    own: type | None,
) -> Replicas:
    """Return the data axis of a strategy under which every rank holds all parameters."""
    ranks, index, group, levels = axes.size("dp"), axes.index("dp"), axes.group("dp"), axes.levels("dp")
    setup = ReplicaSetup(ranks, index, group, levels, exchange.bucket, adaptive)
    for name, value in settings.items():
        if (engine := engine_of(key_of(name))) is not None:
            setup = _changed(setup, engine, name, value)
    if own is not None and ranks > 1:
        setup = own_replicas(own, setup)
    return replicated(module, layouts, setup)


def replicated(module: nn.Module, layouts: Mapping[str, Layout], setup: ReplicaSetup) -> Replicas:
    """Return a data axis under which every rank of `setup` holds all parameters of `module`, with these `layouts`."""
    for name, places in homes(module).items():
        param = getattr(*places[0])
        if is_placeholder(param):  # otherwise it is the user's own module, which trains as it is
            memory = emptied(torch.empty(layouts[name].local, dtype=param.dtype, device=param.device))
            replace_submodule(places, parameter_like(memory, param))
    found = setup.build(module)
    found.lay_out(layouts)
    return found
