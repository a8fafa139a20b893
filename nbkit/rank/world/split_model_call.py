"""Whether the user's own code calls a model of which every rank holds a part: then all of them have to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from types import FrameType

from torch import nn

from nbkit.rank.parallel.module.forward_wrapper import marked_parts
from nbkit.rank.torch_private import call_of_module
from nbkit.wire.user_code import is_users

_TORCH = PurePath(nn.__file__).parents[1]


def split_model_call(frames: Sequence[FrameType]) -> tuple[FrameType, str] | None:
    """The frame of the user's that calls the model, and the model's strategy; None where a step calls it, or nobody.

    frames: of a thread, innermost first.
    """
    caller, model = None, None
    for frame in frames:
        if frame.f_code is call_of_module:  # the outermost one is the model, those before are its blocks
            caller, model = None, frame.f_locals.get("self")
        elif model is not None and caller is None and not PurePath(frame.f_code.co_filename).is_relative_to(_TORCH):
            caller = frame
    if caller is None or not isinstance(model, nn.Module) or not is_users(caller.f_code.co_filename):
        return None
    strategy = marked_parts(model)
    return (caller, strategy) if strategy is not None else None
