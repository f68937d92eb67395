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
# # Your own regularizer, in all three domains
#
# Forty lines make a name that can be written behind any objective. The conformance kit checks it, and it trains images,
# sentences and an agent without a line for any of them.

# %%
import sys

if "google.colab" in sys.modules:
    import subprocess

    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "dipole[vision,text,rl]"], check=True)

# %% [markdown]
# ## The regularizer
#
# It says what it needs of each row of similarities (`statistics`), and what it makes of that (`loss`). Here: different
# instances should be no more alike than a ceiling. `reference` is the formula once more as loops, for the check.

# %%
from typing import Annotated

import torch
from torch import Tensor

import dipole
from dipole.core.conformance.reference import Case, cosine, mean
from dipole.core.contrast.objective import Objective, Rows
from dipole.core.contrast.options import Range
from dipole.core.contrast.statistics import AnyStatistic, Softplus


@dipole.register("apart", kind="regularizer", weight=0.1, formula="R = mean_i mean_j log(1 + e^{10 (s_ij - ceiling)})")
class Apart(Objective):
    """Different instances should be no more alike than a ceiling."""

    def __init__(self, ceiling: Annotated[float, Range(at_least=-1, at_most=1), "cosine that is free"] = 0.0) -> None:
        super().__init__("cosine")
        self.ceiling = ceiling

    def statistics(self) -> dict[str, AnyStatistic]:
        return {"alike": Softplus(10.0, -10.0 * self.ceiling)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        return rows.mean_over_all(rows.alike / rows.count.clamp_min(1))

    @staticmethod
    def reference(case: Case, *, ceiling: float) -> Tensor:
        rows = []
        for i, a in enumerate(case.anchors):
            excess = [cosine(a, case.candidates[j]) - ceiling for j in case.negatives(i)]
            rows.append(mean([(1 + (10 * each).exp()).log() for each in excess]))
        return mean(rows)


z1, z2 = torch.randn(2, 32, 16)
outcome = dipole.objective("infonce(temperature=0.2) + 0.5*apart(ceiling=0.2)")(z1, z2)
print({name: round(float(term), 4) for name, term in outcome.terms.items()})

# %% [markdown]
# ## Checked
#
# Value and gradient against the loop in float64 on thirteen layouts of pairs, half precision, edges, permutations,
# and more. (`ranks=False` leaves out two processes against one, which take some seconds to start.)

# %%
report = dipole.check_objective("apart(ceiling=0.2)", ranks=False)
print(report.table())
assert report.ok

# %% [markdown]
# ## In three domains
#
# One text for all: images of digits, the sentences of Python's own documentation, and an agent that moves a dot.

# %%
import os
import tempfile
from pathlib import Path

from dipole.core.train.loop import train
from dipole.core.train.recipe import load

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
RECIPES = {
    "digits-simclr": ("few_shot/accuracy", ["train.epochs=1", "vision.data.limit=400", "vision.probe.baselines=false"]),
    "pydoc-bow": ("next@10", ["train.epochs=1"]),
    "dot": ("return/mean", ["train.steps=80", "train.evaluate_every=80", "rl.episodes=2"]),
}
runs = Path(tempfile.mkdtemp())
for recipe, (metric, small) in RECIPES.items():
    for objective in ("infonce", "infonce + 0.5*apart"):
        config = load(recipe, [f"objective={objective}", *(small if SMALL else [])]).config
        record = train(config, runs, quiet=SMALL)
        print(f"{recipe:14} {objective:20} {metric} {record.results[metric]:.3f}")

# %% [markdown]
# ## What it does to distances
#
# Points on a sphere that are pushed apart: without it, with it.

# %%
import matplotlib.pyplot as plt

points = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)) + 1.5  # all on one side of the origin
figure, axes = plt.subplots(figsize=(6, 3))
for text in ("infonce(temperature=1)", "infonce(temperature=1) + 5*apart(ceiling=0.2)"):
    z = points.clone().requires_grad_()
    loss = dipole.objective(text)
    optimizer = torch.optim.Adam([z], lr=0.05)
    for _ in range(30 if SMALL else 200):
        optimizer.zero_grad()
        loss(z, z + 0.1 * torch.randn_like(z)).loss.backward()
        optimizer.step()
    unit = torch.nn.functional.normalize(z.detach(), dim=1)
    axes.hist((unit @ unit.T)[~torch.eye(200, dtype=torch.bool)].numpy(), bins=60, histtype="step", label=text)
axes.set_xlabel("cosine of different points")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# To share it, `dipole new my-objectives` begins a package with tests and continuous integration;
# [A loss of one's own](../own-losses.md) has every hook.
