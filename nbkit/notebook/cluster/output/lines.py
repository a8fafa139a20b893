"""Turn the printed text of ranks into lines for people: labelled, with equal lines folded, and one line for progress.

The code has no clock: callers pass the time, and ask what is ready. Lines of one rank keep their order. A line waits at
most `FOLD_SECONDS` for equal lines from other ranks. Text without a newline yet, and lines that are rewritten with
`\\r` like progress bars, form one moving line at the bottom for all ranks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbkit.wire.cells import ranks_text

FOLD_SECONDS = 0.1
REST_SECONDS = 0.04  # text without a newline is shown if nothing follows it for this long
GROWING_SECONDS = 0.5  # and at the latest after this, if more text follows
UP = "\x1b[A"  # a progress bar moves the cursor to the bar above with this
BACK_SECONDS = 0.25  # it does so within this time, even on a busy machine
MOVE_SECONDS = 0.1  # at least, between two updates of the moving line
MOVING_WIDTH = 160
MOVING_ROWS = 8  # at most, of bars below each other


@dataclass
class _Line:
    number: int
    name: str
    text: str
    since: float
    ranks: list[int]


@dataclass
class _Twins:
    """The waiting lines with the same text, sorted by number. Lines before index `head` have been shown."""

    lines: list[_Line] = field(default_factory=list)
    head: int = 0

    def after(self, number: int) -> _Line | None:
        """Return the first line after `number`. Uses bisection: a rank may print the same line 100,000 times."""
        at = bisect_right(self.lines, number, lo=self.head, key=lambda line: line.number)
        return self.lines[at] if at < len(self.lines) else None


@dataclass
class _Tail:
    """The text that a rank has printed on a stream since its last newline.

    since: time of its last piece. first: time of its first piece. moves: it has used a carriage return. redrawn: text
    followed the carriage return. above: ended progress bars, to which the cursor may return. below: bars below the
    cursor, after it went up.
    """

    text: str = ""
    since: float = 0.0
    first: float = 0.0
    moves: bool = False
    redrawn: bool = False
    above: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        """Return the lines as a terminal would show them."""
        return [row for row in (*self.above, self.text, *self.below) if row.strip()]


_PROGRESS = re.compile(r"\bstep \d+(/\d+)? · loss ")  # as nbkit/rank/telemetry/sinks.py writes it


@dataclass
class Lines:
    """The lines of one cell. ranks: the ranks that run it.

    has_card: a card shows the training's progress, so its moving line is left out.
    """

    ranks: Sequence[int]
    waiting: deque[_Line] = field(default_factory=deque)
    twins: dict[tuple[str, str], _Twins] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    tails: dict[tuple[int, str], _Tail] = field(default_factory=dict)
    count: int = 0
    shown: str = ""
    shown_name: str = "stdout"
    moved: float = 0.0
    changed: bool = False
    has_card: bool = False

    def feed(self, now: float, rank: int, name: str, text: str) -> None:
        """Accept text that `rank` has printed on stream `name` ("stdout" or "stderr")."""
        tail = self.tails.setdefault((rank, name), _Tail())
        other = "stderr" if name == "stdout" else "stdout"
        before = self.tails.get((rank, other))
        if before is not None and not before.below:  # the lines of the other stream came first
            self._release(now, rank, other, before)
        if not tail.text or "\n" in text:
            tail.first = now
        for number, line in enumerate(text.split("\n")):
            if number:
                self._end_line(now, rank, name, tail)
            first, *after = line.split(UP)
            self._rewrite(tail, first)
            for piece in after:
                self._go_up(tail)
                self._rewrite(tail, piece)
        tail.since = now
        self.changed = True

    def _end_line(self, now: float, rank: int, name: str, tail: _Tail) -> None:
        """End a line. If it is a progress bar, it stays in the moving line, because the cursor may come back to it."""
        if tail.below:
            tail.above.append(tail.text)
            tail.text = tail.below.pop(0)
            tail.moves = tail.redrawn = bool(tail.text.strip())
            tail.text = tail.text if tail.moves else ""
        elif tail.redrawn:
            tail.above.append(tail.text)
            tail.text, tail.moves, tail.redrawn = "", False, False
            if len(tail.above) > MOVING_ROWS:
                self._add(now, rank, name, tail.above.pop(0))
        else:
            self._release(now, rank, name, tail)
            self._add(now, rank, name, tail.text)
            tail.text, tail.moves = "", False

    @staticmethod
    def _go_up(tail: _Tail) -> None:
        tail.below.insert(0, tail.text)
        tail.text = tail.above.pop() if tail.above else ""
        tail.moves = tail.redrawn = True

    def _release(self, now: float, rank: int, name: str, tail: _Tail) -> None:
        """Release the ended bars: the cursor has not come back to them."""
        for row in tail.above:
            if row.strip():
                self._add(now, rank, name, row)
        tail.above = []

    @staticmethod
    def _rewrite(tail: _Tail, piece: str) -> None:
        """Append to a line as a terminal would: text after `\\r` replaces the line."""
        tail.redrawn |= tail.moves and bool(piece)
        if "\r" in piece:
            tail.moves = True
            before, _, after = piece.rpartition("\r")
            tail.redrawn |= bool(after)
            # "text\r" alone leaves the text on screen; only what follows replaces it.
            tail.text = after or before.rpartition("\r")[2] or tail.text
        else:
            tail.text = piece if tail.moves and piece else tail.text + piece

    def _add(self, now: float, rank: int, name: str, text: str) -> None:
        earlier = self.last.get(rank, -1)
        twins = self.twins.setdefault((name, text), _Twins())
        twin = twins.after(earlier)
        if twin is not None:
            twin.ranks.append(rank)
            self.last[rank] = twin.number
            return
        line = _Line(self.count, name, text, now, [rank])
        self.count += 1
        self.waiting.append(line)
        twins.lines.append(line)
        self.last[rank] = line.number

    def due(self, now: float) -> float | None:
        """Return the seconds until something more can be shown; None if nothing is waiting."""
        waits = []
        if self.waiting:
            head = self.waiting[0]
            waits.append(0.0 if len(head.ranks) == len(self.ranks) else head.since + FOLD_SECONDS - now)
        if self.changed:
            waits += [tail.since + BACK_SECONDS - now for tail in self.tails.values() if tail.above]
            soonest = min((self._show_at(tail) for tail in self.tails.values() if tail.rows), default=now)
            if soonest > now or self._moving(now) != self.shown:
                waits.append(max(soonest, self.moved + MOVE_SECONDS) - now)
        return max(0.0, min(waits)) if waits else None

    def take(self, now: float, *, final: bool = False) -> list[tuple[str, str]]:
        """Return the text that is ready, as [(stream name, text)] in order.

        final: return everything, because the cell has ended.
        """
        for (rank, name), tail in self.tails.items():
            if final:
                for row in tail.rows if tail.above or tail.below else [tail.text] * bool(tail.text):
                    self._add(now, rank, name, row)
                tail.text, tail.moves, tail.redrawn, tail.above, tail.below = "", False, False, [], []
            elif tail.above and now >= tail.since + BACK_SECONDS:
                self._release(now, rank, name, tail)
        blocks: list[tuple[str, list[str]]] = []
        while self.waiting:
            head = self.waiting[0]
            if not final and len(head.ranks) < len(self.ranks) and now < head.since + FOLD_SECONDS:
                break
            self.waiting.popleft()
            twins = self.twins[head.name, head.text]
            twins.head += 1
            if twins.head == len(twins.lines):
                del self.twins[head.name, head.text]
            if not blocks or blocks[-1][0] != head.name:
                blocks.append((head.name, []))
            blocks[-1][1].append(f"{label(head.ranks)} {head.text}\n")
        pieces = [(name, "".join(lines)) for name, lines in blocks]
        return self._with_moving_line(now, pieces, final)

    def make_way(self) -> list[tuple[str, str]]:
        """Return the text that erases the moving line before other output. It is drawn again below that output."""
        wiped = [(self.shown_name, f"\r{' ' * len(self.shown)}\r")] if self.shown else []
        self.shown, self.changed = "", True
        return wiped

    def _with_moving_line(self, now: float, pieces: list[tuple[str, str]], final: bool) -> list[tuple[str, str]]:
        moving = "" if final else self._moving(now)
        if self.has_card and _PROGRESS.search(moving):
            moving = ""
        if pieces and self.shown:
            # Lines go above the moving line: erase it, print them, draw it again.
            pieces.insert(0, (self.shown_name, f"\r{' ' * len(self.shown)}\r"))
            self.shown = ""
        if moving != self.shown and (pieces or final or now >= self.moved + MOVE_SECONDS):
            padding = " " * max(0, len(self.shown) - len(moving))
            start = "\r" if self.shown else ""
            end = "\r" if not moving else ""
            name = next((name for (_, name), tail in self.tails.items() if tail.rows), self.shown_name)
            pieces.append((name, f"{start}{moving}{padding}{end}"))
            self.shown, self.shown_name, self.moved = moving, name, now
        self.changed = self.shown != moving or any(
            tail.above or (tail.rows and self._show_at(tail) > now) for tail in self.tails.values()
        )
        return pieces

    @staticmethod
    def _show_at(tail: _Tail) -> float:
        """Return the time at which to show an unfinished line.

        A progress bar is shown at once. Other text waits a little for its newline.
        """
        if tail.moves or tail.above or tail.below:
            return tail.since
        return min(tail.since + REST_SECONDS, tail.first + GROWING_SECONDS)

    def _moving(self, now: float) -> str:
        """Return the moving line: the unfinished line of all ranks if it is the same, else that of the slowest rank."""
        texts: dict[str, list[int]] = {}
        for (rank, _), tail in self.tails.items():
            if (rows := tail.rows) and self._show_at(tail) <= now:
                texts.setdefault("  ".join(rows), []).append(rank)
        if not texts:
            return ""
        # The bars of the ranks differ in their numbers. The smallest text is that of the least advanced rank.
        text, ranks = min(texts.items(), key=lambda item: item[0])
        everyone = sorted({rank for held in texts.values() for rank in held})
        shown = label(everyone if len(texts) > 1 else ranks)
        return f"{shown} {text}"[:MOVING_WIDTH]


def label(ranks: Sequence[int]) -> str:
    """Return the ranks as a label: `[0-3]`."""
    return f"[{ranks_text(list(ranks))}]"
