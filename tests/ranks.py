"""Processes of tests: ranks of one group, and programs. They are forked from a process that has imported torch."""

import atexit
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Modules that every process would otherwise import by itself, for seconds.
IMPORTED = ["torch.distributed", "torch._dynamo", "torch.nn.parallel", "pytest", "dipole.vision.adapter"]
IMPORTED += ["dipole.rl.envs.running.workers", "dipole.rl.envs.dot"]


def start_method():
    """Return the quickest way to start processes: forked from one that has imported what they need, or `spawn`.

    The environment of forked processes is that of the first call. A test that sets variables for them uses `spawn`.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    multiprocessing.forkserver.ensure_running()  # before a WorkerVecEnv names modules of its own
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


class Python:
    """What `subprocess.Popen` is for `python -m MODULE` or `-c CODE`. Torch is imported, dipole is not."""

    def __init__(self, *arguments, cwd=None, **environment):
        self.streams = tempfile.TemporaryDirectory()
        given = list(map(str, arguments)), cwd or os.getcwd(), os.environ | environment, self.streams.name
        self.process = multiprocessing.get_context(start_method()).Process(target=_run_python, args=given)
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout=None):
        self.process.join(timeout)
        self.returncode = self.poll()
        with self.streams as folder:
            self.stdout, self.stderr = (Path(folder, name).read_text() for name in "12")
        return self.stdout, self.stderr


def run_python(*arguments, **given):
    program = Python(*arguments, **given)
    program.communicate()
    return program


def _run_python(arguments, cwd, environment, streams):
    for number in (1, 2):
        os.dup2(os.open(f"{streams}/{number}", os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for name in [each for each in sys.modules if each.partition(".")[0] == "dipole"]:
        del sys.modules[name]
    registry = getattr(sys.modules.get("gymnasium"), "registry", {})
    for name in [each for each in registry if each.startswith("dipole/")]:
        del registry[name]
    flag, *sys.argv = arguments
    sys.path[:0] = ["", *environment.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        if flag == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            exec(sys.argv[0], {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
