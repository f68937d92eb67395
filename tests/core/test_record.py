"""record.json: validated on reading, old ones stay readable."""

import json
from pathlib import Path

import pytest

from dipole.core.record import finite, read_record
from dipole.core.train.metrics import MetricsFile, read_metrics
from dipole.core.utils.errors import RecordError

# A record as version 1 wrote it; it must stay readable for ever.
FIRST = {
    "schema_version": 1,
    "hash": "0123456789ab",
    "name": "blobs",
    "domain": "blobs",
    "objective": "infonce",
    "seed": 0,
    "status": "done",
    "started": "2026-11-20T19:00:00Z",
    "updated": "2026-11-20T19:01:00Z",
    "config": {"domain": "blobs"},
    "versions": {"dipole": "0.1.0"},
    "hardware": {"device": "cpu", "device_name": "x", "machine": "Linux x86_64", "processors": 2, "threads": 1},
    "seeds": {"root": 0},
    "data": {"name": "blobs"},
    "parameters": 10,
    "results": {"linear/accuracy": 0.5, "knn/accuracy": None},
    "histogram": {"edges": [0.0, 1.0], "all": [3.0]},
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "record.json"
    path.write_text(json.dumps({**FIRST, **changes}))
    return path


def test_first_version_is_read_and_every_problem_named(tmp_path):
    record = read_record(write(tmp_path))
    assert record.results == {"linear/accuracy": 0.5, "knn/accuracy": None}
    assert record.evaluations == []
    with pytest.raises(RecordError) as caught:
        read_record(write(tmp_path, status="finished", seed="x", surprise=1))
    for text in ("status: Input should be 'running'", "seed: ", "surprise: "):
        assert text in str(caught.value)
    assert finite({"a": float("nan"), "b": 1, "c": float("inf")}) == {"a": None, "b": 1.0, "c": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is damaged"),
        (b"\xff", "is damaged"),
        (b"[]", "does not follow schema"),
        (b'{"schema_version": 99}', "Update"),
        (b"", "is damaged"),
        (b"[" * 200_000, "is damaged"),
        (b'{"schema_version": ' + b"1" * 5000 + b"}", "is damaged"),
    ],
)
def test_damaged_or_foreign_files(tmp_path, content, message):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read_record(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_record(tmp_path / "absent.json")


def test_metrics_are_cut_back_and_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write({"step": 1, "train/loss": float("nan")})
    keep = first.position()
    first.write({"step": 2, "train/loss": 1 / 3})
    assert read_metrics(path) == [{"step": 1, "train/loss": None}, {"step": 2, "train/loss": 0.3333333}]
    first.close()
    with open(path, "a") as file:
        file.write('{"step": 3, "tr')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    second = MetricsFile(path, keep)
    second.write({"step": 2, "train/loss": 0.25})
    second.close()
    assert [line["train/loss"] for line in read_metrics(path)] == [None, 0.25]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"results": {"linear/accuracy": float("nan")}}, "results.linear/accuracy"),
        ({"wall_seconds": float("inf")}, "wall_seconds"),
        ({"histogram": {"edges": [0.0, 1.0], "all": [1.0, 2.0]}}, "histogram"),
        ({"histogram": {"edges": [0.0, 0.0], "all": [1.0]}}, "histogram"),
        ({"histogram": {"edges": [], "all": []}}, "histogram"),
        ({"histogram": {"edges": [0.0, 1.0], "all": [1.0], "same": [-1.0]}}, "histogram"),
        ({"name": "\ud800"}, "damaged"),
    ],
)
def test_values_that_no_run_writes_are_refused(tmp_path, changes, where):
    """json.dumps writes NaN, Infinity and half of a surrogate pair; a record never holds one."""
    with pytest.raises(RecordError, match=where):
        read_record(write(tmp_path, **changes))
