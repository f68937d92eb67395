"""The contrastive objective inside an agent: built to its width, tried on what it has, blamed for what it breaks."""

import copy
from dataclasses import replace

import torch

from dipole.core.contrast.objective import Composite, objective
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError, PairsError
from dipole.rl.settings import Settings


def build_objective(settings: Settings) -> Composite | None:
    """Build the contrastive objective for embeddings of the agent's width; None for "none"."""
    if settings.objective == "none":
        return None
    built = objective(settings.objective, dim=settings.features)
    if settings.bilinear_init == "uniform":
        with torch.no_grad():
            for _, _, term in built:
                if term.similarity == "bilinear":
                    term.W.uniform_(0, 1)
    return built


def require_unlabelled(contrast: Composite, width: int, positives: int, batch_size: int) -> None:
    """Try a copy of the objective on what an agent has: a batch without labels, `positives` keys for each anchor.

    Raises:
        ConfigError: if it asks for more; said before training instead of at the first update.
    """
    trial = copy.deepcopy(contrast).cpu()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            trial(Pairs.cross(torch.randn(batch_size, width), torch.randn(batch_size, positives, width)))
        except PairsError as error:
            raise ConfigError(f"the objective {contrast} cannot run inside an agent: {error}") from error


def positives_of(settings: Settings, contrast: Composite | None) -> int:
    """How many positives each anchor gets: the setting, or what the objective's terms ask for."""
    if contrast is None:
        return 0
    if settings.positives is not None:
        return settings.positives
    asked = [
        given
        for _, _, term in contrast
        for key, given in getattr(term, "given", {}).items()
        if (term.registered_name(), key) in (("cacr", "k"), ("blocks", "b")) and given
    ]
    return max(asked, default=1)


def guilty_terms(contrast: Composite, pairs: Pairs) -> list[str]:
    """Names of the terms whose own gradient is not finite."""
    found = []
    for name, _, term in contrast:
        anchors = pairs.anchors.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(
            term(replace(pairs, anchors=anchors, trusted=True)), anchors, allow_unused=True
        )
        if gradient is not None and not gradient.isfinite().all():
            found.append(name)
    return found
