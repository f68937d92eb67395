"""Updates of the agents against the plain formulas of CURL's repository and of DrQ-v2, in float64; DrQ's noise."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dipole.rl import ContrastiveCallback, ContrastiveDrQ, ContrastiveSAC, EvaluationCallback, make_env
from dipole.rl.augmentation import shift, shift_bilinear
from dipole.rl.drq import noise_at
from dipole.rl.sampling import FrameBatch
from tests.rl.conftest import TINY


def positive(x):
    """Rectifier with gradient 0 at 0, where delta-orthogonal layers start with many exact zeros."""
    return x * (x > 0)


def normalised(rest, h):
    """Linear, then layer normalisation."""
    weight, bias, scale, offset = rest
    z = h @ weight.T + bias
    mean, variance = z.mean(1, keepdim=True), z.var(1, unbiased=False, keepdim=True)
    return (z - mean) / torch.sqrt(variance + 1e-5) * scale + offset


class Encoder:
    """Weights as a list of tensors: four convolutions, linear, layer normalisation."""

    def __init__(self, module, offset=0.0):
        self.offset = offset
        self.convs = [(c.weight.detach().clone(), c.bias.detach().clone()) for c in module.convs]
        self.rest = [p.detach().clone() for p in (module.fc.weight, module.fc.bias, module.ln.weight, module.ln.bias)]

    def tensors(self):
        return [t for pair in self.convs for t in pair] + self.rest

    def track(self):
        for tensor in self.tensors():
            tensor.requires_grad_()
        return self

    def features(self, images):
        x = images.double() / 255 - self.offset
        for stride, (weight, bias) in zip([2, 1, 1, 1], self.convs, strict=True):
            x = positive(F.conv2d(x, weight, bias, stride=stride))
        return x.reshape(len(x), -1)

    def head(self, h):
        return normalised(self.rest, h)

    def __call__(self, images):
        return self.head(self.features(images))


class MLP:
    def __init__(self, *linears):
        self.layers = [(m.weight.detach().clone(), m.bias.detach().clone()) for m in linears]

    def tensors(self):
        return [t for pair in self.layers for t in pair]

    def __call__(self, x):
        for index, (weight, bias) in enumerate(self.layers):
            x = x @ weight.T + bias
            x = positive(x) if index < len(self.layers) - 1 else x
        return x


def linears(module):
    return [m for m in module.modules() if isinstance(m, torch.nn.Linear)]


class Adam:
    """Kingma & Ba 2015, bias corrected."""

    def __init__(self, parameters, rate, beta):
        self.parameters, self.rate, self.betas, self.step_count = parameters, rate, (beta, 0.999), 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, gradients):
        self.step_count += 1
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            m.mul_(self.betas[0]).add_((1 - self.betas[0]) * g)
            v.mul_(self.betas[1]).add_((1 - self.betas[1]) * g * g)
            corrected = m / (1 - self.betas[0] ** self.step_count)
            p -= self.rate * corrected / (torch.sqrt(v / (1 - self.betas[1] ** self.step_count)) + 1e-8)


ACTIONS, BATCH, UPDATES = 2, 8, 6
DISCOUNT, TAU, ENCODER_TAU = 0.99, 0.01, 0.05


class Plain:
    """The networks that both agents have."""

    def __init__(self, policy, offset=0.0):
        self.encoder, self.key = Encoder(policy.encoder, offset).track(), Encoder(policy.key_encoder, offset)
        self.q, self.q_target = (
            [MLP(*linears(net)) for net in critic.q_networks] for critic in (policy.critic, policy.critic_target)
        )


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
        "encoder": (policy.encoder.parameters(), plain.encoder.tensors()),
        "key encoder": (policy.key_encoder.parameters(), plain.key.tensors()),
        "Q1": (policy.critic.q_networks[0].parameters(), plain.q[0].tensors()),
        "Q2": (policy.critic.q_networks[1].parameters(), plain.q[1].tensors()),
        "Q2 target": (policy.critic_target.q_networks[1].parameters(), plain.q_target[1].tensors()),
        "W": ([], []) if plain.W is None else ([policy.contrast.terms[0].W], [plain.W]),
        **names,
    }
    for name, (ours, theirs) in expected.items():
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine - other).abs().max() < 1e-8, name
    assert all(not torch.equal(start[name], value) for name, value in policy.state_dict().items())


class PlainCurl(Plain):
    """The repository's agent written out: curl_sac.py at 8416d6e, formulas only."""

    def __init__(self, agent, twin, encoder_steps):
        policy = agent.policy
        super().__init__(policy)
        self.twin, self.encoder_steps = twin, encoder_steps
        self.actor_head = Encoder(policy.actor.features_extractor).rest
        mu, log_std = policy.actor.mu, policy.actor.log_std
        self.trunk = MLP(*linears(policy.actor.latent_pi))
        self.out = [t.detach().clone() for t in (mu.weight, mu.bias, log_std.weight, log_std.bias)]
        self.log_alpha = agent.log_ent_coef.detach().clone()
        self.W = policy.contrast.terms[0].W.detach().clone()
        for tensor in [*(t for q in self.q for t in q.tensors()), *self.actor_tensors(), self.log_alpha, self.W]:
            tensor.requires_grad_()
        self.critic_adam = Adam([*self.encoder.tensors(), *(t for q in self.q for t in q.tensors())], 1e-3, 0.9)
        self.actor_adam = Adam(self.actor_tensors(), 1e-3, 0.9)
        self.alpha_adam = Adam([self.log_alpha], 1e-4, 0.5)
        self.encoder_adam = Adam(self.encoder.tensors(), 1e-3, 0.9)
        self.contrast_adam = Adam([*self.encoder.tensors(), self.W], 1e-3, 0.9)

    def actor_tensors(self):
        return [*self.actor_head, *self.trunk.tensors(), *self.out]

    def policy(self, h):
        latent = positive(self.trunk(normalised(self.actor_head, h)))
        mean = latent @ self.out[0].T + self.out[1]
        log_std = -10 + 6 * (torch.tanh(latent @ self.out[2].T + self.out[3]) + 1)
        noise = torch.randn_like(mean)
        action = torch.tanh(mean + log_std.exp() * noise)
        log_pi = (-0.5 * noise**2 - log_std).sum(1, keepdim=True) - 0.5 * np.log(2 * np.pi) * ACTIONS
        return action, log_pi - torch.log(1 - action**2 + 1e-6).sum(1, keepdim=True)

    def update(self, number, batch):
        obs, nxt = batch.observations, batch.next_observations
        with torch.no_grad():
            action, log_pi = self.policy(self.encoder.features(nxt))
            z = self.key(nxt)
            v = torch.minimum(*(q(torch.cat([z, action], 1)) for q in self.q_target)) - self.log_alpha.exp() * log_pi
            y = batch.rewards + (1 - batch.dones) * DISCOUNT * v
        z = self.encoder(obs)
        loss = sum(((q(torch.cat([z, batch.actions], 1)) - y) ** 2).mean() for q in self.q)
        loss = loss / 2 if self.twin == "half" else loss
        self.critic_adam.step(torch.autograd.grad(loss, self.critic_adam.parameters))
        if number % 2 == 0:
            h = self.encoder.features(obs).detach()
            action, log_pi = self.policy(h)
            z = self.encoder.head(h)
            q = torch.minimum(*(each(torch.cat([z, action], 1)) for each in self.q))
            loss = (self.log_alpha.exp().detach() * log_pi - q).mean()
            gradient = torch.autograd.grad(loss, self.actor_adam.parameters)
            alpha_loss = (self.log_alpha.exp() * (-log_pi + ACTIONS).detach()).mean()
            alpha_gradient = torch.autograd.grad(alpha_loss, [self.log_alpha])
            self.actor_adam.step(gradient)
            self.alpha_adam.step(alpha_gradient)
            with torch.no_grad():
                for online, target in zip(self.q, self.q_target, strict=True):
                    for p, t in zip(online.tensors(), target.tensors(), strict=True):
                        t.copy_(TAU * p + (1 - TAU) * t)
                for p, t in zip(self.encoder.tensors(), self.key.tensors(), strict=True):
                    t.copy_(ENCODER_TAU * p + (1 - ENCODER_TAU) * t)
        anchors = self.encoder(obs)
        keys = self.key(batch.positives[:, 0]).detach()
        logits = anchors @ self.W @ keys.T
        loss = F.cross_entropy(logits - logits.max(1, keepdim=True).values.detach(), torch.arange(BATCH))
        gradient = torch.autograd.grad(loss, self.contrast_adam.parameters)
        if self.encoder_steps == 2:
            self.encoder_adam.step(gradient[:-1])
        self.contrast_adam.step(gradient)


def batches():
    rng = np.random.default_rng(0)

    def images(*shape):
        return torch.from_numpy(rng.integers(0, 256, (BATCH, *shape, 9, 24, 24), dtype=np.uint8))

    for _ in range(UPDATES):
        yield FrameBatch(
            images(), images(), images(1), torch.from_numpy(rng.uniform(-1, 1, (BATCH, ACTIONS))),
            torch.from_numpy(rng.uniform(size=(BATCH, 1))),
            torch.from_numpy((rng.uniform(size=(BATCH, 1)) < 0.2).astype(float)), np.arange(BATCH)[:, None],
        )  # fmt: skip


def double_agent(**settings):
    """An agent in float64 with optimizers that hold its float64 weights."""
    agent = ContrastiveSAC(
        "CnnPolicy", make_env("dot"), image_size=24, hidden=(32, 32), filters=8, chunk=3, seed=0, device="cpu",
        **settings,
    )  # fmt: skip
    agent.policy.double()
    agent.log_ent_coef = agent.log_ent_coef.detach().double().requires_grad_()
    agent.ent_coef_optimizer = agent.policy.adam([agent.log_ent_coef], 1e-4, 0.5)
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
        "actor head": (list(policy.actor.features_extractor.parameters())[8:], plain.actor_head),
        "actor": ([p for part in of_actor for p in part.parameters()], [*plain.trunk.tensors(), *plain.out]),
    }
    assert_alike(agent, plain, batches(), names=names)


def test_joint_backward_steps_the_encoder_once_for_the_sum():
    agent = double_agent(joint_backward=True)
    plain = PlainCurl(agent, "sum", 1)
    batch = next(batches())
    torch.manual_seed(0)
    agent.update(batch)
    torch.manual_seed(0)
    with torch.no_grad():
        action, log_pi = plain.policy(plain.encoder.features(batch.next_observations))
        z = plain.key(batch.next_observations)
        v = torch.minimum(*(q(torch.cat([z, action], 1)) for q in plain.q_target)) - plain.log_alpha.exp() * log_pi
        y = batch.rewards + (1 - batch.dones) * DISCOUNT * v
    z = plain.encoder(batch.observations)
    critic = sum(((q(torch.cat([z, batch.actions], 1)) - y) ** 2).mean() for q in plain.q)
    logits = z @ plain.W @ plain.key(batch.positives[:, 0]).T
    total = critic + F.cross_entropy(logits, torch.arange(BATCH))
    plain.critic_adam.step(torch.autograd.grad(total, plain.critic_adam.parameters))
    for mine, other in zip(agent.policy.encoder.parameters(), plain.encoder.tensors(), strict=True):
        assert (mine - other).abs().max() < 1e-8


def test_detach_encoder_keeps_the_critic_loss_out_of_the_convolutions():
    agent = double_agent(detach_encoder=True, objective="none")
    before = [p.detach().clone() for p in agent.policy.encoder.parameters()]
    agent.update(next(batches()))
    changed = [not torch.equal(a, b) for a, b in zip(before, agent.policy.encoder.parameters(), strict=True)]
    assert changed == [False] * 8 + [True] * 4  # four convolutions, then linear and normalisation


ROWS, RATE = 6, 1e-3


def small(env=None, **settings):
    env = make_env("dot") if env is None else env
    return ContrastiveDrQ("CnnPolicy", env, **{**TINY, "image_size": None, **settings})


class PlainDrQ(Plain):
    """The agent of Yarats et al. 2021 written out, with the averages of Kostrikov et al. 2020 and InfoNCE."""

    def __init__(self, agent):
        policy = agent.policy
        super().__init__(policy, 0.5)
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

    def update(self, _, batch, sigma, target_views, value_views):
        with torch.no_grad():
            h = self.encoder.features(batch.next_observations)  # the online convolutions
            action = self.act(h, sigma)
            z = self.embed(self.key.rest, h)
            v = torch.minimum(*(q(torch.cat([z, action], 1)) for q in self.q_target))
            mean = sum(v[k * ROWS : (k + 1) * ROWS] for k in range(target_views)) / target_views
            y = batch.rewards + (1 - batch.dones) * batch.discounts * mean
        h = self.encoder.features(batch.observations)
        z = self.embed(self.encoder.rest, h)
        loss = 0.0
        for m in range(value_views):
            part = z[m * ROWS : (m + 1) * ROWS]
            for q in self.q:
                loss = loss + ((q(torch.cat([part, batch.actions], 1)) - y) ** 2).mean() / value_views
        if self.W is not None:
            keys = self.embed(self.key.rest, self.key.features(batch.positives[:, 0])).detach()
            loss = loss + F.cross_entropy(z[:ROWS] @ self.W @ keys.T, torch.arange(ROWS))
        own = [] if self.W is None else [self.W]
        gradient = torch.autograd.grad(loss, [*self.critic_adam.parameters, *own])
        self.critic_adam.step(gradient[: len(self.critic_adam.parameters)])
        if own:
            self.contrast_adam.step(gradient[-1:])
        h = h[:ROWS].detach()  # of the convolutions before the step, as in the repository
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


def batches_of_drq(target_views, value_views):
    rng = np.random.default_rng(0)

    def images(*shape):
        return torch.from_numpy(rng.integers(0, 256, (*shape, 9, 24, 24), dtype=np.uint8))

    for _ in range(5):
        yield FrameBatch(
            images(value_views * ROWS), images(target_views * ROWS), images(ROWS, 1),
            torch.from_numpy(rng.uniform(-1, 1, (ROWS, ACTIONS))), torch.from_numpy(rng.uniform(size=(ROWS, 1))),
            torch.from_numpy((rng.uniform(size=(ROWS, 1)) < 0.3).astype(float)), np.arange(ROWS)[:, None],
            torch.from_numpy(0.99 ** rng.integers(1, 4, (ROWS, 1))),
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
    policy = agent.policy
    names = {
        "trunk of the actor": (list(policy.actor.features_extractor.parameters())[8:], plain.trunk),
        "actor": (policy.actor.mu.parameters(), plain.pi.tensors()),
    }
    views = target_views, value_views
    assert_alike(agent, plain, batches_of_drq(*views), sigma, *views, names=names)


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
