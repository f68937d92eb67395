"""Numbers on rendered pages are those of the committed results."""

import json
import re
from pathlib import Path
from statistics import median

import pytest
import render
from scipy import stats

from dipole.benchmarks.statistics import power

KEPT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "suites"


def test_committed_pages_match_their_templates():
    assert render.main(["--check"]) == 0
    text = "a {{ cross-domain:\n decided }} b {not} c"
    assert render.filled(text) == "a 2 of 36 b {not} c"
    assert render.filled("{{ table: agents }}").startswith("| objective beside SAC")
    with pytest.raises(KeyError):
        render.filled("{{ table: nowhere }}")
    assert (render._p(0.0505), render._p(0.0474), render._p(0.0023)) == ("0.0505", "0.0474", "0.0023")


def test_check_names_the_page_that_differs(tmp_path, monkeypatch, capsys):
    templates = tmp_path / "docs" / "templates"
    templates.mkdir(parents=True)
    (templates / "page.md").write_text("{{ cross-domain: decided }} comparisons")
    (tmp_path / "README.md").write_text("# Title\n<!-- install: all -->\nearlier lines\n<!-- installed -->\nrest")
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "TEMPLATES", templates)
    assert render.main(["--check"]) == 1
    assert "docs/page.md, README.md: differ" in capsys.readouterr().out
    assert render.main([]) == 0
    assert (tmp_path / "docs" / "page.md").read_text() == "2 of 36 comparisons"
    readme = (tmp_path / "README.md").read_text()
    assert '\npip install ".[all]"\n```\n<!-- installed -->\nrest' in readme
    assert "earlier lines" not in readme
    assert render.main(["--check"]) == 0


def values(suite: str, row: int, column: int, metric: str, factor: float = 100) -> dict[int, float]:
    """By seed, out of the file's own lines."""
    lines = map(json.loads, (KEPT / f"{suite}-small.jsonl").read_text().splitlines())
    found = {}
    for line in lines:
        for r, c, seed in line.get("cells", ()):
            if (r, c) == (row, column):
                found[seed] = factor * line["record"]["results"][metric]
    return found


def test_a_difference_is_a_paired_t_test():
    base, cacr = (values("cifar10-learning", row, 2, "knn/accuracy") for row in (0, 4))
    test = stats.ttest_rel([cacr[s] for s in range(3)], [base[s] for s in range(3)])
    low, high = test.confidence_interval(0.95)
    text = render.value_of("cifar10-learning: cacr, K = 4 - infonce @ kNN")
    value, *interval, p = map(float, re.findall(r"-?\d+(?:\.\d+)?(?:e-\d+)?", text))
    assert value == pytest.approx(sum(cacr[s] - base[s] for s in range(3)) / 3, abs=0.051)
    assert interval == [pytest.approx(low, abs=0.051), pytest.approx(high, abs=0.051)]
    assert p == pytest.approx(test.pvalue, rel=0.06)
    assert render.value_of("cifar10-learning: cacr, K = 4 @ kNN").startswith(text.partition(",")[0])
    assert float(render.value_of("cifar10-learning: mean cacr, K = 4 @ kNN")) == pytest.approx(
        sum(cacr.values()) / 3, abs=0.01
    )


def test_the_gain_of_polarization_is_a_paired_t_test():
    found = json.loads((KEPT.parent / "polarization.json").read_text())["text"]
    key = "+ 0.3*dp(delta_pos=0.1, delta_neg=0.5, reduction=anchor_sum)"
    seeds = sorted(found[key])
    pairs = [[found[name][seed]["trained"] for seed in seeds] for name in (key, "infonce")]
    low, high = stats.ttest_rel(*pairs).confidence_interval(0.95)
    text = render.value_of(f"polarization text: {key}")
    assert [float(x) for x in re.findall(r"-?\d\.\d+", text)[1:3]] == [pytest.approx(x, abs=1e-3) for x in (low, high)]


@pytest.mark.parametrize(
    "of",
    [
        "nowhere: decided",
        "cross-domain: x @ y",
        "cross-domain: claim z",
        "cross-domain: a - b @ c",
        "cross-domain: detectable x",
    ],
)
def test_what_there_is_not_is_no_number(of):
    with pytest.raises((LookupError, StopIteration)):
        render.value_of(of)


def test_the_detectable_difference_has_the_unit_of_its_column():
    suite = render._suite("cross-domain")
    (cell,) = [each for each in suite.cells_of("dot: return") if each.row.label == "dcl"]
    test = cell.against_base
    assert test is not None
    assert power(cell.detectable, test.spread, test.n, 0.05 / cell.family, test.method != "Welch") == pytest.approx(0.8)
    rows = [each.detectable for each in suite.cells_of("dot: return") if each.against_base is not None]
    least = float(render.value_of("cross-domain: detectable dot: return").removesuffix(" return"))
    assert least == pytest.approx(median(rows), abs=0.005)


@pytest.mark.parametrize("what", ["decided", "p", "gain infonce", "infonce @ Easy", "infonce - none @ Easy", "claim x"])
def test_no_page_counts_a_suite_that_cannot_decide_anything(what):
    with pytest.raises(LookupError, match=r"cannot decide anything.*8,000 environment steps"):
        render.value_of(f"six-tasks: {what}")
    assert float(render.value_of("six-tasks: mean none @ Spin")) < 1
