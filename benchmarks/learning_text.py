"""Does training help? Quick-Thought encoders on real text against their untrained selves, on the six SentEval tasks.

    python -m dipole.benchmarks.learning_text --data DATA --out benchmarks/results/text-learning.json

Bag-of-words encoders on the movie reviews of the data folder: what learns on a CPU within a minute. Each objective is
trained with every seed; results are kept after each run, and an interrupted call goes on where it stopped.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipole.core.objective import objective
from dipole.core.seeding import Seeds
from dipole.text import senteval
from dipole.text.adapter import TextAdapter
from dipole.text.config import TextSettings

BASES = {
    "QT": "quickthoughts",
    "DCL": "dcl(similarity=dot, temperature=1)",
    "HCL": "hcl(similarity=dot, temperature=1, beta=0.5)",
}
REGULARIZERS = {"": "", "+DP": " + 0.1*dp", "+CLLR": " + 0.1*cllr"}
RATE = 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with imdb_or_movie/ and senteval/")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results")
    parser.add_argument("--steps", type=int, default=300, help="updates of each run")
    parser.add_argument("--width", type=int, default=100, help="of the word embeddings")
    parser.add_argument("--words", type=int, default=10_000, help="size of the vocabulary")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", help="folder for the encoded corpus, which is otherwise read again for every run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting = {k: getattr(arguments, k) for k in ("steps", "width", "words")} | {
        "batch_size": 400,
        "learning_rate": RATE,
    }
    kept: dict[str, Any] = {"setting": setting, "runs": {}}
    if arguments.out.is_file():
        kept = json.loads(arguments.out.read_text())
        if kept["setting"] != setting:
            raise SystemExit(f"{arguments.out} holds results of other settings: {kept['setting']}")
    for seed in range(arguments.seeds):
        names = {"untrained": None} | {b + r: BASES[b] + REGULARIZERS[r] for r in REGULARIZERS for b in BASES}
        for name, spec in names.items():
            if f"{name}/{seed}" not in kept["runs"]:
                kept["runs"][f"{name}/{seed}"] = run(arguments, spec, seed)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(kept, indent=1) + "\n")
                print(name, seed, kept["runs"][f"{name}/{seed}"], flush=True)
    print(table(kept))


def run(arguments: argparse.Namespace, spec: str | None, seed: int) -> dict[str, float]:
    """Train (unless `spec` is None) and return accuracies in percent, and the processor seconds of training."""
    torch.manual_seed(seed)
    settings = TextSettings(
        corpus=str(arguments.data / "imdb_or_movie"),
        lower=True,
        encoder="bow",
        word_size=arguments.width,
        vocabulary_size=arguments.words,
        cache=arguments.cache,
    )
    adapter = TextAdapter(settings, seed=Seeds(seed), device=torch.device("cpu"), workdir=Path(), batch_size=400)
    start, loss = time.process_time(), None
    if spec is not None:
        loss = objective(spec, dim=adapter.embedding_dim)
        optimizer = torch.optim.Adam([*adapter.module.parameters(), *loss.parameters()], lr=RATE, fused=True)
        for step, batch in zip(range(arguments.steps), endless(adapter), strict=False):
            del step
            loss(adapter.embed(batch)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.after_step(RATE)
    spent = time.process_time() - start
    encoder = adapter.encoder(loss)
    found = senteval.evaluate(encoder.encode, senteval.SIX_TASKS, arguments.data / "senteval", progress=False)
    return {task: result["acc"] for task, result in found.items()} | {"seconds": round(spent, 1)}


def endless(adapter: TextAdapter) -> Any:
    """Batches of one epoch after another."""
    epoch = 0
    while True:
        yield from adapter.batches(epoch)
        epoch += 1


def table(kept: dict[str, Any]) -> str:
    """Mean and 95 % t-interval over the seeds, Markdown."""
    from scipy.stats import t

    names = list(dict.fromkeys(key.split("/")[0] for key in kept["runs"]))
    lines = ["| | " + " | ".join(senteval.SIX_TASKS) + " |", "|---|" + "---|" * len(senteval.SIX_TASKS)]
    for name in names:
        runs = [value for key, value in kept["runs"].items() if key.split("/")[0] == name]
        cells = []
        for task in senteval.SIX_TASKS:
            values = np.array([r[task] for r in runs])
            half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0
            cells.append(f"{values.mean():.1f} +- {half:.1f}")
        lines.append(f"| {name} ({len(runs)}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
