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
# # Fine-tune a sentence encoder; its SentEval and MTEB numbers
#
# A model of sentence-transformers, its own trainer, and an objective as its loss; then the protocols by which such
# encoders are compared.

# %%
import sys

if "google.colab" in sys.modules:
    import subprocess

    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "dipole[text,sentence-transformers]", "mteb"], check=True
    )

# %% [markdown]
# ## A model and pairs
#
# A published checkpoint, and neighbouring sentences of Python's own documentation as pairs. The small setting makes a
# tiny BERT with random weights in place of the checkpoint, so that it runs without a download.

# %%
import itertools
import os
import re
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

import dipole

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
folder = Path(tempfile.mkdtemp())
CHECKPOINT = "sentence-transformers/all-MiniLM-L6-v2"

documents = [re.findall(r"[A-Z][a-z]+ [a-z ,]{20,80}\.", " ".join(text.split())) for text in topics.values()]
pairs = [pair for sentences in documents for pair in itertools.pairwise(sentences)]
print(len(pairs), "pairs, such as", pairs[0])


def tiny(folder: Path, texts: list[str]) -> SentenceTransformer:
    """One layer with random weights, and the words of the texts."""
    from sentence_transformers.sentence_transformer import modules
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", *sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)})]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    BertModel(BertConfig(**sizes), add_pooling_layer=False).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    transformer = modules.Transformer(str(folder), max_seq_length=64)
    return SentenceTransformer(modules=[transformer, modules.Pooling(32, pooling_mode="mean")], device="cpu")


model = tiny(folder, [text for pair in pairs for text in pair]) if SMALL else SentenceTransformer(CHECKPOINT)

# %% [markdown]
# ## Numbers before
#
# SentEval's protocol on its own files, where `SENTEVAL` names their folder; else on two small files of the same form,
# which say nothing but that everything runs. MTEB's on a task of its own, where it is installed.

# %%
from dipole.text import senteval

GOOD = ["a fine film", "fine and funny", "what a great story", "great fun", "a story to love", "funny and great"]
BAD = ["a dull film", "dull and slow", "what a poor story", "poor and slow", "a story to forget", "slow and dull"]
data = os.environ.get("SENTEVAL")
if data is None:
    (folder / "downstream" / "CR").mkdir(parents=True)
    for name, lines in (("pos", GOOD), ("neg", BAD)):
        (folder / "downstream" / "CR" / f"custrev.{name}").write_text("\n".join(lines * 10) + "\n", encoding="latin-1")


def encode(texts: list[str]):
    return model.encode(texts, show_progress_bar=False)


def numbers() -> dict[str, float]:
    tasks = ["CR"] if data is None else ["MR", "CR", "SUBJ", "MPQA", "TREC", "MRPC"]
    found = senteval.evaluate(
        encode, tasks, data or folder, check=data is not None, kfold=5 if SMALL else 10, progress=False
    )
    return {name: result["acc"] for name, result in found.items()}


before = numbers()
print("before", before)

# %% [markdown]
# ## Fine-tuning
#
# The one line is the loss. `CachedContrastiveLoss` holds the activations of `mini_batch_size` sentences at a time,
# while the objective sees the whole batch.

# %%
loss = dipole.text.CachedContrastiveLoss(model, "infonce(temperature=0.05) + 0.1*dp", mini_batch_size=32)
arguments = SentenceTransformerTrainingArguments(
    output_dir=str(folder / "out"),
    per_device_train_batch_size=64,
    max_steps=5 if SMALL else 300,
    learning_rate=1e-3 if SMALL else 2e-5,
    logging_steps=1 if SMALL else 20,
    report_to=[],
    save_strategy="no",
    disable_tqdm=SMALL,
    use_cpu=SMALL,
)
first, second = zip(*pairs, strict=True)
trainer = SentenceTransformerTrainer(
    model, arguments, train_dataset=Dataset.from_dict({"anchor": first, "positive": second}), loss=loss
)
trainer.train()
after = numbers()
print("after", after)

# %%
import matplotlib.pyplot as plt

curve = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
figure, axes = plt.subplots(1, 2, figsize=(8, 3))
axes[0].plot(*zip(*curve, strict=True), marker="o")
axes[0].set_xlabel("step")
axes[0].set_ylabel("loss")
positions = range(len(before))
axes[1].bar([p - 0.2 for p in positions], list(before.values()), 0.4, label="before")
axes[1].bar([p + 0.2 for p in positions], list(after.values()), 0.4, label="after")
axes[1].set_xticks(list(positions), list(before))
axes[1].set_ylabel("SentEval accuracy, %")
axes[1].legend(frameon=False)
plt.show()

# %% [markdown]
# ## MTEB
#
# MTEB takes the model as it is. A list of its tasks downloads their data; the small setting has a task of its own
# without any.

# %%
from importlib.util import find_spec

if find_spec("mteb") is None:
    print("mteb is not installed: pip install mteb")
else:
    import mteb
    from datasets import DatasetDict
    from mteb.abstasks.classification import AbsTaskClassification
    from mteb.abstasks.task_metadata import TaskMetadata

    UNKNOWN = ("reference", "date", "domains", "task_subtypes", "license", "annotations_creators", "dialect")

    class Reviews(AbsTaskClassification):
        """Good or bad, from the sentences above."""

        metadata = TaskMetadata(
            name="SmallReviews",
            description="good or bad",
            dataset={"path": "local/none", "revision": "1"},
            type="Classification",
            category="t2c",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="accuracy",
            **dict.fromkeys((*UNKNOWN, "sample_creation", "bibtex_citation")),
        )
        samples_per_label = 4
        n_experiments = 2

        def load_data(self, **ignored):
            part = Dataset.from_dict({"text": GOOD + BAD, "label": [1] * len(GOOD) + [0] * len(BAD)})
            self.dataset = DatasetDict({"train": part, "test": part})
            self.data_loaded = True

    tasks = [Reviews()] if SMALL else mteb.get_tasks(tasks=["Banking77Classification", "STSBenchmark"])
    for found in mteb.evaluate(model, tasks, cache=None, show_progress_bar=False).task_results:
        print(found.task_name, round(found.scores["test"][0]["main_score"], 3))

# %% [markdown]
# [Trainers](../trainers.md) has hard negatives, several processes and terms with parameters; [text](../text.md) the
# protocols of SentEval and how their numbers compare with published ones.
