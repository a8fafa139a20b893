"""The base class of modes that watch a model's operations (TorchDispatchMode)."""

from __future__ import annotations

from nbkit.rank.torch_private import TorchDispatchMode


class WatchingMode(TorchDispatchMode):  # type: ignore[misc]
    """A mode that sees every operation and lets it through.

    Torch's own base class imports its compiler at the first operation, to keep it out of the method. That takes
    seconds, so this class skips it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
