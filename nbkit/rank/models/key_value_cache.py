"""Keys and values of the positions that a Hugging Face model has seen, kept while it generates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_ATTENTION = {"full_attention", "sliding_attention"}

# transformers 5.24 and later, and before: the argument that a cache is given as.
_NAMES = ("cache", "past_key_values")


class KeyValueCache:
    """What a model of `transformers` takes as its cache, on a rank that holds some of its layers and heads.

    Layers say what they have as ever; how many positions there are is said from outside, since a rank may not hold
    the layer that a model asks for it. Every layer keeps all positions: a model whose window slides masks the others.

    length: positions for which there is room. idle: whether a layer that is called now belongs to another rank, where
    a pipeline only asks for the shape of its output.
    """

    is_compileable = False

    def __init__(self, length: int, idle: Callable[[], bool]) -> None:
        self.length, self.idle = length, idle
        self.seen = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """(keys, values) of all positions (B, H, T, D) so far; those given are behind what is `seen`."""
        stop = self.seen + keys.shape[-2]
        if self.idle():
            return _room(keys, stop), _room(values, stop)
        if layer_idx not in self._layers:
            self._layers[layer_idx] = _room(keys, self.length), _room(values, self.length)
        for kept, new in zip(self._layers[layer_idx], (keys, values), strict=True):
            kept[..., self.seen : stop, :] = new
        own = self._layers[layer_idx]
        return own[0][..., :stop, :], own[1][..., :stop, :]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before those that the model is called with."""
        return self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first that the model is called with."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, position of the first key). query_length: a number, or, in older versions, the positions."""
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.seen + new, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit."""
        return -1


def _room(like: Tensor, length: int) -> Tensor:
    return like.new_zeros(*like.shape[:-2], length, like.shape[-1])


def why_no_cache(module: nn.Module) -> str:
    """Why `module` cannot be given a KeyValueCache; empty when it can."""
    of_peft: Any = module
    if hasattr(module, "get_base_model"):
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", True):
            return "its adapter puts positions of its own before the text"
        module = of_peft.get_base_model()
    kinds = type(module).__mro__
    if not any(kind.__module__.startswith("transformers.models.") for kind in kinds):
        return "it is no model of transformers, which take cache="
    taken = inspect.signature(type(module).forward).parameters
    config: Any = getattr(module, "config", None)
    if not any(name in taken for name in _NAMES) or "use_cache" not in taken:
        return "its forward takes no cache="
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder and a decoder"
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(module, "_is_stateful", False) or not layers <= _ATTENTION:
        return "it keeps other states than keys and values"
    return ""


def first_argument(module: nn.Module) -> str:
    """The name under which `module` takes its input."""
    return next(iter(inspect.signature(module.forward).parameters))


def cache_argument(module: nn.Module) -> str:
    """The name under which `module`, one that `why_no_cache` has nothing against, takes its cache."""
    of_peft: Any = module
    base = of_peft.get_base_model() if hasattr(module, "get_base_model") else module
    taken = inspect.signature(type(base).forward).parameters
    return next(name for name in _NAMES if name in taken)
