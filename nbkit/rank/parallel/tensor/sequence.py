"""Sequence parallelism (Korthikanti et al. 2022): between the maps, positions are split instead of repeated.

What stands between the maps of a block must treat positions one by one: norms, dropout, activations, residuals. A block
with anything else in it stays with plain tensor parallelism, and a note says why.

On the wire, per block and pass, forward and backward: an all-gather and a reduce-scatter of B x T x D elements for each
pair: the same bytes as plain tensor parallelism's all-reduces, with 1/n of the activations between them in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.rank.parallel.tensor.kinds import is_linear, is_packed_attention
from nbkit.rank.parallel.tensor.link import Team, first_tensor
from nbkit.rank.parallel.tensor.plan import Pair, TensorPlan

__all__ = ["Chain", "chains", "why_not_split"]

_POINTWISE = (nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish)
_MIXING = ("conv", "pool", "embed", "batchnorm", "groupnorm", "instancenorm", "rnn", "lstm", "gru", "softmax", "fft")

# Chain -> positions of its hidden states in this forward. A recomputation of ours runs in the context of its
# forward; one of somebody else may find nothing here, and takes the latest forward's.
_totals: ContextVar[Mapping[int, int]] = ContextVar("totals", default=MappingProxyType({}))


@dataclass
class Chain:
    """Neighbouring blocks, the output of each the input of the next."""

    team: Team
    blocks: list[tuple[str, nn.Module]]
    pairs: list[Pair]
    latest: int = 0

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The hidden states (B, T, D) among the arguments. Raises TrainingError when they are something else."""
        x = first_tensor(args, kwargs)
        if x is None or x.ndim != 3:
            raise TrainingError(
                "The positions of the first argument of a block are split over the tensor axis, and it has none.",
                numbers=f"expected a tensor (B, T, D), found {type(x).__name__ if x is None else tuple(x.shape)}",
                hint="sequence=False",
            )
        return x

    @staticmethod
    def put(
        args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `new` for `old`."""
        return tuple(new if a is old else a for a in args), {k: new if v is old else v for k, v in kwargs.items()}

    def begin(self, x: Tensor) -> int:
        """Its positions, all of which are in `x`."""
        self.latest = x.shape[1]
        _totals.set({**_totals.get(), id(self): x.shape[1]})
        return x.shape[1]

    def check(self, x: Tensor) -> int:
        """Its positions, some of which are in `x`. Raises TrainingError when a block changed their number."""
        total = _totals.get().get(id(self), self.latest)
        start, stop = self.team.bounds(total)
        if x.shape[1] != stop - start:
            raise TrainingError(
                "The positions that a block got are not this rank's part of those that the chain began with.",
                numbers=f"{x.shape[1]} positions, {stop - start} of {total} expected",
                hint="sequence=False",
            )
        return total

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        return self


def chains(module: nn.Module, plan: TensorPlan, team: Team, starts: Collection[str] = ()) -> list[Chain]:
    """Runs of neighbours that hold pairs, in the outermost containers that have such children.

    What holds none (a block of another pipeline stage, a pooling between blocks) ends a run, and so does a block that
    is named in `starts`.
    """
    found: list[Chain] = []
    inside: list[str] = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential) or any(path.startswith(p) for p in inside):
            continue
        # A pair whose two maps are children of the Sequential itself is no block of a chain.
        if any(pair.owner == path for pair in plan.pairs):
            continue
        runs = list(_runs(f"{path}." if path else "", part, plan, team, starts))
        if runs:
            found += runs
            inside.append(f"{path}." if path else "")
    return found


def _runs(dot: str, container: nn.Module, plan: TensorPlan, team: Team, starts: Collection[str]) -> Iterator[Chain]:
    run = Chain(team, [], [])
    for child_name, child in container.named_children():
        name = dot + child_name
        own = [pair for pair in plan.pairs if f"{pair.owner}.".startswith(f"{name}.")]
        if run.blocks and (not own or name in starts):
            yield run
            run = Chain(team, [], [])
        if own:
            run.blocks.append((name, child))
            run.pairs += own
    if run.blocks:
        yield run


def why_not_split(chain: Chain, heads_of: Collection[str]) -> str:
    """Why its positions cannot be split; empty when they can. heads_of: owners whose input may be gathered."""
    covered = {path for pair in chain.pairs for path in (*pair.columns, *pair.rows)}
    # Inside an attention all positions are there.
    covered |= {pair.owner for pair in chain.pairs if pair.kind != "mlp"}
    names = {name for name, _ in chain.blocks}
    for pair in chain.pairs:
        if pair.kind == "attention" and (pair.owner in names or pair.owner not in heads_of):
            return f"{pair.owner} is more than an attention"
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
    # A module of which nothing is known is trusted when it only scales features, or calls itself what it is.
    name, home = type(part).__name__.lower(), type(part).__module__
    known = home.startswith(("torch.nn.modules.activation", "transformers.activations"))
    harmless = bool(own) or known or any(word in name for word in ("norm", "drop", "identity"))
    return harmless or isinstance(part, _POINTWISE) or next(part.children(), None) is not None
