"""Refuse context parallelism by inspecting a model: unknown attention, and layers that mix positions."""

from __future__ import annotations

from torch import nn

from nbkit.errors import StrategyError
from nbkit.rank.torch_private import ConvNd, NormBase

_MIXERS = (ConvNd, nn.RNNBase, NormBase)


def check_attention(module: nn.Module, *, tried: bool) -> None:
    """Raise StrategyError for a transformers model that does not use scaled_dot_product_attention.

    tried: the model is run on parts anyway, so refuse only a model that could use it.
    """
    kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
    could = getattr(module, "_supports_sdpa", True)
    if kind not in (None, "sdpa") and (could or not tried):
        raise StrategyError(
            "Context parallelism gathers keys in scaled_dot_product_attention, and this model uses another one.",
            numbers=f"attn_implementation={kind!r}",
            hint="attn_implementation='sdpa'"
            if could
            else f"a strategy without cp: {type(module).__name__} has no other",
        )


def check_mixing(name: str, block: nn.Module) -> None:
    """Raise StrategyError for a block with convolutions, recurrent layers, BatchNorm, or batch_first=False.

    name: path of the block. Convolutions of kernel size 1 are allowed.
    """
    for path, part in block.named_modules():
        where = f"{name}.{path}" if path else name
        if isinstance(part, nn.MultiheadAttention) and not part.batch_first:
            raise StrategyError(
                f"{where!r} takes (positions, samples, width); context parallelism splits (samples, positions, width).",
                numbers="batch_first=False",
                hint="batch_first=True",
            )
        one_by_one = isinstance(part, ConvNd) and all(size == 1 for size in part.kernel_size)
        if isinstance(part, _MIXERS) and not one_by_one:
            raise StrategyError(
                f"{where!r} mixes positions, which a part of them cannot do.",
                numbers=f"{type(part).__name__} in a block",
                hint="a strategy without cp",
            )
