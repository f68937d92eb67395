"""The frameworks in a loop of your own: plain backbones, losses of independent formulas, state, and mistakes."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dipole
from dipole import vision
from dipole.core.utils.errors import ConfigError, PairsError

SUPCON_LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
WITH_DEFAULT = ("BYOL", "SimSiam", "MoCoV3", "NNCLR", "SwAV", "SupCon")
SMALL = {"MoCo": {"queue": 20}, "NNCLR": {"support": 20}, "SwAV": {"queue": 20}}


def conv():
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))


def views(count=2, images=6, side=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(images, 3, side, side, generator=generator) for _ in range(count)]


def build(name, **given):
    """A framework by name, with small queues. CLIP reads six words for each image."""
    torch.manual_seed(0)
    if name not in WITH_DEFAULT:
        given.setdefault("objective", "infonce(temperature=0.2) + 0.1*dp")
    if name == "CLIP":
        return vision.CLIP(conv(), nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 8)), **given)
    return getattr(vision, name)(conv(), **SMALL.get(name, {}), **given)


def arguments(name, seed=0):
    if name == "CLIP":
        return views(1, seed=seed), torch.arange(36).view(6, 6) % 10
    return (views(seed=seed), SUPCON_LABELS) if name == "SupCon" else (views(seed=seed),)


def step(model, given, rate=0.05):
    model.zero_grad()
    loss = model(*given)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
    model.after_step()
    return float(loss.detach())


@pytest.mark.parametrize("name", [*WITH_DEFAULT, "SimCLR", "MoCo", "CMC", "CLIP"])
def test_a_plain_backbone_trains_and_continues_from_its_state(name):
    """A second model that loads the state continues with the same losses: queue, momentum copy, seed and objective."""
    model = build(name)
    first = [step(model, arguments(name, seed)) for seed in range(3)]
    state = copy.deepcopy(model.state_dict())
    other = build(name)
    other.load_state_dict(state)
    later = [arguments(name, seed) for seed in (3, 4)]
    assert [step(model, given) for given in later] == [step(other, given) for given in later]
    assert len(set(first)) == 3
    assert int(state["step"]) == 3
    names = {"MoCo": ["queue.rows", "key.encoder.0.weight"], "BYOL": ["target.encoder.0.weight"]}
    assert set(names.get(name, ["queue.rows"] * (name == "NNCLR"))) <= set(state)
    features = model.features(views()[0])
    assert features.shape == (6, 12 if name == "CMC" else 6)


@pytest.mark.parametrize(
    ("backbone", "width"),
    [
        (nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1)), 5),  # features (n, 5, 1, 1)
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 10 * 10, 7)), 7),  # images of one size
        (nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(4 * 28 * 28, 9)), 9),  # 224 pixels
        (nn.Sequential(nn.Conv2d(1, 4, 3, groups=1), nn.AdaptiveMaxPool2d(2)), 16),  # grey images
    ],
)
def test_the_width_of_features_is_measured(backbone, width):
    backbone[0].eval()
    modes = [part.training for part in backbone.modules()]
    model = vision.SimCLR(backbone, "infonce")
    assert model.branch.projector[0].in_features == width
    assert [part.training for part in backbone.modules()] == modes
    assert vision.BYOL(backbone, head=nn.Identity()).predictor[0].in_features == width


def test_widths_are_measured_without_a_trace_and_not_needed_with_a_head():
    backbone = conv()
    vision.MoCo(backbone, "infonce", queue=8)
    assert int(backbone[1].num_batches_tracked) == 0
    assert backbone.training
    # The width of features that depends on the image size is only needed for the default head.
    flat = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten())
    model = vision.MoCo(flat, "infonce", head=nn.Linear(2 * 14 * 14, 4), queue=8)
    assert torch.isfinite(model(views()))
    assert vision.SimCLR(flat, "infonce", head=nn.Identity())(views()).requires_grad


TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def test_a_model_of_transformers_is_a_backbone():
    from transformers import ResNetConfig, ResNetModel, ViTConfig, ViTModel

    resnet = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic"))
    vit = ViTModel(ViTConfig(**TINY, image_size=16, patch_size=8))
    for model, width in ((resnet, 6), (vit, 8)):
        framework = vision.SimCLR(model, "infonce")
        assert framework.branch.projector[0].in_features == width
        assert torch.isfinite(framework(views()))


def ntxent(z1, z2, tau):
    """Chen et al. 2020, Eq. 1 and Algorithm 1, with an explicit loop."""
    z = F.normalize(torch.cat([z1, z2]).double(), dim=1)
    n, total = len(z1), 0.0
    for i in range(2 * n):
        others = torch.stack([z[i] @ z[k] / tau for k in range(2 * n) if k != i])
        total = total + torch.logsumexp(others, 0) - z[i] @ z[(i + n) % (2 * n)] / tau
    return total / (2 * n)


def test_simclr_is_nt_xent_also_under_autocast():
    model = vision.SimCLR(conv(), "infonce(temperature=0.3)", head=nn.Linear(6, 4))
    z1, z2 = model.branch(torch.cat(views())).chunk(2)
    assert model(views()).item() == pytest.approx(ntxent(z1, z2, 0.3).item(), abs=5e-7)
    model = vision.SimCLR(conv(), "infonce(temperature=0.01)")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(views()).dtype == torch.float32


@pytest.mark.parametrize("name", ["BYOL", "SimSiam", "MoCoV3", "NNCLR", "SupCon"])
def test_default_objectives_are_the_papers(name):
    """The papers' losses of the same rows, in float64. `tests/vision/test_predictor.py` has their gradients."""
    model = build(name).double()
    pair = [view.double() for view in views()]
    given = (pair, SUPCON_LABELS) if name == "SupCon" else (pair,)
    with torch.no_grad():
        found = float(model(*given))
        if name == "SupCon":
            z = F.normalize(model.branch(torch.cat(pair)), dim=1)
            labels, total = SUPCON_LABELS.repeat(2), 0.0
            for i in range(12):
                others = torch.tensor([k for k in range(12) if k != i])
                log_share = torch.log_softmax(z[others] @ z[i] / 0.1, 0)
                total = total - log_share[labels[others] == labels[i]].mean()
            assert found == pytest.approx(float(total / 12), abs=1e-9)
            return
        z = [model.branch(view) for view in pair]
        p = [model.predictor(each) for each in z]
        keys = z if name in ("SimSiam", "NNCLR") else [model.target(view) for view in pair]
        cosine = [F.cosine_similarity(p[i], keys[1 - i]).mean() for i in range(2)]
        if name == "BYOL":
            expected = (2 - 2 * cosine[0]) + (2 - 2 * cosine[1])
        elif name == "SimSiam":
            expected = 1 - cosine[0] / 2 - cosine[1] / 2
        elif name == "MoCoV3":
            logits = [F.normalize(p[i], dim=1) @ F.normalize(keys[1 - i], dim=1).T / 0.2 for i in range(2)]
            expected = sum(2 * 0.2 * F.cross_entropy(each, torch.arange(6)) for each in logits)
        else:
            near = [model.queue.rows[(F.normalize(each, dim=1) @ model.queue.rows.T).argmax(1)] for each in z]
            logits = [F.normalize(near[i], dim=1) @ F.normalize(p[1 - i], dim=1).T / 0.1 for i in range(2)]
            expected = sum(F.cross_entropy(each, torch.arange(6)) for each in logits) / 2
    assert found == pytest.approx(float(expected), abs=1e-9)


def test_clip_takes_tokens_by_position_or_name():
    from transformers import BertConfig, BertModel

    bert = BertModel(BertConfig(vocab_size=20, **TINY))
    model = vision.CLIP(conv(), bert, "infonce(temperature=0.1)", text_head=nn.Linear(8, 512)).eval()
    ids, mask = torch.arange(12).view(6, 2), torch.ones(6, 2, dtype=torch.long)
    image, text = F.normalize(model.branch(views(1)[0]), dim=1), F.normalize(model.caption(ids), dim=1)
    logits, own = image @ text.T / 0.1, torch.arange(6)
    expected = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    for texts in (ids, (ids, mask), {"input_ids": ids, "attention_mask": mask}):
        torch.testing.assert_close(model(views(1), texts), expected, atol=1e-6, rtol=1e-6)


def test_byol_raises_its_momentum_over_the_steps():
    model = build("BYOL", momentum=0.9, steps=4)
    for done in range(5):
        before = copy.deepcopy(model.target.state_dict())
        with torch.no_grad():
            for parameter in model.branch.parameters():
                parameter.add_(1)
        gap = model.branch.encoder[0].weight - before["encoder.0.weight"]
        model.after_step()
        moved = model.target.encoder[0].weight - before["encoder.0.weight"]
        expected = 0.1 * (1 + torch.cos(torch.tensor(torch.pi * done / 4))) / 2
        torch.testing.assert_close(moved, gap * expected, atol=1e-6, rtol=1e-5)


def test_proximal_objectives_need_the_learning_rate():
    model = vision.SimCLR(conv(), "infonce + 0.1*cllr(solver=proximal, alpha=100)")
    model(views()).backward()
    with pytest.raises(ConfigError, match=r"needs the learning rate: model.after_step\(optimizer"):
        model.after_step()
    model.after_step(0.5)
    # The threshold of 0.5 * 0.1 * 100 is above all singular values.
    assert model.objective.terms[1].L.abs().max().item() == 0
    vision.SimCLR(conv(), "infonce(temperature=learned) + 0.1*cllr").after_step()


FLAT = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (lambda: vision.SimCLR(conv(), None), lambda m: m(views()), "SimCLR has no objective: build it with one"),
        (lambda: build("SimCLR"), lambda m: m(views(1)), "list of 2 or more views .* got 1"),
        (lambda: build("SimCLR"), lambda m: m(views(1)[0]), "list of 2 or more views .* got 1"),
        (lambda: build("SwAV", large=3), lambda m: m(views(2)), "list of 3 or more views .* got 2"),
        (lambda: build("CLIP"), lambda m: m(views(2), torch.zeros(6, 2).long()), "list of 1 view of .* got 2"),
        (lambda: build("MoCo"), lambda m: m([views()[0], views(images=5)[0]]), r"views\[1\] has 5 images"),
        (lambda: build("BYOL"), lambda m: m([v.mul(255).byte() for v in views()]), "floating point .* got torch.uint8"),
        (lambda: build("MoCo"), lambda m: m([["a"], ["b"]]), "got list"),
        (lambda: build("SupCon"), lambda m: m(views()), r"model\(views, labels\)"),
        (lambda: build("CMC", images=30, bank=4), lambda m: m(views(1)), r"model\(views, index=rows\)"),
        (lambda: build("CMC", images=3, bank=4), None, "bank of 3 images has no 4 negatives"),
        (lambda: vision.CMC(nn.Flatten(), "infonce"), None, "no first convolution of three channels"),
        (lambda: vision.CLIP(conv(), nn.Linear(3, 4), "infonce"), None, "text_head="),
        (lambda: build("SimCLR", negatives=11), lambda m: m(views()), "an anchor has 10 negatives, fewer than"),
        (lambda: build("SimCLR", negatives=0), None, "negatives must be a whole number >= 1, got 0"),
        (lambda: build("SimCLR", repel="in_turn"), None, "Did you mean 'in-turn'?"),
        (lambda: build("CMC", directions="max"), None, "directions must be one of 'sum', 'mean', got 'max'"),
        (lambda: build("BYOL", momentum_schedule="x"), None, "momentum_schedule must be one of 'cosine', 'constant'"),
        (lambda: build("MoCoV3", steps=0), None, "steps must be a whole number >= 1, got 0"),
        (lambda: build("MoCo", momentum=99), None, "momentum must be in \\[0, 1\\], got 99"),
        (lambda: vision.momentum_update(conv(), conv(), -1), None, "momentum must be in"),
        (lambda: vision.SimCLR(FLAT, "infonce"), None, "depends on the size"),
        (lambda: vision.BYOL(nn.LSTM(4, 4)), None, "no size of images was tried"),
        (lambda: vision.projection_head("simcrl", 8), None, "Did you mean 'simclr'"),
        (lambda: vision.prediction_head("simclr", 8), None, "Allowed: byol, simsiam, mocov3, nnclr"),
        (lambda: vision.projection_head("byol", 8, hidden=0), None, "hidden must be a whole number >= 1, got 0"),
        (lambda: vision.Queue(0, 4), None, "size must be a whole number >= 1"),
    ],
)
def test_mistakes_have_one_clear_message(make, call, message):
    with pytest.raises(dipole.DipoleError, match=message):  # noqa: PT012
        model = make()
        call(model)


def test_labels_reach_the_objective():
    model = build("SimCLR", objective="supcon")
    own, same = model(views()), model(views(), SUPCON_LABELS)
    assert not torch.equal(own, same)
    with pytest.raises(PairsError, match="labels"):
        model(views(), SUPCON_LABELS[:3])


def test_importing_the_package_loads_no_torch():
    code = (
        "import sys, dipole.vision; assert 'SimCLR' in dir(dipole.vision); assert 'torch' not in sys.modules\n"
        "from dipole.vision import SimCLR; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
