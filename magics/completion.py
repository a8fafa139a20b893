"""Tab in a `%%distributed` cell offers the names that live on a rank, which the notebook itself does not have."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from nbkit.errors import ClusterError
from nbkit.notebook.cluster.cluster import current
from nbkit.wire.cells import first_rank

PATIENCE_SECONDS = 0.3  # a rank answers in a few milliseconds even while it trains; typing must not wait for more
_NAME = re.compile(r"[A-Za-z_][\w.]*$")


@context_matcher(identifier="nbkit.ranks")  # type: ignore[misc, untyped-decorator]
def complete(context: CompletionContext) -> SimpleMatcherResult:
    """The names of the first rank that runs the cell."""
    nothing: Any = {"completions": []}
    first = context.full_text.lstrip().split("\n", 1)[0]
    word = _NAME.search(context.token)
    if not first.startswith(("%%distributed", "%%rank")) or context.cursor_line == 0 or word is None:
        return nothing
    try:
        cluster = current()
    except ClusterError:
        return nothing
    rank = first_rank(first)
    answers = cluster.connection.client.ask([rank], "complete", PATIENCE_SECONDS, text=word.group())
    before = context.token[: word.start()]
    matches = answers.get(rank, {}).get("matches", ())
    return {"completions": [SimpleCompletion(before + match, type="on the ranks") for match in matches]}
