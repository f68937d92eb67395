"""Networks of a Rainbow-like DQN, on torch, gymnasium, stable-baselines3 and `seen` alone.

An exported folder holds copies of both files, so that `stable_baselines3.DQN.load` plays the agent without dipole.
"""

import copy
import itertools
import math
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.dqn.policies import DQNPolicy, QNetwork
from torch import Tensor, nn

from dipole.rl.seen import joined, layout

# (filters, extent, stride) of each convolution.
ARCHITECTURES = {
    "data-efficient": ((32, 5, 5), (64, 5, 5)),  # van Hasselt et al. 2019
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),  # Mnih et al. 2015
}
SIGMA = 0.1  # of noisy layers at first, times 1 / sqrt(inputs); CURL's and the data-efficient agent's


class BranchEncoder(BaseFeaturesExtractor):
    """Convolutions, and the head whose embedding the contrast sees; values branch off between the two (CURL, App. E).

    The head is Linear, LayerNorm, ReLU, Linear, LayerNorm, without scales and offsets of the normalisations.

    Where observations hold vectors as well, values see them beside the maps; where they hold no image, alone.

    Args:
        observation_space: Box (C, H, W) uint8, as rendered; larger images than `image_size` are cut to their middle.
            Or vectors (a Box), or a Dict of one image and vectors.
        features_dim: width of the embedding.
        image_size: height and width of what the convolutions see; one number for both.
        architecture: a name of `ARCHITECTURES`, or "uniform" for `layers` of 3x3, the first with stride 2.
        layers, filters: of "uniform".
        hidden: width inside the head.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        features_dim: int = 128,
        image_size: int | tuple[int, int] = 84,
        architecture: str = "data-efficient",
        layers: int = 2,
        filters: int = 32,
        hidden: int = 256,
    ) -> None:
        seen = layout(observation_space)
        super().__init__(observation_space, features_dim)
        self.seen = seen
        self.image_size = image_size
        self.convs = nn.ModuleList()
        self.project = nn.Sequential()
        self.width = seen.width  # of what values see
        if seen.image is None:
            return
        uniform = tuple((filters, 3, 1 if index else 2) for index in range(layers))
        shapes = ARCHITECTURES.get(architecture, uniform)
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        channels = [seen.shape[0], *(each[0] for each in shapes)]
        for _, extent, stride in shapes:
            height, width = (height - extent) // stride + 1, (width - extent) // stride + 1
            if min(height, width) < 1:
                raise ValueError(f"images of {image_size} pixels are too small for the architecture {architecture!r}.")
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, extent, stride)
            for (before, after), (_, extent, stride) in zip(itertools.pairwise(channels), shapes, strict=True)
        )
        maps = channels[-1] * height * width
        self.width += maps
        self.project = nn.Sequential(
            nn.Linear(maps, hidden),
            nn.LayerNorm(hidden, elementwise_affine=False),
            nn.ReLU(),
            nn.Linear(hidden, features_dim),
            nn.LayerNorm(features_dim, elementwise_affine=False),
        )

    def convolve(self, images: Tensor) -> Tensor:
        """Images (B, C, size, size) with values 0..255 -> maps (B, D)."""
        if self.seen.image is None:
            return images.float().flatten(1)
        x = images.to(self.convs[0].weight.dtype) / 255  # type: ignore[arg-type]
        for conv in self.convs:
            x = torch.relu_(conv(x))
        return x.flatten(1)

    def head(self, maps: Tensor) -> Tensor:
        """Maps (B, D) -> embedding (B, features_dim)."""
        z: Tensor = self.project(maps)
        return z.to(self.convs[0].weight.dtype)  # type: ignore[arg-type]

    def forward(self, observations: Any) -> Tensor:
        return self.embed(observations)

    def embed(self, observations: Any) -> Tensor:
        """Observations -> embedding (B, features_dim) of their images, which the contrast sees."""
        return self.head(self.convolve(self.centre(self.seen.pixels(observations))))

    def known(self, observations: Any) -> Tensor:
        """Observations -> what values see of them (B, width)."""
        return joined(self.convolve(self.centre(self.seen.pixels(observations))), self.seen.state(observations))

    def centre(self, images: Tensor) -> Tensor:
        """Cut larger images to their middle."""
        size = self.image_size
        height, width = (size, size) if isinstance(size, int) else size
        top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
        return images[..., top : top + height, left : left + width]


class NoisyLinear(nn.Module):
    """A linear layer whose weights have factorised noise (Fortunato et al. 2018, sec. 3, b).

    y = (W + S_w * f(e_out) f(e_in)') x + b + S_b * f(e_out),  f(e) = sign(e) sqrt |e|
    """

    noise_out: Tensor
    noise_in: Tensor

    def __init__(self, inputs: int, outputs: int, sigma: float = SIGMA) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma / math.sqrt(outputs)))
        self.register_buffer("noise_in", torch.zeros(inputs), persistent=False)
        self.register_buffer("noise_out", torch.zeros(outputs), persistent=False)

    def draw(self) -> None:
        """New noise, from torch's generator."""
        for noise in (self.noise_in, self.noise_out):
            drawn = torch.randn_like(noise)
            noise.copy_(drawn.sign() * drawn.abs().sqrt())

    def silence(self) -> None:
        """No noise."""
        self.noise_in.zero_()
        self.noise_out.zero_()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.weight_sigma * torch.outer(self.noise_out, self.noise_in)
        return nn.functional.linear(x, weight, self.bias + self.bias_sigma * self.noise_out)


class RainbowNetwork(QNetwork):
    """Action values as expectations, categories on fixed atoms (C51) or quantiles; dueling and noisy if wanted.

    Args:
        observation_space, action_space, features_extractor, features_dim, normalize_images: as SB3 passes them.
        hidden: widths of both streams.
        activation: its name in torch.nn.
        distribution: "none", "c51" (Bellemare et al. 2017) or "quantile" (Dabney et al. 2018).
        atoms: N, atoms or quantiles of a value.
        v_min, v_max: of the lowest and highest atom.
        dueling: value plus advantages less their mean (Wang et al. 2016).
        noisy: noisy layers.
    """

    support: Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Discrete,
        features_extractor: BranchEncoder,
        features_dim: int,
        hidden: list[int],
        distribution: str = "c51",
        atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        dueling: bool = True,
        noisy: bool = True,
        normalize_images: bool = False,
        activation: str = "ReLU",
    ) -> None:
        BasePolicy.__init__(
            self,
            observation_space,
            action_space,
            features_extractor=features_extractor,
            normalize_images=normalize_images,
        )
        self.distribution, self.dueling, self.features_dim = distribution, dueling, features_dim
        self.atoms = 1 if distribution == "none" else atoms
        self.actions = int(action_space.n)
        self.register_buffer("support", torch.linspace(v_min, v_max, self.atoms), persistent=False)
        layer = NoisyLinear if noisy else nn.Linear
        widths = [features_extractor.width, *hidden]
        self.advantage = _mlp(widths, self.actions * self.atoms, layer, activation)
        self.value = _mlp(widths, self.atoms, layer, activation) if dueling else None

    def outputs(self, maps: Tensor) -> Tensor:
        """Maps (B, D) -> (B, actions, N): values (N = 1), logits of the atoms, or quantiles."""
        found: Tensor = self.advantage(maps).unflatten(1, (self.actions, self.atoms))
        if self.value is not None:
            found = self.value(maps).unsqueeze(1) + found - found.mean(1, keepdim=True)
        return found.to(self.support.dtype)

    def expected(self, outputs: Tensor) -> Tensor:
        """Outputs (B, actions, N) -> expected values (B, actions)."""
        if self.distribution == "c51":
            return (outputs.softmax(-1) * self.support).sum(-1)
        return outputs.mean(-1)

    def forward(self, obs: PyTorchObs) -> Tensor:
        encoder: Any = self.features_extractor
        seen: Any = preprocess_obs(obs, self.observation_space, normalize_images=False)
        return self.expected(self.outputs(encoder.known(seen)))

    def draw_noise(self) -> None:
        """New noise in every noisy layer."""
        for module in self.modules():
            if isinstance(module, NoisyLinear):
                module.draw()

    def silence(self) -> None:
        """No noise in any layer."""
        for module in self.modules():
            if isinstance(module, NoisyLinear):
                module.silence()

    def _predict(self, observation: PyTorchObs, deterministic: bool = True) -> Tensor:
        self.silence() if deterministic else self.draw_noise()
        return self(observation).argmax(dim=1).reshape(-1)


def _mlp(widths: list[int], outputs: int, layer: Any, activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [layer(before, after), getattr(nn, activation)()]
    return nn.Sequential(*layers, layer(widths[-1], outputs))


class RainbowPolicy(DQNPolicy):
    """Action values, their target network, and a momentum copy of the encoder, which embeds the positives.

    Args:
        observation_space, action_space, lr_schedule: as SB3 passes them.
        encoder: keywords of `BranchEncoder`.
        values: keywords of `RainbowNetwork`.
        beta, epsilon: Adam's first decay and epsilon.
    """

    q_net: RainbowNetwork
    q_net_target: RainbowNetwork
    encoder_class: type[BranchEncoder] = BranchEncoder

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        encoder: dict[str, Any],
        values: dict[str, Any],
        beta: float = 0.9,
        epsilon: float = 1.5e-4,
    ) -> None:
        self.values, self.beta, self.epsilon = values, beta, epsilon
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            features_extractor_class=self.encoder_class,
            features_extractor_kwargs=dict(encoder),
            normalize_images=False,  # the encoder divides by 255 itself
        )

    def _build(self, lr_schedule: Schedule) -> None:
        self.q_net = self.make_q_net()
        self.q_net_target = self.make_q_net()
        self.q_net_target.load_state_dict(self.q_net.state_dict())
        self.q_net_target.requires_grad_(False)
        self.q_net_target.set_training_mode(False)
        self.key_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.optimizer = self.adam(self.q_net.parameters(), lr_schedule(1))

    def make_q_net(self) -> RainbowNetwork:
        given = {name: self.net_args[name] for name in ("observation_space", "action_space", "normalize_images")}
        keywords = self._update_features_extractor(given, features_extractor=None)
        return RainbowNetwork(**keywords, **self.values).to(self.device)

    @property
    def encoder(self) -> BranchEncoder:
        """The anchors' encoder."""
        assert isinstance(self.q_net.features_extractor, BranchEncoder)
        return self.q_net.features_extractor

    def adam(self, parameters: Any, rate: float) -> torch.optim.Adam:
        """Adam in its fused form."""
        return torch.optim.Adam(parameters, lr=rate, betas=(self.beta, 0.999), eps=self.epsilon, fused=True)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "encoder": self.features_extractor_kwargs,
            "values": self.values,
            "beta": self.beta,
            "epsilon": self.epsilon,
        }
