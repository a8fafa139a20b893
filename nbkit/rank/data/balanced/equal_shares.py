"""Divides the rows of a batch over ranks, so that all ranks have equal costs, and equal numbers of rows of each group.

This is balanced number partitioning in two steps. First, rows are dealt in rounds, as in the balanced differencing
method of Yakir (1996). A round has one row for each rank, and these are neighbours in the order of costs. Rounds with
the largest differences come first. The costliest row of a round goes to the rank with the least cost so far (Graham's
longest-first rule, 1969). Second, two ranks exchange pairs of rows of one group, as long as that lowers the cost of the
costliest rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate

_NEAR, _ENOUGH = 2e-4, 1.01  # relative to the mean
_SUMS = 1 << 15  # the number of sums that are distinguished


@dataclass
class _Part:
    rows: list[int] = field(default_factory=list)
    cost: float = 0.0


def equal_shares(
    costs: Sequence[float],
    ranks: int,
    groups: Sequence[Hashable] | None = None,
    speeds: Sequence[Fraction] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the indices of its rows, ascending. Ranks with more rows come first.

    costs, groups: one entry for each row of the batch. Ranks' numbers of rows differ by one at most, in total and in
    each group. If a rank's cost is then more than 1 % above the mean, rows are moved to avoid this if possible, even if
    the numbers of rows become unequal.
    speeds: the speeds of the ranks, if unequal. Then costs are proportional to speeds, the numbers of rows and groups
    are arbitrary, and ranks are not reordered. Equal input gives equal output on every rank.
    """
    if speeds:
        return _by_speed(costs, [float(speed) for speed in speeds])
    near, groups = _NEAR * sum(costs) / ranks, groups or [0] * len(costs)
    parts = _dealt(costs, ranks, groups)
    _exchange(parts, costs, groups, near)
    if near and max(part.cost for part in parts) * ranks > _ENOUGH * sum(costs):
        _divide_anew(parts, costs, near)
    parts.sort(key=lambda part: (-len(part.rows), min(part.rows, default=0)))
    return tuple(tuple(sorted(part.rows)) for part in parts)


def _by_speed(costs: Sequence[float], speeds: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Return the rows of each rank. Each row, costliest first, goes to the rank that would finish it first.

    This is Graham's rule (1969) for machines of different speeds.
    """
    done, rows = [0.0] * len(speeds), [list[int]() for _ in speeds]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        rank = min(range(len(speeds)), key=lambda rank: (done[rank] + costs[row] / speeds[rank], len(rows[rank])))
        rows[rank].append(row)
        done[rank] += costs[row] / speeds[rank]
    return tuple(tuple(sorted(own)) for own in rows)


def unevenness(costs: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    """Return the cost of the costliest rank, divided by the mean cost."""
    sums = [sum(costs[row] for row in share) for share in shares]
    return max(sums) * len(sums) / sum(sums) if sum(sums) else 1.0


def _dealt(costs: Sequence[float], ranks: int, groups: Sequence[Hashable]) -> list[_Part]:
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    rounds, rests = [], []
    for rows in members.values():
        rows.sort(key=lambda row: (-costs[row], row))
        whole = len(rows) // ranks * ranks
        rounds += [rows[start : start + ranks] for start in range(0, whole, ranks)]
        rests.append(rows[whole:])
    rounds.sort(key=lambda rows: costs[rows[-1]] - costs[rows[0]])
    parts = [_Part() for _ in range(ranks)]
    # The remaining rows of a group go to the ranks with the fewest rows.
    for rows in [*rounds, *sorted(rests, key=len, reverse=True)]:
        taking = sorted(parts, key=lambda part: (len(part.rows), part.cost))[: len(rows)]
        for row, part in zip(rows, sorted(taking, key=lambda part: part.cost), strict=True):
            part.rows.append(row)
            part.cost += costs[row]
    return parts


def _exchange(parts: list[_Part], costs: Sequence[float], groups: Sequence[Hashable], near: float) -> None:
    """Exchange rows of one group between the costliest rank and another rank, as long as that lowers its cost.

    near: costs that differ by less than this count as equal.
    """
    for _ in range(8 * len(costs)):
        parts.sort(key=lambda part: part.cost)
        most = parts[-1]
        for part in parts[:-1]:
            if most.cost - part.cost > near and (pair := _best(most, part, costs, groups)) is not None:
                most.rows[most.rows.index(pair[0])], part.rows[part.rows.index(pair[1])] = pair[1], pair[0]
                gain = costs[pair[0]] - costs[pair[1]]
                most.cost, part.cost = most.cost - gain, part.cost + gain
                break
        else:
            return


def _best(most: _Part, part: _Part, costs: Sequence[float], groups: Sequence[Hashable]) -> tuple[int, int] | None:
    """Return a row of each part. Their exchange brings the costs closest; None if no exchange lowers the larger."""
    gap = most.cost - part.cost
    by_group: dict[Hashable, list[tuple[float, int]]] = {}
    for row in part.rows:
        by_group.setdefault(groups[row], []).append((costs[row], row))
    for others in by_group.values():
        others.sort()
    found, left = None, gap
    for row in most.rows:
        others = by_group.get(groups[row], [])
        at = bisect_left(others, (costs[row] - gap / 2, -1))
        for cost, other in others[max(at - 1, 0) : at + 1]:
            if 0 < (gain := costs[row] - cost) < gap and (rest := abs(gap - 2 * gain)) < left:
                found, left = (row, other), rest
    return found


def _divide_anew(parts: list[_Part], costs: Sequence[float], near: float) -> None:
    """Divide the rows of two ranks again, as long as that brings their costs closer. Ignores numbers and groups."""
    for _ in range(4 * len(parts)):
        parts.sort(key=lambda part: part.cost)
        pairs = [(parts[-1], part) for part in parts[:-1]] + [(part, parts[0]) for part in parts[-2:0:-1]]
        for most, part in pairs:
            if (gap := most.cost - part.cost) > near:
                rows = most.rows + part.rows
                half = _nearest([costs[row] for row in rows], 0.5)
                cost = sum(costs[rows[i]] for i in half)
                if abs(most.cost + part.cost - 2 * cost) < gap - near:
                    most.cost, part.cost = most.cost + part.cost - cost, cost
                    most.rows, part.rows = [r for i, r in enumerate(rows) if i not in half], [rows[i] for i in half]
                    break
        else:
            return


def _nearest(costs: Sequence[float], share: float) -> set[int]:
    """Return the indices of `costs` whose sum is the closest below `share` of the total.

    It finds all possible sums, as bits of one integer.
    """
    unit = sum(costs) / _SUMS
    whole = [round(cost / unit) for cost in costs]
    sums = list(accumulate(whole, lambda found, cost: found | found << cost, initial=1))
    left = (sums[-1] & ((1 << int(sum(whole) * share) + 1) - 1)).bit_length() - 1
    taken = set()
    for i in reversed(range(len(whole))):
        if not sums[i] >> left & 1:
            taken.add(i)
            left -= whole[i]
    return taken
