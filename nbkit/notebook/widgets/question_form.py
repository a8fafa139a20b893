"""The form of a question in a lesson: a slider and a number, or choices, and a button that locks the guess."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbkit.errors import UsageError
from nbkit.notebook.widgets.widget_output import hear_always

STATIC = Path(__file__).parent / "static"


class QuestionForm:
    """The form of one question. widget: an anywidget, which a notebook can display."""

    def __init__(self, widget: Any) -> None:
        self.widget = widget

    def tell_locked(self, guess: float | str | None) -> None:
        """Show the guess, and accept no other."""
        self.widget.answer = {"locked": True, "guess": guess}


def question_form(values: dict[str, Any], lock: Callable[[float | str | None], None]) -> QuestionForm | None:
    """Return a form, or None without anywidget.

    values: "question", "unit", "low" and "high" of the slider or None, "choices", "band" in words.
    lock: called with the guess when the reader locks it.
    """
    try:
        import anywidget
        import traitlets
    except ImportError:
        return None

    class Form(anywidget.AnyWidget):  # type: ignore[misc, name-defined, no-any-unimported]
        _esm = STATIC / "question.js"
        _css = STATIC / "question.css"
        asked = traitlets.Dict().tag(sync=True)
        answer = traitlets.Dict().tag(sync=True)

    widget = Form(asked=values, answer={"locked": False, "guess": None})
    hear_always(widget.comm)

    def heard(_: Any, message: dict[str, Any], buffers: Any) -> None:
        if "lock" in message:
            try:
                lock(message["lock"])
            except UsageError as error:
                widget.send({"refused": error.what})

    widget.on_msg(heard)
    return QuestionForm(widget)
