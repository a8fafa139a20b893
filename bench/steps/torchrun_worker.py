"""A rank under torchrun that makes blocks of steps on request: it reads a line of JSON per block from its own pipe.

torchrun --nproc-per-node N bench/steps/torchrun_worker.py FOLDER by_hand|trainer CORES THREADS
"""

from __future__ import annotations

import json
import os
import sys


def main(folder: str, which: str, cores: str, threads: str) -> None:
    rank = os.environ["RANK"]
    # Use the same cores as the cluster's rank. This comes before torch starts threads, which inherit it.
    os.sched_setaffinity(0, json.loads(cores)[int(rank)])

    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(threads))
    if which == "by_hand":
        dist.init_process_group("gloo")  # only the model is nbkit's

    import workload

    train = workload.prepare_by_hand() if which == "by_hand" else workload.prepare_trainer()
    with open(f"{folder}/orders-{rank}") as orders, open(f"{folder}/done-{rank}", "w") as done:
        for line in orders:
            workload.timed_block(train, **json.loads(line))
            done.write("done\n")
            done.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
