"""The drills: mistakes and failures, and the words that the answer must contain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drill:
    """A mistake or a failure, and the answer to it. words: must be in the output. cell: causes it in a notebook.

    first: cells that prepare it. fails: the cell ends with an error, so that Run All stops. after: cells that clean up
    and must not fail. typed: what is typed when the cell asks. stop: seconds until the stop button is pressed.
    with_cluster: the notebook has a cluster. renews: the cluster has other processes afterwards.
    """

    name: str
    words: str
    cell: str
    first: tuple[str, ...] = ()
    fails: bool = True
    after: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()
    stop: float = 0.0
    with_cluster: bool = True
    renews: bool = False


def _on_ranks(name: str, words: str, code: str, *, fails: bool = True, stop: float = 0.0) -> Drill:
    return Drill(name, words, f"%%distributed\n{code}", fails=fails, stop=stop)


def _before(name: str, words: str, cell: str) -> Drill:
    return Drill(name, words, cell, with_cluster=False)


_SLEEPS = ("%%distributed --detach\nimport time; time.sleep(500)",)
_END = ("handle.stop()",)

MAGICS = (
    _before("a cell before there is a cluster", "%cluster start -n 2", "%%distributed\nrank"),
    _before("%nbkit why before there is a cluster", "%cluster start -n 2", "%nbkit why"),
    _before(
        "attach to a cluster that does not exist", "There is no cluster called 'nowhere'", "%cluster attach nowhere"
    ),
    _before("an option that does not exist", "unrecognized arguments: --ranks 4", "%cluster start --ranks 4"),
    _before("a start with 0 ranks", "A cluster has at least one rank", "%cluster start -n 0"),
    _before("GPUs on a machine without a GPU", "--cpu", "%cluster start --gpus 0,1"),
    Drill("an old name of an option", "--here", "%%distributed --local\n1"),
    Drill("a second cluster, with other options", "%cluster stop   first", "%cluster start -n 4 --cpu"),
    Drill("a rank that does not exist", "%%rank 0-1", "%%rank 7\n1"),
    Drill("--ranks 0,x", "'0,x' does not name ranks", "%%distributed --ranks 0,x\n1"),
    Drill("--timeout soon", "'soon' is no length of time", "%%distributed --timeout soon\n1"),
    Drill("--as together with --detach", "--detach results", "%%distributed --detach --as results\n1"),
    Drill("a verb that does not exist", "choose from 'pause'", "%train go"),
    Drill("%nbkit debug when nothing has failed", "No rank keeps the frames", "%nbkit debug", ("%%distributed\n1",)),
)

CELLS = (
    _on_ranks("a syntax error", "nothing has run on any rank", "for i in range(3)\n    print(i)"),
    _on_ranks("an undefined name", "name 'undefined' is not defined, line 2", "print(undefined)"),
    Drill("a variable of the notebook, used on the ranks", "%push mine", "%%distributed\nmine + 1", ("mine = 4",)),
    _on_ranks(
        "one rank fails, and the other waits for it",
        "Rank 0: released at line 4",
        "if rank == 1:\n    raise ValueError('only here')\ndist.barrier()",
    ),
    _on_ranks("every rank fails in the same line", "Ranks 0-1 failed: IndexError", "[1, 2][5]"),
    _on_ranks("an assertion without a message", "Ranks 0-1 failed: AssertionError, line 2", "assert rank < 0"),
    _on_ranks("an endless recursion", "frames are left out", "def again(n): return again(n + 1)\nagain(0)"),
    _on_ranks(
        "an error whose str() fails",
        "no text",
        "class Bad(Exception):\n    def __str__(self): raise RuntimeError('no text')\nraise Bad()",
    ),
    _on_ranks(
        "an error whose str() calls sys.exit",
        "its text cannot be made: SystemExit",
        "import sys\nclass Bad(Exception):\n    def __str__(self): sys.exit(0)\nraise Bad()",
    ),
    _on_ranks(
        "an error whose str() never ends, and Stop",
        "variables live on",
        "class Bad(Exception):\n    def __str__(self):\n        while True: pass\nraise Bad()",
        stop=0.7,
    ),
    _on_ranks(
        "a value whose repr() never ends, and Stop",
        "variables live on",
        "class Bad:\n    def __repr__(self):\n        while True: pass\nBad()",
        stop=0.7,
    ),
    Drill(
        "a pull of an object whose pickling never ends, and Stop",
        "KeyboardInterrupt",
        "%pull stuck",
        ("%%distributed\nclass Stuck:\n    def __reduce__(self):\n        while True: pass\nstuck = Stuck()",),
        stop=0.7,
    ),
    _on_ranks(
        "a chain of 300 errors",
        "errors of the chain are left out",
        "def fail(n):\n    try:\n        fail(n - 1) if n else 1 / 0\n"
        "    except Exception as error:\n        raise ValueError(n) from error\nfail(300)",
    ),
    _on_ranks(
        "20,000 characters, each flushed",
        "xxxxx",
        "for _ in range(20_000): print('x', end='', flush=True)",
        fails=False,
    ),
    _on_ranks(
        "20 MB of output, and Stop after 6 s",
        "lines more",
        "for i in range(100_000): print(i, 'y' * 200)",
        stop=6,
    ),
    _on_ranks(
        "a file that cannot grow, as on a full disk",
        "not kept on disk",
        "import resource\nlimit, before = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(limit, (1, before[1]))\nimport threading\n"
        "threading.Timer(1, resource.setrlimit, (limit, before)).start()\nfor i in range(1000): print(i, 'y' * 1000)",
        fails=False,
    ),
    _on_ranks("sys.exit(3) in a cell", "SystemExit: 3", "import sys\nsys.exit(3)"),
    _on_ranks("exit() in a cell", "the rank lives on", "exit()", fails=False),
    _on_ranks(
        "a script that fails under %run",
        "math domain error",
        "import pathlib, tempfile\npath = pathlib.Path(tempfile.mkdtemp()) / 'script.py'\n"
        "path.write_text('import math\\nmath.sqrt(-1)')\n%run {path}",
    ),
    _on_ranks("a script that does not exist", "nowhere.py", "%run nowhere.py"),
    _on_ranks("a module that is not installed", "No module named 'not_installed'", "import not_installed"),
    _on_ranks("input() on a rank", "%push answer", "input('name? ')"),
    _on_ranks("an endless loop, and Stop", "variables live on", "while True: pass", stop=0.7),
    _on_ranks(
        "one rank sleeps, and Stop",
        "variables live on",
        "import time\nif rank == 0: time.sleep(500)\ndist.barrier()",
        stop=0.7,
    ),
    _on_ranks(
        "Stop, and code that catches KeyboardInterrupt",
        "variables live on",
        "import time\nfor _ in range(3):\n    try:\n"
        "        time.sleep(500)\n    except KeyboardInterrupt:\n        print('caught')",
        stop=0.7,
    ),
    Drill(
        "a cell that takes longer than its --timeout",
        "stopped after 1 s (--timeout)",
        "%%distributed --timeout 1s\nimport time; time.sleep(500)",
    ),
    Drill("a breakpoint that is left with q", "variables live on", "%%distributed\nbreakpoint()\n1", typed=("q",)),
    Drill("a cell while another one runs", "--queue", "%%distributed\n1", _SLEEPS, after=_END),
    Drill("a pull while a cell runs", "this pull has to wait", "%pull x", _SLEEPS, after=_END),
    _on_ranks("a value of 50 million characters", "characters", "'x' * 50_000_000", fails=False),
    _on_ranks(
        "a print of 20,000 lines; here the last one of a rank",
        "19999",
        "for i in range(20_000): print(rank, i)",
        fails=False,
    ),
    _on_ranks(
        "a thread that fails",
        "ZeroDivisionError",
        "import threading\nthread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
        fails=False,
    ),
    _on_ranks("memory runs out in a cell", "can't allocate memory", "torch.ones(1 << 50)"),
)

COLLECTIVES = (
    _on_ranks(
        "collectives of different sizes, and Stop", "variables live on", "dist.all_reduce(torch.ones(2 + rank))", stop=1
    ),
    _on_ranks("a barrier on one rank alone, and Stop", "variables live on", "if rank == 0: dist.barrier()", stop=1),
    _on_ranks(
        "a receive without a send, and Stop", "variables live on", "if rank == 1: dist.recv(torch.ones(1), 0)", stop=1
    ),
    _on_ranks("a message to a rank that does not exist", "the group has ranks 0 to 1", "dist.send(torch.ones(1), 5)"),
    _on_ranks("destroy_process_group on all ranks", "", "dist.destroy_process_group()", fails=False),
    Drill("destroy_process_group on one rank", "", "%%rank 1\ndist.destroy_process_group()", fails=False),
)

TRANSFERS = (
    Drill("a pull of a name that does not exist", "name 'nowhere' is not defined", "%pull nowhere"),
    Drill("a push of a name that does not exist", "not defined in this notebook", "%push nowhere"),
    Drill(
        "a push of an object that cannot be pickled",
        "make it on the ranks",
        "%push lines",
        ("lines = (i for i in range(3))",),
    ),
    Drill(
        "a push of an object whose class the notebook defines",
        "needs that class on the ranks too",
        "%push mine",
        ("class Mine: pass\nmine = Mine()",),
    ),
    Drill(
        "a pull of an object that cannot be pickled",
        "cannot pickle",
        "%pull lock",
        ("%%distributed\nimport threading; lock = threading.Lock()",),
    ),
)

_TRAINER = """%%distributed
trainer = None
def trainer_of(model=lambda: torch.nn.Linear(4, 2), loss=lambda output, target: ((output - target) ** 2).mean(),
               optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3), batch_size=8, data=None,
               **options):
    data = [(torch.ones(4) * i, torch.zeros(2)) for i in range(32)] if data is None else data
    return nbkit.Trainer(model=model, loss=loss, optimizer=optimizer, data=data, batch_size=batch_size,
                         log_dir=None, progress=False, **options)
"""
_TRAINS = (
    _TRAINER,
    "%%distributed --detach\nimport time\ntrainer = trainer_of(callbacks=[lambda *_: time.sleep(0.01)])\n"
    "trainer.fit(100_000)",
    "%%distributed --at-step\ntrainer.step",
)


def _trainer(name: str, words: str, options: str, then: str = "trainer.fit(2)") -> Drill:
    return Drill(name, words, f"%%distributed\ntrainer = trainer_of({options})\n{then}", (_TRAINER,))


TRAININGS = (
    _trainer("a strategy that does not exist", "'zero9' is not a preset", "strategy='zero9'"),
    _trainer("a strategy for more ranks than the cluster has", "degrees that divide 2", "strategy='tp=4'"),
    _trainer("a key of a strategy that does not exist", "'micro' is not a key", "strategy='pp=2 micro=4'"),
    _trainer("batch_size=0", "batch_size must be a whole number of at least 1", "batch_size=0"),
    _trainer("an empty dataset", "smaller than one global batch", "data=[]"),
    _trainer(
        "data whose rows differ in shape",
        "stack expects each tensor to be equal size",
        "data=[(torch.ones(4 + i % 2), torch.zeros(2)) for i in range(32)]",
    ),
    _trainer("a loss that is not a scalar", "The loss is not a scalar", "loss=lambda output, target: output - target"),
    _trainer(
        "a loss that does not depend on the model",
        "does not depend on the model's parameters",
        "loss=lambda output, target: torch.ones(()).mean()",
    ),
    _trainer("a model that fails", "mat1 and mat2 shapes cannot be multiplied", "model=lambda: torch.nn.Linear(5, 2)"),
    _trainer("a model that is not a module", "The model is not a torch module", "model=lambda: 3"),
    _trainer(
        "an optimizer with the parameters of another model",
        "parameters that are not in this model",
        "optimizer=lambda model: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1e-3)",
    ),
    _trainer(
        "an optimizer that fails",
        "Invalid learning rate: -1",
        "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=-1)",
    ),
    _trainer(
        "a learning rate that makes the loss infinite",
        "is not finite",
        "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e30)",
        "trainer.fit(20)",
    ),
    _trainer("a checkpoint that does not exist", "could not be read", "", "trainer.load('/nowhere/at/all')"),
    _trainer(
        "a checkpoint in a place that cannot be written", "could not be written", "", "trainer.save('/proc/nbkit')"
    ),
    _trainer("a callback that fails", "ZeroDivisionError", "callbacks=[lambda *_: 1 / 0]"),
    _trainer(
        "fit with a different number of steps on each rank",
        "The ranks called fit with different",
        "",
        "trainer.fit(3 + 2 * rank)",
    ),
    _trainer("a callback that raises StopIteration", "StopIteration", "callbacks=[lambda *_: next(iter(()))]"),
    Drill(
        "one rank alone leaves a loop over batches",
        "if job.stop_if(flag): break",
        "%%distributed\nfrom torch.utils.data import DataLoader\nmodel = torch.nn.Linear(4, 2)\n"
        "job = nbkit.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), log_dir=None,\n"
        "                    loss=lambda output, target: ((output - target) ** 2).mean())\n"
        "loader = DataLoader([(torch.ones(4), torch.zeros(2))] * 64, batch_size=8)\n"
        "for number, batch in enumerate(job.batches(loader)):\n"
        "    job.backward(batch); job.optimizer.step(); job.optimizer.zero_grad()\n"
        "    if rank == 0 and number == 2: break",
    ),
    Drill("%train pause without a training", "nothing to pause", "%train pause", ("%%distributed\ntrainer = None",)),
    Drill("a live cell without a training", "no step boundary", "%%distributed --at-step\n1"),
    Drill("a live cell that fails", "ZeroDivisionError", "%%distributed --at-step\n1 / 0", _TRAINS, after=_END),
    Drill("a switch that the model does not allow", "found no blocks", "%strategy pp=2", _TRAINS, after=_END),
)

_DEATHS = ("%cluster restart",)

DEATHS = (
    Drill(
        "a rank is killed in a cell",
        "%cluster restart",
        "%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        after=_DEATHS,
        renews=True,
    ),
    Drill(
        "a cell after a rank has died",
        "%cluster restart",
        "%%distributed\n1",
        ("%%distributed\nimport os\nif rank == 1: os._exit(3)\ndist.barrier()",),
        after=_DEATHS,
        renews=True,
    ),
    Drill(
        "a value whose repr() ends the process",
        "it exited with code 3",
        "%%distributed\nimport os\nclass Bad:\n    def __repr__(self): os._exit(3)\nBad() if rank else None",
        after=_DEATHS,
        renews=True,
    ),
    Drill(
        "a rank is killed after a switch is requested",
        "→ dp=2 zero=3",
        "%strategy zero3",
        (
            *_TRAINS,
            "%%distributed --at-step\nimport os, threading\nfrom nbkit.rank.train.control.step_boundary import inbox\n"
            "def dies():\n    while inbox.highest() == inbox.acted: time.sleep(0.001)\n    os._exit(3)\n"
            "if rank == 1: threading.Thread(target=dies, daemon=True).start()",
        ),
        fails=False,
        after=_END,
        renews=True,
    ),
    Drill(
        "a rank crashes in C",
        "%cluster restart",
        "%%distributed\nimport ctypes\nif rank == 0:\n    ctypes.string_at(0)\ndist.barrier()",
        after=_DEATHS,
        renews=True,
    ),
)

DRILLS = (*MAGICS, *CELLS, *COLLECTIVES, *TRANSFERS, *TRAININGS, *DEATHS)
