# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From a paper's table to a verdict
#
# Table 1 of LMCL prints six accuracies of k-means and says what follows from them. The suite of the same name makes
# the numbers again, sets them beside the printed ones, and tests each claim on them.

# %%
import sys

if "google.colab" in sys.modules:
    import subprocess

    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "dipole[vision,report]"], check=True)

# %% [markdown]
# ## What is printed, and what it is to show

# %%
from dipole.benchmarks.report import published

TABLE = "lmcl-table1"
print(published.table(TABLE).caption)
for claim in published.claims():
    if any(test.get("table") == TABLE for test in claim.tests):
        print(f"{claim.id} ({claim.where}): {claim.statement}")

# %% [markdown]
# ## Running it
#
# The suite has 20 seeds, as the paper; minutes on two cores. The small setting takes two and a tenth of the steps:
# enough to see every part, too few for a verdict, which is what the verdict then says.

# %%
import os
import subprocess
import tempfile
from pathlib import Path

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
runs = Path(tempfile.mkdtemp())
small = ["--seeds", "2", "--jobs", "1", "--threads", "1", "--set", "train.steps=25"]
bench = [sys.executable, "-m", "dipole.core.cli", "bench", TABLE, "--runs", str(runs), *(small if SMALL else [])]
done = subprocess.run(bench, stdout=subprocess.PIPE, text=True, check=True)
print(done.stdout)

# %% [markdown]
# ## Ours beside theirs
#
# A cell is compared only where the protocol is the paper's. LMCL does not say its coordinates, noise and temperature,
# and the suite says that it had to choose them: that stands with every number.

# %%
from dipole.benchmarks.manifest import read_manifests
from dipole.benchmarks.report.results import SuiteResults
from dipole.benchmarks.run_records import read_records

manifests, _ = read_manifests(runs)
results = SuiteResults(manifests[0], read_records(runs).done)
for cell in results.cells:
    ours, printed = cell.summary, cell.printed
    print(
        f"{cell.row.label:18} {cell.column.name:13} printed {printed.mean:5.1f} +- {printed.std:.1f}"
        f"   ours {ours.mean:5.1f} ({ours.low:.1f} to {ours.high:.1f})   {cell.comparison.verdict}"
    )
for note in results.protocol_notes:
    print("differs:", note)

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 3))
for place, cell in enumerate(results.cells):
    values = list(cell.samples.values())
    axes.plot(
        [place] * len(values),
        values,
        "o",
        color="tab:blue",
        alpha=0.6,
        label="ours, a dot a seed" if not place else None,
    )
    axes.errorbar(
        place + 0.2,
        cell.printed.mean,
        cell.printed.std,
        fmt="s",
        color="tab:red",
        label="printed" if not place else None,
    )
axes.set_xticks(range(len(results.cells)), [f"{c.row.label}\n{c.column.name}" for c in results.cells], fontsize=6)
axes.set_ylabel("accuracy of k-means, %")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The verdict
#
# A claim holds, does not hold, or cannot be decided at this number of seeds; then it says how many would decide it.

# %%
for claimed in results.claims():
    print(f"{claimed.ours.claim.id}: {claimed.verdict}\n  {claimed.why}")

# %% [markdown]
# `dipole report runs -o report.html` writes all of it as one page, with every suite of the folder;
# [benchmarks](../benchmarks.md) says how verdicts are reached, [papers](../papers.md) which tables there are.
