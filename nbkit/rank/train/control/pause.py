"""A pause: the training is held at a step boundary, where requests are served as between any two steps.

Every rank enters at the same boundary and asks in a small reduction, some twenty times a second, whether all hold the
next request. So a stop, a switch or a live cell acts on all of them or on none, and the word to go on does too.
"""

from __future__ import annotations

import time

import torch

from nbkit.rank.comm.agree import largest
from nbkit.rank.train.control import step_boundary

_POLL_SECONDS = 0.05
_held = False


def hold(device: torch.device) -> None:
    """Return when `let_go` was called by a request. Collective. Raises Stopped when the user stops the training."""
    global _held
    if _held:
        return
    _held = True
    polls = 0  # in which some ranks held the next request, and others did not
    try:
        while _held:
            asked = step_boundary.inbox.acted + 1
            # Whatever it lacks: there is no step to make it beside.
            here = step_boundary.inbox.stage(asked) > 0
            lacks, ends, held = largest([not here, step_boundary.told_to_end(), here], device=device)
            if ends:
                step_boundary.end()
            if not lacks:
                polls = 0
                step_boundary.act(asked)
                continue
            polls = polls + 1 if held else 0
            if polls * _POLL_SECONDS > step_boundary.SHARE_SECONDS:
                polls = 0
                step_boundary.share(device)
            time.sleep(_POLL_SECONDS)
    finally:
        _held = False


def let_go() -> bool:
    """Go on; whether anything was held."""
    global _held
    was, _held = _held, False
    return was


def is_held() -> bool:
    """From any thread."""
    return _held
