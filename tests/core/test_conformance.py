"""Every objective, with every option, through the conformance kit, and the kit through losses broken on purpose."""

import json
from dataclasses import replace

import pytest
import torch
from loops import BothWays, failures
from runs import dipole as dipole_command
from runs import done, refused
from torch import Tensor
from torch.nn.functional import normalize

import dipole
from dipole import Objective
from dipole.core.conformance.kit import CHECKS, all_subjects, check_objective, parametrize_with_checks
from dipole.core.objectives import tiles
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import parse

SPECS = [
    "infonce(temperature=0.1, similarity=dot)", "infonce(similarity=bilinear)", "infonce(joint=true)",
    "quickthoughts(temperature=2.0, similarity=cosine)",
    "dcl(rho=0.3, temperature=0.2)", "dcl(rho=0.02, similarity=dot, temperature=2.0)",
    "hcl(beta=0)", "hcl(beta=0.5, rho=0, temperature=0.2)", "hcl(similarity=bilinear, temperature=2.0)",
    "align_uniform(uniform_over=pairs)", "align_uniform(alpha=1.0, t=0.5, align_weight=0.3, uniform_weight=2.0)",
    "cacr(t_pos=3.0, t_neg=0.9, k=1)", "cacr(cost=rbf)", "cacr(cost=rbf, rbf_t=0.7, negative_weights=uniform)",
    "cacr(cost=rbf, negative_weights=reversed)", "cacr(cost=rbf_repulsion)",
    "cacr(positive_weights=uniform, negative_weights=uniform)",
    "cacr(positive_weights=reversed, detach_weights=true)", "cacr(intra_batch=true)",
    "tuple(temperature=0.1)", "cross_entropy(classes=7)", "triplet(margin=0.3, mode=hardest)",
    "co2(temperature=0.2, weight=2.0, consistency_temperature=0.1)", "co2(similarity=dot, temperature=2.0)",
    "swav(prototypes=5, temperature=0.3, epsilon=0.2, iterations=5, codes=all)",
    "vicreg(reduction=sum)", "vicreg(invariance=3.0, variance=2.0, covariance=7.0, gamma=2.5, epsilon=0.1)",
    "barlow_twins(redundancy=0.7)", "blocks(b=1)", "blocks(loss=hinge)",
    "dp(delta_pos=0.2, delta_neg=0.7, reduction=mean)", "dp(reduction=sum)",
    "cllr(norm=nuclear, alpha=0.5)", "cllr(solver=proximal, tolerance=0.05)",
    "cllr(norm=nuclear, alpha=0.05, features=unit)", "cllr(variant=released, rank=4)",
    "infonce(temperature=learned, init=0.2)", "quickthoughts(temperature=learned, init=2.0, similarity=cosine)",
    *(f"{name}(temperature=learned, init=0.3)" for name in ("dcl", "hcl", "co2", "tuple", "supcon")),
    "supcon(temperature=0.3, variant=in, similarity=dot)", "siglip(temperature=0.3, bias=-2.0, similarity=dot)",
    "siglip(temperature=learned, init=0.3, bias=learned, bias_init=-2.0)", "0.5*infonce + 0.3*cacr + 0.1*dp + 0.1*cllr",
]  # fmt: skip
CYCLIC = ["blocks(k=1)", "blocks(b=1, k=2, loss=hinge)"]
EVERY = [check.name for check in CHECKS if not check.slow and check.name != "compile"]
# test_distributed.py compares ranks on more layouts.
HEAVY = ["tiled", "close pairs", "gradcheck"]
QUICK = [name for name in EVERY if name not in ("size", "ranks", *HEAVY)]
NAMES = [name for name in all_subjects() if name != "swav"]
# Checks that an option can break. The others see the same code as with the defaults, tiles in test_engines.py.
NUMBERS = ["reference", "low temperature", "identical points", "state"]
MY_LOSSES = """
import torch
class Doubled(torch.nn.Module):
    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = weight
    def forward(self, a, b):
        return self.weight * (a - b).square().sum(1).mean()
detached = lambda: lambda a, b: (a * b).sum().detach()
def plain(a, b, weight):
    return weight * (a * b).sum()
"""


@parametrize_with_checks(NAMES, only=QUICK)
def test_registered(subject, check):
    check(subject)


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_registered_in_turn(number):
    assert failures(NAMES[number], only=[HEAVY[number % len(HEAVY)]]) == set()


@parametrize_with_checks(["infonce", "dp", "cacr", "triplet"], only=["size"])
def test_sizes(subject, check):
    check(subject)


@parametrize_with_checks(SPECS + CYCLIC, only=NUMBERS)
def test_options(subject, check):
    first, *others = subject.layouts  # the slow test has all of them
    check(replace(subject, layouts=(first, *others[len(subject.name) % 3 :: 3])))


@pytest.mark.slow
@parametrize_with_checks([" + ".join(all_subjects()), "infonce + 0.1*dp"], only=["compile"])
def test_sums_compile(subject, check):
    check(subject)


@pytest.mark.slow
@parametrize_with_checks(["swav", *SPECS, *CYCLIC], only=EVERY)
def test_options_in_every_respect(subject, check):
    if subject.name in CYCLIC and check.__name__ in ("ignores_order", "survives_without_negatives"):
        pytest.skip("the k blocks that follow are negatives by definition: their order counts, and a batch needs them")
    check(subject)


@pytest.mark.slow
@parametrize_with_checks(all_subjects(), slow=True, only=["compile", "inductor", "size", *HEAVY])
def test_each_compiles_at_every_size(subject, check):
    check(subject)


def test_specs_visit_every_option():
    seen = {(registry.get(t.name).name, key) for s in SPECS + CYCLIC for t in parse(s) for key, _ in t.options}
    own = [entry for entry in registry.entries() if entry.target.__module__.startswith("dipole.")]
    options = {(each.name, option.name) for each in own if each.kind != "diagnostic" for option in each.options}
    # dim only fixes the width early. The layouts have several widths.
    assert {(name, key) for name, key in options - seen if key != "dim"} == set()


# Negative controls: each fault must be found, and by the check that is about it.
good = BothWays()


def detached_weights(a, b):
    cosine = (normalize(a, dim=1) * normalize(b, dim=1)).sum(1)
    return (cosine.detach() * cosine).mean() + good(a, b)


def at_positives(e):
    """Entries (2n,) of a matrix (2n, 2n) of two views at each row's positive."""
    return torch.cat([e.diagonal(len(e) // 2), e.diagonal(-(len(e) // 2))])


def unshifted(a, b):
    e = good.logits(a, b).exp()
    return -(at_positives(e) / e.sum(1)).log().mean()


def mean_without_negatives(a, b):
    e, n = good.logits(a, b), len(a)
    return e.fill_diagonal_(0)[:n, :n].sum() / (n * (n - 1)) + good(a, b)


FAULTS = {
    "wrong sign": (lambda a, b: -good(a, b), {"reference"}), "detached weights": (detached_weights, {"gradcheck"}),
    "detached keys": (lambda a, b: good(a, b.detach()), {"gradient exists", "reference"}),
    "unshifted": (unshifted, {"low temperature", "float16", "bfloat16"}),
    # Saturates at -log(1e-8) where the positive is far.
    "added epsilon": (lambda a, b: -(at_positives(good.logits(a, b).softmax(1)) + 1e-8).log().mean(), {"reference"}),
    "order dependent": (lambda a, b: good(a, b) + (a[0] * b[0]).sum(), {"permutation"}),
    "random": (lambda a, b: good(a + 0.1 * torch.randn_like(a), b), {"determinism"}),
    "seeds": (lambda a, b: torch.manual_seed(0).initial_seed() + good(a, b), {"determinism"}),
    "root of distance": (lambda a, b: good(a, b) + (a - b).square().sum(1).sqrt().mean(), {"identical points"}),
    "mean without negatives": (mean_without_negatives, {"one anchor"}),
}  # fmt: skip


class Traced(BothWays):
    def forward(self, a, b):
        return super().forward(a, b) * (2.0 if torch.compiler.is_compiling() else 1.0)


def test_sound_loss_passes_and_a_fault_of_compilation_is_found():
    assert failures(BothWays, reference="infonce", only=[*EVERY, "compile"]) == set()
    assert failures(Traced, only=["compile"]) == {"compile"}
    for reference, found in (("infonce(temperature=0.2)", set()), ("infonce", {"reference"})):
        assert failures(BothWays, options={"temperature": 0.2}, reference=reference, only=["reference"]) == found


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    loss, checks = FAULTS[name]
    assert failures(loss, reference="infonce", only=checks) == checks


class BadTiles(Objective):  # its value depends on how the matrix is cut
    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__("cosine")

    def loss(self, positive: Tensor, rows) -> Tensor:
        return -positive.mean(1) * tiles.TILE


class Silent(BadTiles):
    needs_negatives = False

    def loss(self, positive: Tensor, rows) -> Tensor:
        return positive.mean(1) * rows.pairs.has_negatives


class Forgetful(Objective):  # its option, padding and weights of pairs
    weighting = "pairs"

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__("cosine")
        self.scale = scale
        self.given = {}

    def loss(self, positive: Tensor, rows) -> Tensor:
        return -self.scale * positive.mean(1)


def test_faults_of_objectives_are_found():
    assert failures(BadTiles, only=["tiled", "determinism"]) == {"tiled"}
    assert failures(Silent, only=["no negatives", "one anchor"]) == {"no negatives"}
    with registry.temporary():
        registry.register("forgetful")(Forgetful)
        assert failures("forgetful(scale=2.0)", only=["state"]) == {"state"}
        assert failures("forgetful", only=["state", "weights", "padding"]) == {"weights", "padding"}


@pytest.mark.parametrize("target", [
    dipole.objective("infonce(temperature=0.2) + 0.1*dp"), BothWays(0.3), BadTiles,
    lambda a, b, weight=1e9: weight * (a - b).square().sum(1).mean(),  # its gradient is no float16
])  # fmt: skip
def test_targets(target):
    assert check_objective(target, only=["reference", "permutation", "gradcheck", "float16"]).ok


def test_command(tmp_path, monkeypatch, capsys):
    tmp_path.joinpath("my_losses.py").write_text(MY_LOSSES)
    monkeypatch.chdir(tmp_path)
    out = done(capsys, "check", "my_losses:Doubled", "--option", "weight=2.0", "--only", "gradcheck", "descent")
    assert "passes 2 checks" in out
    code, out, _ = dipole_command(capsys, "check", "my_losses:detached", "--only", "gradient exists", "--json")
    (report,) = json.loads(out)
    assert (code, report["ok"], report["checks"][0]["outcome"]) == (1, False, "FAIL")
    refused(capsys, "check", "my_losses:nothing")
    done(capsys, "check", "my_losses:plain", "--option", "weight=3.0", "--only", "gradcheck")
    out = done(capsys, "check", "--all", "--only", "identical points")
    assert all(name in out for name in all_subjects())


def test_table_shows_each_check():
    checks = ["reference", "tiled", "identical points"]
    first, *rows = check_objective(FAULTS["wrong sign"][0], reference="infonce", only=checks).table().splitlines()
    assert first.endswith("FAILS 1 of 2 checks")
    assert [row.split()[0] for row in rows] == ["FAIL", "ok", "-"]
