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
# A probe's accuracy tells little about what an objective did to the embeddings. Distances, directions in use, and what
# lies where tell more, collapse among them. Three objectives on digits, looked at in four ways.
#
# Time on one core: 40 s with `DIPOLE_TUTORIAL=small`, 2 min without. Nothing is downloaded.

# %%
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("dipole") is None:  # on Colab, and in any environment without it
    source = os.environ.get("DIPOLE_SOURCE", "")  # git+URL or file:///CHECKOUT; empty: the package index
    wanted = "dipole[vision]" + f" @ {source}" * bool(source)
    command = [sys.executable, "-m", "pip", "install", "-q", wanted]
    if subprocess.run(command).returncode:
        raise RuntimeError("There is no release on the index yet. Set DIPOLE_SOURCE, and run this cell again.")

# %% [markdown]
# ## Three runs
#
# `infonce` alone, with a little distance polarization, and with far too much. (`reduction=mean` averages over pairs;
# the default adds up over the batch, as LMCL's Eq. 10 has it, so that there the same weight grows with the batch.)
#
# A finished run has all that is needed to use its model: `load_run` gives the record, the adapter (data and encoder)
# and the objective.

# %%
import os
from pathlib import Path

from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.train.run_folder import find_run
from dipole.core.train.trained_run import load_run

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
OBJECTIVES = {
    "alone": "infonce",
    "gentle": "infonce + 8*dp(reduction=mean)",
    "too much": "infonce + 300*dp(reduction=mean)",
}
settings = ["vision.probe.baselines=false"]
if SMALL:
    settings += ["train.epochs=12", "train.batch_size=64", "train.learning_rate=1e-2"]
runs = Path("runs")
hashes, accuracy, features = {}, {}, {}
for name, text in OBJECTIVES.items():
    config = load("digits-simclr", [f"objective={text}", *settings]).config
    train(config, runs)
    hashes[name] = config.hash
    record, adapter, objective = load_run(find_run(config.hash, runs))
    accuracy[name] = record.results["few_shot/accuracy"]
    features[name], labels = adapter.features("test")
    print(f"{name:9} {text:33} five labels per class: {accuracy[name]:.3f}")

# %% [markdown]
# Accuracy is measured on the encoder's features, in front of the projector; `adapter.features` returns the embeddings
# behind it, which are what the objective sees. So what has happened to the embeddings shows in the accuracy muffled,
# if at all: the last run is behind by some points, and nothing says why.

# %% [markdown]
# ## Distances
#
# D = (1 - cos) / 2 of pairs of one class and of two. Distance polarization (`dp`) empties the interval between its
# ends, 0.1 and 0.5, which is grey here.

# %% alt="Distances of pairs. Alone and gentle: spread from 0 to 1. Too much: all of them between 0 and 0.1."
import matplotlib.pyplot as plt
import torch

from dipole.core.evaluation.diagnostics import distance_histogram

figure, panels = plt.subplots(1, 3, figsize=(10, 2.8), sharex=True, layout="constrained")
for axes, (name, z) in zip(panels, features.items(), strict=True):
    found = distance_histogram(z, labels)
    axes.axvspan(0.1, 0.5, color="0.92")
    lines = [axes.stairs(counts / counts.sum(), found.edges) for counts in (found.same, found.different)]
    axes.set_title(name)
    axes.set_xlabel("distance")
panels[0].set_ylabel("share of pairs")
figure.legend(lines, ["same class", "different classes"], loc="outside upper center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# The first two spread over the whole range, and pairs of one class are nearer. In the third every pair lies left of
# the margin, of one class as of two: all embeddings have moved together. Its margin is empty as well, emptier than
# that of the gentle one. That is no success: where everything is in one place, there is nothing to tell apart.

# %% [markdown]
# ## Numbers
#
# Uniformity (lower is farther apart, 0 is one point), the number of directions in use, and the share of pairs inside
# the margin.

# %%
from dipole.core.evaluation.diagnostics import margin_occupancy, uniformity
from dipole.core.objectives.spectrum import effective_rank

found = {name: (float(uniformity(z)), float(effective_rank(z)), margin_occupancy(z)) for name, z in features.items()}
for name, (spread, directions, inside) in found.items():
    width = features[name].shape[1]
    print(
        f"{name:9} uniformity {spread:5.2f}   directions {directions:4.1f} of {width}   inside the margin {inside:.2f}"
    )

# %%
assert found["gentle"][2] < found["alone"][2]
assert found["gentle"][0] < -2
assert found["too much"][2] < 0.05
assert found["too much"][0] > -0.5

# %% [markdown]
# How to read them together:
#
# * the margin emptier and uniformity nearly as low: `dp` does what it says (gentle);
# * **the margin at 0 and uniformity near 0: a collapse** (too much). One of the two numbers alone does not tell; few
#   directions and a mean distance near 0 (`diagnostics` in the record) say the same.
#
# The cure is a smaller weight, here by a factor of forty.

# %% [markdown]
# ## Directions
#
# The singular values of the embeddings around their mean, the largest first: where they fall early, few directions
# carry everything. What is below a millionth of the largest is rounding, and left out.

# %% alt="Singular values over their number. Alone and gentle: two slow falls. Too much: steep from the start."
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name, z in features.items():
    unit = torch.nn.functional.normalize(z, dim=1)
    values = torch.linalg.svdvals(unit - unit.mean(0))
    values = values / values[0]
    axes.semilogy(range(1, 1 + int((values > 1e-6).sum())), values[values > 1e-6], label=name)
axes.set_xlabel("direction")
axes.set_ylabel("singular value\nover the largest")
figure.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# ## A look from two sides
#
# The plane of the two longest directions, coloured by digit, on the same axes everywhere. It hides all other
# directions: read it beside the numbers above.

# %% alt="Embeddings in a plane, coloured by digit. Alone and gentle: groups in a disc. Too much: a small heap."
figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), sharex=True, sharey=True, layout="constrained")
for axes, (name, z) in zip(panels, features.items(), strict=True):
    unit = torch.nn.functional.normalize(z, dim=1)
    plane = torch.linalg.svd(unit - unit.mean(0), full_matrices=False)
    x, y = (plane.U[:, :2] * plane.S[:2]).T
    points = axes.scatter(x, y, c=labels, cmap="tab10", s=5)
    axes.set_title(name)
    axes.set_aspect("equal")
figure.legend(*points.legend_elements(), loc="outside right center", frameon=False, title="digit")
plt.show()

# %% [markdown]
# ## On with these runs
#
# They lie in the folder `runs`, and everything that works on a run works on them:

# %%
for name, text in OBJECTIVES.items():
    print(f"dipole theory {hashes[name]}    # {text}")
print(f"dipole compare {hashes['alone']} {hashes['gentle']}")
print("dipole report runs -o report.html")

# %% [markdown]
# `dipole theory` evaluates the papers' inequalities on the same features ([theory](../theory.md)), `compare` says in
# what two runs differ, and the report has these pictures for every run of the folder. What CLLR's projection does to
# directions is in [CLLR](../cllr.md); which numbers a record keeps, in [runs](../runs.md).
