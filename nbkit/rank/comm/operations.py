"""The operations of a process group by torch's names: what people call them, and what a rank contributes to each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# What each call is called by people, and the position of the argument that this rank contributes (of scatter: gets).
COLLECTIVES: dict[str, tuple[str, int | None]] = {
    "barrier": ("barrier", None),
    "broadcast": ("broadcast", 0),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "gather_single": ("gather", 1),
    "gather_into_tensor": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
}

# Those whose options, which come last, name a rank of the group.
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})

# A group answers these itself. What is in neither table is handed on uncounted: it issues nothing, belongs to an
# operation that was counted, or is newer than this list.
OWN = frozenset({
    "BackendType", "_device_types", "_id", "_pybind11_conduit_v1_", "_register_backend", "_set_default_backend",
    "_set_group_desc", "_set_group_name", "bound_device_id", "boxed", "rank", "size", "unbox",
})  # fmt: skip


def num_bytes(payload: torch.Tensor | Iterable[Any] | Any) -> int:
    """Bytes of a tensor, or of all in nested lists; 0 of anything else."""
    if type(payload) is list and len(payload) == 1:  # as nearly every call has it
        payload = payload[0]
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    return sum(map(num_bytes, payload)) if isinstance(payload, (list, tuple)) else 0


def first_of(payload: Any) -> Any:
    """The first tensor in nested lists; anything else as it is."""
    while isinstance(payload, (list, tuple)) and payload:
        payload = payload[0]
    return payload
