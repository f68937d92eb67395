"""The networks of an agent, on torch, gymnasium, stable-baselines3 and `seen` alone.

An exported folder has copies of both files, so that `stable_baselines3.SAC.load` (or `TD3.load`) plays the agent
without dipole.
"""

from collections.abc import Iterable
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.sac.policies import Actor, SACPolicy
from stable_baselines3.td3.policies import Actor as TD3Actor
from stable_baselines3.td3.policies import TD3Policy
from torch import Tensor, nn

from dipole.rl.seen import joined, layout

Maps = tuple[Tensor, ...]
"""Images or feature maps in chunks of rows, (b, channels, height, width) each."""


class PixelEncoder(BaseFeaturesExtractor):
    """Conv 3x3/2, then 3x3/1, ReLU after each, Linear, LayerNorm (SAC-AE, while CURL never applies the tanh).

    Split in `convolve` and `head`: the actor shares the convolutions of the critic, but has a head of its own, and its
    loss stops between the two. Vectors of an observation are appended to the embedding.
    Of larger images the middle is seen. `chunk` is the rows at once on the CPU (0: all): the allocator hands out blocks
    of more than 32 MB as fresh pages, each of which faults. At batch 512 that is half of the time.
    """

    fc: nn.Linear
    ln: nn.LayerNorm

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        features_dim: int = 50,
        image_size: int | tuple[int, int] = 84,
        layers: int = 4,
        filters: int = 32,
        tanh: bool = False,
        channels_last: bool = True,
        chunk: int = 64,
    ) -> None:
        seen = layout(observation_space)
        super().__init__(observation_space, seen.width + features_dim * (seen.image is not None))
        self.seen = seen
        self.image_size = image_size
        self.sides = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.tanh = tanh
        self.chunk = chunk
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.convs = nn.ModuleList()
        if seen.image is None:
            self.fc, self.ln = nn.Identity(), nn.Identity()  # type: ignore[assignment]
            return
        height, width = (map_side(each, layers) for each in self.sides)
        self.convs.append(nn.Conv2d(seen.shape[0], filters, 3, stride=2))
        self.convs.extend(nn.Conv2d(filters, filters, 3) for _ in range(layers - 1))
        self.fc = nn.Linear(filters * height * width, features_dim)
        self.ln = nn.LayerNorm(features_dim)
        self.apply(initialise)

    def prepare(self, images: Tensor) -> Maps:
        """Scale images (B, C, size, size) of 0..255 to 0..1, in chunks of rows, as the convolutions want them."""
        if self.seen.image is None:
            return (images.float(),)
        dtype = self.fc.weight.dtype
        if torch.amp.is_autocast_available(images.device.type) and torch.is_autocast_enabled(images.device.type):
            dtype = torch.get_autocast_dtype(images.device.type)
        chunk = len(images)
        if self.chunk and images.device.type == "cpu":
            chunk = self.chunk
        # The layout is changed while a pixel is still one byte. The copy keeps images that are floats as they are.
        parts = (part.contiguous(memory_format=self.format) for part in images.split(chunk))
        return tuple(part.to(dtype, copy=True).div_(255) for part in parts)

    def convolve(self, images: Tensor | Maps) -> Maps:
        """Return feature maps (b, filters, height, width) of each chunk of images."""
        if isinstance(images, Tensor):
            images = self.prepare(images)
        found = []
        for x in images:
            for conv in self.convs:
                x = torch.relu_(conv(x))
            found.append(x)
        return tuple(found)

    def head(self, maps: Maps) -> Tensor:
        """Return the embedding (B, features_dim) of feature maps, in the parameters' precision."""
        if self.seen.image is None:
            return maps[0].flatten(1)
        weight = self.fc.weight
        if self.format == torch.channels_last:
            # The maps lie in memory as (b, row, column, filter): one permutation of the weight spares one of each map.
            weight = weight.unflatten(1, maps[0].shape[1:]).permute(0, 2, 3, 1).flatten(1)
            maps = tuple(each.permute(0, 2, 3, 1) for each in maps)
        weight = weight.to(maps[0].dtype)
        z = torch.cat([nn.functional.linear(each.flatten(1), weight, self.fc.bias) for each in maps])
        z = self.ln(z.to(self.ln.weight.dtype))
        return torch.tanh(z) if self.tanh else z

    def forward(self, observations: Any) -> Tensor:
        return joined(self.embed(observations), self.seen.state(observations))

    def embed(self, observations: Any) -> Tensor:
        """Return the embedding (B, features_dim) of the images alone, which the contrast sees."""
        return self.head(self.convolve(self.centre(self.seen.pixels(observations))))

    def centre(self, images: Tensor) -> Tensor:
        """Cut larger images to their middle."""
        height, width = self.sides
        top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
        return images[..., top : top + height, left : left + width]


def map_side(pixels: int, layers: int) -> int:
    """Return the height or width of the last feature maps. Raise ValueError for images that are too small."""
    side = (pixels - 3) // 2 + 1 - 2 * (layers - 1)
    if side < 1:
        least = 4 * layers - 1
        raise ValueError(
            f"images of {pixels} pixels are too small for {layers} convolutions: they need {least} after a crop."
        )
    return side


class CentredEncoder(PixelEncoder):
    """The encoder of DrQ-v2 (Yarats et al. 2021): pixels from -1/2 to 1/2, orthogonal convolutions."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for conv in self.convs:
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))  # type: ignore[arg-type]

    def prepare(self, images: Tensor) -> Maps:
        return tuple(part.sub_(0.5) for part in super().prepare(images))


def q_values(critic: Any, features: Tensor, actions: Tensor) -> Tensor:
    """Return all Q functions of features (B, d) and actions (B, A): (B, n_critics), in the features' precision."""
    joint = torch.cat([features, actions], 1)
    return torch.cat([network(joint) for network in critic.q_networks], 1).to(features.dtype)


@torch.no_grad()
def soft_update(online: Iterable[nn.Module], copies: Iterable[nn.Module], tau: float) -> None:
    """Set copy <- tau online + (1 - tau) copy."""
    sources: list[Tensor] = [*nn.ModuleList(online).parameters()]
    targets: list[Tensor] = [*nn.ModuleList(copies).parameters()]
    if targets:
        torch._foreach_lerp_(targets, sources, tau)


def detached(maps: Maps) -> Maps:
    """Return maps through which no gradient goes."""
    return tuple(each.detach() for each in maps)


def initialise(module: nn.Module) -> None:
    """Orthogonal linear layers, delta-orthogonal convolutions (Xiao et al. 2018), zero biases, as SAC-AE and CURL."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        middle = module.weight.shape[2] // 2
        gain = nn.init.calculate_gain("relu")
        with torch.no_grad():
            # In place on the slice: orthogonal_ itself wants a contiguous matrix.
            module.weight[:, :, middle, middle] = nn.init.orthogonal_(torch.empty(module.weight.shape[:2]), gain)


class SquashedActor(Actor):
    """SB3's actor with the log standard deviation squashed into its range instead of clamped. gSDE is SB3's."""

    log_std_bounds: tuple[float, float]

    def explored(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions (B, A) by gSDE for features (B, d), and their log densities (B, 1) (Raffin et al. 2021)."""
        latent = self.latent_pi(features)
        mean = self.mu(latent).to(features.dtype)
        action, density = self.action_dist.log_prob_from_params(mean, self.log_std, latent_sde=latent)
        return action, density.unsqueeze(1)

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation (B, A) of the Gaussian before the tanh."""
        latent = self.latent_pi(features)
        low, high = self.log_std_bounds
        raw = self.log_std(latent).to(features.dtype)  # type: ignore[operator]
        return self.mu(latent).to(features.dtype), low + 0.5 * (high - low) * (torch.tanh(raw) + 1)

    def get_action_dist_params(self, obs: PyTorchObs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if self.use_sde:
            return super().get_action_dist_params(obs)
        mean, log_std = self.distribution(self.extract_features(obs, self.features_extractor))
        return mean, log_std, {}


class Encoders(BasePolicy):
    """The shared part of policies whose actor shares the convolutions of their critic. The arguments are SB3's."""

    encoder_class: type[PixelEncoder] = PixelEncoder
    actor_class: type[BasePolicy]
    actor: Any
    critic: Any
    critic_target: Any

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        # The encoder divides by 255 itself, chunk by chunk.
        own: dict[str, Any] = {"features_extractor_class": self.encoder_class, "normalize_images": False}
        super().__init__(*arguments, **(own | settings))

    @property
    def encoder(self) -> PixelEncoder:
        """The critic's encoder, of the anchors."""
        return self.critic.features_extractor

    @property
    def key_encoder(self) -> PixelEncoder:
        """The momentum critic's encoder, of the positives."""
        return self.critic_target.features_extractor

    def set_training_mode(self, mode: bool) -> None:
        if mode != self.training:  # SB3 sets it before every action, and walks through all modules
            super().set_training_mode(mode)

    def load_state_dict(self, state_dict: Any, *rest: Any, **settings: Any) -> Any:
        if not hasattr(self, "contrast") and any(name.startswith("contrast.") for name in state_dict):
            cure = (
                "load it with dipole.rl.ContrastiveSAC (or ContrastiveDrQ). `dipole export RUN --to sb3` leaves it out."
            )
            raise RuntimeError(f"the file has a contrastive objective, which stable-baselines3 does not know: {cure}")
        return super().load_state_dict(state_dict, *rest, **settings)

    def save(self, path: Any) -> None:
        # Without the objective, which `load` does not make.
        state = {name: value for name, value in self.state_dict().items() if not name.startswith("contrast.")}
        torch.save({"state_dict": state, "data": self._get_constructor_parameters()}, path)

    def make_actor(self, features_extractor: Any = None) -> Any:
        own: Any = self
        return self.actor_class(**own._update_features_extractor(own.actor_kwargs, features_extractor)).to(self.device)

    def _build(self, lr_schedule: Schedule) -> None:
        policy: Any = self
        self.actor, self.critic, self.critic_target = policy.make_actor(), policy.make_critic(), policy.make_critic()
        policy._initialise()
        self.critic_target.load_state_dict(self.critic.state_dict())
        self.critic_target.requires_grad_(False)
        self.critic_target.set_training_mode(False)
        self.actor.features_extractor.convs = self.encoder.convs
        shared = {id(parameter) for parameter in self.encoder.convs.parameters()}
        own = [parameter for parameter in self.actor.parameters() if id(parameter) not in shared]
        for network, parameters in ((self.actor, own), (self.critic, self.critic.parameters())):
            network.optimizer = policy.optimizer_class(parameters, lr=lr_schedule(1), **policy.optimizer_kwargs)


class PixelPolicy(Encoders, SACPolicy):
    """Actor, critic and momentum critic of SAC on images. `log_std_bounds` is the actor's range."""

    actor_class = SquashedActor
    actor: SquashedActor

    def __init__(self, *arguments: Any, log_std_bounds: tuple[float, float] = (-10.0, 2.0), **settings: Any) -> None:
        self.log_std_bounds = log_std_bounds
        super().__init__(*arguments, **settings)

    def _initialise(self) -> None:
        """Draw the first weights of actor and critic."""
        self.actor.log_std_bounds = self.log_std_bounds
        for network in (self.actor.latent_pi, self.critic):
            network.apply(initialise)
        # One orthogonal matrix for mean and deviation, as for a single output layer. gSDE's deviation is a
        # parameter with its own start.
        outputs: list[Any] = [self.actor.mu, self.actor.log_std]
        if self.actor_kwargs["use_sde"]:
            outputs = [next(each for each in self.actor.mu.modules() if isinstance(each, nn.Linear))]
        joint = nn.init.orthogonal_(torch.empty(len(outputs) * len(outputs[0].weight), outputs[0].weight.shape[1]))
        with torch.no_grad():
            for layer, weight in zip(outputs, joint.chunk(len(outputs)), strict=True):
                layer.weight.copy_(weight)
                layer.bias.zero_()

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return super()._get_constructor_parameters() | {"log_std_bounds": self.log_std_bounds}


class NoisyActor(TD3Actor):
    """SB3's deterministic actor with noise of a standard deviation that the agent's schedule sets."""

    std = 0.0

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        mean: Tensor = self(observation)
        if deterministic or self.std == 0:
            return mean
        return with_noise(mean, self.std * torch.randn_like(mean))


def with_noise(mean: Tensor, noise: Tensor, clip: float | None = None) -> Tensor:
    """Actions mean + clip(noise) inside (-1, 1). The gradient passes as if nothing were cut off (DrQ-v2)."""
    if clip is not None:
        noise = noise.clamp(-clip, clip)
    action = mean + noise
    inside = action.clamp(-1 + 1e-6, 1 - 1e-6)
    return action - action.detach() + inside.detach()


class DrQPolicy(Encoders, TD3Policy):
    """Actor, critic and momentum critic of DrQ-v2. The actor has no momentum copy: SB3 gets the actor itself."""

    encoder_class = CentredEncoder
    actor_class = NoisyActor
    actor: NoisyActor

    def _initialise(self) -> None:
        for network in (self.actor.mu, *self.critic.q_networks):
            network.apply(initialise)

    @property
    def actor_target(self) -> NoisyActor:  # type: ignore[override]
        return self.actor

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        return self.actor._predict(observation, deterministic)
