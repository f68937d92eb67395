"""Embedding diagnostics of an agent's own observations, as in the other domains."""

import torch

from dipole.core.evaluation import diagnostics
from dipole.core.objectives.objective import SHARPNESS
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.evaluation import diagnose_objective
from dipole.rl.pixel_agent import PixelAgent


@torch.no_grad()
def diagnose(agent: PixelAgent, batch_size: int = 256) -> dict[str, float]:
    """Embedding diagnostics of one replay batch, as in the other domains, and those of the objective's terms, by name.

    The batch comes from a copy of the sampler's generator, and torch's is put back: training is not disturbed.

    Args:
        agent: with an objective.
        batch_size: transitions, >= 1.

    Returns:
        {} without an objective, and while replay holds fewer.
    """
    buffer = agent.replay_buffer
    if agent.contrast is None or len(buffer) < batch_size:
        return {}
    state, generator = buffer.rng.bit_generator.state, torch.get_rng_state()
    batch = buffer.sample_views(batch_size, agent._augment, max(agent._positives, 1))
    buffer.rng.bit_generator.state = state
    torch.set_rng_state(generator)
    pairs = agent.make_pairs(batch, agent.anchors(batch.observations))
    t_neg = agent.contrast.sharpness()[1]
    return diagnose_pairs(pairs, t_neg) | diagnose_objective(agent.contrast, pairs.anchors)


def diagnose_pairs(pairs: Pairs, t_neg: float = SHARPNESS[1]) -> dict[str, float]:
    """Alignment, uniformity, distances, margin occupancy, rank and entropy of anchors and keys, by name.

    Args:
        pairs: anchors against keys.
        t_neg: sharpness of the negatives' weights whose entropy it is, >= 0. An objective's own is
            `Composite.sharpness`.

    Raises:
        OptionError: `t_neg` is out of its range.
    """
    entropy, maximum = diagnostics.conditional_entropy(pairs, t_neg)
    return {
        "alignment": diagnostics.alignment(pairs),
        "uniformity": diagnostics.uniformity(pairs),
        "mean_distance": diagnostics.mean_distance(pairs.anchors),
        "margin_occupancy": diagnostics.margin_occupancy(pairs),
        "rank": float(diagnostics.numerical_rank(pairs.anchors)),
        "conditional_entropy": float(entropy),
        "conditional_entropy_maximum": float(maximum),
        "conditional_entropy_t_neg": t_neg,
    }
