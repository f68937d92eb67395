"""Studies: their runs can be built, their committed numbers say what the pages say, and domains are measured alike."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from scipy import stats

from dipole import Pairs, benchmarks, objective
from dipole.benchmarks.studies import learning_everywhere
from dipole.benchmarks.studies import polarization as study
from dipole.benchmarks.studies.learning_everywhere import LAYOUTS, StudyTrial
from dipole.benchmarks.suite import read_suite
from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.train.evaluation import diagnose_pairs, evaluate_model
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import build, train
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.seeding import Seeds

STUDIES = Path(benchmarks.__file__).parent / "studies"


@pytest.mark.parametrize(
    ("name", "count"), [("cllr-digits", 25), ("cllr-cifar10", 3), ("cllr-sentences", 8), ("cartpole-balance", 3)]
)
def test_every_row_is_a_run_of_its_own(name, count):
    sized = read_suite(STUDIES / f"{name}.toml").at("small", seeds=1)
    assert len(sized.rows) == len(sized.jobs()) == count


@pytest.mark.slow
def test_the_dimension_falls_below_half_and_the_accuracy_stays(tmp_path):
    """On digits: effective rank of L and of L Phi below half the width, linear probe within two points."""
    wanted = ("cosine", "cosine, norm=nuclear, features=unit, alpha=0.1", "cosine, norm=l21")
    jobs = read_suite(STUDIES / "cllr-digits.toml").at("small", seeds=1).jobs()
    records = {job.cells[0].row: train(job.config, tmp_path, quiet=True) for job in jobs if job.cells[0].row in wanted}
    alone, reduced, paper = (records[label] for label in wanted)
    ranks = [reduced.diagnostics[f"cllr.{name}"] for name in ("effective_rank", "data_effective_rank", "rank")]
    assert max(ranks) < reduced.config["vision"]["encoder"]["dim"] / 2
    assert reduced.results["linear/accuracy"] > alone.results["linear/accuracy"] - 0.02
    assert reduced.notes == []
    assert paper.diagnostics["cllr.rank"] == 0
    assert [note.partition("(")[0].strip() for note in paper.notes] == ["cllr: L has vanished"]


KEPT = Path(learning_everywhere.__file__).parents[1] / "results" / "learning-everywhere.json"
CELLS = list(product(LAYOUTS, learning_everywhere.OBJECTIVES))
QUICK = [("window", "align_uniform")]  # it used to end at two opposite points
SEPARATE = {*QUICK, *((layout, name) for layout, each in LAYOUTS.items() for name in each.unlearnt)}


@pytest.mark.parametrize(
    ("layout", "name"),
    [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS if cell not in SEPARATE)],
)
def test_every_objective_learns_in_every_layout_or_is_refused(tmp_path, layout, name):
    trial = learning_everywhere.StudyTrial(layout, 0, tmp_path)
    if name in LAYOUTS[layout].refused:
        with pytest.raises(DipoleError, match=LAYOUTS[layout].refused[name]):
            trial.train(learning_everywhere.text_of(layout, name))
    else:
        before, after = trial.train(learning_everywhere.text_of(layout, name))
        assert after > before


KEPT_CELLS = [(layout, name) for layout, cells in json.loads(KEPT.read_text()).items() for name in cells]


@pytest.mark.parametrize(("layout", "name"), KEPT_CELLS)
def test_the_kept_numbers_are_above_the_untrained_encoder(layout, name):
    for value in json.loads(KEPT.read_text())[layout][name].values():
        if name in LAYOUTS[layout].refused:
            assert LAYOUTS[layout].refused[name] in value
        else:
            before, after = value
            assert after > before


def test_what_is_refused_is_named_once():
    for layout in LAYOUTS.values():
        assert layout.refused.keys() <= learning_everywhere.OBJECTIVES.keys()
        assert layout.otherwise.keys() <= learning_everywhere.OBJECTIVES.keys() - layout.refused.keys()


POLARIZATION_KEPT, MADE = study.kept(Path(study.__file__).parents[1] / "results" / "polarization.json")


def test_pull_is_a_ratio_and_every_setting_has_five_seeds(tmp_path):
    trial, found = StudyTrial(replace(LAYOUTS["simclr"], steps=2, batch_size=16), 0, tmp_path), {}
    for name, setting in {
        "sum": study.DpSetting(), "mean": study.DpSetting(reduction="mean"), "ten times": study.DpSetting(weight=1.0)
    }.items():  # fmt: skip
        found[name] = study.measure(trial, setting)["first pull"]
    assert found["ten times"] == pytest.approx(10 * found["sum"], rel=1e-3)
    # Of 32 embeddings each meets the 30 that are neither itself nor its other view.
    assert found["sum"] == pytest.approx(30 * found["mean"], rel=1e-3)
    assert set(POLARIZATION_KEPT) == set(study.DOMAINS)
    for domain, cells in POLARIZATION_KEPT.items():
        for setting in study.settings():
            assert len(cells[setting.key]) >= 5, (domain, setting.key)


def test_pull_against_differences():
    """The gradients along one angle by central differences in float64."""
    points = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
    others = points.flip(1) + 0.3

    def pairs(angle):
        c, s = torch.cos(angle), torch.sin(angle)
        turned = [c * points[:, 0] - s * points[:, 1], s * points[:, 0] + c * points[:, 1], points[:, 2]]
        return Pairs.cross(torch.stack(turned, 1), others)

    setting, step = study.DpSetting(), 1e-6
    slopes = []
    for text in ("infonce", setting.term):
        angles = torch.tensor([0.4 + step, 0.4 - step], dtype=torch.float64)
        high, low = (float(objective(text)(pairs(angle)).loss) for angle in angles)
        slopes.append(abs(high - low) / (2 * step))
    angle = torch.nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
    pull = study.Pull(setting, 1)
    pull(0, pairs(angle), [angle])
    assert slopes[1] > 0
    assert pull.found == [pytest.approx(slopes[1] / slopes[0], rel=1e-4)]


def test_each_setting_is_compared_with_infonce_of_its_seeds_and_batch():
    for domain in POLARIZATION_KEPT:
        found = study.tests(POLARIZATION_KEPT, domain)
        for setting, test, _ in found.values():
            base, ours = (study.trained(POLARIZATION_KEPT, domain, s) for s in (setting.base, setting))
            if len({round(ours[seed] - base[seed], 9) for seed in ours}) == 1:
                continue  # the same for every seed: no pairs to test
            assert setting.base.batch == setting.batch
            expected = stats.ttest_rel([ours[seed] for seed in sorted(ours)], [base[seed] for seed in sorted(ours)])
            assert test.p_t == pytest.approx(expected.pvalue, rel=1e-6), (domain, setting)
        by_p = sorted((test.p_t, p) for _, test, p in found.values())
        assert by_p[0][1] == pytest.approx(min(1, by_p[0][0] * len(by_p)))


def first_pull(domain, **setting):
    return fmean(cell["first pull"] for cell in POLARIZATION_KEPT[domain][study.DpSetting(**setting).key].values())


def test_what_the_page_says_stands_in_the_numbers():
    sure = {
        d: {k: test.difference for k, (_, test, p) in study.tests(POLARIZATION_KEPT, d).items() if p < 0.05}
        for d in POLARIZATION_KEPT
    }
    assert all(difference < 0 for found in sure.values() for difference in found.values())
    assert study.DpSetting(weight=0.3).key in sure["text"]
    for domain in ("cifar10", "vision"):
        assert study.DpSetting(batch=256).key in sure[domain]
        assert study.DpSetting(weight=0.3).key in sure[domain]
    for domain in POLARIZATION_KEPT:  # the pull grows with the batch, that of a mean does not
        assert first_pull(domain, batch=256) > 15 * first_pull(domain, batch=16)
        assert first_pull(domain, batch=256, reduction="mean") < 4 * first_pull(domain, batch=16, reduction="mean")


@pytest.mark.slow
def test_polarization_of_the_paper_s_weight_trains_like_infonce(tmp_path):
    """Three epochs of digits: over three seeds within 3 points of k-means accuracy and 0.02 of mean distance."""
    means = {}
    for text in ("infonce", "infonce + 0.1*dp"):
        runs = (load_recipe("digits-simclr", ["train.epochs=3", f"objective={text}", f"seed={s}"]) for s in range(3))
        records = [train(run.config, tmp_path) for run in runs]
        accuracy = fmean(record.results["kmeans/accuracy"] for record in records)
        means[text] = accuracy, fmean(record.diagnostics["mean_distance"] for record in records)
    (base, distance), (ours, own) = means.values()
    assert ours == pytest.approx(base, abs=0.03)
    assert own == pytest.approx(distance, abs=0.02)


SMALL = {
    "vision": ("digits-simclr", ["train.batch_size=32", "vision.probe.baselines=false", "vision.probe.probes=['knn']"]),
    "text": ("pydoc-bow", ["train.batch_size=32"]),
    "rl": ("dot", ["train.batch_size=32", "rl.episodes=1", "rl.buffer_size=200", "rl.learning_starts=100"]),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Domain -> what `evaluate_model` says, the test embeddings, and the batch that the entropy is of."""
    found = {}
    for domain, (recipe, settings) in SMALL.items():
        config = load_recipe(recipe, ["objective=infonce", "device=cpu", *settings]).config
        adapter, objective = build(config, RunFolder(tmp_path_factory.mktemp(domain)), torch.device("cpu"), 0, 1)
        if domain == "rl":
            # Uniform actions, no update: replay has something to draw from.
            adapter.agent.learn(60)
        with torch.no_grad():
            (pairs,) = all_gather_pairs(adapter.embed(next(iter(adapter.batches(0))))).local_pairs
        seeds = Seeds(config.seed)
        evaluated = evaluate_model(adapter, objective, seeds, diagnose_pairs((pairs,), objective))
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


def test_every_domain_has_the_same_diagnostics_on_the_same_scale(measured):
    errors = {"similarity_error", "class_collision", "intraclass_deviation"}
    of_classes = {*errors, "unsupervised_loss", "mean_classifier_loss"}
    names = [set(evaluated.diagnostics) for evaluated, *_ in measured.values()]
    assert of_classes <= names[0] & names[1]  # agents have no labels
    names = [each - of_classes for each in names]
    edges = [evaluated.histogram.edges for evaluated, *_ in measured.values()]
    for found in (names, edges):
        assert found[0] == found[1] == found[2]
    # Distances of neighbouring sentences stand beside those of all others.
    text = measured["text"][0]
    assert 0 < sum(text.histogram.correct) < sum(text.histogram.incorrect)
    assert 0 <= text.results["pair_error"] <= 0.5
    assert measured["vision"][0].histogram.correct is None
