"""Runs folders made by hand: records, learning curves and suite descriptions, as `dipole bench` leaves them."""

import json
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dipole.benchmarks.claims import published
from dipole.benchmarks.manifest import CellEntry, ColumnEntry, JobEntry, Manifest, RowEntry, write_manifest
from dipole.benchmarks.run.engine import Engine, run_here
from dipole.benchmarks.suite_results import SuiteResults, gather
from dipole.core.record import Hardware, Histogram, RunRecord, write_record
from dipole.core.train.config import toml_text


class Here(Engine):
    """Runs jobs in this process, which has imported what they need."""

    def __init__(self):
        super().__init__(1)

    def attempt(self, task, runs):
        return run_here(task, runs)

    def prepare(self, tasks, runs):
        pass

    def stop(self):
        pass


HARDWARE = Hardware(device="cpu", device_name="Test processor", machine="Linux x86_64", processors=2, threads=1)


def suite_text(rows, columns=(("knn", "knn/accuracy"),), recipe="digits-simclr", seeds=(0,), set=(), **more):
    """Return the TOML of a suite: rows (method, objective, settings) and columns (name, metric) at scale `small`."""
    named = [{"method": method, "objective": objective, "set": list(own)} for method, objective, *own in rows]
    scale = {"recipe": recipe, "seeds": list(seeds), "set": list(set)}
    of = [{"name": label, "metric": metric} for label, metric in columns]
    base = {"base": rows[0][0]} if len(rows) > 1 else {}
    table = {"name": "tiny", "title": "tiny", **base, "columns": of, "rows": named}
    return toml_text({**table, "scale": {"small": scale | more}})


OF_EVERY_RUN = {
    "name": "hand-made", "started": "2026-01-01T00:00:00Z", "updated": "2026-01-01T00:01:00Z", "hardware": HARDWARE,
    "versions": {"dipole": "0.1.0"}, "data": {"name": "none"}, "parameters": 10, "steps": 100,
    "peak_memory_bytes": 300 * 2**20, "diagnostics": {"mean_distance": 0.48, "rank": 30.0, "conditional_entropy": 4.9},
}  # fmt: skip


def counted(edges, **values):
    return Histogram(edges=edges.tolist(), **{name: np.histogram(v, edges)[0].tolist() for name, v in values.items()})


class RunsFolder:
    """A runs folder and the ways to fill it."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0

    def record(self, objective="infonce", seed=0, domain="vision", results=None, status="done", **more):
        """Write one run and return its hash."""
        self.count += 1
        name = f"{self.count:012x}"
        generator = np.random.default_rng(self.count)
        folder = self.path / name
        folder.mkdir(parents=True)
        same, different = generator.beta(2, 7, 500), generator.beta(6, 6, 3000)
        every = np.concatenate([same, different])
        run = {"domain": domain, "objective": objective, "seed": seed}
        values = {**OF_EVERY_RUN, **run, "hash": name, "status": status, "wall_seconds": 60.0 + seed}
        values |= {"config": run | {"train": {"epochs": 5, "batch_size": 8}}, "seeds": {"root": seed}}
        values |= {"results": results or {"linear/accuracy": 0.9}}
        values |= {"histogram": counted(np.linspace(0, 1, 41), all=every, same=same, different=different), **more}
        write_record(folder / "record.json", RunRecord(**values))
        metric, final = next(iter(values["results"].items()))
        with (folder / "metrics.jsonl").open("w") as lines:
            for step in range(10, 101, 10):
                line = {"step": step, "train/loss": float(5 * np.exp(-step / 40) + generator.normal(0, 0.05))}
                if step % 20 == 0:
                    line[f"eval/{metric}"] = float(final * (1 - 0.5 * np.exp(-step / 30)))
                    line["diag/conditional_entropy"] = 5.2 - float(np.exp(-step / 50))
                    line["diag/conditional_entropy_maximum"] = 5.25
                lines.write(json.dumps(line) + "\n")
        return name

    def suite(self, name, rows, columns, values, seeds=(0, 1, 2), **more):
        """Write a suite of rows (label, objective, base) and columns (name, domain): one run per cell and seed."""
        jobs = []
        for (label, objective, _), (column, domain), seed in product(rows, columns, seeds):
            value = values(label, column, seed)
            if value is None:
                continue
            run = self.record(objective, seed, domain, {"linear/accuracy": value})
            command = ["train", "recipe", "--set", f"objective={objective}", "--set", f"seed={seed}"]
            cell = CellEntry(row=label, column=column, seed=seed)
            jobs.append(JobEntry(hash=run, command=command, processes=1, cells=[cell]))
        of_column = {"metric": "linear/accuracy", "factor": 100, "higher_is_better": True, "unit": "%"}
        said = {"title": name, "kind": "table", "published": None, "protocol": {}, "x_label": "", "y_label": ""}
        said["show"] = ["curves", "histogram", "columns"]
        manifest = Manifest(
            suite=name, scale="small",
            rows=[RowEntry(label=label, objective=objective, base=base) for label, objective, base in rows],
            columns=[ColumnEntry(name=column, **of_column) for column, _ in columns],
            jobs=jobs, **{"note": "", "not_decidable": "", **said, **more},
        )  # fmt: skip
        write_manifest(self.path, manifest)
        return manifest

    def results(self, name, rows, columns, values, seeds=(0, 1, 2), **more):
        """Write a suite. Return what a report makes of it."""
        columns = [column if isinstance(column, tuple) else (column, "vision") for column in columns]
        return self.read(self.suite(name, rows, columns, values, seeds, **more))

    def table4(self, value, columns=None, **more):
        """Write LMCL Table 4 with its printed rows and its first columns."""
        printed = published.tables()["lmcl-table4"].rows
        rows = [(row.label, "infonce", printed[0].label if row is not printed[0] else None) for row in printed]
        measured = [(column, "text") for column in list(printed[0].cells)[:columns]]
        return self.suite("lmcl-table4", rows, measured, value, published="lmcl-table4", **more)

    def read(self, manifest):
        """Return what a report makes of the records of a suite."""
        return SuiteResults(manifest, gather([self.path]).records)


@pytest.fixture
def runs_folder(tmp_path):
    return RunsFolder(tmp_path / "runs")


def wait_for(condition, what, seconds=300):
    """Return what a condition gives once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)
    return found


def written(folder, text, name="mine"):
    """Write a suite. Return its path."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


JOB = {"hash": "x", "command": [], "processes": 1, "cells": []}


def damaged(folder, path, content=None, **values):
    """Change a file of a runs folder: all of it, or some of its values."""
    (found,) = folder.path.glob(path)
    found.write_text(content if content is not None else json.dumps({**json.loads(found.read_text()), **values}))
