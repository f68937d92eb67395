"""An objective in a LightningModule: two augmented views of images, a term with parameters of its own.

    python examples/lightning_module.py --steps 100

With several devices, `Trainer(devices=4, strategy="ddp")`, each process hands in its own rows: the objective gathers
those of all, with gradient, and four processes train as one on their batches together.
"""

import argparse
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dipole


class SimCLR(LightningModule):
    """An encoder and an objective of what it makes of two views."""

    def __init__(self, encoder: nn.Module, dim: int, objective: str, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.encoder = encoder
        self.objective = dipole.objective(objective, dim=dim)  # a module: its parameters are trained and saved
        self.learning_rate = learning_rate

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (images,) = batch
        views = [self.encoder(images + 0.1 * torch.randn_like(images)) for _ in range(2)]
        outcome = self.objective(*views)
        self.log_dict({name: float(term) for name, term in outcome.terms.items()})
        return outcome.loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        # Proximal steps and schedules of terms. Lightning counts the step afterwards.
        rate, total = optimizer.param_groups[0]["lr"], int(self.trainer.estimated_stepping_batches)
        self.objective.after_step(rate, self.global_step + 1, total)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def main(output: str, steps: int = 100, size: int = 32) -> SimCLR:
    """Train on noise, and give the module."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 32))
    module = SimCLR(encoder, 32, "infonce(temperature=0.2) + 0.1*dp + 0.01*cllr(solver=proximal, alpha=1)")
    data = DataLoader(TensorDataset(torch.randn(256, 3, size, size)), batch_size=64, shuffle=True)
    trainer = Trainer(
        default_root_dir=output, max_steps=steps, accelerator="auto", logger=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.save_checkpoint(f"{output}/last.ckpt")
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/lightning")
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
