"""Frameworks: who is paired with whom, which objectives they carry, and that they read nothing back from the device."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from dipole import Pairs, objective
from dipole.core.train.update import LARS
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.vision.frameworks import carriers
from dipole.vision.frameworks.base import Batch
from dipole.vision.frameworks.cmc import CMCConfig, draw_others, lab
from dipole.vision.frameworks.moco import every_view_in_turn
from dipole.vision.frameworks.queue import Queue
from dipole.vision.frameworks.simclr import keep_negatives
from dipole.vision.image_set import ImageSet
from tests.device_reads import META, no_cuda_waits, no_reads
from tests.runs import refused, run_of
from tests.vision.made import ONE_STEP, colour_file, make_adapter, unlabelled_file

SMALL = {"encoder": {"width": 4, "dim": 8}, "augment": {"size": 8, "flip": 0.0}, "data": {"limit": 64}}


@pytest.fixture(scope="module")
def colour(tmp_path_factory):
    return colour_file(tmp_path_factory.mktemp("data"))


def adapter(batch_size=16, world_size=1, **settings):
    return make_adapter({**SMALL, **settings}, batch_size, world_size=world_size)


def related(a, batch):
    """The pairs that a framework makes of a batch, or several."""
    embedded = a.embed(batch)
    return embedded.relate(embedded.rows)


def negatives(pairs, anchor):
    return pairs.negative_mask()[anchor].nonzero().flatten().tolist()


def step(a, text, batch):
    """The loss of one optimizer step."""
    loss_of = objective(text, dim=a.embedding_dim)
    parameters = [p for p in [*a.module.parameters(), *loss_of.parameters()] if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.1)
    loss = loss_of(a.embed(batch)).loss
    loss.backward()
    optimizer.step()
    a.after_step()
    return loss


def test_simclr_with_a_number_of_negatives():
    a = adapter(negatives=6)
    batch = next(iter(a.batches(0)))
    pairs = related(a, batch)
    for anchor in range(32):
        assert len(negatives(pairs, anchor)) == 6
        assert pairs.positives[anchor].tolist() == [(anchor + 16) % 32]
    assert torch.equal(related(a, batch).ignored, pairs.ignored)
    assert int(pairs.negative_counts[0]) == 6


def test_kept_negatives_and_rows_of_a_bank_are_drawn_uniformly():
    pairs = Pairs.from_views([torch.randn(6, 3), torch.randn(6, 3)])
    counts = sum(keep_negatives(pairs, 4, seed).negative_mask()[0].long() for seed in range(300))
    assert counts[0] == counts[6] == 0
    assert (counts[[1, 2, 3, 4, 5, 7, 8, 9, 10, 11]] - 120).abs().max() < 40  # binomial(300, 0.4): deviation 8.5
    taken = torch.tensor([3, 11, 4])
    drawn = [draw_others(12, taken, 5, seed) for seed in range(400)]
    assert all(len(each.unique()) == 5 for each in drawn)
    counts = torch.cat(drawn).bincount(minlength=12)
    assert counts[taken].sum() == 0
    assert (counts[counts > 0] - 400 * 5 / 9).abs().max() < 45  # binomial(400, 5/9): deviation 9.9
    assert sorted(draw_others(12, taken, 9, 0).tolist()) == [0, 1, 2, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(("repel", "of"), [
    ("queries", [(0, 0)]), ("in-turn", [(0, 0), (1, 1), (2, 2)]), ("view_pairs", [(0, 1), (0, 2), (1, 2)]),
])  # fmt: skip
def test_simclr_with_the_negatives_of_cacr(repel, of):
    """M - 1 negatives. CACR Sec. 3.2: the other images' samples of the query's own view. Its authors' code: view x
    repels the other images of view y, for each pair of views x < y."""
    settings = {"views": 3, "simclr": {"negatives": repel}}
    a, fewer = adapter(**settings), adapter(**settings, negatives=6)
    batch = next(iter(a.batches(0)))
    several, few = ([found] if isinstance(found := related(each, batch), Pairs) else found for each in (a, fewer))
    with torch.no_grad():
        views = a.module.branch(torch.cat(batch.views)).chunk(3)
    rows = [(pairs, row) for pairs in several for row in range(len(pairs.anchors))]
    assert len(rows) == 16 * len(of)
    for number, (pairs, row) in enumerate(rows):
        (x, y), image = of[number // 16], number % 16
        torch.testing.assert_close(pairs.anchors[row], views[x][image])
        torch.testing.assert_close(pairs.candidates[negatives(pairs, row)], views[y][torch.arange(16) != image])
        assert pairs.negative_counts[row] == 15
    assert torch.isfinite(step(a, "cacr(k=2)", batch))
    assert [count for pairs in few for count in pairs.negative_mask().sum(1).tolist()] == [6] * 16 * len(of)
    refused(ConfigError, "has 15 negatives per anchor", adapter, **settings, negatives=16)


def test_moco_pairs_queries_with_keys_of_a_slow_copy_and_a_queue():
    a = adapter(method="moco", views=3, negatives=40, moco={"momentum": 0.9})
    batch = next(iter(a.batches(0)))
    pairs = related(a, batch)
    assert pairs.anchors.shape == (16, 8)
    assert len(pairs.candidates) == 2 * 16 + 40
    assert sorted(pairs.positives[3].tolist()) == [3, 19]
    assert not a.module.key.projector[0].weight.requires_grad
    before = [p.clone() for p in a.module.key.parameters()]
    step(a, "infonce", batch)
    for slow, old, fast in zip(a.module.key.parameters(), before, a.module.branch.parameters(), strict=True):
        torch.testing.assert_close(slow, 0.9 * old + 0.1 * fast)
    batch = next(iter(adapter().batches(0)))
    counts = {}
    for more in (
        {}, {"batch_negatives": False}, {"symmetric": True}, {"symmetric": True, "batch_negatives": True},
        {"intra_batch": True},
    ):  # fmt: skip
        found = related(adapter(method="moco", negatives=40, moco=more), batch)
        first = found[0] if isinstance(found, tuple) else found
        counts[str(more)] = int(first.negative_counts[0])
    assert list(counts.values()) == [55, 40, 40, 55, 70]


def test_moco_queue_holds_the_latest_keys_and_turns_around():
    queue = Queue(5, 2)
    rows = F.normalize(torch.randn(8, 2), dim=1)
    queue.push(rows[:3])
    queue.push(rows[3:7])
    torch.testing.assert_close(queue.rows, torch.stack([rows[5], rows[6], rows[2], rows[3], rows[4]]))
    assert (int(queue.place), int(queue.filled)) == (2, 5)
    queue.push(rows[:8])  # more than fit: the last five stay
    torch.testing.assert_close(queue.rows.sort(0).values, rows[3:].sort(0).values)


def test_cmc_pairs_the_halves_of_lab_in_both_directions(colour):
    a = adapter(method="cmc", data=colour)
    pairs = related(a, next(iter(a.batches(0))))
    assert len(pairs) == 2
    for one, other in (pairs, pairs[::-1]):
        assert one.anchors.shape == (16, 8)
        assert torch.equal(one.candidates, other.anchors)
        for anchor in range(16):
            assert one.positives[anchor].tolist() == [anchor]
            assert negatives(one, anchor) == [j for j in range(16) if j != anchor]
    assert a.module.features(torch.rand(3, 3, 8, 8)).shape == (3, 64)  # two halves of 32
    # Runs from before the setting keep their names.
    assert CMCConfig(directions="mean").determining() == {}
    assert CMCConfig().determining() == {"directions": "sum"}
    colours = torch.tensor([[1.0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    expected = [[100.0, 0, 0], [0, 0, 0], [53.24, 80.09, 67.20], [87.74, -86.18, 83.18], [32.30, 79.19, -107.86]]
    found = lab(colours[:, :, None, None])[:, :, 0, 0] * 100
    torch.testing.assert_close(found, torch.tensor(expected), atol=0.05, rtol=0)


@pytest.mark.parametrize("negatives", [None, 20])
def test_cmc_adds_the_two_directions(colour, negatives):
    """Tian et al.'s code adds the losses of both halves. `directions = "mean"` is half as long."""
    term = objective("infonce(temperature=0.07)")
    for settings, factor in (({}, 1.0), ({"directions": "sum"}, 1.0), ({"directions": "mean"}, 0.5)):
        a = adapter(method="cmc", data=colour, negatives=negatives, cmc=settings)
        first, second = related(a, next(iter(a.batches(0))))
        added = term(first).loss.item() + term(second).loss.item()
        assert term((first, second)).loss.item() == pytest.approx(factor * added, rel=1e-5)


def test_cmc_bank_gives_the_other_halfs_memory_as_partner_and_negatives(colour):
    a = adapter(method="cmc", data=colour, negatives=20)
    batch = next(iter(a.batches(0)))
    light, tint = related(a, batch)
    old = a.module.memory.clone()
    for half, pairs in ((1, light), (0, tint)):
        assert len(pairs.candidates) == 16 + 20
        # The authors' code: the first of its K + 1 rows is the image's own, of the bank like the others.
        torch.testing.assert_close(pairs.candidates[:16], old[half][batch.rows])
        assert not pairs.candidates.requires_grad
        assert pairs.anchors.requires_grad
        for anchor in (0, 15):
            assert pairs.positives[anchor].tolist() == [anchor]
            assert negatives(pairs, anchor) == list(range(16, 36))
        drawn = (pairs.candidates[16:, None] == old[half]).all(2).nonzero()
        assert drawn[:, 0].tolist() == list(range(20))
        assert not set(drawn[:, 1].tolist()) & set(batch.rows.tolist())
    z = F.normalize(torch.cat([light.anchors, tint.anchors]).detach(), dim=1)
    a.after_step()
    changed = (a.module.memory != old).any(2)
    assert changed[0].nonzero().flatten().tolist() == sorted(batch.rows.tolist())
    expected = F.normalize((old[1, batch.rows] + z[16:]) / 2, dim=1)
    torch.testing.assert_close(a.module.memory[1, batch.rows], expected)


def test_multi_crop_predicts_the_large_crops():
    swav = {"small_views": 2, "small_size": 6}
    a = adapter(method="swav", swav=swav, negatives=24)
    batch = next(iter(a.batches(0)))
    assert [view.shape[-1] for view in batch.views] == [8, 8, 6, 6]
    pairs = related(a, batch)
    assert (len(pairs.anchors), len(pairs.candidates)) == (64, 32)  # the queue is still empty
    large, small = pairs.positives[3], pairs.positives[40]
    assert [i for i in large.tolist() if i >= 0] == [19]
    assert sorted(small.tolist()) == [8, 24]
    assert 3 not in negatives(pairs, 3)
    a.after_step()
    assert len(related(a, batch).candidates) == 32 + 24


def cacr_algorithm_3(queries, keys, queue, t_pos, t_neg, intra_batch):
    """The paper's pseudo-code, line by line, for lists of (M, d) float64 rows of unit length."""
    loss = 0.0
    for k, q in enumerate(queries):
        positives = torch.stack([key for n, key in enumerate(keys) if n != k])
        cost = (q - positives).norm(dim=-1).square().T  # (M, K)
        with torch.no_grad():
            weights = torch.softmax(cost * t_pos, 1)
        loss = loss + (cost * weights).sum(1).mean()
        distances = 2 - 2 * q @ queue.T
        if intra_batch:
            own = torch.eye(len(q), dtype=torch.bool)
            inside = (q[:, None] - q).square().sum(-1)[~own].view(len(q), len(q) - 1)
            distances = torch.cat([distances, inside], 1)
        loss = loss - (distances * torch.softmax(-t_neg * distances, 1)).sum(1).mean()
    return loss / len(queries)


@pytest.mark.parametrize("intra_batch", [False, True])
def test_symmetric_moco_is_the_papers_algorithm_3(intra_batch):
    """CACR Algorithm 3 on three views, its loss and its gradient."""
    generator = torch.Generator().manual_seed(3)
    rows = F.normalize(torch.randn(3 * 4 * 2 + 10, 6, generator=generator, dtype=torch.double), dim=1)
    queries, keys, queue = rows[:12].clone().requires_grad_(), rows[12:24], rows[24:]
    views = queries.chunk(3), keys.chunk(3)
    pairs = every_view_in_turn(*views, queue=queue, intra_batch=intra_batch, batch_negatives=False)
    assert {int(n) for each in pairs for n in each.negative_counts} == {10 + 3 * intra_batch}
    loss = objective("cacr(k=2, t_pos=1.5, t_neg=2, detach_weights=true)")(pairs).loss
    (gradient,) = torch.autograd.grad(loss, queries)
    unit = F.normalize(queries, dim=1)  # the pseudo-code's queries are normalised by the encoder
    expected = cacr_algorithm_3(unit.chunk(3), keys.chunk(3), queue, 1.5, 2.0, intra_batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, queries)[0])


def test_symmetric_moco_queues_the_last_views_keys():
    a = adapter(method="moco", views=3, negatives=40, moco={"symmetric": True, "intra_batch": True})
    batch = next(iter(a.batches(0)))
    a.module.key.eval()
    with torch.no_grad():
        assert [len(pairs.anchors) for pairs in related(a, batch)] == [16, 16, 16]
        keys = F.normalize(a.module.key(batch.views[-1]), dim=1)
    a.embed(batch)
    a.after_step()
    torch.testing.assert_close(a.module.queue.rows[:16], keys)


def test_blocks_are_images_of_one_class_and_each_others_positives():
    a = adapter(batch_size=12, method="blocks", blocks={"size": 2, "count": 5})
    assert a.steps_per_epoch == 10 * 5 * 3 // 12
    images, draws = a.parts.pretrain, []
    for batch in a.batches(1):
        assert len(batch.views) == 1
        owners = images.labels[batch.rows].view(-1, 3)
        assert (owners == owners[:, :1]).all()
        assert torch.equal(owners.flatten(), batch.labels)
        pairs = related(a, batch)
        draws.append(pairs.facts.draw)
        for anchor in range(12):
            block = set(range(anchor - anchor % 3, anchor - anchor % 3 + 3)) - {anchor}
            assert set(pairs.positives[anchor].tolist()) == block
            assert len(negatives(pairs, anchor)) == 9
        assert torch.equal(pairs.labels, batch.labels)
    assert len(set(draws)) == a.steps_per_epoch
    assert related(a, next(a.batches(1, 2))).facts.draw == draws[2]


BLOCKS = {"method": "blocks"}


@pytest.mark.parametrize(("settings", "message"), [
    ({"method": "simclr", "moco": {"momentum": 0.9}}, r"\[vision.moco\] has no effect with method 'simclr'"),
    ({"method": "moco", "swav": {}}, r"\[vision.swav\] has no effect with method 'moco'"),
    ({"method": "cmc", "views": 2}, r"takes views = 1.*Set vision\.views = 1"),
    ({"views": 1}, "needs views = 2"), ({"negatives": 31}, "30 negatives per anchor"),
    ({"method": "cmc", "data": "colour", "negatives": 65}, "at most 64"),
    ({"method": "cmc"}, "3 channels, but those of .* have 1"), ({**BLOCKS, "data": "unlabelled"}, "without a label"),
    ({**BLOCKS, "batch_size": 16, "blocks": {"size": 2}}, "blocks of 3 images .* multiple of 3"),
    ({**BLOCKS, "batch_size": 16, "world_size": 4, "blocks": {"size": 7}}, "multiple of 32"),
    ({**BLOCKS, "batch_size": 63, "blocks": {"size": 2, "count": 1}}, "images of all blocks"),
    ({**BLOCKS, "blocks": {"size": 0}}, "greater than or equal to 1"),
    ({**BLOCKS, "views": 2}, "takes views = 1"), ({**BLOCKS, "negatives": 4}, r"blocks\(k=4\)"),
    ({"method": "simclr", "blocks": {"size": 1}}, "no effect with method 'simclr'"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(colour, tmp_path, settings, message):
    files = {"colour": colour, "unlabelled": unlabelled_file(tmp_path)}
    settings = settings | ({"data": files[settings["data"]]} if "data" in settings else {})
    refused((ConfigError, ValidationError), message, adapter, **settings)


SHORT = [*ONE_STEP, "vision.data.limit=64", "train.batch_size=32"]
BARE = ["vision.data.source=unlabelled", "vision.probe.probes=[]"]
SMALL_BLOCKS = ["vision.method=blocks", "vision.views=1", "train.batch_size=30"]


@pytest.mark.parametrize(("text", "settings", "message", "absent"), [
    ("tuple", ["vision.method=moco", "vision.negatives=32"], r"method = 'moco' cannot carry tuple", "moco,"),
    ("tuple", ["vision.method=moco", "vision.negatives=32"], "these can: simclr", "moco,"),
    # The number of views is part of the way out. CMC needs colours, blocks and supervised objectives need labels.
    ("cacr(k=4)", [], r"these can: simclr \(views = 5\), .*moco \(views = 5\)", "cmc"),
    ("cacr(k=4)", SMALL_BLOCKS, r"blocks \(blocks.size = 4\)", "cmc"),
    ("cacr(k=4)", BARE, "these can: simclr", "blocks"),
    ("tuple", BARE, r"No vision\.method can carry tuple", "these can"),
    # SwAV pads a large crop's own place. Padding is no positive.
    ("cacr(k=2)", ["vision.method=swav"], r"swav \(views = 3\)", "cmc"),
])  # fmt: skip
def test_frameworks_that_carry_an_objective_are_named(tmp_path, text, settings, message, absent):
    source = unlabelled_file(tmp_path)["source"]
    settings = [each.replace("=unlabelled", f"={source}") for each in settings]
    with pytest.raises(PairsError, match=message) as caught:
        run_of("digits-simclr", tmp_path, *SHORT, f"objective={text}", *settings)
    assert absent not in str(caught.value).partition("these can")[2]


@pytest.mark.parametrize(("text", "settings"), [
    ("tuple", ["vision.method=simclr"]), ("cacr(k=4)", ["vision.views=5"]),
    ("cacr(k=4)", [*SMALL_BLOCKS, "vision.blocks.size=4"]), ("cacr(k=2)", ["vision.method=swav", "vision.views=3"]),
    ("cacr(k=2)", ["vision.method=swav", "vision.views=3", "vision.negatives=16"]),
    ("cacr(k=2)", ["vision.method=simclr", "vision.views=3"]), ("cacr(k=2)", [*SMALL_BLOCKS, "vision.blocks.size=2"]),
    ("cacr(k=2)", ["vision.method=moco", "vision.views=3", "vision.negatives=16"]),
])  # fmt: skip
def test_frameworks_that_are_recommended_run(tmp_path, text, settings):
    assert run_of("digits-simclr", tmp_path, *SHORT, f"objective={text}", *settings).status == "done"


def test_carriers_depend_on_needs_and_batch_size():
    known = ImageSet("known", torch.zeros(6, 3, 4, 4, dtype=torch.uint8), torch.arange(6) % 2)
    found = carriers(objective("infonce + dp", dim=3), 2, 3, torch.device("cpu"), known, 6)
    predicting = {"byol": 2, "mocov3": 2, "nnclr": 2, "simsiam": 2}
    assert found == {"simclr": 2, "moco": 2, "swav": 2, "blocks": 2, "cmc": 2, **predicting}
    # Twenty negative blocks are there in a batch of 32 and not in one of 6.
    blocks = objective("blocks(b=1, k=20)", dim=3)
    assert carriers(blocks, 2, 3, torch.device("cpu"), known, 6) == {}
    assert "simclr" in carriers(blocks, 2, 3, torch.device("cpu"), known, 32)


READING = {
    "simclr": {"method": "simclr"},
    "simclr three views, some negatives": {"method": "simclr", "views": 3, "negatives": 9},
    "moco": {"method": "moco", "negatives": 40, "moco": {"intra_batch": True}},
    "moco symmetric": {"method": "moco", "negatives": 40, "views": 3, "moco": {"symmetric": True}},
    "cmc": {"method": "cmc"}, "cmc with a bank": {"method": "cmc", "negatives": 20},
    "swav": {"method": "swav", "swav": {"small_views": 2, "small_size": 8}},
    "swav with a queue": {"method": "swav", "negatives": 30}, "blocks": {"method": "blocks"},
    "simsiam": {"method": "simsiam"}, "byol": {"method": "byol", "views": 3}, "mocov3": {"method": "mocov3"},
    "nnclr": {"method": "nnclr", "nnclr": {"support": 30}},
}  # fmt: skip
SUPERVISED = "cross_entropy(classes=4) + cllr"
OTHERS = [SUPERVISED, "swav(prototypes=4)", "blocks", "tuple", "regression", "vicreg", "barlow_twins"]


def reading(settings, colour, **context):
    size = 18 if settings["method"] == "blocks" else 16
    encoder = {"name": "small-conv" if settings == {"method": "simclr"} else "linear", "width": 4, "dim": 8}
    return make_adapter({**SMALL, "data": colour, "encoder": encoder, **settings}, size, **context)


@pytest.mark.parametrize("settings", READING.values(), ids=READING)
def test_a_framework_reads_nothing_back(settings, colour):
    adapter = reading(settings, colour)
    found = next(iter(adapter.batches(0)))
    batch = Batch([view.to(META) for view in found.views], found.labels.to(META), found.rows.to(META), found.seed)
    adapter.module.to(META).train()
    lab(torch.zeros(1, 3, 2, 2, device=META))  # constants go to the device once
    # Each framework with one objective, and with one of the others, in turn.
    turn = list(READING.values()).index(settings) % len(OTHERS)
    for text in ["infonce + dp", OTHERS[turn]]:
        if text == "tuple" and "negatives" in settings:
            continue  # the classes of a queue are unknown
        term = objective(text, dim=adapter.embedding_dim).to(META)
        parameters = [p for p in [*adapter.module.parameters(), *term.parameters()] if p.requires_grad]
        optimizer = LARS(parameters, 0.1)
        for _ in range(1 + (text == "infonce + dp")):
            with no_reads():
                term(adapter.embed(batch)).loss.backward()
                optimizer.step()
                term.after_step(0.1)
                adapter.after_step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("settings", READING.values(), ids=READING)
def test_a_step_on_a_gpu_waits_for_nothing(settings, colour):
    """Batches over pinned memory, augmentation, encoder, loss, optimizer, and what follows it."""
    adapter = reading(settings, colour, device=torch.device("cuda"))
    adapter.module.to("cuda").train()
    term = objective("infonce + dp", dim=adapter.embedding_dim).to("cuda")
    parameters = [p for p in [*adapter.module.parameters(), *term.parameters()] if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, 0.1, fused=True)

    def step(batch):
        term(adapter.embed(batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        adapter.after_step()

    batches = [each for epoch in range(2) for each in adapter.batches(epoch)]
    step(batches[0])
    with no_cuda_waits():
        step(batches[1])
