"""From the sources of a plan to the plan: who decides, what goes with what, and whether the numbers divide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.tensor.plan.heads import counts_heads, heads_of
from nbkit.rank.parallel.tensor.plan.infer_plan import infer_pairs, infer_vocabulary
from nbkit.rank.parallel.tensor.plan.known_classes import known_block, known_pair, known_path
from nbkit.rank.parallel.tensor.plan.linear_types import is_linear, is_lora, sizes
from nbkit.rank.parallel.tensor.plan.plan import ROLES, Pair, TensorPlan, matches, roles_of_hf
from nbkit.rank.parallel.tensor.proof.verdict import Proof, Verdict
from nbkit.rank.parallel.tensor.sequence_parallel import chains
from nbkit.rank.parallel.tensor.ties import agreed, without

_IN_PAIRS = ("colwise", "packed", "rowwise")


def plan_of(
    model: nn.Module, size: int, user: Mapping[str, str] | None = None, proof: Proof | None = None
) -> TensorPlan:
    """How `model` (the whole of it; placeholders will do) is split over `size` ranks: what is known to be right.

    user: pattern of module paths -> role (`ROLES`), above all that is found. proof: what runs have shown (prove.py).
    Raises StrategyError when a role is unknown, fits no module, or does not divide, and when what the user said is not
    right.
    """
    proof = proof or Proof()
    plan, said, verdict = candidates(model, size, user), _said_by_user(model, user or {}), proof.of(size)
    not_run = f"not run in {size} parts: {proof.why or f'only in {list(proof.verdicts)}'}"
    out: dict[str, str] = {}
    for pair in plan.pairs:
        key, known = pair.rows[0], known_pair(model, pair)
        if verdict is not None and key in verdict.wrong:
            out[key] = verdict.wrong[key]
        elif not known and (verdict is None or key not in verdict.right):
            out[key] = not_run if verdict is None else f"not run in {size} parts: the example does not reach it"
        if key in out and (paths := [path for path in (*pair.columns, key) if path in said]):
            raise _refused(paths, out[key])
    for path in plan.singles:
        if verdict is not None and path in verdict.wrong:
            out[path] = verdict.wrong[path]
        elif verdict is None and path not in said and not known_path(model, path):
            out[path] = not_run
        if path in out and path in said:
            raise _refused([path], out[path])
    unproven = {pair.owner or pair.rows[0]: out[pair.rows[0]] for pair in plan.pairs if pair.rows[0] in out}
    unproven |= {path: why for path, why in out.items() if path in plan.singles}
    plan = agreed(model, without(plan, out), said, trusted=lambda part: verdict is not None or known_block(part))
    right = verdict or Verdict()
    partial = {name for pair in plan.pairs if pair.rows[0] not in right.right for name in _alike(model, pair)}
    pairs = tuple(
        replace(pair, taken=pair.owner in right.taken) if pair.rows[0] in right.right else pair for pair in plan.pairs
    )
    no_positions = not_run if verdict is None else "not run with its positions split"
    positions = {
        path: right.positions.get(path, "" if known_block(block) else no_positions)
        for chain in chains(model, plan)
        for path, block in chain.blocks
    }
    return replace(plan, pairs=pairs, partial=right.partial | partial, positions=positions, unproven=unproven)


def _alike(model: nn.Module, pair: Pair) -> Iterator[str]:
    """Parameters of an attention of a known class that are the same for every head."""
    if pair.kind != "attention" or pair.heads is None:
        return
    maps = tuple(f"{path}." for path in (*pair.columns, *pair.rows))
    for name, p in model.get_submodule(pair.owner).named_parameters(prefix=pair.owner):
        if not name.startswith(maps) and p.numel() == pair.heads.dim:
            yield name


def _refused(paths: Sequence[str], why: str) -> StrategyError:
    return StrategyError(
        f"tp_plan splits {', '.join(paths)}, and that is not known to be right.",
        numbers=why,
        hint="'colwise_gather' and 'rowwise_split' for such maps; where nothing was run: example=batch",
    )


def candidates(model: nn.Module, size: int, user: Mapping[str, str] | None = None) -> TensorPlan:
    """What names and shapes, a HF model's own plan, and the user say; none of it is proven.

    Arguments and errors: see `plan_of`.
    """
    said = _said_by_user(model, user or {})
    hf = {path: role for path, role in roles_of_hf(model).items() if _carries(model, path, role)}
    inferred, gathers, reasons = infer_pairs(model)
    pairs, singles = [], dict(gathers)
    for pair in inferred:
        members = {**dict.fromkeys(pair.columns, "colwise"), **dict.fromkeys(pair.rows, "rowwise")}
        members = {pair.owner: "pair"} if pair.kind == "module" else members
        packed = {path for path in pair.columns if len(pair.widths[path]) > 1}
        expected = {path: "packed" if path in packed else role for path, role in members.items()}
        if all(said.get(path, role) == role for path, role in expected.items()) and all(
            hf.get(path, role) == role or path in said for path, role in expected.items()
        ):
            pairs.append(_with_source(pair, any(path in hf for path in members)))
        else:
            reasons |= dict.fromkeys(members, "its pair was given other roles")
    covered = {path for pair in pairs for path in (*pair.columns, *pair.rows)}
    extra = {path: role for path, role in {**hf, **said}.items() if path not in covered}
    pairs += _grouped(model, {path: role for path, role in extra.items() if role in _IN_PAIRS}, hf.keys() - said.keys())
    covered |= {path for pair in pairs for path in (*pair.columns, *pair.rows)}
    for path in covered | said.keys():
        singles.pop(path, None)
    vocabulary = infer_vocabulary(model, covered | singles.keys() | said.keys())
    singles |= {path: role for path, role in extra.items() if role not in (*_IN_PAIRS, "replicate")}
    singles |= vocabulary
    reasons |= {path: "tp_plan says so" for path, role in said.items() if role == "replicate"}
    for pair in pairs:
        _divides(pair, size)
    _enough_rows(model, singles, size)
    return agreed(model, TensorPlan(size, tuple(pairs), singles, reasons), said, trusted=lambda part: True)


def _said_by_user(model: nn.Module, user: Mapping[str, str]) -> dict[str, str]:
    modules = dict(model.named_modules())
    said: dict[str, str] = {}
    for pattern, role in user.items():
        if role not in ROLES:
            raise StrategyError(
                f"tp_plan has no role {role!r}.", numbers=f"for {pattern}", hint=f"one of {', '.join(ROLES)}"
            )
        found = [path for path in modules if matches(path, pattern)]
        useful = [path for path in found if role == "replicate" or _carries(model, path, role)]
        if not useful:
            raise StrategyError(
                f"tp_plan: {pattern!r} fits no module that can be split {role!r}.",
                numbers=f"{len(found)} modules have such a path" + (f", the first {found[0]}" if found else ""),
                hint="print(model) shows the paths; * stands for any characters",
            )
        said |= dict.fromkeys(useful, role)
    return said


def _carries(model: nn.Module, path: str, role: str) -> bool:
    part = model.get_submodule(path)
    if path.endswith(".base_layer") and is_lora(model.get_submodule(path.rpartition(".")[0])):
        return False
    if role == "vocab":
        return isinstance(part, nn.Embedding) and type(part).forward is nn.Embedding.forward
    return is_linear(part)


def _with_source(pair: Pair, from_hf: bool) -> Pair:
    return replace(pair, from_hf=from_hf)


def _grouped(model: nn.Module, roles: Mapping[str, str], of_hf: Iterable[str]) -> list[Pair]:
    """Pairs of the maps that somebody gave roles, by the module they are children of."""
    of_hf = set(of_hf)
    by_owner: dict[str, list[str]] = {}
    for path in roles:
        by_owner.setdefault(path.rpartition(".")[0], []).append(path)
    pairs = []
    for owner, paths in by_owner.items():
        rows = [path for path in paths if roles[path] == "rowwise"]
        columns = [path for path in paths if roles[path] != "rowwise"]
        if not columns or len(rows) != 1:
            raise StrategyError(
                f"Maps split by columns and by rows come in pairs, and {owner or 'the model'} has none.",
                numbers=f"columns: {', '.join(columns) or 'none'}; rows: {', '.join(rows) or 'none'}",
                hint="colwise_gather or rowwise_split for a map that stands alone",
            )
        inner = sizes(model.get_submodule(rows[0]))[0]
        part = model.get_submodule(owner)
        outs = {path: sizes(model.get_submodule(path))[1] for path in columns}
        # Keys are narrower than queries when heads share them.
        keys = min(n for n in outs.values()) if len(outs) > 1 else inner
        is_attention = "att" in f"{owner.rpartition('.')[2]} {type(part).__name__}".lower() or counts_heads(part)
        widths = {
            path: (n,) if roles[path] == "colwise" else _packed(n, inner, is_attention) for path, n in outs.items()
        }
        if is_attention and (packed := next((w for w in widths.values() if len(w) == 3), None)):
            keys = packed[1]
        heads = heads_of(part, q=inner, k=keys) if is_attention else None
        if is_attention and heads is None:
            raise StrategyError(
                f"Nothing says how many heads {owner} has.",
                numbers=f"{inner} features",
                hint="an attribute num_heads or head_dim; or tp_plan={...: 'colwise_gather'}",
            )
        kind = "attention" if is_attention else "mlp"
        pairs.append(Pair(owner, kind, tuple(columns), tuple(rows), widths, inner, heads, set(paths) <= of_hf))
    return pairs


def _packed(out: int, inner: int, is_attention: bool) -> tuple[int, ...]:
    if is_attention:
        return (inner, (out - inner) // 2, (out - inner) // 2)
    return (inner,) * (out // inner)


def _divides(pair: Pair, size: int) -> None:
    if pair.heads is None:
        return
    for count, what in ((pair.heads.heads, "heads"), (pair.heads.kv_heads, "key-value heads")):
        if count % size:
            raise StrategyError(
                f"{count} {what} over {size} ranks: {pair.owner} is split by heads.",
                numbers=f"{count} / {size} = {count / size:g}",
                hint=f"tp={_largest(count, size)}; or tp_plan={{'{pair.owner}.*': 'replicate'}}",
            )


def _largest(count: int, size: int) -> int:
    return max(n for n in range(1, size + 1) if count % n == 0)


def _enough_rows(model: nn.Module, singles: Mapping[str, str], size: int) -> None:
    for path, role in singles.items():
        part = model.get_submodule(path)
        length = part.num_embeddings if isinstance(part, nn.Embedding) else max(sizes(part))
        if role in ("vocab", "head") and length < size:
            raise StrategyError(
                f"Some ranks would hold nothing of {path}.", numbers=f"{length} rows over {size} ranks", hint="tp=1"
            )
