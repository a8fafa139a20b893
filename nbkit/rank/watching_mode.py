"""The base of what watches a model's operations (TorchDispatchMode)."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):
    """Sees every operation and lets it through.

    Torch's own base imports its compiler at the first operation, which takes seconds, to keep it out of the method.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
