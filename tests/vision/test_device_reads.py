"""No framework reads back from the device what it computes: a whole step of each on meta tensors."""

import pytest
import torch

from dipole import objective
from dipole.core.train.optimizer import LARS
from dipole.vision.augment import Augmentation, AugmentConfig
from dipole.vision.frameworks.base import Batch
from dipole.vision.frameworks.cmc import lab
from tests.device_reads import META, no_cuda_waits, no_reads
from tests.vision.made import colour_file, make_adapter

SMALL = {"encoder": {"name": "small-conv", "width": 4, "dim": 8}, "augment": {"size": 8}}
SETTINGS = {
    "simclr": {"method": "simclr"},
    "simclr three views, some negatives": {"method": "simclr", "views": 3, "negatives": 9},
    "moco": {"method": "moco", "negatives": 40, "moco": {"intra_batch": True}},
    "moco symmetric": {"method": "moco", "negatives": 40, "views": 3, "moco": {"symmetric": True}},
    "cmc": {"method": "cmc"},
    "cmc with a bank": {"method": "cmc", "negatives": 20},
    "swav": {"method": "swav", "swav": {"small_views": 2, "small_size": 8}},
    "swav with a queue": {"method": "swav", "negatives": 30},
    "blocks": {"method": "blocks"},
    "simsiam": {"method": "simsiam"},
    "byol": {"method": "byol", "views": 3},
    "mocov3": {"method": "mocov3"},
    "nnclr": {"method": "nnclr", "nnclr": {"support": 30}},
}
OTHERS = ["swav(prototypes=4)", "blocks", "tuple", "regression", "vicreg", "barlow_twins"]


@pytest.fixture(scope="module")
def colour(tmp_path_factory):
    return colour_file(tmp_path_factory.mktemp("data"))


def make(settings: dict, colour: dict[str, str], **context):
    size = 18 if settings["method"] == "blocks" else 16
    return make_adapter({**SMALL, "data": colour, **settings}, size, **context)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_framework_reads_nothing_back(settings, colour):
    adapter = make(settings, colour)
    found = next(iter(adapter.batches(0)))
    batch = Batch([view.to(META) for view in found.views], found.labels.to(META), found.rows.to(META), found.seed)
    adapter.module.to(META).train()
    lab(torch.zeros(1, 3, 2, 2, device=META))  # constants go to the device once
    # Each framework with two objectives and every third of the others, in turn.
    turn = list(SETTINGS.values()).index(settings) % 3
    for text in ["infonce + dp", "cross_entropy(classes=4) + cllr", *OTHERS[turn::3]]:
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


def test_the_augmentation_reads_nothing_back():
    config = AugmentConfig(size=8, blur=0.5, grey=0.2)
    images = torch.zeros(6, 3, 12, 12, dtype=torch.uint8, device=META)
    drawn = Augmentation(config).draw(6, 12, 12, torch.Generator().manual_seed(0))
    Augmentation(config).apply(images, drawn.to(META))  # constants go to the device once
    there = drawn.to(META)
    with no_reads():
        assert Augmentation(config).apply(images, there).device == META


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_step_on_a_gpu_waits_for_nothing(settings, colour):
    """Batches over pinned memory, augmentation, encoder, loss, optimizer, and what follows it."""
    device = torch.device("cuda")
    adapter = make(settings, colour, device=device)
    adapter.module.to(device).train()
    term = objective("infonce + dp", dim=adapter.embedding_dim).to(device)
    parameters = [p for p in [*adapter.module.parameters(), *term.parameters()] if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, 0.1, fused=True)

    def step(batch: Batch) -> None:
        term(adapter.embed(batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        adapter.after_step()

    batches = [each for epoch in range(2) for each in adapter.batches(epoch)]
    step(batches[0])
    with no_cuda_waits():
        step(batches[1])
