"""A learned temperature: CLIP's logit scale, exact whatever computes it, and in company."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from loops import draw as views

import dipole
from dipole import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import parse
from dipole.core.train.config import TrainConfig
from dipole.core.train.identity import written_out
from dipole.core.train.optimizer import build_optimizer
from dipole.core.utils.errors import OptionError, SpecError

TEMPERED = [
    entry.name
    for entry in registry.entries("objective")
    if any(option.name == "temperature" and "learned" in option.choices for option in entry.options)
]


def test_saved_copied_and_shown_under_stable_names():
    assert {"infonce", "dcl", "hcl", "co2", "tuple", "quickthoughts", "supcon", "siglip"} <= set(TEMPERED)
    assert "swav" not in TEMPERED
    objective = dipole.objective("infonce(temperature=learned, init=0.2) + 0.1*dp")
    assert objective.terms[0].summary() == {"temperature": pytest.approx(0.2)}
    with torch.no_grad():
        objective.terms[0].logit_scale.fill_(1.5)
    fresh = dipole.objective(str(objective))
    fresh.load_state_dict(objective.state_dict())
    for same in (fresh, copy.deepcopy(objective)):
        assert same.terms[0].summary()["temperature"] == pytest.approx(math.exp(-1.5))
    assert dipole.objective("infonce").state_dict() == {}
    assert dipole.objective("infonce(temperature=0.2)").terms[0].summary() == {}
    learned = dipole.objective("siglip").terms[0].summary()
    assert learned == {"temperature": pytest.approx(0.1), "bias": pytest.approx(-10)}
    options = written_out(dipole.objective("infonce(temperature=0.2)"))[0][2]
    assert options == {"temperature": 0.2, "similarity": "cosine", "joint": False}
    learned = written_out(dipole.objective("infonce(temperature=learned, init=0.2)"))[0][2]
    assert learned == {"temperature": "learned", "init": 0.2, "similarity": "cosine", "joint": False}
    text = "infonce(temperature=learned, init=0.2)"
    assert str(dipole.objective(text)) == text
    assert parse(text)[0].options == (("temperature", "learned"), ("init", 0.2))


def test_steps_are_those_of_clip():
    """Adam on a linear map and the logit scale, as open_clip writes it, until the scale stops at 100."""
    x, y = views(12, 6).detach(), views(12, 6).detach()  # equal: the scale can only grow
    weight = torch.eye(6, dtype=torch.double, requires_grad=True)
    scale = torch.tensor(math.log(1 / 0.07), dtype=torch.double, requires_grad=True)
    plain = torch.optim.Adam([weight, scale], lr=0.2)
    mine = weight.detach().clone().requires_grad_()
    objective = dipole.objective("infonce(temperature=learned, init=0.07)").double()
    with torch.no_grad():  # a float32 number until now
        objective.terms[0].logit_scale.fill_(math.log(1 / 0.07))
    optimizer = torch.optim.Adam([mine, *objective.parameters()], lr=0.2)
    seen = []
    for _ in range(15):
        logits = scale.exp() * F.normalize(x @ weight, dim=1) @ F.normalize(y, dim=1).T
        loss = (F.cross_entropy(logits, torch.arange(12)) + F.cross_entropy(logits.T, torch.arange(12))) / 2
        plain.zero_grad()
        loss.backward()
        plain.step()
        with torch.no_grad():
            scale.clamp_(max=math.log(100))
        found = objective(Pairs.both(x @ mine, y)).loss
        torch.testing.assert_close(found, loss, rtol=1e-7, atol=1e-9)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        objective.after_step(0.2)
        seen.append(float(objective.terms[0].logit_scale.detach().exp()))
    torch.testing.assert_close(objective.terms[0].logit_scale, scale)
    assert seen[0] < 20
    assert seen[-1] == pytest.approx(100)
    assert objective.terms[0].summary() == {"temperature": pytest.approx(0.01)}


def test_weight_decay_leaves_it_alone():
    objective = dipole.objective("siglip + cllr(dim=4)", dim=4)
    config = TrainConfig(steps=1, optimizer="adamw", learning_rate=0.1, weight_decay=0.3)
    groups = build_optimizer(config, objective.parameters()).param_groups
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    of = {name: decays[id(parameter)] for name, parameter in objective.named_parameters()}
    assert of == {"terms.0.logit_scale": 0, "terms.0.bias": 0, "terms.1.L": 0.3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("infonce(init=0.1)", "write temperature=learned, init=0.1, or temperature=0.1 alone"),
        ("dcl(temperature=0.3, init=0.1)", "temperature is 0.3"),
        ("infonce(temperature=learned, init=0.001)", "init must be a number >= 0.01 or none, got 0.001"),
        ("infonce(temperature=learnt)", "temperature must be a number > 0 or learned, got 'learnt'"),
        ("swav(temperature=learned)", "swav: temperature must be a number > 0, got 'learned'"),
        ("cacr(t_neg=learned)", "t_neg must be a number >= 0, got 'learned'"),
        ("siglip(bias=-3, bias_init=-2)", "write bias=learned, bias_init=-2, or bias=-2 alone"),
    ],
)
def test_errors_say_what_to_write(text, words):
    with pytest.raises(SpecError, match=words) as error:
        dipole.objective(text)
    assert "^" in str(error.value)


def test_a_learned_one_cannot_be_set():
    with pytest.raises(OptionError, match="learned and cannot be set"):
        dipole.objective("infonce(temperature=learned)").terms[0].temperature = 0.2


@pytest.mark.parametrize("variant", ["out", "in"])
def test_supcon_is_the_formula_in_matrix_form(variant):
    """Two views with labels, in the form of the paper's Eqs. 2 and 3: a mask of classes and one log softmax."""
    f, labels = F.normalize(views(2, 6, 4), dim=2), torch.tensor([0, 1, 0, 2, 1, 0])
    own = torch.eye(12, dtype=torch.bool)
    log_share = (f.flatten(0, 1) @ f.flatten(0, 1).T / 0.1).masked_fill(own, -math.inf).log_softmax(1)

    def by_formula(labels):
        same = (labels.repeat(2).unsqueeze(1) == labels.repeat(2)) & ~own
        if variant == "out":
            return -(log_share.masked_fill(~same, 0).sum(1) / same.sum(1)).mean()
        return -(log_share.exp().masked_fill(~same, 0).sum(1) / same.sum(1)).log().mean()

    objective = dipole.objective(f"supcon(variant={variant})")
    torch.testing.assert_close(objective(Pairs.from_views(list(f), labels)).loss, by_formula(labels))
    for given in (labels, torch.zeros(6, dtype=torch.long)):  # of one class: a softmax among its positives
        torch.testing.assert_close(objective(Pairs.from_labels(list(f), given)).loss, by_formula(given))
    # Without labels it is SimCLR.
    simclr = dipole.objective("infonce(temperature=0.1)")(*f).loss
    torch.testing.assert_close(objective(*f).loss, simclr)
    part = Pairs.from_views(list(f), torch.tensor([0, -1, 0, -1, 1, 0]))
    torch.testing.assert_close(objective(part).loss, objective(Pairs.from_labels(list(f), part.labels[:6])).loss)


def test_siglip_is_algorithm_1():
    images, texts = views(6, 4), views(6, 4, seed=1)
    objective = dipole.objective("siglip").double()
    scale, bias = (p.detach().clone().requires_grad_() for p in objective.parameters())
    logits = F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T * scale.exp() + bias
    expected = -F.logsigmoid((2 * torch.eye(6, dtype=torch.double) - 1) * logits).sum() / 6
    true = torch.autograd.grad(expected, [images, texts, scale, bias])
    for pairs in (Pairs.cross(images, texts), Pairs.both(images, texts)):
        found = objective(pairs).loss
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, [images, texts, *objective.parameters()]), true)
