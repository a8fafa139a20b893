"""Apply a tensor-parallel plan (Shoeybi et al. 2019) to a model that was written without it.

Communication per forward and backward, with n ranks on the tensor axis, S = B x T x D elements, and L blocks of
attention and MLP: 4 L all-reduces of S, one for the embedding, one for the head, and three numbers per position for the
loss. With sequence parallelism each all-reduce becomes an all-gather and a reduce-scatter, which send the same bytes.
Then positions stay split from the embedding to the head. If the embedding or the head is not split by the vocabulary,
or other code in between needs all positions, an all-gather of S is used instead (sharded_tensor.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.device_mesh import Axes
from nbkit.rank.parallel.mine import OwnColumn, OwnRow
from nbkit.rank.parallel.module.copies import homes, is_placeholder, parameter_like, placeholder, replace_submodule
from nbkit.rank.parallel.tensor.attention import SplitAttention, sizes_of_part
from nbkit.rank.parallel.tensor.layers import (
    Around,
    ColumnParallel,
    GatheredOutputs,
    Head,
    Owner,
    PairState,
    RowCore,
    RowParallel,
    SplitRow,
    TpGroup,
    Vocabulary,
    put_around,
)
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from nbkit.rank.parallel.tensor.plan.linear_types import adapters, core, feature_dims, is_linear, ranges_of, sizes
from nbkit.rank.parallel.tensor.plan.plan import (
    Cut,
    Pair,
    TensorPlan,
    cuts_of_columns,
    cuts_of_packed,
    cuts_of_rows,
    cuts_of_single,
    divide,
)
from nbkit.rank.parallel.tensor.sequence_parallel import (
    SequenceParallelBlock,
    SequenceParallelChain,
    chains,
    why_not_split,
)
from nbkit.rank.parallel.tensor.sharded_tensor import give_whole
from nbkit.tensor_layout import Layout


@dataclass(frozen=True)
class TensorSplit:
    """Result of splitting a module.

    layouts: first name of each parameter -> its layout. partial: parameters whose gradients must be summed over the
    tensor axis. notes: messages for the user. rows: (module, how it is split, why it is not).
    """

    layouts: Mapping[str, Layout]
    partial: frozenset[str]
    notes: tuple[str, ...]
    rows: tuple[tuple[str, str, str], ...]


def tensor_parallel(
    module: nn.Module,
    axes: Axes,
    *,
    plan: TensorPlan | Mapping[str, str] | None = None,
    sequence: bool = True,
    own: Any = None,
    chunks: int = 1,
) -> TensorSplit:
    """Reduce `module` in place to this rank's part along the axis tp: parameters, attributes and forwards.

    plan: made from the whole model by `plan_of`, or the user's roles if `module` is the whole model. A placeholder is
    replaced by a smaller one, a real parameter by its part. sequence: also split positions between the maps where the
    structure allows it. own: an object of a user's class that computes the maps of pairs (nbkit/techniques/mine.py).
    chunks: the pieces in which the output of a pair is summed (nbkit/techniques/tp_chunks.py).
    Every rank of the axis must get the same inputs, and computes the same loss. Raises StrategyError if a size does not
    divide, or if it is unknown how to split a module.
    """
    group = axes.group("tp")
    if group is None:
        layouts = {name: Layout.whole(p.shape) for name, p in module.named_parameters()}
        return TensorSplit(layouts, frozenset(), (), ())
    team = TpGroup(group, axes.size("tp"), axes.index("tp"))
    chosen = plan if isinstance(plan, TensorPlan) else plan_of(module, team.size, plan)
    surgery, rows = _Surgery(module, team, chosen, own, chunks), tuple(chosen.describe(module))
    surgery.apply(sequence)
    return TensorSplit(surgery.layouts, frozenset(surgery.partial), tuple(surgery.notes), rows)


def parts_of(module: nn.Module, plan: TensorPlan, size: int, index: int, *, sequence: bool = False) -> TensorSplit:
    """Return the split that rank `index` of `size` would get. Sends nothing, and changes the skeleton `module`."""
    (surgery := _Surgery(module, TpGroup(None, size, index), plan)).apply(sequence)  # type: ignore[arg-type]
    return TensorSplit(surgery.layouts, frozenset(surgery.partial), tuple(surgery.notes), ())


class _Surgery:
    def __init__(self, module: nn.Module, team: TpGroup, plan: TensorPlan, own: Any = None, chunks: int = 1) -> None:
        self.module, self.team, self.own, self.chunks = module, team, own, chunks
        self.places = homes(module)
        self.names = {(id(part), name): first for first, found in self.places.items() for part, name in found}
        self.params = {first: found[0][0]._parameters[found[0][1]] for first, found in self.places.items()}
        self.layouts = {name: Layout.whole(p.shape) for name, p in self.params.items() if p is not None}
        self.partial: set[str] = set()
        self.notes = [f"{path or 'the model'} is whole: {why}" for path, why in plan.unproven.items()]
        self.parts = dict(module.named_modules())
        here = [pair for pair in plan.pairs if self._is_here(pair)]
        self.plan = replace_fields(plan, pairs=tuple(here))

    def apply(self, sequence: bool) -> None:
        """Split pairs, then single modules, then blocks. Split parameters last, because ties are found by identity."""
        found = chains(self.module, self.plan) if sequence else []
        split = [chain for chain in found if self._may_split(chain)]
        in_sequence = {pair.owner for chain in split for pair in chain.pairs}
        links: dict[str, list[tuple[Pair, PairState]]] = {}
        for pair in self.plan.pairs:
            link = self._link(pair, pair.owner in in_sequence)
            links.setdefault(pair.owner, []).append((pair, link))
            self._cut_pair(pair, link)
        rows = [self.parts[path] for pair in self.plan.pairs if pair.kind != "module" for path in pair.rows]
        if self.chunks > 1 and self.plan.pairs and all(map(adapters, rows)):
            self.notes.append(
                f"tp_chunks={self.chunks} has no effect: it applies only to layers without LoRA whose output is summed "
                "over ranks"
            )
        for owner, owned in links.items():
            self._own(owner, owned)
        for path, _, attribute in (name.rpartition(".") for name in self.plan.partial):
            if (part := self.parts.get(path)) is not None and part._parameters.get(attribute) is not None:
                self.partial.add(self.names[id(part), attribute])
        for path, role in self.plan.singles.items():
            if (part := self.parts.get(path)) is not None:
                self._cut_single(path, part, role, in_sequence=bool(split))
        for chain in split:
            self._enter(chain)
        if split:
            self.module.register_forward_hook(give_whole)
        self._off_the_fast_path()
        for name, layout in self.layouts.items():
            old = self.params[name]
            if old is not None and not layout.is_whole:
                replace_submodule(self.places[name], _part(old, layout))

    def _is_here(self, pair: Pair) -> bool:
        if pair.kind == "module":
            part = self.parts.get(pair.owner)
            return part is not None and part._parameters.get("in_proj_weight") is not None
        return all(is_linear(self.parts.get(path)) for path in (*pair.columns, *pair.rows))

    def _may_split(self, chain: SequenceParallelChain) -> bool:
        able = [p.owner for p in chain.pairs if p.kind == "attention" and self._only_heads(p)]
        said = (f"{path}: {self.plan.positions[path]}" for path, _ in chain.blocks if self.plan.positions.get(path))
        if why := why_not_split(chain, able) or next(said, ""):
            self.notes.append(f"positions are not split in {chain.blocks[0][0]} and the layers after it: {why}")
        return not why

    def _only_heads(self, pair: Pair) -> bool:
        """Return True if all parameters of an attention belong to its maps or are the same for every head."""
        maps = tuple(f"{path}." for path in (*pair.columns, *pair.rows))
        rest = self.parts[pair.owner].named_parameters(prefix=pair.owner)
        return pair.heads is not None and all(name.startswith(maps) or p.numel() == pair.heads.dim for name, p in rest)

    def _link(self, pair: Pair, sequence: bool) -> PairState:
        kind, total = ("feature", pair.inner) if pair.heads is None else ("head", pair.heads.heads)
        at_owner = sequence and pair.kind == "attention"
        return PairState(self.team, kind, total, pair.inner, sequence, at_owner, self.chunks)

    def _cut_pair(self, pair: Pair, link: PairState) -> None:
        if pair.kind == "module":
            self._cut_packed(pair, link)
            return
        for path in pair.columns:
            part = self.parts[path]
            self._cut_columns(path, part, pair.widths[path])
            self._put(part, ColumnParallel, OwnColumn, link)
        for path in pair.rows:
            part = self.parts[path]
            self._cut_rows(path, part)
            self._put(part, RowParallel, OwnRow, link)

    def _put(self, part: nn.Module, kind: type[Around], own: type[Around], link: PairState) -> None:
        if self.own is None or adapters(part):
            put_around(part, kind, _link=link)
        else:
            put_around(part, own, _link=link, _own=self.own)

    def _cut_packed(self, pair: Pair, link: PairState) -> None:
        part: Any = self.parts[pair.owner]
        if any(pair.owner.startswith(f"{path}.") for path, above in self.parts.items() if hasattr(above, "lora_A")):
            raise StrategyError(
                f"nbkit cannot split LoRA around an nn.MultiheadAttention: {pair.owner}.",
                numbers=f"{self.team.size} ranks along tp",
                hint=f"hints=nbkit.ModelHints(tp_plan={{'{pair.owner}': 'replicate'}}); or a strategy without tp",
            )
        self._cut(cuts_of_packed(part, pair.inner))
        put_around(part, SplitAttention, _link=link, _heads=pair.heads)

    def _cut_columns(self, path: str, part: nn.Module, widths: Sequence[int]) -> None:
        self._cut(cuts_of_columns(part, widths))
        _say(core(part), "out_features", "nf", sum(stop - start for start, stop in self._ranges(widths)))
        for name, down, _ in adapters(part):
            self._plain_lora(path, part, name)
            self._sum_over_tp(down)

    def _cut_rows(self, path: str, part: nn.Module) -> None:
        base = core(part)
        (start, stop), *_ = self._ranges((sizes(part)[0],))
        self._cut(cuts_of_rows(part))
        _say(base, "in_features", "nx", stop - start)
        put_around(base, RowCore)
        for name, _, up in adapters(part):
            self._plain_lora(path, part, name)
            if up.bias is not None:
                raise StrategyError(
                    f"The bias of a LoRA adapter would be added once per rank: {path}.",
                    numbers=f"adapter {name!r}, {self.team.size} ranks along tp",
                    hint="LoraConfig(lora_bias=False)",
                )
            self._sum_over_tp(up)

    def _plain_lora(self, path: str, part: Any, name: str) -> None:
        if name in getattr(part, "lora_variant", {}):
            raise StrategyError(
                f"This variant of LoRA needs the whole matrix: {path}.",
                numbers=f"{type(part.lora_variant[name]).__name__}, {self.team.size} ranks along tp",
                hint="plain LoRA (use_dora=False); or a strategy without tp",
            )

    def _cut_single(self, path: str, part: nn.Module, role: str, *, in_sequence: bool) -> None:
        team = self.team
        if role == "vocab" and isinstance(part, nn.Embedding) and part._parameters.get("weight") is not None:
            self._cut(cuts_of_single(part, role))
            self._show_uneven(path, part.num_embeddings)
            put_around(part, Vocabulary, _team=team, _total=part.num_embeddings, _in_sequence=in_sequence)
        if not is_linear(part):
            return
        total = int(core(part).weight.shape[feature_dims(part)[1]])
        if role == "rowwise_split":
            self._cut_rows(path, part)
            put_around(part, SplitRow, _team=team)
        elif role in ("colwise_gather", "head"):
            self._cut_columns(path, part, (total,))
            put_around(part, Head if role == "head" else GatheredOutputs, _team=team, _total=total)
            self._show_uneven(path, total)

    def _show_uneven(self, path: str, total: int) -> None:
        if total % self.team.size:
            most = -(-total // self.team.size)
            self.notes.append(f"{path}: {total} over {self.team.size} ranks, {most} or {most - 1} each")

    def _own(self, owner: str, owned: list[tuple[Pair, PairState]]) -> None:
        if all(pair.kind == "module" for pair, _ in owned):
            return
        part = self.parts[owner]
        attention = next((link for pair, link in owned if pair.kind == "attention"), None)
        for pair, _ in owned:
            divide(part, pair.counts, self.team.size)
        sizes = next((pair for pair, _ in owned if pair.views), None)
        taken = any(pair.taken for pair, _ in owned if pair.kind == "attention")
        put_around(
            part,
            Owner,
            _links=tuple(link for _, link in owned),
            _attention=attention,
            _takes=taken,
            _sizes=sizes_of_part(sizes, self.team.size),
        )

    def _enter(self, chain: SequenceParallelChain) -> None:
        for _, block in chain.blocks:
            for p in block.parameters():
                if self.layouts[self._name_of(p)].is_whole:
                    self.partial.add(self._name_of(p))
            put_around(block, SequenceParallelBlock, _team=self.team)

    def _off_the_fast_path(self) -> None:
        """Turn off the fused kernel of torch's encoder in evaluation, because it bypasses the wrappers."""
        for part in self.module.modules():
            if isinstance(part, nn.TransformerEncoder):
                part.use_nested_tensor = False
            if isinstance(part, nn.TransformerEncoderLayer):
                part.activation_relu_or_gelu = 0

    def _ranges(self, widths: Sequence[int]) -> list[tuple[int, int]]:
        """Return this rank's range in each of the concatenated matrices."""
        return ranges_of(widths, self.team.size, self.team.index)

    def _cut(self, cuts: Iterable[Cut]) -> None:
        for part, attribute, dim, widths in cuts:
            param = part._parameters.get(attribute)
            if param is None:
                continue
            name = self.names[id(part), attribute]
            layout = Layout.of_ranges(param.shape, dim, self._ranges(widths))
            before = self.layouts[name]
            if not before.is_whole and before != layout:
                raise StrategyError(
                    f"{name} is a tied weight, and the layers that use it need different parts of it.",
                    numbers=f"{before.local} in one, {layout.local} in another, of {layout.shape}",
                    hint="the same role for both in tp_plan; an embedding is 'vocab' where its head is 'head'",
                )
            self.layouts[name] = layout

    def _sum_over_tp(self, part: nn.Module) -> None:
        for attribute, param in part._parameters.items():
            if param is not None:
                self.partial.add(self.names[id(part), attribute])

    def _name_of(self, param: nn.Parameter) -> str:
        return next(name for name, p in self.params.items() if p is param)


def _say(part: Any, linear: str, conv: str, features: int) -> None:
    setattr(part, linear if hasattr(part, linear) else conv, features)


def _part(old: nn.Parameter, layout: Layout) -> nn.Parameter:
    if is_placeholder(old) or old.is_meta:
        return placeholder(layout.local, old)
    with torch.no_grad():
        new = torch.empty(layout.local, dtype=old.dtype, device=old.device)
        for here, there in layout.pieces:
            new[here.slices] = old[there.slices]
    return parameter_like(new, old)
