"""An objective in transformers' Trainer: images of classes, whose members are positives of each other.

python examples/transformers_trainer.py --model facebook/dinov2-small
"""

import argparse

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, Trainer, TrainingArguments

import dipole


class Pooled(nn.Module):
    """An image model whose output is one vector for each image."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"embeddings": self.backbone(pixel_values=pixel_values).last_hidden_state[:, 0]}


def images(count: int, size: int, classes: int = 4) -> list[dict[str, Tensor]]:
    """Noise around one picture for each class."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, 3, size, size, generator=draw)
    noise = torch.randn(count, 3, size, size, generator=draw)
    return [
        {"pixel_values": centres[n % classes] + noise[n], "labels": torch.tensor(n % classes)} for n in range(count)
    ]


def main(
    model: str | PreTrainedModel, output: str, steps: int = 100, size: int = 224, use_cpu: bool = False
) -> Trainer:
    """Train, and give the trainer."""
    backbone = AutoModel.from_pretrained(model) if isinstance(model, str) else model
    pooled = Pooled(backbone)
    loss = dipole.compute_loss(
        "infonce(temperature=0.1) + 0.1*cllr(alpha=0.1, features=unit)", model=pooled, dim=backbone.config.hidden_size
    )
    args = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=steps,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=use_cpu,
    )
    trainer = Trainer(pooled, args, train_dataset=images(128, size), compute_loss_func=loss)
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="facebook/dinov2-small")
    parser.add_argument("--output", default="runs/transformers")
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
