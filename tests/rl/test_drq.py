"""DrQ-v2: its update against the formulas in float64, its noise, its shifts, and that it learns."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("stable_baselines3")

from dipole.rl import ContrastiveCallback, ContrastiveDrQ, EvaluationCallback, make_env
from dipole.rl.augmentation import shift, shift_bilinear
from dipole.rl.drq import noise_at
from dipole.rl.sampling import FrameBatch
from tests.rl.conftest import TINY
from tests.rl.plain_networks import MLP, Adam, Encoder, linears, normalised

BATCH, ACTIONS, RATE, TAU, ENCODER_TAU = 6, 2, 1e-3, 0.01, 0.05


def small(env=None, **settings):
    env = make_env("dot") if env is None else env
    return ContrastiveDrQ("CnnPolicy", env, **{**TINY, "image_size": None, **settings})


class PlainDrQ:
    """The agent of Yarats et al. 2021 written out, with the averages of Kostrikov et al. 2020 and InfoNCE."""

    def __init__(self, agent):
        policy = agent.policy
        self.encoder = Encoder(policy.encoder, 0.5).track()
        self.key = Encoder(policy.key_encoder, 0.5)
        self.q = [MLP(*linears(net)) for net in policy.critic.q_networks]
        self.q_target = [MLP(*linears(net)) for net in policy.critic_target.q_networks]
        self.trunk = Encoder(policy.actor.features_extractor).rest
        self.pi = MLP(*linears(policy.actor.mu))
        self.W = policy.contrast.terms[0].W.detach().clone().requires_grad_() if policy.contrast is not None else None
        values = [t for q in self.q for t in q.tensors()]
        for tensor in [*values, *self.actor_tensors()]:
            tensor.requires_grad_()
        self.critic_adam = Adam([*self.encoder.tensors(), *values], RATE, 0.9)
        self.actor_adam = Adam(self.actor_tensors(), RATE, 0.9)
        self.contrast_adam = Adam([] if self.W is None else [self.W], RATE, 0.9)

    def actor_tensors(self):
        return [*self.trunk, *self.pi.tensors()]

    def embed(self, rest, h):
        return torch.tanh(normalised(rest, h))

    def act(self, h, sigma):
        mean = torch.tanh(self.pi(self.embed(self.trunk, h)))
        noise = (sigma * torch.randn_like(mean)).clamp(-0.3, 0.3)
        action = mean + noise
        return action + (action.clamp(-1 + 1e-6, 1 - 1e-6) - action).detach()

    def update(self, batch, sigma, target_views, value_views):
        with torch.no_grad():
            h = self.encoder.features(batch.next_observations)  # the online convolutions
            action = self.act(h, sigma)
            z = self.embed(self.key.rest, h)
            v = torch.minimum(*(q(torch.cat([z, action], 1)) for q in self.q_target))
            mean = sum(v[k * BATCH : (k + 1) * BATCH] for k in range(target_views)) / target_views
            y = batch.rewards + (1 - batch.dones) * batch.discounts * mean
        h = self.encoder.features(batch.observations)
        z = self.embed(self.encoder.rest, h)
        loss = 0.0
        for m in range(value_views):
            part = z[m * BATCH : (m + 1) * BATCH]
            for q in self.q:
                loss = loss + ((q(torch.cat([part, batch.actions], 1)) - y) ** 2).mean() / value_views
        if self.W is not None:
            keys = self.embed(self.key.rest, self.key.features(batch.positives[:, 0])).detach()
            loss = loss + F.cross_entropy(z[:BATCH] @ self.W @ keys.T, torch.arange(BATCH))
        own = [] if self.W is None else [self.W]
        gradient = torch.autograd.grad(loss, [*self.critic_adam.parameters, *own])
        self.critic_adam.step(gradient[: len(self.critic_adam.parameters)])
        if own:
            self.contrast_adam.step(gradient[-1:])
        h = h[:BATCH].detach()  # of the convolutions before the step, as in the repository
        action = self.act(h, sigma)
        z = self.embed(self.encoder.rest, h).detach()
        loss = -torch.minimum(*(q(torch.cat([z, action], 1)) for q in self.q)).mean()
        self.actor_adam.step(torch.autograd.grad(loss, self.actor_adam.parameters))
        with torch.no_grad():
            copies = [(q.tensors(), t.tensors(), TAU) for q, t in zip(self.q, self.q_target, strict=True)]
            copies.append((self.encoder.rest, self.key.rest, TAU))
            for (w, b), (v, c) in zip(self.encoder.convs, self.key.convs, strict=True):
                copies.append(((w, b), (v, c), ENCODER_TAU))
            for online, target, tau in copies:
                for p, t in zip(online, target, strict=True):
                    t.copy_(tau * p + (1 - tau) * t)


def batches(target_views, value_views):
    rng = np.random.default_rng(0)

    def images(*shape):
        return torch.from_numpy(rng.integers(0, 256, (*shape, 9, 24, 24), dtype=np.uint8))

    for _ in range(5):
        yield FrameBatch(
            images(value_views * BATCH), images(target_views * BATCH), images(BATCH, 1),
            torch.from_numpy(rng.uniform(-1, 1, (BATCH, ACTIONS))), torch.from_numpy(rng.uniform(size=(BATCH, 1))),
            torch.from_numpy((rng.uniform(size=(BATCH, 1)) < 0.3).astype(float)), np.arange(BATCH)[:, None],
            torch.from_numpy(0.99 ** rng.integers(1, 4, (BATCH, 1))),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("objective", "target_views", "value_views"),
    [("infonce(similarity=bilinear, temperature=1)", 1, 1), ("infonce(similarity=bilinear, temperature=1)", 2, 3),
     ("none", 1, 1)],
)  # fmt: skip
def test_five_updates_agree_with_the_plain_formulas(objective, target_views, value_views):
    agent = small(
        make_env("dot", size=24), objective=objective, hidden=(16, 16), layers=4, learning_rate=RATE,
        target_views=target_views, value_views=value_views, chunk=4,
    )  # fmt: skip
    agent.policy.double()
    agent.num_timesteps = 200_000
    sigma = 1.0 - 0.9 * 0.4
    assert agent.noise == pytest.approx(sigma)
    plain = PlainDrQ(agent)
    start = copy.deepcopy(agent.policy.state_dict())
    for seed, batch in enumerate(batches(target_views, value_views)):
        torch.manual_seed(seed)
        agent.update(batch)
        torch.manual_seed(seed)
        plain.update(batch, sigma, target_views, value_views)
    policy = agent.policy
    expected = {
        "encoder": (policy.encoder.parameters(), plain.encoder.tensors()),
        "key encoder": (policy.key_encoder.parameters(), plain.key.tensors()),
        "trunk of the actor": (list(policy.actor.features_extractor.parameters())[8:], plain.trunk),
        "actor": (policy.actor.mu.parameters(), plain.pi.tensors()),
        "Q1": (policy.critic.q_networks[0].parameters(), plain.q[0].tensors()),
        "Q2": (policy.critic.q_networks[1].parameters(), plain.q[1].tensors()),
        "Q2 target": (policy.critic_target.q_networks[1].parameters(), plain.q_target[1].tensors()),
    }
    if plain.W is not None:
        expected["W"] = ([policy.contrast.terms[0].W], [plain.W])
    for name, (ours, theirs) in expected.items():
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine - other).abs().max() < 1e-8, name
    assert all(not torch.equal(start[name], value) for name, value in policy.state_dict().items())


def test_noise_falls_linearly_and_shifts_by_whole_pixels_are_exact():
    found = [noise_at(step, 1.0, 0.1, 500_000) for step in (0, 250_000, 500_000, 10**7)]
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (5, 3, 12, 10), dtype=np.uint8))
    top, left = rng.integers(0, 9, (2, 5))
    assert torch.equal(shift_bilinear(images, top, left, 4).round().to(torch.uint8), shift(images, top, left, 4))
    one, two = (shift(images, top, left + each, 4).float() for each in (0, 1))
    half = shift_bilinear(images, top, left + 0.5, 4)
    assert torch.allclose(half, (one + two) / 2, atol=1e-2)


def test_actions_have_the_noise_of_the_schedule():
    agent = small(noise_start=0.5, noise_end=0.1, noise_steps=100)
    seen, _ = make_env("dot").reset(seed=0)
    mean, _ = agent.predict(seen, deterministic=True)
    many = np.repeat(seen[None], 2000, 0)
    for step, sigma in ((0, 0.5), (50, 0.3), (1000, 0.1)):
        agent.num_timesteps = step
        drawn, _ = agent.predict(many)
        inside = np.abs(drawn) < 1 - 1e-5
        # A normal distribution cut to (-1, 1): its quantiles inside are those of the normal one.
        spread = np.quantile(drawn - mean, 0.6, axis=0) - np.quantile(drawn - mean, 0.4, axis=0)
        assert spread == pytest.approx(2 * 0.25335 * sigma, rel=0.2)
        assert inside.mean() > 0.9 if step else True


def test_callbacks_accept_drq(tmp_path):
    agent = small()
    watching = EvaluationCallback(make_env("dot"), every=30, episodes=1, folder=tmp_path)
    agent.learn(60, callback=[watching, ContrastiveCallback("infonce", batch_size=8)])
    assert [each.environment_steps for each in watching.history] == [0, 30, 60]
