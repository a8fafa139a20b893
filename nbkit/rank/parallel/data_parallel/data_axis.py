"""The data axis of a strategy: what each rank holds of a module, and how its gradients are summed (ZeRO 0-3, hsdp).

After Rajbhandari et al. 2020. Bytes at rest per fp32 parameter under Adam over N ranks, and what leaves each rank per
step, for gradients (and parameters) of S bytes:

    zero   at rest     parameters, gradients, two moments      per step
    0      16          4       4       8                       2 (N - 1) / N S     all-reduce
    1      8 + 8/N     4       4       8/N                     2 (N - 1) / N S     reduce-scatter, all-gather
    2      4 + 12/N    4       4/N     8/N                     2 (N - 1) / N S     reduce-scatter, all-gather
    3      16/N        4/N     4/N     8/N                     3 (N - 1) / N S     all-gather twice, reduce-scatter

With several micro-batches, zero 1 and 2 reduce once, after the last, and hold whole gradients until then. Zero 3 sends
its bytes for each micro-batch, or once if it keeps the parameters gathered. Frozen parameters are never reduced, and
are gathered only under zero 3. Under zero 3 the root unit (what no unit holds) is gathered once, not twice. Under
autocast, parameters that only matrix products read are gathered in its dtype, half the bytes (zero3/unit.py). Gradients
are reduced in the dtype of the parameters. Keys of a strategy can change what zero 0
sends: nbkit/techniques/.
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
    """Give the skeleton `module` memory, and return its data axis. Local; sends nothing.

    layouts: canonical name -> what this rank's tensor parallelism and pipeline left of the global tensor. exchange,
    settings: of the strategy. adaptive: see Options. owners: for zero 1 and 2, name -> the place in the sharding group
    of the rank that updates the whole tensor. own: for zero 0 and 1, a user's class (nbkit/techniques/mine.py). For
    zero 3: units: the blocks that are gathered one at a time, in the order in which forward runs them; keep: gather
    once, in the first forward, and release in `finish` (pipelines, whose forwards precede their backwards); ahead: how
    many units are gathered before the backward pass comes to them;
    rooted: names of parameters in units that are gathered with the root, and stay as long; proven: a forward and a
    backward pass have worked with these units, so that the first need not be watched; casts: parameters that are
    gathered in the dtype of autocast where that is on.
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
    """Return `setup` as the torch half of a key changes it. Raises StrategyError if that gives something else."""
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
            f"The torch half of {name}={value} gave no ReplicaSetup.",
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
    """Return the data axis of a strategy under which every rank holds everything."""
    ranks, index, group, levels = axes.size("dp"), axes.index("dp"), axes.group("dp"), axes.levels("dp")
    setup = ReplicaSetup(ranks, index, group, levels, exchange.bucket, adaptive)
    for name, value in settings.items():
        if (engine := engine_of(key_of(name))) is not None:
            setup = _changed(setup, engine, name, value)
    if own is not None and ranks > 1:
        setup = own_replicas(own, setup)
    return replicated(module, layouts, setup)


def replicated(module: nn.Module, layouts: Mapping[str, Layout], setup: ReplicaSetup) -> Replicas:
    """Return a data axis under which every rank of `setup` holds all parameters of `module`, in these `layouts`."""
    for name, places in homes(module).items():
        param = getattr(*places[0])
        if is_placeholder(param):  # else the module is the user's own, and trains as it is
            memory = emptied(torch.empty(layouts[name].local, dtype=param.dtype, device=param.device))
            replace_submodule(places, parameter_like(memory, param))
    found = setup.build(module)
    found.lay_out(layouts)
    return found
