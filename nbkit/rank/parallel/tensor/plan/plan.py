"""The plan of a tensor axis: the modules that are split, and how, found in the module tree or said by somebody.

Sources, the later one deciding: what the tree shows (infer_plan.py), a HF model's own plan, the user's `tp_plan`. A
plan is made of the whole model, before a pipeline drops parts of it, so that all stages agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.module.mixture_of_experts import mixtures, within
from nbkit.rank.parallel.tensor.plan.heads import Heads

ROLES = {
    "colwise": "output features split, first of a pair",
    "packed": "as colwise, for query, key and value (or gate and up) behind one another in one matrix",
    "rowwise": "input features split, last of a pair; summed over the ranks",
    "colwise_gather": "output features split, gathered at once: right for any linear map",
    "rowwise_split": "input features split, of an input that has all: right for any linear map",
    "vocab": "rows of an embedding split",
    "head": "the map to the vocabulary, whose loss is computed in parts",
    "replicate": "left as it is",
}
"""What `tp_plan={'blocks.*.mlp.up': 'colwise'}` may say of a module; * stands for one or several characters."""

_HF = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "packed",
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "rowwise_split_input": "rowwise_split",
    "rowwise_rep": "rowwise_split",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "replicate",
    "replicate": "replicate",
    "replicated": "replicate",
}


@dataclass(frozen=True)
class Pair:
    """Maps that split features and one that joins them, within the module `owner`.

    kind: "attention" (heads), "mlp" (features), or "module" (an nn.MultiheadAttention, whose maps are its own).
    widths: column map -> features of each matrix that is packed in it. inner: features between the maps. counts:
    attributes of the owner, and of what is in it, that a rank divides (heads.py). views: of an attention, whose code
    asks for sizes of all heads, and has to get those of a part. taken: of an attention, whose arguments beside the
    hidden states get gradients from between its maps.
    """

    owner: str
    kind: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    widths: Mapping[str, tuple[int, ...]]
    inner: int
    heads: Heads | None = None
    counts: tuple[str, ...] = ()
    views: bool = False
    taken: bool = True

    @property
    def totals(self) -> tuple[int, ...]:
        """Features of all heads, in the matrices that are packed, and in those that they are packed in."""
        widths = [n for each in self.widths.values() for n in (*each, sum(each))]
        return tuple(dict.fromkeys([self.inner, *widths]))


@dataclass(frozen=True)
class TensorPlan:
    """Pairs; roles of single modules (path -> role); why others stay whole (path -> reason); shown by `describe`.

    partial: parameters that are used between the maps of a pair. positions: blocks -> why their positions stay whole.
    unproven: modules that look as if they could be split -> why that is not known to be right. ways: row map -> other
    ways to split its pair, of which a run may choose one. instead: maps in pairs -> their roles where the pair is not
    right.
    """

    size: int
    pairs: tuple[Pair, ...]
    singles: Mapping[str, str]
    reasons: Mapping[str, str]
    partial: frozenset[str] = frozenset()
    positions: Mapping[str, str] = field(default_factory=dict)
    unproven: Mapping[str, str] = field(default_factory=dict)
    ways: Mapping[str, tuple[Pair, ...]] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)

    def describe(self, module: nn.Module) -> list[tuple[str, str, str]]:
        """Rows (module, how it is split, why not) for modules with parameters; numbers in paths folded into *."""
        how: dict[str, str] = dict(self.singles)
        for pair in self.pairs:
            what = f"{pair.heads.heads} heads over {self.size}" if pair.heads else f"{pair.inner} over {self.size}"
            how |= dict.fromkeys(pair.columns, f"columns: {what}") | dict.fromkeys(pair.rows, f"rows: {what}")
            if pair.kind == "module":
                how[pair.owner] = f"heads: {what}"
        rows: dict[tuple[str, str, str], None] = {}
        for path, part in module.named_modules():
            above = [p for p in how if path == p or path.startswith(f"{p}.")]
            if path in how or (any(p is not None for p in part._parameters.values()) and not above):
                about = [p for p in self.reasons if path == p or path.startswith(f"{p}.")]
                reason = self.reasons[max(about, key=len)] if about else ""
                rows[folded(path), how.get(path, "whole"), "" if path in how else reason] = None
        return list(rows)


def by_itself(path: str) -> str:
    """The key of a map outside of its pair, which goes by the path of its row map."""
    return f"{path} by itself"


def folded(path: str) -> str:
    """`path` with * for the numbers in it, alike for the modules of a list."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def matches(path: str, pattern: str) -> bool:
    """Whether `pattern` means the module at `path`."""
    return path == pattern or fnmatchcase(path, pattern)


def roles_of_hf(model: nn.Module) -> dict[str, str]:
    """path -> role from the plan that a HF model carries (`_tp_plan`), in our words.

    Mixtures of experts are left out: they stay whole. Raises StrategyError for other roles that we do not have.
    """
    found: dict[str, str] = {}
    for top, part in model.named_modules():
        own = getattr(part, "_tp_plan", None)
        if not isinstance(own, Mapping) or not own or not hasattr(part, "config"):
            continue
        prefix, experts = f"{top}." if top else "", mixtures(part)
        for path, _ in part.named_modules():
            if within(path, experts):
                continue
            for pattern, role in own.items():
                if matches(path, pattern) and role not in _HF:
                    raise StrategyError(
                        f"The model's own plan wants {role!r} for {prefix}{path}, which is no way to split a map here.",
                        numbers=f"{pattern}: {role}",
                        hint="a strategy without tp",
                    )
                if matches(path, pattern):
                    found.setdefault(prefix + path, _HF[role])
        break
    return found
