"""The messages for a cell: the request that the notebook sends to the ranks, and the record that each rank returns."""

from __future__ import annotations

import base64
import importlib
import pickle
import re
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "error", "interrupted", "released"]
PromptKind = Literal["breakpoint", "post-mortem"]

COMM_TYPES = frozenset({"comm_open", "comm_msg", "comm_close"})
"""Messages between a widget and the pages that show it."""

SIGNATURES_KEPT = 1000
"""The number of message signatures that each process remembers, to refuse a message that arrives twice. Connections are
encrypted, so nobody else can repeat a message. Jupyter's default is 65,536, which takes 8 MB in each process."""

ENGINE_OPTIONS = (
    "--IPEngine.enable_nanny=False",  # the parent of the ranks does the work of a nanny
    "--IPEngine.timeout=60",
    "--IPEngine.max_heartbeat_misses=0",  # a busy rank must not leave; the parent watches the controller instead
    f"--Session.digest_history_size={SIGNATURES_KEPT}",
)
"""Options of the ipyparallel engines that run cells: ranks, and the engines that replace them in benchmarks."""

LONG_SECONDS = 2.0  # the notebook confirms the end of a longer cell, so that a later notebook does not show it again


@dataclass(frozen=True)
class CellRequest:
    """A cell on its way to the ranks.

    id: unique in the cluster. number: the notebook's execution count, so that tracebacks read "Cell In[5], line 2".
    ranks: all ranks that run it. requests: the number of requests to a running training that were sent before it.
    detached: True if the notebook does not wait for it. post_mortem: True to open a prompt in the frames of the cell
    that failed last, instead of running the source.
    """

    id: str
    source: str
    number: int
    ranks: tuple[int, ...]
    requests: int = 0
    detached: bool = False
    post_mortem: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt of a rank: it waits for a line that a person types in the notebook.

    cell: the id of the cell that waits. number: the number of this prompt on this rank; the answer has it too. where:
    the line of code in words: "cell 4 line 2".
    """

    cell: str
    rank: int
    number: int
    kind: PromptKind
    where: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a cell ended early on one rank. traceback: lines with ANSI colours, as IPython shows them.

    moment: time.time() when it happened; the earliest failure of several ranks is the root cause. line: the line in the
    cell; 0 if unknown. where: the collective that the rank was in, or "". stopped: True if nbkit has ended the cell on
    request. saved, saved_step: the newest checkpoint of the rank's newest training, or "". device_lost: the error of
    the rank's device if it does not compute any more, else "".
    """

    ename: str
    evalue: str
    traceback: tuple[str, ...]
    moment: float
    line: int = 0
    where: str = ""
    stopped: bool = False
    saved: str = ""
    saved_step: int = 0
    device_lost: str = ""


@dataclass(frozen=True)
class CellRecord:
    """The record of a cell that ended on one rank.

    outputs: the number of output messages that it published; the output is complete when that many have arrived.
    value: the value of the last expression, if it is plain data. bundle: the same as a MIME bundle, or None.
    dirty: why the world must be formed again, or "". counts: group -> number of collectives issued.
    """

    cell: str
    rank: int
    generation: int
    status: Status
    seconds: float
    outputs: int
    value: Any = None
    bundle: dict[str, Any] | None = None
    failure: Failure | None = None
    dirty: str = ""
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Remote:
    """A function on a rank, given by its name. So the notebook can call the bridge without importing it.

    `Remote("nbkit.bridge.calls:run_cell")(...)` imports the module in the process in which it is called, and calls the
    function there.
    """

    target: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)


def record_text(record: CellRecord) -> str:
    """Return a record as text for a JSON message. `record_from` restores values of all plain types."""
    return base64.b64encode(pickle.dumps(record)).decode()


def record_from(text: str) -> CellRecord:
    """Return the record from the text that `record_text` has made."""
    record = pickle.loads(base64.b64decode(text))
    assert isinstance(record, CellRecord)
    return record


def first_line(source: str, length: int = 40) -> str:
    """Return the first non-empty line of a cell, without a comment at its end, cut to `length` characters."""
    lines = (re.sub(r"\s{2,}#.*", "", line.strip()) for line in source.splitlines())
    first = next((line for line in lines if line and not line.startswith("# %%")), "")
    return first if len(first) <= length else first[: length - 1] + "…"


def first_rank(magic_line: str) -> int:
    """Return the first rank that `%%distributed --ranks 2-3` or `%%rank 2` names; 0 if it names none."""
    named = re.search(r"(?:%%rank|--ranks)[ =]+(\d+)", magic_line)
    return int(named.group(1)) if named else 0


def ranks_named(ranks: tuple[int, ...] | list[int]) -> str:
    """Return `Rank 2` or `Ranks 0-2,5`, for the beginning of a sentence."""
    return f"Rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


def ranks_text(ranks: tuple[int, ...] | list[int]) -> str:
    """Return ranks as text for people: `(0, 1, 2, 5)` -> `"0-2,5"`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
