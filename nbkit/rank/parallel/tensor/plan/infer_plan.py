"""Finds a tensor plan in the module tree: attentions, pairs of an MLP, embedding and head of the vocabulary.

By names that people use and by shapes that fit, where no run of the model says what goes into what (flow_plan.py).
Where they leave a doubt that no error would settle later (a packed matrix of which nobody says how it is packed), it
takes the way that is always right and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from nbkit.rank.parallel.tensor.attention import why_not_packed
from nbkit.rank.parallel.tensor.plan.heads import Heads, heads_of, named_counts
from nbkit.rank.parallel.tensor.plan.linear_types import core, is_linear, is_lora, is_packed_attention, sizes
from nbkit.rank.parallel.tensor.plan.plan import Pair

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
"""Modules that treat every element by itself."""


def infer_pairs(model: nn.Module) -> tuple[list[Pair], dict[str, str], dict[str, str]]:
    """(pairs, single module -> role, module -> why it stays whole)."""
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
    """Of torch's own MultiheadAttentions: pairs, and why others stay whole."""
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
    """Adds what it finds; returns the names of the children that belong to it."""
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
            reasons |= dict.fromkeys((dot + name for name in used), "query, value and output have other widths")
            return used
        heads = heads_of(part, q=width, k=sizes(linears[k])[1])
        why = "no attribute says how many heads it has" if heads is None else _why_not(part, used, heads)
        widths: dict[str, tuple[int, ...]] = {dot + name: (sizes(linears[name])[1],) for name in (q, k, v)}
        columns: tuple[str, ...] = (dot + q, dot + k, dot + v)
    elif packed is not None:
        used = {packed, out_name.split(".")[0]}
        rest = sizes(linears[packed])[1] - width
        heads = heads_of(part, q=width, k=rest // 2) if rest > 0 and rest % 2 == 0 else None
        # GPT-2 says how it cuts the matrix; elsewhere query, key and value may lie head by head.
        says = getattr(part, "split_size", None) == width == rest // 2
        why = (
            "" if says and heads else "nothing says how query, key and value are packed (tp_plan: 'packed', 'colwise')"
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
    """Parameters of an attention beside its projections must be the same for every head."""
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
        # Narrower in the middle than at the ends is no MLP of a transformer: its middle may be somebody's output.
        if ups and inner >= width:
            columns = tuple(dot + n for n in ups)
            pairs.append(Pair(dot[:-1], "mlp", columns, (dot + name,), dict.fromkeys(columns, (inner,)), inner))
            return


def _in_a_row(dot: str, part: nn.Module) -> list[Pair]:
    """Pairs of linear maps in a Sequential with nothing but elementwise modules between."""
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
    """Linear maps that are called as a map to logits is."""
    return {path for path, part in model.named_modules() if is_linear(part) and path.split(".")[-1].lower() in _HEAD}


def infer_vocabulary(
    model: nn.Module, taken: Collection[str], likely: Collection[str], read: Collection[str] | None = None
) -> dict[str, str]:
    """path -> "vocab" or "head": an embedding of tokens, and the map to their logits.

    taken: paths with other roles. likely: maps that may be the head; others are when they are tied to an embedding.
    read: embeddings that read tokens, where that is known.
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
        # Without a head, a table may be the head as well: some models multiply by its weight themselves.
        rows = sizes(heads[head])[1] if head is not None else None
        table = next((path for path, part in usable.items() if part.num_embeddings == rows), None)
    found = {} if head is None or (tied is not None and tied not in usable) else {head: "head"}
    # One matrix cannot be split in one place and whole in another.
    whole_twin = table is not None and any(_same(tables.get(table), m) for p, m in _linears(model) if p not in found)
    return found if table is None or table not in usable or whole_twin else {**found, table: "vocab"}


def _asked(model: Any, getter: str) -> Any:
    """What a HF model calls its embedding or its head; None when it has no answer (models of two parts)."""
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
