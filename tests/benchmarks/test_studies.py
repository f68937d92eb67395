"""Studies that are suite files: their runs can be built, and the case of CLLR on digits (`-m slow`)."""

from pathlib import Path

import pytest

from dipole import benchmarks
from dipole.benchmarks.suite import read_suite
from dipole.core.train.run import train

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
    width = reduced.config["vision"]["encoder"]["dim"]
    assert reduced.diagnostics["cllr.effective_rank"] < width / 2
    assert reduced.diagnostics["cllr.data_effective_rank"] < width / 2
    assert reduced.diagnostics["cllr.rank"] < width / 2
    assert reduced.results["linear/accuracy"] > alone.results["linear/accuracy"] - 0.02
    assert reduced.notes == []
    assert paper.diagnostics["cllr.rank"] == 0
    assert [note.partition("(")[0].strip() for note in paper.notes] == ["cllr: L has vanished"]
