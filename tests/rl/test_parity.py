"""Six updates of the agent against the plain formulas of the CURL repository, in float64."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("stable_baselines3")

from dipole.rl import ContrastiveSAC, make_env
from dipole.rl.sampling import FrameBatch
from tests.rl.plain_networks import MLP, Adam, Encoder, linears, normalised, positive

ACTIONS, BATCH, UPDATES = 2, 8, 6
DISCOUNT, TAU, ENCODER_TAU = 0.99, 0.01, 0.05


class PlainCurl:
    """The repository's agent written out: curl_sac.py at 8416d6e, formulas only."""

    def __init__(self, agent, twin, encoder_steps):
        policy = agent.policy
        self.twin, self.encoder_steps = twin, encoder_steps
        self.encoder = Encoder(policy.encoder).track()
        self.key = Encoder(policy.key_encoder)
        self.q = [MLP(*linears(net)) for net in policy.critic.q_networks]
        self.q_target = [MLP(*linears(net)) for net in policy.critic_target.q_networks]
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
    start = copy.deepcopy(agent.policy.state_dict())
    for seed, batch in enumerate(batches()):
        torch.manual_seed(seed)
        agent.update(batch)
        torch.manual_seed(seed)
        plain.update(seed, batch)
    policy = agent.policy
    expected = {
        "encoder": (policy.encoder.parameters(), plain.encoder.tensors()),
        "key encoder": (policy.key_encoder.parameters(), plain.key.tensors()),
        "W": ([policy.contrast.terms[0].W], [plain.W]),
        "temperature": ([agent.log_ent_coef], [plain.log_alpha]),
        "actor head": (list(policy.actor.features_extractor.parameters())[8:], plain.actor_head),
        "actor": (
            [*policy.actor.latent_pi.parameters(), *policy.actor.mu.parameters(), *policy.actor.log_std.parameters()],
            [*plain.trunk.tensors(), *plain.out],
        ),
        "Q": (policy.critic.q_networks[0].parameters(), plain.q[0].tensors()),
        "Q target": (policy.critic_target.q_networks[1].parameters(), plain.q_target[1].tensors()),
    }
    for name, (ours, theirs) in expected.items():
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine - other).abs().max() < 1e-8, name
    moved = [not torch.equal(start[name], value) for name, value in policy.state_dict().items()]
    assert all(moved)


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
