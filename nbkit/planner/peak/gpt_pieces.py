"""The pieces of nbkit's GPT by formula, for plans where nothing can run: equal to what model_trace measures of it.

T positions, D width, V vocabulary, over t tensor and c context ranks. In elements of a row, a block keeps for backward:

    whole                 the inputs of the maps behind both norms                 2 T D / c
    over t                queries, keys, values, attention, residual sums (2)      (4 + 2) T D / (t c), and with c > 1
                          keys and values of all positions in place of its own     2 T D (1 - 1/c) / t
                          attention from the head and from the tail, and together  T D / (t c)
                          the inner layer, before and behind its activation        8 T D / (t c)
    statistics (fp32)     of norms and attention                                   4 T / (t c), T heads / (t c)

With c > 1 all blocks share the masks of causal attention from two of 2 c chunks: of (T / 2 c) (T + T / 2 c) elements.
The count of Korthikanti et al. 2022 (section 4) without dropout masks and with an attention that keeps no scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbkit.planner.gpt_config import GPTConfig
from nbkit.planner.job_facts import Facts
from nbkit.planner.memory import Bytes
from nbkit.planner.peak.activations import Line, Piece
from nbkit.planner.peak.peak import Weights
from nbkit.strategy import Strategy

_FP32 = 4


@dataclass(frozen=True)
class GPTPieces:
    """Of a GPT. element: bytes of what is computed (2 in bf16). parameter: of a weight. recompute: of the blocks."""

    config: GPTConfig
    element: int = 4
    parameter: int = 4
    recompute: bool = False

    def pieces(self, tp: int, cp: int) -> tuple[Piece, ...]:
        """One for each block, on a rank of these axes."""
        of, element = self.config, self.element
        hidden, numbers = of.block * of.width * element, of.block * of.vocab
        part = hidden / (tp * cp)
        keys = 2 * hidden * (1 - 1 / cp) / tp
        statistics = _FP32 * of.block * (4 + of.heads) / (tp * cp)
        kept = 2 * hidden / cp + (14 + (cp > 1)) * part + keys + statistics
        masks = element * of.block**2 * (2 * cp + 1) / (2 * cp) ** 2 if cp > 1 else 0
        # Under tp what the outer maps give and take is whole for a moment.
        wide, square = 4 * part + (hidden / cp if tp > 1 else 0), self.parameter * of.width**2 / tp
        top = kept + (2 * hidden / cp if tp > 1 else part)
        # Behind the activation, the inner map, attention's maps; and at the end, with all gradients of the block.
        backward: tuple[Line, ...] = (
            Line(4 * square, kept + wide),
            Line(8 * square, kept - 3 * hidden / cp),
            Line(12 * square, 5 * hidden / cp),
        )
        if cp > 1:
            # The gradients of all keys and values, on their way to the ranks they belong to.
            backward = (*backward, Line(9 * square, 6 * part + 5 * hidden / tp))
        if self.recompute:
            # What is computed again makes its masks again.
            again = tuple(Line(line.fixed + masks, line.row + part) for line in backward)
            block, masks = Piece((Line(masks, top),), Line(0, part), again, Line(0, part)), 0
        else:
            block = Piece((Line(0, top),), Line(0, kept), backward, Line(0, part))
        logits = numbers / tp
        ends = hidden if cp > 1 else 0
        first = Piece(
            (Line(block.forward[0].fixed + masks, block.forward[0].row + part + ends),),
            Line(masks, block.kept.row + part),
            tuple(Line(line.fixed + masks, line.row + part) for line in block.backward),
            block.carried,
        )
        joined = hidden - part if cp > 1 else 0
        behind = block.kept.row + hidden + joined + _FP32 * logits + 2 * _FP32 * of.block
        last = Piece(
            (Line(0, max(block.forward[0].row, behind + element * logits)),),
            Line(0, behind),
            (Line(0, behind + 2 * _FP32 * logits), *_after(block.backward, self.parameter * of.vocab * of.width / tp)),
            Line(0, 0),
        )
        if of.layers == 1:
            return (Piece((*first.forward, *last.forward), last.kept, last.backward, last.carried),)
        return (first, *(block,) * (of.layers - 2), last)

    def weights(self, tp: int, cp: int) -> list[Weights]:
        """Bytes of the parameters of each piece on a rank."""
        of, size = self.config, self.parameter
        square = size * of.width**2 // tp
        vectors = (size * of.width,) * 6 + (size * 3 * of.width // tp, size * 4 * of.width // tp)
        inside = (square,) * 4 + (4 * square,) * 2 + vectors
        partial = sum(inside) if cp > 1 else 6 * size * of.width if tp > 1 else 0
        # What maps alone read is cast before zero 3 gathers it: not the norms, nor the tables of the embedding.
        cast = max(size - self.element, 0) if tp == 1 else 0
        less, head = cast * (12 * of.width**2 + 9 * of.width), cast * of.vocab * of.width
        block = Weights(inside, (), partial, less)
        table, places = size * of.vocab * of.width // tp, size * of.block * of.width
        ends = (table, places), (2 * size * of.width, table)
        if of.layers == 1:
            return [Weights(inside, (*ends[0], *ends[1]), partial, less, head)]
        first, last = Weights(inside, ends[0], partial, less), Weights(inside, ends[1], partial, less, head)
        return [first, *(block,) * (of.layers - 2), last]

    @property
    def name(self) -> str:
        """For people."""
        return f"a GPT of {self.parameters() / 1e9:.3g} B parameters"

    @property
    def each(self) -> Bytes:
        """As nbkit trains: in bf16 too, weights and gradients are fp32."""
        return Bytes(self.parameter, self.parameter, 2 * self.parameter)

    def recomputing(self, recompute: bool) -> GPTPieces:
        """The same, with its blocks recomputed or not."""
        return replace(self, recompute=recompute)

    def touched(self, tp: int = 1, cp: int = 1) -> float:
        """Bytes of a row that a forward reads and writes beside multiplying: norms, sums, the activation, logits."""
        of = self.config
        return self.element * of.block * (of.layers * 28 * of.width + 4 * of.vocab) / (tp * cp)

    def facts(self, batch: int) -> Facts:
        """For what is checked of a strategy."""
        of = self.config
        return Facts(
            heads=of.heads,
            kv_heads=of.heads,
            width=of.width,
            vocab=of.vocab,
            blocks=of.layers,
            sequence=of.block,
            batch=batch,
        )

    def parameters(self) -> int:
        """Of the whole model."""
        of = self.config
        return of.layers * (12 * of.width**2 + 13 * of.width) + (2 * of.vocab + of.block + 2) * of.width

    def flops(self, tp: int = 1, cp: int = 1) -> float:
        """Of a row, forward: two for each multiplication, in the maps and in attention, of which half is masked.

        Over cp ranks the head is on each, and of what is masked, attention from a chunk computes the chunk's square.
        """
        of = self.config
        attention = of.layers * of.block * of.width * (1 + 1 / (2 * cp) if cp > 1 else 1)
        return 2.0 * of.block * ((of.layers * 12 * of.width**2 + attention) / cp + of.vocab * of.width) / tp

    def costs(self) -> tuple[float, ...]:
        """Multiplications of each piece: the head is the last one's."""
        of = self.config
        block = 12.0 * of.width**2 + of.block * of.width
        return (block,) * (of.layers - 1) + (block + of.vocab * of.width,)

    def refused(self, strategy: Strategy) -> None:
        """Nothing that its numbers allow."""


def _after(lines: tuple[Line, ...], more: float) -> tuple[Line, ...]:
    return tuple(Line(line.fixed + more, line.row) for line in lines)
