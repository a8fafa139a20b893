"""From the sources of a plan to the plan: who decides, what goes with what, and whether the numbers divide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from nbkit.errors import StrategyError
from nbkit.rank.parallel.module.mixture_of_experts import mixtures, within
from nbkit.rank.parallel.tensor.plan.flow_plan import Flow, flow_heads, flow_pairs
from nbkit.rank.parallel.tensor.plan.heads import Heads, counts_heads, heads_of, named_counts, of_configs
from nbkit.rank.parallel.tensor.plan.infer_plan import infer_pairs, infer_vocabulary, named_heads, packed_attentions
from nbkit.rank.parallel.tensor.plan.known_classes import known_block, known_pair, known_path
from nbkit.rank.parallel.tensor.plan.linear_types import is_linear, is_lora, sizes
from nbkit.rank.parallel.tensor.plan.plan import ROLES, Pair, TensorPlan, by_itself, matches, roles_of_hf
from nbkit.rank.parallel.tensor.proof.verdict import Proof, Verdict
from nbkit.rank.parallel.tensor.sequence_parallel import chains
from nbkit.rank.parallel.tensor.ties import agreed, without

_IN_PAIRS = ("colwise", "packed", "rowwise")
_GATHERED = ("colwise_gather", "rowwise_split")


def plan_of(
    model: nn.Module, size: int, user: Mapping[str, str] | None = None, proof: Proof | None = None
) -> TensorPlan:
    """How `model` (the whole of it; placeholders will do) is split over `size` ranks: what is known to be right.

    user: pattern of module paths -> role (`ROLES`), above all that is found. proof: what runs have shown (prove.py).
    Raises StrategyError when a role is unknown, fits no module, or does not divide, and when what the user said is not
    right.
    """
    proof = proof or Proof()
    right = proof.of(size) or Verdict()
    plan, said, verdict = candidates(model, size, user, proof.flow), _said_by_user(model, user or {}), proof.of(size)
    parts = "parts" if size == 1 else f"{size} parts"  # 1: of any number of ranks
    not_run = f"not run in {parts}: {proof.why or f'only in {list(proof.verdicts)}'}"
    out: dict[str, str] = {}
    for pair in plan.pairs:
        key, known = pair.rows[0], known_pair(model, pair)
        if verdict is not None and key in verdict.wrong:
            out[key] = verdict.wrong[key]
        elif not known and (verdict is None or key not in verdict.ways):
            out[key] = not_run if verdict is None else f"not run in {parts}: the example does not reach it"
        if key in out and (paths := [path for path in (*pair.columns, key) if path in said]):
            raise _refused(paths, out[key])
    for path in plan.singles:
        if verdict is not None and path in verdict.wrong:
            out[path] = verdict.wrong[path]
        elif verdict is None and path not in said and not known_path(model, path):
            out[path] = not_run
        if path in out and path in said:
            raise _refused([path], out[path])
    wrong = [pair for pair in plan.pairs if pair.rows[0] in out]
    gathered = {path: plan.instead[path] for pair in wrong for path in _members(pair) if path in plan.instead}
    gathered = {
        path: role for path, role in gathered.items() if verdict is not None and by_itself(path) not in verdict.wrong
    }
    unproven = {
        pair.owner or pair.rows[0]: out[pair.rows[0]] for pair in wrong if not gathered.keys() >= {*_members(pair)}
    }
    unproven |= {path: why for path, why in out.items() if path in plan.singles}
    plan = replace(plan, pairs=tuple(right.ways.get(pair.rows[0], pair) for pair in plan.pairs), ways={})
    plan = without(plan, out)
    plan = replace(plan, singles={**plan.singles, **gathered}, instead={})
    plan = agreed(model, plan, said, trusted=lambda part: verdict is not None or known_block(part))
    partial = {name for pair in plan.pairs if pair.rows[0] not in right.ways for name in _alike(model, pair)}
    pairs = tuple(
        replace(pair, taken=pair.owner in right.taken) if pair.rows[0] in right.ways else pair for pair in plan.pairs
    )
    no_positions = not_run if verdict is None else "not run with its positions split"
    positions = {
        path: "a router takes all positions"
        if mixtures(block)
        else right.positions.get(path, "" if known_block(block) else no_positions)
        for chain in chains(model, plan)
        for path, block in chain.blocks
    }
    return replace(plan, pairs=pairs, partial=right.partial | partial, positions=positions, unproven=unproven)


def _members(pair: Pair) -> tuple[str, ...]:
    return (*pair.columns, *pair.rows)


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


def candidates(
    model: nn.Module, size: int, user: Mapping[str, str] | None = None, flow: Flow | None = None
) -> TensorPlan:
    """Where `model` may be split, and how; none of it is proven. What goes into what says it, or without a run names;
    so do a HF model's own plan, and the user.

    Arguments and errors: see `plan_of`.
    """
    said = _said_by_user(model, user or {})
    hf = {path: role for path, role in roles_of_hf(model).items() if _carries(model, path, role)}
    gathers: dict[str, str] = {}
    if flow is None:
        inferred, gathers, reasons = infer_pairs(model)
        ways, heads = {}, named_heads(model)
    else:
        inferred, reasons = packed_attentions(model)
        heads = flow_heads(model, flow)
        ways = {each[0].rows[0]: each for each in flow_pairs(model, flow, heads)}
        inferred += [each[0] for each in ways.values()]
    if experts := mixtures(model):
        # Whether an expert is called hangs on the tokens: maps in it would wait for ranks that do not call theirs.
        ways = {row: each for row, each in ways.items() if not within(row, experts)}
        inferred = [pair for pair in inferred if not within(pair.rows[0], experts)]
        gathers = {path: role for path, role in gathers.items() if not within(path, experts)}
        reasons |= dict.fromkeys(experts, "a mixture of experts stays whole on each rank")
    pairs, singles = [], dict(gathers)
    for pair in inferred:
        members = {**dict.fromkeys(pair.columns, "colwise"), **dict.fromkeys(pair.rows, "rowwise")}
        members = {pair.owner: "pair"} if pair.kind == "module" else members
        packed = {path for path in pair.columns if len(pair.widths[path]) > 1}
        expected = {path: "packed" if path in packed else role for path, role in members.items()}
        # What goes into what shows more than a plan that gathers: a pair is run before it counts.
        open_to = () if flow is None else _GATHERED
        if all(said.get(path, role) == role for path, role in expected.items()) and all(
            hf.get(path, role) in (role, *open_to) or path in said for path, role in expected.items()
        ):
            pairs.append(_of_hf(pair) if any(path in hf for path in members) else pair)
        else:
            reasons |= dict.fromkeys(members, "its pair was given other roles")
    covered = {path for pair in pairs for path in (*pair.columns, *pair.rows)}
    extra = {path: role for path, role in {**hf, **said}.items() if path not in covered}
    known = {row: each[0].heads for row, each in ways.items() if each[0].heads is not None}
    grouped = {path: role for path, role in extra.items() if role in _IN_PAIRS}
    pairs += _grouped(model, grouped, hf.keys() - said.keys(), known)
    covered |= {path for pair in pairs for path in (*pair.columns, *pair.rows)}
    for path in covered | said.keys():
        singles.pop(path, None)
    taken = covered | singles.keys() | said.keys()
    vocabulary = infer_vocabulary(model, taken, heads, None if flow is None else flow.tables)
    singles |= {path: role for path, role in extra.items() if role not in (*_IN_PAIRS, "replicate")}
    singles |= vocabulary
    reasons |= {path: "tp_plan says so" for path, role in said.items() if role == "replicate"}
    # One key and value head goes to no two ranks: such an attention stays whole, and what is around it may be split.
    for pair in [pair for pair in pairs if _shares_one_head(pair) and not said.keys() & {*_members(pair)}]:
        pairs.remove(pair)
        ways.pop(pair.rows[0], None)
        reasons |= dict.fromkeys(_members(pair), "its heads share one key and value head")
    for pair in pairs:
        _divides(pair, size)
    _enough_rows(model, singles, size)
    instead = {path: hf[path] for path in covered if hf.get(path) in _GATHERED and path not in said}
    free = {row: each for row, each in ways.items() if not said.keys() & {row, *each[0].columns}}
    plan = TensorPlan(size, tuple(pairs), singles, reasons, ways=free, instead=instead)
    return agreed(model, plan, said, trusted=lambda part: True)


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


def _of_hf(pair: Pair) -> Pair:
    """HF's attentions ask a config for what is the same on every rank."""
    return replace(pair, counts=tuple(count for count in pair.counts if count not in of_configs(pair.counts)))


def _grouped(
    model: nn.Module, roles: Mapping[str, str], of_hf: Iterable[str], known: Mapping[str, Heads]
) -> list[Pair]:
    """Pairs of the maps that somebody gave roles, by the module they are children of. known: row map -> heads."""
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
        is_attention = (
            rows[0] in known
            or "att" in f"{owner.rpartition('.')[2]} {type(part).__name__}".lower()
            or counts_heads(part)
        )
        widths = {
            path: (n,) if roles[path] == "colwise" else _packed(n, inner, is_attention) for path, n in outs.items()
        }
        if is_attention and (packed := next((w for w in widths.values() if len(w) == 3), None)):
            keys = packed[1]
        heads = known.get(rows[0]) or heads_of(part, q=inner, k=keys) if is_attention else None
        if is_attention and heads is None:
            raise StrategyError(
                f"Nothing says how many heads {owner} has.",
                numbers=f"{inner} features",
                hint="an attribute num_heads or head_dim; or tp_plan={...: 'colwise_gather'}",
            )
        kind, counts = "attention" if is_attention else "mlp", named_counts(part, heads) if heads is not None else ()
        pair = Pair(owner, kind, tuple(columns), tuple(rows), widths, inner, heads, counts)
        pairs.append(_of_hf(pair) if set(paths) <= of_hf else pair)
    return pairs


def _packed(out: int, inner: int, is_attention: bool) -> tuple[int, ...]:
    if is_attention:
        return (inner, (out - inner) // 2, (out - inner) // 2)
    return (inner,) * (out // inner)


def _shares_one_head(pair: Pair) -> bool:
    return pair.heads is not None and pair.heads.kv_heads == 1 < pair.heads.heads


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
