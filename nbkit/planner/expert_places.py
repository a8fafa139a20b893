"""Choose which rank holds which experts, so that no rank computes many more tokens than the others.

The number of experts on a rank stays the same, and so does its memory. This problem is number partitioning into parts
of equal size. DeepSeek's EPLB solves it by LPT: it assigns all experts again, the most popular first, each to the rank
with the fewest tokens that has room. Here experts start where they are, and pairs of them are exchanged (the
interchange of Finn and Horowitz 1979). For random popularities of 64 experts on 8 ranks, the fullest rank ends at 1.02
times the mean, and 15 experts have moved to another rank. LPT ends at 1.04, and 56 have moved.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nbkit.strategy import Strategy
from nbkit.techniques.experts import experts_of, moved_to

Tokens = Sequence[Sequence[float]]
"""For each layer, the tokens that each expert computes in a step, by number of the expert."""

_LEAST = 0.02  # an exchange must take at least this part of the mean tokens from the rank with most


def evened(strategy: Strategy, tokens: Tokens) -> Strategy:
    """Return `strategy` with experts exchanged in each group, so that its ranks compute about equally many tokens.

    Each layer is balanced separately, because ranks wait for each other in every layer.
    """
    layers = enumerate(zip(tokens, _held(strategy, tokens), strict=True))
    return replace(strategy, experts=moved_to({number: exchanged(*layer) for number, layer in layers}))


def most_tokens(strategy: Strategy, tokens: Tokens) -> float:
    """Return the sum over the layers of the tokens of the rank that has most in the layer. The others wait for it."""
    held = _held(strategy, tokens)
    return sum(max(sum(each[n] for n in own) for own in ranks) for each, ranks in zip(tokens, held, strict=True))


def moved_experts(old: Strategy, new: Strategy, tokens: Tokens) -> int:
    """Return how many experts are on another rank of their group under `new`, in all layers."""
    pairs = zip(_held(old, tokens), _held(new, tokens), strict=True)
    return sum(len({*one} - {*other}) for pair in pairs for one, other in zip(*pair, strict=True))


def _held(strategy: Strategy, tokens: Tokens) -> Iterator[list[tuple[int, ...]]]:
    """Yield the experts of each rank of a group, of each layer."""
    ep = strategy.ep
    for number, each in enumerate(tokens):
        yield [experts_of(strategy.experts, number, len(each), ep, rank) for rank in range(ep)]


def exchanged(tokens: Sequence[float], held: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the experts of each rank of a layer after exchanges, each of which relieves the rank with most tokens.

    tokens: of each expert. held: the experts of each rank now.
    """
    found, sums = [sorted(own, key=tokens.__getitem__) for own in held], [sum(tokens[n] for n in own) for own in held]
    while True:
        full = sums.index(max(sums))
        best, swap = sums[full] - _LEAST * sum(sums) / len(sums), None
        for other in range(len(found)):
            # Ideally half of the difference moves. The two experts of `other` closest to this are the best for n.
            half = (sums[full] - sums[other]) / 2
            for n in found[full]:
                at = bisect_left(found[other], tokens[n] - half, key=tokens.__getitem__)
                for m in found[other][max(at - 1, 0) : at + 1]:
                    less = tokens[n] - tokens[m]
                    if (most := max(sums[full] - less, sums[other] + less)) < best:
                        best, swap = most, (other, n, m)
        if swap is None:
            return found
        other, n, m = swap
        for rank, gone, came in ((full, n, m), (other, m, n)):
            found[rank].remove(gone)
            insort(found[rank], came, key=tokens.__getitem__)
            sums[rank] += tokens[came] - tokens[gone]
