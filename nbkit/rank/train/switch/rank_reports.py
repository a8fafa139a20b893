"""What ranks tell each other before a switch, in few bytes: what none of them can know of the others.

Who holds which part follows from the strategies (see Outlines), so it is not told. What an optimizer keeps of a
parameter, and what the user has changed on the model, only who holds it knows. Most of it is alike for all parameters:
it is told once for each run of them.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nbkit.rank.parallel.sharded_model import Side
from nbkit.rank.train.checkpoint import job_state

__all__ = ["USUAL_BYTES", "Memory", "Run", "memory_of", "told", "unpacked"]


USUAL_BYTES, _COUNT = 1016, 8


class _Scalar(NamedTuple):
    value: Any
    dtype: torch.dtype


class Run(NamedTuple):
    """Neighbouring parameters of which an optimizer keeps the same. kinds: of what it keeps per element."""

    first: int
    length: int
    kinds: dict[str, torch.dtype]
    numbers: dict[str, Any]


class Memory(NamedTuple):
    """What an optimizer remembers beside the elements. kinds: name -> {key: dtype}; numbers: see holdings.scalars."""

    kinds: dict[str, dict[str, torch.dtype]]
    numbers: dict[str, dict[str, Any]]


def told(own: Any, *, world_size: int, device: torch.device) -> list[Any]:
    """What every rank tells, by rank. Collective: one all-gather, and another where somebody tells more than usual."""
    if world_size == 1:
        return [own]
    parcel = zlib.compress(pickle.dumps(own), level=1)
    found = _gathered(parcel, USUAL_BYTES, world_size, device)
    longest = max(int.from_bytes(each[:_COUNT], "little") for each in found)
    if longest > USUAL_BYTES:
        found = _gathered(parcel, longest, world_size, device)
    # What follows the end of a stream is padding.
    return [pickle.loads(zlib.decompressobj().decompress(each[_COUNT:])) for each in found]


def _gathered(parcel: bytes, room: int, world_size: int, device: torch.device) -> list[bytes]:
    """Of every rank the number of bytes that it has to tell, and as many of them as there is room for."""
    framed = len(parcel).to_bytes(_COUNT, "little") + parcel[:room].ljust(room, b"\0")
    sent = torch.frombuffer(bytearray(framed), dtype=torch.uint8).to(device)
    taken = [torch.empty_like(sent) for _ in range(world_size)]
    dist.all_gather(taken, sent)
    return [bytes(each.cpu().numpy()) for each in taken]


def memory_of(side: Side, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> list[Run]:
    """What `optimizer` remembers of the parameters here. names: of the whole model's, the same on every rank."""
    kinds: dict[str, dict[str, torch.dtype]] = {}
    for key, (tensor, _) in job_state.per_element(side, optimizer).items():
        kind, _, name = key.partition("/")
        kinds.setdefault(name, {})[kind] = tensor.dtype
    numbers = job_state.scalars(side, optimizer)
    runs: list[Run] = []
    for place, name in enumerate(names):
        if name not in numbers:
            continue
        run = Run(place, 1, kinds.get(name, {}), _packed(numbers[name]))
        last = runs[-1] if runs else None
        if last is not None and last.first + last.length == place and _alike(last, run):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(run)
    return runs


def unpacked(everyone: Sequence[Sequence[Run]], names: Sequence[str]) -> Memory:
    """What the optimizers of all ranks remember, together."""
    memory = Memory({}, {})
    for run in (run for runs in everyone for run in runs):
        numbers = {
            key: torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Scalar) else value
            for key, value in run.numbers.items()
        }
        for name in names[run.first : run.first + run.length]:
            if run.kinds:
                memory.kinds.setdefault(name, {}).update(run.kinds)
            memory.numbers.setdefault(name, {}).update(numbers)
    return memory


def _packed(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """With tensors of no dim as plain values: a pickled one is half a kilobyte."""
    return {
        key: _Scalar(value.item(), value.dtype) if isinstance(value, Tensor) and value.ndim == 0 else value
        for key, value in numbers.items()
    }


def _alike(one: Run, other: Run) -> bool:
    if one.kinds != other.kinds or one.numbers.keys() != other.numbers.keys():
        return False
    # Plain ones alone: whatever else there is belongs to one parameter.
    return all(isinstance(a, int | float | _Scalar) and a == other.numbers[key] for key, a in one.numbers.items())
