"""Whether a cluster is still there, and still this notebook's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbkit.errors import ClusterError
from nbkit.notebook.cluster import registry

if TYPE_CHECKING:
    from nbkit.notebook.cluster.cluster import Cluster

_TAKEN = "another notebook has taken the cluster over"


def why_gone(cluster: Cluster) -> str:
    """Why nothing can be sent to the cluster any more, or ""."""
    if cluster.ended:
        return "the cluster was stopped"
    if not cluster.entry.is_alive():
        return "the cluster has ended"
    try:
        found = registry.find(cluster.entry.name)
    except ClusterError:  # a notebook with another release of nbkit has attached to it
        return _TAKEN
    return _TAKEN if found and found.kernel != cluster.entry.kernel else ""


def must_be_here(cluster: Cluster) -> None:
    """Raise ClusterError if the cluster is gone."""
    if why := why_gone(cluster):
        again = f"%cluster attach {cluster.entry.name} --take" if why == _TAKEN else "%cluster start"
        raise ClusterError(f"{cluster.entry.name}: {why}.", hint=again)
