"""Backward of a split, beside that of the whole: which gradients are slices, which are sums over the ranks.

Each run is cut into pieces at the maps (shard_run.py), and each piece is differentiated alone, with one set of drawn
cotangents. A split takes the gradients of a piece for the following; anything else is refused.

piece                       of what comes from a column map   of an attention's arguments   of parameters   of the rest
up to a row map (region)    slices                            sums                          sums            none
all else, positions whole   none                              the same on every rank        the same        the same
all else, positions split   none                              sums                          sums            slices
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nbkit.rank.parallel.proof.compare import unlike
from nbkit.rank.parallel.proof.graph import gradients, nodes_behind
from nbkit.rank.parallel.tensor.proof.shard_run import Differs, Run

Leaf = tuple[str, int | str, int]
"""(what, number of the point or of the input or name of the parameter, number among its leaves)."""

Exit = tuple[Tensor, Tensor]
"""A tensor that leaves a piece, and its cotangent."""


@dataclass
class Gradients:
    """partial: parameters whose gradients are sums over the ranks while positions are whole -> row maps of the pairs
    that use them. taken: attentions whose arguments get sums of gradients from between their maps."""

    whole: Run
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

    def add(self, part: Run) -> None:
        """The gradients of one part, compared where they are slices, and summed where they are sums."""
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
        """All parts are there: their sums must be what the whole has."""
        for (number, leaf), total in self.sums.items():
            expected = (self.rest if number < 0 else self.regions[number])[leaf]
            assert expected is not None
            if why := unlike(total, expected, least=1.0):
                keys = self.whole.unit.keys if number < 0 else self.whole.points[number].pair.rows
                raise Differs(keys, f"the gradient of {self._named(leaf)} is no sum over the parts: {why}")

    def _compare(
        self, part: Run, number: int, found: dict[Leaf, Tensor | None], expected: dict[Leaf, Tensor | None],
        keys: Sequence[str],
    ) -> None:  # fmt: skip
        for leaf, gradient in found.items():
            whole = expected[leaf]
            if (gradient is None) != (whole is None):
                raise Differs(keys, f"the gradient of {self._named(leaf)} goes another way in a part")
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
        """Positions whole: what a region takes beside its column maps."""
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
                    raise Differs(keys, f"between its maps it uses {self._named(leaf)} too, past them")
                if dependent[leaf] is not None:
                    raise Differs(keys, f"{self._named(leaf)} is used between its maps, and elsewhere in it")
        for leaf, gradient in dependent.items():
            if leaf[0] == "column" and gradient is not None:
                pair = run.points[int(leaf[1])].pair
                raise Differs(pair.rows, "what is computed between its maps does not go through the last one alone")

    def _check_positions(self) -> None:
        """Positions split: what must not be used at all, or in parts only."""
        run, keys = self.whole, self.whole.unit.keys
        for found in (*self.regions.values(), self.rest):
            for leaf, gradient in found.items():
                beside = leaf[0] == "input" and leaf[1] != run.hidden_input
                through = leaf[0] in ("row", "module") and found is not self.rest
                if gradient is not None and (beside or through or (leaf[0] == "column" and found is self.rest)):
                    raise Differs(keys, f"{self._named(leaf)} is used beside the maps")
        for leaf, gradient in _gradients(self._shared(run), self.leaves).items():
            if gradient is not None and not (leaf[0] == "input" and leaf[1] != run.hidden_input):
                raise Differs(keys, f"{self._named(leaf)} goes into an attention beside its hidden states")

    def _exits(self, run: Run) -> list[Exit]:
        """Of everything but the regions, as far as it does not go straight into a column map."""
        found = [(x, c) for p in run.points if p.what != "row" and not p.direct
                 for x, c in zip(p.given, p.cotangents, strict=True)]  # fmt: skip
        shown = [x for i, x in enumerate(run.outputs) if isinstance(x, Tensor) and i not in run.unit.hidden]
        return found + [(x, torch.ones_like(x)) for x in shown]

    def _rest(self, run: Run) -> list[Exit]:
        """Positions split: what leaves in parts, of the positions or of a sum."""
        found: list[Exit] = []
        for point, whole in zip(run.points, self.whole.points, strict=True):
            if point.what == "column" and point.pair.kind == "attention":
                # Every rank has it whole, and a part of its gradient.
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

    def _shared(self, run: Run) -> list[Exit]:
        """Positions split: what every rank gives whole."""
        found: list[Exit] = []
        for point in run.points:
            if point.what in ("attention", "module"):
                first = point.first if point.what == "attention" else 0
                found += [
                    (x, c) for i, (x, c) in enumerate(zip(point.given, point.cotangents, strict=True)) if i != first
                ]
        shown = [x for i, x in enumerate(run.outputs) if isinstance(x, Tensor) and i not in run.unit.hidden]
        return found + [(x, torch.ones_like(x)) for i, x in enumerate(shown) if i != run.main]

    def _of_positions(self, run: Run, x: Tensor) -> Tensor:
        return x if run.index is None else run.of_positions(x)

    def _named(self, leaf: Leaf) -> str:
        what, where, _ = leaf
        if what == "param":
            return f"parameter {where}"
        return "its input" if what == "input" else f"what goes through {self.whole.points[int(where)].path or 'it'}"

    def _known(self, run: Run) -> None:
        """Whatever is learned and goes into a region must be a parameter of the unit."""
        ours = {id(leaf) for leaf in self.leaves.values()}
        for point in run.points:
            exits = point.given if point.what == "row" or run.unit.sequence else ()
            for learned in _learned(exits):
                if id(learned) not in ours:
                    raise Differs(point.pair.rows, f"it uses a parameter {tuple(learned.shape)} that is not its own")


def _leaves(run: Run) -> dict[Leaf, Tensor]:
    found: dict[Leaf, Tensor] = {}
    for number, point in enumerate(run.points):
        found |= {(point.what, number, i): leaf for i, leaf in enumerate(point.leaves) if leaf.requires_grad}
    found |= {("input", number, 0): leaf for number, leaf in enumerate(run.inputs)}
    return found | {("param", name, 0): p for name, p in run.params.items() if p.requires_grad}


def _gradients(exits: Sequence[Exit], leaves: dict[Leaf, Tensor]) -> dict[Leaf, Tensor | None]:
    """Of the sum of all exits times their cotangents; None for what is not used."""
    found = gradients([x for x, _ in exits], list(leaves.values()), [cotangent for _, cotangent in exits])
    return dict(zip(leaves, found, strict=True))


def _learned(exits: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of the graphs behind `exits`."""
    exits = list(exits)
    behind = (getattr(node, "variable", None) for node in nodes_behind(exits))
    return [x for x in exits if x.requires_grad and x.grad_fn is None] + [x for x in behind if x is not None]
