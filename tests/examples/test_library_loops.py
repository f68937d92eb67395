"""Examples written after three libraries: their losses against the library, and against loops from the formulas."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dipole
from tests.examples.test_examples import example


def lines(module):
    with open(module.__file__) as file:
        return len(file.readlines())


# --- pytorch-metric-learning: a supervised loop ---------------------------------------------------------------------

STEPS, ROWS, CLASSES = 5, 24, 6


def batches():
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 10, generator=draw), torch.randperm(ROWS, generator=draw) % CLASSES) for _ in range(STEPS)
    ]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 8))


def per_positive(z, labels, competitors):
    """Return the mean over anchors of the mean over positives of -log softmax, with the formula's denominators."""
    z = F.normalize(z, dim=1)
    scores = z @ z.T / 0.1
    total = 0
    for i in range(len(z)):
        positives = [j for j in range(len(z)) if j != i and labels[j] == labels[i]]
        terms = [torch.logsumexp(scores[i, competitors(i, p, labels)], 0) - scores[i, p] for p in positives]
        total = total + sum(terms) / len(terms)
    return total / len(z)


def all_others(i, p, labels):  # SupCon, Khosla et al. 2020, Eq. 2
    return [j for j in range(len(labels)) if j != i]


def one_positive(i, p, labels):  # NT-Xent of each pair: that positive, and the other classes
    return [j for j in range(len(labels)) if j == p or labels[j] != labels[i]]


SUPERVISED = {
    "supcon(temperature=0.1)": ("SupConLoss", all_others),
    "tuple(temperature=0.1)": ("NTXentLoss", one_positive),
}


@pytest.mark.parametrize("reference", ["library", "float64"])
@pytest.mark.parametrize("objective", SUPERVISED)
def test_supervised_losses_are_those_of_the_library_and_of_the_formula(objective, reference):
    name, competitors = SUPERVISED[objective]
    module, data = example("metric_learning"), batches()
    module.DEVICE = "cpu"
    model = network()
    found = module.train(model, dipole.objective(objective, dim=8), data, torch.optim.Adam(model.parameters(), lr=0.01))
    if reference == "library":
        loss_func = getattr(pytest.importorskip("pytorch_metric_learning.losses"), name)(temperature=0.1)
        twin, tolerance = network(), 2e-5
    else:
        twin, tolerance = network().double(), 2e-5
        data = [(x.double(), y) for x, y in data]

        def loss_func(z, labels):
            return per_positive(z, labels, competitors)

    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    expected = []
    for x, labels in data:
        optimizer.zero_grad()
        loss = loss_func(twin(x), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found[0] == pytest.approx(expected[0], abs=2e-6)
    assert found == pytest.approx(expected, abs=tolerance)
    assert found[-1] < found[0]


def test_the_supervised_example_learns_the_digits(capsys):
    """Its lines: those of the code cells of TripletMarginLossMNIST.ipynb at commit 216a792c."""
    module = example("metric_learning")
    accuracy = module.main(epochs=2)
    assert accuracy > 0.9
    assert "epoch 2: loss" in capsys.readouterr().out
    assert lines(module) <= 108


# --- sentence-transformers: a fine-tuning ---------------------------------------------------------------------------


TUNED = 4


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The example's module, a small encoder, and what the example's loss saw and gave in each step."""
    from tests.text.tiny_sentences import tiny_model

    module, folder = example("sentence_transformers_trainer"), tmp_path_factory.mktemp("tuned")
    words = {word.strip("?.,") for texts in module.DATA.values() for text in texts for word in text.split()}
    module.DATA = {name: texts[:3] for name, texts in module.DATA.items()}  # copies: equal rows in one batch
    encoder = tiny_model(folder, words=" ".join(sorted(words)))
    start = copy.deepcopy(encoder)
    return module, start, follow(module, encoder, module.build(encoder, "infonce(temperature=0.05)"), folder)


def follow(module, encoder, loss, folder):
    steps = []
    loss.register_forward_hook(lambda _, given, value: steps.append((copy.deepcopy(given[0]), value.item())))
    module.train(encoder, loss, str(folder), TUNED, use_cpu=True, learning_rate=0.01, save_strategy="no")
    assert len(steps) == TUNED
    return steps


def test_fine_tuning_gives_the_losses_of_the_library(tuned, tmp_path):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    module, start, steps = tuned
    encoder = copy.deepcopy(start)
    loss = losses.CachedMultipleNegativesRankingLoss(encoder, scale=20.0, mini_batch_size=32)
    expected = [value for _, value in follow(module, encoder, loss, tmp_path)]
    assert [value for _, value in steps] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == TUNED
    assert lines(module) <= 131  # training_nli_v2.py at commit cad21198


def test_fine_tuning_gives_the_losses_of_the_formula(tuned):
    """Cross-entropy of each anchor over all positives and negatives, by AdamW with a linear schedule, in float64."""
    _, start, steps = tuned
    encoder = copy.deepcopy(start).double()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.01, weight_decay=0)
    for number, (features, value) in enumerate(steps):
        anchors, positives, negatives = (F.normalize(encoder(dict(each))["sentence_embedding"]) for each in features)
        scores = anchors @ torch.cat([positives, negatives]).T / 0.05
        loss = F.cross_entropy(scores, torch.arange(len(anchors)))
        assert value == pytest.approx(loss.item(), abs=1e-4)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - number / TUNED)
        optimizer.step()


# --- stable-baselines3: an agent ------------------------------------------------------------------------------------


def test_an_agent_gives_the_losses_of_a_callback_of_the_library(monkeypatch):
    """The same agent with a callback that is torch and stable-baselines3 alone: CURL's cross-entropy and 0.1 DP."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.preprocessing import preprocess_obs

    from dipole.rl import ContrastiveCallback

    class Plain(BaseCallback):
        def _init_callback(self):
            self.losses, self.encoder = [], self.model.q_net.features_extractor
            self.keys = copy.deepcopy(self.encoder)
            self.W = nn.Parameter(torch.eye(self.encoder.features_dim))
            self.optimizer = torch.optim.Adam([*self.encoder.parameters(), self.W], lr=1e-3)

        def _on_step(self):
            return True

        def _on_rollout_end(self):
            if self.num_timesteps <= self.model.learning_starts:
                return
            count = min(16, self.model.replay_buffer.size())
            images = self.model.replay_buffer.sample(count).observations
            anchors = self.encoder(self.view(images)).double()
            with torch.no_grad():
                keys = self.keys(self.view(images)).double()
            own = torch.eye(count, dtype=torch.bool)
            equal = (images[:, None] == images[None]).flatten(2).all(2)  # drawn twice: no negative
            logits = (anchors @ self.W.double() @ keys.T).masked_fill(equal & ~own, -math.inf)
            distance = (1 - (F.normalize(anchors) @ F.normalize(keys).T)[~equal]) / 2
            margin = ((distance - 0.1) * (distance - 0.5)).clamp(max=0).abs().mean()
            loss = F.cross_entropy(logits, torch.arange(count)) + 0.1 * margin
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
            with torch.no_grad():
                for slow, fast in zip(self.keys.parameters(), self.encoder.parameters(), strict=True):
                    slow.mul_(0.95).add_(fast, alpha=0.05)

        def view(self, images):
            top, left = np.random.randint(0, 9, (2, len(images)))
            padded = F.pad(images.float(), (4,) * 4, mode="replicate").to(images.dtype)
            moved = [x[:, t : t + 40, s : s + 40] for x, t, s in zip(padded, top, left, strict=True)]
            return preprocess_obs(torch.stack(moved), self.model.observation_space)

    found, step = [], ContrastiveCallback._step
    monkeypatch.setattr(ContrastiveCallback, "_step", lambda self, seen: found.append(step(self, seen)) or found[-1])
    module = example("sb3_agent")
    agent = module.main(steps=64, batch_size=16)
    plain = Plain()
    module.ContrastiveCallback = lambda objective, batch_size: plain
    twin = module.main(steps=64, batch_size=16)
    assert len(found) == len(plain.losses) >= 5
    assert found[0] == pytest.approx(plain.losses[0], abs=2e-5)
    assert found == pytest.approx(plain.losses, rel=1e-3)
    assert math.isclose(agent.num_timesteps, twin.num_timesteps)
    for ours, theirs in zip(agent.policy.parameters(), twin.policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    assert lines(module) <= 79  # "Monitoring Training" of its examples, an agent with a callback, at commit e05d2dbe
