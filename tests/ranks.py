"""Ranks of a test: how they start, and how they end."""

import gc
import multiprocessing
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Modules that every rank would otherwise import by itself, for seconds.
IMPORTED = ["torch.distributed", "torch._dynamo", "torch.nn.parallel", "pytest", "dipole.core.train.run"]


def start_method():
    """Return the quickest way to start processes: forked from one that has imported what they need, or `spawn`.

    The environment of forked processes is that of the first call. A test that sets variables for them uses `spawn`.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    return "forkserver"


def from_ranks(ranks, work, *args):
    """Return what `work(rank, *args)` returns in each of so many processes of one group."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_one_rank, (ranks, folder, work, args), nprocs=ranks, start_method=start_method())
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]


def _one_rank(rank, ranks, folder, work, args):
    """What holds the group is gone before the end, and a rank that leaves early can abort one that still closes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.save(work(rank, *args), f"{folder}/{rank}.pt")
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
