"""`%train`: control the running training, except for its strategy."""

from __future__ import annotations

from IPython.core.magic import Magics, line_magic, magics_class

from nbkit.notebook.cluster.cluster import current
from nbkit.notebook.cluster.training_control import ControlResult

from .arguments import HelpShown, parse, train_parser


@magics_class
class TrainMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """The line magic `%train`, with verbs."""

    @line_magic  # type: ignore[misc, untyped-decorator]
    def train(self, line: str) -> ControlResult | None:
        try:
            options = vars(parse(train_parser(), line))
        except HelpShown:
            return None
        act = getattr(current().training, options.pop("verb"))
        result: ControlResult | None = act(**options)
        return result


TrainMagics.train.__doc__ = train_parser().format_help()
