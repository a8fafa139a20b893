"""The base class of modes that watch a model's operations (TorchDispatchMode)."""

from __future__ import annotations

from nbkit.rank.torch_private import TorchDispatchMode


class WatchingMode(TorchDispatchMode):  # type: ignore[misc]
    """A mode that sees every operation and does not change it.

    Torch's own base class imports torch's compiler at the first operation, to exclude the method from compilation. That
    takes seconds, so this class skips it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
