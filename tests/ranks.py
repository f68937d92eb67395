"""Ranks of a test: how they start, and how they end."""

import functools
import gc
import multiprocessing

import torch.distributed as dist
import torch.multiprocessing as mp

# What every rank would otherwise import by itself, for seconds.
IMPORTED = ["torch.distributed", "torch._dynamo", "torch.nn.parallel", "pytest", "dipole.core.train.run"]


def start_ranks(work, args, ranks):
    """Call `work(rank, *args)` in so many processes and wait.

    Where the system can, they are forked from one that has imported what they need; its environment is that of the
    first call, so a test that sets variables for its ranks takes torch's `spawn`.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if method == "forkserver":
        multiprocessing.get_context(method).set_forkserver_preload(IMPORTED)
    mp.start_processes(work, args, nprocs=ranks, start_method=method)


def leaving_together(work):
    """The main function of a rank that ends when all have done their work.

    What holds the group, a DistributedDataParallel above all, goes with the frame of `work`: one that outlives it can
    abort or wait for ever. A rank that leaves early can abort another that still closes its connections.
    """

    @functools.wraps(work)
    def run(*args):
        work(*args)
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()

    return run
