"""Make a tensor plan: choose between its sources, group maps into pairs, and check that the numbers divide.

The parts of a plan are attentions, MLP pairs, the embedding, and the head of the vocabulary. If a run of the model
showed the data flow between maps (flow_plan.py), they follow from it. Otherwise they are found by common names and
matching shapes. If names leave a doubt that would raise no error later (a packed matrix with unknown packing), the plan
gathers, which is always correct, and gives the reason.

Without a run that proves a split, only known classes are split: classes whose source code does what the names of their
parts say. A subclass does not count, because it may do anything. Classes of transformers are listed by file. Each of
these files was run in parts and compared with the whole (proof/).

Tied weights: a weight that several modules share is split in the same way in all of them, or stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn import functional as F

from nbkit.errors import StrategyError
from nbkit.rank.parallel.module.block_discovery import mixtures, within
from nbkit.rank.parallel.module.copies import homes
from nbkit.rank.parallel.tensor.attention import why_not_packed
from nbkit.rank.parallel.tensor.plan.flow_plan import MapFlow, flow_heads, flow_pairs
from nbkit.rank.parallel.tensor.plan.linear_types import core, is_linear, is_lora, is_packed_attention, sizes
from nbkit.rank.parallel.tensor.plan.plan import (
    ROLES,
    Heads,
    Pair,
    TensorPlan,
    by_itself,
    counts_heads,
    cuts_of_pair,
    cuts_of_single,
    heads_of,
    matches,
    named_counts,
    of_configs,
    roles_of_hf,
)
from nbkit.rank.parallel.tensor.proof.verdict import Proof, SplitVerdict
from nbkit.rank.parallel.tensor.sequence_parallel import chains

Place = tuple[int, str]
"""(id of a module, attribute)."""


def agreed(
    model: nn.Module, plan: TensorPlan, said: Collection[str] = (), *, trusted: Callable[[nn.Module], bool]
) -> TensorPlan:
    """Return `plan` without the splits that would split a tied weight differently in its places.

    said: modules with roles from the user; their conflicts are kept, and refused later. trusted: returns True for a
    module that is not a map and does not use the weight that it holds, such as HF heads that hold the bias of a map.
    """
    tied = {name: places for name, places in homes(model).items() if len(places) > 1}
    while tied:
        cuts: dict[Place, tuple[Hashable, str]] = {}
        for pair in plan.pairs:
            for part, attribute, *how in cuts_of_pair(model, pair):
                cuts[id(part), attribute] = tuple(how), pair.rows[0]
        for path, role in plan.singles.items():
            for part, attribute, *how in cuts_of_single(model.get_submodule(path), role):
                cuts[id(part), attribute] = tuple(how), path
        out: dict[str, str] = {}
        for name, places in tied.items():
            wanted = [
                cuts.get((id(part), attribute))
                for part, attribute in places
                if (id(part), attribute) in cuts or _computes(part) or not trusted(part)
            ]
            if len({None if each is None else each[0] for each in wanted}) > 1:
                keys = {each[1] for each in wanted if each is not None}
                why = f"{name} is tied in {len(places)} places, which need different parts of it"
                out |= {} if keys & set(said) else dict.fromkeys(keys, why)
        if not out:
            break
        plan = without(plan, out)
    return plan


def _computes(part: nn.Module) -> bool:
    return is_linear(part) or isinstance(part, nn.Linear | nn.Embedding | nn.MultiheadAttention)


def without(plan: TensorPlan, out: dict[str, str]) -> TensorPlan:
    """Return `plan` without the pairs (by row map) and single modules in `out`. Its values become the reasons."""
    kept = tuple(pair for pair in plan.pairs if pair.rows[0] not in out)
    reasons = dict(plan.reasons) | {path: why for path, why in out.items() if path in plan.singles}
    for pair in plan.pairs:
        if pair.rows[0] in out:
            members = (pair.owner,) if pair.kind == "module" else (*pair.columns, *pair.rows)
            reasons |= dict.fromkeys(members, out[pair.rows[0]])
    singles = {path: role for path, role in plan.singles.items() if path not in out}
    return replace(plan, pairs=kept, singles=singles, reasons=reasons)


_TRIPLES = [
    tuple(form.format(letter) for letter in letters)
    for letters in (("q", "k", "v"), ("query", "key", "value"), ("queries", "keys", "values"))
    for form in ("{}", "{}_proj", "w{}", "w_{}", "to_{}", "{}_lin", "{}_linear", "linear_{}", "fc_{}", "proj_{}")
]
_PACKED = {"c_attn", "qkv", "qkv_proj", "wqkv", "in_proj", "query_key_value", "to_qkv", "attn_qkv", "w_pack"}
_OUT = {"out", "o", "o_proj", "out_proj", "proj", "c_proj", "wo", "w_o", "dense", "to_out", "out_lin", "output"}
_OUT |= {"fc_out", "linear_out", "projection", "proj_out", "fc_o", "o_linear"}
_UP = {"up", "up_proj", "c_fc", "fc1", "fc_in", "lin1", "linear1", "w1", "dense_h_to_4h", "wi", "wi_0", "wi_1", "gate"}
_UP |= {"gate_proj", "w3", "fc", "linear_in", "w_in", "w_gate", "w_up", "ff1", "dense1"}
_DOWN = {"down", "down_proj", "c_proj", "fc2", "fc_out", "lin2", "linear2", "w2", "dense_4h_to_h", "wo", "proj"}
_DOWN |= {"linear_out", "w_out", "w_down", "ff2", "dense2"}
_HEAD = {"lm_head", "head", "output", "unembed", "to_logits", "decoder", "embed_out", "out", "logits", "lm", "proj"}

POINTWISE = (nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish)
"""Classes of elementwise modules."""


def infer_pairs(model: nn.Module) -> tuple[list[Pair], dict[str, str], dict[str, str]]:
    """Return (pairs, single module -> role, module -> why it stays whole), found by names."""
    pairs, reasons = packed_attentions(model)
    singles: dict[str, str] = {}
    for path, part in model.named_modules():
        if is_lora(part) or path.endswith(".base_layer"):
            continue
        dot = f"{path}." if path else ""
        linears = {name: child for name, child in part.named_children() if is_linear(child)}
        if type(part).forward is nn.Sequential.forward:
            pairs += _in_a_row(dot, part)
        elif linears:
            used = _attention(dot, part, linears, pairs, singles, reasons)
            _mlp(dot, part, {name: child for name, child in linears.items() if name not in used}, pairs)
    return pairs, singles, reasons


def packed_attentions(model: nn.Module) -> tuple[list[Pair], dict[str, str]]:
    """Return the pairs of torch's own MultiheadAttentions, and path -> why an attention stays whole."""
    pairs: list[Pair] = []
    reasons: dict[str, str] = {}
    for path, part in model.named_modules():
        itself: Any = part
        if is_packed_attention(part) and (why := why_not_packed(part)):
            reasons[path] = why
        elif is_packed_attention(part):
            heads = Heads(itself.num_heads, itself.num_heads, itself.embed_dim // itself.num_heads)
            row = f"{path}.out_proj" if path else "out_proj"
            pairs.append(Pair(path, "module", (), (row,), {}, itself.embed_dim, heads))
    return pairs, reasons


def _attention(
    dot: str,
    part: nn.Module,
    linears: Mapping[str, nn.Module],
    pairs: list[Pair],
    singles: dict[str, str],
    reasons: dict[str, str],
) -> set[str]:
    """Add `part` to the results if it is an attention. Return the names of the children that belong to it."""
    named = {name.lower(): name for name in linears}
    out_name, out = _output(part, linears)
    if out is None:
        return set()
    owner = dot[:-1]
    width = sizes(out)[0]
    triple = next((t for t in _TRIPLES if all(name in named for name in t)), None)
    packed = next((named[name] for name in _PACKED if name in named), None)
    if triple is not None:
        q, k, v = (named[name] for name in triple)
        used = {q, k, v, out_name.split(".")[0]}
        if sizes(linears[q])[1] != width or sizes(linears[k])[1] != sizes(linears[v])[1]:
            reasons |= dict.fromkeys((dot + name for name in used), "query, value and output have different widths")
            return used
        heads = heads_of(part, q=width, k=sizes(linears[k])[1])
        why = "no attribute says how many heads it has" if heads is None else _why_not(part, used, heads)
        widths: dict[str, tuple[int, ...]] = {dot + name: (sizes(linears[name])[1],) for name in (q, k, v)}
        columns: tuple[str, ...] = (dot + q, dot + k, dot + v)
    elif packed is not None:
        used = {packed, out_name.split(".")[0]}
        rest = sizes(linears[packed])[1] - width
        heads = heads_of(part, q=width, k=rest // 2) if rest > 0 and rest % 2 == 0 else None
        # GPT-2 has an attribute with the widths in the matrix. Other models may store query, key and value per head.
        says = getattr(part, "split_size", None) == width == rest // 2
        why = (
            ""
            if says and heads
            else "nbkit cannot find how query, key and value are packed (tp_plan: 'packed', 'colwise')"
        )
        why = why or _why_not(part, used, heads)
        columns, widths = (dot + packed,), {dot + packed: (width, rest // 2, rest // 2)}
    else:
        return set()
    if why:
        for name in columns:
            singles[name] = "colwise_gather"
        singles[dot + out_name] = "rowwise_split"
        reasons[owner] = why
    else:
        counts = named_counts(part, heads) if heads is not None else ()
        pairs.append(Pair(owner, "attention", columns, (dot + out_name,), widths, width, heads, counts))
    return used


def _output(part: nn.Module, linears: Mapping[str, nn.Module]) -> tuple[str, nn.Module | None]:
    for name, child in part.named_children():
        if name.lower() not in _OUT:
            continue
        if name in linears:
            return name, child
        if isinstance(child, nn.Sequential) and len(child) and is_linear(child[0]):
            return f"{name}.0", child[0]
    return "", None


def _why_not(part: nn.Module, used: set[str], heads: Heads | None) -> str:
    """Return why an attention cannot be split, or "": a parameter outside its projections may differ between heads."""
    for name, param in part.named_parameters():
        if name.split(".")[0] not in used and (heads is None or param.numel() != heads.dim):
            return f"it has a parameter {name} {tuple(param.shape)}, perhaps one value for each head"
    return ""


def _mlp(dot: str, part: nn.Module, linears: Mapping[str, nn.Module], pairs: list[Pair]) -> None:
    for name, down in linears.items():
        if name.lower() not in _DOWN:
            continue
        inner, width = sizes(down)
        ups = [n for n, up in linears.items() if n.lower() in _UP and n != name and sizes(up) == (width, inner)]
        # The MLP of a transformer is not narrower in the middle than at its ends. A narrow middle may be an output.
        if ups and inner >= width:
            columns = tuple(dot + n for n in ups)
            pairs.append(Pair(dot[:-1], "mlp", columns, (dot + name,), dict.fromkeys(columns, (inner,)), inner))
            return


def _in_a_row(dot: str, part: nn.Module) -> list[Pair]:
    """Return the pairs of linear maps in a Sequential with only elementwise modules between them."""
    pairs: list[Pair] = []
    waiting: tuple[str, nn.Module] | None = None
    for name, child in part.named_children():
        if is_linear(child):
            if waiting is not None and sizes(waiting[1])[1] == sizes(child)[0]:
                column, inner = dot + waiting[0], sizes(child)[0]
                pairs.append(Pair(dot[:-1], "mlp", (column,), (dot + name,), {column: (inner,)}, inner))
                waiting = None
            else:
                waiting = (name, child)
        elif not isinstance(child, POINTWISE) and not type(child).__module__.startswith("transformers.activations"):
            waiting = None
    return pairs


def named_heads(model: nn.Module) -> set[str]:
    """Return the linear maps whose names are common for a map to logits."""
    return {path for path, part in model.named_modules() if is_linear(part) and path.split(".")[-1].lower() in _HEAD}


def infer_vocabulary(
    model: nn.Module, taken: Collection[str], likely: Collection[str], read: Collection[str] | None = None
) -> dict[str, str]:
    """Return path -> "vocab" or "head" for the embedding of tokens and the map to their logits.

    taken: paths with other roles. likely: maps that may be the head. Other maps may be the head only if they are tied
    to an embedding. read: embeddings that read tokens, or None if that is not known.
    """
    paths = {id(part): path for path, part in model.named_modules()}
    tables = {
        path: part
        for path, part in model.named_modules()
        if isinstance(part, nn.Embedding) and type(part).forward is nn.Embedding.forward and part.weight is not None
    }
    usable = {
        path: part
        for path, part in tables.items()
        if part.max_norm is None and not part.sparse and (read is None or path in read)
    }
    heads = {
        path: part
        for path, part in model.named_modules()
        if is_linear(part)
        and path not in taken
        and not path.endswith(".base_layer")
        and (path in likely or _tied(part, tables) is not None)
        and any(sizes(part)[1] == table.num_embeddings for table in tables.values())
    }
    named = _asked(model, "get_output_embeddings")
    head = paths.get(id(named)) if named is not None else next(reversed(heads), None)
    head = head if head in heads else None
    tied = _tied(heads[head], tables) if head is not None else None
    named = _asked(model, "get_input_embeddings") if hasattr(model, "config") else None
    table = tied or paths.get(id(named))
    if table is None:
        # Without a head module, the table may also be the head: some models multiply by its weight themselves.
        rows = sizes(heads[head])[1] if head is not None else None
        table = next((path for path, part in usable.items() if part.num_embeddings == rows), None)
    found = {} if head is None or (tied is not None and tied not in usable) else {head: "head"}
    # One matrix cannot be split in one place and whole in another.
    whole_twin = table is not None and any(_same(tables.get(table), m) for p, m in _linears(model) if p not in found)
    return found if table is None or table not in usable or whole_twin else {**found, table: "vocab"}


def _asked(model: Any, getter: str) -> Any:
    """Return the embedding or the head that a HF model names, or None (as in models of two parts)."""
    try:
        return getattr(model, getter, lambda: None)()
    except (NotImplementedError, AttributeError):
        return None


def _tied(head: nn.Module, tables: Mapping[str, nn.Embedding]) -> str | None:
    return next((path for path, table in tables.items() if table.weight is core(head).weight), None)


def _linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(p, m) for p, m in model.named_modules() if is_linear(m) and not p.endswith(".base_layer")]


def _same(table: nn.Module | None, linear: nn.Module) -> bool:
    return table is not None and core(linear).weight is table.weight


_OURS = "nbkit.rank.models.gpt"
_HUGGING_FACE = {"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi", "falcon", "bert", "roberta", "vit"}
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder, *_LAYERS)


def known_pair(model: nn.Module, pair: Pair) -> bool:
    """Return True if the module that holds `pair` is of a known class."""
    owner = model.get_submodule(pair.owner)
    if pair.kind == "module":
        return True
    if type(owner) is nn.Sequential:
        return all(is_linear(child) or type(child) in POINTWISE for child in owner.children())
    if pair.kind == "mlp" and type(owner).__module__ != _OURS and type(owner) not in _LAYERS:
        # A config selects the activation, which may have parameters.
        maps = tuple(f"{path}." for path in (*pair.columns, *pair.rows))
        if any(not name.startswith(maps) for name, _ in owner.named_parameters(prefix=pair.owner)):
            return False
    return known_block(owner)


def known_block(block: nn.Module) -> bool:
    """Return True if the class of `block` and its activation are known."""
    if type(block) in _LAYERS:
        return block.activation in (F.relu, F.gelu) or type(block.activation) in POINTWISE  # type: ignore[union-attr]
    return _is_known(type(block))


def known_path(model: nn.Module, path: str) -> bool:
    """Return True if all modules around the one at `path` are known, so that none reads its weight directly."""
    names = path.split(".")
    above = [model.get_submodule(".".join(names[:i])) for i in range(len(names))]
    return all(type(part) in _HOLDERS or _is_known(type(part)) for part in above)


def _is_known(kind: type[nn.Module]) -> bool:
    home = kind.__module__
    if home == _OURS:
        return True
    if home.startswith("peft."):
        return True
    *above, name = home.split(".")
    return above[:2] == ["transformers", "models"] and name.removeprefix("modeling_") in _HUGGING_FACE


_IN_PAIRS = ("colwise", "packed", "rowwise")
_GATHERED = ("colwise_gather", "rowwise_split")


def plan_of(
    model: nn.Module, size: int, user: Mapping[str, str] | None = None, proof: Proof | None = None
) -> TensorPlan:
    """Return the plan to split `model` over `size` ranks, restricted to splits that are known to be correct.

    model: the whole model; placeholders are sufficient. user: pattern of module paths -> role (`ROLES`), which
    overrides the other sources. proof: the results of runs (prove.py). Raises StrategyError if a role is unknown,
    matches no module, or does not divide, and if a split that the user requests is not known to be correct.
    """
    proof = proof or Proof()
    right = proof.of(size) or SplitVerdict()
    plan, said, verdict = candidates(model, size, user, proof.flow), _said_by_user(model, user or {}), proof.of(size)
    parts = "parts" if size == 1 else f"{size} parts"  # 1 stands for any number of ranks
    not_run = f"not run in {parts}: {proof.why or f'only in {list(proof.verdicts)}'}"
    out: dict[str, str] = {}
    for pair in plan.pairs:
        key, known = pair.rows[0], known_pair(model, pair)
        if verdict is not None and key in verdict.wrong:
            out[key] = verdict.wrong[key]
        elif not known and (verdict is None or key not in verdict.ways):
            out[key] = not_run if verdict is None else f"not tested in {parts}: the example batch does not reach it"
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
    no_positions = not_run if verdict is None else "not tested with its positions split"
    positions = {
        path: "a router needs all positions"
        if mixtures(block)
        else right.positions.get(path, "" if known_block(block) else no_positions)
        for chain in chains(model, plan)
        for path, block in chain.blocks
    }
    return replace(plan, pairs=pairs, partial=right.partial | partial, positions=positions, unproven=unproven)


def _members(pair: Pair) -> tuple[str, ...]:
    return (*pair.columns, *pair.rows)


def _alike(model: nn.Module, pair: Pair) -> Iterator[str]:
    """Yield the parameters of an attention of a known class that are the same for every head."""
    if pair.kind != "attention" or pair.heads is None:
        return
    maps = tuple(f"{path}." for path in (*pair.columns, *pair.rows))
    for name, p in model.get_submodule(pair.owner).named_parameters(prefix=pair.owner):
        if not name.startswith(maps) and p.numel() == pair.heads.dim:
            yield name


def _refused(paths: Sequence[str], why: str) -> StrategyError:
    return StrategyError(
        f"tp_plan splits {', '.join(paths)}, and nbkit cannot show that this is right.",
        numbers=why,
        hint="'colwise_gather' and 'rowwise_split' for such layers; if nothing was tested: "
        "hints=nbkit.ModelHints(example=batch)",
    )


def candidates(
    model: nn.Module, size: int, user: Mapping[str, str] | None = None, flow: MapFlow | None = None
) -> TensorPlan:
    """Return a plan of where and how `model` may be split, without proof.

    The sources are the data flow or, without a run, the names; then the HF model's own plan; then the user. See
    `plan_of` for arguments and errors.
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
        # Tokens decide which experts are called. Split maps would wait for ranks that do not call the same expert.
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
        # The data flow may show a pair where HF's plan gathers. This is safe, because the pair is run before it is
        # used.
        open_to = () if flow is None else _GATHERED
        if all(said.get(path, role) == role for path, role in expected.items()) and all(
            hf.get(path, role) in (role, *open_to) or path in said for path, role in expected.items()
        ):
            pairs.append(_of_hf(pair) if any(path in hf for path in members) else pair)
        else:
            reasons |= dict.fromkeys(members, "the other layers of its pair have different roles")
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
    # A single key-value head cannot be split. Such an attention stays whole, and the rest may be split.
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
                f"tp_plan: {pattern!r} matches no module that can have the role {role!r}.",
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
    """Return `pair` without counts in configs: HF's attentions read them for values that are equal on every rank."""
    return replace(pair, counts=tuple(count for count in pair.counts if count not in of_configs(pair.counts)))


def _grouped(
    model: nn.Module, roles: Mapping[str, str], of_hf: Iterable[str], known: Mapping[str, Heads]
) -> list[Pair]:
    """Return the pairs of the maps with given roles, grouped by parent module. known: row map -> heads."""
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
                "tp_plan must split linear layers in pairs, one by columns and one by rows, and "
                f"{owner or 'the model'} has no pair.",
                numbers=f"columns: {', '.join(columns) or 'none'}; rows: {', '.join(rows) or 'none'}",
                hint="colwise_gather or rowwise_split for a layer without a partner",
            )
        inner = sizes(model.get_submodule(rows[0]))[0]
        part = model.get_submodule(owner)
        outs = {path: sizes(model.get_submodule(path))[1] for path in columns}
        # Keys are narrower than queries if query heads share them.
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
                f"nbkit cannot find how many heads {owner} has.",
                numbers=f"{inner} features",
                hint="an attribute num_heads or head_dim; or hints=nbkit.ModelHints(tp_plan={...: 'colwise_gather'})",
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
                f"{pair.owner} is split by heads, and {count} {what} cannot be divided by {size} ranks.",
                numbers=f"{count} / {size} = {count / size:g}",
                hint=f"tp={_largest(count, size)}; or hints=nbkit.ModelHints(tp_plan={{'{pair.owner}.*': "
                f"'replicate'}})",
            )


def _largest(count: int, size: int) -> int:
    return max(n for n in range(1, size + 1) if count % n == 0)


def _enough_rows(model: nn.Module, singles: Mapping[str, str], size: int) -> None:
    for path, role in singles.items():
        part = model.get_submodule(path)
        length = part.num_embeddings if isinstance(part, nn.Embedding) else max(sizes(part))
        if role in ("vocab", "head") and length < size:
            raise StrategyError(
                f"Some ranks would hold no part of {path}.", numbers=f"{length} rows over {size} ranks", hint="tp=1"
            )
