"""How a rank of a test ends."""

import functools
import gc

import torch.distributed as dist


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
