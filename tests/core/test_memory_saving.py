"""Settings that change how the encoder is run, not what is learnt: microbatches, activation checkpointing, float16."""

import copy
from pathlib import Path

import pytest
import torch
from blobs_domain import BlobsAdapter
from runs import Steeper, assert_same_bits, lines, patch_blobs, quiet, weights
from torch import nn

from dipole import ConfigError, cached
from dipole.core.train import memory_saving
from dipole.core.train.config import TrainConfig
from dipole.core.train.memory_saving import PatchedEncoders, segments
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train
from dipole.text.encoders.batch import pad
from dipole.text.encoders.networks import WordGRU
from dipole.text.model import small_transformer, trained_table
from dipole.vision.encoders import EncoderConfig, build_encoder
from tests.runs import refused


def losses(runs: Path) -> list[dict[str, float]]:
    return [line for line in lines(runs) if "train/loss" in line]


def test_a_run_in_microbatches_learns_what_the_undivided_run_learns(blobs, tmp_path):
    seen: list[int] = []

    def watch(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, nn.Dropout) and torch.is_grad_enabled() and module.training:
            seen.append(len(args[0]))

    overrides = ("train.log_every=1", "blobs.dropout=0.0")
    quiet(blobs, *overrides, runs=tmp_path / "whole")
    handle = nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        quiet(blobs, *overrides, "train.microbatch=5", runs=tmp_path / "divided")
    finally:
        handle.remove()
    assert max(seen) == 5
    for a, b in zip(losses(tmp_path / "whole"), losses(tmp_path / "divided"), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights(tmp_path / "divided"), weights(tmp_path / "whole"), rtol=0, atol=1e-5)


def test_only_checkpointing_changes_no_bit_and_keeps_the_run_s_name(blobs, tmp_path):
    quiet(blobs, "train.log_every=1", runs=tmp_path / "kept")
    quiet(blobs, "train.log_every=1", "train.activation_checkpointing=true", runs=tmp_path / "again")
    assert_same_bits(tmp_path / "kept", tmp_path / "again")
    base = load_recipe(blobs, []).config.hash
    for setting in ("train.microbatch=4", "train.compile=true", "train.precision=16-mixed"):
        assert load_recipe(blobs, [setting]).config.hash != base, setting
    assert load_recipe(blobs, ["train.activation_checkpointing=true"]).config.hash == base


def test_settings_without_effect_are_refused(blobs, tmp_path, monkeypatch):
    monkeypatch.setattr(BlobsAdapter, "encoders", lambda self: [nn.Linear(1, 1)])
    said = r"train.microbatch: has no effect in this domain, .*Adapter.encoders"
    refused(ConfigError, said, quiet, blobs, "train.microbatch=4", runs=tmp_path)
    for setting in ("microbatch=4", "activation_checkpointing=true", "compile=true"):
        refused(ConfigError, "has no effect in the domain 'rl'", load_recipe, "dot", [f"train.{setting}"])
    said = r"'16-mixed' is not possible .*'rl'. Allowed: 32, bf16-mixed"
    refused(ConfigError, said, load_recipe, "dot", ["train.precision=16-mixed"])
    said = r"train\.compile: .*True, False or one of 'default', 'reduce-overhead'"
    for wrong in ("reduce_overhead", "yes", 1, "reduce-overheads"):
        refused(ConfigError, said, load_recipe, blobs, [f"train.compile={wrong}"])
    assert load_recipe("dot", ["train.precision=bf16-mixed"]).config.train.precision == "bf16-mixed"


@pytest.mark.parametrize(("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_half_precision_computes_in_it_and_float16_scales_the_loss(blobs, tmp_path, monkeypatch, precision, dtype):
    seen: list[tuple[torch.dtype, float]] = []

    def spoil(z: torch.Tensor) -> torch.Tensor:
        if z.requires_grad:
            z.register_hook(lambda grad: seen.append((z.dtype, float(grad.abs().max()))))
        return z

    patch_blobs(monkeypatch, "spoil", spoil)
    quiet(blobs, f"train.precision={precision}", "train.log_every=1", runs=tmp_path / "half")
    dtypes, largest = zip(*seen, strict=True)
    assert set(dtypes) == {dtype}
    seen.clear()
    quiet(blobs, "train.log_every=1", runs=tmp_path / "full")
    scale = 65536 if dtype == torch.float16 else 1
    assert largest[0] == pytest.approx(scale * seen[0][1], rel=0.05)
    for half, full in zip(losses(tmp_path / "half"), losses(tmp_path / "full"), strict=True):
        assert not half.get("train/skipped")
        assert half["train/loss"] == pytest.approx(full["train/loss"], rel=0.03)  # itself in float32
        assert half["train/grad_norm"] == pytest.approx(full["train/grad_norm"], rel=0.1)


@pytest.mark.parametrize("optimizer", ["adam", "lars", "sgd"])
def test_an_overflow_of_the_scale_leaves_the_step_out(blobs, tmp_path, monkeypatch, optimizer):
    """Steep gradients overflow float16 under the first scales. Each skipped step halves the scale until they fit."""
    patch_blobs(monkeypatch, "spoil", lambda z: Steeper.apply(z, 30))
    half = ("train.precision=16-mixed", "train.log_every=1", "train.learning_rate=1e-6")
    quiet(blobs, *half, f"train.optimizer={optimizer}", runs=tmp_path)
    found = losses(tmp_path)
    skipped = [line["train/skipped"] for line in found]
    assert (skipped[0], 0 in skipped[:8]) == (1, True), skipped
    assert all("train/grad_norm" in line or line["train/skipped"] for line in found)


class Recorded(nn.Module):
    """A chain with a layer in place after a random one, spectral norm, and a mask that the batch shares."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.4),
            nn.ReLU(inplace=True), nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)),
            nn.BatchNorm2d(4, momentum=None), nn.Dropout2d(0.2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(4 * 6 * 6, 5)

    def forward(self, x):
        return self.head(self.chain(x))


def transformer():
    encoder = small_transformer(30, 8, 4, 2, "mean")
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    return encoder


def vision_encoder(name: str):
    return lambda: build_encoder(EncoderConfig(name=name, width=4), 3, 16, 0.125)


ENCODERS = {  # and the number of their segments
    "chain": (Recorded, 1),
    "small-conv": (vision_encoder("small-conv"), 2),
    "resnet18": (vision_encoder("resnet18"), 8),
    "transformer": (transformer, 4),
    "gru": (lambda: WordGRU(trained_table(30, 6), 8, "combine"), 1),
}


def built(name: str):
    """The encoder from the same weights each time, and its input: sentences or images."""
    draw = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    encoder = ENCODERS[name][0]()
    if name in ("transformer", "gru"):
        return encoder, pad([torch.randint(1, 30, (n,), generator=draw).numpy() for n in (9, 8, 8, 5, 3, 2)])
    return encoder, torch.rand(6, 3, 8, 8, generator=draw)


@pytest.mark.parametrize("microbatch", [None, 4])
@pytest.mark.parametrize("name", ENCODERS)
def test_checkpointing_is_exact_to_the_bit(name, microbatch):
    found = []
    for activation_checkpointing in (False, True):
        encoder, x = built(name)
        assert len(segments(encoder)) == ENCODERS[name][1]
        names = list(encoder.state_dict())
        config = TrainConfig(steps=1, microbatch=microbatch, activation_checkpointing=activation_checkpointing)
        run = PatchedEncoders([encoder], config, compiles=False)
        torch.manual_seed(3)
        with run():
            z = encoder(x)
        torch.rand(7)  # what is drawn before the backward pass must not matter
        z.square().sum().backward()
        gradients = [torch.zeros(()) if p.grad is None else p.grad for p in encoder.parameters()]
        found.append([z.detach(), *gradients, *encoder.buffers(), torch.rand(4)])
        assert list(encoder.state_dict()) == names
        assert all("forward" not in module.__dict__ for module in encoder.modules())
        copy.deepcopy(encoder)
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)
    with PatchedEncoders([encoder], TrainConfig(steps=1), compiles=False)():  # nothing is done where nothing is asked
        assert "forward" not in encoder.__dict__
    assert cached(encoder, "infonce", microbatch=2).encoder is encoder


def test_less_is_kept_for_the_backward_pass():
    def kept(encoder: nn.Module, x, on: bool) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        run = PatchedEncoders([encoder], TrainConfig(steps=1, activation_checkpointing=on), compiles=False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), run():
            encoder(x)
        own = {p.untyped_storage().data_ptr() for p in encoder.parameters()}
        return sum(size for place, size in storages.items() if place not in own)

    for name in ENCODERS.keys() - {"chain"}:
        assert kept(*built(name), True) < 0.6 * kept(*built(name), False), name


def test_without_a_compiler_the_run_goes_on_and_says_so(blobs, tmp_path, monkeypatch, capsys):
    def broken(function, **options):
        def call(*args):
            raise RuntimeError("No working C++ compiler found in cxx: (None, 'g++')\nmore lines")

        return call

    monkeypatch.setattr(memory_saving.torch, "compile", broken)
    assert train(load_recipe(blobs, ["train.compile=true"]).config, tmp_path / "runs").status == "done"
    told = capsys.readouterr()
    text = " ".join((told.out + told.err).split())
    assert "train.compile: this machine cannot compile, so nothing is (No working C++ compiler found" in text
    assert "more lines" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["true", "reduce-overhead"])
@pytest.mark.parametrize("more", [(), ("train.microbatch=6",), ("train.activation_checkpointing=true",)])
def test_a_compiled_run_is_the_eager_one_to_rounding(blobs, tmp_path, mode, more):
    overrides = ("train.log_every=1", "blobs.dropout=0.0")
    quiet(blobs, *overrides, runs=tmp_path / "eager")
    quiet(blobs, *overrides, f"train.compile={mode}", *more, runs=tmp_path / "compiled")
    for a, b in zip(losses(tmp_path / "eager"), losses(tmp_path / "compiled"), strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    assert list(weights(tmp_path / "eager")) == list(weights(tmp_path / "compiled"))


@pytest.mark.parametrize("mode", [True, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_a_mode_is_what_torch_compile_makes_of_it(mode, monkeypatch):
    """Every step of a mode with CUDA graphs tells the compiler that it begins."""
    asked, begun, encoder, original = [], [], nn.Linear(3, 2), torch.compile

    def compiled(function, options):
        asked.append(options)
        return original(function, backend="eager")

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    encoding = PatchedEncoders([encoder], TrainConfig(steps=1, compile=mode), compiles=True)
    for _ in range(3):
        with encoding():
            encoder(torch.ones(2, 3))
    (options,) = asked
    graphs = mode in ("reduce-overhead", "max-autotune")
    assert options["fallback_random"] is True
    assert options.get("triton.cudagraphs", False) is graphs
    assert options.get("max_autotune", False) is str(mode).startswith("max-autotune")
    assert len(begun) == 3 * graphs
