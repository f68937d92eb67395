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
# # Fine-tune a sentence encoder and score it with SentEval and MTEB
#
# You fine-tune a sentence-transformers model with its own trainer and a dipole
# objective as the loss. SentEval and MTEB score the model before and after.
#
# Time on one core: 30 s with `DIPOLE_TUTORIAL=small`, which downloads nothing. Without
# it, the tutorial downloads a published model and two MTEB tasks, and takes longer.

# %%
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("dipole") is None:  # on Colab, for example
    source = os.environ.get("DIPOLE_SOURCE", "")  # git+URL or file:///CHECKOUT
    if not source:
        raise RuntimeError("Set DIPOLE_SOURCE to git+URL or file:///CHECKOUT.")
    command = [sys.executable, "-m", "pip", "install", "-q"]
    packages = [f"dipole[text,sentence-transformers] @ {source}", "mteb", "matplotlib"]
    if subprocess.run(command + packages).returncode:
        raise RuntimeError(f"pip cannot install dipole from {source}.")

# %% [markdown]
# ## Sentences
#
# The text is Python's own documentation. Consecutive sentences are training pairs. A
# quarter of six long topics is held out. The test asks which topic a held-out sentence
# belongs to.

# %%
import itertools
import os
import re
import warnings
from pathlib import Path

import torch

from dipole.text import pydoc_documents

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
TOPICS = (
    "specialnames",
    "compound",
    "types",
    "debugger",
    "string-methods",
    "formatstrings",
)

documents = {
    document.name: [
        sentence for sentence in document.sentences if 20 <= len(sentence) <= 200
    ]
    for document in pydoc_documents()
}
label_of = {}  # of a sentence that two topics have, the first topic
for label, topic in enumerate(TOPICS):
    for sentence in documents[topic]:
        label_of.setdefault(sentence, label)
tested = dict(list(label_of.items())[::4])
learned = {
    sentence: label for sentence, label in label_of.items() if sentence not in tested
}
pairs = {
    pair for sentences in documents.values() for pair in itertools.pairwise(sentences)
}
pairs = sorted(pair for pair in pairs if not tested.keys() & set(pair))
print(
    f"{len(learned)} sentences of six topics to fit a classifier on, "
    f"{len(tested)} others to test it"
)
print(
    f"{len(pairs)} pairs, such as",
    *next(pair for pair in pairs if pair[0].startswith("A class")),
    sep="\n  ",
)
assert not tested.keys() & {sentence for pair in pairs for sentence in pair}

# %% [markdown]
# ## A model
#
# This is a published checkpoint. The small setting uses a tiny BERT with random
# weights instead.

# %%
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

CHECKPOINT = "sentence-transformers/all-MiniLM-L6-v2"


def tiny(folder: str, texts: list[str]) -> SentenceTransformer:
    """One layer with random weights, and the words of the texts."""
    words = [
        "[PAD]",
        "[UNK]",
        *sorted(
            {
                word
                for text in texts
                for word in re.findall(r"\w+|[^\w\s]", text.lower())
            }
        ),
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=len(words),
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=128,
        )
    ).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    transformer = modules.Transformer(folder, max_seq_length=64)
    return SentenceTransformer(
        modules=[transformer, modules.Pooling(64, pooling_mode="mean")], device="cpu"
    )


def published() -> SentenceTransformer:
    """The checkpoint, from the network or from where an earlier download keeps it."""
    try:
        return SentenceTransformer(CHECKPOINT)
    except OSError:
        raise RuntimeError(
            f"{CHECKPOINT} cannot be fetched here. "
            "With DIPOLE_TUTORIAL=small in the environment nothing is downloaded."
        ) from None


model = (
    tiny("tiny", [text for pair in pairs for text in pair]) if SMALL else published()
)

# %% [markdown]
# ## SentEval
#
# If you have SentEval's files, put them into `data/senteval` (`dipole data get
# senteval` does this), or set `SENTEVAL` to their folder. Otherwise this cell runs
# SentEval's protocol on the sentences above, in place of TREC's six classes of
# questions. A classifier is fitted on the first part. Cross-validation chooses its
# regularization. It is tested once on the second part. SentEval warns that these are
# not TREC's files. The warning is expected and silenced here.

# %%
from dipole.text import senteval

data, tasks = (
    Path(os.environ.get("SENTEVAL", "data/senteval")),
    list(senteval.SIX_TASKS),
)
own = not data.is_dir()
if own:
    data, tasks = Path("pydoc-as-trec"), ["TREC"]
    (data / "downstream/TREC").mkdir(parents=True, exist_ok=True)
    for file, part in (("train_5500.label", learned), ("TREC_10.label", tested)):
        classes = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
        lines = [
            f"{classes[label]}:topic {sentence}\n" for sentence, label in part.items()
        ]
        (data / "downstream/TREC" / file).write_text(
            "".join(lines), encoding="latin-1", errors="ignore"
        )


def senteval_numbers() -> dict[str, float]:
    """Accuracy in percent by task."""
    with warnings.catch_warnings():
        if own:
            warnings.filterwarnings("ignore", message="(?s).*is not the known file")
        found = senteval.evaluate(
            lambda texts: model.encode(texts, show_progress_bar=False),
            tasks,
            data,
            check=not own,
        )
    return {
        ("SentEval, as TREC" if own else f"SentEval {name}"): each["acc"]
        for name, each in found.items()
    }


# %% [markdown]
# ## MTEB
#
# MTEB takes the model without changes, and its own tasks by name. Your own task is a
# class with its data. Here we use the same sentences with MTEB's classification
# protocol: fit on eight sentences of each class, five times.

# %%
import mteb
from datasets import Dataset, DatasetDict
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.task_metadata import TaskMetadata

UNKNOWN = (
    "reference",
    "date",
    "domains",
    "task_subtypes",
    "license",
    "annotations_creators",
    "dialect",
)


class Topics(AbsTaskClassification):
    """Which of six topics of Python's documentation a sentence is of."""

    metadata = TaskMetadata(
        name="PythonTopics",
        description="Which of six topics of Python's documentation a sentence is of.",
        dataset={"path": "none", "revision": "1"},
        type="Classification",
        category="t2c",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="accuracy",
        **dict.fromkeys((*UNKNOWN, "sample_creation", "bibtex_citation")),
    )

    n_experiments = 5

    def load_data(self, **ignored):
        parts = {"train": learned, "test": tested}
        self.dataset = DatasetDict(
            {
                name: Dataset.from_dict(
                    {"text": list(part), "label": list(part.values())}
                )
                for name, part in parts.items()
            }
        )
        self.data_loaded = True


def mteb_numbers() -> dict[str, float]:
    """The main score in percent by task."""
    chosen = (
        [Topics()]
        if SMALL
        else [
            Topics(),
            *mteb.get_tasks(tasks=["Banking77Classification", "STSBenchmark"]),
        ]
    )
    found = mteb.evaluate(model, chosen, cache=None).task_results
    return {
        f"MTEB {each.task_name}": 100 * each.scores["test"][0]["main_score"]
        for each in found
    }


before = senteval_numbers() | mteb_numbers()

# %% [markdown]
# ## Fine-tuning
#
# The only new line is the loss. `CachedContrastiveLoss` stores the activations of
# `mini_batch_size` sentences at a time. The objective still sees the whole batch.

# %%
from sentence_transformers import (
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

import dipole

loss = dipole.text.CachedContrastiveLoss(
    model, "infonce(temperature=0.05) + 0.1*dp", mini_batch_size=32
)
arguments = SentenceTransformerTrainingArguments(
    output_dir="fine-tuned",
    per_device_train_batch_size=64,
    num_train_epochs=2,
    learning_rate=4e-3 if SMALL else 2e-5,
    logging_steps=10,
    report_to=[],
    save_strategy="no",
    use_cpu=SMALL,
    seed=0,
)
first, second = zip(*pairs, strict=True)
trainer = SentenceTransformerTrainer(
    model,
    arguments,
    train_dataset=Dataset.from_dict({"anchor": first, "positive": second}),
    loss=loss,
)
trainer.train()
after = senteval_numbers() | mteb_numbers()

# %% [markdown]
# ## Before and after

# %% alt="Left: the loss falls over the steps. Right: bars of each score before and after fine-tuning."
import matplotlib.pyplot as plt

print(f"{'':24} {'before':>8} {'after':>8}")
for name in before:
    print(f"{name:24} {before[name]:8.1f} {after[name]:8.1f}")
most = max(list(tested.values()).count(label) for label in range(len(TOPICS)))
print(f"always the most frequent topic: {100 * most / len(tested):.1f}")

curve = [
    (entry["step"], entry["loss"])
    for entry in trainer.state.log_history
    if "loss" in entry
]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(*zip(*curve, strict=True), marker="o")
left.set_xlabel("step")
left.set_ylabel("loss")
places = range(len(before))
right.barh(
    [place - 0.2 for place in places], list(before.values()), 0.4, label="before"
)
right.barh([place + 0.2 for place in places], list(after.values()), 0.4, label="after")
right.set_yticks(list(places), list(before))
right.invert_yaxis()
right.set_xlabel("score, %")
figure.legend(
    *right.get_legend_handles_labels(),
    loc="outside upper right",
    ncols=2,
    frameon=False,
)
plt.show()

# %%
if SMALL and own:
    assert all(after[name] > before[name] + 5 for name in before)

# %% [markdown]
# An untrained encoder learns from neighbouring sentences what separates topics. Both
# scores rise on unseen sentences. MTEB's score is lower, because its classifier is
# fitted on eight sentences of a class and SentEval's on all. Expect less from a
# published checkpoint, which already knows more English than these pages teach. Two
# epochs on one document can lower other tasks, so compare several tasks before and
# after. One run is one seed. A comparison of two objectives needs several.
#
# [The page for users of sentence-transformers](../how-to/sentence-transformers.md) covers hard negatives, several processes and terms
# with parameters. [Text](../background/text.md) describes SentEval's protocols and
# compares our numbers with published ones.
