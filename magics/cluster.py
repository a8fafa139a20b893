"""`%cluster`: start, attach, status, stop, restart, resize, sync, list, clean."""

from __future__ import annotations

import shlex
from typing import Any

from IPython import get_ipython
from IPython.core.magic import Magics, line_magic, magics_class

from nbkit.notebook.cluster import registry, site_settings
from nbkit.notebook.cluster.cells.handle import handle_of
from nbkit.notebook.cluster.cluster import Cluster, current, is_current
from nbkit.notebook.cluster.hosts.start_options import requested
from nbkit.notebook.cluster.job import AttachedJob

from .arguments import DETACHED, HelpShown, cluster_parser, parse, shown


@magics_class
class ClusterMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """The line magic `%cluster`, with a method for each verb."""

    @line_magic  # type: ignore[misc, untyped-decorator]
    def cluster(self, line: str) -> Any:
        try:
            options = options_of(line)
        except HelpShown:
            return None
        return shown(getattr(self, f"_{options.verb}")(options), as_json=getattr(options, "json", False))

    def _start(self, options: Any) -> Any:
        on = requested(options)
        if options.detach and on is not None:
            return Cluster.submit(on, name=options.name, ttl=options.ttl)
        others = [entry.name for entry in registry.entries() if is_current(entry.name)]
        asked = {key: getattr(options, key) for key in ("name", "gpus", "cpu", "spares", "ttl")}
        cluster = Cluster.start(options.n, **asked, on=on)
        print(f"{cluster.entry.name} is ready: {cluster.entry.n} ranks in {cluster.started_in:.1f} s")
        for other in others:
            if other != cluster.entry.name:
                print(f"{other} goes on: %cluster attach {other}   or   %cluster stop {other}")
        return cluster.status()

    def _attach(self, options: Any) -> Any:
        if options.job:
            return AttachedJob.attach(options.name)
        cluster = Cluster.attach(options.name, take=options.take)
        if (handle := handle_of(cluster.connection)) is not None:
            get_ipython().user_ns[DETACHED] = handle
        return cluster.status()

    def _status(self, options: Any) -> Any:
        known = Cluster.list()
        if any(entry.is_awaited for entry in known) and not any(is_current(entry.name) for entry in known):
            return known
        return current().status()

    def _stop(self, options: Any) -> Any:
        if options.name and not is_current(options.name):
            entry = registry.running(options.name)
            registry.end(entry)
        else:
            cluster = current()
            entry = cluster.entry
            cluster.stop()
        print(f"{entry.name} has ended: {entry.n} rank{'s' * (entry.n > 1)}")

    def _restart(self, options: Any) -> Any:
        return current().restart().status()

    def _resize(self, options: Any) -> Any:
        return current().resize(options.n, strategy=" ".join(options.strategy))

    def _sync(self, options: Any) -> Any:
        return current().sync(options.path)

    def _list(self, options: Any) -> Any:
        return Cluster.list()

    def _clean(self, options: Any) -> Any:
        print("\n".join(registry.clean()) or "nothing to clean")


def options_of(line: str) -> Any:
    """Return the options in `line`. Options of --on NAME are defaults for it."""
    line, _, rest = line.partition(" -- ")  # argparse would parse the rest as options of its own
    options = parse(cluster_parser(), line)
    words = shlex.split(rest, comments=True)
    if options.verb == "start" and options.on:
        kept, _, kept_rest = f" {site_settings.read().options_of(options.on)}".partition(" -- ")
        options = parse(cluster_parser(), f"start {kept} {line.strip().removeprefix('start')}")
        words = [*shlex.split(kept_rest, comments=True), *words]
    options.rest = tuple(words)
    return options


ClusterMagics.cluster.__doc__ = cluster_parser().format_help()
