"""Published formulas for a GPT: the bytes that all ranks together send in a step, and hold after it, by strategy.

Ring algorithms over n ranks: an all-reduce of S bytes sends 2 (n - 1) S in total. A reduce-scatter, or an all-gather
that ends with S bytes, sends (n - 1) S (nccl-tests, doc/PERFORMANCE.md). P: bytes of the parameters. H: bytes of the
hidden states of a batch.

    dp    2 (n-1) P; zero=3 3 (n-1) P, less what is kept from forward to backward     Rajbhandari et al. 2020, 7
    tp    8 (n-1) H a block, 2 (n-1) H for the embedding and for the head             Shoeybi et al. 2019, 3
          outside of the blocks, in every forward: (n-1) of the positions' table, 2 (n-1) of the last norm
    pp    2 H a boundary, which the ranks along tp send each a part of                Narayanan et al. 2021, 3.2, 4.1
    cp    6 (n-1) H a block: keys and values, twice, and their gradients              Dubey et al. 2024, 3.3.2
"""

from __future__ import annotations

from dataclasses import dataclass

from nbkit.strategy import Strategy

_FP32 = 4


@dataclass(frozen=True)
class Model:
    """A GPT of nbkit.GPTConfig's shape, trained in fp32 on `batch` rows a step."""

    vocab: int
    block: int
    layers: int
    width: int
    batch: int

    @property
    def inside(self) -> int:
        """Return the parameters of the blocks."""
        return self.layers * (12 * self.width**2 + 13 * self.width)

    @property
    def ends(self) -> int:
        """Return the parameters before the first block and after the last: embeddings, norm, head."""
        return (2 * self.vocab + self.block + 2) * self.width

    @property
    def uncut(self) -> int:
        """Return the parameters of the blocks that every rank along tp holds whole: norms, biases of outputs."""
        return self.layers * 6 * self.width

    @property
    def uncut_ends(self) -> int:
        """Return the parameters outside of the blocks that every rank along tp holds whole: positions, last norm."""
        return (self.block + 2) * self.width

    @property
    def parameters(self) -> int:
        return self.inside + self.ends

    @property
    def hidden(self) -> int:
        """Return the bytes of the hidden states of a whole batch."""
        return self.batch * self.block * self.width * _FP32

    def split(self, tp: int) -> int:
        """Return the number of parameters that the ranks along tp hold together."""
        return self.parameters + (tp - 1) * (self.uncut + self.uncut_ends)


def wire_bytes(model: Model, strategy: Strategy) -> dict[str, float]:
    """Return the bytes that all ranks send in a step, by axis.

    In hsdp, dp has two parts: "shard" and "replicate". Gradients of parameters that tp or cp does not cut are summed
    along that axis, and count there.
    """
    dp, tp, pp, cp, shard = strategy.dp, strategy.tp, strategy.pp, strategy.cp, strategy.shard
    held = _FP32 * model.split(tp) * cp
    found = {}
    if strategy.zero == 0:
        found["dp"] = 2 * (dp - 1) * held
    else:
        # Forward ends and backward begins with the weights outside of the blocks, so they stay. A pipeline keeps all
        # parameters until the step ends.
        again = 0 if strategy.zero < 3 or pp > 1 else held - _FP32 * cp * (model.ends + (tp - 1) * model.uncut_ends)
        found["dp" if shard == dp else "shard"] = (shard - 1) * dp // shard * (2 * held + again)
        if shard < dp:
            found["replicate"] = 2 * (dp // shard - 1) * held
    if tp > 1:
        # A sum over all groups along tp: each sends its own rows and positions, all together those of the batch.
        tokens = model.batch * model.block * _FP32
        found["tp"] = (tp - 1) * (
            (8 * model.layers + 4) * model.hidden + 3 * 2 * tokens + 2 * _FP32 * model.uncut * _copies(strategy)
        )
        # Outside of the blocks, every forward has an all-gather for positions and an all-reduce for the norm.
        forwards = dp * (strategy.microbatches or 1)
        found["tp"] += (tp - 1) * forwards * _FP32 * (model.block + 2 * 2) * model.width
    if pp > 1:
        found["pp"] = 2 * model.hidden * _boundaries(strategy)
    if cp > 1:
        inside = _FP32 * (model.inside + (tp - 1) * model.uncut)
        found["cp"] = (cp - 1) * ((6 * model.layers + 2) * model.hidden + 2 * inside * _copies(strategy))
    return {axis: float(size) for axis, size in found.items() if size}


def bytes_at_rest(model: Model, strategy: Strategy) -> float:
    """Return the bytes that all ranks hold at the end of a step: parameters, gradients and AdamW's state, in fp32."""
    parts = {1: 2 * _FP32, 2: _FP32, 3: _FP32}  # ZeRO stage that shards them: moments, gradients, parameters
    each = sum(size / strategy.shard if strategy.zero >= stage else size for stage, size in parts.items())
    return each * model.split(strategy.tp) * strategy.dp * strategy.cp


def _copies(strategy: Strategy) -> int:
    """Return the number of ranks along dp that sum gradients of the same elements along another axis."""
    return strategy.dp if strategy.zero == 0 else strategy.dp // strategy.shard


def _boundaries(strategy: Strategy) -> int:
    stages = strategy.pp * (1 if strategy.schedule in ("gpipe", "1f1b") else 2)
    same = strategy.schedule in ("zbv", "dualpipev")  # the two middle stages are on the same rank
    return stages - 1 - same
