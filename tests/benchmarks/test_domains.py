"""Histogram, entropy and rank of image, sentence and agent embeddings: one code, held against plain loops."""

import numpy as np
import pytest
import torch

from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.train.evaluation import diagnose_pairs, evaluate
from dipole.core.train.recipe import load
from dipole.core.train.run import build
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.seeding import Seeds

SMALL = {
    "vision": ("digits-simclr", ["train.batch_size=32", "vision.probe.baselines=false", "vision.probe.probes=['knn']"]),
    "text": ("pydoc-bow", ["train.batch_size=32"]),
    "rl": ("dot", ["train.batch_size=32", "rl.episodes=1", "rl.buffer_size=200", "rl.learning_starts=100"]),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Domain -> what `evaluate` says, the test embeddings, and the batch that the entropy is of."""
    found = {}
    for domain, (recipe, settings) in SMALL.items():
        config = load(recipe, ["objective=infonce", "device=cpu", *settings]).config
        adapter, objective = build(config, RunFolder(tmp_path_factory.mktemp(domain)), torch.device("cpu"), 0, 1)
        if domain == "rl":
            # Uniform actions, no update: replay has something to draw from.
            adapter.agent.learn(60)
        with torch.no_grad():
            (pairs,) = all_gather_pairs(adapter.embed(next(iter(adapter.batches(0))))).local_pairs
        seeds = Seeds(config.seed)
        evaluated = evaluate(adapter, objective, seeds, diagnose_pairs((pairs,), objective))
        adapter.module.eval()
        found[domain] = evaluated, adapter.features("test")[0].detach().float().numpy(), pairs
    return found


@pytest.mark.parametrize("domain", SMALL)
def test_histogram_rank_and_entropy_are_those_of_plain_loops(measured, domain):
    evaluated, x, pairs = measured[domain]
    assert 2 < len(x) <= 2000
    unit = x.astype(np.float64) / np.linalg.norm(x, axis=1, keepdims=True)
    distance = ((1 - unit @ unit.T) / 2)[np.triu_indices(len(x), 1)].clip(0, 1)
    wanted = np.histogram(distance, evaluated.histogram.edges)[0]
    # Rounding moves a pair over the edge of a bin now and then.
    assert np.abs(np.array(evaluated.histogram.all) - wanted).sum() <= 0.01 * len(distance)
    assert sum(evaluated.histogram.all) == len(distance)
    assert evaluated.diagnostics["mean_distance"] == pytest.approx(distance.mean(), abs=1e-4)
    assert evaluated.diagnostics["rank"] == pytest.approx(np.linalg.matrix_rank(x), abs=1)
    anchors, candidates = (t.detach().double().numpy() for t in (pairs.anchors, pairs.candidates))
    similarity = np.array([[a @ c / np.linalg.norm(a) / np.linalg.norm(c) for c in candidates] for a in anchors])
    entropies, most = [], []
    for index, row in enumerate(similarity):
        out = {int(j) for j in (*pairs.positives[index], *pairs.ignored[index]) if j >= 0}
        weights = np.exp([4 * s for j, s in enumerate(row) if j not in out])
        weights /= weights.sum()
        entropies.append(-(weights * np.log(weights)).sum())
        most.append(np.log(len(weights)))
    assert evaluated.diagnostics["conditional_entropy"] == pytest.approx(np.mean(entropies), abs=1e-4)
    assert evaluated.diagnostics["conditional_entropy_maximum"] == pytest.approx(np.mean(most), abs=1e-6)


def test_distances_of_neighbouring_sentences_stand_beside_those_of_all_others(measured):
    histogram = measured["text"][0].histogram
    assert 0 < sum(histogram.correct) < sum(histogram.incorrect)
    assert 0 <= measured["text"][0].results["pair_error"] <= 0.5
    assert measured["vision"][0].histogram.correct is None


def test_every_domain_has_the_same_diagnostics_on_the_same_scale(measured):
    errors = {"similarity_error", "class_collision", "intraclass_deviation"}
    of_classes = {*errors, "unsupervised_loss", "mean_classifier_loss"}
    names = [set(evaluated.diagnostics) for evaluated, *_ in measured.values()]
    assert of_classes <= names[0] & names[1]  # agents have no labels
    names = [each - of_classes for each in names]
    assert names[0] == names[1] == names[2]
    edges = [evaluated.histogram.edges for evaluated, *_ in measured.values()]
    assert edges[0] == edges[1] == edges[2]
