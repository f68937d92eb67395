"""Does training help on real text? Compare Quick-Thought encoders with untrained ones on six SentEval tasks.

    python -m dipole.benchmarks.studies.learning_text --data DATA --out benchmarks/results/text-learning.json

The encoders are bags of words, which train within a minute on a CPU. Finished runs are not repeated, and unfinished
ones resume from their checkpoint. The results are written after every run. There are two baselines: the same encoder
untrained (the sum of the vectors of its vocabulary), and the mean of random normal word vectors of the same width, in
which no word is unknown.
"""

import argparse
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from dipole.benchmarks.report.table import markdown
from dipole.benchmarks.statistics import summarize
from dipole.benchmarks.studies.common import load, save
from dipole.core.train.recipe import resolve
from dipole.core.train.run import train
from dipole.core.utils.seeding import Seeds, seed_everything
from dipole.text import senteval
from dipole.text.adapter import TextAdapter
from dipole.text.config import TextSettings

BASES = {
    "QT": "quickthoughts",
    "DCL": "dcl(similarity=dot, temperature=1)",
    "HCL": "hcl(similarity=dot, temperature=1, beta=0.5)",
}
REGULARIZERS = {"": "", "+DP": " + 0.1*dp(reduction=anchor_sum)", "+CLLR": " + 0.1*cllr"}
TRAINED = {base + extra: BASES[base] + REGULARIZERS[extra] for extra in REGULARIZERS for base in BASES}
BASELINES = ("untrained", "random words")
STEPS, BATCH, RATE, WIDTH, WORDS = 600, 400, 2e-3, 100, 20_000
CORPORA = {"reviews": ("imdb_or_movie",), "books": ("books",), "both": ("imdb_or_movie", "books")}


def link_corpus(data: Path, which: str, runs: Path) -> Path:
    """Fill a folder in `runs` with links to the texts. The path of a corpus is part of a run's identity."""
    folder = runs / "corpora" / which
    if not folder.is_dir():
        folder.mkdir(parents=True)
        for part in CORPORA[which]:
            for path in sorted((data / part).iterdir()):
                (folder / path.name).symlink_to(path.resolve())
    return folder


def run(name: str, seed: int, tasks: Path, corpus: Path, runs: Path, steps: int = STEPS) -> dict[str, float]:
    """Return the accuracies of one encoder in percent, and the wall seconds of its run."""
    text: dict[str, Any] = {
        "corpus": str(corpus), "lower": True, "encoder": "bow", "word_size": WIDTH, "vocabulary_size": WORDS,
        "cache": str(runs / "corpora" / "encoded"),
    }  # fmt: skip
    if name in TRAINED:
        recipe = {
            "name": f"text-learning {name}", "domain": "text", "objective": TRAINED[name], "seed": seed,
            "device": "cpu", "text": text | {"senteval": str(tasks)},
            "train": {"steps": steps, "batch_size": BATCH, "optimizer": "adam", "learning_rate": RATE},
        }  # fmt: skip
        record = train(resolve(recipe).config, runs, quiet=True)
        accuracies = {task: record.results[f"senteval/{task}/accuracy"] for task in senteval.SIX_TASKS}
        found = {task: round(100 * value, 2) for task, value in accuracies.items() if value is not None}
        return found | {"seconds": round(record.wall_seconds, 1)}
    encode: Any = RandomWords(2 * WIDTH, seed)
    if name == "untrained":
        seeds = Seeds(seed)
        seed_everything(seeds.model)  # the initial weights of the trained encoders
        adapter = TextAdapter(
            TextSettings(**text), seed=seeds, device=torch.device("cpu"), workdir=runs, batch_size=BATCH
        )
        encode = adapter.encoder().encode
    results = senteval.evaluate(encode, senteval.SIX_TASKS, tasks, progress=False)
    return {task: result["acc"] for task, result in results.items()} | {"seconds": 0.0}


class RandomWords:
    """Encode sentences by the mean of normal vectors. The word in lower case and the seed determine each vector."""

    def __init__(self, width: int, seed: int) -> None:
        self.width, self.seed = width, seed

    def vector(self, word: str) -> np.ndarray:
        draw = np.random.default_rng([self.seed, zlib.crc32(word.encode())])
        return draw.standard_normal(self.width, dtype=np.float32)

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        vectors = {word: self.vector(word) for word in {".", *" ".join(sentences).lower().split()}}
        return np.stack([np.mean([vectors[w] for w in s.lower().split() or ["."]], 0) for s in sentences])


def grouped(runs: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs with keys `name/seed` by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key, run in sorted(runs.items(), key=lambda item: item[0].rpartition("/")[2]):
        found.setdefault(key.rpartition("/")[0], []).append(run)
    return found


def mean_and_interval(values: Sequence[float]) -> str:
    """Return the mean +- half of its 95 % t-interval, or a single value alone."""
    found = summarize(list(values))
    if found.n < 2:
        return f"{found.mean:.1f}"
    return f"{found.mean:.1f} +- {found.high - found.mean:.1f}"


def table(runs: dict[str, Any]) -> str:
    rows = []
    for name, found in grouped(runs).items():
        cells = [mean_and_interval([run[task] for run in found]) for task in senteval.SIX_TASKS]
        rows.append([f"{name} ({len(found)})", *cells])
    return markdown(["", *senteval.SIX_TASKS], rows)


def verdict(runs: dict[str, Any]) -> str:
    """Count for each trained encoder the tasks on which its mean is above the baselines'."""
    means = {
        name: {task: fmean(run[task] for run in found) for task in senteval.SIX_TASKS}
        for name, found in grouped(runs).items()
    }
    lines = []
    for name in means.keys() - BASELINES:
        above = [[t for t in senteval.SIX_TASKS if means[name][t] > means[other][t]] for other in BASELINES]
        counts = [f"{len(tasks)} of 6 above {other}" for tasks, other in zip(above, BASELINES, strict=True)]
        lines.append(f"{name}: {', '.join(counts)}; both: {', '.join(task for task in above[0] if task in above[1])}")
    return "\n".join(sorted(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with imdb_or_movie/, books/ and senteval/")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--corpus", choices=CORPORA, default="reviews")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting = {
        "corpus": arguments.corpus, "steps": STEPS, "width": WIDTH, "words": WORDS, "batch_size": BATCH,
        "learning_rate": RATE,
    }  # fmt: skip
    content = load(arguments.out, {"setting": setting, "runs": {}})
    if content["setting"] != setting:
        raise SystemExit(f"{arguments.out} has results of other settings: {content['setting']}. Name another --out")
    corpus, tasks = link_corpus(arguments.data, arguments.corpus, arguments.runs), arguments.data / "senteval"
    for seed, name in product(range(arguments.seeds), (*BASELINES, *TRAINED)):
        key = f"{name}/{seed}"
        if key not in content["runs"]:
            content["runs"][key] = run(name, seed, tasks, corpus, arguments.runs)
            save(arguments.out, content)
            print(key, content["runs"][key], flush=True)
    print(table(content["runs"]))
    print(verdict(content["runs"]))


if __name__ == "__main__":
    main()
