"""Prove candidates of a plan: run each one in parts, in one process, and compare it with the whole.

The model runs once in each mode while `CapturedCalls` watches. Then every module that contains a pair runs separately,
whole and in parts, with the arguments of its calls. Of several calls of the same kind (`kind_of`: classes, attributes
that are read, shapes), only one is run. Blocks whose positions may be split run once more with split positions. A
candidate that does not match stays whole.

The backward pass is compared too. Each run is cut into pieces at the maps (shard_run.py), and each piece is
differentiated separately, with one set of random cotangents. The gradients of a piece must be as follows, or the split
is refused.
piece                        column map outputs   attention arguments   parameters   the rest
up to a row map (region)     slices               sums                  sums         none
the rest, positions whole    none                 equal on all ranks    equal        equal
the rest, positions split    none                 sums                  sums         slices
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.module.copies import placeholder
from nbkit.rank.parallel.proof.observe import gradients, key_of, nodes_behind, unlike
from nbkit.rank.parallel.proof.unchanged import set_evaluation, thaw, unchanged
from nbkit.rank.parallel.tensor.plan.choose_plan import candidates
from nbkit.rank.parallel.tensor.plan.flow_plan import ways_of
from nbkit.rank.parallel.tensor.plan.plan import Pair, TensorPlan, of_configs
from nbkit.rank.parallel.tensor.proof.capture import (
    BlockInput,
    CallArguments,
    CapturedCalls,
    data_flow,
    inside,
    relative,
    relative_path,
    under,
)
from nbkit.rank.parallel.tensor.proof.shard_run import Differs, PairUnit, UnitRun
from nbkit.rank.parallel.tensor.proof.verdict import Proof, SplitVerdict
from nbkit.rank.parallel.tensor.sequence_parallel import chains
from nbkit.rank.torch_private import pytree

Leaf = tuple[str, int | str, int]
"""(kind; number of the point or input, or name of the parameter; number among its leaves)."""

Exit = tuple[Tensor, Tensor]
"""A tensor that leaves a piece, and its cotangent."""


@dataclass
class Gradients:
    """Gradients of the whole run, with which the gradients of the parts are compared.

    partial: parameter whose gradient is a sum over the ranks while positions are whole -> row maps of the pairs that
    use it. taken: attentions whose arguments get gradients from between their maps. These gradients are sums.
    """

    whole: UnitRun
    partial: dict[str, set[str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        run = self.whole
        self.leaves = _leaves(run)
        for point in run.points:
            point.cotangents = tuple(run.drawn(x.shape, x) for x in point.given)
        main = run.outputs[run.main] if run.main is not None and run.main < len(run.outputs) else None
        self.of_output = run.drawn(main.shape, main) if isinstance(main, Tensor) else None
        self.regions = {
            number: _gradients([(point.given[0], point.cotangents[0])], self.leaves)
            for number, point in enumerate(run.points)
            if point.what == "row"
        }
        self._known(run)
        self.sums: dict[tuple[int, Leaf], Tensor] = {}
        if run.unit.sequence:
            self.rest = _gradients(self._rest(run), self.leaves)
            self._check_positions()
        else:
            self.rest = {}
            self._check_features()

    def add(self, part: UnitRun) -> None:
        """Add one part: compare the gradients that are slices, and add up the gradients that are sums."""
        leaves = _leaves(part)
        for number, expected in self.regions.items():
            point, pair = part.points[number], part.points[number].pair
            cotangent = part.of_features(self.whole.points[number].cotangents[0], (pair.inner,))
            found = _gradients([(point.given[0], cotangent)], leaves)
            self._compare(part, number, found, expected, pair.rows)
        if part.unit.sequence:
            found = _gradients(self._rest(part), leaves)
            self._compare(part, -1, found, self.rest, part.unit.keys)

    def finish(self) -> None:
        """Compare the sums over all parts with the gradients of the whole. Raises Differs."""
        for (number, leaf), total in self.sums.items():
            expected = (self.rest if number < 0 else self.regions[number])[leaf]
            assert expected is not None
            if why := unlike(total, expected, least=1.0):
                keys = self.whole.unit.keys if number < 0 else self.whole.points[number].pair.rows
                raise Differs(keys, f"the gradient of {self._named(leaf)} is not the sum over the parts: {why}")

    def _compare(
        self, part: UnitRun, number: int, found: dict[Leaf, Tensor | None], expected: dict[Leaf, Tensor | None],
        keys: Sequence[str],
    ) -> None:  # fmt: skip
        for leaf, gradient in found.items():
            whole = expected[leaf]
            if (gradient is None) != (whole is None):
                raise Differs(keys, f"the gradient of {self._named(leaf)} takes another path in a part")
            if gradient is None or whole is None:
                continue
            what, where, _ = leaf
            if what == "column":
                point = part.points[int(where)]
                slice_ = part.of_features(whole, point.pair.widths[point.path])
            elif number < 0 and what in ("row", "module", "input"):
                slice_ = part.of_positions(whole)
            else:
                self.sums[number, leaf] = self.sums.get((number, leaf), 0) + gradient
                continue
            if why := unlike(gradient, slice_, least=1.0):
                raise Differs(keys, f"the gradient of {self._named(leaf)} differs in a part: {why}")

    def _check_features(self) -> None:
        """Check, with whole positions, what a region uses besides the outputs of its column maps."""
        run = self.whole
        dependent = _gradients(self._exits(run), self.leaves)
        for number, found in self.regions.items():
            keys = run.points[number].pair.rows
            for leaf in (leaf for leaf, gradient in found.items() if gradient is not None):
                what, where, at = leaf
                if what == "column":
                    continue
                if what == "attention" and at != run.points[int(where)].first:
                    self.taken.add(run.points[int(where)].path)
                elif what == "param":
                    self.partial.setdefault(str(where), set()).update(keys)
                else:
                    raise Differs(keys, f"it also uses {self._named(leaf)} between its linear layers")
                if dependent[leaf] is not None:
                    raise Differs(keys, f"it uses {self._named(leaf)} both between its linear layers and elsewhere")
        for leaf, gradient in dependent.items():
            if leaf[0] == "column" and gradient is not None:
                pair = run.points[int(leaf[1])].pair
                raise Differs(pair.rows, "a value between its linear layers does not pass only through the last one")

    def _check_positions(self) -> None:
        """Check, with split positions, that nothing bypasses the maps."""
        run, keys = self.whole, self.whole.unit.keys
        for found in (*self.regions.values(), self.rest):
            for leaf, gradient in found.items():
                beside = leaf[0] == "input" and leaf[1] != run.hidden_input
                through = leaf[0] in ("row", "module") and found is not self.rest
                if gradient is not None and (beside or through or (leaf[0] == "column" and found is self.rest)):
                    raise Differs(keys, f"it uses {self._named(leaf)} outside of its linear layers")
        for leaf, gradient in _gradients(self._shared(run), self.leaves).items():
            if gradient is not None and not (leaf[0] == "input" and leaf[1] != run.hidden_input):
                raise Differs(keys, f"{self._named(leaf)} enters an attention in addition to the hidden states")

    def _exits(self, run: UnitRun) -> list[Exit]:
        """Return the exits outside of the regions, except those that are inputs of a column map directly."""
        found = [(x, c) for p in run.points if p.what != "row" and not p.direct
                 for x, c in zip(p.given, p.cotangents, strict=True)]  # fmt: skip
        shown = [x for i, x in enumerate(run.outputs) if isinstance(x, Tensor) and i not in run.unit.hidden]
        return found + [(x, torch.ones_like(x)) for x in shown]

    def _rest(self, run: UnitRun) -> list[Exit]:
        """Return, with split positions, the exits that are slices of the positions or terms of a sum."""
        found: list[Exit] = []
        for point, whole in zip(run.points, self.whole.points, strict=True):
            if point.what == "column" and point.pair.kind == "attention":
                # Every rank has the whole tensor and a part of its gradient.
                share = 1 if run.index is None else run.unit.size
                found.append((point.given[0], whole.cotangents[0] / share))
            elif point.what != "row":
                first = point.first if point.what == "attention" else 0
                if first is not None:
                    cotangent = whole.cotangents[first]
                    found.append((point.given[first], self._of_positions(run, cotangent)))
        if self.of_output is not None and run.main is not None:
            found.append((run.outputs[run.main], self._of_positions(run, self.of_output)))
        return found

    def _shared(self, run: UnitRun) -> list[Exit]:
        """Return, with split positions, the exits that are whole on every rank."""
        found: list[Exit] = []
        for point in run.points:
            if point.what in ("attention", "module"):
                first = point.first if point.what == "attention" else 0
                found += [
                    (x, c) for i, (x, c) in enumerate(zip(point.given, point.cotangents, strict=True)) if i != first
                ]
        shown = [x for i, x in enumerate(run.outputs) if isinstance(x, Tensor) and i not in run.unit.hidden]
        return found + [(x, torch.ones_like(x)) for i, x in enumerate(shown) if i != run.main]

    def _of_positions(self, run: UnitRun, x: Tensor) -> Tensor:
        return x if run.index is None else run.of_positions(x)

    def _named(self, leaf: Leaf) -> str:
        what, where, _ = leaf
        if what == "param":
            return f"parameter {where}"
        return "its input" if what == "input" else f"what goes through {self.whole.points[int(where)].path or 'it'}"

    def _known(self, run: UnitRun) -> None:
        """Raise Differs if a region uses a trained tensor that is not a parameter of the unit."""
        ours = {id(leaf) for leaf in self.leaves.values()}
        for point in run.points:
            exits = point.given if point.what == "row" or run.unit.sequence else ()
            for learned in _learned(exits):
                if id(learned) not in ours:
                    raise Differs(
                        point.pair.rows, f"it uses a parameter {tuple(learned.shape)} that belongs to another module"
                    )


def _leaves(run: UnitRun) -> dict[Leaf, Tensor]:
    found: dict[Leaf, Tensor] = {}
    for number, point in enumerate(run.points):
        found |= {(point.what, number, i): leaf for i, leaf in enumerate(point.leaves) if leaf.requires_grad}
    found |= {("input", number, 0): leaf for number, leaf in enumerate(run.inputs)}
    return found | {("param", name, 0): p for name, p in run.params.items() if p.requires_grad}


def _gradients(exits: Sequence[Exit], leaves: dict[Leaf, Tensor]) -> dict[Leaf, Tensor | None]:
    """Return the gradients of the sum of all exits times their cotangents, or None for unused leaves."""
    found = gradients([x for x, _ in exits], list(leaves.values()), [cotangent for _, cotangent in exits])
    return dict(zip(leaves, found, strict=True))


def _learned(exits: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of the graphs that lead to `exits`."""
    exits = list(exits)
    behind = (getattr(node, "variable", None) for node in nodes_behind(exits))
    return [x for x in exits if x.requires_grad and x.grad_fn is None] + [x for x in behind if x is not None]


def kind_of(module: nn.Module, reads: Mapping[str, Collection[str]], call: CallArguments) -> Hashable:
    """Return a key that is equal for two calls if it is enough to run one of them.

    reads: path of a module inside -> its attributes that are read.
    """
    parts = []
    for path, part in module.named_modules():
        own = tuple((name, key_of(vars(part).get(name))) for name in sorted(reads.get(path, ())))
        params = tuple((name, None if p is None else tuple(p.shape)) for name, p in part._parameters.items())
        buffers = tuple((name, key_of(buffer)) for name, buffer in part._buffers.items())
        hooks = tuple(map(id, (*part._forward_hooks.values(), *part._forward_pre_hooks.values())))
        opaque = id(part) if isinstance(part, torch.jit.ScriptModule) else None
        parts.append((path, type(part), part.training, own, params, buffers, hooks, opaque))
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    places: dict[int, int] = {}
    given = tuple(
        (tuple(leaf.value.shape), leaf.value.dtype, leaf.hangs, places.setdefault(id(leaf), number))
        if isinstance(leaf, BlockInput)
        else key_of(leaf)
        for number, leaf in enumerate(leaves)
    )
    return tuple(parts), given, str(spec), call.training


_LARGE = 1 << 26
"""If a module has more parameters than this besides its maps, it is run with the model's values in their own dtype.

If its inputs have more than a quarter as many numbers, it is run in float32.
"""


def prove(
    model: nn.Module,
    call: Callable[[], Any],
    sizes: Sequence[int],
    tp_plan: Mapping[str, str] | None = None,
    *,
    brief: Callable[[], Any] | None = None,
) -> Proof:
    """Return which splits of `model` into `sizes` parts are correct. call: runs the whole model once, on real rows.

    brief: does the same operations on a few positions of these rows. If all candidates are correct there, `call` is not
    run. Parameters, buffers, modes and random generators are restored. Errors are reported in the result.
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
    except StrategyError as error:  # an error in the plan itself, which is raised when the plan is made
        return Proof(why=str(error))
    except Exception as error:
        return Proof(why=f"the model fails with the example batch: {type(error).__name__}: {str(error)[:200]}")


@dataclass(frozen=True)
class _Found:
    """Results for one kind of unit, with paths relative to it. The fields are as in SplitVerdict and Gradients."""

    wrong: dict[str, str] = field(default_factory=dict)
    partial: dict[str, set[str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)


class _Prover:
    def __init__(self, model: nn.Module, call: Callable[[], Any], plan: TensorPlan) -> None:
        self.model, self.plan = model, plan
        self.seen = CapturedCalls(model, plan)
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

    def verdict(self, size: int) -> SplitVerdict:
        """Return the verdict on splits into `size` parts."""
        wrong, taken, right = dict(self.seen.refused), set[str](), dict[str, Pair]()
        partial: dict[str, set[str]] = {}
        ways: dict[str, list[Pair]] = {}
        for pair in self.plan.pairs:
            key = pair.rows[0]
            # A pair that does not divide is refused later, when the plan is made, with the numbers.
            if key not in wrong and not _divides(pair, size):
                right[key] = pair
            elif key not in wrong and (found := self._ways(pair, size)):
                ways[key] = found
            elif key not in wrong:
                name, user = next((f"{name} of {path}", user) for (path, name), user in self.seen.outside[key].items())
                wrong[key] = f"{user} reads {name} from outside"
        for unit in self.units:
            chosen = self._chosen(unit, ways, size, wrong, partial, taken)
            if unit in self.seen.calls:
                right |= chosen
        self._owned_alone(partial, wrong)
        right = {key: pair for key, pair in right.items() if key not in wrong}
        packed = [each[0] for key, each in ways.items() if each[0].kind == "module" and key not in wrong]
        kept = frozenset(name for name, keys in partial.items() if keys & right.keys())
        fit = [pair for pair in right.values() if _divides(pair, size)]
        return SplitVerdict(right, wrong, kept, frozenset(taken), self._positions([*fit, *packed], size))

    def _ways(self, pair: Pair, size: int) -> list[Pair]:
        """Return the ways to split `pair` that change no attribute that is read from outside."""
        if pair.kind == "module":
            return [pair]
        packed = [pair, *self.plan.ways.get(pair.rows[0], ())[1:]]
        read = self.seen.outside.get(pair.rows[0], {}).keys()
        return [way for way in ways_of(self.model, packed, size, self.seen.reads) if not _changed(way) & read]

    def _chosen(
        self, unit: str, ways: Mapping[str, Sequence[Pair]], size: int, wrong: dict[str, str],
        partial: dict[str, set[str]], taken: set[str],
    ) -> dict[str, Pair]:  # fmt: skip
        """Return for each pair in `unit` the first way that is correct in all calls.

        Add to `wrong` why no way is correct, and to `partial` and `taken` what the chosen ways use.
        """
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
            # If several pairs are blamed, the one with the most ways is the likely cause.
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
                    continue  # its attention is not split, which was reported already
                found[block] = "" if block in self.seen.calls else "the example batch does not reach it"
                for call in self.seen.calls.get(block, ()):
                    if wrong := self._of(block, here, call, size, sequence=True).wrong:
                        found[block] = next(iter(wrong.values()))
        return found

    def _owned_alone(self, partial: Mapping[str, set[str]], wrong: dict[str, str]) -> None:
        """Refuse pairs that use a parameter between their maps if it is also used elsewhere, or is split."""
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
                    wrong.setdefault(
                        key, f"the parameter {claimed[0]} is used both between its linear layers and elsewhere"
                    )

    def _of(self, path: str, pairs: Sequence[Pair], call: CallArguments, size: int, *, sequence: bool) -> _Found:
        """Return what a run in parts shows about `pairs`, which are all inside the module at `path`."""
        module = self.model.get_submodule(path)
        own = tuple(relative(pair, path) for pair in pairs)
        reads = {relative_path(p, path): names for p, names in self.seen.reads.items() if inside(p, path)}
        hidden = frozenset(self.seen.hidden.get(path, ()))
        kind = (size, sequence, repr(own), hidden, kind_of(module, reads, call))
        if kind not in self._known:
            self._known[kind] = self._found(module, own, call, size, sequence, hidden)
        return self._known[kind]

    def _found(
        self,
        module: nn.Module,
        pairs: tuple[Pair, ...],
        call: CallArguments,
        size: int,
        sequence: bool,
        hidden: frozenset[int],
    ) -> _Found:
        if not any(pair.kind != "module" for pair in pairs) and not (sequence and pairs):
            return _Found()
        unit = PairUnit(module, pairs, call, size, sequence, {}, self.placeholders, hidden)
        try:
            gradients = _rehearsed(unit)
        except Differs as differs:
            bad = {key for key in differs.keys if key in unit.keys} or set(unit.keys)
            return _Found(dict.fromkeys(bad, str(differs)))
        return _Found() if gradients is None else _Found({}, gradients.partial, gradients.taken)


def _changed(pair: Pair) -> set[tuple[str, str]]:
    """Return each (module, attribute) that a split changes."""
    counts = [count.rpartition(":") for count in pair.counts if count not in of_configs(pair.counts)]
    changed = {(under(pair.owner, path), name) for path, _, name in counts}
    changed |= {(path, name) for path in pair.columns for name in ("out_features", "nf")}
    return changed | {(path, name) for path in pair.rows for name in ("in_features", "nx")}


def _rehearsed(unit: PairUnit) -> Gradients | None:
    """Run a unit whole and in parts. Return its gradients, or None in evaluation. Raises Differs if a part differs."""
    device = next((p.device for p in unit.module.parameters()), torch.device("cpu"))
    error: Exception | None = None
    for dtype in _dtypes(unit):
        draw = _numbers()
        try:
            given = replace(unit, values=_values(unit, draw, dtype))
            whole = _whole(given, draw, dtype)
        except Differs:
            raise
        except Exception as failed:  # for example, kernels without float64
            error = failed
            continue
        try:
            return _compared(given, whole, draw, dtype)
        except Differs:
            raise
        except Exception as failed:  # for example, a part that backward recomputes without the wrappers
            why = f"a part of it fails in the backward pass: {type(failed).__name__}: {str(failed).strip()[:150]}"
            raise Differs(unit.keys, why) from failed
    keys, text = unit.keys, str(error).strip()[:150]
    raise Differs(keys, f"it cannot be run by itself on {device}: {type(error).__name__}: {text}")


@cache
def _numbers() -> Tensor:
    """Return random numbers. Their count is a prime, so that they do not repeat along features, heads or positions."""
    return torch.randn(65521, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _whole(unit: PairUnit, draw: Tensor, dtype: torch.dtype, *, uneven: bool = False) -> UnitRun:
    for noise in (True, False):
        with torch.set_grad_enabled(unit.call.training and not uneven):
            run = UnitRun(unit, draw, dtype=dtype, uneven=uneven, noise=noise)
        rows = [point for point in run.points if point.what == "row"]
        if uneven or all(bool(point.given[0].isfinite().all()) for point in rows):
            break
    for point in rows:
        x = point.given[0].detach()
        if not uneven and not bool(x.isfinite().all() and (x != x.flatten()[:1]).any()):
            raise Differs(point.pair.rows, "with random inputs, its values are not finite, or are all equal")
    silent = [pair.rows[0] for pair in unit.pairs if not any(point.pair is pair for point in run.points)]
    if silent and not uneven:
        raise Differs(silent, "it does not call its linear layers")
    return run


def _compared(unit: PairUnit, whole: UnitRun, draw: Tensor, dtype: torch.dtype) -> Gradients | None:
    gradients = None
    with torch.set_grad_enabled(unit.call.training):
        if unit.call.training:
            gradients = Gradients(whole)
        for index in range(unit.size):
            part = UnitRun(unit, draw, index=index, truth=whole, dtype=dtype)
            if gradients is not None:
                gradients.add(part)
    if gradients is None:
        return None
    gradients.finish()
    if not unit.sequence:
        with torch.no_grad():
            # Numbers of one magnitude do not reach all thresholds in the code.
            other = _whole(unit, draw, dtype, uneven=True)
            for index in range(unit.size):
                UnitRun(unit, draw, index=index, truth=other, dtype=dtype, uneven=True)
    return gradients


def _values(unit: PairUnit, draw: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return values for the parameters besides the maps: the model's values plus noise, so none are zero or equal."""
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


def _beside(unit: PairUnit) -> dict[str, Tensor]:
    maps = tuple(f"{path}." for pair in unit.pairs for path in (*pair.columns, *pair.rows))
    maps += tuple(f"{pair.owner}." if pair.owner else "" for pair in unit.pairs if pair.kind == "module")
    return {name: p.detach() for name, p in unit.module.named_parameters() if not name.startswith(maps)}


def _dtypes(unit: PairUnit) -> list[torch.dtype]:
    """Return the dtypes to try in order, because kernels may support only some of them."""
    own = next((p.dtype for p in unit.module.parameters() if p.is_floating_point()), torch.float32)
    if sum(p.numel() for p in _beside(unit).values()) > _LARGE:
        return [own]
    given = (leaf.value.numel() for leaf in pytree.tree_leaves((unit.call.args, unit.call.kwargs)) if _is_given(leaf))
    first = torch.float32 if max(given, default=0) > _LARGE // 4 else torch.float64
    return list(dict.fromkeys((first, own)))


def _is_given(leaf: Any) -> bool:
    return isinstance(leaf, BlockInput) and leaf.hangs


def _divides(pair: Pair, size: int) -> bool:
    return pair.heads is None or (pair.heads.heads % size == 0 and pair.heads.kv_heads % size == 0)
