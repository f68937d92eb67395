"""Arora's inequalities on sentences, and the study of learning from text."""

import gzip
import json

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import HashingVectorizer
from torch import nn

from dipole.benchmarks.studies import learning_text
from dipole.benchmarks.studies.common import half_width
from dipole.core.evaluation.theory.choices import Choices
from dipole.core.evaluation.theory.report import measure
from dipole.text.senteval import SIX_TASKS

ALWAYS = {"lemma_4_3", "theorem_4_1", "lemma_4_4", "theorem_4_5", "lemma_5_1", "theorem_6_1", "proposition_6_2"}


def embedded(sentences: list[str], width: int, seed: int = 0) -> torch.Tensor:
    """A random network on hashed bags of words."""
    bags = HashingVectorizer(n_features=512, alternate_sign=False).transform(sentences)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, width)).eval()
    with torch.no_grad():
        return 4 * network(torch.from_numpy(bags.toarray()).float())


def assert_all_hold(features: torch.Tensor, labels: torch.Tensor, choices: Choices) -> None:
    found = measure(features, labels, choices)
    assert {each.key for each in found.inequalities} >= ALWAYS
    assert not found.broken, found.broken


def test_made_up_sentences_of_topics_of_unequal_size():
    topics = {"sea": "waves ships salt tide wind", "bread": "flour oven yeast crust salt"}
    topics["chess"] = "king rook pawn wind"
    sentences, labels = [], []
    for place, (topic, words) in enumerate(topics.items()):
        words = words.split()
        for i in range(6 + 5 * place):
            sentences.append(f"the {topic} has {words[i % len(words)]} and {words[(i * 3 + 1) % len(words)]} {i}")
            labels.append(place)
    assert_all_hold(embedded(sentences, 16), torch.tensor(labels), Choices(k=2, block=3, tasks=3, draws=2))


def test_wiki_articles(shared_data):
    """An article is a latent class, and the shares are those of the articles' lengths."""
    sentences, labels = [], []
    with gzip.open(shared_data / "wiki_blocks" / "wikitext2_articles.jsonl.gz", "rt", encoding="utf-8") as lines:
        for place, line in zip(range(20), lines, strict=False):
            taken = json.loads(line)["sentences"][::9]
            sentences += taken
            labels += [place] * len(taken)
    assert len(set(torch.tensor(labels).unique(return_counts=True)[1].tolist())) > 3
    features = embedded(sentences, 32)
    for each in (features, nn.functional.normalize(features, dim=1)):
        assert_all_hold(each, torch.tensor(labels), Choices(k=8, block=5, tasks=2, draws=2, points=160))


RUNS = {
    f"{name}/{seed}": dict.fromkeys(SIX_TASKS, base + seed) | {"TREC": trec}
    for name, base, trec in (("untrained", 60.0, 70.0), ("random words", 62.0, 60.0), ("QT", 65.0, 65.0))
    for seed in range(3)
}


def test_intervals_verdicts_and_random_words():
    assert half_width([65.0, 66.0, 67.0]) == pytest.approx(4.3027 / 3**0.5, abs=1e-4)
    assert half_width([65.0]) == 0
    (line,) = learning_text.verdict(RUNS).splitlines()
    assert line == "QT: 5 of 6 above untrained, 6 of 6 above random words; both: MR, CR, SUBJ, MPQA, MRPC"
    assert "| QT (3) | 66.0 +- 2.5 |" in learning_text.table(RUNS)
    first, again, other = (learning_text.RandomWords(4, seed) for seed in (0, 0, 1))
    assert np.array_equal(first(["A dog .", ""]), again(["a DOG .", "."]))
    assert not np.allclose(first(["a"]), other(["a"]))
    assert first(["a b"])[0] == pytest.approx((first(["a"])[0] + first(["b"])[0]) / 2)


@pytest.mark.slow
def test_quick_thoughts_learns_from_real_text(shared_data, tmp_path):
    """A third of the study's updates is enough for the tasks that profit most."""
    runs = tmp_path / "runs"
    corpus = learning_text.link_corpus(shared_data, "reviews", runs)
    found = {
        name: learning_text.run(name, 0, shared_data / "senteval", corpus, runs, steps=200)
        for name in (*learning_text.BASELINES, "QT", "DCL+CLLR")
    }
    for name in ("QT", "DCL+CLLR"):
        for baseline in learning_text.BASELINES:
            assert found[name]["MR"] > found[baseline]["MR"] + 1
            assert found[name]["SUBJ"] > found[baseline]["SUBJ"] + 5
