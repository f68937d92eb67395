"""Draw three clouds of points in the plane after training with an objective, for several values of an option."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from drawing import svg
from matplotlib.figure import Figure
from torch import Tensor, nn

from dipole import Pairs, objective

CLOUDS, EACH, STEPS = 3, 16, 150
COLOURS = ("#4063d8", "#cb3c33", "#389826")


def embedded(text: str, told: str = "") -> Tensor:
    """Points of three clouds in the plane, (48, 2), after 150 steps of an objective on two noisy views of each.

    Args:
        text: the objective.
        told: "supervised": which cloud a point is of; "predicted": one view through a predictor, and no gradient
            through the other, as SimSiam has it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        of = torch.arange(CLOUDS).repeat_interleave(EACH)
        points = 2 * torch.randn(CLOUDS, 8)[of] + torch.randn(CLOUDS * EACH, 8)
        encoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
        predictor = nn.Linear(2, 2) if told == "predicted" else nn.Identity()
        built = objective(text, dim=2)
        parameters = [*encoder.parameters(), *predictor.parameters(), *built.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
        for _ in range(STEPS):
            first, second = (encoder(points + 0.3 * torch.randn_like(points)) for _ in range(2))
            second = second.detach() if told == "predicted" else second
            optimizer.zero_grad()
            built(
                Pairs.from_views([predictor(first), second], labels=of if told == "supervised" else None)
            ).loss.backward()
            optimizer.step()
            built.after_step(1e-2)
        return encoder(points).detach()


def toy_picture(texts: Sequence[tuple[str, str]], told: str = "") -> bytes:
    """A panel for each objective: (title, its text)."""
    figure = Figure(figsize=(2.2 * len(texts), 2.3))
    for number, (title, text) in enumerate(texts):
        axes = figure.add_subplot(1, len(texts), number + 1)
        for cloud, z in enumerate(embedded(text, told).view(CLOUDS, EACH, 2)):
            axes.scatter(z[:, 0], z[:, 1], s=9, color=COLOURS[cloud])
        axes.set_title(title.replace("(", "\n(").replace(" + ", "\n+ "), fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_aspect("equal", adjustable="datalim")
    return svg(figure)
