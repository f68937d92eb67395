"""Does training help? Quick-Thought encoders on real text against their untrained selves, on the six SentEval tasks.

    python -m dipole.benchmarks.studies.learning_text --data DATA --out benchmarks/results/text-learning.json

Bag-of-words encoders on the movie reviews and the novels of the data folder: what learns on a CPU within a minute. Each
objective is trained with every seed, as `dipole train` does it: a finished run is not run again, an unfinished one
resumes from its checkpoint. The results are written after every run. Two encoders that learn nothing stand beside them:
the same one untrained (the sum of the vectors of its vocabulary) and the mean of random normal word vectors of the same
width, in which no word is unknown.
"""

import argparse
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipole.benchmarks.statistics import summarize
from dipole.core.train.recipe import resolve
from dipole.core.train.run import train
from dipole.core.utils.files import atomic_write
from dipole.core.utils.seeding import Seeds, seed_everything
from dipole.text import senteval
from dipole.text.adapter import TextAdapter
from dipole.text.config import TextSettings

BASES = {
    "QT": "quickthoughts",
    "DCL": "dcl(similarity=dot, temperature=1)",
    "HCL": "hcl(similarity=dot, temperature=1, beta=0.5)",
}
REGULARIZERS = {"": "", "+DP": " + 0.1*dp", "+CLLR": " + 0.1*cllr"}
TRAINED = {base + extra: BASES[base] + REGULARIZERS[extra] for extra in REGULARIZERS for base in BASES}
BASELINES = ("untrained", "random words")
BATCH, RATE = 400, 2e-3
CORPORA = {"reviews": ("imdb_or_movie",), "books": ("books",), "both": ("imdb_or_movie", "books")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with imdb_or_movie/, books/ and senteval/")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--corpus", choices=CORPORA, default="reviews")
    parser.add_argument("--steps", type=int, default=600, help="updates of each run")
    parser.add_argument("--width", type=int, default=100, help="of the word embeddings")
    parser.add_argument("--words", type=int, default=20_000, help="size of the vocabulary")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", help="folder for the encoded corpus; default inside the folder of runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting = {k: getattr(arguments, k) for k in ("corpus", "steps", "width", "words")}
    setting |= {"batch_size": BATCH, "learning_rate": RATE}
    kept: dict[str, Any] = {"setting": setting, "runs": {}}
    if arguments.out.is_file():
        kept = json.loads(arguments.out.read_text())
        if kept["setting"] != setting:
            raise SystemExit(f"{arguments.out} holds results of other settings: {kept['setting']}")
    corpus = arguments.runs / "corpora" / arguments.corpus  # a run is known by where its corpus lies
    if not corpus.is_dir():
        link_corpus(arguments.data, arguments.corpus, corpus)
    cache = arguments.cache or str(arguments.runs / "corpora" / "encoded")
    for seed in range(arguments.seeds):
        for name in (*BASELINES, *TRAINED):
            if f"{name}/{seed}" in kept["runs"]:
                continue
            found = run(
                name, seed, arguments.data / "senteval", corpus, cache, arguments.runs,
                steps=arguments.steps, width=arguments.width, words=arguments.words,
            )  # fmt: skip
            kept["runs"][f"{name}/{seed}"] = found
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(arguments.out, json.dumps(kept, indent=1) + "\n")
            print(name, seed, found, flush=True)
    print(table(kept["runs"]))
    print(verdict(kept["runs"]))


def link_corpus(data: Path, which: str, folder: Path) -> None:
    """Fill a folder with links to the texts, and to them alone (the data folder also holds the tasks)."""
    folder.mkdir(parents=True)
    for part in CORPORA[which]:
        for path in sorted((data / part).iterdir()):
            (folder / path.name).symlink_to(path.resolve())


def run(
    name: str, seed: int, tasks: Path, corpus: Path, cache: str | None, runs: Path, *, steps: int, width: int,
    words: int,
) -> dict[str, float]:  # fmt: skip
    """Accuracies in percent of one encoder, and the wall seconds of its run."""
    text: dict[str, Any] = {
        "corpus": str(corpus), "lower": True, "encoder": "bow", "word_size": width, "vocabulary_size": words,
        "cache": cache,
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
    encode: Any = RandomWords(2 * width, seed)
    if name == "untrained":
        seeds = Seeds(seed)
        seed_everything(seeds.model)  # the weights that the trained ones start from
        adapter = TextAdapter(
            TextSettings(**text), seed=seeds, device=torch.device("cpu"), workdir=runs, batch_size=BATCH
        )
        encode = adapter.encoder().encode
    results = senteval.evaluate(encode, senteval.SIX_TASKS, tasks, progress=False)
    return {task: result["acc"] for task, result in results.items()} | {"seconds": 0.0}


class RandomWords:
    """Mean of normal vectors drawn from each lower-cased word and the seed."""

    def __init__(self, width: int, seed: int) -> None:
        self.width, self.seed = width, seed
        self.known: dict[str, np.ndarray] = {}

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        return np.stack([np.mean([self.vector(w) for w in s.lower().split() or ["."]], 0) for s in sentences])

    def vector(self, word: str) -> np.ndarray:
        if word not in self.known:
            draw = np.random.default_rng([self.seed, zlib.crc32(word.encode())])
            self.known[word] = draw.standard_normal(self.width, dtype=np.float32)
        return self.known[word]


def values(runs: dict[str, Any], name: str, task: str) -> np.ndarray:
    """Accuracies of all seeds, in the order of the seeds."""
    return np.array([value[task] for key, value in sorted(runs.items()) if key.rpartition("/")[0] == name])


def interval(found: np.ndarray) -> float:
    """Half of the 95 % t-interval of the mean; 0 for a single value."""
    if len(found) < 2:
        return 0.0
    summary = summarize(found.tolist())
    return summary.high - summary.mean


def table(runs: dict[str, Any]) -> str:
    """Mean and 95 % interval over the seeds, Markdown."""
    lines = ["| | " + " | ".join(senteval.SIX_TASKS) + " |", "|---|" + "---|" * len(senteval.SIX_TASKS)]
    for name in dict.fromkeys(key.rpartition("/")[0] for key in runs):
        found = [values(runs, name, task) for task in senteval.SIX_TASKS]
        cells = [f"{each.mean():.1f} +- {interval(each):.1f}" for each in found]
        lines.append(f"| {name} ({len(found[0])}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tasks_above(runs: dict[str, Any], name: str, other: str) -> list[str]:
    """Tasks on which the mean over the seeds is above the other's."""
    return [t for t in senteval.SIX_TASKS if values(runs, name, t).mean() > values(runs, other, t).mean()]


def verdict(runs: dict[str, Any]) -> str:
    """On how many of the six tasks each trained encoder is ahead of both that learn nothing."""
    names = [name for name in dict.fromkeys(key.rpartition("/")[0] for key in runs) if name in TRAINED]
    lines = []
    for name in names:
        counts = [f"{len(tasks_above(runs, name, other))} of 6 above {other}" for other in BASELINES]
        both = set(tasks_above(runs, name, BASELINES[0])) & set(tasks_above(runs, name, BASELINES[1]))
        lines.append(f"{name}: {', '.join(counts)}; both: {', '.join(t for t in senteval.SIX_TASKS if t in both)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
