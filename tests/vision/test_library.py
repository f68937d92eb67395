"""The frameworks in a loop of your own: losses and gradients of the papers' formulas, state, and mistakes."""

import copy
import itertools
import math
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel, ViTConfig, ViTModel

import dipole
from dipole import Pairs, objective, vision
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import RunInterruptedError
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.vision.adapter import VisionAdapter
from dipole.vision.frameworks.predictor import nearest_in
from tests.core.loops import by_loops
from tests.runs import interrupted, logged, refused, run_of
from tests.vision.made import SHORT_RUN, random_framework

SUPCON_LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
WITH_DEFAULT = ("BYOL", "SimSiam", "MoCoV3", "NNCLR", "SwAV", "SupCon")
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
SMALL = {"MoCo": {"queue": 20}, "NNCLR": {"support": 20}, "SwAV": {"queue": 20}}


def conv():
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))


def views(count=2, images=6, side=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(images, 3, side, side, generator=generator) for _ in range(count)]


def build(name, to=torch.float32, **given):
    """A framework by name, with small queues. The backbone has a type or a device. CLIP reads six words an image."""
    torch.manual_seed(0)
    if name not in WITH_DEFAULT:
        given.setdefault("objective", "infonce(temperature=0.2) + 0.1*dp")
    if name == "CLIP":
        return vision.CLIP(conv().to(to), nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 8)).to(to), **given)
    return getattr(vision, name)(conv().to(to), **SMALL.get(name, {}), **given)


def arguments(name, seed=0):
    if name == "CLIP":
        return views(1, seed=seed), torch.arange(36).view(6, 6) % 10
    return (views(seed=seed), SUPCON_LABELS) if name == "SupCon" else (views(seed=seed),)


def step(model, given, rate=0.05):
    model.zero_grad()
    loss = model(*given)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    model.after_step()
    return float(loss.detach())


FRAMEWORKS = [*WITH_DEFAULT, "SimCLR", "MoCo", "CMC", "CLIP"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_plain_backbone_trains_and_continues_from_its_state(name):
    """A second model that loads the state continues with the same losses: queue, momentum copy, seed and objective."""
    small = {"head": nn.Linear(6, 8)} if name in ("MoCoV3", "SimSiam") else {}  # theirs have millions of weights
    model = build(name, **small)
    first = [step(model, arguments(name, seed)) for seed in range(2)]
    state = copy.deepcopy(model.state_dict())
    other = build(name, **copy.deepcopy(small))
    other.load_state_dict(state)
    later = [arguments(name, seed) for seed in (2, 3)]
    assert [step(model, given) for given in later] == [step(other, given) for given in later]
    assert all(isinstance(each, float | Tensor) for each in model.metrics().values())
    assert len(set(first)) == int(state["step"]) == 2
    names = {"MoCo": ["queue.rows", "key.encoder.0.weight"], "BYOL": ["target.encoder.0.weight"]}
    assert set(names.get(name, ["queue.rows"] * (name == "NNCLR"))) <= set(state)
    features = model.features(views()[0])
    assert features.shape == (6, 12 if name == "CMC" else 6)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_heads_and_queues_have_the_type_and_the_device_of_the_backbone_which_may_be_scripted(name, monkeypatch):
    model = build(name, torch.bfloat16)
    images, *others = arguments(name)
    assert math.isfinite(step(model, ([image.bfloat16() for image in images], *others)))
    placed = build(name, "meta", **{"bank": 4, "images": 30} if name == "CMC" else {}).state_dict()
    assert {each.device.type for key, each in placed.items() if key != "step"} == {"meta"}
    loss = step(build(name), arguments(name))
    monkeypatch.setitem(globals(), "conv", lambda made=conv: torch.jit.script(made()))
    assert name == "CMC" or step(build(name), arguments(name)) == pytest.approx(loss)


def test_a_compiled_framework_is_not_compiled_again_at_each_step():
    plain, whole = build("SwAV"), build("SwAV")
    compiled = torch.compile(whole, backend="eager")
    losses, graphs = [], []
    for seed in range(5):
        given = arguments("SwAV", seed)
        with torch.no_grad():
            compiled(*given)  # fills no queue and moves no copy
        losses.append((float(compiled(*given).detach()), float(plain(*given).detach())))
        plain.after_step()
        compiled.after_step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[2] == graphs[4]
    assert all(found == pytest.approx(wanted, abs=1e-6) for found, wanted in losses)


@pytest.mark.parametrize(("backbone", "width"), [
    (nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1)), 5),  # features (n, 5, 1, 1)
    (nn.Sequential(nn.Flatten(), nn.Linear(3 * 10 * 10, 7)), 7),  # images of one size
    (nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(4 * 28 * 28, 9)), 9),  # 224 pixels
    (nn.Sequential(nn.Conv2d(1, 4, 3, groups=1), nn.AdaptiveMaxPool2d(2)), 16),  # grey images
])  # fmt: skip
def test_the_width_of_features_is_measured(backbone, width):
    backbone[0].eval()
    modes = [part.training for part in backbone.modules()]
    assert vision.SimCLR(backbone, "infonce").branch.projector[0].in_features == width
    assert [part.training for part in backbone.modules()] == modes
    assert vision.BYOL(backbone, head=nn.Identity()).predictor[0].in_features == width


def test_widths_are_measured_without_a_trace_also_of_transformers():
    backbone = conv()
    vision.MoCo(backbone, "infonce", queue=8)
    assert (backbone.training, int(backbone[1].num_batches_tracked)) == (True, 0)
    # The width of features that depends on the image size is only needed for the default head.
    flat = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten())
    model = vision.MoCo(flat, "infonce", head=nn.Linear(2 * 14 * 14, 4), queue=8)
    assert torch.isfinite(model(views()))
    assert vision.SimCLR(flat, "infonce", head=nn.Identity())(views()).requires_grad
    resnet = ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic"))
    vit = ViTModel(ViTConfig(**TINY, image_size=20, patch_size=10))  # it reads no other size
    for model, width in ((resnet, 6), (vit, 8)):
        framework = vision.SimCLR(model, "infonce")
        assert framework.branch.projector[0].in_features == width
        assert torch.isfinite(framework(views(side=20)))


def test_simclr_is_nt_xent_also_under_autocast():
    """Chen et al. 2020, Eq. 1, as the loop that `infonce` is compared with."""
    model = vision.SimCLR(conv(), "infonce(temperature=0.3)", head=nn.Linear(6, 4))
    z = model.branch(torch.cat(views())).double().chunk(2)
    expected = by_loops(model.objective.terms[0], Pairs.from_views(z))
    assert model(views()).item() == pytest.approx(expected.item(), abs=5e-7)
    model = vision.SimCLR(conv(), "infonce(temperature=0.01)")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(views()).dtype == torch.float32


def test_default_objectives_are_the_papers():
    """Those whose losses and gradients are compared with the papers' below. SupCon is Khosla et al., in a loop."""
    texts = {name.lower(): text for name, text, *_ in PAPERS}
    for name in ("BYOL", "SimSiam", "MoCoV3", "NNCLR"):
        assert str(build(name).objective) == str(objective(texts[name.lower()])), name
    model, pair = build("SupCon").double(), [view.double() for view in views()]
    assert model.objective.terms[0].temperature == 0.1
    pairs = Pairs.from_views(model.branch(torch.cat(pair)).chunk(2), labels=SUPCON_LABELS)
    assert model(pair, SUPCON_LABELS).item() == pytest.approx(by_loops(model.objective.terms[0], pairs).item())


def test_clip_takes_tokens_by_position_or_name():
    bert = BertModel(BertConfig(vocab_size=20, **TINY))
    model = vision.CLIP(conv(), bert, "infonce(temperature=0.1)", text_head=nn.Linear(8, 512)).eval()
    ids, mask = torch.arange(12).view(6, 2), torch.ones(6, 2, dtype=torch.long)
    image, text = F.normalize(model.branch(views(1)[0]), dim=1), F.normalize(model.caption(ids), dim=1)
    logits, own = image @ text.T / 0.1, torch.arange(6)
    expected = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    for texts in (ids, (ids, mask), {"input_ids": ids, "attention_mask": mask}):
        torch.testing.assert_close(model(views(1), texts), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["MoCo", "NNCLR", "SwAV", "CMC"])
def test_accumulated_batches_are_all_remembered(name):
    """Two batches before a step fill the queue or bank as one batch of both. One without gradient fills nothing."""
    model = build(name, **({"images": 10, "bank": 2} if name == "CMC" else {})).eval()
    undivided, images, index = copy.deepcopy(model), views(images=8), torch.arange(8)
    for part in (slice(4), slice(4, 8)):
        model([view[part] for view in images], index=index[part]).backward()
    with torch.no_grad():
        model(views(images=8, seed=1), index=index)
    undivided(images, index=index).backward()
    for each in (model, undivided):
        each.after_step()
    found, wanted = (each.memory if name == "CMC" else each.queue.rows.sort(0).values for each in (model, undivided))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_target_of_byol_follows(schedule):
    """With a momentum of 0.9 that a cosine raises to 1 in four steps, or that stays."""
    model = build("BYOL", momentum=0.9, momentum_schedule=schedule, steps=4)
    for done in range(5):
        before = copy.deepcopy(model.target.state_dict())
        with torch.no_grad():
            for parameter in model.branch.parameters():
                parameter.add_(1)
        gap = model.branch.encoder[0].weight - before["encoder.0.weight"]
        model.after_step()
        moved = model.target.encoder[0].weight - before["encoder.0.weight"]
        share = (1 + math.cos(math.pi * done / 4)) / 2 if schedule == "cosine" else 1
        torch.testing.assert_close(moved, gap * 0.1 * share, atol=1e-6, rtol=1e-5)
    assert not any(p.requires_grad for p in model.target.parameters())


FLAT = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
LAZY = nn.Sequential(nn.LazyConv2d(4, 3), nn.AdaptiveAvgPool2d(1))
WHOLE = type("Whole", (nn.Module,), {"forward": lambda self, images: images.flatten(1).long()})()


@pytest.mark.parametrize(("make", "call", "message"), [
    (lambda: vision.SimCLR(conv(), None), lambda m: m(views()), "SimCLR has no objective: build it with one"),
    (lambda: build("SimCLR"), lambda m: m(views(1)[0]), r"list of 2 or more views .* Call model\(\[first, second\]"),
    (lambda: build("SwAV", large=3), lambda m: m(views(2)), "list of 3 or more views .* got 2"),
    (lambda: build("CLIP"), lambda m: m(views(2), torch.zeros(6, 2).long()), "list of 1 view of .* got 2"),
    (lambda: build("MoCo"), lambda m: m([views()[0], views(images=5)[0]]), r"views\[1\] has 5 images"),
    (lambda: build("BYOL"), lambda m: m([v.mul(255).byte() for v in views()]), "floating point .* got torch.uint8"),
    (lambda: build("MoCo"), lambda m: m(None), r"views\[0\] must be a batch of images, .* got NoneType"),
    (lambda: vision.BYOL(conv()), lambda m: m(views(images=1)), r"cannot train on one image: .*drop_last=True"),
    (lambda: build("SupCon"), lambda m: m(views()), r"model\(views, labels\)"),
    (lambda: build("SupCon"), lambda m: m(views(), "ababab"), "labels must be 6 whole numbers, .* got 'ababab'"),
    (lambda: build("CMC", images=9, bank=2), lambda m: m(views(1), index=torch.rand(6)), "index .* got torch.float32"),
    (lambda: build("CMC", images=30, bank=4), lambda m: m(views(1)), r"model\(views, index=rows\)"),
    (lambda: build("CMC", images=30, bank=4), lambda m: m(views(1), index=torch.arange(25, 31)), "the 30 images of"),
    (lambda: build("CMC", images=9, bank=4), lambda m: m(views(1), index=torch.arange(6)), "has 3 without the batch"),
    (lambda: build("CMC"), lambda m: m([views(1)[0][:, :1]]), r"three channels into L and ab, got \(6, 1, 16, 16\)"),
    (lambda: build("SwAV", large=2.0), None, "large must be a whole number >= 2"),
    (lambda: build("CMC", images=3, bank=4), None, "bank of 3 images has no 4 negatives"),
    (lambda: vision.CMC(nn.Flatten(), "infonce"), None, "no plain first convolution of three channels"),
    (lambda: vision.CMC(spectral_norm(nn.Conv2d(3, 4, 3)), "infonce"), None, "no plain first convolution"),
    (lambda: vision.CLIP(conv(), nn.Linear(3, 4), "infonce"), None, "text_head="),
    (lambda: build("SimCLR", negatives=11), lambda m: m(views()), "an anchor has 10 negatives, fewer than"),
    (lambda: build("SimCLR", negatives=0), None, "negatives must be a whole number >= 1, got 0"),
    (lambda: build("SimCLR", repel="in_turn"), None, "Did you mean 'in-turn'?"),
    (lambda: build("CMC", directions="max"), None, "directions must be 'sum' or 'mean', got 'max'"),
    (lambda: build("BYOL", momentum_schedule="x"), None, "momentum_schedule must be 'cosine' or 'constant'"),
    (lambda: build("MoCoV3", steps=0), None, "steps must be a whole number >= 1, got 0"),
    (lambda: build("MoCo", momentum=99), None, "momentum must be in \\[0, 1\\], got 99"),
    (lambda: build("BYOL", momentum="0.9"), None, "momentum must be in \\[0, 1\\], got '0.9'"),
    (lambda: build("CMC", images="all", bank=4), None, "images must be a whole number >= 0, got 'all'"),
    (lambda: vision.SimCLR(FLAT, "infonce"), None, "depends on the shape .* 3600 for 3x32x32 .* pool it"),
    (lambda: vision.SimCLR(nn.AdaptiveAvgPool2d(4), "infonce"), None, "48 for 3x32x32 and 16 for 1x32x32"),
    (lambda: vision.MoCo(LAZY, "infonce", head=nn.Flatten()), None, "lazy layers, .* Call it once on a batch"),
    (lambda: vision.SimCLR(conv(), "infonce", head=128), None, "head must be a torch.nn.Module or None, got 128"),
    (lambda: vision.BYOL(conv(), predictor=3), None, "predictor must be a torch.nn.Module or None, got 3"),
    (lambda: vision.SimCLR("infonce", conv()), None, "objective must be a text .* got Sequential"),
    (lambda: vision.CLIP(conv(), nn.LazyLinear(4), "infonce"), None, "LazyLinear has lazy layers"),
    (lambda: vision.BYOL(nn.LSTM(4, 4)), None, "LSTM is unknown. ValueError for .*Expected.* Wrap it in a module"),
    (lambda: vision.BYOL(WHOLE), None, "returned torch.int64 .*, and not floats"),
    (lambda: vision.projection_head("SimCRL", 8), None, "Did you mean 'simclr'"),
    (lambda: vision.prediction_head("simclr", 8), None, "Allowed: byol, simsiam, mocov3, nnclr"),
    (lambda: vision.projection_head("byol", 8, hidden=0), None, "hidden must be a whole number >= 1, got 0"),
    (lambda: vision.Queue(0, 4), None, "size must be a whole number >= 1"),
    (lambda: vision.Queue(3, 4), lambda q: q.push(torch.zeros(2, 3)), r"shape \(n, 4\), got \(2, 3\)"),
    (lambda: vision.Queue(3, 4), lambda q: q.load_state_dict(vision.Queue(5, 4).state_dict()), "5 .* 3.*support.* = 5"),
    (lambda: build("CMC", images=9, bank=2), lambda m: m.load_state_dict(build("CMC", images=8, bank=2).state_dict()),
     "bank of 8 rows, and this model one of 9. Build the model with images = 8"),
    (lambda: vision.cosine_schedule(0, 0, 1, 0), None, "total must be > 0, got 0"),
    (lambda: vision.momentum_update(conv(), nn.Linear(2, 2), 0.9), None, "same parameters"),
    (lambda: vision.momentum_update(conv(), conv().requires_grad_(False), 0.9), None, "takes the copy first"),
    (lambda: vision.SimCLR("resnet18", "infonce"), None, "an encoder is a torch.nn.Module, .* got str"),
    (lambda: vision.LARS(params=conv().parameters(), lr=0.1, momentum=1), None, "LARS: momentum must be .* < 1, got 1"),
    (lambda: vision.warmup_cosine(1, "a"), None, "warmup_cosine: total must be a number, got 'a'"),
    (lambda: vision.LARS([], lr=0.1), None, "LARS: params must be tensors or groups of them: .*empty"),
])  # fmt: skip
def test_mistakes_have_one_clear_message(make, call, message):
    with pytest.raises(dipole.DipoleError, match=message):  # noqa: PT012
        model = make()
        call(model)


def test_labels_and_the_learning_rate_reach_the_objective():
    model = build("SimCLR", objective="supcon")
    assert not torch.equal(model(views()), model(views(), SUPCON_LABELS))
    refused(PairsError, "labels", model, views(), SUPCON_LABELS[:3])
    model = vision.SimCLR(conv(), "infonce + 0.1*cllr(solver=proximal, alpha=100)")
    model(views()).backward()
    refused(ConfigError, r"needs the learning rate: model.after_step\(optimizer", model.after_step)
    model.after_step(0.5)
    # The threshold of 0.5 * 0.1 * 100 is above all singular values.
    assert model.objective.terms[1].L.abs().max().item() == 0
    vision.SimCLR(conv(), "infonce(temperature=learned) + 0.1*cllr").after_step()


def test_importing_the_packages_loads_no_torch():
    code = (
        "import sys, dipole, dipole.core.evaluation as evaluation; dir(dipole); dir(evaluation)\n"
        "assert {'SimCLR', 'ContrastiveLoss'} <= {*dir(dipole.vision), *dir(dipole.text)}\n"
        "assert not {'torch', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert callable(dipole.text.senteval.evaluate)


IMAGES, SIDE = 6, 4


def framework(method, views=2, **table):
    """A framework on a linear encoder, with its batch norm, in float64, and a batch."""
    encoder = {"name": "linear", "width": 7, "hidden": 6, "dim": 5}
    return random_framework({"method": method, "views": views, method: table, "encoder": encoder}, IMAGES, SIDE)


def gradients(loss: Tensor, module):
    learnt = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(learnt.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(learnt, found, strict=True))


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum() / (x * x).sum().sqrt() / (y * y).sum().sqrt()


def of_simsiam(module, *views):
    """Chen & He 2021, Algorithm 1, over ordered pairs of views: the mean of D(p, z) = -(p . z), z detached."""
    z = [module.branch(x) for x in views]
    p = [module.predictor(each) for each in z]
    pairs = list(itertools.permutations(range(len(views)), 2))
    return -sum(cosine(p[i][b], z[j][b].detach()) for i, j in pairs for b in range(IMAGES)) / len(pairs) / IMAGES


def of_byol(module, x1, x2):
    """Grill et al. 2020, Eq. 2, and its like with the views exchanged, added."""
    loss = 0.0
    for x, other in ((x1, x2), (x2, x1)):
        q, z = module.predictor(module.branch(x)), module.target(other).detach()
        for i in range(IMAGES):
            loss = loss + (2 - 2 * cosine(q[i], z[i])) / IMAGES
    return loss


def of_mocov3(module, x1, x2, tau=0.2):
    """Chen, Xie & He 2021, Algorithm 1: ctr(q1, k2) + ctr(q2, k1), ctr = 2 tau cross entropy."""
    loss = 0.0
    for x, other in ((x1, x2), (x2, x1)):
        q, k = module.predictor(module.branch(x)), module.target(other).detach()
        for i in range(IMAGES):
            shares = [(cosine(q[i], k[j]) / tau).exp() for j in range(IMAGES)]
            loss = loss - 2 * tau * (shares[i] / sum(shares)).log() / IMAGES
    return loss


def of_nnclr(module, x1, x2, tau=0.1):
    """Dwibedi et al. 2021, Eq. 4 and its pseudo-code: L(NN(z1), p2)/2 + L(NN(z2), p1)/2, a softmax over the p."""
    support = module.queue.rows.clone()
    z1, z2 = module.branch(x1), module.branch(x2)
    loss = 0.0
    for z, p in ((z1, module.predictor(z2)), (z2, module.predictor(z1))):
        for i in range(IMAGES):
            near = max(support, key=lambda q: float(cosine(q, z[i].detach())))
            shares = [(cosine(near, p[j]) / tau).exp() for j in range(IMAGES)]
            loss = loss - (shares[i] / sum(shares)).log() / IMAGES / 2
    return loss


PAPERS = [
    ("simsiam", "0.5*regression", of_simsiam, 1.0, {}), ("simsiam", "0.5*regression", of_simsiam, 1.0, {"views": 3}),
    ("byol", "2*regression", of_byol, 0.0, {}), ("mocov3", "0.8*infonce(temperature=0.2)", of_mocov3, 0.0, {}),
    ("nnclr", "infonce(temperature=0.1)", of_nnclr, 0.0, {"support": 9}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "text", "paper", "constant", "table"), PAPERS)
def test_loss_and_gradient_are_the_papers(method, text, paper, constant, table):
    """Of a framework under an objective, and of a loop over the branch and the predictor."""
    module, batch = framework(method, **table)
    if method in ("byol", "mocov3"):
        with torch.no_grad():  # a target that has fallen behind
            for p in module.target.parameters():
                p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(5)), alpha=0.1)
    mine = objective(text, dim=5)(module.embed(batch)).loss
    theirs = paper(module, *batch.views)
    torch.testing.assert_close(mine - constant, theirs, atol=1e-12, rtol=1e-12)
    expected, found = gradients(theirs, module), gradients(mine, module)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-11, rtol=1e-9)


def test_the_support_set_takes_the_first_views_projections_after_the_step():
    module, batch = framework("nnclr", support=9)
    before = module.queue.rows.clone()
    projected = module.branch(batch.views[0]).detach()
    module.embed(batch)
    assert torch.equal(module.queue.rows, before)
    module.after_step()
    torch.testing.assert_close(module.queue.rows[:IMAGES], projected / projected.norm(dim=1, keepdim=True))
    assert torch.equal(module.queue.rows[IMAGES:], before[IMAGES:])
    assert torch.equal(nearest_in(module.queue.rows, 3 * module.queue.rows[2:4]), module.queue.rows[2:4])


def test_heads_are_the_papers():
    """Layers, batch norm and biases that the papers name, where the recipe says nothing."""

    def shown(head):
        return [f"{type(layer).__name__}{'+' * bool(getattr(layer, 'bias', None) is not None)}" for layer in head]

    hidden, last = ["Linear", "BatchNorm1d+", "ReLU"], ["Linear", "BatchNorm1d"]
    for name, projector, predictor in (
        ("simsiam", [*hidden, *hidden, *last], [*hidden, "Linear+"]),
        ("byol", [*hidden, "Linear+"], [*hidden, "Linear+"]),
        ("mocov3", [*hidden, *hidden, *last], [*hidden, *last]),
        ("nnclr", [*hidden, *hidden, *last], [*hidden, "Linear+"]),
    ):
        module, _ = framework(name)
        assert (shown(module.branch.projector), shown(module.predictor)) == (projector, predictor), name
    assert framework("simsiam")[0].predictor[0].out_features == 5 // 4


@pytest.mark.parametrize("name", ["digits-byol", "digits-nnclr"])
def test_a_recipe_stopped_and_continued_is_one_run(tmp_path, name):
    """Momentum, support set, optimizer and online probe included: bit for bit."""
    settings = [*SHORT_RUN, "train.checkpoint_every=1", "vision.data.limit=256"]
    whole = run_of(name, tmp_path / "whole", *settings)
    with interrupted(VisionAdapter, "after_step", 3, signal.SIGTERM), pytest.raises(RunInterruptedError):
        run_of(name, tmp_path / "parts", *settings)
    assert run_of(name, tmp_path / "parts", *settings).results == whole.results
    lines = [logged(tmp_path / folder / whole.hash, "step") for folder in ("whole", "parts")]
    for first, second in zip(*lines, strict=True):
        assert first | {"time": 0} == second | {"time": 0}
    losses = logged(tmp_path / "whole" / whole.hash)
    assert all(0 < line["train/spread"] < 1.5 and 0 <= line["train/online_accuracy"] <= 1 for line in losses)
    if name == "digits-byol":
        total = losses[-1]["step"]
        start = load_recipe(name).config.settings.own_table.momentum
        for line in losses:
            expected = 1 - (1 - start) * (math.cos(math.pi * (line["step"] - 1) / total) + 1) / 2
            assert line["train/momentum"] == pytest.approx(expected, abs=1e-6)
