"""Peak memory and time of a training step, undivided, in microbatches and with activation checkpointing.

    python -m dipole.benchmarks.speed.memory [--images 128] [--sentences 512] [--microbatch 32] [--device cuda]

A step is the forward and backward pass of two views through an encoder and InfoNCE over all of them. The encoders are
ResNet-18 with the CIFAR stem on 32 x 32 pixels, and a BERT of 4 layers of width 256 on sentences of 32 tokens. Every
line is a fresh process with one thread in float32. Memory is the peak above what was held before the step, of a GPU or
of the process.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

import dipole
from dipole.benchmarks.report.table import markdown
from dipole.core.train.config import TrainConfig
from dipole.core.train.memory_saving import PatchedEncoders
from dipole.core.utils.machine import peak_memory

WAYS = ("undivided", "activation_checkpointing", "microbatch", "both")


def subject(name: str, rows: int, device: str) -> tuple[Any, list[Any]]:
    if name == "resnet18":
        from dipole.vision.encoders import EncoderConfig, build_encoder

        encoder = build_encoder(EncoderConfig(name=name), 3, 32).to(device)
        return encoder, [torch.rand(rows, 3, 32, 32, device=device) for _ in range(2)]
    from dipole.text.encoders.batch import Chunk
    from dipole.text.model import small_transformer

    lengths = torch.full((rows,), 32)
    views = [Chunk(torch.randint(1000, (rows, 32), device=device), lengths) for _ in range(2)]
    return small_transformer(1000, 256, 4, 4, "mean").to(device), views


def measure(name: str, rows: int, microbatch: int, way: str, device: str) -> tuple[float, float]:
    """Run one step in this process and return its peak MB and seconds."""
    torch.set_num_threads(1)
    encoder, views = subject(name, rows, device)
    size = None
    if way in ("microbatch", "both"):
        size = microbatch
    checkpoints = way in ("activation_checkpointing", "both")
    config = TrainConfig(steps=1, microbatch=size, activation_checkpointing=checkpoints)
    encoding = PatchedEncoders([encoder], config, compiles=False)
    loss, is_cuda = dipole.objective("infonce"), device != "cpu"
    before = torch.cuda.memory_allocated() if is_cuda else peak_memory()
    began = time.process_time()
    with encoding():
        embeddings = [encoder(view) for view in views]
    loss(*embeddings).loss.backward()
    seconds = time.process_time() - began
    after = torch.cuda.max_memory_allocated() if is_cuda else peak_memory()
    return (after - before) / 2**20, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=128, help="of a batch; two views of each")
    parser.add_argument("--sentences", type=int, default=512, help="of a batch; two views of each")
    parser.add_argument("--microbatch", type=int, default=32, help="rows at a time")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(markdown(["encoder", "rows of a view", "way", "peak MB", "processor seconds"], []))
    for name, rows in (("resnet18", options.images), ("bert", options.sentences)):
        for way in WAYS:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found = pool.submit(measure, name, rows, options.microbatch, way, options.device).result()
            print(f"| {name} | {rows} | {way} | {found[0]:.0f} | {found[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
