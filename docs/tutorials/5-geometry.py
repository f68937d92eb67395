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
# # Reading the geometry of embeddings
#
# Accuracy of a probe tells little about what an objective did to the embeddings. Distances, directions in use, and
# what lies where tell more. Three objectives on digits, looked at in four ways.

# %%
import sys

if "google.colab" in sys.modules:
    import subprocess

    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "dipole[vision]"], check=True)

# %% [markdown]
# ## Three runs
#
# A finished run has all that is needed to use its model: `load_run` gives the record, the adapter (data and encoder)
# and the objective.

# %%
import os
import tempfile
from pathlib import Path

from dipole.core.train.loop import train
from dipole.core.train.recipe import load
from dipole.core.train.run_folder import find_run
from dipole.core.train.trained_run import load_run

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
OBJECTIVES = ["infonce(temperature=0.5)", "infonce(temperature=0.5) + 1*dp", "vicreg"]
settings = ["vision.probe.baselines=false", *(["train.epochs=2", "train.batch_size=128"] if SMALL else [])]
runs, features = Path(tempfile.mkdtemp()), {}
for text in OBJECTIVES:
    config = load("digits-simclr", [f"objective={text}", *settings]).config
    train(config, runs, quiet=SMALL)
    record, adapter, objective = load_run(find_run(config.hash, runs))
    features[text], labels = adapter.features("test")
    print(f"{text:36} five labels per class: {record.results['few_shot/accuracy']:.3f}")

# %% [markdown]
# ## Distances
#
# D = (1 - cos) / 2 of pairs of one class and of two. Distance polarization (`dp`) empties the interval between its
# ends, 0.1 and 0.5.

# %%
import matplotlib.pyplot as plt
import torch

from dipole.core.measure.diagnostics import distance_histogram

figure, axes = plt.subplots(1, 3, figsize=(11, 2.8), sharex=True)
for axis, (text, z) in zip(axes, features.items(), strict=True):
    found = distance_histogram(z, labels)
    for name, counts in (("same class", found.same), ("different classes", found.different)):
        axis.stairs(counts / counts.sum(), found.edges, label=name)
    axis.set_title(text, fontsize=9)
    axis.set_xlabel("distance")
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# ## Numbers
#
# Uniformity (lower is more spread), the number of directions in use, and the share of pairs inside `dp`'s margin.

# %%
from dipole.core.contrast.spectrum import effective_rank
from dipole.core.measure.diagnostics import margin_occupancy, uniformity

for text, z in features.items():
    print(
        f"{text:36} uniformity {uniformity(z):6.2f}   directions {effective_rank(z):5.1f} of {z.shape[1]}"
        f"   inside the margin {margin_occupancy(z):.2f}"
    )

# %% [markdown]
# ## Directions
#
# The singular values of the embeddings, the largest first: where they fall early, few directions carry everything.

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for text, z in features.items():
    values = torch.linalg.svdvals(torch.nn.functional.normalize(z, dim=1))
    axes.semilogy(values / values[0], label=text)
axes.set_xlabel("direction")
axes.set_ylabel("singular value over the largest")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## A look from two sides
#
# The plane of the two longest directions, coloured by digit. It hides all others: read it beside the numbers above.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
for axis, (text, z) in zip(axes, features.items(), strict=True):
    unit = torch.nn.functional.normalize(z, dim=1)
    plane = torch.linalg.svd(unit - unit.mean(0), full_matrices=False)
    x, y = (plane.U[:, :2] * plane.S[:2]).T
    axis.scatter(x, y, c=labels, cmap="tab10", s=5)
    axis.set_title(text, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
plt.show()

# %% [markdown]
# `dipole theory RUN` evaluates the papers' inequalities on the same features ([theory](../theory.md)); what CLLR's
# projection does to directions is in [CLLR](../cllr.md).
