"""An objective in sentence-transformers' own trainer: pairs with a hard negative, then the projection that was learnt.

    python examples/sentence_transformers_trainer.py --model sentence-transformers/all-MiniLM-L6-v2

Started with `torchrun --nproc-per-node 4`, four processes train as one on their batches together.
"""

import argparse

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

import dipole

DATA = {
    "anchor": ["How do I bake bread?", "Where is the moon at noon?", "What do cats eat?", "Who wrote the letter?"],
    "positive": ["Mix flour and water.", "Below the horizon, or pale.", "Mostly meat.", "The letter is by Ada."],
    "negative": ["Bread is sold next door.", "The sun is up at noon.", "Dogs eat meat.", "The letter is long."],
}


def main(model: str, output: str, steps: int = 100, use_cpu: bool = False) -> SentenceTransformer:
    """Train, and give the model with its projection behind it."""
    encoder = SentenceTransformer(model, device="cpu" if use_cpu else None)
    loss = dipole.text.CachedContrastiveLoss(
        encoder,
        "infonce(temperature=0.05) + 0.1*dp + 0.01*cllr(alpha=0.1, features=unit)",
        mini_batch_size=32,
        gather_across_devices=True,
    )
    args = SentenceTransformerTrainingArguments(
        output_dir=output,
        per_device_train_batch_size=256,
        max_steps=steps,
        dataloader_drop_last=False,
        report_to=[],
        use_cpu=use_cpu,
    )
    data = Dataset.from_dict({name: texts * 8 for name, texts in DATA.items()})
    SentenceTransformerTrainer(encoder, args, train_dataset=data, loss=loss).train()
    trained = loss.projected_model()
    trained.save_pretrained(f"{output}/final")
    return trained


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--output", default="runs/sentence-transformers")
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
