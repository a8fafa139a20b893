"""`%push` and `%pull`: copy variables between the notebook and the ranks."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from nbkit.errors import UsageError
from nbkit.notebook.cluster.cluster import current

from .arguments import HelpShown, parse, pull_parser, push_parser


@magics_class
class ValueMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """The line magics `%push` and `%pull`."""

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
        named = {name: value for name, value in values.items() if name.isidentifier()}
        self.shell.user_ns.update(named)
        shown = tuple(values.values()) if len(values) > 1 else values[options.names[0]]
        if len(named) == len(values):
            self.shell.events.register("post_run_cell", _Forget(self.shell, shown))
        return shown


class _Forget:
    """A callback at the end of a cell that removes a pulled value from Out.

    The value has a variable of its own, and Out would keep every pulled value alive.
    """

    def __init__(self, shell: Any, value: Any) -> None:
        self._shell, self._value = shell, value

    def __call__(self, _: object) -> None:
        self._shell.events.unregister("post_run_cell", self)
        names, hook, value = self._shell.user_ns, self._shell.displayhook, self._value
        for number in [number for number, kept in names.get("_oh", {}).items() if kept is value]:
            del names["_oh"][number]
            names.pop(f"_{number}", None)
        for name in ("_", "__", "___"):
            if names.get(name) is value:
                names[name] = ""
            if getattr(hook, name, None) is value:
                setattr(hook, name, "")


ValueMagics.push.__doc__ = push_parser().format_help()
ValueMagics.pull.__doc__ = pull_parser().format_help()
