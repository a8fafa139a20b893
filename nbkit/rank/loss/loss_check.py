"""Finds what couples the rows of a batch, before the first step. It computes the loss of rows together and alone.

Some strategies divide the rows of a batch over several ranks or several forward passes. They are correct if the loss is
a mean over rows or a (sum, weight), and if the model's output for a row does not depend on other rows. There are
exceptions. A contrastive loss compares rows. A mean over unmasked tokens weights rows by their length. In expert-choice
routing, rows compete for experts. All these would train, but with a different result.

A mean cross entropy over the targets that count is first tried as a sum, which each part of a batch divides by the
number of targets in all parts (see counted_targets.py). This is used only if the sums of the parts add up.

There are two checks, both on some rows together and on each row alone:
- The loss function by itself, on outputs of the model (see mean_over_rows.py). This is precise and names the cause.
- Model and loss as in training, value and gradient. This also covers a loss that uses values from inside the model. The
  tolerance depends on how much the model's outputs differ, which depends on the size of the batch.

If a loss is not a mean over rows, `advice` says what to write instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf, isclose, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.rank.data.batch import pair
from nbkit.rank.data.sample_rows import Sample, undrawn
from nbkit.rank.loss.counted_targets import Counted
from nbkit.rank.loss.mean_over_rows import Defect, LossAlone, loss_alone, shown
from nbkit.rank.loss.output_tensors import leaves, with_leaves
from nbkit.rank.loss.row_trial import (
    Auxiliary,
    Counting,
    Measured,
    RowTrial,
    counting,
    differing_pairs,
    disturbed,
    in_double,
    kept,
    spread_rows,
)
from nbkit.rank.loss.row_weights import Loss
from nbkit.rank.parallel.model_facts import Coupled
from nbkit.rank.parallel.module.block_discovery import mixtures
from nbkit.rank.parallel.proof.observe import gap, watched
from nbkit.rank.parallel.proof.short_example import FirstRuns
from nbkit.rank.parallel.proof.unchanged import Draws, DroppingNothing, unchanged
from nbkit.rank.rng.draw_plan import DrawPlan
from nbkit.rank.rng.host_generators import OtherGenerators, seed_others
from nbkit.rank.rng.seeding import set_seed

_COUNTED = "(loss.sum(), mask.sum())"
_WHOLE = (
    "a loss that compares rows, such as a contrastive loss, needs whole batches: strategy='tp', no "
    "nbkit.Compute(microbatch_size=...)"
)

LOSS_HINTS = {
    "sum": "divide it by the rows of the whole batch: return loss.sum(), len(target)",
    "weights": f"return the sum and its divisor, {_COUNTED}, as in F.cross_entropy(logits, target, reduction='sum'), "
    "(target != -100).sum()   (with weight=w: w[target].sum())",
    "rows": f"if a mask or a count is the divisor, return {_COUNTED}; {_WHOLE}",
    "pairs": "sum and weight must add up over rows: return (loss * mask).sum(), mask.sum()",
    "inside": f"compute it from the model's output, as a sum and its divisor: {_COUNTED}; {_WHOLE}; a load-balancing "
    "term is allowed, with a warning, if the output names it: output.aux_loss, or output['aux_loss']",
}
"""Say what to write instead, by the kind of a loss's defect. See `advice`."""


def advice(kind: str, seen: Measured, batch: Any, inputs: Sequence[str] | None) -> str:
    """Return what to write instead of a loss with a defect of this kind.

    kind: see mean_over_rows.Defect, or "inside" for a loss that comes from inside the model. seen: the measured result
    for `batch`.
    """
    line = _labels_line(seen, batch, inputs or ()) if kind == "inside" else ""
    return line or LOSS_HINTS[kind]


def _labels_line(seen: Measured, batch: Any, inputs: Sequence[str]) -> str:
    """Return code that writes a Hugging Face model's mean over labels as (sum, weight); "" for other losses."""
    logits = seen.tensors.get("logits")
    if logits is None or logits.ndim != 3 or not isinstance(batch, Mapping) or callable(inputs):
        return ""
    mean = seen.without_auxiliary()[0] / seen.weight
    found: list[tuple[float, str, bool]] = []
    for key in inputs:
        labels = batch[key]
        if isinstance(labels, Tensor) and labels.shape == logits.shape[:2] and not labels.is_floating_point():
            # Causal models shift their labels, masked language models do not.
            for shift, (scored, target) in enumerate(((logits, labels), (logits[:, :-1], labels[:, 1:]))):
                made = F.cross_entropy(scored.flatten(0, 1).float(), target.flatten().long())
                found.append((abs(float(made) - mean), key, bool(shift)))
    away, key, shifted = min(found, default=(inf, "", False))
    if not away <= 1e-3 * abs(mean):
        return ""
    logits_shown, labels_shown = (f"[:, {cut}]" if shifted else "" for cut in (":-1", "1:"))
    kept = f"(batch[{key!r}]{labels_shown} != -100).sum()"
    terms = [(name, slope / seen.weight) for name, (_, slope, _) in seen.auxiliary.items() if slope]
    added = "".join(f" + {slope:g} * output.{name} * {kept}" for name, slope in terms)
    return (
        f"loss=lambda output, batch: (F.cross_entropy(output.logits{logits_shown}.flatten(0, 1).float(), "
        f"batch[{key!r}]{labels_shown}.flatten(), reduction='sum'){added}, {kept})   ({key!r} may stay out of inputs=)"
    )


class RowPair:
    """A comparison of a run on some rows together with runs on each half of them.

    numbers: the numbers of the rows. whole: the result for all rows. parts: the results for both halves. eps: eps of
    the coarsest dtype. drew: True if the model drew random numbers that are not keyed. lengths: name -> number of
    entries of one row along dim 0, for the output tensors that hold rows.
    """

    def __init__(self, numbers: list[int], whole: Measured, parts: Sequence[Measured], drew: bool) -> None:
        self.numbers, self.whole, self.drew = numbers, whole, drew
        # With a single row, a tensor with one number for each row looks like a scalar.
        self.parts = [replace(part, auxiliary=_of_all(part, whole)) for part in parts]
        self.eps = eps = whole.eps
        self.lengths: dict[str, int] = {}
        self._joined: dict[str, Tensor] = {}
        for name, tensor in whole.tensors.items():
            one, other = (part.tensors.get(name) for part in parts)
            if one is None or other is None or not one.ndim or one.shape != other.shape:
                continue
            joined = torch.cat([one, other])
            # If a row has several entries, their order is unknown. Then the tensor holds rows only if the values agree.
            if joined.shape == tensor.shape and not len(tensor) % whole.rows:
                if len(tensor) == whole.rows or not far(tensor, joined, eps):
                    self.lengths[name], self._joined[name] = len(tensor) // whole.rows, joined

    def mixed(self, used: Collection[str]) -> str:
        """Return figures that show that the tensors `used` of a row depend on other rows; "" if they do not."""
        for name in self.lengths.keys() & used:
            tensor, joined = self.whole.tensors[name], self._joined[name]
            if tensor.is_floating_point() and far(tensor, joined, self.eps):
                away = float((tensor - joined).abs().max())
                return (
                    f"output{f' {name!r}' * bool(name)} differs by {away:.3g}, largest {float(tensor.abs().max()):.3g}"
                )
        return ""

    def differs(self, noise: Callable[[RowPair], float]) -> str:
        """Return figures that show that the loss without its auxiliary terms does not add up over rows; "" if it does.

        noise: returns how much gradients of this model differ for a loss that is known to add up.
        """
        (value, grads), *parts = [measured.without_auxiliary() for measured in (self.whole, *self.parts)]
        numbers = f"{len(self.numbers)} rows " + shown(
            value, self.whole.weight, [(part, m.weight) for (part, _), m in zip(parts, self.parts, strict=True)]
        )
        summed = sum(part for part, _ in parts)
        weight = sum(m.weight for m in self.parts)
        if not isfinite(summed) or not isclose(self.whole.weight, weight, rel_tol=max(1e-6, 8 * self.eps)):
            return numbers
        if abs(value - summed) > self._tolerance(max(abs(value), abs(summed))):
            return numbers
        worst = apart(grads, [each for _, each in parts])
        if worst > max(1e-4 if self.eps > 1e-12 else 1e-8, 16 * self.eps) and worst > 10 * noise(self):
            return f"{numbers}; their gradients differ by {100 * worst:.2g} %"
        return ""

    def unbalanced(self) -> str:
        """Return the auxiliary terms of the loss that are not means over rows, with figures; "" if all are means."""
        found = []
        for name, (term, slope, _) in self.whole.auxiliary.items():
            alone = [part.auxiliary[name][0] for part in self.parts if name in part.auxiliary]
            mean = sum(alone) / max(len(alone), 1)
            if slope and abs(term - mean) > 1e-5 * max(abs(term), abs(mean)):
                found.append(f"{name!r} {term:.6g}, mean of the parts {mean:.6g}")
        return "; ".join(found)

    def _tolerance(self, largest: float) -> float:
        """Return how much the noise in the model's outputs may change a summed loss of this size."""
        noise, felt = 4 * self.eps, 0.0
        for name, joined in self._joined.items():
            tensor = self.whole.tensors[name]
            if tensor.is_floating_point() and tensor.numel():
                away = float((tensor.double() - joined.double()).abs().max())
                own = max(4 * self.eps * float(tensor.abs().max()), away)
                noise, felt = max(noise, own), felt + own * self.whole.slopes.get(name, 0.0)
        # A loss that is not computed from the outputs is treated as a smooth function with its minimum at 0.
        rows, mean = self.whole.weight or 1.0, largest / (self.whole.weight or 1.0)
        bound = rows * (2 * noise + 8 * sqrt(mean) * noise + 8 * noise**2 + 16 * self.eps * mean)
        return max(2 * felt, min(bound, max(2e-3, 2 * self.eps) * largest + 1e-6 * rows))


def _of_all(part: Measured, whole: Measured) -> Auxiliary:
    """Return the auxiliary terms of `part` that are auxiliary terms in `whole` too."""
    return {name: term for name, term in part.auxiliary.items() if name in whole.auxiliary}


def far(one: Tensor, other: Tensor, eps: float) -> bool:
    """Return True if two tensors that should be equal differ in shape, or by more than rounding explains."""
    if one.is_floating_point():
        one, other = one.double(), other.double()
    return gap(one, other) > max(1e-3, 16 * eps)


def apart(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> float:
    """Return the largest relative difference between a parameter's gradient and the sum of the parts' gradients."""
    if not whole or any(len(part) != len(whole) for part in parts):
        return 0.0
    summed = [torch.stack([_doubled(grad) for grad in grads]).sum(0) for grads in zip(*parts, strict=True)]
    norms = [max(float(_doubled(grad).norm()), float(other.norm())) for grad, other in zip(whole, summed, strict=True)]
    # A gradient that is zero except for noise, such as that of a key's bias, is compared to the other gradients.
    floor = 1e-3 * sqrt(sum(norm**2 for norm in norms))
    away = [float((_doubled(grad) - other).norm()) for grad, other in zip(whole, summed, strict=True)]
    found = max(
        (far / max(norm, floor) for far, norm in zip(away, norms, strict=True) if max(norm, floor)), default=0.0
    )
    return found if isfinite(found) else 0.0


def _doubled(tensor: Tensor) -> Tensor:
    """Return the tensor in float64; a complex tensor as its real and imaginary parts."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


_APART = 8  # number of rows that are run together, and each alone
_ROWS, _PAIRS = 16, 3  # number of rows for the loss by itself; number of pairs of rows for the model

_COUNTINGS: tuple[Counting, ...] = ("one", "each", "no")

# (in training mode, with zero parameters moved away from zero). In evaluation mode a model draws less.
_WAYS = ((True, True), (True, False), (False, True), (False, False))


@dataclass(frozen=True)
class Examined:
    """The result of a check. coupled: what couples the rows of a batch; None if nothing does, or if it is unknown.

    counted: set if the loss is proven to be weighted by the targets that count; None if it is weighted by rows. draws:
    the model's own random draws, if they were examined too.
    """

    coupled: Coupled | None = None
    counted: Counted | None = None
    draws: DrawPlan | None = None


@dataclass(frozen=True)
class _Verdict:
    """The result of one trial. known: another trial would not add anything. proven: the loss adds up over rows."""

    coupled: Coupled | None = None
    known: bool = True
    proven: bool = False


def examine(
    module: nn.Module,
    run: Callable[[Any], Any],
    loss: Loss | None,
    sample: Sample,
    inputs: Sequence[str] | None,
    *,
    whole: bool = True,
    draws: DrawPlan | None = None,
    look: FirstRuns | None = None,
) -> Examined:
    """Return what couples the rows of a batch, and how the loss is weighted.

    run: model input -> output of `module`. loss: None examines only the model. whole: True if this rank has the whole
    model, and runs it alone as in training, forward and backward. Otherwise the model is only run forward, in
    evaluation mode. draws: the random draws of `module`. look: the results of the first runs of `module`, if there were
    any. The module and the random generators are unchanged afterwards.
    """
    draws, few = (draws, None) if look is None else (look.draws, look.short)
    short = None if few is None else Sample(few)
    # Ignore errors of model, data or loss here, because training reports them in full.
    with suppress(Exception), undrawn(), unchanged(module), _uncompiled():
        for training, moved in _WAYS if whole else _WAYS[-1:]:
            with suppress(Exception), ExitStack() as around:
                around.enter_context(kept(module, training=training))
                around.enter_context(disturbed(module) if moved else nullcontext())
                last = (training, moved) == _WAYS[-1]
                for how in _COUNTINGS if loss is not None else _COUNTINGS[-1:]:
                    trial = RowTrial(module, run, loss or _linear, inputs, training, whole, how, draws)
                    seen = _verdict(trial, sample, short, loss is None, last)
                    if seen is None:
                        continue
                    if trial.counted is None or seen.proven:
                        if seen.known:
                            return Examined(seen.coupled, trial.counted)
                        break
    return Examined()


def split_by_values(
    module: nn.Module, run: Callable[[Any], Any], sample: Sample, inputs: Sequence[str] | None
) -> Coupled | None:
    """Return what couples rows if a forward pass branches on values of its batch.

    It runs several rows together and each alone. Two rows would not be enough, since both may take the same branch.
    """
    device, rows = next(module.parameters()).device, range(min(sample.rows, _APART))

    def outputs(numbers: Sequence[int]) -> dict[str, Tensor]:
        set_seed(1)
        seed_others(1)
        found = leaves(run(pair(sample.part(numbers, device), inputs)[0]))
        return {name: x for name, x in found.items() if x.is_floating_point() and x.ndim and len(x) == len(numbers)}

    with suppress(Exception), ExitStack() as around:
        for each in (undrawn(), unchanged(module), _uncompiled(), kept(module, training=True), torch.no_grad()):
            around.enter_context(each)
        around.enter_context(DroppingNothing())
        whole, again, alone = outputs(rows), outputs(rows), [outputs([row]) for row in rows]
        for name, tensor in whole.items():
            size = float(tensor.abs().max())
            bound = max(1e-3, 64 * torch.finfo(tensor.dtype).eps) * size
            if float((tensor - again[name]).abs().max()) > bound:
                return None
            away = [float((tensor[row] - alone[row][name][0]).abs().max()) for row in rows]
            if max(away) > bound:
                row = away.index(max(away))
                return Coupled(
                    "The forward pass branches on values of the whole batch, such as its first row or a mean",
                    f"alone, the output of row {row} differs by {away[row]:.3g}, of {size:.3g}",
                    "torch.where with a condition for each row, instead of if; or one rank",
                )
    return None


def _verdict(trial: RowTrial, sample: Sample, short: Sample | None, model_alone: bool, last: bool) -> _Verdict | None:
    """Return the verdict of a trial; None if the model or the loss could not be run."""
    with suppress(Exception):
        return _Look(trial, sample, model_alone, short).verdict(last) if sample.rows > 1 else _Verdict()
    return None


def _uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs eagerly, because it would be recompiled for each number of rows."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _linear(output: Any, _: Any, names: Collection[str] | None = None, size: float = 1.0) -> tuple[Tensor, float]:
    """Return a sum over the model's output tensors (in `names`) with random weights. It adds up over rows."""
    sums = []
    for name, tensor in leaves(output).items():
        if tensor.is_floating_point() and tensor.ndim and (names is None or name in names):
            weights = torch.randn(tensor.shape[1:], generator=torch.Generator().manual_seed(1)).to(tensor)
            sums.append((tensor * weights).sum().double() * size)
    return torch.stack(sums).sum(), 1.0


@dataclass(frozen=True)
class _Looked:
    """The result for pairs of rows. defect: a defect and its pair, or None. weighs: True if some weight is not 0."""

    defect: tuple[Defect, RowPair] | None
    weighs: bool


@dataclass
class _Look:
    trial: RowTrial
    sample: Sample
    model_alone: bool
    short: Sample | None = None  # a few positions of some rows
    _doubled: bool = False

    def verdict(self, last: bool) -> _Verdict:
        """Return the verdict. It is not `known` if the model draws random numbers, or if its loss is not finite.

        Another trial may then succeed. last: True if no trial follows, so the loss is examined by itself.
        """
        pairs, before = differing_pairs(self.sample.batch, self.sample.rows)[:_PAIRS], self._statistics()
        if self.short is not None and self._clears(self.short, pairs[0]):
            return _Verdict(proven=not self.model_alone)
        first = self._pair(pairs[0])
        if first is None:
            return _Verdict(known=False)
        found = self._judged(first, pairs, self._statistics() != before)
        # Without random draws, another run would give the same result.
        if (found.coupled is None and not first.drew) or self._repeats(first):
            return found
        return self._judged(first, pairs, True) if last else _Verdict(known=False)

    def _clears(self, short: Sample, pair: tuple[int, int]) -> bool:
        """Return True if a short check shows that nothing couples rows. False does not mean that there is a defect.

        It checks the model, then model and loss on a few positions of two rows. Then it checks the loss on the model's
        outputs for all positions of a pair of rows that differ.
        """
        before = self._statistics()
        with suppress(Exception):
            few = _Look(replace(self.trial), short, self.model_alone)
            seen = None if mixtures(self.trial.module) else few._pair((0, 1))
            if seen is None or seen.drew or seen.mixed(seen.lengths) or self._statistics() != before:
                return False
            if self.model_alone:
                return True
            if seen.unbalanced() or few._looked([seen], []) != _Looked(None, True):
                return False
            if not _outside(few._loss_alone(seen.numbers, seen.whole, seen.lengths), seen.lengths, seen.whole):
                return False
            whole = self._measured(pair, range(2), backward=False)
            lengths = {name: len(whole.tensors[name]) // 2 for name in seen.lengths}
            alone = self._loss_alone(list(pair), whole, lengths)
            return _outside(alone, lengths, whole) and alone is not None and alone.defect is None
        return False

    def _judged(self, first: RowPair, pairs: Sequence[tuple[int, int]], changes: bool) -> _Verdict:
        """Return the verdict. changes: True if the model's output changes with each run, so only the loss is judged."""
        alone = None if self.model_alone else self._loss_alone(first.numbers, first.whole, first.lengths)
        used = first.lengths.keys() if alone is None else alone.used
        outside = _outside(alone, first.lengths, first.whole)
        if outside and alone is not None and alone.defect is not None:
            return _Verdict(self._by_loss(alone.defect, first))
        # Running statistics couple rows. They are not refused here, because the first step compares them over ranks.
        if changes:
            return _Verdict(proven=outside)
        if mixed := first.mixed(used):
            return _Verdict(self._by_model(first, mixed))
        if self.model_alone:
            return _Verdict()
        looked = self._looked([first], []) if outside else self._looked_inside(pairs)
        if looked.defect is not None:
            return _Verdict(self._by_loss(*looked.defect))
        proven = looked.weighs
        if numbers := first.unbalanced():
            term = Coupled("The model computes an auxiliary loss over all rows of a batch", numbers, "", trains=True)
            return _Verdict(term, proven=proven)
        return _Verdict(proven=proven)

    def _repeats(self, seen: RowPair) -> bool:
        """Return True if another run, with other random numbers, gives the same loss."""
        again = self._measured(seen.numbers, range(len(seen.numbers)), seed=2, backward=False)
        return isclose(again.value, seen.whole.value, rel_tol=8 * again.eps)

    def _looked_inside(self, pairs: Sequence[tuple[int, int]]) -> _Looked:
        """Examine a loss from inside the model, in float64 if the model is small enough and works in float64."""
        if self.trial.backward:
            # A model that does not work in float64 is examined in its own dtype below.
            with suppress(Exception), in_double(self.trial.module):
                self._doubled = True
                try:
                    looked = self._looked([], pairs)
                finally:
                    self._doubled = False
                if looked.weighs:
                    return looked
        return self._looked([], pairs)

    def _looked(self, known: Sequence[RowPair], pairs: Sequence[tuple[int, int]]) -> _Looked:
        weighs = False
        for seen in chain(known, (found for two in pairs if (found := self._pair(two)))):
            weighs |= bool(seen.whole.weight)
            if numbers := seen.differs(self._noise):
                return _Looked((Defect("inside", numbers), seen), weighs)
        return _Looked(None, weighs)

    def _statistics(self) -> list[tuple[int, int]]:
        """Return a value that changes when a forward pass changes a buffer."""
        found = [buffer for buffer in self.trial.module.buffers() if buffer.is_floating_point()]
        return [(id(buffer), buffer._version) for buffer in found]

    def _pair(self, pair: tuple[int, int]) -> RowPair | None:
        """Run two rows together and each alone. If single rows are not possible, run four rows, and two and two."""
        spare = [row for row in range(self.sample.rows) if row not in pair][:2]
        cuts: list[list[list[int]]] = [[[pair[0]], [pair[1]]]]
        if len(spare) == 2:
            cuts.append([[pair[0], spare[0]], [pair[1], spare[1]]])
        for cut in cuts:
            together = cut[0] + cut[1]
            batch, places = self._part(together), range(len(together))
            seed_others(1)  # as the trial does
            others, drawn = OtherGenerators(), list[str]()
            with Draws(drawn):
                whole = self.trial.measure(batch, places)
            drew = bool(drawn or others.changed())
            if not isfinite(whole.value + whole.weight):
                return None
            try:
                half = len(cut[0])
                how: dict[str, Any] = {"of": (batch, 2 * half)}
                parts = [
                    self._measured(cut[0], range(half), **how),
                    self._measured(cut[1], range(half, 2 * half), **how),
                ]
            except Exception:
                continue
            return RowPair(together, whole, parts, drew)
        return None

    def _measured(self, numbers: Sequence[int], places: Sequence[int], **how: Any) -> Measured:
        return self.trial.measure(self._part(numbers), places, **how)

    def _part(self, numbers: Sequence[int]) -> Any:
        part = self.sample.part(numbers, self._device)
        return with_leaves(part, lambda _, x: x.double() if x.is_floating_point() else x) if self._doubled else part

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.trial.module.parameters()), torch.device("cpu"))

    def _loss_alone(self, numbers: list[int], whole: Measured, lengths: Mapping[str, int]) -> LossAlone | None:
        chosen = [*numbers, *spread_rows(self.sample.batch, self.sample.rows, _ROWS)]
        # Other rows may be padded to another length, which does not fit the model's output for these rows.
        chosen = numbers if self.sample.is_padded else list(dict.fromkeys(chosen))[:_ROWS]
        batch = self.sample.part(chosen, self._device)
        trial = self.trial
        notes = partial(counting, trial.counting, trial.counted)
        return loss_alone(trial.loss, whole.output, lengths, batch, len(chosen), trial.inputs, notes)

    def _noise(self, seen: RowPair) -> float:
        """Return the relative difference of gradients for a loss that adds up over rows by construction."""
        half = len(seen.numbers) // 2
        cuts = (range(2 * half), range(half), range(half, 2 * half))
        # The loss is large. So a term that the model adds in its backward pass for any loss is negligible.
        linear = partial(_linear, names=seen.lengths.keys(), size=2.0**20 if seen.eps < 1e-5 else 1.0)
        if not seen.lengths:
            return 0.0
        whole, *parts = [self._measured([seen.numbers[i] for i in cut], cut, loss=linear) for cut in cuts]
        return apart(whole.grads, [part.grads for part in parts])

    def _by_loss(self, defect: Defect, seen: RowPair) -> Coupled:
        batch = self.sample.part(seen.numbers, self._device)
        hint = advice(defect.kind, seen.whole, batch, self.trial.inputs)
        return Coupled("The loss is no mean over rows", defect.numbers, hint)

    def _by_model(self, seen: RowPair, mixed: str) -> Coupled:
        name = self._first_to_mix(seen)
        if self.sample.is_padded:
            return Coupled(
                f"The model mixes the rows of a batch, or reads their padding: the output of {name or 'its forward'} "
                "for one row depends on the other rows",
                numbers=mixed,
                hint="a mask over the padding, also where positions are averaged, or "
                "loading=nbkit.Loading(collate=...) that pads to one length; "
                "statistics of a batch need whole batches: one rank, or strategy='tp', without "
                "nbkit.Compute(microbatch_size=...)",
            )
        if (path := self._time_first(name)) is not None:
            return Coupled(
                f"The model mixes the rows of a batch: {path!r} has batch_first=False, so it uses dim 1 as the rows",
                numbers=mixed,
                hint="batch_first=True; or x.transpose(0, 1) before and after it in the model's forward",
            )
        return Coupled(
            f"The model mixes the rows of a batch: the output of {name or 'its forward'} for one row depends on the "
            "other rows",
            numbers=mixed,
            hint="experts that choose their tokens, or drop them by a capacity, and statistics of a batch need whole "
            "batches: one rank, or strategy='tp', without nbkit.Compute(microbatch_size=...); or let "
            "each token choose (top-k)",
        )

    def _time_first(self, name: str) -> str | None:
        """Return the quoted path of the module with batch_first=False that is or contains `name`; None without one."""
        path = name.strip("'")
        while path:
            if getattr(self.trial.module.get_submodule(path), "batch_first", None) is False:
                return path
            path = path.rpartition(".")[0]
        return None

    def _first_to_mix(self, seen: RowPair) -> str:
        """Return the first, innermost module whose output for a row depends on other rows, while its input does not."""
        found: list[dict[str, list[Tensor]]] = [{}, {}]
        half = len(seen.numbers) // 2
        for passed, count in zip(found, (2 * half, half), strict=True):
            with watched(self.trial.module, leave=partial(_note, passed)):
                self._measured(seen.numbers[:count], range(count), backward=False)
        together, alone = found
        for name, few in alone.items():
            pairs = list(zip(together.get(name, []), few, strict=False))
            if all(len(many) == 2 * len(one) for many, one in pairs):
                if [far(many[: len(one)], one, seen.eps) for many, one in pairs] == [False, True]:
                    return repr(name) if name else ""
        return ""


def _outside(alone: LossAlone | None, lengths: Mapping[str, int], whole: Measured) -> bool:
    """Return True if the loss depends only on outputs that hold rows. For other losses the model must be run."""
    return alone is not None and alone.used <= lengths.keys() | whole.auxiliary.keys()


def _note(passed: dict[str, list[Tensor]], name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    first = [next((t for t in leaves(v).values() if t.ndim), None) for v in ((args, kwargs), output)]
    passed[name] = [tensor.detach() for tensor in first if tensor is not None]
