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
# Negatives come from the whole batch. N processes that each hold B/N rows have to compute the loss of one process
# with B, or the number of GPUs becomes a hyperparameter. Here two processes show that they do: on the processor, with
# gloo; on GPUs the same program runs with nccl.

# %%
import sys

if "google.colab" in sys.modules:
    import subprocess

    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "dipole"], check=True)

# %% [markdown]
# ## A loop
#
# Encoder and objective are one module below DistributedDataParallel. Each process hands in its own rows; the
# objective gathers those of all, with gradient.

# %%
import os
import subprocess
import tempfile
from pathlib import Path

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
STEPS, BATCH = (6, 32) if SMALL else (60, 512)
PROGRAM = f"""
import gc
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import dipole

rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")
if ranks > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


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
mine = slice(rank * {BATCH} // ranks, (rank + 1) * {BATCH} // ranks)
for _ in range({STEPS}):
    points, noise = torch.randn({BATCH}, 20), torch.randn(2, {BATCH}, 20)
    first, second = ((points + 0.1 * each)[mine].to(device) for each in noise)
    loss = step(first, second)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"{{loss.item():.6f}}")
if ranks > 1:
    del step, loss  # together, and without what holds the group: gloo aborts where that lives on
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
"""
loop = Path(tempfile.mkdtemp()) / "loop.py"
loop.write_text(PROGRAM)


def losses(processes: int) -> list[float]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    done = subprocess.run([sys.executable, *launch, str(loop)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [float(line) for line in done.stdout.split()]


# %% [markdown]
# ## One and two
#
# The losses of every step agree, and so do the weights that lead to the next one.

# %%
one, two = losses(1), losses(2)
for number, (a, b) in enumerate(zip(one, two, strict=True)):
    print(f"step {number}: one process {a:.6f}   two {b:.6f}")
assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-4

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(one, linewidth=5, alpha=0.3, label="one process, all rows")
axes.plot(two, label="two processes, half of them each")
axes.set_xlabel("step")
axes.set_ylabel("loss")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## With dipole's own trainer
#
# ```
# torchrun --nproc-per-node 4 -m dipole.core.cli train cifar10-simclr
# ```
#
# shares each batch among four GPUs and ends with the numbers of one. Where the gathered rows do not fit, they go
# round in a ring ([core](../core.md), several ranks).
