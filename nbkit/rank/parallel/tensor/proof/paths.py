"""Paths of modules, and of pairs, as seen from a module above them."""

from __future__ import annotations

from dataclasses import replace

from nbkit.rank.parallel.tensor.plan.plan import Pair


def inside(path: str, above: str) -> bool:
    """Whether `path` is the module at `above`, or within it."""
    return not above or f"{path}.".startswith(f"{above}.")


def under(above: str, path: str) -> str:
    """`path`, relative to `above`, as a path from the top."""
    return f"{above}.{path}" if above and path else above or path


def relative_path(path: str, above: str) -> str:
    """`path`, from the top, as a path from `above`."""
    return path[len(above) + 1 :] if above else path


def relative(pair: Pair, above: str) -> Pair:
    """`pair` by paths from `above`."""

    def short(path: str) -> str:
        return relative_path(path, above)

    widths = {short(path): sizes for path, sizes in pair.widths.items()}
    return replace(
        pair, owner=short(pair.owner), columns=tuple(map(short, pair.columns)), rows=tuple(map(short, pair.rows)),
        widths=widths,
    )  # fmt: skip
