"""Clears what a step that was broken off leaves in the user's DDP and FSDP2 objects.

An exception in the middle of backward leaves a DDP reducer waiting for gradients that never come, and FSDP2
modules unsharded with gathers in flight. Their own torch says so and stops; after a new generation they train on.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from nbkit.errors import TrainingError


def clear_broken_steps() -> None:
    """Put every DDP and FSDP2 object of this process between two steps; gradients in flight are lost.

    All ranks must do so between the same two collectives: DDP agrees anew on its buckets in the next step.
    """
    # Found, not registered: user code makes them behind our back, also before this module is imported.
    objects = gc.get_objects()
    # FSDP is not imported here: who has not imported it has no such module, and importing it takes half a second.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", DistributedDataParallel)
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, (DistributedDataParallel, sharded))}
    for module in [one for one in objects if type(one) in wanted]:
        with contextlib.suppress(AttributeError):  # of a torch that is newer: then they have to be made again
            if isinstance(module, DistributedDataParallel):
                module._has_rebuilt_buckets = False
                module.reducer._reset_state()
            else:
                _reset_fully_sharded(module)


def _reset_fully_sharded(module: Any) -> None:
    state = module._get_fsdp_state()
    # None: no forward has run yet. Only the root of a tree of sharded modules resets it.
    if not state._is_root:
        return
    if not hasattr(module, "reset_iter_state"):  # before torch 2.13
        if state._state_ctx.iter_forward_root is not None or state._state_ctx.post_backward_final_callback_queued:
            module.register_forward_pre_hook(_refuse)
        return
    for one in state._state_ctx.all_states:
        for group in one._fsdp_param_groups:
            gathering, group._all_gather_result = group._all_gather_result, None
            work = getattr(gathering, "all_gather_work", None)
            if work is not None and hasattr(work, "wait"):
                with contextlib.suppress(RuntimeError):  # what was in flight was broken off: that is why we are here
                    work.wait()
    module.reset_iter_state()


def _refuse(module: Any, args: Any) -> None:
    """Raise TrainingError: a further step would send what no other rank expects, and gloo would end the process."""
    raise TrainingError(
        "A step of this FSDP model was broken off, and this torch cannot put it back.",
        numbers=f"torch {torch.__version__}; 2.13 and newer can",
        hint="model = fully_shard(build())   (build the model and its optimizer again)",
    )
