"""An objective in a loop of your own: one process, or several with DistributedDataParallel.

    python examples/plain_loop.py
    torchrun --nproc-per-node 2 examples/plain_loop.py

Both print the same numbers: N processes with B/N rows each compute the loss and the gradient of one with B.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dipole

BATCH = 64


class Model(nn.Module):
    """Encoder and objective as one module: DistributedDataParallel then averages the gradients of both."""

    def __init__(self, encoder: nn.Module, objective: str, dim: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.objective = dipole.objective(objective, dim=dim)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.objective(self.encoder(first), self.encoder(second)).loss  # gathers the rows of all processes


def train(ranks: int, rank: int, steps: int, learning_rate: float) -> list[float]:
    """Train on noise, and give the loss of each step."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
    model = Model(encoder, "infonce(temperature=0.1) + 0.1*dp + 0.1*cllr(solver=proximal, alpha=0.5)", dim=16)
    step: nn.Module = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses = []
    for done in range(1, steps + 1):
        points, noise = torch.randn(BATCH, 20), torch.randn(2, BATCH, 20)  # the same on all processes
        first, second = (points + 0.1 * each for each in noise)
        mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        loss = step(first[mine], second[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.objective.after_step(learning_rate, done, steps)
        losses.append(loss.item())
    return losses


def main(steps: int = 20, learning_rate: float = 0.01) -> list[float]:
    """Train in as many processes as torchrun has started."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if ranks > 1:
        dist.init_process_group("gloo")
    losses = train(ranks, rank, steps, learning_rate)
    if rank == 0:
        print(" ".join(f"{loss:.5f}" for loss in losses))
    if ranks > 1:
        # Together, and when DistributedDataParallel is gone: gloo aborts where one that lives loses its group.
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
