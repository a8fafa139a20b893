"""Advice on what to write instead of a loss that is no mean over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from nbkit.rank.loss.row_trial import Measured

_COUNTED = "(loss.sum(), mask.sum())"
_WHOLE = "a contrastive loss, or another that compares rows, needs whole batches: strategy='tp', no microbatch_size="

_HINTS = {
    "sum": "divide it by the rows of the whole batch: return loss.sum(), len(target)",
    "weights": f"return the sum and what it is divided by, {_COUNTED}, as in "
    "F.cross_entropy(logits, target, reduction='sum'), (target != -100).sum()   "
    "(with weight=w: w[target].sum())",
    "rows": f"where a mask or a count divides, return {_COUNTED}; {_WHOLE}",
    "pairs": "sum and weight must add up over rows: return (loss * mask).sum(), mask.sum()",
    "inside": f"compute it from the model's output, as a sum and what it is divided by: {_COUNTED}; {_WHOLE}; a "
    "load-balancing term trains, with a warning, where the output names it: output.aux_loss, or output['aux_loss']",
}


def advice(kind: str, seen: Measured, batch: Any, inputs: Sequence[str] | None) -> str:
    """For a defect of this kind (see mean_over_rows.Defect; "inside" the model). seen: what came of `batch`."""
    line = _labels_line(seen, batch, inputs or ()) if kind == "inside" else ""
    return line or _HINTS[kind]


def _labels_line(seen: Measured, batch: Any, inputs: Sequence[str]) -> str:
    """The line that gives as (sum, weight) the mean that a HF model makes of its labels; "" of another loss."""
    logits = seen.tensors.get("logits")
    if logits is None or logits.ndim != 3 or not isinstance(batch, Mapping):
        return ""
    mean = seen.without_auxiliary()[0] / seen.weight
    found: list[tuple[float, str, bool]] = []
    for key in inputs:
        labels = batch[key]
        if isinstance(labels, Tensor) and labels.shape == logits.shape[:2] and not labels.is_floating_point():
            # Causal models shift their labels, masked ones do not.
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
