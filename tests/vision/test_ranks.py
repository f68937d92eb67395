"""Several ranks: every framework is one process, key by key, loss by loss, gradient by gradient, with batch norm."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dipole import objective, vision
from dipole.core.objectives import gather
from dipole.core.utils.distributed import gather_rows
from dipole.core.utils.errors import PairsError
from dipole.core.utils.sync_batch_norm import synchronize
from tests.ranks import from_ranks
from tests.vision.made import colour_file, encoded_batch, make_adapter, part_of, random_framework
from tests.vision.made import step as one_step

IMAGES, SIDE = 12, 4
FRAMEWORKS = {
    "simclr": {"method": "simclr", "views": 3}, "simclr, 5 negatives": {"method": "simclr", "negatives": 5},
    "simclr, pairs of views": {"method": "simclr", "views": 3, "simclr": {"negatives": "view_pairs"}},
    "simclr, queries": {"method": "simclr", "views": 3, "simclr": {"negatives": "queries"}},
    "simclr, in turn": {"method": "simclr", "views": 3, "simclr": {"negatives": "in-turn"}},
    "simclr, 4 in turn": {"method": "simclr", "views": 3, "negatives": 4, "simclr": {"negatives": "in-turn"}},
    "moco": {"method": "moco", "negatives": 9, "views": 3},
    "moco, queue alone": {"method": "moco", "negatives": 9, "moco": {"batch_negatives": False}},
    "moco, intra-batch": {"method": "moco", "negatives": 9, "moco": {"intra_batch": True}},
    "moco, symmetric": {"method": "moco", "negatives": 9, "views": 3, "moco": {"symmetric": True}},
    "moco, both": {"method": "moco", "negatives": 9, "views": 3, "moco": {"symmetric": True, "intra_batch": True}},
    "cmc": {"method": "cmc"}, "cmc, bank": {"method": "cmc", "negatives": 7}, "swav": {"method": "swav", "views": 3},
    "swav, small": {"method": "swav", "swav": {"small_views": 2, "small_size": SIDE}},
    "swav, small and queue": {"method": "swav", "negatives": 10, "swav": {"small_views": 1, "small_size": SIDE}},
    "blocks": {"method": "blocks", "blocks": {"size": 1}},
    "simsiam": {"method": "simsiam", "simsiam": {"predictor_norm": "none"}},
    "byol": {"method": "byol", "views": 3, "byol": {"predictor_norm": "none"}},
    "mocov3": {"method": "mocov3", "mocov3": {"predictor_norm": "none"}},
    "nnclr": {"method": "nnclr", "views": 3, "nnclr": {"predictor_norm": "none", "support": 20}},
}  # fmt: skip
OBJECTIVES = (
    "infonce + 0.1*dp", "cacr(intra_batch=true)", "cacr(k=2, intra_batch=true)", "blocks(k=3)", "align_uniform"
)  # fmt: skip
BATCH_WIDE = ("vicreg", "barlow_twins")
"""Statistics over whole views: of one rank's share alone they would be others."""
CASES = [
    *itertools.product(FRAMEWORKS, OBJECTIVES),
    *itertools.product(["blocks"], ["tuple", "blocks(b=1, k=5, loss=hinge)", "blocks"]),
    *itertools.product(["nnclr", "simsiam", "byol"], ["regression"]),
    *{"simclr": "tuple", "swav": "swav(prototypes=4)", "mocov3": "0.8*infonce(temperature=0.2)"}.items(),
    *itertools.product(("simclr", "moco", "moco, queue alone", "cmc", "swav, small", "blocks", "byol"), BATCH_WIDE),
]
LIBRARY = {
    "SimCLR": {"objective": "infonce + 0.1*dp", "negatives": 5},
    "MoCo": {"objective": "infonce + 0.1*dp", "queue": 9}, "SwAV": {"objective": "swav(prototypes=4)", "queue": 8},
    "BYOL": {"steps": 9}, "SupCon": {}, "CLIP": {"objective": "siglip"},
}  # fmt: skip
"""Frameworks built in Python, with their objective."""
CASES += [(name, None) for name in LIBRARY]
SHARES = {"unequal": [(8, 4)], "equal": [(6, 6)], "three ranks": [(4, 4, 4), (6, 2, 4)]}
DIVISIONS = [pytest.param(SHARES[name], marks=[pytest.mark.slow] * (name != "unequal"), id=name) for name in SHARES]


def cases_of(divisions):
    """All cases, or in the usual run every second one: two or three objectives of each framework."""
    return CASES[:: 1 + (divisions == SHARES["unequal"])]


# cacr(k=2) asks for two positives, and these have one.
ONE_POSITIVE = (
    "simclr, 5 negatives", "moco, queue alone", "moco, intra-batch",
    "cmc", "cmc, bank", "swav, small", "swav, small and queue", "blocks", "simsiam", "mocov3"
)  # fmt: skip
# blocks(k=3) finds no other block here.
QUEUE_ALONE = (
    "moco, queue alone", "moco, symmetric", "moco, both", "cmc, bank", "simclr, queries", "simclr, in turn",
    "simclr, 4 in turn",
)  # fmt: skip


NORMED = {name: (name, {}) for name in ("simclr", "moco", "moco, symmetric", "cmc, bank", "swav, small", "blocks")}
NORMED["recomputed"] = ("simclr", {"activation_checkpointing": True})
NORMS = {"mean": {"momentum": None}, "no weights": {"affine": False}, "no statistics": {"track_running_stats": False}}


def step(case, own=slice(None), microbatch=None):
    """Loss, gradients and buffers after one step of a case on some images of the batch, or why it cannot."""
    name, text = case
    if text is None:
        return library_step(name, own)
    # Linear encoders: no batch norm.
    encoder = {"name": "linear", "width": 6, "hidden": 6, "dim": 5, "projector_norm": "none"}
    module, batch = random_framework({**FRAMEWORKS[name], "encoder": encoder}, IMAGES, SIDE)
    if name.startswith("swav") and module.queue is not None:
        module.queue.push(torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    torch.manual_seed(2)
    loss_of = objective(text, dim=5).double()
    try:
        outcome = loss_of(encoded_batch(module, part_of(batch, own), microbatch=microbatch))
    except PairsError as error:
        return {"error": str(error).partition(",")[0]}
    outcome.loss.backward()
    module.after_step()
    buffers = [*module.buffers(), *(p.detach() for p in module.parameters() if not p.requires_grad)]
    notes = [term.note for term in outcome.terms.values()]
    return {**after(outcome.loss, *module.parameters(), *loss_of.parameters()), "notes": notes, "buffers": buffers}


def after(loss, *parameters):
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters if p.requires_grad]
    return {"loss": loss.detach(), "gradients": gradients}


def library_step(name, own):
    """The same for a framework built in Python, called with its views. CLIP reads four words for each image."""
    torch.manual_seed(1)
    towers, head = [nn.Sequential(nn.Flatten(), nn.Linear(48, 6))], nn.Linear(6, 5)
    given = [torch.rand(2, IMAGES, 3, SIDE, SIDE, dtype=torch.float64)[:, own].unbind(), torch.arange(IMAGES)[own] % 3]
    if name == "CLIP":
        towers.append(nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 6)))
        given = [given[0][:1], torch.arange(4 * IMAGES).view(IMAGES, 4)[own] % 7]
    module = getattr(vision, name)(*towers, head=head, **LIBRARY[name]).double()
    if name == "BYOL":
        module.predictor = nn.Linear(5, 5, dtype=torch.float64)  # without batch norm
    loss = module(*given)
    loss.backward()
    module.after_step()
    buffers = [each for name, each in module.state_dict().items() if not name.startswith(("branch", "predictor"))]
    return {**after(loss, *module.parameters()), "notes": [], "buffers": buffers}


def normed_step(name, own=slice(None), sync=True, **train):
    """The same for an encoder with batch norm, and the names of its state."""
    encoder = {"name": "small-conv", "width": 2, "hidden": 6, "dim": 5}
    module, batch = random_framework({**FRAMEWORKS[name], "encoder": encoder}, IMAGES, 8)
    if sync and own != slice(None):
        assert synchronize(module) == sum(isinstance(each, nn.BatchNorm2d) for each in module.modules()) > 0
    found = one_step(module, part_of(batch, own), **train)
    gradients = [gradient for gradient in found["gradients"].values() if gradient is not None]
    buffers = list(found["buffers"].values())
    return {"loss": found["loss"], "gradients": gradients, "buffers": buffers, "names": list(module.state_dict())}


def norm_alone(settings, own=slice(None)):
    """Output, gradients and buffers of one norm under a loss of all ranks that is no sum of rows."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(IMAGES, 5, dtype=torch.float64, generator=generator) + 100
    weight = torch.randn(IMAGES, 5, dtype=torch.float64, generator=generator)
    norm = nn.BatchNorm1d(5, **settings).double()
    if own != slice(None):
        synchronize(norm)
        norm = copy.deepcopy(norm)  # what is synchronized is so in a copy
    for _ in range(2):
        mine = x[own].clone().requires_grad_()
        y = norm(mine)
        (y * weight[own]).pow(3).sum().backward()
    learnt = [torch.zeros(5) if p.grad is None else p.grad for p in norm.parameters()]
    return {"y": y.detach(), "x": mine.grad, "learnt": learnt, "buffers": list(norm.buffers())}


def own_gradient_alone(rows, sizes):
    """The usual mistake: the rows of other ranks arrive without a way back."""
    parts = list(gather_rows(rows.detach(), sizes).split(sizes))
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def every_case(rank, divisions):
    found = {}
    for shares in divisions:
        own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        for case in cases_of(divisions):
            found[(*case, shares)] = step(case, own)
        for name in FRAMEWORKS:
            found["in microbatches", name, shares] = step((name, "infonce"), own, microbatch=4)
        for name, (framework, settings) in NORMED.items():
            found["normed", name, shares] = normed_step(framework, own, **settings)
        for name, settings in NORMS.items():
            found[name, shares] = norm_alone(settings, own)
    found["apart"] = normed_step("simclr", own, sync=False)
    wrongs = (("no gradient", "gather_rows", own_gradient_alone), ("local pairs", "world_size", lambda: 1))
    for wrong, attribute, value in wrongs:
        right = getattr(gather, attribute)
        setattr(gather, attribute, value)
        found[wrong] = step(("simclr", "infonce"), own)
        setattr(gather, attribute, right)
    return found


@pytest.fixture(scope="module", params=DIVISIONS)
def many(request):
    return from_ranks(len(request.param[0]), every_case, request.param), request.param


def differences(one, ranks):
    """Largest distances of loss, gradients and buffers between one process and several."""
    means = [torch.stack(each).mean(0) for each in zip(*(rank["gradients"] for rank in ranks), strict=True)]
    pairs = {
        "loss": [(one["loss"], rank["loss"]) for rank in ranks],
        "gradients": list(zip(one["gradients"], means, strict=True)),
        "buffers": [pair for rank in ranks for pair in zip(one["buffers"], rank["buffers"], strict=True)],
    }
    return {name: max((float((a - b).abs().max()) for a, b in each), default=0.0) for name, each in pairs.items()}


def test_every_framework_on_ranks_is_one_process(many):
    many, divisions = many
    for case in cases_of(divisions):
        one = step(case)
        refused = case[0] in ONE_POSITIVE and case[1] == OBJECTIVES[2]
        assert ("error" in one) == refused, case
        # A queue is no block: where all negatives are the queue's, the block loss is 0 and says so.
        is_empty = not refused and any(one["notes"])
        assert is_empty == (case[0] in QUEUE_ALONE and case[1] == OBJECTIVES[3]), case
        for shares in divisions:
            ranks = [rank[(*case, shares)] for rank in many]
            if refused:
                assert [rank.get("error") for rank in ranks] == [one["error"]] * len(ranks), (case, shares)
                continue
            assert all("error" not in rank and rank["notes"] == one["notes"] for rank in ranks), (case, shares)
            assert all(value < 1e-9 for value in differences(one, ranks).values()), (case, shares)
            steepest = max(float(gradient.abs().max()) for gradient in one["gradients"])
            assert (steepest > 1e-6) != is_empty


def test_every_framework_in_microbatches_on_ranks_is_one_process(many):
    many, divisions = many
    for name in FRAMEWORKS:
        one = step((name, "infonce"))
        for shares in divisions:
            ranks = [rank["in microbatches", name, shares] for rank in many]
            assert all(value < 1e-10 for value in differences(one, ranks).values()), (name, shares)
    for case in itertools.product(FRAMEWORKS, ("infonce + 0.1*dp", "barlow_twins")):
        whole, divided = step(case), step(case, microbatch=5)
        assert whole.get("error") == divided.get("error")
        if "error" not in whole:
            assert all(value < 1e-12 for value in differences(whole, [divided]).values()), case


@pytest.mark.parametrize(("wrong", "what"), [("no gradient", "gradients"), ("local pairs", "loss")])
def test_a_wrong_gather_would_be_seen(many, wrong, what):
    assert differences(step(("simclr", "infonce")), [rank[wrong] for rank in many[0]])[what] > 1e-3


@pytest.mark.parametrize("name", NORMED)
def test_batch_norm_over_ranks_is_that_of_one_process(many, name):
    many, divisions = many
    one = normed_step(NORMED[name][0])
    for shares in divisions:
        ranks = [rank["normed", name, shares] for rank in many]
        assert all(value < 1e-9 for value in differences(one, ranks).values())
        assert all(rank["names"] == one["names"] for rank in ranks)  # weights are saved under the names they had
    assert name != "simclr" or max(differences(one, [rank["apart"] for rank in many]).values()) > 1e-3


@pytest.mark.parametrize("name", NORMS)
def test_every_kind_of_norm(many, name):
    many, divisions = many
    one = norm_alone(NORMS[name])
    for shares in divisions:
        ranks = [rank[name, shares] for rank in many]
        found = {key: torch.cat([rank[key] for rank in ranks]) for key in ("y", "x")}
        found["learnt"] = [sum(each) for each in zip(*(rank["learnt"] for rank in ranks), strict=True)]
        for rank in ranks:
            torch.testing.assert_close(found | {"buffers": rank["buffers"]}, one, rtol=0, atol=1e-9)


def test_synchronized_norms_alone_and_in_evaluation_change_nothing():
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    own = copy.deepcopy(plain)
    synchronize(own)
    x = torch.randn(5, 3, 6, 6)
    assert torch.equal(plain(x), own(x))
    assert torch.equal(plain.eval()(x), own.eval()(x))
    assert plain.state_dict().keys() == own.state_dict().keys()


def shuffled_keys(rank, source, world_size=2):
    table = {"method": "moco", "encoder": {"name": "small-conv", "width": 4, "dim": 8}, "augment": {"size": 8}}
    moco = make_adapter({**table, "data": source, "negatives": 40}, 16, rank=rank, world_size=world_size)
    batch, key = next(iter(moco.batches(0))), copy.deepcopy(moco.module.key)
    return moco.embed(batch).rows["key0"], batch.views[1], batch.seed, key if world_size == 1 else None


def test_batch_norm_sees_a_shuffled_half_of_the_batch(tmp_path):
    """In training mode the statistics are those of the images that the permutation of the step sent to one rank."""
    source = colour_file(tmp_path)
    found = torch.cat([keys for keys, *_ in from_ranks(2, shuffled_keys, source)])
    _, images, seed, key = shuffled_keys(0, source, 1)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    expected = torch.empty(16, 8)
    with torch.no_grad():
        for half in order.chunk(2):
            expected[half] = copy.deepcopy(key).train()(images[half])
        unshuffled = copy.deepcopy(key).train()(images[:8])
    torch.testing.assert_close(found, expected)
    assert (found[:8] - unshuffled).abs().max() > 1e-3
