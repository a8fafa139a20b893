"""Completion with Tab: a magic's verbs and options, and in a `%%distributed` cell the names on a rank."""

from __future__ import annotations

import argparse
import re
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.cluster import current
from nbkit.wire.cells import first_rank
from nbkit.wire.messages import CompleteName

from .arguments import PARSERS

PATIENCE_SECONDS = 0.3  # a rank answers in milliseconds, even while it trains; typing must not wait longer
_NAME = re.compile(r"[A-Za-z_][\w.]*$")


@context_matcher(identifier="nbkit.ranks")  # type: ignore[misc, untyped-decorator]
def complete(context: CompletionContext) -> SimpleMatcherResult:
    """Return a magic's verbs and options on its line, and elsewhere the names on the first rank that runs the cell."""
    nothing: Any = {"completions": []}
    words = context.text_until_cursor.rpartition("\n")[2].removesuffix(context.token).split()
    if words and words[0] in PARSERS:
        offered = _after(words[0], words[1:], "-" * context.token.startswith("-"))
        offered = [word for word in offered if word.startswith(context.token)]
        return {"completions": [SimpleCompletion(word, type="magic") for word in offered], "suppress": bool(offered)}
    first = context.full_text.lstrip().split("\n", 1)[0]
    word = _NAME.search(context.token)
    if not first.startswith(("%%distributed", "%%rank")) or context.cursor_line == 0 or word is None:
        return nothing
    try:
        cluster = current()
    except ClusterError:
        return nothing
    rank = first_rank(first)
    answers = cluster.connection.client.ask([rank], CompleteName(word.group()), PATIENCE_SECONDS)
    before = context.token[: word.start()]
    matches = answers.get(rank, {}).get("matches", ())
    return {"completions": [SimpleCompletion(before + match, type="on the ranks") for match in matches]}


def _after(magic: str, words: list[str], dash: str) -> list[str]:
    """Return the words that may follow: options after a dash, else the magic's verbs if none is typed yet."""
    parser: argparse.ArgumentParser = PARSERS[magic]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            verb = next((word for word in words if word in action.choices), None)
            if verb is None:
                return [] if dash else list(action.choices)
            parser = action.choices[verb]
    options = (option for action in parser._actions for option in action.option_strings)
    return [option for option in options if dash and option.startswith("--")]
