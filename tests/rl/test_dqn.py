"""A Rainbow-like DQN: targets and losses against formulas in float64, replay by priority, noise, learning."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("stable_baselines3")

from dipole.core.utils.errors import ConfigError
from dipole.rl import ContrastiveDQN, ContrastiveSAC, EvaluationCallback, make_env, resume
from dipole.rl.description import open_agent
from dipole.rl.dqn import project, quantile_loss
from dipole.rl.prioritized import PrioritizedFrameReplayBuffer, SumTree
from dipole.rl.rainbow import NoisyLinear
from dipole.rl.replay import FrameBatch
from dipole.rl.snapshots import save

sys.path.insert(0, str(Path(__file__).parent))
from plain_networks import Adam

SMALL = {
    "architecture": "uniform",
    "hidden": (32,),
    "filters": 8,
    "layers": 2,
    "features": 16,
    "batch_size": 8,
    "learning_starts": 10,
    "buffer_size": 400,
    "n_steps": 3,
    "seed": 0,
    "device": "cpu",
}
BATCH, ACTIONS, RATE = 6, 5, 1e-3


def small(env=None, **settings):
    return ContrastiveDQN("CnnPolicy", make_env("dot-discrete") if env is None else env, **{**SMALL, **settings})


# The update --------------------------------------------------------------------------------------------------------


def noise(size):
    drawn = torch.randn(size, dtype=torch.float64)
    return drawn.sign() * drawn.abs().sqrt()


class PlainRainbow:
    """Value, advantage and contrast branches written out on dictionaries of float64 tensors."""

    def __init__(self, agent):
        self.agent = agent
        self.settings = agent.settings
        policy = agent.policy
        self.online = {name: p.detach().clone().requires_grad_() for name, p in policy.q_net.named_parameters()}
        self.target = {name: p.detach().clone() for name, p in policy.q_net_target.named_parameters()}
        self.key = {name: p.detach().clone() for name, p in policy.key_encoder.named_parameters()}
        self.W = policy.contrast.terms[0].W.detach().clone().requires_grad_()
        self.adam = Adam(list(self.online.values()), RATE, 0.9)
        self.contrast_adam = Adam([self.W], RATE, 0.9)

    def draw(self):
        """Noise in the order of the modules: for each layer inputs, then outputs."""
        found = {}
        for branch in ("advantage", "value"):
            if f"{branch}.0.weight_sigma" in self.online:
                for layer in (0, 2):
                    outputs, inputs = self.online[f"{branch}.{layer}.weight"].shape
                    found[branch, layer] = noise(inputs), noise(outputs)
        return found

    def linear(self, weights, name, layer, x, drawn):
        weight, bias = weights[f"{name}.{layer}.weight"], weights[f"{name}.{layer}.bias"]
        if (name, layer) in drawn:
            e_in, e_out = drawn[name, layer]
            weight = weight + weights[f"{name}.{layer}.weight_sigma"] * e_out[:, None] * e_in[None, :]
            bias = bias + weights[f"{name}.{layer}.bias_sigma"] * e_out
        return x @ weight.T + bias

    def maps(self, weights, prefix, images):
        x = images.double() / 255
        for index, stride in enumerate((2, 1)):
            weight, bias = (weights[f"{prefix}convs.{index}.{what}"] for what in ("weight", "bias"))
            x = F.conv2d(x, weight, bias, stride=stride)
            x = x * (x > 0)
        return x.reshape(len(x), -1)

    def embed(self, weights, prefix, h):
        for layer in (0, 3):
            h = h @ weights[f"{prefix}project.{layer}.weight"].T + weights[f"{prefix}project.{layer}.bias"]
            h = (h - h.mean(1, keepdim=True)) / torch.sqrt(h.var(1, unbiased=False, keepdim=True) + 1e-5)
            h = h * (h > 0) if layer == 0 else h
        return h

    def outputs(self, weights, images, drawn):
        h = self.maps(weights, "features_extractor.", images)
        streams = {}
        for name in ("advantage", "value"):
            if f"{name}.0.weight" in weights:
                x = self.linear(weights, name, 0, h, drawn)
                streams[name] = self.linear(weights, name, 2, x * (x > 0), drawn)
        atoms = 1 if self.settings.distribution == "none" else self.settings.atoms
        a = streams["advantage"].reshape(len(h), ACTIONS, atoms)
        if "value" in streams:
            a = streams["value"][:, None, :] + a - a.sum(1, keepdim=True) / ACTIONS
        return a

    def mean(self, outputs):
        if self.settings.distribution == "c51":
            z = torch.linspace(-10, 10, self.settings.atoms, dtype=torch.float64)
            return (torch.softmax(outputs, 2) * z).sum(2)
        return outputs.mean(2)

    def loss(self, taken, following, reward, discount):
        """One transition's loss: (N,) outputs of the action taken and of the one that follows."""
        kind, n = self.settings.distribution, len(taken)
        if kind == "c51":
            z = [-10 + 20 * i / (n - 1) for i in range(n)]
            chances, mass = torch.softmax(following, 0), [0.0] * n
            for j in range(n):
                place = (min(max(reward + discount * z[j], -10), 10) + 10) / (20 / (n - 1))
                low = min(int(place), n - 2)
                mass[low] += (1 - (place - low)) * float(chances[j])
                mass[low + 1] += (place - low) * float(chances[j])
            return -sum(m * p for m, p in zip(mass, torch.log_softmax(taken, 0), strict=True))
        total = 0.0
        for i in range(n):
            for j in range(n):
                u = reward + discount * following[j] - taken[i]
                huber = 0.5 * u**2 if abs(float(u.detach())) <= 1 else abs(u) - 0.5
                weight = abs((i + 0.5) / n - (1.0 if float(u.detach()) < 0 else 0.0)) if kind == "quantile" else 1.0
                total = total + weight * huber / n
        return total

    def update(self, batch):
        noise_online, noise_target = self.draw(), self.draw()
        chosen = self.settings
        with torch.no_grad():
            following = self.outputs(self.target, batch.next_observations, noise_target)
            choosing = self.outputs(self.online, batch.next_observations, noise_online) if chosen.double else following
            best = self.mean(choosing).argmax(1)
        now = self.outputs(self.online, batch.observations, noise_online)
        loss = 0.0
        for b in range(BATCH):
            discount = float((1 - batch.dones[b]) * batch.discounts[b])
            each = self.loss(now[b, int(batch.actions[b])], following[b, best[b]], float(batch.rewards[b]), discount)
            loss = loss + float(batch.weights[b]) * each / BATCH
        anchors = self.embed(
            self.online, "features_extractor.", self.maps(self.online, "features_extractor.", batch.positives[:, 0])
        )
        keys = self.embed(self.key, "", self.maps(self.key, "", batch.positives[:, 1]))
        loss = loss + F.cross_entropy(anchors @ self.W @ keys.T, torch.arange(BATCH))
        gradient = torch.autograd.grad(loss, [*self.adam.parameters, self.W])
        norm = torch.sqrt(sum((g**2).sum() for g in gradient))
        scale = min(1.0, chosen.gradient_clip / (float(norm) + 1e-6))
        self.adam.step([g * scale for g in gradient[:-1]])
        self.contrast_adam.step([gradient[-1] * scale])
        with torch.no_grad():
            for name, key in self.key.items():
                key.copy_(0.001 * self.online[f"features_extractor.{name}"] + 0.999 * key)


def batches():
    rng = np.random.default_rng(0)

    def images(*shape):
        return torch.from_numpy(rng.integers(0, 256, (*shape, 9, 24, 24), dtype=np.uint8))

    for _ in range(4):
        yield FrameBatch(
            images(BATCH),
            images(BATCH),
            images(BATCH, 2),
            torch.from_numpy(rng.integers(0, ACTIONS, (BATCH, 1)).astype(float)),
            torch.from_numpy(rng.normal(size=(BATCH, 1))),
            torch.from_numpy((rng.uniform(size=(BATCH, 1)) < 0.3).astype(float)),
            np.arange(BATCH)[:, None],
            torch.from_numpy(0.99 ** rng.integers(1, 4, (BATCH, 1))),
            torch.from_numpy(rng.uniform(0.2, 1, (BATCH, 1))),
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"distribution": "c51", "atoms": 11},
        {"distribution": "quantile", "atoms": 5, "gradient_clip": 0.5},
        {"distribution": "none", "double": False, "dueling": False, "noisy": False},
    ],
    ids=lambda settings: settings["distribution"],
)
def test_four_updates_agree_with_the_plain_formulas(settings):
    agent = small(
        make_env("dot-discrete", size=24),
        objective="infonce(similarity=bilinear, temperature=1)",
        learning_rate=RATE,
        adam_epsilon=1e-8,
        prioritized=False,
        **settings,
    )
    agent.policy.double()
    plain = PlainRainbow(agent)
    for seed, batch in enumerate(batches()):
        for update in (agent.update, plain.update):
            torch.manual_seed(seed)
            # randn in float64 and float32 are other numbers: the modules draw in their own precision, which is double.
            update(batch)
    for found, expected in (
        (agent.policy.q_net.named_parameters(), plain.online),
        (agent.policy.key_encoder.named_parameters(), plain.key),
    ):
        for name, value in found:
            assert (value - expected[name]).abs().max() < 1e-8, name
    assert (agent.policy.contrast.terms[0].W - plain.W).abs().max() < 1e-8


def test_targets_follow_every_so_many_updates():
    agent = small(objective="none", target_every=3, prioritized=False)
    agent.learn(12)
    agent._n_updates = 0
    same = []
    for _ in range(6):
        agent.update(agent._sample(8))
        one, two = (dict(net.named_parameters()) for net in (agent.policy.q_net, agent.policy.q_net_target))
        same.append(torch.equal(one["advantage.2.bias"], two["advantage.2.bias"]))
    assert same == [False, False, True, False, False, True]


def test_projection_keeps_mass_and_mean():
    support = torch.linspace(-2, 2, 9, dtype=torch.float64)
    chances = torch.rand(4, 9, dtype=torch.float64).softmax(1)
    values = 0.3 + 0.5 * support.repeat(4, 1)  # inside the support
    found = project(values, chances, support)
    assert torch.allclose(found.sum(1), torch.ones(4, dtype=torch.float64))
    assert torch.allclose((found * support).sum(1), (values * chances).sum(1))
    edge = project(torch.full((1, 9), 7.0, dtype=torch.float64), chances[:1], support)
    assert edge[0, -1] == pytest.approx(1.0)


def test_the_quantile_loss_is_least_at_the_quantiles():
    torch.manual_seed(0)
    sample = 100 * torch.randn(1, 4001, dtype=torch.float64)  # Huber's part of the loss is thin at this scale
    theta = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=5.0)
    for step in range(600):
        optimizer.zero_grad()
        quantile_loss(theta, sample).sum().backward()
        optimizer.param_groups[0]["lr"] = 5.0 * 0.99**step
        optimizer.step()
    expected = sample.quantile(torch.tensor([0.125, 0.375, 0.625, 0.875], dtype=torch.float64))
    assert torch.allclose(theta.detach(), expected.view(1, 4), atol=3)


# Noise -------------------------------------------------------------------------------------------------------------


def test_noisy_layers():
    torch.manual_seed(0)
    layer, x = NoisyLinear(16, 4), torch.randn(3, 16)
    quiet = layer(x)
    assert torch.allclose(quiet, F.linear(x, layer.weight, layer.bias))
    layer.draw()
    assert torch.linalg.matrix_rank(torch.outer(layer.noise_out, layer.noise_in)) == 1
    assert not torch.allclose(layer(x), quiet)
    layer.silence()
    assert torch.equal(layer(x), quiet)
    many = torch.stack([(layer.draw(), layer.noise_in)[1] ** 2 for _ in range(4000)])
    assert many.mean() == pytest.approx((2 / np.pi) ** 0.5, rel=0.05)  # E f(e)^2 = E |e|


def test_deterministic_actions_have_no_noise_and_touch_no_generator():
    agent = small()
    seen = make_env("dot-discrete").reset(seed=0)[0]
    state = torch.get_rng_state()
    actions = {int(agent.predict(seen, deterministic=True)[0]) for _ in range(5)}
    assert len(actions) == 1
    assert torch.equal(state, torch.get_rng_state())
    agent.predict(seen)
    assert not torch.equal(state, torch.get_rng_state())


def test_without_noisy_layers_random_actions_become_rarer():
    agent = small(noisy=False, exploration_fraction=0.5, exploration_start=0.8, exploration_end=0.1)
    agent.learn(100)
    assert agent.exploration_rate == pytest.approx(0.1)
    assert small().learn(20).exploration_rate == 0.0


# Replay ------------------------------------------------------------------------------------------------------------


def test_a_sum_tree_finds_places_by_their_weight():
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 7, 100):
        tree, weights = SumTree(count), np.zeros(count)
        for _ in range(30):
            places = rng.integers(0, count, 5)
            new = rng.uniform(0, 1, 5) * (rng.uniform(size=5) < 0.7)
            tree[places] = new
            for place, weight in zip(places, new, strict=True):
                weights[place] = weight
            assert tree.total == pytest.approx(weights.sum())
            if weights.sum() == 0:
                continue
            sums = rng.uniform(0, weights.sum() * (1 - 1e-12), 50)
            assert np.array_equal(tree.find(sums), np.searchsorted(np.cumsum(weights), sums, side="right"))


def filled(steps=60, size=40, **settings):
    env = make_env("dot-discrete", size=12)
    buffer = PrioritizedFrameReplayBuffer(size, env.observation_space, env.action_space, "cpu", seed=0, **settings)
    seen, _ = env.reset(seed=0)
    for step in range(steps):
        following, reward, _, ended, info = env.step(step % 5)
        buffer.add(seen[None], following[None], np.array([[step % 5]]), np.array([reward]), np.array([ended]), [info])
        seen = env.reset()[0] if ended else following
    return buffer


def test_transitions_are_drawn_by_their_priority():
    buffer = filled(steps=20, exponent=0.5, beta=0.7)
    errors = np.arange(20, dtype=float)
    buffer.set_errors(np.stack([np.zeros(20, int), np.arange(20)], 1), errors)
    env, slot = buffer.draw(200_000)
    share = np.bincount(slot, minlength=20) / len(slot)
    expected = np.sqrt(errors + 1e-6) / np.sqrt(errors + 1e-6).sum()
    assert np.abs(share - expected).max() < 2e-3
    assert not env.any()
    picked = np.array([3, 12, 19])
    weights = buffer.weights(np.zeros(3, int), picked).squeeze(1).numpy()
    plain = (20 * expected[picked]) ** -0.7
    assert weights == pytest.approx(plain / plain.max(), rel=1e-5)


def test_a_new_transition_has_the_largest_priority_and_an_old_one_is_gone():
    buffer = filled(steps=40, size=40)
    buffer.set_errors(np.array([[0, 5]]), np.array([100.0]))
    assert buffer.largest == pytest.approx(10.0)
    env = make_env("dot-discrete", size=12)
    seen, _ = env.reset(seed=1)
    for step in range(8):
        following, reward, _, _, info = env.step(step % 5)
        fault = {"fault": "x"} if step == 7 else {}
        buffer.add(seen[None], following[None], np.array([[1]]), np.array([reward]), np.array([False]), [info | fault])
        seen = following
    weights = buffer.tree[np.arange(40)]
    assert weights[:7] == pytest.approx([10.0] * 7)
    assert weights[7] == 0  # a step that failed
    assert not (buffer.draw(500)[1] == 7).any()


def test_priorities_are_in_the_state():
    buffer, other = filled(), filled(steps=10)
    buffer.set_errors(np.array([[0, 5], [0, 6]]), np.array([4.0, 9.0]))
    other.load_state_dict(buffer.state_dict())
    assert np.array_equal(buffer.tree.sums, other.tree.sums)
    assert np.array_equal(buffer.draw(50)[1], other.draw(50)[1])
    assert other.largest == buffer.largest


# The agent ---------------------------------------------------------------------------------------------------------


def test_it_is_saved_resumed_bit_for_bit_and_played(tmp_path):
    agent = small(objective="infonce + dp")
    agent.learn(60)
    agent.learn(30, reset_num_timesteps=False)
    other = small(objective="infonce + dp")
    other.learn(60)
    save(other, tmp_path / "agent-000000060")
    again = resume(tmp_path / "agent-000000060", make_env("dot-discrete"), "cpu")
    assert type(again) is ContrastiveDQN
    again.learn(30, reset_num_timesteps=False)
    for (name, one), two in zip(agent.policy.state_dict().items(), again.policy.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    assert np.array_equal(agent.replay_buffer.tree.sums, again.replay_buffer.tree.sums)
    again.save(tmp_path / "agent.zip")
    seen = make_env("dot-discrete").reset(seed=0)[0]
    for read in (ContrastiveDQN.load(tmp_path / "agent.zip"), open_agent(tmp_path / "agent.zip")):
        assert np.array_equal(read.predict(seen, deterministic=True)[0], agent.predict(seen, deterministic=True)[0])


def test_callbacks_take_it(tmp_path):
    watching = EvaluationCallback(make_env("dot-discrete"), every=30, episodes=1, folder=tmp_path)
    small().learn(60, callback=watching)
    assert [each.environment_steps for each in watching.history] == [0, 30, 60]


def test_actions_of_the_other_kind_are_refused():
    with pytest.raises(ConfigError, match="ContrastiveDQN needs discrete actions"):
        small(make_env("dot"))
    with pytest.raises(ConfigError, match="ContrastiveSAC needs continuous actions"):
        ContrastiveSAC("CnnPolicy", make_env("dot-discrete"))
    env = make_env("dot-discrete")
    env.reset()
    with pytest.raises(ConfigError, match="integer from 0 to 4, got 5"):
        env.step(5)
