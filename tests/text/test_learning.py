"""The learning check on real text: its sums against numbers computed by hand, and a small run of it (`-m slow`)."""

import numpy as np
import pytest

from dipole.benchmarks.studies import learning_text
from dipole.benchmarks.studies.common import half_width
from dipole.text.senteval import SIX_TASKS

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
