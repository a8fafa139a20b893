"""The weights of a transformer of any size, as the planner sees them."""

from __future__ import annotations

from nbkit.planner.job_facts import Facts, Weight


def transformer(
    *, blocks: int = 4, width: int = 16, vocab: int = 96, tied: bool = False, sequence_parallel: bool = True
) -> list[Weight]:
    """Return an embedding, blocks (two norms, attention, MLP, no biases), and a head. tied: head is embedding."""
    last = blocks - 1
    summed = ("tp", "cp") if sequence_parallel else ("cp",)
    weights = [Weight("embedding", (vocab, width), tp_dim=0, blocks=(0, last) if tied else (0,), outside=True)]
    for block in range(blocks):
        cut = {"qkv": (3 * width, 0), "out": (width, 1), "up": (4 * width, 0), "down": (width, 1)}
        for name, (rows, dim) in cut.items():
            columns = 4 * width if name == "down" else width
            weights.append(Weight(f"{block}.{name}", (rows, columns), tp_dim=dim, blocks=(block,), summed=("cp",)))
        weights += [Weight(f"{block}.norm{i}", (width,), blocks=(block,), summed=summed) for i in (1, 2)]
    if not tied:
        weights.append(Weight("head", (vocab, width), tp_dim=0, blocks=(last,), outside=True))
    return weights


FACTS = Facts(heads=8, kv_heads=4, width=16, vocab=96, blocks=4, sequence=24, batch=16)
