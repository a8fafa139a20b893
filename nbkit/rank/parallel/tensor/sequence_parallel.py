"""Sequence parallelism (Korthikanti et al. 2022): between the maps, positions are split instead of repeated on each
rank.

The code between the maps of a block must treat each position independently: norms, dropout, activations, residuals.
Blocks with other modules use plain tensor parallelism, and a note gives the reason.

Each pair sends an all-gather and a reduce-scatter of B x T x D elements, in forward and in backward. These are the same
bytes as the all-reduces of plain tensor parallelism, but each rank stores only 1/n of the activations between the maps.
For the code between, before and after the blocks see sharded_tensor.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.tensor.layers import Around, TpGroup, first_tensor, mapped
from nbkit.rank.parallel.tensor.plan.linear_types import is_linear, is_packed_attention
from nbkit.rank.parallel.tensor.plan.plan import Pair, TensorPlan
from nbkit.rank.parallel.tensor.sharded_tensor import PositionShard, positions_of, whole
from nbkit.rank.rng.draw_plan import extent

_POINTWISE = (nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish)
_MIXING = ("conv", "pool", "embed", "batchnorm", "groupnorm", "instancenorm", "rnn", "lstm", "gru", "softmax", "fft")
_HINT = (
    "hints=nbkit.ModelHints(tp_plan={'<the layers of its attention>': 'replicate'}) keeps the positions of "
    "the blocks whole"
)


@dataclass
class SequenceParallelChain:
    """Neighbouring blocks. The output of each is the input of the next."""

    blocks: list[tuple[str, nn.Module]]
    pairs: list[Pair]


class SequenceParallelBlock(Around):
    """Wrapper of a block that treats each position independently, except in its pairs.

    The input is hidden states (B, T, D), whole or as a PositionShard, and the output is a PositionShard. All other
    arguments are passed whole.
    """

    _team: TpGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden, team = _hidden(args, kwargs), self._team
        part, total = positions_of(hidden, team.group)

        def change(x: Tensor) -> Tensor:
            return part if x is hidden else whole(x)

        args = tuple(mapped(arg, change) for arg in args)
        kwargs = {key: mapped(value, change) for key, value in kwargs.items()}
        with extent("sequence", team.bounds(total)[0], total):
            out = self.plain(*args, **kwargs)
        y = out[0] if isinstance(out, tuple) else out
        if y.ndim != 3 or y.shape[1] != part.shape[1]:
            raise TrainingError(
                "A block returned another number of positions than it got, but tp splits the positions.",
                numbers=f"{tuple(y.shape)}, from {tuple(part.shape)} of {total} positions",
                hint=_HINT,
            )
        y = PositionShard(y, team.group, total)
        return (y, *out[1:]) if isinstance(out, tuple) else y


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states (B, T, D) from the arguments. Raises TrainingError if there are none."""
    x = first_tensor(args, kwargs)
    if x is None or x.ndim != 3:
        raise TrainingError(
            "tp splits the positions of the first argument of a block, but the block was called without a tensor.",
            numbers=f"expected a tensor (B, T, D), found {type(x).__name__ if x is None else tuple(x.shape)}",
            hint=_HINT,
        )
    return x


def chains(module: nn.Module, plan: TensorPlan) -> list[SequenceParallelChain]:
    """Return runs of neighbouring modules with pairs, in the outermost containers that have such children.

    A child without pairs (a block of another pipeline stage, a pooling between blocks) ends a run.
    """
    found: list[SequenceParallelChain] = []
    inside: list[str] = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential) or any(path.startswith(p) for p in inside):
            continue
        # A Sequential whose own children are the maps of a pair is not a chain of blocks.
        if any(pair.owner == path for pair in plan.pairs):
            continue
        runs = list(_runs(f"{path}." if path else "", part, plan))
        if runs:
            found += runs
            inside.append(f"{path}." if path else "")
    return found


def _runs(dot: str, container: nn.Module, plan: TensorPlan) -> Iterator[SequenceParallelChain]:
    run = SequenceParallelChain([], [])
    for child_name, child in container.named_children():
        name = dot + child_name
        own = [pair for pair in plan.pairs if f"{pair.owner}.".startswith(f"{name}.")]
        if run.blocks and not own:
            yield run
            run = SequenceParallelChain([], [])
        if own:
            run.blocks.append((name, child))
            run.pairs += own
    if run.blocks:
        yield run


def why_not_split(chain: SequenceParallelChain, heads_of: Collection[str]) -> str:
    """Return why the positions of a chain cannot be split, or "". heads_of: owners whose input may be gathered."""
    covered = {path for pair in chain.pairs for path in (*pair.columns, *pair.rows)}
    # Inside an attention, a rank has all positions.
    covered |= {pair.owner for pair in chain.pairs if pair.kind != "mlp"}
    names = {name for name, _ in chain.blocks}
    for pair in chain.pairs:
        if pair.kind == "attention" and (pair.owner in names or pair.owner not in heads_of):
            return f"{pair.owner} contains more than an attention"
    for name, block in chain.blocks:
        if not any(pair.kind != "mlp" and f"{pair.owner}.".startswith(f"{name}.") for pair in chain.pairs):
            return f"the attention of {name} is not split"
        for below, part in block.named_modules(prefix=name):
            if any(below == path or below.startswith(f"{path}.") for path in covered):
                if is_packed_attention(part) and not part.batch_first:
                    return f"{below} has batch_first=False"
                continue
            if not _is_pointwise(part):
                return f"{below} ({type(part).__name__}) may mix positions"
    return ""


def _is_pointwise(part: nn.Module) -> bool:
    if is_linear(part) or any(word in type(part).__name__.lower() for word in _MIXING):
        return False
    own = [p for p in part._parameters.values() if p is not None]
    if any(p.ndim != 1 for p in own):
        return False
    # Trust an unknown module if it only scales features, or if its name suggests that it treats positions
    # independently.
    name, home = type(part).__name__.lower(), type(part).__module__
    known = home.startswith(("torch.nn.modules.activation", "transformers.activations"))
    harmless = bool(own) or known or any(word in name for word in ("norm", "drop", "identity"))
    return harmless or isinstance(part, _POINTWISE) or next(part.children(), None) is not None
