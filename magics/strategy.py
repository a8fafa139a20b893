"""`%strategy`: show the panel, or switch by typing. `%compare`: measure several strategies."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class

from nbkit.errors import UsageError
from nbkit.notebook.cluster.cluster import current
from nbkit.notebook.widgets.panel.panel import StrategyPanel

from .arguments import HelpShown, compare_parser, parse, shown, strategy_parser


@magics_class
class StrategyMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """The line magics `%strategy` and `%compare`."""

    @line_magic  # type: ignore[misc, untyped-decorator]
    def strategy(self, line: str) -> Any:
        try:
            options = parse(strategy_parser(), line)
        except HelpShown:
            return None
        wanted = " ".join(options.strategy)
        if options.undo and (wanted or options.steps is not None):
            raise UsageError(
                "--undo takes no strategy and no --try.", numbers=line, hint="%strategy zero3   or   %strategy --undo"
            )
        if options.steps is not None and not wanted:
            raise UsageError("--try needs a strategy.", hint=f"%strategy --try {options.steps} zero3")
        training = current().training
        if options.undo:
            return shown(training.undo(), as_json=options.json)
        if options.steps is not None:
            return shown(training.try_out(wanted, options.steps), as_json=options.json)
        if wanted:
            return shown(training.switch(wanted), as_json=options.json)
        return shown(training.look(), as_json=True) if options.json else StrategyPanel(current())

    @line_magic  # type: ignore[misc, untyped-decorator]
    def compare(self, line: str) -> Any:
        try:
            options = parse(compare_parser(), line)
        except HelpShown:
            return None
        result = current().training.compare(*options.strategies, steps=options.steps)
        return shown(result, as_json=options.json)


StrategyMagics.compare.__doc__ = compare_parser().format_help()
StrategyMagics.strategy.__doc__ = strategy_parser().format_help()
