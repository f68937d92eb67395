"""Updates of the agents against the plain formulas of CURL's repository and of DrQ-v2, in float64, and DrQ's noise."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dipole.rl import ContrastiveDrQ, make_env
from dipole.rl.sampling import FrameBatch, shift, shift_bilinear
from dipole.rl.settings import CURL_OBJECTIVE
from tests.rl.conftest import tiny


class Encoder(nn.Module):
    """Four convolutions, linear, layer normalisation."""

    def __init__(self, module, offset=0.0):
        super().__init__()
        self.convs, self.offset = copy.deepcopy(module.convs), offset
        self.head = nn.Sequential(copy.deepcopy(module.fc), copy.deepcopy(module.ln))

    def features(self, images):
        x = images.double() / 255 - self.offset
        for stride, conv in zip([2, 1, 1, 1], self.convs, strict=True):
            x = F.relu(F.conv2d(x, conv.weight, conv.bias, stride))
        return x.flatten(1)

    def forward(self, images):
        return self.head(self.features(images))


class MLP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy(m) for m in module.modules() if isinstance(m, nn.Linear))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x if index == 0 else F.relu(x))
        return x


def step(loss, *optimizers):
    """Step the optimizers one after the other along the gradient of the loss."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def adam(modules, rate, beta):
    return torch.optim.Adam([p for each in modules for p in each.parameters()], rate, (beta, 0.999))


@torch.no_grad()
def average(target, online, tau):
    for old, new in zip(target.parameters(), online.parameters(), strict=True):
        old.copy_(tau * new + (1 - tau) * old)


ACTIONS, BATCH, UPDATES = 2, 8, 6
DISCOUNT, TAU, ENCODER_TAU = 0.99, 0.01, 0.05


class Plain:
    """The networks that both agents have."""

    def __init__(self, policy, offset=0.0):
        self.encoder, self.key = Encoder(policy.encoder, offset), Encoder(policy.key_encoder, offset)
        self.q = nn.ModuleList(MLP(net) for net in policy.critic.q_networks)
        self.q_target = nn.ModuleList(MLP(net) for net in policy.critic_target.q_networks)
        self.W = nn.ParameterList([] if policy.contrast is None else [policy.contrast.terms[0].W.detach().clone()])

    def smaller(self, z, action, networks):
        """The smaller of two Q values."""
        return torch.minimum(*(q(torch.cat([z, action], 1)) for q in networks))


def assert_alike(agent, plain, batches, *given, names):
    """Updates on the same batches and noise move every weight, and leave the networks `names` as the formulas do."""
    start = copy.deepcopy(agent.policy.state_dict())
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        agent.update(batch)
        torch.manual_seed(seed)
        plain.update(seed, batch, *given)
    policy = agent.policy
    expected = {
        "encoder": (policy.encoder.parameters(), plain.encoder.parameters()),
        "key encoder": (policy.key_encoder.parameters(), plain.key.parameters()),
        "Q": (nn.ModuleList(policy.critic.q_networks).parameters(), plain.q.parameters()),
        "Q target": (nn.ModuleList(policy.critic_target.q_networks).parameters(), plain.q_target.parameters()),
        "W": ([policy.contrast.terms[0].W] if len(plain.W) else [], plain.W),
        **names,
    }
    for name, (ours, theirs) in expected.items():
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine - other).abs().max() < 1e-8, name
    assert all(not torch.equal(start[name], value) for name, value in policy.state_dict().items())


class PlainCurl(Plain):
    """The repository's agent written out: curl_sac.py at 8416d6e, formulas only."""

    def __init__(self, agent, twin, encoder_steps):
        actor = agent.policy.actor
        super().__init__(agent.policy)
        self.twin, self.encoder_steps = twin, encoder_steps
        self.head, self.trunk = Encoder(actor.features_extractor).head, MLP(actor.latent_pi)
        self.mu, self.log_std = copy.deepcopy(actor.mu), copy.deepcopy(actor.log_std)
        self.log_alpha = nn.Parameter(agent.log_ent_coef.detach().clone())
        self.critic_adam = adam([self.encoder, self.q], 1e-3, 0.9)
        self.actor_adam = adam([self.head, self.trunk, self.mu, self.log_std], 1e-3, 0.9)
        self.alpha_adam = adam([nn.ParameterList([self.log_alpha])], 1e-4, 0.5)
        self.encoder_adam = adam([self.encoder], 1e-3, 0.9)
        self.contrast_adam = adam([self.encoder, self.W], 1e-3, 0.9)

    def policy(self, h):
        latent = F.relu(self.trunk(self.head(h)))
        mean = self.mu(latent)
        log_std = -10 + 6 * (torch.tanh(self.log_std(latent)) + 1)
        noise = torch.randn_like(mean)
        action = torch.tanh(mean + log_std.exp() * noise)
        log_pi = (-0.5 * noise**2 - log_std).sum(1, keepdim=True) - 0.5 * np.log(2 * np.pi) * ACTIONS
        return action, log_pi - torch.log(1 - action**2 + 1e-6).sum(1, keepdim=True)

    def critic_loss(self, batch):
        with torch.no_grad():
            action, log_pi = self.policy(self.encoder.features(batch.next_observations))
            v = self.smaller(self.key(batch.next_observations), action, self.q_target) - self.log_alpha.exp() * log_pi
            y = batch.rewards + (1 - batch.dones) * DISCOUNT * v
        z = torch.cat([self.encoder(batch.observations), batch.actions], 1)
        return sum(((q(z) - y) ** 2).mean() for q in self.q)

    def contrast(self, batch):
        keys = self.key(batch.positives[:, 0]).detach()
        return F.cross_entropy(self.encoder(batch.observations) @ self.W[0] @ keys.T, torch.arange(BATCH))

    def update(self, number, batch):
        step(self.critic_loss(batch) / (2 if self.twin == "half" else 1), self.critic_adam)
        if number % 2 == 0:
            h = self.encoder.features(batch.observations).detach()
            action, log_pi = self.policy(h)
            q = self.smaller(self.encoder.head(h), action, self.q)
            step((self.log_alpha.exp().detach() * log_pi - q).mean(), self.actor_adam)
            step((self.log_alpha.exp() * (-log_pi + ACTIONS).detach()).mean(), self.alpha_adam)
            average(self.q_target, self.q, TAU)
            average(self.key, self.encoder, ENCODER_TAU)
        step(self.contrast(batch), *[self.encoder_adam] * (self.encoder_steps == 2), self.contrast_adam)


def batches(count, rows, views=(1, 1), has_discounts=False):
    """Batches of random numbers, with so many views of observations and of next observations."""
    rng = np.random.default_rng(0)

    def images(*shape):
        return torch.from_numpy(rng.integers(0, 256, (*shape, 9, 24, 24), dtype=np.uint8))

    for _ in range(count):
        rewards, ends = rng.uniform(size=(2, rows, 1))
        yield FrameBatch(
            images(views[0] * rows), images(views[1] * rows), images(rows, 1),
            torch.from_numpy(rng.uniform(-1, 1, (rows, ACTIONS))), torch.from_numpy(rewards),
            torch.from_numpy((ends < 0.25).astype(float)), np.arange(rows)[:, None], *torch.zeros(2, rows, 0),
            torch.from_numpy(0.99 ** rng.integers(1, 4, (rows, 1))) if has_discounts else None,
        )  # fmt: skip


def double_agent(**settings):
    """An agent in float64 with optimizers that hold its float64 weights."""
    agent = tiny(hidden=(32, 32), layers=4, chunk=3, **settings)
    agent.policy.double()
    agent.log_ent_coef = agent.log_ent_coef.detach().double().requires_grad_()
    agent.ent_coef_optimizer = torch.optim.Adam([agent.log_ent_coef], 1e-4, (0.5, 0.999), fused=True)
    return agent


@pytest.mark.parametrize(
    ("preset", "twin", "encoder_steps"), [("curl", "sum", 2), ("paper", "half", 1)], ids=["curl", "paper"]
)
def test_six_updates_agree_with_the_plain_formulas(preset, twin, encoder_steps):
    agent = double_agent(preset=preset)
    plain = PlainCurl(agent, twin, encoder_steps)
    policy = agent.policy
    of_actor = [policy.actor.latent_pi, policy.actor.mu, policy.actor.log_std]
    names = {
        "temperature": ([agent.log_ent_coef], [plain.log_alpha]),
        "actor head": (list(policy.actor.features_extractor.parameters())[8:], plain.head.parameters()),
        "actor": (
            [p for part in of_actor for p in part.parameters()],
            [p for part in (plain.trunk, plain.mu, plain.log_std) for p in part.parameters()],
        ),
    }
    assert_alike(agent, plain, batches(UPDATES, BATCH), names=names)


def test_joint_backward_steps_the_encoder_once_for_the_sum():
    agent = double_agent(joint_backward=True)
    plain = PlainCurl(agent, "sum", 1)
    (batch,) = batches(1, BATCH)
    torch.manual_seed(0)
    agent.update(batch)
    torch.manual_seed(0)
    step(plain.critic_loss(batch) + plain.contrast(batch), plain.critic_adam)
    for mine, other in zip(agent.policy.encoder.parameters(), plain.encoder.parameters(), strict=True):
        assert (mine - other).abs().max() < 1e-8


def test_detach_encoder_keeps_the_critic_loss_out_of_the_convolutions():
    agent = double_agent(detach_encoder=True, objective="none")
    before = [p.detach().clone() for p in agent.policy.encoder.parameters()]
    agent.update(*batches(1, BATCH))
    changed = [not torch.equal(a, b) for a, b in zip(before, agent.policy.encoder.parameters(), strict=True)]
    assert changed == [False] * 8 + [True] * 4  # four convolutions, then linear and normalisation


ROWS, RATE = 6, 1e-3


class PlainDrQ(Plain):
    """The agent of Yarats et al. 2021 written out, with the averages of Kostrikov et al. 2020 and InfoNCE."""

    def __init__(self, agent):
        actor = agent.policy.actor
        super().__init__(agent.policy, 0.5)
        self.trunk, self.pi = Encoder(actor.features_extractor).head, MLP(actor.mu)
        self.critic_adam = adam([self.encoder, self.q], RATE, 0.9)
        self.actor_adam = adam([self.trunk, self.pi], RATE, 0.9)
        self.contrast_adam = [adam([self.W], RATE, 0.9)] if len(self.W) else []

    def act(self, h, sigma):
        mean = torch.tanh(self.pi(torch.tanh(self.trunk(h))))
        action = mean + (sigma * torch.randn_like(mean)).clamp(-0.3, 0.3)
        return action + (action.clamp(-1 + 1e-6, 1 - 1e-6) - action).detach()

    def update(self, _, batch, sigma, target_views, value_views):
        with torch.no_grad():
            h = self.encoder.features(batch.next_observations)  # the online convolutions
            v = self.smaller(torch.tanh(self.key.head(h)), self.act(h, sigma), self.q_target)
            y = batch.rewards + (1 - batch.dones) * batch.discounts * sum(v.split(ROWS)) / target_views
        h = self.encoder.features(batch.observations)
        z = torch.tanh(self.encoder.head(h))
        loss = 0.0
        for part in z.split(ROWS):
            for q in self.q:
                loss = loss + ((q(torch.cat([part, batch.actions], 1)) - y) ** 2).mean() / value_views
        for W in self.W:
            keys = torch.tanh(self.key(batch.positives[:, 0])).detach()
            loss = loss + F.cross_entropy(z[:ROWS] @ W @ keys.T, torch.arange(ROWS))
        step(loss, self.critic_adam, *self.contrast_adam)
        h = h[:ROWS].detach()  # of the convolutions before the step, as in the repository
        action = self.act(h, sigma)
        step(-self.smaller(torch.tanh(self.encoder.head(h)).detach(), action, self.q).mean(), self.actor_adam)
        average(self.q_target, self.q, TAU)
        average(self.key.head, self.encoder.head, TAU)
        average(self.key.convs, self.encoder.convs, ENCODER_TAU)


@pytest.mark.parametrize(("objective", "views"), [(CURL_OBJECTIVE, (1, 1)), (CURL_OBJECTIVE, (2, 3)), ("none", (1, 1))])
def test_five_updates_agree_with_the_plain_formulas(tiny_agent, objective, views):
    target_views, value_views = views
    agent = tiny_agent(
        make_env("dot", size=24), ContrastiveDrQ, image_size=None, objective=objective, hidden=(16, 16), layers=4,
        learning_rate=RATE, target_views=target_views, value_views=value_views, chunk=4,
    )  # fmt: skip
    agent.policy.double()
    agent.num_timesteps = 200_000
    sigma = 1.0 - 0.9 * 0.4
    assert agent.noise == pytest.approx(sigma)
    plain = PlainDrQ(agent)
    actor = agent.policy.actor
    names = {
        "trunk of the actor": (list(actor.features_extractor.parameters())[8:], plain.trunk.parameters()),
        "actor": (actor.mu.parameters(), plain.pi.parameters()),
    }
    given = batches(5, ROWS, (value_views, target_views), has_discounts=True)
    assert_alike(agent, plain, given, sigma, *views, names=names)


def test_shifts_by_whole_pixels_are_exact():
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (5, 3, 12, 10), dtype=np.uint8))
    top, left = rng.integers(0, 9, (2, 5))
    assert torch.equal(shift_bilinear(images, top, left, 4).round().to(torch.uint8), shift(images, top, left, 4))
    one, two = (shift(images, top, left + each, 4).float() for each in (0, 1))
    assert torch.allclose(shift_bilinear(images, top, left + 0.5, 4), (one + two) / 2, atol=1e-2)


def test_actions_have_the_noise_of_the_schedule(tiny_agent):
    agent = tiny_agent(kind=ContrastiveDrQ, image_size=None, noise_start=0.5, noise_end=0.1, noise_steps=100)
    seen, _ = make_env("dot").reset(seed=0)
    mean, _ = agent.predict(seen, deterministic=True)
    many = np.repeat(seen[None], 2000, 0)
    for step, sigma in ((0, 0.5), (50, 0.3), (100, 0.1), (1000, 0.1)):
        agent.num_timesteps = step
        assert agent.noise == pytest.approx(sigma)
        drawn, _ = agent.predict(many)
        inside = np.abs(drawn) < 1 - 1e-5
        # A normal distribution cut to (-1, 1): its quantiles inside are those of the normal one.
        spread = np.quantile(drawn - mean, 0.6, axis=0) - np.quantile(drawn - mean, 0.4, axis=0)
        assert spread == pytest.approx(2 * 0.25335 * sigma, rel=0.2)
        assert inside.mean() > 0.9 if step else True
