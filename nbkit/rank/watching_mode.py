"""The base of what watches a model's operations (TorchDispatchMode)."""

from __future__ import annotations

from nbkit.rank.torch_private import TorchDispatchMode


class WatchingMode(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operation and lets it through.

    Torch's own base imports its compiler at the first operation, which takes seconds, to keep it out of the method.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
