"""The files of `%cluster sync` for a new rank, which gets them from a rank that was there before."""

from __future__ import annotations

from nbkit.bridge import calls
from nbkit.bridge.calls import BroughtProject
from nbkit.bridge.replacing.handing import broadcast, gathered


def hand_on(project: BroughtProject | None, giver: int, *, new: bool) -> None:
    """Have a new rank import from the same files as the others. Collective.

    This must come before the new rank reads names, since these may be modules of the project. project: None if no files
    were copied.
    """
    if project is None:
        return
    assert calls.place is not None
    found = calls.look(project.root, project.digests) if new else None
    lacks = {name for each in gathered(found) if each is not None for name in each["lacks"]}
    if lacks:
        files = broadcast(calls.read(sorted(lacks)) if calls.place.rank == giver else None, giver)
        if found is not None and found["lacks"]:
            calls.write(files)
    if found is not None:
        calls.use(project.root, project.digests, found["shared"], [])
