"""Classes whose source is known to split as the names of their parts say: what is split without a run to prove it.

Exact classes; a subclass may do anything. Those of transformers are named by their files, each of which was run in
parts beside the whole (proof/).
"""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from nbkit.rank.parallel.tensor.plan.infer_plan import POINTWISE
from nbkit.rank.parallel.tensor.plan.linear_types import is_linear
from nbkit.rank.parallel.tensor.plan.plan import Pair

_OURS = "nbkit.rank.models.gpt"
_HUGGING_FACE = {"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi", "falcon", "bert", "roberta", "vit"}
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder, *_LAYERS)


def known_pair(model: nn.Module, pair: Pair) -> bool:
    """Whether the module that holds `pair` is of a class that is known."""
    owner = model.get_submodule(pair.owner)
    if pair.kind == "module":
        return True
    if type(owner) is nn.Sequential:
        return all(is_linear(child) or type(child) in POINTWISE for child in owner.children())
    if pair.kind == "mlp" and type(owner).__module__ != _OURS and type(owner) not in _LAYERS:
        # The activation, which a config names, may have parameters.
        maps = tuple(f"{path}." for path in (*pair.columns, *pair.rows))
        if any(not name.startswith(maps) for name, _ in owner.named_parameters(prefix=pair.owner)):
            return False
    return known_block(owner)


def known_block(block: nn.Module) -> bool:
    """Whether all that `block` computes is known."""
    if type(block) in _LAYERS:
        return block.activation in (F.relu, F.gelu) or type(block.activation) in POINTWISE  # type: ignore[union-attr]
    return _is_known(type(block))


def known_path(model: nn.Module, path: str) -> bool:
    """Whether all modules around the one at `path` are known, so that none of them reads its weight by itself."""
    names = path.split(".")
    above = [model.get_submodule(".".join(names[:i])) for i in range(len(names))]
    return all(type(part) in _HOLDERS or _is_known(type(part)) for part in above)


def _is_known(kind: type[nn.Module]) -> bool:
    home = kind.__module__
    if home == _OURS:
        return True
    if home.startswith("peft."):
        return True
    *above, name = home.split(".")
    return above[:2] == ["transformers", "models"] and name.removeprefix("modeling_") in _HUGGING_FACE
