"""Frameworks: who is paired with whom, and what follows the optimizer."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from dipole import objective
from dipole.core.ground.errors import ConfigError, PairsError
from dipole.core.ground.seeding import Seeds, seed_everything
from dipole.vision.adapter import VisionAdapter
from dipole.vision.config import VisionConfig
from dipole.vision.methods import Queue, both_directions, every_view_in_turn, keep_negatives, lab

SMALL = {
    "encoder": {"name": "small-conv", "width": 4, "dim": 8},
    "augment": {"size": 8, "flip": 0.0},
    "data": {"limit": 64},
}


@pytest.fixture(scope="module")
def colour(tmp_path_factory):
    import numpy as np

    path = tmp_path_factory.mktemp("data") / "colour.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (80, 10, 10, 3), dtype=np.uint8)
    np.savez(path, images=pixels, labels=np.arange(80) % 4)
    return {"source": str(path), "test": str(path)}


def adapter(batch_size=16, **settings):
    config = VisionConfig.model_validate_json(json.dumps({**SMALL, **settings}))
    seed_everything(0)
    return VisionAdapter(config, seed=Seeds(0), device=torch.device("cpu"), workdir=Path(), batch_size=batch_size)


def negatives(pairs, anchor):
    listed = {int(i) for i in torch.cat([pairs.positives[anchor], pairs.dropped[anchor]])}
    return [j for j in range(len(pairs.candidates)) if j not in listed]


def step(a, text, batch):
    """One optimizer step; the loss."""
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
    pairs = a.embed(batch)
    for anchor in range(32):
        assert len(negatives(pairs, anchor)) == 6
        assert pairs.positives[anchor].tolist() == [(anchor + 16) % 32]
    assert torch.equal(a.embed(batch).dropped, pairs.dropped)
    assert int(pairs.negative_counts[0]) == 6


def test_kept_negatives_are_uniform():
    from dipole import Pairs

    pairs = Pairs.from_views([torch.randn(6, 3), torch.randn(6, 3)])
    counts = torch.zeros(12)
    for seed in range(300):
        for j in negatives(keep_negatives(pairs, 4, seed), 0):
            counts[j] += 1
    assert counts[0] == counts[6] == 0
    rest = counts[[1, 2, 3, 4, 5, 7, 8, 9, 10, 11]]
    assert (rest - 120).abs().max() < 40  # binomial(300, 0.4): standard deviation 8.5


def test_moco_pairs_queries_with_keys_of_a_slow_copy():
    a = adapter(method="moco", views=3, negatives=40, moco={"momentum": 0.9})
    batch = next(iter(a.batches(0)))
    pairs = a.embed(batch)
    assert pairs.anchors.shape == (16, 8)
    assert len(pairs.candidates) == 2 * 16 + 40
    assert sorted(pairs.positives[3].tolist()) == [3, 19]
    assert not a.module.key.projector[0].weight.requires_grad
    before = [p.clone() for p in a.module.key.parameters()]
    step(a, "infonce", batch)
    for slow, old, fast in zip(a.module.key.parameters(), before, a.module.query.parameters(), strict=True):
        torch.testing.assert_close(slow, 0.9 * old + 0.1 * fast)


def test_moco_queue_holds_the_latest_keys_and_turns_around():
    queue = Queue(5, 2)
    rows = F.normalize(torch.randn(8, 2), dim=1)
    queue.push(rows[:3])
    queue.push(rows[3:7])
    torch.testing.assert_close(queue.rows, torch.stack([rows[5], rows[6], rows[2], rows[3], rows[4]]))
    assert (int(queue.place), int(queue.filled)) == (2, 5)
    queue.push(rows[:8])  # more than fit: the last five stay
    torch.testing.assert_close(queue.rows.sort(0).values, rows[3:].sort(0).values)


def test_queue_aware_cacr_sees_the_other_queries():
    plain = adapter(method="moco", negatives=40).embed(next(iter(adapter().batches(0))))
    intra = adapter(method="moco", negatives=40, moco={"intra_batch": True}).embed(next(iter(adapter().batches(0))))
    assert int(intra.negative_counts[0]) == int(plain.negative_counts[0]) + 15


def test_lab_equals_the_standards_formulas():
    """CIE 15 and IEC 61966-2-1 written out for single colours; references: published Lab values of sRGB primaries."""
    colours = torch.tensor([[1.0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    expected = torch.tensor(
        [[100.0, 0, 0], [0, 0, 0], [53.24, 80.09, 67.20], [87.74, -86.18, 83.18], [32.30, 79.19, -107.86]]
    )
    found = lab(colours[:, :, None, None])[:, :, 0, 0] * 100
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)


def test_cmc_pairs_the_halves_in_both_directions(colour):
    a = adapter(method="cmc", data=colour)
    pairs = a.embed(next(iter(a.batches(0))))
    assert pairs.anchors.shape == (32, 8)
    for anchor in range(32):
        other = range(16, 32) if anchor < 16 else range(16)
        assert pairs.positives[anchor].tolist() == [(anchor + 16) % 32]
        assert negatives(pairs, anchor) == [j for j in other if j != (anchor + 16) % 32]
    images = torch.rand(3, 3, 8, 8)
    assert a.module.features(images).shape == (3, 64)  # two halves of 32


def test_cmc_equals_the_mean_of_two_cross_losses(colour):
    from dipole import Pairs

    a = adapter(method="cmc", data=colour)
    pairs = a.embed(next(iter(a.batches(0))))
    light, tint = pairs.anchors.chunk(2)
    loss = objective("infonce(temperature=0.1)")
    both = (loss(Pairs.cross(light, tint)).loss + loss(Pairs.cross(tint, light)).loss) / 2
    torch.testing.assert_close(loss(pairs).loss, both)


def test_cmc_bank_gives_the_other_halfs_memory_as_negatives(colour):
    a = adapter(method="cmc", data=colour, negatives=20)
    batch = next(iter(a.batches(0)))
    pairs = a.embed(batch)
    assert len(pairs.candidates) == 32 + 40
    assert negatives(pairs, 0) == list(range(52, 72))
    assert negatives(pairs, 20) == list(range(32, 52))
    z = F.normalize(pairs.anchors.detach(), dim=1)
    old = a.module.memory.clone()
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
    pairs = a.embed(batch)
    assert len(pairs.anchors) == 64
    assert len(pairs.candidates) == 32  # the queue is still empty
    large, small = pairs.positives[3], pairs.positives[40]
    assert [i for i in large.tolist() if i >= 0] == [19]
    assert sorted(small.tolist()) == [8, 24]
    assert 3 not in negatives(pairs, 3)
    a.after_step()
    assert len(a.embed(batch).candidates) == 32 + 24


RUNNABLE = [
    "infonce",
    "infonce+0.1*dp",
    "cacr",
    "cacr(k=2)",
    "dcl",
    "hcl",
    "align_uniform",
    "swav(prototypes=5)",
    "co2",
    "triplet",
]


@pytest.mark.parametrize("method", ["simclr", "moco", "cmc", "swav"])
@pytest.mark.parametrize("text", RUNNABLE)
def test_objectives_train_in_every_framework(colour, method, text):
    views = {"cmc": 1}.get(method, 3)
    if method == "cmc" and text == "cacr(k=2)":
        with pytest.raises(PairsError, match="k=2"):
            step_once(colour, method, text, views)
        return
    step_once(colour, method, text, views)


def step_once(colour, method, text, views):
    settings = {"moco": {"negatives": 32}, "swav": {"negatives": 16}}.get(method, {})
    a = adapter(method=method, views=views, data=colour, **settings)
    before = [p.clone() for p in a.module.parameters()]
    loss = step(a, text, next(iter(a.batches(0))))
    assert torch.isfinite(loss)
    assert any(not torch.equal(p, q) for p, q in zip(before, a.module.parameters(), strict=True))


def test_a_supervised_objective_cannot_use_a_queue():
    a = adapter(method="moco", negatives=32)
    with pytest.raises(PairsError, match="label"):
        objective("tuple")(a.embed(next(iter(a.batches(0)))))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "simclr", "moco": {"momentum": 0.9}}, r"\[vision.moco\] has no effect with method 'simclr'"),
        ({"method": "moco", "swav": {}}, r"\[vision.swav\] has no effect with method 'moco'"),
        ({"method": "cmc", "views": 2}, "takes views = 1"),
        ({"views": 1}, "needs views = 2"),
    ],
)
def test_settings_of_another_method_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        VisionConfig.model_validate_json(json.dumps(settings))


def test_impossible_sizes_are_refused(colour):
    with pytest.raises(ConfigError, match="30 negatives per anchor"):
        adapter(negatives=31)
    with pytest.raises(ConfigError, match="at most 64"):
        adapter(method="cmc", data=colour, negatives=65)
    with pytest.raises(ConfigError, match="grey"):
        adapter(method="cmc")


def test_pairs_of_halves_by_hand():
    pairs = both_directions(torch.randn(4, 3), 2, torch.randn(2, 3, 3), None)
    assert [negatives(pairs, i) for i in range(4)] == [[7, 8, 9], [7, 8, 9], [4, 5, 6], [4, 5, 6]]


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
    pairs = every_view_in_turn(queries, keys, queue, 3, intra_batch, None)
    assert {int(n) for n in pairs.negative_counts} == {10 + 3 * intra_batch}
    loss = objective("cacr(k=2, t_pos=1.5, t_neg=2, detach_weights=true)")(pairs).loss
    (gradient,) = torch.autograd.grad(loss, queries)
    unit = F.normalize(queries, dim=1)  # the pseudo-code's queries are normalised by the encoder
    expected = cacr_algorithm_3(unit.chunk(3), keys.chunk(3), queue, 1.5, 2.0, intra_batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, queries)[0])


def test_symmetric_moco_trains_and_queues_the_last_views_keys():
    a = adapter(method="moco", views=3, negatives=40, moco={"symmetric": True, "intra_batch": True})
    batch = next(iter(a.batches(0)))
    assert len(a.embed(batch).anchors) == 48
    a.module.key.eval()
    with torch.no_grad():
        keys = F.normalize(a.module.key(batch.views[-1]), dim=1)
    a.embed(batch)
    a.after_step()
    torch.testing.assert_close(a.module.queue.rows[:16], keys)
    assert torch.isfinite(step(a, "cacr(k=2, detach_weights=true)", batch))


def test_blocks_are_images_of_one_class_and_each_others_positives():
    a = adapter(batch_size=12, method="blocks", blocks={"size": 3, "count": 5})
    assert a.steps_per_epoch == 10 * 5 * 3 // 12
    images = a.parts.pretrain
    for batch in a.batches(1):
        assert len(batch.views) == 1
        owners = images.labels[batch.rows].view(-1, 3)
        assert (owners == owners[:, :1]).all()
        assert torch.equal(owners.flatten(), batch.labels)
        pairs = a.embed(batch)
        for anchor in range(12):
            block = set(range(anchor - anchor % 3, anchor - anchor % 3 + 3)) - {anchor}
            assert set(pairs.positives[anchor].tolist()) == block
            assert len(negatives(pairs, anchor)) == 9
        assert torch.equal(pairs.labels, batch.labels)


def test_the_block_loss_with_k_negatives_is_equations_4_to_6():
    """A point, one of its class, and the next four points that are not of its block: log2(1 + sum e^{f(f- - f+)})."""
    a = adapter(batch_size=14, method="blocks", blocks={"size": 2})
    batch = next(a.batches(0))
    found = objective("blocks(b=1, k=4)")(a.embed(batch)).loss
    f = a.module.branch(batch.views[0]).double().detach()
    losses = []
    for i in range(14):
        partner = i ^ 1
        # The block of anchor j is its partner j ^ 1; blocks that hold a point of i's own are left out.
        others = [j for j in ((i + step) % 14 for step in range(1, 14)) if j // 2 != i // 2][:4]
        v = torch.stack([f[i] @ (f[partner] - f[j ^ 1]) for j in others])
        losses.append(torch.log2(1 + torch.exp(-v).sum()))
    assert found.item() == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize("text", ["blocks", "cross_entropy(classes=10)", "tuple", "infonce + 0.1*dp", "cacr", "hcl"])
def test_objectives_learn_from_blocks(text):
    a = adapter(batch_size=16, method="blocks", blocks={"size": 2})
    batch = next(a.batches(0))
    torch.manual_seed(0)
    assert step(a, text, batch).isfinite()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 15, "blocks": {"size": 2}}, "multiple of 2"),
        ({"batch_size": 16, "world_size": 4, "blocks": {"size": 8}}, "multiple of 32"),
        ({"batch_size": 64, "blocks": {"size": 2, "count": 1}}, "images of all blocks"),
        ({"views": 2}, "takes views = 1"),
        ({"negatives": 4}, r"blocks\(k=4\)"),
        ({"method": "simclr", "blocks": {"size": 2}}, "no effect with method 'simclr'"),
    ],
)
def test_blocks_that_cannot_be_made_are_refused(settings, message):
    world_size, batch_size = settings.pop("world_size", 1), settings.pop("batch_size", 16)
    settings = {**SMALL, "method": "blocks", **settings}
    with pytest.raises((ConfigError, ValidationError), match=message):
        VisionAdapter(
            VisionConfig.model_validate_json(json.dumps(settings)), seed=Seeds(0), device=torch.device("cpu"),
            workdir=Path(), batch_size=batch_size, world_size=world_size,
        )  # fmt: skip


def test_blocks_need_labels(tmp_path):
    import numpy as np

    np.savez(tmp_path / "u.npz", images=np.random.default_rng(0).integers(0, 256, (64, 8, 8), dtype=np.uint8))
    with pytest.raises(ConfigError, match="without a label"):
        adapter(method="blocks", data={"source": str(tmp_path / "u.npz")})
