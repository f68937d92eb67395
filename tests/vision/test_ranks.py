"""Two ranks: shuffled batch norm gives every image its key back; queue and memory bank are the same on both."""

import copy
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dipole.core.ground.seeding import Seeds, seed_everything
from dipole.vision.adapter import VisionAdapter
from dipole.vision.config import VisionConfig

BATCH = 16


def adapter(method, source, rank=0, world_size=1):
    table = {
        "method": method,
        "encoder": {"name": "small-conv", "width": 4, "dim": 8},
        "augment": {"size": 8},
        "data": {"source": source, "test": source},
        "negatives": 40,
    }
    config = VisionConfig.model_validate_json(json.dumps(table))
    seed_everything(0)
    return VisionAdapter(
        config,
        seed=Seeds(0),
        device=torch.device("cpu"),
        workdir=Path(),
        batch_size=BATCH,
        rank=rank,
        world_size=world_size,
    )


def rank_main(rank, file, source, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    moco = adapter("moco", source, rank, 2)
    batch = next(iter(moco.batches(0)))
    before = copy.deepcopy(moco.module.key)
    moco.embed(batch)
    keys = moco.module._fresh.clone()
    moco.module.key = before.eval()
    plain = moco.module._keys(batch.views[1], batch.seed)
    moco.after_step()
    cmc = adapter("cmc", source, rank, 2)
    cmc.embed(next(iter(cmc.batches(0))))
    cmc.after_step()
    found = {
        "keys": keys,
        "plain": plain,
        "queue": moco.module.queue.rows,
        "memory": cmc.module.memory,
        "rows": batch.rows,
    }
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    import numpy as np

    path = tmp_path_factory.mktemp("data") / "colour.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (80, 10, 10, 3), dtype=np.uint8)
    np.savez(path, images=pixels, labels=np.arange(80) % 4)
    return str(path)


@pytest.fixture(scope="module")
def ranks(source):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(os.path.join(folder, "meet"), source, folder), nprocs=2)
        yield [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(2)]


def test_every_image_gets_its_own_key_back(ranks, source):
    """In evaluation mode a key depends on its image alone: shuffling must leave no trace."""
    single = adapter("moco", source)
    batch = next(iter(single.batches(0)))
    with torch.no_grad():
        expected = single.module.key.eval()(batch.views[1])
    assert torch.equal(torch.cat([found["rows"] for found in ranks]), batch.rows)
    torch.testing.assert_close(torch.cat([found["plain"] for found in ranks]), expected)


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


def test_queue_and_memory_bank_are_one_on_all_ranks(ranks):
    for name in ("queue", "memory"):
        assert torch.equal(ranks[0][name], ranks[1][name])
    keys = torch.nn.functional.normalize(torch.cat([found["keys"] for found in ranks]), dim=1)
    torch.testing.assert_close(ranks[0]["queue"][:BATCH], keys)
