"""An objective in sentence-transformers' own trainer: pairs with a hard negative, then the projection that was learnt.

    python examples/sentence_transformers_trainer.py --model sentence-transformers/all-MiniLM-L6-v2

Started with `torchrun --nproc-per-node 4`, four processes train as one on their batches together.
"""

import argparse
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from torch import nn

import dipole

OBJECTIVE = "infonce(temperature=0.05) + 0.1*dp + 0.01*cllr(alpha=0.1, features=unit)"
DATA = {
    "anchor": ["How do I bake bread?", "Where is the moon at noon?", "What do cats eat?", "Who wrote the letter?"],
    "positive": ["Mix flour and water.", "Below the horizon, or pale.", "Mostly meat.", "The letter is by Ada."],
    "negative": ["Bread is sold next door.", "The sun is up at noon.", "Dogs eat meat.", "The letter is long."],
}


def build(encoder: SentenceTransformer, objective: str = OBJECTIVE) -> dipole.text.CachedContrastiveLoss:
    """Give the objective as a loss: in the library it is CachedMultipleNegativesRankingLoss(encoder, scale=20)."""
    return dipole.text.CachedContrastiveLoss(encoder, objective, mini_batch_size=32, gather_across_devices=True)


def train(encoder: SentenceTransformer, loss: nn.Module, output: str, steps: int, **settings: Any) -> None:
    """Train the encoder and the loss with the library's trainer."""
    args = SentenceTransformerTrainingArguments(
        output_dir=output, per_device_train_batch_size=256, max_steps=steps, report_to=[], **settings
    )
    data = Dataset.from_dict({name: texts * 8 for name, texts in DATA.items()})
    SentenceTransformerTrainer(encoder, args, train_dataset=data, loss=loss).train()


def main(model: str, output: str, steps: int = 100, use_cpu: bool = False) -> SentenceTransformer:
    """Train, and give the model with its projection behind it."""
    encoder = SentenceTransformer(model, device="cpu" if use_cpu else None)
    loss = build(encoder)
    train(encoder, loss, output, steps, use_cpu=use_cpu)
    trained = loss.projected_model()
    trained.save_pretrained(f"{output}/final")
    return trained


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--output", default="runs/sentence-transformers")
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
