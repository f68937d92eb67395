"""Energy counters: packages only, differences only, added up over sessions."""

import json

import pytest

from dipole.benchmarks.run import energy


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """A tree as Linux shows it, and the way to advance it."""

    def set_counters(**microjoules):
        for name, value in microjoules.items():
            zone = tmp_path / "powercap" / name.replace("_", ":").replace("rapl", "intel-rapl")
            zone.mkdir(parents=True, exist_ok=True)
            (zone / "energy_uj").write_text(f"{value}\n")

    monkeypatch.setattr(energy, "RAPL", tmp_path / "powercap")
    monkeypatch.setattr(energy, "_nvml", dict)
    return set_counters


def test_packages_are_counted_once_and_written_beside_the_run(counters, tmp_path):
    counters(rapl_0=1_000_000, rapl_0_0=900_000, rapl_1=5_000_000)
    meter = energy.Meter()
    counters(rapl_0=4_500_000, rapl_0_0=9_000_000, rapl_1=5_500_000)
    meter.write(tmp_path)
    assert energy.read(tmp_path) == pytest.approx({"cpu:0": 3.5, "cpu:1": 0.5})
    # A resumed run adds its share.
    energy.Meter().write(tmp_path)
    assert sum(energy.read(tmp_path).values()) == pytest.approx(4.0)


def test_a_counter_that_wrapped_around_is_left_out(counters, tmp_path):
    counters(rapl_0=9_000_000, rapl_1=0)
    meter = energy.Meter()
    counters(rapl_0=10, rapl_1=2_000_000)
    assert meter.joules() == pytest.approx({"cpu:1": 2.0})


def test_no_counters_no_file(counters, tmp_path):
    energy.Meter().write(tmp_path)
    assert energy.read(tmp_path) == {}
    assert not (tmp_path / energy.COST).exists()


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"whole_device_joules": 3})])
def test_a_damaged_file_counts_as_none(tmp_path, text):
    (tmp_path / energy.COST).write_text(text)
    assert energy.read(tmp_path) == {}
