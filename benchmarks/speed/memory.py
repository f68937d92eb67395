"""Peak memory and time of a training step, undivided, in microbatches and with activation checkpointing.

    python -m dipole.benchmarks.speed.memory [--images 128] [--sentences 512] [--microbatch 32] [--device cuda]

A step is the forward and backward pass of two views through an encoder and InfoNCE over all of them. The encoders are
ResNet-18 with the CIFAR stem on 32 x 32 pixels, and a BERT of 4 layers of width 256 on sentences of 32 tokens. Every
line is a fresh process with one thread in float32. Memory is the peak above what was held before the step, of a GPU or
of the process.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

WAYS = {
    "undivided": {},
    "activation_checkpointing": {"activation_checkpointing": True},
    "microbatch": {"microbatch": True},
    "both": {"microbatch": True, "activation_checkpointing": True},
}


def resnet(rows: int, device: str) -> tuple[Any, list[Any]]:
    """Return an encoder of images and two views."""
    import torch

    from dipole.vision.encoders import EncoderConfig, build_encoder

    encoder = build_encoder(EncoderConfig(name="resnet18"), 3, 32).to(device)
    return encoder, [torch.rand(rows, 3, 32, 32, device=device) for _ in range(2)]


def bert(rows: int, device: str) -> tuple[Any, list[Any]]:
    """Return an encoder of sentences and two views."""
    import torch

    from dipole.text.encoders import small_transformer
    from dipole.text.encoders.batch import Chunk

    encoder = small_transformer(1000, 256, 4, 4, "mean").to(device)
    lengths = torch.full((rows,), 32)
    return encoder, [Chunk(torch.randint(1000, (rows, 32), device=device), lengths) for _ in range(2)]


SUBJECTS = {"resnet18": resnet, "bert": bert}


def measure(subject: str, rows: int, microbatch: int, way: str, device: str) -> dict[str, float]:
    """Run one step in this process and return its seconds and peak MB."""
    import torch

    import dipole
    from dipole.core.train.config import TrainConfig
    from dipole.core.train.memory_saving import Encoding
    from dipole.core.utils.machine import peak_memory

    torch.set_num_threads(1)
    encoder, views = SUBJECTS[subject](rows, device)
    settings = WAYS[way] | ({"microbatch": microbatch} if "microbatch" in WAYS[way] else {})
    encoding = Encoding([encoder], TrainConfig(steps=1, **settings), compiles=False)
    loss = dipole.objective("infonce")
    cuda = device.startswith("cuda")
    before = torch.cuda.memory_allocated() if cuda else peak_memory()
    began = time.process_time()
    with encoding():
        embeddings = [encoder(view) for view in views]
    loss(*embeddings).loss.backward()
    seconds = time.process_time() - began
    after = torch.cuda.max_memory_allocated() if cuda else peak_memory()
    return {"seconds": seconds, "megabytes": (after - before) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=128, help="of a batch; two views of each")
    parser.add_argument("--sentences", type=int, default=512, help="of a batch; two views of each")
    parser.add_argument("--microbatch", type=int, default=32, help="rows at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", nargs=2, metavar=("SUBJECT", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = {"resnet18": options.images, "bert": options.sentences}
    if options.one:
        subject, way = options.one
        print(json.dumps(measure(subject, rows[subject], options.microbatch, way, options.device)))
        return
    print("| encoder | rows of a view | way | peak MB | processor seconds |\n|---|---|---|---|---|")
    for subject in SUBJECTS:
        for way in WAYS:
            command = [sys.executable, "-m", "dipole.benchmarks.speed.memory", *sys.argv[1:], "--one", subject, way]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"| {subject} | {rows[subject]} | {way} | {found['megabytes']:.0f} | {found['seconds']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
