"""A cell's source, looked at before it is sent: a syntax error is reported once, and nothing has run."""

from __future__ import annotations

import ast

from IPython.core.inputtransformer2 import TransformerManager

from nbkit.errors import UsageError


class CellSyntaxError(UsageError):
    """The cell is not Python."""


def check(source: str, number: int) -> None:
    """Raise CellSyntaxError if `source` cannot be compiled as a notebook cell (magics and await are fine)."""
    try:
        transformed = TransformerManager().transform_cell(source)
        compile(transformed, f"Cell In[{number}]", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").rstrip("\n")
        caret = " " * max(0, (error.offset or 1) - 1) + "^"
        raise CellSyntaxError(
            f"{type(error).__name__}: {error.msg} (line {error.lineno})",
            numbers=f"{line}\n  {caret}" if line else "",
            hint="nothing has run on any rank",
        ) from None
