"""Every example runs on a small model, offline, with the losses of its library and of the formulas."""

import copy
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import dipole
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train
from dipole.vision.adapter import VisionAdapter

FOLDER = Path(__file__).resolve().parents[2] / "examples"
TESTED = {"byol", "lightning_module", "metric_learning", "moco", "plain_loop", "sb3_agent", "simclr", "swav"}
TESTED |= {"sentence_transformers_trainer", "transformers_trainer"}


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_of_them_are_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == TESTED


def test_sentence_transformers_trainer(tmp_path):
    from sentence_transformers import SentenceTransformer

    from tests.text.tiny_sentences import tiny_model

    tiny_model(tmp_path / "written").save_pretrained(str(tmp_path / "model"))
    module = example("sentence_transformers_trainer")
    trained = module.main(str(tmp_path / "model"), str(tmp_path / "out"), steps=2, use_cpu=True)
    again = SentenceTransformer(str(tmp_path / "out" / "final"), device="cpu")
    assert len(again) == 3  # a transformer, its pooling, and L
    texts = module.DATA["anchor"]
    found, wanted = (each.encode(texts, convert_to_tensor=True) for each in (again, trained))
    torch.testing.assert_close(found, wanted)


def test_transformers_trainer(tmp_path):
    from safetensors.torch import load_file
    from transformers import ViTConfig, ViTModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTModel(ViTConfig(**small, image_size=16, patch_size=8), add_pooling_layer=False)
    trainer = example("transformers_trainer").main(model, str(tmp_path), steps=3, size=16, use_cpu=True)
    trainer.save_model(str(tmp_path / "final"))
    L = load_file(tmp_path / "final" / "model.safetensors")["objective.terms.1.L"]
    assert bool((torch.eye(16) != L).any())
    assert torch.isfinite(L).all()


def test_lightning_module(tmp_path):
    module = example("lightning_module").main(str(tmp_path), steps=6, size=8)
    kept = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]["objective.terms.2.L"]
    torch.testing.assert_close(kept, module.objective.terms[2].L.detach().cpu())
    assert bool((kept != torch.eye(32)).any())


@pytest.mark.slow
def test_plain_loop_on_two_processes(capsys):
    losses = example("plain_loop").main(steps=4)
    assert losses[-1] < losses[0]
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(FOLDER / "plain_loop.py"), "--steps", "4"],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert [float(each) for each in found.stdout.split()] == pytest.approx(losses, abs=2e-5)


STEPS = 4


def backbone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4))


def batches(name):
    generator = torch.Generator().manual_seed(1)
    sides = [16, 16] + [8] * 6 * (name == "swav")
    return [([torch.rand(12, 1, side, side, generator=generator) for side in sides], None) for _ in range(STEPS)]


def follow(slow, fast, momentum):
    with torch.no_grad():
        for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
            old.mul_(momentum).add_(new, alpha=1 - momentum)


def simclr_loop(net, head, data, model):
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.06)
    for views, _ in data:
        z = F.normalize(head(net(torch.cat(views)).flatten(1)), dim=1)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(24, dtype=torch.bool), -torch.inf)
        yield optimizer, F.cross_entropy(logits, torch.arange(24).roll(12))


def moco_loop(net, head, data, model):
    bank = model.queue.rows.clone()  # lightly's memory bank starts with random unit vectors too
    slow_net, slow_head = copy.deepcopy(net), copy.deepcopy(head)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.06)
    for number, (views, _) in enumerate(data):
        follow(slow_net, net, 0.996)
        follow(slow_head, head, 0.996)
        query = F.normalize(head(net(views[0]).flatten(1)), dim=1)
        key = F.normalize(slow_head(slow_net(views[1]).flatten(1)), dim=1).detach()
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ bank.T], 1) / 0.5
        yield optimizer, F.cross_entropy(logits, torch.zeros(12, dtype=torch.long))
        bank[12 * number : 12 * (number + 1)] = key


def swav_loop(net, head, data, model):
    """Codes of each large crop: iterations of rows and columns, as in the paper's App. A."""
    prototypes = model.objective.terms[0].prototypes.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters(), prototypes], lr=0.001)
    for views, _ in data:
        passes = [head(net(torch.cat(part)).flatten(1)) for part in (views[:2], views[2:])]
        scores = F.normalize(torch.cat(passes), dim=1) @ F.normalize(prototypes, dim=1).T
        codes = torch.exp(scores[:24].detach().double() / 0.05).view(2, 12, -1)
        for _ in range(3):
            codes = codes / codes.sum(1, keepdim=True)
            codes = codes / codes.sum(2, keepdim=True)
        log_shares = torch.log_softmax(scores / 0.1, 1).chunk(8)
        targets = codes.float()
        parts = [-(targets[i] * log_shares[v]).sum(1).mean() for i in range(2) for v in range(8) if v != i]
        yield optimizer, sum(parts) / len(parts)


def byol_loop(net, head, data, model):
    slow_net, slow_head, predictor = copy.deepcopy(net), copy.deepcopy(head), copy.deepcopy(model.predictor)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters(), *predictor.parameters()], lr=0.06)
    for number, (views, _) in enumerate(data):
        if number:
            follow(slow_net, net, 1 - 0.004 * (math.cos(math.pi * (number - 1) / STEPS) + 1) / 2)
            follow(slow_head, head, 1 - 0.004 * (math.cos(math.pi * (number - 1) / STEPS) + 1) / 2)
        z = [head(net(view).flatten(1)) for view in views]
        keys = [slow_head(slow_net(view).flatten(1)).detach() for view in views]
        cosine = [F.cosine_similarity(predictor(z[i]), keys[1 - i]).mean() for i in range(2)]
        yield optimizer, (2 - 2 * cosine[0]) + (2 - 2 * cosine[1])


LOOPS = {"simclr": simclr_loop, "moco": moco_loop, "swav": swav_loop, "byol": byol_loop}


@pytest.mark.parametrize("name", LOOPS)
def test_losses_are_those_of_a_loop_from_the_formula(name):
    module = example(name)
    model = module.build(backbone(), *[STEPS] * (name == "byol")).cpu()
    module.DEVICE = "cpu"
    net, head = copy.deepcopy(model.backbone), copy.deepcopy(model.branch.projector)
    twin = copy.deepcopy(model)
    found = module.train(model, batches(name), epochs=1)
    expected = []
    for optimizer, loss in LOOPS[name](net, head, batches(name), twin):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found[0] == pytest.approx(expected[0], abs=5e-6)
    assert found == pytest.approx(expected, abs=2e-4)  # rounding grows from step to step
    assert len(set(found)) == STEPS


RECIPES = {
    "simclr": ["objective=infonce(temperature=0.5)", "train.momentum=0"],
    "moco": ["train.momentum=0", "objective=infonce(temperature=0.5)", "vision.negatives=4096",
             "vision.moco.momentum=0.996", "vision.moco.batch_negatives=false"],
    "swav": ["objective=swav(prototypes=512)", "vision.encoder.hidden=2048", "vision.encoder.projector_norm=hidden",
             "vision.swav.small_views=2", "vision.swav.small_size=4", "train.optimizer=adam",
             "train.learning_rate=0.001"],
    "byol": ["train.momentum=0", "objective=2*regression", "vision.encoder.hidden=1024", "vision.encoder.dim=256"],
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_losses_are_those_of_the_trainer_on_the_same_batches(name, tmp_path, monkeypatch):
    """A run of a recipe, and the example's loop on the batches and the first weights of that run."""
    started, fed = [], []

    def fit(self, run):
        started.append(copy.deepcopy(self.module.state_dict()))
        started.append((copy.deepcopy(self.module.branches()[0].encoder), copy.deepcopy(run.objective)))
        run.fit()

    def embed(self, batch):
        fed.append(([view.clone() for view in batch.views], batch.labels))
        return original(self, batch)

    original = VisionAdapter.embed
    monkeypatch.setattr(VisionAdapter, "embed", embed)
    monkeypatch.setattr(VisionAdapter, "fit", fit)
    settings = [f"vision.method={name}", "train.epochs=", f"train.steps={STEPS}", "train.batch_size=32",
                "train.warmup=0", "train.optimizer=sgd", "vision.encoder.dim=128", "train.learning_rate=0.06",
                "train.schedule=constant",
                "train.weight_decay=0", "train.log_every=1", "vision.encoder.width=4", "vision.data.limit=64",
                "vision.probe.probes=['knn']", "vision.probe.baselines=false", *RECIPES[name]]  # fmt: skip
    config = load_recipe("digits-simclr", settings).config
    train(config, tmp_path, quiet=True)
    lines = (tmp_path / config.hash / "metrics.jsonl").read_text().splitlines()
    logged = [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]

    state, (encoder, objective) = started
    module = example(name)
    model = module.build(encoder, *[STEPS, 64] if name == "byol" else []).cpu()
    module.DEVICE = "cpu"
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(key == "step" or key.startswith("objective.") for key in missing.missing_keys)
    model.objective.load_state_dict(objective.state_dict())
    assert module.train(model, fed[:STEPS], epochs=1) == pytest.approx(logged, abs=1e-6)


@pytest.mark.parametrize("name", LOOPS)
def test_each_runs_as_it_is(name, capsys, monkeypatch):
    """On one batch of the digits. Each is no longer than lightly's, by its commit e8d317f of August 2026."""
    module = example(name)
    monkeypatch.setattr(module.Digits, "__len__", lambda self: 64)
    monkeypatch.setattr(module, "DataLoader", lambda *data, **given: DataLoader(*data, **given | {"batch_size": 64}))
    module.main(epochs=1)
    assert "epoch: 00" in capsys.readouterr().out
    assert lines(module) <= {"simclr": 69, "moco": 93, "swav": 82, "byol": 105}[name]


def lines(module):
    return len(Path(module.__file__).read_text().splitlines())


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 8))


@pytest.mark.parametrize(
    ("objective", "name"), [("supcon(temperature=0.1)", "SupConLoss"), ("tuple(temperature=0.1)", "NTXentLoss")]
)
def test_supervised_losses_are_those_of_the_library(objective, name):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    module, draw = example("metric_learning"), torch.Generator().manual_seed(1)
    data = [(torch.randn(24, 10, generator=draw), torch.randperm(24, generator=draw) % 6) for _ in range(5)]
    module.DEVICE = "cpu"
    model, twin = network(), network()
    found = module.train(model, dipole.objective(objective, dim=8), data, torch.optim.Adam(model.parameters(), lr=0.01))
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    expected = []
    for x, labels in data:
        optimizer.zero_grad()
        loss = getattr(losses, name)(temperature=0.1)(twin(x), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found[0] == pytest.approx(expected[0], abs=2e-6)
    assert found == pytest.approx(expected, abs=2e-5)
    assert found[-1] < found[0]


def test_the_supervised_example_learns_the_digits(capsys):
    """Its lines: those of the code cells of TripletMarginLossMNIST.ipynb at commit 216a792c."""
    module = example("metric_learning")
    assert module.main(epochs=2) > 0.9
    assert "epoch 2: loss" in capsys.readouterr().out
    assert lines(module) <= 108


TUNED = 4


def test_fine_tuning_gives_the_losses_of_the_library(tmp_path):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    from tests.text.tiny_sentences import tiny_model

    module = example("sentence_transformers_trainer")
    words = {word.strip("?.,") for texts in module.DATA.values() for text in texts for word in text.split()}
    module.DATA = {name: texts[:3] for name, texts in module.DATA.items()}  # copies: equal rows in one batch
    encoder = tiny_model(tmp_path, words=" ".join(sorted(words)))
    twin = copy.deepcopy(encoder)
    theirs = losses.CachedMultipleNegativesRankingLoss(twin, scale=20.0, mini_batch_size=32)
    found = []
    for model, loss in ((encoder, module.build(encoder, "infonce(temperature=0.05)")), (twin, theirs)):
        seen = []
        loss.register_forward_hook(lambda _, given, value, seen=seen: seen.append(value.item()))
        module.train(model, loss, str(tmp_path), TUNED, use_cpu=True, learning_rate=0.01, save_strategy="no")
        found.append(seen)
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert len(found[0]) == len(set(found[1])) == TUNED
    assert lines(module) <= 131  # training_nli_v2.py at commit cad21198


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
