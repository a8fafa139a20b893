"""Test that clipping, flat copies and the optimizer launch no more kernels on a device than torch does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbkit.mesh import Mesh
from nbkit.rank.comm.gloo import collectives
from nbkit.rank.parallel.data_parallel.data_axis import data_axis
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.grad_norm import clip, grad_norm
from nbkit.rank.parallel.module.copies import skeleton_of
from nbkit.rank.watching_mode import WatchingMode
from nbkit.tensor_layout import Layout

_NO_KERNEL = {"detach", "empty", "empty_like", "new_empty", "resize_", "set_", "_local_scalar_dense", "is_same_size",
              "_unsafe_view", "lift_fresh", "new_empty_strided", "empty_strided", "wait_tensor",
              "_record_function_enter_new", "_record_function_exit"}  # fmt: skip
_FEW = 5  # layers per block for FSDP2: torch plans long for many DTensors, and the extra kernels are as many
_SENT = ("c10d", "_c10d_functional")


class Kernels(WatchingMode):
    """A mode that counts the kernels of a device, by operation. A fast _foreach operation counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, name = func._schema, func._schema.name.partition("::")[2]
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not views and name not in _NO_KERNEL and func.namespace not in _SENT:
            self.seen[name] += _launches(args) if name.startswith("_foreach") else 1
        return func(*args, **(kwargs or {}))


def _launches(args: tuple[Any, ...]) -> int:
    """Return the number of launches of a _foreach operation. torch processes tensors one by one if their dtypes, sizes
    or strides differ, if memory is not dense, or if a factor has another dtype."""
    lists = [[_local(t) for t in one] for one in args if isinstance(one, list | tuple) and isinstance(one[0], Tensor)]
    first = lists[0]
    factors = [_local(arg) for arg in args if isinstance(arg, Tensor)]
    fast = all(factor.dtype == first[0].dtype for factor in factors)
    for at, tensor in enumerate(first):
        for one in lists:
            t = one[at]
            alike = t.dtype == first[0].dtype and t.shape == tensor.shape and t.stride() == tensor.stride()
            dense = t.permute(sorted(range(t.ndim), key=t.stride, reverse=True)).is_contiguous()
            fast = fast and alike and dense
    return 1 if fast else len(first)


def _local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)  # type: ignore[no-any-return]


def blocks(layers: int = 10) -> nn.Module:
    """Return ten blocks of `layers` layers. Ten layers each make 200 parameters."""
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))) for _ in range(10)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=True)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


X, Y = torch.ones(4, 4), torch.zeros(4, 4)


def counted(run: Callable[[], Any]) -> Counter[str]:
    with Kernels() as kernels:
        run()
    return kernels.seen


def by_torch(model: nn.Module) -> Counter[str]:
    """Count the kernels of the second step in plain torch."""
    optimizer = adamw(model)

    def step() -> None:
        loss(model(X), Y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return counted(step)


def by_nbkit(zero: int, rank: int) -> Counter[str]:
    """Count the kernels of the second step in nbkit."""
    whole, module = blocks(), skeleton_of(blocks())
    layouts = {name: Layout.whole(p.shape) for name, p in whole.named_parameters()}
    axis = data_axis(module, layouts, Axes.of(Mesh(dp=2), rank), zero=zero, units=list(module))
    for tensor, _ in axis.weights.values():
        tensor.fill_(0.1)
    axis.refresh()
    optimizer = torch.optim.AdamW(axis.held.values(), foreach=True)

    def step() -> None:
        axis.reset()
        with axis.computing():
            value = loss(module(X), Y)
            axis.start()
            value.backward()
            axis.finish()
        clip(axis.held, 1.0, grad_norm(axis.held, {}, device=X.device))
        optimizer.step()
        optimizer.zero_grad()
        axis.after_step()

    step()
    return counted(step)


def found(world: Any) -> dict[str, Counter[str]]:
    """Return the kernels of a step without those of forward and backward."""
    from torch.distributed.fsdp import fully_shard  # an import at the top would cost each worker a second

    collectives._INSTEAD.clear()  # use gloo's own operations, which are not counted here, like NCCL's
    plain, few = (counted(lambda model=model: loss(model(X), Y).backward()) for model in (blocks(), blocks(_FEW)))
    found = {f"zero {zero}": by_nbkit(zero, world.place.rank) - plain for zero in (0, 1, 3)}
    found["DDP"] = by_torch(DistributedDataParallel(blocks())) - plain
    sharded = blocks(_FEW)
    for block in sharded:
        fully_shard(block)
    return found | {"FSDP2": by_torch(fully_shard(sharded)) - few}


@pytest.fixture(scope="module")
def kernels() -> dict[str, int]:
    return {name: sum(seen.values()) for name, seen in run_ranks(found, 2, timeout=150)[0].items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("ours", "theirs"), [("zero 0", "DDP"), ("zero 1", "DDP"), ("zero 1", "FSDP2"), ("zero 3", "FSDP2")]
)
def test_a_step_of_hundreds_of_parameters_needs_no_more_kernels_than_torch(
    kernels: dict[str, int], ours: str, theirs: str
) -> None:
    assert kernels[ours] <= 1.1 * kernels[theirs]
