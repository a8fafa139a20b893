"""`%board`: TensorBoard in the notebook."""

from __future__ import annotations

from IPython.core.magic import Magics, line_magic, magics_class

from nbkit.notebook.board.board import Board

from .arguments import HelpShown, board_parser, parse


@magics_class
class BoardMagics(Magics):  # type: ignore[misc, untyped-decorator]
    """The line magic `%board`."""

    @line_magic  # type: ignore[misc, untyped-decorator]
    def board(self, line: str) -> Board | None:
        try:
            options = parse(board_parser(), line)
        except HelpShown:
            return None
        if options.stop:
            print(Board.end())
            return None
        return Board.start(options.logdir, height=options.height)


BoardMagics.board.__doc__ = board_parser().format_help()
