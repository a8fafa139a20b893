"""The candidates of a plan, each run in parts beside the whole, in one process; what does not fit stays whole.

The model runs once in each mode while `Capture` watches. Then every module that holds a pair is run by itself, whole
and in parts, on the arguments that it was called with: one of each kind (call_kinds.py). Blocks whose positions
may be split are run once more that way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.module.meta_module import placeholder
from nbkit.rank.parallel.proof.unchanged import set_evaluation, thaw, unchanged
from nbkit.rank.parallel.tensor.plan.choose_plan import candidates
from nbkit.rank.parallel.tensor.plan.flow_plan import ways_of
from nbkit.rank.parallel.tensor.plan.heads import of_configs
from nbkit.rank.parallel.tensor.plan.plan import Pair, TensorPlan
from nbkit.rank.parallel.tensor.proof.call_kinds import kind_of
from nbkit.rank.parallel.tensor.proof.capture import Call, Capture, Given
from nbkit.rank.parallel.tensor.proof.data_flow import data_flow
from nbkit.rank.parallel.tensor.proof.gradients import Gradients
from nbkit.rank.parallel.tensor.proof.paths import inside, relative, relative_path, under
from nbkit.rank.parallel.tensor.proof.shard_run import Differs, Run
from nbkit.rank.parallel.tensor.proof.twin import Unit
from nbkit.rank.parallel.tensor.proof.verdict import Proof, Verdict
from nbkit.rank.parallel.tensor.sequence_parallel import chains
from nbkit.rank.torch_private import pytree

_LARGE = 1 << 26
"""A module with more parameters than this beside its maps is run with those of the model, in their own dtype; one that
is given a quarter as many numbers in float32."""


def prove(
    model: nn.Module,
    call: Callable[[], Any],
    sizes: Sequence[int],
    tp_plan: Mapping[str, str] | None = None,
    *,
    brief: Callable[[], Any] | None = None,
) -> Proof:
    """Which splits of `model` into `sizes` parts are right. call: runs the whole model once, on real rows.

    brief: does the same operations on a few positions of them; if all that is tried fits there, that is the proof.
    Parameters, buffers, modes and random generators are afterwards as before. Whatever goes wrong is in the answer.
    """
    found = Proof() if brief is None else _proof(model, brief, sizes, tp_plan)
    if found.why or any(each.wrong or any(each.positions.values()) for each in found.verdicts.values()):
        found = _proof(model, call, sizes, tp_plan)
    return found


def _proof(model: nn.Module, call: Callable[[], Any], sizes: Iterable[int], tp_plan: Mapping[str, str] | None) -> Proof:
    try:
        with unchanged(model):
            thaw(model)
            flow = data_flow(model, call)
            prover = _Prover(model, call, candidates(model, 1, tp_plan, flow))
            return Proof({size: prover.verdict(size) for size in sizes}, "", flow)
    except StrategyError as error:  # the plan itself, which is refused where it is made
        return Proof(why=str(error))
    except Exception as error:
        return Proof(why=f"the model does not run on the example: {type(error).__name__}: {str(error)[:200]}")


@dataclass(frozen=True)
class _Found:
    """Of one kind of unit, by paths from it. partial: parameter -> row maps of the pairs that use it."""

    wrong: dict[str, str] = field(default_factory=dict)
    partial: dict[str, set[str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)


class _Prover:
    def __init__(self, model: nn.Module, call: Callable[[], Any], plan: TensorPlan) -> None:
        self.model, self.plan = model, plan
        self.seen = Capture(model, plan)
        blocks = {path for chain in chains(model, plan) for path, _ in chain.blocks}
        owners = {pair.owner for pair in plan.pairs if pair.kind != "module"}
        self.units = sorted(
            path for path in owners if not any(path != other and inside(path, other) for other in owners)
        )
        self.seen.run(call, {*self.units, *blocks})
        with unchanged(model):
            set_evaluation(model)
            self.seen.run(call, {*self.units, *blocks})
        self.placeholders = {id(p): placeholder(p.shape, p) for p in model.parameters()}
        self._known: dict[Hashable, _Found] = {}

    def verdict(self, size: int) -> Verdict:
        """For `size` parts."""
        wrong, taken, right = dict(self.seen.refused), set[str](), dict[str, Pair]()
        partial: dict[str, set[str]] = {}
        ways: dict[str, list[Pair]] = {}
        for pair in self.plan.pairs:
            key = pair.rows[0]
            # What does not divide is refused where the plan is made, with the numbers.
            if key not in wrong and not _divides(pair, size):
                right[key] = pair
            elif key not in wrong and (found := self._ways(pair, size)):
                ways[key] = found
            elif key not in wrong:
                name, user = next((f"{name} of {path}", user) for (path, name), user in self.seen.outside[key].items())
                wrong[key] = f"{name} is read outside of it, by {user}"
        for unit in self.units:
            chosen = self._chosen(unit, ways, size, wrong, partial, taken)
            if unit in self.seen.calls:
                right |= chosen
        self._owned_alone(partial, wrong)
        right = {key: pair for key, pair in right.items() if key not in wrong}
        packed = [each[0] for key, each in ways.items() if each[0].kind == "module" and key not in wrong]
        kept = frozenset(name for name, keys in partial.items() if keys & right.keys())
        fit = [pair for pair in right.values() if _divides(pair, size)]
        return Verdict(right, wrong, kept, frozenset(taken), self._positions([*fit, *packed], size))

    def _ways(self, pair: Pair, size: int) -> list[Pair]:
        """To split `pair`, without those that change what somebody else reads."""
        if pair.kind == "module":
            return [pair]
        packed = [pair, *self.plan.ways.get(pair.rows[0], ())[1:]]
        read = self.seen.outside.get(pair.rows[0], {}).keys()
        return [way for way in ways_of(self.model, packed, size, self.seen.reads) if not _changed(way) & read]

    def _chosen(
        self, unit: str, ways: Mapping[str, Sequence[Pair]], size: int, wrong: dict[str, str],
        partial: dict[str, set[str]], taken: set[str],
    ) -> dict[str, Pair]:  # fmt: skip
        """Of each pair in `unit` the first way that fits, in all calls; notes why there is none, and what they use."""
        inner = {key: each for key, each in ways.items() if inside(each[0].owner, unit)}
        packed = {key: each[0] for key, each in inner.items() if each[0].kind == "module"}
        tried = dict.fromkeys((key for key, each in inner.items() if each[0].kind != "module"), 0)
        why: dict[str, str] = {}
        while True:
            chosen = {key: inner[key][number] for key, number in tried.items()}
            found = []
            for call in self.seen.calls.get(unit, ()):
                found.append(self._of(unit, [*chosen.values(), *packed.values()], call, size, sequence=False))
                if found[-1].wrong:
                    break
            if not found or not found[-1].wrong:
                break
            blamed = {under(unit, key): reason for key, reason in found[-1].wrong.items()}
            for key, reason in blamed.items():
                why.setdefault(key, reason)
            # Where several are blamed for one, who has been split in the most ways is it, more likely than not.
            most = max(len(inner[key]) for key in blamed)
            more = [key for key in blamed if tried.get(key, 0) + 1 < len(inner[key])]
            for key in more or [key for key in blamed if len(inner[key]) == most]:
                tried[key] = tried.get(key, 0) + 1
                if tried[key] == len(inner[key]):
                    del tried[key]
                    packed.pop(key, None)
                    wrong[key] = why[key]
        for each in found:
            taken.update(under(unit, path) for path in each.taken)
            for name, keys in each.partial.items():
                partial.setdefault(under(unit, name), set()).update(under(unit, key) for key in keys)
        return chosen

    def _positions(self, pairs: Sequence[Pair], size: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for chain in chains(self.model, replace(self.plan, pairs=tuple(pairs))):
            for block, _ in chain.blocks:
                here = [pair for pair in pairs if inside(pair.owner, block)]
                if all(pair.kind == "mlp" for pair in here):
                    continue  # its attention is not split, which is said already
                found[block] = "" if block in self.seen.calls else "the example does not reach it"
                for call in self.seen.calls.get(block, ()):
                    if wrong := self._of(block, here, call, size, sequence=True).wrong:
                        found[block] = next(iter(wrong.values()))
        return found

    def _owned_alone(self, partial: Mapping[str, set[str]], wrong: dict[str, str]) -> None:
        """A gradient that is a sum over the ranks must be so wherever the parameter is used."""
        names: dict[int, list[str]] = {}
        for path, part in self.model.named_modules():
            for attribute, param in part._parameters.items():
                names.setdefault(id(param), []).append(under(path, attribute))
        for every in names.values():
            claimed = [name for name in every if name in partial]
            elsewhere = len(claimed) < len(every) or any(name in self.seen.loose for name in every)
            cut = any(inside(name, path) for name in every for path in self.plan.singles)
            if claimed and (elsewhere or cut):
                for key in (key for name in claimed for key in partial[name]):
                    wrong.setdefault(key, f"parameter {claimed[0]} is used between its maps, and elsewhere")

    def _of(self, path: str, pairs: Sequence[Pair], call: Call, size: int, *, sequence: bool) -> _Found:
        """What a run in parts shows of `pairs`, all within the module at `path`."""
        module = self.model.get_submodule(path)
        own = tuple(relative(pair, path) for pair in pairs)
        reads = {relative_path(p, path): names for p, names in self.seen.reads.items() if inside(p, path)}
        hidden = frozenset(self.seen.hidden.get(path, ()))
        kind = (size, sequence, repr(own), hidden, kind_of(module, reads, call))
        if kind not in self._known:
            self._known[kind] = self._found(module, own, call, size, sequence, hidden)
        return self._known[kind]

    def _found(
        self, module: nn.Module, pairs: tuple[Pair, ...], call: Call, size: int, sequence: bool, hidden: frozenset[int]
    ) -> _Found:
        if not any(pair.kind != "module" for pair in pairs) and not (sequence and pairs):
            return _Found()
        unit = Unit(module, pairs, call, size, sequence, {}, self.placeholders, hidden)
        try:
            gradients = _rehearsed(unit)
        except Differs as differs:
            bad = {key for key in differs.keys if key in unit.keys} or set(unit.keys)
            return _Found(dict.fromkeys(bad, str(differs)))
        return _Found() if gradients is None else _Found({}, gradients.partial, gradients.taken)


def _changed(pair: Pair) -> set[tuple[str, str]]:
    """(module, attribute) that a split changes."""
    counts = [count.rpartition(":") for count in pair.counts if count not in of_configs(pair.counts)]
    changed = {(under(pair.owner, path), name) for path, _, name in counts}
    changed |= {(path, name) for path in pair.columns for name in ("out_features", "nf")}
    return changed | {(path, name) for path in pair.rows for name in ("in_features", "nx")}


def _rehearsed(unit: Unit) -> Gradients | None:
    """The runs of a unit; None in evaluation, which has no backward. Raises Differs where a part does not fit."""
    device = next((p.device for p in unit.module.parameters()), torch.device("cpu"))
    error: Exception | None = None
    for dtype in _dtypes(unit):
        draw = _numbers()
        try:
            given = replace(unit, values=_values(unit, draw, dtype))
            whole = _whole(given, draw, dtype)
        except Differs:
            raise
        except Exception as failed:  # kernels that know no float64
            error = failed
            continue
        try:
            return _compared(given, whole, draw, dtype)
        except Differs:
            raise
        except Exception as failed:  # a part that is computed again in the backward pass, past what is put around it
            why = f"a part of it fails in the backward pass: {type(failed).__name__}: {str(failed).strip()[:150]}"
            raise Differs(unit.keys, why) from failed
    keys, text = unit.keys, str(error).strip()[:150]
    raise Differs(keys, f"it cannot be run by itself on {device}: {type(error).__name__}: {text}")


@cache
def _numbers() -> Tensor:
    """As many as a prime, so that neither features nor heads nor positions get the same ones."""
    return torch.randn(65521, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _whole(unit: Unit, draw: Tensor, dtype: torch.dtype, *, uneven: bool = False) -> Run:
    for noise in (True, False):
        with torch.set_grad_enabled(unit.call.training and not uneven):
            run = Run(unit, draw, dtype=dtype, uneven=uneven, noise=noise)
        rows = [point for point in run.points if point.what == "row"]
        if uneven or all(bool(point.given[0].isfinite().all()) for point in rows):
            break
    for point in rows:
        x = point.given[0].detach()
        if not uneven and not bool(x.isfinite().all() and (x != x.flatten()[:1]).any()):
            raise Differs(point.pair.rows, "on drawn numbers, what goes through it is not finite, or all the same")
    silent = [pair.rows[0] for pair in unit.pairs if not any(point.pair is pair for point in run.points)]
    if silent and not uneven:
        raise Differs(silent, "its maps are not called")
    return run


def _compared(unit: Unit, whole: Run, draw: Tensor, dtype: torch.dtype) -> Gradients | None:
    gradients = None
    with torch.set_grad_enabled(unit.call.training):
        if unit.call.training:
            gradients = Gradients(whole)
        for index in range(unit.size):
            part = Run(unit, draw, index=index, truth=whole, dtype=dtype)
            if gradients is not None:
                gradients.add(part)
    if gradients is None:
        return None
    gradients.finish()
    if not unit.sequence:
        with torch.no_grad():
            # Thresholds that numbers of one size do not reach.
            other = _whole(unit, draw, dtype, uneven=True)
            for index in range(unit.size):
                Run(unit, draw, index=index, truth=other, dtype=dtype, uneven=True)
    return gradients


def _values(unit: Unit, draw: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the parameters beside the maps: around those of the model, none of them zero or alike."""
    beside, found, number = _beside(unit), {}, 0
    if sum(p.numel() for p in beside.values()) > _LARGE:
        return beside
    for name, p in beside.items():
        if p.is_floating_point():
            noise = draw.repeat(p.numel() // len(draw) + 2)[number % len(draw) :][: p.numel()].view(p.shape)
            number += p.numel()
            p = p.to(dtype) + noise.to(p.device, dtype) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.2)
        found[name] = p
    return found


def _beside(unit: Unit) -> dict[str, Tensor]:
    maps = tuple(f"{path}." for pair in unit.pairs for path in (*pair.columns, *pair.rows))
    maps += tuple(f"{pair.owner}." if pair.owner else "" for pair in unit.pairs if pair.kind == "module")
    return {name: p.detach() for name, p in unit.module.named_parameters() if not name.startswith(maps)}


def _dtypes(unit: Unit) -> list[torch.dtype]:
    """To be tried one after the other: kernels may know some of them only."""
    own = next((p.dtype for p in unit.module.parameters() if p.is_floating_point()), torch.float32)
    if sum(p.numel() for p in _beside(unit).values()) > _LARGE:
        return [own]
    given = (leaf.value.numel() for leaf in pytree.tree_leaves((unit.call.args, unit.call.kwargs)) if _is_given(leaf))
    first = torch.float32 if max(given, default=0) > _LARGE // 4 else torch.float64
    return list(dict.fromkeys((first, own)))


def _is_given(leaf: Any) -> bool:
    return isinstance(leaf, Given) and leaf.hangs


def _divides(pair: Pair, size: int) -> bool:
    return pair.heads is None or (pair.heads.heads % size == 0 and pair.heads.kv_heads % size == 0)
