"""What a survivor holds already: its new sharded model takes that memory over, and nothing of it is copied.

Where a rank was replaced most tensors of the others stay what they are: all under ddp, each rank's part of a layer
under tp. A second sharded model beside the first would take its memory, and a copy of all of it. So it is built hollow
(see resizable_storage.py), and its tensors are pointed at the old ones. A memory that several tensors share, such as
the flat parts of zero 3, is filled by a copy.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from nbkit.rank.parallel.reshard.resizable_storage import Filling, Spaces
from nbkit.rank.train.checkpoint.job_state import JobState


def with_memory(hollow: JobState, tensors: Iterable[Tensor], spaces: Spaces, held: JobState) -> JobState:
    """`hollow`, with memory: of `held` where both are the same part, else new and unfilled.

    tensors: every further tensor over the same memory. held: of this rank, of the step at which all go on; what is
    taken over is in the result as the very tensors of `held`, which an exchange has nothing to copy to. Raises what
    the allocator raises.
    """
    tenants: dict[int, list[str]] = {}
    for key, (tensor, _) in hollow.items():
        tenants.setdefault(_address(tensor), []).append(key)
    shown: dict[int, dict[int, Tensor]] = {}
    for tensor in (*(tensor for tensor, _ in hollow.values()), *tensors):
        shown.setdefault(_address(tensor), {})[id(tensor)] = tensor
    filling, found = Filling(hollow, spaces), dict(hollow)
    for address, keys in tenants.items():
        if len(keys) == 1 and address in spaces and _is_same(hollow, held, keys[0], spaces[address][1]):
            found[keys[0]] = held[keys[0]]
            storage = held[keys[0]][0].untyped_storage()
            for tensor in shown[address].values():
                where = tensor.storage_offset(), tensor.shape, tensor.stride()
                tensor.data = tensor.detach().new_empty(0).set_(storage, *where)
        else:
            for key in keys:
                filling.take(key)
    return found


def _is_same(hollow: JobState, held: JobState, key: str, num_bytes: int) -> bool:
    """Whether `held` has this tensor, laid out in memory of its own in the same way."""
    if key not in held:
        return False
    (new, layout), (old, known) = hollow[key], held[key]
    alike = (new.dtype, new.device, new.shape, new.stride()) == (old.dtype, old.device, old.shape, old.stride())
    at = new.storage_offset(), num_bytes
    return alike and layout == known and at == (old.storage_offset(), old.untyped_storage().nbytes())


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
