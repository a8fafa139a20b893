"""`dist.batch_isend_irecv` over delegating groups: one batch where the backend makes batches.

torch does that for its own group type alone. For any other it issues send by send, and on nccl two ranks that both
send first then wait for each other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbkit.rank.comm.delegating_group import DelegatingGroup
from nbkit.rank.torch_private import CAN_BATCH_P2P


def install_batched() -> None:
    """Put ours in the place of torch's, if this torch has what it takes. Called once, by group_creation.install."""
    if not CAN_BATCH_P2P:
        return
    plain = c10d.batch_isend_irecv

    @functools.wraps(plain)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        group, device = p2p_op_list[0].group, p2p_op_list[0].tensor.device
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, DelegatingGroup) or not group._get_backend(device).supports_coalescing:
            return plain(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as batch:
            for op in p2p_op_list:
                peer = "group_dst" if op.op is dist.isend else "group_src"
                op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer})
        works: list[Any] = batch.works
        return works

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
