"""Numbers of pages are those of the records."""

import json
import re
from pathlib import Path

import pytest
import told
from scipy import stats

KEPT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "suites"


@pytest.mark.parametrize("page", told.PAGES, ids=lambda page: page.name)
def test_a_page_says_what_the_records_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert told.filled(text) == text, "run python docs/generate/told.py"


@pytest.mark.parametrize("page", told.PAGES, ids=lambda page: page.name)
def test_no_mark_breaks_a_sentence(page: Path) -> None:
    """A line that begins with a comment is a block of HTML, which ends the paragraph before it."""
    blocks = re.findall(r"^ *<!-- [^>]+? -->(?=\S).*", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert not blocks


def values(suite: str, row: int, column: int, metric: str, factor: float = 100) -> dict[int, float]:
    """By seed, out of the file's own lines."""
    lines = map(json.loads, (KEPT / f"{suite}-small.jsonl").read_text().splitlines())
    found = {}
    for line in lines:
        for r, c, seed in line.get("cells", ()):
            if (r, c) == (row, column):
                found[seed] = factor * line["record"]["results"][metric]
    return found


def test_a_difference_is_a_paired_t_test() -> None:
    base, cacr = (values("cifar10-learning", row, 2, "knn/accuracy") for row in (0, 4))
    test = stats.ttest_rel([cacr[s] for s in range(3)], [base[s] for s in range(3)])
    low, high = test.confidence_interval(0.95)
    said = told.said("cifar10-learning: cacr, K = 4 - infonce @ kNN")
    value, *interval, p = map(float, re.findall(r"-?\d+(?:\.\d+)?(?:e-\d+)?", said))
    assert value == pytest.approx(sum(cacr[s] - base[s] for s in range(3)) / 3, abs=0.051)
    assert interval == [pytest.approx(low, abs=0.051), pytest.approx(high, abs=0.051)]
    assert p == pytest.approx(test.pvalue, rel=0.06)
    assert told.said("cifar10-learning: cacr, K = 4 @ kNN").startswith(said.partition(",")[0])
    assert float(told.said("cifar10-learning: mean cacr, K = 4 @ kNN")) == pytest.approx(
        sum(cacr.values()) / 3, abs=0.01
    )


def test_the_gain_of_polarization_is_a_paired_t_test() -> None:
    found = json.loads((KEPT.parent / "polarization.json").read_text())["text"]
    key = "+ 0.3*dp(delta_pos=0.1, delta_neg=0.5, reduction=anchor_sum)"
    seeds = sorted(found[key])
    pairs = [[found[name][seed]["trained"] for seed in seeds] for name in (key, "infonce")]
    low, high = stats.ttest_rel(*pairs).confidence_interval(0.95)
    said = told.said(f"polarization text: {key}")
    assert [float(x) for x in re.findall(r"-?\d\.\d+", said)[1:3]] == [pytest.approx(x, abs=1e-3) for x in (low, high)]


@pytest.mark.parametrize(
    "of", ["nowhere: decided", "cross-domain: x @ y", "cross-domain: claim z", "cross-domain: a - b @ c"]
)
def test_what_there_is_not_is_no_number(of: str) -> None:
    with pytest.raises((LookupError, StopIteration)):
        told.said(of)


def test_marks_are_filled_and_the_rest_is_left() -> None:
    text = "a <!-- cross-domain: decided -->7 of 9<!-- --> b <!-- table: everywhere --> c"
    assert told.filled(text) == "a <!-- cross-domain: decided -->2 of 32<!-- --> b <!-- table: everywhere --> c"


def test_p_beside_the_level_says_on_which_side() -> None:
    assert (told._p(0.0505), told._p(0.0474), told._p(0.0023)) == ("0.0505", "0.0474", "0.0023")
