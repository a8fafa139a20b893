"""Finds the ranks that are behind, from their fingerprints (`groups.fingerprint`). Pure: no torch, any process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def differences(fingerprints: Sequence[Mapping[str, int]]) -> list[str]:
    """What does not match between the ranks' fingerprints (index == rank); empty when all is matched.

    A line per group whose members issued different numbers of collectives, and per pair of ranks with a send
    that nobody received, or the other way round.
    """
    lines = []
    transfers: dict[str, dict[str, int]] = {"sent": {}, "received": {}}
    collectives: dict[str, dict[int, int]] = {}
    for rank, counts in enumerate(fingerprints):
        for key, number in counts.items():
            kind = key.rsplit(" ", 1)[-1]
            if kind in transfers and "->" in key:
                transfers[kind][key.removesuffix(f" {kind}")] = number
            else:
                collectives.setdefault(key, {})[rank] = number
    for label, by_rank in sorted(collectives.items()):
        if len(set(by_rank.values())) > 1:
            lines.append(f"{label}: " + ", ".join(f"rank {rank} issued {n}" for rank, n in sorted(by_rank.items())))
    return lines + _unmatched(transfers["sent"], transfers["received"])


def _unmatched(sent: Mapping[str, int], received: Mapping[str, int]) -> list[str]:
    # A receive from "any" can take any pair's messages: such a destination is compared in total.
    anyone = {key.replace("any->", "*->") for key in received if ": any->" in key}

    def totals(counts: Mapping[str, int]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for key, number in counts.items():
            label, pair = key.rsplit(": ", 1)
            total = f"{label}: *->{pair.split('->')[1]}"
            key = total if total in anyone else key
            sums[key] = sums.get(key, 0) + number
        return sums

    gone, come = totals(sent), totals(received)
    return [
        f"{key}: sent {gone.get(key, 0)}, received {come.get(key, 0)}"
        for key in sorted({*gone, *come})
        if gone.get(key, 0) != come.get(key, 0)
    ]
