"""One seed for a run, split by name into independent streams.

    stream(name, *index) = first 31 bits of SHA-256("dipole/<seed>/<name>/<index>/...")

The hash is stable across machines, Python versions and processes, so that a new stream never shifts an old one.
31 bits fit every consumer (NumPy, PyTorch, Gymnasium, MuJoCo).
"""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

STREAMS = ("data", "model", "augment", "env", "probe")


@dataclass(frozen=True)
class Seeds:
    """The seed of a run and the streams derived from it.

    Attributes:
        root: the run's seed, >= 0.
        data: order and subset of the samples.
        model: initial weights and dropout.
        augment: random views.
        env: environments and exploration.
        probe: everything in the evaluation.
    """

    root: int
    data: int = field(init=False, repr=False)
    model: int = field(init=False, repr=False)
    augment: int = field(init=False, repr=False)
    env: int = field(init=False, repr=False)
    probe: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in STREAMS:
            object.__setattr__(self, name, self.stream(name))

    def stream(self, name: str, *index: int | str) -> int:
        """A seed in [0, 2^31) for a name and optional indices, such as `stream("augment", epoch)`.

        Args:
            name: of the stream.
            index: numbers and texts that tell seeds of one name apart.
        """
        text = "/".join(["dipole", str(self.root), name, *map(str, index)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    def numpy(self, name: str, *index: int | str) -> np.random.Generator:
        """A fresh NumPy generator of a stream.

        Args:
            name: as in `stream`.
            index: as in `stream`.
        """
        return np.random.default_rng(self.stream(name, *index))

    def torch(self, name: str, *index: int | str, device: str | torch.device = "cpu") -> torch.Generator:
        """A fresh PyTorch generator of a stream.

        Args:
            name: as in `stream`.
            index: as in `stream`.
            device: of the generator.
        """
        return torch.Generator(device=device).manual_seed(self.stream(name, *index))

    def as_dict(self) -> dict[str, int]:
        """The root seed and every named stream, as kept in the record."""
        return asdict(self)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch (all devices)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.accelerator.is_available():  # without one, `torch.manual_seed` formats its stack for each kind of device
        torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the global generators' states as lists and tensors, of which a checkpoint is made."""
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [[int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the result of `rng_state`. GPU states are skipped if the number of GPUs differs."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Run a block under its own seed and give the global generators back as they were."""
    before = rng_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_rng_state(before)


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Run a block under `set_deterministic` if `enabled`, and give PyTorch's settings back as they were."""
    if not enabled:
        yield
        return
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    set_deterministic()
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.backends.cudnn.benchmark = before[1]


def set_deterministic() -> None:
    """Make PyTorch refuse operations without a deterministic implementation (`deterministic = true` in a recipe)."""
    # cuBLAS reads this once, when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
