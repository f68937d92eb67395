"""The contrastive objective inside an agent: built to its width, tried on what it has, blamed for what it breaks."""

import copy

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from dipole.core.objectives.objective import Composite, Objective, objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.rl.settings import Settings


def as_composite(given: str | Objective | Composite | None) -> Composite | None:
    """A text built, one objective as a sum of itself, a sum as it is; None for "none" and None.

    Raises:
        SpecError: for a wrong text. ConfigError: for anything else.
    """
    if given is None or given == "none":
        return None
    if isinstance(given, str):
        return objective(given)
    if isinstance(given, Objective):
        return Composite([given], [1.0])
    if not isinstance(given, Composite):
        raise ConfigError(
            f"objective must be a text such as 'infonce + 0.1*dp', an Objective or a Composite, got {given!r}."
        )
    return given


def unregistered(contrast: Composite) -> tuple[str, ...]:
    """Classes of the terms that no text can name."""
    kinds = [type(term) for _, _, term in contrast]
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if registry.name_of(kind) is None)


def fit(contrast: Composite, settings: Settings) -> Composite:
    """Create the parameters that are not there yet for embeddings of the agent's width; those that are stay."""
    new = [term for term in bilinear_terms(contrast) if isinstance(term.W, UninitializedParameter)]
    contrast.build(settings.features)
    start_bilinear(new, settings)
    return contrast


def bilinear_terms(contrast: Composite) -> list[Objective]:
    """The terms that learn a matrix W."""
    return [term for _, _, term in contrast if term.similarity == "bilinear"]


@torch.no_grad()
def start_bilinear(terms: list[Objective], settings: Settings) -> None:
    """Start each W as `bilinear_init` says; they are built as the identity."""
    for term in terms if settings.bilinear_init == "uniform" else ():
        term.W.uniform_(0, 1)


def largest(gradients: list[Tensor]) -> Tensor:
    """The largest magnitude in each of n gradients: (n,); NaN where there is one.

    PyTorch's norm of the infinite order takes 18 times as long on a CPU (13 million numbers an update), and one kernel
    for all of them on a GPU.
    """
    if gradients[0].device.type == "cpu":
        return torch.stack([torch.maximum(each.amax(), -each.amin()) for each in gradients])
    return torch.stack(torch._foreach_norm(gradients, float("inf")))


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
