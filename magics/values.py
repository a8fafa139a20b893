"""`%push` and `%pull`: the only magics that touch the notebook's own names, each at an explicit word."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from magics.arguments import HelpShown, parse, pull_parser, push_parser
from nbkit.errors import UsageError
from nbkit.notebook.cluster.cluster import current


@magics_class
class ValueMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """Values between the notebook and the ranks."""

    @line_magic  # type: ignore[misc, untyped-decorator]
    def push(self, line: str) -> None:
        try:
            options = parse(push_parser(), line)
        except HelpShown:
            return
        unknown = [name for name in options.names if name not in self.shell.user_ns]
        if unknown:
            raise UsageError(f"{unknown[0]} is not defined in this notebook.", hint=f"{unknown[0]} = ...")
        cluster = current()
        if options.queue:
            cluster.wait()
        cluster.push({name: self.shell.user_ns[name] for name in options.names}, options.ranks, force=options.force)

    @line_magic  # type: ignore[misc, untyped-decorator]
    def pull(self, line: str) -> Any:
        try:
            options = parse(pull_parser(), line)
        except HelpShown:
            return None
        cluster = current()
        if options.queue:
            cluster.wait()
        ranks = None if options.all else options.rank
        values = {name: cluster.pull(name, ranks, force=options.force) for name in options.names}
        self.shell.user_ns.update({name: value for name, value in values.items() if name.isidentifier()})
        return tuple(values.values()) if len(values) > 1 else values[options.names[0]]


ValueMagics.push.__doc__ = push_parser().format_help()
ValueMagics.pull.__doc__ = pull_parser().format_help()
