"""The CLLR study: its table against numbers computed by hand, and a short run (`-m slow`)."""

from pathlib import Path

import pytest

from dipole.benchmarks.studies import cllr
from dipole.core.train.recipe import read_recipe, resolve
from dipole.core.train.run import train


def test_every_run_of_the_study_is_a_configuration(tmp_path: Path) -> None:
    place = cllr.data_sets(None, tmp_path)["digits"]
    hashes = {
        resolve(read_recipe(place.recipe), [*place.set, *case.set, f"objective={case.objective}"]).config.hash
        for case in place.cases
    }
    assert len(hashes) == len(place.cases)


def test_the_table_holds_means_and_the_bound_on_the_directions() -> None:
    alone, reduced = cllr.Case("cosine"), cllr.Case("cosine", cllr.unit(0.1))
    place = cllr.DataSet("digits-simclr", "linear/accuracy", (), (alone, reduced))
    numbers = {"energy": 1.0, "effective_rank": 7.5, "spectral": 0.9, "error": 0.2, "all_effective_rank": 7.0}
    results = {
        f"digits/{alone.name}/0": {"accuracy": 97.0, "all_effective_rank": 16.0},
        f"digits/{reduced.name}/0": {"accuracy": 96.0, "rank": 8.0} | numbers,
        f"digits/{reduced.name}/1": {"accuracy": 98.0, "rank": 10.0} | numbers,
    }
    *_, first, second = cllr.table(results, "digits", place).splitlines()
    assert first == "| cosine | none |  |  |  |  |  |  | 16.0 | 97.0 |"
    # energy / (3 sqrt(3) / 8 alpha) = 15.4; t(0.975, 1) = 12.706, the standard deviation of 96, 98 is sqrt(2).
    assert second.startswith(
        "| cosine | norm=nuclear, features=unit, alpha=0.1 | 1 | 15.4 | 9 | 7.5 | 0.90 | 0.20 | 7.0 |"
    )
    assert second.endswith("| 97.0 +- 12.7 |")


@pytest.mark.slow
def test_the_dimension_falls_below_half_and_the_accuracy_stays(tmp_path: Path) -> None:
    """On digits: effective rank of L and of L Phi below half the width, linear probe within two points."""
    place = cllr.data_sets(None, tmp_path)["digits"]
    records = {}
    for case in (cllr.Case("cosine"), cllr.Case("cosine", cllr.unit(0.1)), cllr.Case("cosine", cllr.PAPER[0])):
        settings = [*place.set, f"objective={case.objective}", "device=cpu"]
        records[case] = train(resolve(read_recipe(place.recipe), settings).config, tmp_path, quiet=True)
    alone, reduced, paper = records.values()
    width = reduced.config["vision"]["encoder"]["dim"]
    assert reduced.diagnostics["cllr.effective_rank"] < width / 2
    assert reduced.diagnostics["cllr.data_effective_rank"] < width / 2
    assert reduced.diagnostics["cllr.rank"] < width / 2
    assert reduced.results["linear/accuracy"] > alone.results["linear/accuracy"] - 0.02
    assert reduced.notes == []
    assert paper.diagnostics["cllr.rank"] == 0
    assert [note.partition("(")[0].strip() for note in paper.notes] == ["cllr: L has vanished"]
