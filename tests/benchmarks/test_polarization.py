"""The study of polarization: what it measures, how it judges, and what its page says of its numbers."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from scipy import stats

from dipole import Pairs, objective
from dipole.benchmarks.studies import polarization as study
from dipole.benchmarks.studies.learning_everywhere import LAYOUTS, Trial

KEPT, MADE = study.kept(Path(study.__file__).parents[1] / "results" / "polarization.json")


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    layout = replace(LAYOUTS["simclr"], steps=2, batch_size=16)
    return Trial(layout, 0, tmp_path_factory.mktemp("digits"))


def test_pull_is_a_ratio_and_every_setting_has_five_seeds(trial):
    found = {}
    for name, setting in {
        "sum": study.Setting(), "mean": study.Setting(reduction="mean"), "ten times": study.Setting(weight=1.0)
    }.items():  # fmt: skip
        found[name] = study.measure(trial, setting)["first pull"]
    assert found["ten times"] == pytest.approx(10 * found["sum"], rel=1e-3)
    # Of 32 embeddings each meets the 30 that are neither itself nor its other view.
    assert found["sum"] == pytest.approx(30 * found["mean"], rel=1e-3)
    assert set(KEPT) == set(study.DOMAINS)
    for domain, cells in KEPT.items():
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

    setting, step = study.Setting(), 1e-6
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
    for domain in KEPT:
        found = study.tests(KEPT, domain)
        for setting, test, _ in found.values():
            base, ours = (study.trained(KEPT, domain, s) for s in (setting.base, setting))
            if len({round(ours[seed] - base[seed], 9) for seed in ours}) == 1:
                continue  # the same for every seed: no pairs to test
            assert setting.base.batch == setting.batch
            expected = stats.ttest_rel([ours[seed] for seed in sorted(ours)], [base[seed] for seed in sorted(ours)])
            assert test.p_t == pytest.approx(expected.pvalue, rel=1e-6), (domain, setting)
        by_p = sorted((test.p_t, p) for _, test, p in found.values())
        assert by_p[0][1] == pytest.approx(min(1, by_p[0][0] * len(by_p)))


def test_what_the_page_says_stands_in_the_numbers():
    sure = {d: {k: test.difference for k, (_, test, p) in study.tests(KEPT, d).items() if p < 0.05} for d in KEPT}
    assert all(difference < 0 for found in sure.values() for difference in found.values())
    assert study.Setting(weight=0.3).key in sure["text"]
    for domain in ("cifar10", "vision"):
        assert study.Setting(batch=256).key in sure[domain]
        assert study.Setting(weight=0.3).key in sure[domain]
    for domain in KEPT:  # the pull grows with the batch; of a mean it does not
        pulls = [fmean(c["first pull"] for c in KEPT[domain][study.Setting(batch=b).key].values()) for b in (16, 256)]
        means = study.Setting(reduction="mean", batch=16), study.Setting(reduction="mean", batch=256)
        flat = [fmean(c["first pull"] for c in KEPT[domain][s.key].values()) for s in means]
        assert pulls[1] > 15 * pulls[0]
        assert flat[1] < 4 * flat[0]
