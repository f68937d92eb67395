"""Several ranks: every framework is one process, key by key, loss by loss, gradient by gradient."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

from dipole import objective, vision
from dipole.core.objectives import gather
from dipole.core.utils.distributed import gather_rows
from dipole.core.utils.errors import PairsError
from tests.ranks import from_ranks
from tests.vision.made import colour_file, encoded_batch, make_adapter, part_of, random_framework

BATCH = 16


def adapter(method, data, rank=0, world_size=1):
    encoder = {"name": "small-conv", "width": 4, "dim": 8}
    table = {"method": method, "encoder": encoder, "augment": {"size": 8}, "data": data, "negatives": 40}
    return make_adapter(table, BATCH, rank=rank, world_size=world_size)


IMAGES, SIDE = 12, 4
FRAMEWORKS = {
    "simclr": {"method": "simclr", "views": 3},
    "simclr, 5 negatives": {"method": "simclr", "negatives": 5},
    "simclr, pairs of views": {"method": "simclr", "views": 3, "simclr": {"negatives": "view_pairs"}},
    "simclr, queries": {"method": "simclr", "views": 3, "simclr": {"negatives": "queries"}},
    "simclr, in turn": {"method": "simclr", "views": 3, "simclr": {"negatives": "in-turn"}},
    "simclr, 4 in turn": {"method": "simclr", "views": 3, "negatives": 4, "simclr": {"negatives": "in-turn"}},
    "moco": {"method": "moco", "negatives": 9, "views": 3},
    "moco, queue alone": {"method": "moco", "negatives": 9, "moco": {"batch_negatives": False}},
    "moco, intra-batch": {"method": "moco", "negatives": 9, "moco": {"intra_batch": True}},
    "moco, symmetric": {"method": "moco", "negatives": 9, "views": 3, "moco": {"symmetric": True}},
    "moco, both": {"method": "moco", "negatives": 9, "views": 3, "moco": {"symmetric": True, "intra_batch": True}},
    "cmc": {"method": "cmc"},
    "cmc, bank": {"method": "cmc", "negatives": 7},
    "swav": {"method": "swav", "views": 3},
    "swav, small": {"method": "swav", "swav": {"small_views": 2, "small_size": SIDE}},
    "swav, small and queue": {"method": "swav", "negatives": 10, "swav": {"small_views": 1, "small_size": SIDE}},
    "blocks": {"method": "blocks", "blocks": {"size": 1}},
    "simsiam": {"method": "simsiam", "simsiam": {"predictor_norm": "none"}},
    "byol": {"method": "byol", "views": 3, "byol": {"predictor_norm": "none"}},
    "mocov3": {"method": "mocov3", "mocov3": {"predictor_norm": "none"}},
    "nnclr": {"method": "nnclr", "views": 3, "nnclr": {"predictor_norm": "none", "support": 20}},
}
OBJECTIVES = (
    "infonce + 0.1*dp", "cacr(intra_batch=true)", "cacr(k=2, intra_batch=true)", "blocks(k=3)", "align_uniform"
)  # fmt: skip
BATCH_WIDE = ("vicreg", "barlow_twins")
"""Statistics over whole views: of one rank's share alone they would be others."""
CASES = [
    *itertools.product(FRAMEWORKS, OBJECTIVES),
    ("blocks", "tuple"),
    ("blocks", "blocks(b=1, k=5, loss=hinge)"),
    ("blocks", "blocks"),
    ("simclr", "tuple"),
    ("swav", "swav(prototypes=4)"),
    ("simsiam", "0.5*regression"),
    ("byol", "2*regression"),
    ("mocov3", "0.8*infonce(temperature=0.2)"),
    ("nnclr", "regression"),
    *itertools.product(("simclr", "moco", "moco, queue alone", "cmc", "swav, small", "blocks", "byol"), BATCH_WIDE),
]
LIBRARY = {
    "SimCLR": {"objective": "infonce + 0.1*dp", "negatives": 5},
    "MoCo": {"objective": "infonce + 0.1*dp", "queue": 9},
    "SwAV": {"objective": "swav(prototypes=4)", "queue": 8},
    "BYOL": {"steps": 9},
    "SupCon": {},
}
"""Frameworks built in Python, with their objective."""
CASES += [(name, None) for name in LIBRARY]
SHARES = {"unequal": [(8, 4)], "equal": [(6, 6)], "three ranks": [(4, 4, 4), (6, 2, 4)]}
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


def step(case, own=slice(None), microbatch=None):
    """Loss, gradients and buffers after one step of a case on some images of the batch; why not, where it cannot."""
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
    parameters = [*module.parameters(), *loss_of.parameters()]
    return {
        "loss": outcome.loss.detach(),
        "notes": [term.note for term in outcome.terms.values()],
        "gradients": [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters if p.requires_grad],
        "buffers": [*module.buffers(), *(p.detach() for p in module.parameters() if not p.requires_grad)],
    }


def library_step(name, own):
    """The same for a framework built in Python, called with its views."""
    torch.manual_seed(1)
    backbone, head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 6)), torch.nn.Linear(6, 5)
    module = getattr(vision, name)(backbone, head=head, **LIBRARY[name]).double()
    if name == "BYOL":
        module.predictor = torch.nn.Linear(5, 5, dtype=torch.float64)  # without batch norm
    views = torch.rand(2, IMAGES, 3, SIDE, SIDE, dtype=torch.float64)[:, own].unbind()
    loss = module(views, torch.arange(IMAGES)[own] % 3)
    loss.backward()
    module.after_step()
    learnt = [each for each in module.parameters() if each.requires_grad]
    return {
        "loss": loss.detach(),
        "notes": [],
        "gradients": [torch.zeros_like(each) if each.grad is None else each.grad for each in learnt],
        "buffers": [each for name, each in module.state_dict().items() if not name.startswith(("branch", "predictor"))],
    }


def own_gradient_alone(rows, sizes):
    """The usual mistake: the rows of other ranks arrive without a way back."""
    parts = list(gather_rows(rows.detach(), sizes).split(sizes))
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def every_case(rank, divisions):
    found = {}
    for shares in divisions:
        own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        for case in CASES:
            found[(*case, shares)] = step(case, own)
        for name in FRAMEWORKS:
            found["in microbatches", name, shares] = step((name, "infonce"), own, microbatch=4)
    for wrong, (attribute, value) in {
        "no gradient": ("gather_rows", own_gradient_alone),
        "local pairs": ("world_size", lambda: 1),
    }.items():
        right = getattr(gather, attribute)
        setattr(gather, attribute, value)
        found[wrong] = step(("simclr", "infonce"), own)
        setattr(gather, attribute, right)
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(SHARES[name], marks=[pytest.mark.slow] * (name != "unequal")) for name in SHARES],
    ids=list(SHARES),
)
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
    carried = 0
    for case in CASES:
        one = step(case)
        for shares in divisions:
            ranks = [rank[(*case, shares)] for rank in many]
            if "error" in one:
                assert case[0] in ONE_POSITIVE
                assert [rank.get("error") for rank in ranks] == [one["error"]] * len(ranks), (case, shares)
                continue
            assert all("error" not in rank and rank["notes"] == one["notes"] for rank in ranks), (case, shares)
            assert all(value < 1e-9 for value in differences(one, ranks).values()), (case, shares)
            steepest = max(float(gradient.abs().max()) for gradient in one["gradients"])
            # A queue is no block: where all negatives are the queue's, the block loss is 0 and says so.
            assert (steepest > 1e-6) != any(one["notes"])
            assert not any(one["notes"]) or case[0] in QUEUE_ALONE
            carried += not any(one["notes"])
    left_out = len(ONE_POSITIVE) + len(QUEUE_ALONE)
    assert carried == (len(CASES) - left_out) * len(divisions)


def test_every_framework_in_microbatches_is_the_undivided_batch():
    """Queues, banks and momentum encoders included."""
    for case in itertools.product(FRAMEWORKS, ("infonce + 0.1*dp", "barlow_twins")):
        whole, divided = step(case), step(case, microbatch=5)
        assert whole.get("error") == divided.get("error")
        if "error" not in whole:
            assert all(value < 1e-12 for value in differences(whole, [divided]).values()), case


def test_every_framework_in_microbatches_on_ranks_is_one_process(many):
    many, divisions = many
    for name in FRAMEWORKS:
        one = step((name, "infonce"))
        for shares in divisions:
            ranks = [rank["in microbatches", name, shares] for rank in many]
            assert all(value < 1e-10 for value in differences(one, ranks).values()), (name, shares)


@pytest.mark.parametrize(("wrong", "what"), [("no gradient", "gradients"), ("local pairs", "loss")])
def test_a_wrong_gather_would_be_seen(many, wrong, what):
    assert differences(step(("simclr", "infonce")), [rank[wrong] for rank in many[0]])[what] > 1e-3


def queues_and_banks(rank, source):
    moco = adapter("moco", source, rank, 2)
    batch = next(iter(moco.batches(0)))
    before = copy.deepcopy(moco.module.key)
    moco.embed(batch)
    keys = moco.module._fresh.clone()
    moco.module.key = before.eval()
    plain = moco.module._embed_keys(batch.views[1], batch.seed)
    moco.after_step()
    cmc = adapter("cmc", source, rank, 2)
    cmc.embed(next(iter(cmc.batches(0))))
    cmc.after_step()
    queue, memory = moco.module.queue.rows, cmc.module.memory
    return {"keys": keys, "plain": plain, "queue": queue, "memory": memory, "rows": batch.rows}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return colour_file(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def ranks(source):
    return from_ranks(2, queues_and_banks, source)


def test_keys_queue_and_memory_bank_are_one_on_all_ranks(ranks, source):
    """In evaluation mode a key depends on its image alone: shuffling must leave no trace."""
    single = adapter("moco", source)
    batch = next(iter(single.batches(0)))
    with torch.no_grad():
        expected = single.module.key.eval()(batch.views[1])
    assert torch.equal(torch.cat([found["rows"] for found in ranks]), batch.rows)
    torch.testing.assert_close(torch.cat([found["plain"] for found in ranks]), expected)
    for name in ("queue", "memory"):
        assert torch.equal(ranks[0][name], ranks[1][name])
    keys = torch.nn.functional.normalize(torch.cat([found["keys"] for found in ranks]), dim=1)
    torch.testing.assert_close(ranks[0]["queue"][:BATCH], keys)


def test_batch_norm_sees_a_shuffled_half_of_the_batch(ranks, source):
    """In training mode the statistics are those of the images that the permutation of the step sent to one rank."""
    single = adapter("moco", source)
    batch = next(iter(single.batches(0)))
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(batch.seed))
    expected = torch.empty(BATCH, 8)
    with torch.no_grad():
        for half in order.chunk(2):
            expected[half] = copy.deepcopy(single.module.key).train()(batch.views[1][half])
        unshuffled = copy.deepcopy(single.module.key).train()(batch.views[1][: BATCH // 2])
    found = torch.cat([each["keys"] for each in ranks])
    torch.testing.assert_close(found, expected)
    assert (found[: BATCH // 2] - unshuffled).abs().max() > 1e-3
