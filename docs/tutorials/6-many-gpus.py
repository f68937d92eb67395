# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Many GPUs
#
# Negatives come from the whole batch. N processes that each hold B/N rows have to compute the loss of one process with
# B, or the number of GPUs becomes a hyperparameter. Here two processes show that they do, in a loop of one's own and
# in dipole's trainer; then how to start them, and what to do where the memory of one GPU has to be enough.
#
# Time on one core: 50 s with `DIPOLE_TUTORIAL=small`, 1 min without. Nothing is downloaded.

# %%
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("dipole") is None:  # on Colab, and in any environment without it
    source = os.environ.get("DIPOLE_SOURCE", "")  # git+URL or file:///CHECKOUT; empty: the package index
    wanted = "dipole[vision]" + f" @ {source}" * bool(source)
    command = [sys.executable, "-m", "pip", "install", "-q", wanted]
    if subprocess.run(command).returncode:
        raise RuntimeError("There is no release on the index yet. Set DIPOLE_SOURCE, and run this cell again.")

# %% [markdown]
# ## A loop
#
# Encoder and objective are one module below DistributedDataParallel. Each process hands in its own rows; the objective
# gathers those of all, with gradient. With two GPUs or more the processes have one each and nccl; else all of them,
# the one as well as the two, compute on the processor, with gloo.

# %%
import os
import subprocess
import sys
from pathlib import Path

import torch

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
STEPS, BATCH = (6, 64) if SMALL else (60, 512)
DEVICE = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
PROGRAM = """
import gc
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import dipole

steps, batch, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
if ranks > 1:
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
        self.objective = dipole.objective("infonce(temperature=0.1) + 0.1*dp + 0.1*vicreg", dim=16)

    def forward(self, first, second):
        return self.objective(self.encoder(first), self.encoder(second)).loss


torch.manual_seed(0)
model = Model().to(device)
step = DistributedDataParallel(model) if ranks > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mine = slice(rank * batch // ranks, (rank + 1) * batch // ranks)
for _ in range(steps):
    points, noise = torch.randn(batch, 20), torch.randn(2, batch, 20)
    first, second = ((points + 0.1 * each)[mine].to(device) for each in noise)
    loss = step(first, second)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"{loss.item():.6f}", flush=True)
if ranks > 1:
    del step, loss  # together, and without what holds the group: gloo aborts where that lives on
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
"""
Path("loop.py").write_text(PROGRAM)


def start(processes: int, *command: str) -> str:
    """What a command prints, run by one process or by torchrun with several."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # two processes share these cores
    done = subprocess.run([sys.executable, *launch, *command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def losses(processes: int) -> list[float]:
    return [float(line) for line in start(processes, "loop.py", str(STEPS), str(BATCH), DEVICE).split()]


# %% [markdown]
# The losses of every step agree, and so do the weights that lead to the next one.

# %%
one, two = losses(1), losses(2)
for number in sorted({*range(3), len(one) - 1}):
    print(f"step {number}: one process {one[number]:.6f}   two {two[number]:.6f}")
assert len(one) == len(two) == STEPS
assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-4

# %% alt="The loss over steps: the thin line of two processes lies in the middle of the wide one of one."
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(one, linewidth=6, alpha=0.3, label="one process, all rows")
axes.plot(two, label="two processes, half of them each")
axes.set_xlabel("step")
axes.set_ylabel("loss")
figure.legend(loc="outside upper center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# ## dipole's own trainer
#
# Started by torchrun, `dipole train` shares each batch among the processes. One thing in an encoder looks at more than
# its own row: batch norm. Without more it normalises each process's share by itself, which is another computation;
# `train.sync_batch_norm=true` takes the statistics of all rows, and two processes are one again. (SGD, because Adam
# makes steps of the same size of gradients that are nothing but rounding.)

# %%
import json

from safetensors.torch import load_file

from dipole.core.train.loop import train
from dipole.core.train.recipe import load

SETTINGS = {
    "device": DEVICE,
    "train.sync_batch_norm": "true",
    "train.optimizer": "sgd",
    "train.learning_rate": "0.01",
    "train.batch_size": "128",
    "train.epochs": "1",
    "train.log_every": "1",
    "vision.data.limit": "500" if SMALL else "1000",
    "vision.probe.baselines": "false",
}
config = load("digits-simclr", [f"{name}={value}" for name, value in SETTINGS.items()]).config
train(config, Path("runs-of-one"))

words = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
start(2, "-m", "dipole.core.cli", "train", "digits-simclr", *words, "--runs", "runs-of-two")


def end(runs: str) -> tuple[list[float], dict[str, float], dict[str, torch.Tensor]]:
    """Losses, results and weights of the run."""
    folder = Path(runs) / config.hash
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((folder / "record.json").read_text())["results"]
    weights = load_file(folder / "model" / "module.safetensors")
    return [line["train/loss"] for line in lines if "train/loss" in line], results, weights


# %%
(loss_1, results_1, weights_1), (loss_2, results_2, weights_2) = end("runs-of-one"), end("runs-of-two")
apart = max(float((weights_1[name].double() - weights_2[name].double()).abs().max()) for name in weights_1)
for step, (a, b) in enumerate(zip(loss_1, loss_2, strict=True), start=1):
    print(f"step {step}: one process {a:.6f}   two {b:.6f}")
print(f"weights differ by at most {apart:.1g}")
for name in ("linear/accuracy", "few_shot/accuracy"):
    print(f"{name}: one process {results_1[name]:.4f}   two {results_2[name]:.4f}")
assert max(abs(a - b) for a, b in zip(loss_1, loss_2, strict=True)) < 1e-4
assert apart < 1e-3

# %% [markdown]
# What is left is rounding: sums are added up in another order. Training amplifies it, on more processes as on another
# machine, so that long runs drift apart in their last digits and not in what they compute.

# %% [markdown]
# ## How to start them
#
# ```
# torchrun --nproc-per-node 4 --no-python dipole train cifar10-simclr --set train.sync_batch_norm=true
# accelerate launch --multi_gpu --num_processes 4 -m dipole.core.cli train cifar10-simclr \
#     --set train.sync_batch_norm=true
# srun --ntasks 8 --gpus-per-task 1 dipole train cifar10-simclr --set train.sync_batch_norm=true
# ```
#
# `train.batch_size` counts all processes. With SLURM a batch script goes on until the run is finished, over time
# limits and machines that are taken back:
#
# ```
# #!/bin/bash
# #SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-task=1
# #SBATCH --requeue --signal=USR1@90
# srun dipole train imagenet100-simclr --set train.batch_size=1024 --set train.sync_batch_norm=true
# [ $? -eq 75 ] && scontrol requeue $SLURM_JOB_ID
# ```

# %% [markdown]
# ## One GPU, a large batch
#
# Where there is no second GPU, gradient caching has the encoder see some rows at a time and the loss all of them. It
# is the same gradient again:

# %%
import dipole

torch.manual_seed(0)
encoder = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
objective = dipole.objective("infonce(temperature=0.1)")
first, second = torch.randn(2, 256, 20)
cached = dipole.cached(encoder, objective, microbatch=32)
gradients = []
for loss in (objective(encoder(first), encoder(second)).loss, cached(first, second)):
    encoder.zero_grad()
    loss.backward()
    gradients.append(torch.cat([parameter.grad.flatten() for parameter in encoder.parameters()]))
    print(f"loss {loss.item():.6f}, norm of the gradient {gradients[-1].norm():.6f}")
assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)

# %% [markdown]
# In the trainer that is `train.microbatch = 32`. Where it is the gathered rows that do not fit, they go round in a
# ring: `train.ring = true`. [runs](../runs.md) has both, launchers and interruption in full; [core](../core.md) says
# what is exact with several ranks, and `dipole.cached` for encoders of every kind.
