"""Find the ways in which the maps of a model may be split, from the data flow between them (proof/capture.py).

If the outputs of some maps go into one other map and nowhere else, they are split by columns, and the other map by
rows. Examples are up and down, or query, key, value and output. Several ways may be possible (different layouts of a
packed matrix, different attributes that count heads). The proof tries them one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

from torch import nn

from nbkit.rank.parallel.tensor.plan.linear_types import sizes
from nbkit.rank.parallel.tensor.plan.plan import Heads, Pair, named_counts, numbers_in

_MOST_COUNTS, _MOST_WAYS = 3, 32


@dataclass(frozen=True)
class Product:
    """A product of two tensors for each row.

    first, second: the maps from which each tensor comes. dims: sizes that may be the features of a head, the likeliest
    first.
    """

    first: frozenset[str]
    second: frozenset[str]
    dims: tuple[int, ...]


@dataclass(frozen=True)
class MapFlow:
    """Data flow between the maps of a model.

    sources: linear map -> maps whose outputs reach it through no other map, in the order of the first calls. readers:
    map -> maps that its output reaches through no other map, "" for the output of the model. products: products of two
    tensors that come from maps. tables: embeddings that read integers of the batch. called: modules that were called.
    """

    sources: Mapping[str, frozenset[str]]
    readers: Mapping[str, frozenset[str]]
    products: tuple[Product, ...]
    tables: frozenset[str]
    called: frozenset[str]


def flow_heads(model: nn.Module, flow: MapFlow) -> set[str]:
    """Return the linear maps that feed only the model's output, with as many outputs as a token embedding has rows."""
    rows = {model.get_submodule(path).num_embeddings for path in flow.tables}
    shown = (path for path in flow.sources if flow.readers.get(path) == frozenset(("",)))
    return {path for path in shown if sizes(model.get_submodule(path))[1] in rows}


def flow_pairs(model: nn.Module, flow: MapFlow, taken: Collection[str]) -> list[tuple[Pair, ...]]:
    """Return for each pair the ways in which it may be packed. taken: maps that have another role or stay whole."""
    used, found = set(taken), list[tuple[Pair, ...]]()
    for row, sources in flow.sources.items():
        only = frozenset((row,))
        columns = [
            path for path in flow.sources if path in sources - used and flow.readers.get(path) == only and path != row
        ]
        if columns and row not in used and (ways := _ways(model, flow, columns, row)):
            found.append(ways)
            used.update((*ways[0].columns, row))
    return found


def _ways(model: nn.Module, flow: MapFlow, columns: Sequence[str], row: str) -> tuple[Pair, ...]:
    inner, width = sizes(model.get_submodule(row))
    outs = {path: sizes(model.get_submodule(path))[1] for path in columns}
    owner = _owner(flow, (*columns, row))
    product = next((p for p in flow.products if p.first | p.second <= set(columns)), None)
    if product is not None:
        return tuple(_attention(model.get_submodule(owner), owner, outs, row, inner, product))
    outs = {path: out for path, out in outs.items() if out % inner == 0}
    # Maps with a much narrower middle are an adapter. Splitting it would send more than it saves.
    ends = [width, *(sizes(model.get_submodule(path))[0] for path in outs)]
    if not outs or 2 * inner < min(ends):
        return ()
    packed = {path: (inner,) * (out // inner) for path, out in outs.items()}
    ways = (packed, {path: (out,) for path, out in outs.items()})
    return tuple(Pair(owner, "mlp", tuple(outs), (row,), ways[i], inner) for i in range(1 + (ways[0] != ways[1])))


def _attention(
    module: nn.Module, owner: str, outs: Mapping[str, int], row: str, inner: int, product: Product
) -> Iterator[Pair]:
    for dim in product.dims:
        if inner % dim or inner == dim or any(outs[path] % dim for path in product.first | product.second):
            continue
        one: dict[str, tuple[int, ...]] = {
            path: (out,) for path, out in outs.items() if out % dim == 0 or out % (inner // dim) == 0
        }
        keys = [path for path in one if path in product.second]
        if not keys:
            continue
        kv, packed = min(outs[path] for path in keys), dict(one)
        if keys[0] in product.first:  # query, key and value are concatenated in one matrix
            kv = (kv - inner) // 2 if kv > inner else kv
            packed[keys[0]] = (inner, kv, kv) if outs[keys[0]] == inner + 2 * kv else one[keys[0]]
        elif one.keys() == product.first | product.second and kv % (2 * dim) == 0:  # keys and values
            kv //= 2
            packed[keys[0]] = (kv, kv)
        if kv % dim or not kv:
            continue
        heads = Heads(inner // dim, kv // dim, dim)
        counts = named_counts(module, heads)
        for widths in (packed, one) if packed != one else (one,):
            yield Pair(owner, "attention", tuple(one), (row,), widths, inner, heads, counts)


def _counted(model: nn.Module, pair: Pair, size: int, reads: Mapping[str, Collection[str]]) -> Iterator[Pair]:
    """Yield `pair` with different choices of the attributes that a rank divides. Those found by name come first."""
    inside = f"{pair.owner}." if pair.owner else ""
    read = {path[len(inside) :] if path != pair.owner else "": names for path, names in reads.items()
            if path == pair.owner or path.startswith(inside)}  # fmt: skip
    totals = set(pair.totals)
    if pair.heads is not None:
        totals |= {pair.heads.heads, pair.heads.kv_heads}
    else:  # groups of features
        totals |= {n for n in range(2, pair.inner) if pair.inner % n == 0}
    among = numbers_in(model.get_submodule(pair.owner), {n for n in totals if n % size == 0}, read)[:_MOST_COUNTS]
    first = list(dict.fromkeys((pair.counts, ())))
    rest = (each for many in range(len(among), 0, -1) for each in combinations(among, many))
    others = [each for each in rest if set(each) not in [set(counts) for counts in first]]
    for views in (False, True) if pair.heads is not None else (False,):
        yield from (replace(pair, counts=counts, views=views) for counts in (*first, *others))


def ways_of(model: nn.Module, packed: Sequence[Pair], size: int, reads: Mapping[str, Collection[str]]) -> list[Pair]:
    """Return the ways to split a pair into `size` parts, in the order in which they are tried.

    packed: the ways in which its matrices may be packed. reads: path of a module -> own attributes that are read while
    it runs.
    """
    each = [list(_counted(model, pair, size, reads)) for pair in packed]
    rounds = (ways[i] for i in range(max(map(len, each))) for ways in each if i < len(ways))
    return list(islice(rounds, _MOST_WAYS))


def _owner(flow: MapFlow, paths: Sequence[str]) -> str:
    """Return the innermost module that was called and contains all of `paths`."""
    names = [path.split(".")[:-1] for path in paths]
    shared = 0
    while all(len(each) > shared and each[shared] == names[0][shared] for each in names):
        shared += 1
    while shared and ".".join(names[0][:shared]) not in flow.called:
        shared -= 1
    return ".".join(names[0][:shared])
