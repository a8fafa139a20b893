"""Draw the pictures of docs/concepts: one function for each page.

    python -m tests.support.concept_pictures      writes docs/concepts/pictures/*.svg

Numbers in a picture are computed here, so that they agree with what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.svg_drawing import Drawing

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "pictures"


def ranks() -> Drawing:
    """Show one cell that is sent to four processes, each with its own variable."""
    d = Drawing(
        "A notebook sends one cell to four ranks. Each rank is a process with its own device and its own x.", 262
    )
    d.box(90, 16, 240, 58)
    d.text(210, 39, "notebook", "bold")
    d.text(210, 61, "x = rank * 10", "code")
    for rank in range(4):
        x = 14 + rank * 100
        middle = x + 46
        d.arrow((210, 74), (210, 96), (middle, 96), (middle, 120))
        d.box(x, 120, 92, 96, "dp")
        d.text(middle, 142, f"rank {rank}", "bold")
        d.text(middle, 164, "a process", "small")
        d.text(middle, 182, f"device {rank}", "small")
        d.text(middle, 204, f"x = {rank * 10}", "code")
    d.text(210, 245, "the same code, four sets of variables", "soft")
    return d


def all_reduce() -> Drawing:
    """Show four numbers before and after an all-reduce."""
    own = [1, 2, 3, 4]
    d = Drawing("Four ranks hold 1, 2, 3 and 4. After the all-reduce each of them holds 10.", 248)
    d.left(14, 48, "before", "soft")
    d.left(14, 178, "after", "soft")
    for rank, number in enumerate(own):
        x = 78 + rank * 84
        d.text(x + 36, 22, f"rank {rank}", "small")
        d.box(x, 28, 72, 36, "dp", str(number), "big")
        d.arrow((x + 36, 64), (x + 36, 92))
        d.arrow((x + 36, 128), (x + 36, 156))
        d.box(x, 156, 72, 36, "zero", str(sum(own)), "big")
    d.box(78, 92, 324, 36, "plain", f"all-reduce: {' + '.join(map(str, own))} = {sum(own)}")
    d.text(210, 226, "in a ring of 4, each rank sends 2 x 3/4 = 1.5 x its tensor", "small soft")
    return d


def batch() -> Drawing:
    """Show 64 rows as 2 ranks x 4 passes x 8 rows."""
    ranks, passes, rows = 2, 4, 8
    d = Drawing("A global batch of 64 rows: 2 ranks, each with 4 passes of 8 rows.", 256)
    for rank in range(ranks):
        left = 78 + rank * 172
        d.text(left + 76, 26, f"rank {rank}", "bold")
        for each in range(passes):
            top = 38 + each * 36
            if rank == 0:
                d.left(12, top + 19, f"pass {each + 1}", "small soft")
            for row in range(rows):
                d.box(left + row * 19, top, 16, 28, "dp")
    d.text(210, 206, f"{rows} rows x {passes} passes x {ranks} ranks = {rows * passes * ranks} rows", "bold")
    d.text(210, 236, "one optimizer step, after all of them", "small soft")
    return d


def data_parallel() -> Drawing:
    """Show two ranks that average their gradients."""
    d = Drawing("Two ranks with the same weights and different rows average their gradients and stay equal.", 318)
    for rank, rows, gradient in ((0, "rows 0-31", "0.2"), (1, "rows 32-63", "0.6")):
        x, middle = 14 + rank * 216, 102 + rank * 216
        d.text(middle, 26, f"rank {rank}", "bold")
        d.box(x, 36, 176, 32, "plain", rows)
        d.arrow((middle, 68), (middle, 88))
        d.box(x, 88, 176, 44, "dp", "all the weights")
        d.arrow((middle, 132), (middle, 152))
        d.box(x, 152, 176, 32, "plain", f"own gradient {gradient}")
        d.arrow((middle, 184), (middle, 206))
        d.arrow((middle, 242), (middle, 264))
        d.box(x, 264, 176, 36, "dp", "the same step")
    d.box(14, 206, 392, 36, "zero", "mean over the ranks: (0.2 + 0.6) / 2 = 0.4", "bold")
    return d


def zero() -> Drawing:
    """Show the bytes of a parameter on one of four ranks under each stage."""
    n = 4
    kinds = (("weights", 4, "dp"), ("gradients", 4, "tp"), ("optimizer", 8, "zero"))
    d = Drawing(
        "Bytes per parameter on each of 4 ranks: 16 under ddp, 10 under zero1, 7 under zero2, 4 under zero3.", 272
    )
    d.left(14, 26, "bytes for each parameter on one of 4 ranks", "bold")
    for stage, name in enumerate(("ddp", "zero1", "zero2", "zero3")):
        y, x = 42 + stage * 46, 74.0
        d.left(14, y + 23, name, "code")
        parts = [size / n if stage >= 3 - number else size for number, (_, size, _) in enumerate(kinds)]
        for part, (_, _, kind) in zip(parts, kinds, strict=True):
            d.box(x, y, part * 18, 34, kind, f"{part:g}" if part >= 1 else "", "small")
            x += part * 18
        d.left(x + 8, y + 23, f"{sum(parts):g}", "bold")
    for number, (name, _, kind) in enumerate(kinds):
        x = 74 + number * 112
        d.box(x, 238, 16, 16, kind)
        d.left(x + 22, 251, name, "small")
    return d


def tensor() -> Drawing:
    """Show an MLP cut by columns and by rows on two ranks."""
    d = Drawing(
        "Two matrices on two ranks: the first is cut by columns, the second by rows; one sum joins the results.", 322
    )
    d.text(122, 24, "first matrix: columns", "small soft")
    d.text(296, 24, "second matrix: rows", "small soft")
    for rank, kind in ((0, "tp"), (1, "dp")):
        y = 34 + rank * 124
        d.left(14, y + 58, f"rank {rank}", "bold")
        d.box(76, y, 92, 104, "gone")
        d.box(76 + rank * 46, y, 46, 104, kind, "half", "small")
        d.arrow((172, y + 52), (204, y + 52))
        d.box(208, y + 30, 36, 44, kind, "h", "code")
        d.arrow((248, y + 52), (262, y + 52))
        d.box(266, y, 60, 104, "gone")
        d.box(266, y + rank * 52, 60, 52, kind, "half", "small")
        d.arrow((330, y + 52), (366, y + 52))
    d.box(370, 50, 36, 196, "zero", "sum", "small")
    d.text(210, 288, "each rank computes every row of the batch;", "small soft")
    d.text(210, 308, "it sends nothing between the two matrices", "small soft")
    return d


Move = tuple[str, int]


def one_f_one_b(stages: int, micro_batches: int) -> list[list[tuple[float, float, str, int]]]:
    """Return start, end, F or B, and micro-batch of each operation of each stage. A backward takes two forwards."""
    todo: list[list[Move]] = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micro_batches)
        order: list[Move] = [("F", number) for number in range(ahead)]
        for number in range(micro_batches):
            order += [("F", number + ahead)] if number + ahead < micro_batches else []
            order.append(("B", number))
        todo.append(order)
    done: dict[tuple[str, int, int], float] = {}
    rows: list[list[tuple[float, float, str, int]]] = [[] for _ in range(stages)]
    while any(todo):
        for stage, order in enumerate(todo):
            if not order:
                continue
            kind, number = order[0]
            before = ("F", number, stage - 1) if kind == "F" else ("B", number, stage + 1)
            if kind == "B" and stage == stages - 1:
                before = ("F", number, stage)
            if before[2] >= 0 and before not in done:
                continue
            start = max(done.get(before, 0.0), rows[stage][-1][1] if rows[stage] else 0.0)
            end = start + (1.0 if kind == "F" else 2.0)
            done[kind, number, stage] = end
            rows[stage].append((start, end, kind, number))
            order.pop(0)
    return rows


def pipeline() -> Drawing:
    """Show four stages and four micro-batches in time."""
    stages, micro_batches = 4, 4
    rows = one_f_one_b(stages, micro_batches)
    length = max(row[-1][1] for row in rows)
    idle = 1 - micro_batches * 3 / length
    d = Drawing(f"Four stages and four micro-batches: each stage is idle for {idle:.0%} of the step.", 232)
    left, right = 58, 410
    unit = (right - left) / length
    for stage, row in enumerate(rows):
        y = 20 + stage * 38
        d.left(8, y + 20, f"rank {stage}", "small")
        d.box(left, y, right - left, 30, "gone")
        for start, end, kind, number in row:
            color = "dp" if kind == "F" else "pp"
            d.box(left + start * unit, y, (end - start) * unit, 30, color, str(number + 1), "small")
    for x, kind, name in (
        (14, "dp", "forward"),
        (112, "pp", "backward"),
        (220, "gone", f"idle: 3 / (4 + 3) = {idle:.0%}"),
    ):
        d.box(x, 196, 16, 16, kind)
        d.left(x + 22, 209, name, "small")
    return d


def context() -> Drawing:
    """Show which pairs of positions each of two ranks computes under causal attention."""
    ranks, size = 2, 44
    chunks = 2 * ranks
    d = Drawing(
        "A sequence in 4 chunks on 2 ranks: rank 0 holds the first and the last chunk, and both compute 5 blocks.", 300
    )
    d.text(170, 24, "keys: all chunks, gathered", "small soft")
    for row in range(chunks):
        rank = min(row, chunks - 1 - row)
        kind = ("cp", "dp")[rank]
        y = 40 + row * (size + 6)
        d.left(12, y + 27, f"chunk {row + 1}", "small")
        for column in range(chunks):
            d.box(76 + column * (size + 6), y, size, size, kind if column <= row else "gone")
        d.left(284, y + 27, f"on rank {rank}", "small bold")
    own = [sum(row + 1 for row in range(chunks) if min(row, chunks - 1 - row) == rank) for rank in range(ranks)]
    assert len(set(own)) == 1
    d.text(210, 264, f"each rank computes {own[0]} of {sum(own)} blocks of attention", "bold")
    d.text(210, 286, "a dashed block lies in the future and is not computed", "small soft")
    return d


def experts() -> Drawing:
    """Show the tokens of two ranks, each of which goes to the rank that holds its expert."""
    chosen, kinds = ((0, 3, 1, 2), (2, 0, 3, 3)), ("dp", "tp")
    d = Drawing(
        "Two ranks with two experts each. A token goes to the rank of its expert, and its output comes back.", 300
    )
    for rank, numbers in enumerate(chosen):
        left = 14 + rank * 206
        d.text(left + 93, 24, f"tokens of rank {rank}", "small bold")
        for place, number in enumerate(numbers):
            x, home = left + place * 48, number // 2
            d.box(x, 34, 42, 34, kinds[home], f"e{number}", "small")
            d.arrow((x + 21, 68), (x + 21, 84), (60 + home * 206 + 24 * (rank * 2 + place % 2), 128))
        d.box(left, 132, 186, 62, kinds[rank])
        d.text(left + 93, 156, f"rank {rank}", "small bold")
        d.text(left + 93, 180, f"experts e{2 * rank} and e{2 * rank + 1}", "small")
        d.arrow((left + 93, 194), (left + 93, 222))
    rows = [sum(number // 2 == rank for numbers in chosen for number in numbers) for rank in range(2)]
    away = sum(number // 2 != rank for rank, numbers in enumerate(chosen) for number in numbers)
    d.box(14, 226, 392, 34, "plain", "the outputs go back to the ranks of their tokens", "small")
    d.text(210, 284, f"{rows[0]} and {rows[1]} tokens to compute; {away} of 8 are sent away and back", "small soft")
    return d


def mesh() -> Drawing:
    """Show eight ranks in a mesh of three axes."""
    d = Drawing("Eight ranks as a mesh: pp=2 stages x dp=2 replicas x tp=2 parts of every layer.", 286)
    d.text(210, 26, "dp=2 tp=2 pp=2: 2 x 2 x 2 = 8 ranks", "bold")
    for stage in range(2):
        left = 14 + stage * 206
        d.box(left, 42, 186, 164, "pp")
        d.text(left + 93, 64, f"stage {stage}", "small bold")
        for replica in range(2):
            y = 76 + replica * 64
            d.box(left + 10, y, 166, 54, "dp")
            for part in range(2):
                rank = stage * 4 + replica * 2 + part
                d.box(left + 20 + part * 76, y + 9, 68, 36, "tp", f"rank {rank}", "small")
    for x, kind, name in ((14, "tp", "tp: parts of a layer"), (206, "dp", "dp: rows of the batch")):
        d.box(x, 222, 16, 16, kind)
        d.left(x + 22, 235, name, "small")
    d.box(14, 250, 16, 16, "pp")
    d.left(36, 263, "pp: blocks of the model, one stage after the other", "small")
    return d


def switch() -> Drawing:
    """Show a matrix that changes from halves by rows to halves by columns."""
    d = Drawing("From zero3 to tp on two ranks: each rank keeps one quarter of the matrix and sends one quarter.", 302)
    d.text(112, 26, "before: rows", "small soft")
    d.text(334, 26, "after: columns", "small soft")
    for rank in range(2):
        y = 40 + rank * 116
        d.left(8, y + 47, f"rank {rank}", "small bold")
        for row in range(2):
            for column in range(2):
                name = "abcd"[row * 2 + column]
                has, gets = row == rank, column == rank
                origin = ("zero", "tp")[row]
                d.box(66 + column * 48, y + row * 44, 44, 40, origin if has else "gone", name if has else "", "code")
                d.box(288 + column * 48, y + row * 44, 44, 40, origin if gets else "gone", name if gets else "", "code")
    d.arrow((164, 60), (232, 60), (232, 176), (282, 176))
    d.arrow((164, 220), (212, 220), (212, 104), (282, 104))
    d.text(196, 52, "b", "code")
    d.text(190, 212, "c", "code")
    d.text(210, 278, "a and d stay where they are; only b and c move", "bold")
    return d


def overlap() -> Drawing:
    """Show gradients that are sent after backward, and during it."""
    d = Drawing(
        "Without overlap the sums of gradients come after backward. With overlap only the last one is waited for.", 282
    )
    unit, left = 28, 76
    for top, title, starts in (
        (14, "one message, after backward", None),
        (138, "four messages, beside backward", (3, 4, 5, 6)),
    ):
        d.left(12, top + 14, title, "bold")
        d.left(12, top + 46, "compute", "small soft")
        d.left(12, top + 82, "network", "small soft")
        d.box(left, top + 26, 2 * unit, 30, "dp", "forward", "small")
        for part in range(4):
            d.box(left + (2 + part) * unit, top + 26, unit, 30, "pp", str(part + 1), "small")
        if starts is None:
            d.box(left + 6 * unit, top + 62, 4 * unit, 30, "tp", "all gradients", "small")
            d.line((left + 10 * unit, top + 22), (left + 10 * unit, top + 98), dashed=True)
            d.left(left + 10 * unit + 6, top + 46, "10 units", "small")
        else:
            for part, start in enumerate(starts):
                d.box(left + start * unit, top + 62, unit, 30, "tp", str(part + 1), "small")
            d.line((left + 7 * unit, top + 22), (left + 7 * unit, top + 98), dashed=True)
            d.left(left + 7 * unit + 6, top + 46, "7 units", "small")
    d.text(210, 266, "1 to 4: parts of backward; dashed: the optimizer begins", "small soft")
    return d


def memory() -> Drawing:
    """Show the bytes of one rank during a step."""
    d = Drawing(
        "Memory during a step: it grows in forward, peaks as backward begins, and falls as activations are freed.", 288
    )
    base, top, left, right = 232, 44, 66, 406
    d.left(10, 22, "memory of one rank", "bold")
    d.area("zero", (left, base), (right, base), (right, base - 36), (left, base - 36))
    d.area("dp", (left, base - 36), (right, base - 36), (right, base - 66), (left, base - 66))
    d.area("pp", (left, base - 66), (right, base - 66), (right, base - 96), (left, base - 96))
    middle, end = 206, 322
    d.area("tp", (left, base - 96), (middle, top + 8), (end, base - 96))
    d.text(136, base - 12, "optimizer state", "small")
    d.text(136, base - 46, "weights", "small")
    d.text(136, base - 76, "gradients", "small")
    d.text(160, base - 106, "activations", "small")
    d.line((middle, top + 8), (middle, base + 6), dashed=True)
    d.left(middle + 10, top + 8, "the peak", "bold")
    d.line((end, base - 96), (end, base + 6), dashed=True)
    d.text((left + middle) / 2, base + 24, "forward", "small")
    d.text((middle + end) / 2, base + 24, "backward", "small")
    d.text((end + right) / 2, base + 24, "update", "small")
    d.text(210, 278, "the peak must fit into memory", "small soft")
    return d


def precision() -> Drawing:
    """Show the bits of three number formats."""
    d = Drawing("Bits of float32, bfloat16 and float16: sign, exponent and fraction.", 262)
    d.left(12, 24, "bits of one number", "bold")
    for number, (name, exponent, fraction) in enumerate((("float32", 8, 23), ("bf16", 8, 7), ("fp16", 5, 10))):
        y = 40 + number * 50
        d.left(12, y + 22, name, "code")
        for bit in range(1 + exponent + fraction):
            kind = "plain" if bit == 0 else "tp" if bit <= exponent else "dp"
            d.box(76 + bit * 10.4, y, 8.4, 32, kind)
    d.text(336, 112, "same range, less exact", "small soft")
    d.text(336, 162, "less range, more exact", "small soft")
    for x, kind, name in ((12, "plain", "sign"), (82, "tp", "exponent: range"), (236, "dp", "fraction: exactness")):
        d.box(x, 196, 16, 16, kind)
        d.left(x + 22, 209, name, "small")
    d.text(210, 244, "2 bytes instead of 4 for each number", "soft")
    return d


def failure() -> Drawing:
    """Show a rank that dies, and the one that takes its place."""
    d = Drawing("Rank 2 dies in step 7. A new process takes its place and its state, and all ranks repeat step 7.", 268)
    for rank in range(4):
        y = 22 + rank * 46
        d.left(8, y + 22, f"rank {rank}", "small")
        d.box(58, y, 56, 34, "dp", "step 6", "small")
        if rank == 2:
            d.box(118, y, 30, 34, "cp", "7", "small")
            d.text(166, y + 24, "dies", "small bold")
            d.box(186, y, 92, 34, "zero", "new process", "small")
        else:
            d.box(118, y, 48, 34, "plain", "7", "small")
            d.box(170, y, 108, 34, "gone", "waits", "small")
        d.box(282, y, 60, 34, "dp", "step 7", "small")
        d.box(346, y, 60, 34, "dp", "step 8", "small")
    d.text(210, 228, "the new rank 2 gets the state of a replica", "bold")
    d.text(210, 252, "or the backup that another rank keeps", "bold")
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "ranks": ranks, "all-reduce": all_reduce, "batch": batch, "data-parallel": data_parallel, "zero": zero,
    "tensor": tensor, "pipeline": pipeline, "context": context, "experts": experts, "mesh": mesh, "switch": switch,
    "overlap": overlap, "memory": memory, "precision": precision, "failure": failure,
}  # fmt: skip

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
