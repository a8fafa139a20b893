"""Cells that hang on four ranks, each in another way, and the rank, operation and line that must be named.

python -m tests.support.planted_hangs [WORD ...]      all of them, or those with a word in their name
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nbkit import Cluster
from nbkit.errors import NbkitError
from nbkit.notebook.cluster.cells.handle import CellHandle
from nbkit.notebook.cluster.why import Why

SECONDS = 5.0
"""The answer has to come within this time."""

_STUCK_SECONDS = 40.0  # until the ranks hang, on a busy machine

PRELUDE = """import os, queue, re, signal, subprocess, threading, time
from torch.nn import functional as F
def loops():
    while True: pass  # before
class Slow(torch.utils.data.Dataset):
    def __init__(self, is_late):
        self.is_late = is_late
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if self.is_late(i):
            time.sleep(1000)  # reads
        return torch.arange(8), torch.arange(8)
x = torch.ones(4)
"""


@dataclass(frozen=True)
class Hang:
    """A cell that hangs. ranks: the cause. words: parts of the sentence.

    In words, {cell} is the number of the cell, and {first} that of the prelude. {here} and {there} are the numbers of
    the cell's lines with these comments, {before} and {reads} those of the prelude's lines.
    """

    name: str
    source: str
    ranks: tuple[int, ...]
    words: tuple[str, ...]


HANGS = (
    Hang(
        "a rank sleeps",
        "for i in range(3):\n    dist.all_reduce(x)\nif rank == 2:\n    time.sleep(1000)  # here\n"
        "dist.all_reduce(x)  # there\n",
        (2,),
        ("Ranks 0-1,3 wait in all_reduce #4 on world", "cell {cell} line {there}",
         "rank 2 is in time.sleep, cell {cell} line {here}"),
    ),
    Hang(
        "a rank loops in a function of an earlier cell",
        "if rank == 0:\n    loops()\ndist.barrier()  # there\n",
        (0,),
        ("Ranks 1-3 wait in barrier #1 on world", "cell {cell} line {there}", "rank 0 runs cell {first} line {before}"),
    ),
    Hang(
        "a rank keeps the interpreter to itself",
        "if rank == 3:\n    re.match(r'(a+)+$', 'a' * 60 + 'b')  # here\ndist.barrier()\n",
        (3,),
        ("Ranks 0-2 wait in barrier #1 on world", "rank 3 is in native code", "cell {cell} line {here}"),
    ),
    Hang(
        "the system has stopped a rank",
        "if rank == 0:\n    os.kill(os.getpid(), signal.SIGSTOP)\n    time.sleep(1000)\ndist.reduce(x, 1)  # there\n",
        (0,),
        ("Ranks 1-3 wait in reduce #1 on world", "cell {cell} line {there}", "rank 0 is stopped by the system"),
    ),
    Hang(
        "a data set does not give its sample",
        "rows = Slow(lambda i: rank == 1 and i == 6)\n"
        "for ids, _ in torch.utils.data.DataLoader(rows, batch_size=4):\n    dist.all_reduce(ids)  # there\n",
        (1,),
        ("Ranks 0,2-3 wait in all_reduce #2 on world", "cell {cell} line {there}",
         "rank 1 reads data, cell {first} line {reads}"),
    ),
    Hang(
        "half of the ranks enter a collective",
        "if rank < 2:\n    dist.all_gather([torch.ones(4) for _ in range(4)], x)  # here\n",
        (2, 3),
        ("Ranks 0-1 wait in all_gather #1 on world", "cell {cell} line {here}", "ranks 2-3 have ended their cell"),
    ),
    Hang(
        "another operation",
        "if rank == 2:\n    dist.broadcast(x, 0)  # here\nelse:\n    dist.all_reduce(x)  # there\n",
        (2,),
        ("Collective #1 on world differs in operation", "all_reduce of 16 bytes float32 (cell {cell} line {there})",
         "broadcast of 16 bytes float32, root 0 (cell {cell} line {here}) on rank 2"),
    ),
    Hang(
        "another size",
        "dist.all_reduce(torch.ones(8 if rank == 1 else 4))  # here\n",
        (1,),
        ("Collective #1 on world differs in size", "of 32 bytes float32 (cell {cell} line {here}) on rank 1"),
    ),
    Hang(
        "another type, and a hang after it",
        "y = torch.ones(4, dtype=torch.int32 if rank == 3 else torch.float32)\ndist.broadcast(y, 0)  # here\n"
        "if rank == 3:\n    time.sleep(1000)\ndist.barrier()  # there\n",
        (3,),
        ("Collective #1 on world differs in dtype", "of 16 bytes int32, root 0 (cell {cell} line {here}) on rank 3",
         "barrier #2 on world", "cell {cell} line {there}"),
    ),
    Hang(
        "another root",
        "dist.broadcast_object_list([rank], src=1 if rank == 1 else 0)  # here\n",
        (1,),
        ("Collective #1 on world differs in root", "root 1 (cell {cell} line {here}) on rank 1"),
    ),
    Hang(
        "another order in two groups",
        "a, b = dist.new_group(), dist.new_group()\n"
        "for group in ((b, a) if rank == 2 else (a, b)):\n    dist.all_reduce(x, group=group)  # here\n",
        (0, 1, 2, 3),
        ("Ranks 0-1,3 wait in all_reduce #1 on group", "rank 2 waits in all_reduce #1 on group",
         "cell {cell} line {here}", "not issue these in the same order"),
    ),
    Hang(
        "another order in one group",
        "for i in range(3):\n    if rank == 1 and i == 2:\n        dist.barrier()  # here\n        dist.all_reduce(x)\n"
        "    else:\n        dist.all_reduce(x)  # there\n        dist.barrier()\n",
        (1,),
        ("Collective #5 on world differs in operation", "barrier (cell {cell} line {here}) on rank 1",
         "(cell {cell} line {there}) on ranks 0,2-3"),
    ),
    Hang(
        "one collective less, the others go on",
        "if rank != 1:\n    dist.all_reduce(x)  # here\ny = torch.ones(4)\ndist.all_reduce(y)  # there\n",
        (1,),
        ("Rank 1 has left out all_reduce #1 on world (cell {cell} line {here})",
         "ranks 0,2-3 wait in all_reduce #2 on world", "cell {cell} line {there}"),
    ),
    Hang(
        "one iteration less, in torch's DDP",
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for _ in range(2 if rank == 3 else 3):\n    model(torch.ones(2, 4)).sum().backward()  # here\n",
        (3,),
        ("Ranks 0-2 wait in all_reduce #", "on world", "cell {cell} line {here}", "rank 3 has ended its cell"),
    ),
    Hang(
        "a send without its receive",
        "if rank == 0:\n    dist.send(x, 1)  # here\n",
        (1,),
        ("Rank 0 waits in send #1 to rank 1", "cell {cell} line {here}",
         "rank 1 has ended its cell without receiving it"),
    ),
    Hang(
        "a receive without its send",
        "if rank == 3:\n    dist.recv(x, 0)  # here\nelif rank == 0:\n    threading.Event().wait()  # there\n",
        (0,),
        ("Rank 3 waits in recv #1 from rank 0", "cell {cell} line {here}",
         "rank 0 is in threading.Event().wait, cell {cell} line {there}"),
    ),
    Hang(
        "another tag",
        "if rank == 3:\n    dist.recv(x, 0, tag=1)  # here\nif rank == 0:\n    dist.send(x, 3, tag=2)  # there\n",
        (0, 3),
        ("Message #1 from rank 0 to rank 3 differs in tag", "with tag 1 (cell {cell} line {here}) on rank 3",
         "with tag 2 (cell {cell} line {there}) on rank 0"),
    ),
    Hang(
        "two ranks that both receive first",
        "if rank < 2:\n    dist.recv(x, 1 - rank)  # here\n    dist.send(x, 1 - rank)\n",
        (0, 1),
        ("Rank 0 waits in recv #1 from rank 1", "rank 1 waits in recv #1 from rank 0", "cell {cell} line {here}",
         "each waits for another"),
    ),
    Hang(
        "a group that one rank does not make",
        "if rank != 3:\n    dist.new_group()  # here\n",
        (3,),
        ("Ranks 0-2 wait in new_group #", "cell {cell} line {here}", "rank 3 has ended its cell"),
    ),
    Hang(
        "a mesh, and a chain of ranks that wait",
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\nfor i in range(3):\n"
        "    dist.all_reduce(x, group=mesh.get_group('tp'))  # here\n    if rank == 3 and i == 1:\n"
        "        queue.Queue().get()  # there\n    dist.all_reduce(x, group=mesh.get_group('dp'))\n",
        (3,),
        ("Rank 0 waits in all_reduce #3 on tp", "rank 1 waits in all_reduce #2 on dp", "cell {cell} line {here}",
         "rank 3 is in queue.Queue().get, cell {cell} line {there}"),
    ),
    Hang(
        "a command that does not end, beside FSDP2",
        "from torch.distributed.fsdp import fully_shard\nlayers = torch.nn.Sequential(torch.nn.Linear(4, 4))\n"
        "fully_shard(layers[0]); fully_shard(layers)\nfor i in range(3):\n    if i == 2 and rank == 0:\n"
        "        subprocess.run(['sleep', '1000'])  # here\n    layers(torch.ones(2, 4)).sum().backward()  # there\n",
        (0,),
        ("Ranks 1-3 wait in all_gather #", "cell {cell} line {there}",
         "rank 0 is in subprocess.run, cell {cell} line {here}"),
    ),
    Hang(
        "a Trainer whose data set does not give a sample",
        "steps = []\nrows = Slow(lambda i: rank == 2 and len(steps) > 3)\n"
        "trainer = nbkit.Trainer(\n    model=lambda: torch.nn.Embedding(8, 8),\n"
        "    loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),\n"
        "    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),\n"
        "    data=rows, batch_size=8, log_dir=None, callbacks=[lambda trainer, record: steps.append(record)])\n"
        "trainer.fit(20)  # here\n",
        (2,),
        ("Ranks 0-1,3 wait in", "on dp", "cell {cell} line {here}", "rank 2 reads data, cell {first} line {reads}"),
    ),
    Hang(
        "a split model that one rank calls",
        "job = nbkit.prepare(lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)),\n"
        "    lambda model: torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss, strategy='zero3',\n"
        "    log_dir=None)\n"
        "if rank == 0:\n    with torch.no_grad():\n        job.model(torch.ones(2, 4))  # here\n",
        (1, 2, 3),
        ("Rank 0 waits in all_gather #", "cell {cell} line {here}", "ranks 1-3 have ended their cell without it",
         "The model is split over the ranks (dp=4 zero=3), so all of them have to call job.model",),
    ),
    Hang(
        "a rank that has died",
        "if rank == 2:\n    os._exit(3)\ndist.barrier()\n",
        (2,),
        ("rank 2 is dead (it exited with code 3)",),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """An answer to a hang. seconds: that it took. wrong: what it lacks, or ""."""

    why: Why
    seconds: float
    wrong: str


def begin(cluster: Cluster) -> int:
    """Define what the cells use. Return the number of the cell that defines it.

    Use a new generation, because the answer would count collectives of earlier cells.
    """
    cluster.connection.generation.spoil("a hang is planted")
    handle = cluster.run(PRELUDE, detach=True)
    handle.wait(timeout=60)
    return number_of(cluster)


def number_of(cluster: Cluster) -> int:
    """Return the number of the cell that was sent last."""
    latest = cluster.connection.latest
    assert latest is not None
    return latest.request.number


def ask(cluster: Cluster, hang: Hang, first: int) -> Answer:
    """Plant the hang, ask why it is stuck, and stop it.

    On a busy machine, ranks can wait long for a late one before they hang, and the answer is then different. So ask
    again until the answer is about the hang, for at most `_STUCK_SECONDS`.
    """
    handle = cluster.run(hang.source, detach=True)
    number = number_of(cluster)
    try:
        deadline = time.monotonic() + _STUCK_SECONDS
        while True:
            hangs = _hangs(cluster)
            began = time.monotonic()
            why = cluster.why()
            seconds = time.monotonic() - began
            wrong = _wrong(why, hang, number, first)
            if (hangs and not wrong) or began > deadline:
                return Answer(why, seconds, wrong)
            time.sleep(0.2)
    finally:
        _stop(cluster, handle)


def _wrong(why: Why, hang: Hang, number: int, first: int) -> str:
    marks = _marks(hang.source, "here", "there") | _marks(PRELUDE, "before", "reads")
    words = [text.format(cell=number, first=first, **marks) for text in hang.words]
    if lacking := [text for text in words if text not in why.sentence]:
        return f"lacks {lacking}"
    return "" if why.verdict.ranks == hang.ranks else f"blames {why.verdict.ranks}"


def _hangs(cluster: Cluster) -> bool:
    """Return True if the ranks are stuck: two checks in a row give the same answer."""
    looks = []
    for _ in range(2):
        why = cluster.why()
        if not why.verdict.stuck:
            return False
        looks.append(re.sub(r"since [\d.]+ \w+", "", why.sentence))
        time.sleep(0.3)
    return looks[0] == looks[1]


def _stop(cluster: Cluster, handle: CellHandle) -> None:
    for process in cluster.entry.ranks:
        process.end(signal.SIGCONT)
    try:
        handle.stop()
    except NbkitError:  # a rank has died
        cluster.restart()


def _marks(source: str, *names: str) -> dict[str, int]:
    lines = source.splitlines()
    return {name: number for name in names for number, line in enumerate(lines, 1) if line.endswith(f"# {name}")}


def main(words: list[str]) -> int:
    wanted = [hang for hang in HANGS if not words or any(word in hang.name for word in words)]
    with tempfile.TemporaryDirectory() as home:
        os.environ["NBKIT_HOME"] = str(Path(home) / "clusters")
        cluster = Cluster.start(4, cpu=True, name="planted", ttl=600)
        try:
            right = 0
            for hang in wanted:
                answer = ask(cluster, hang, begin(cluster))
                right += not answer.wrong and answer.seconds <= SECONDS
                print(f"{'right' if not answer.wrong else 'WRONG'} {answer.seconds:5.2f} s  {hang.name}", flush=True)
                print(f"               {answer.why.sentence}", flush=True)
                if answer.wrong:
                    print(f"               {answer.wrong}", flush=True)
        finally:
            cluster.stop()
    print(f"{right} of {len(wanted)} right, each within {SECONDS:.0f} s")
    return 0 if right == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
