"""Losses, a SimCLR step and an agent's updates on a GPU; without one, what they would cost by a model.

    python -m dipole.benchmarks.speed.gpu [--minutes 7] [--device cuda] [--out FILE]
    python -m dipole.benchmarks.speed.gpu --model [--devices H100,B200] [--out FILE]

Measured: the device's own events around forward and backward pass, after a warm-up, with fresh inputs for every repeat;
the least time counts, the median is kept. Losses are ours (by the engine of the device, and by eager tiles), plain
PyTorch, the same compiled, and lightly, pytorch-metric-learning and siglip-kernel where they are installed; a library
that runs out of memory has that as its result. The floor follows from a matrix product and a copy on the same device.
The most telling comes first; what does not begin within `--minutes` is left out and named. Numbers go to
`benchmarks/speed/results/` under the device's name after every measurement, and a table is printed for the docs.

Modelled, on any machine: launches, floating-point operations, bytes and exponentials of our losses with eager tiles,
counted operation by operation, and with fused kernels, by their design; and what these take at a device's peak rates.
`--device cpu` runs the measuring itself with small sizes on a processor, which tells nothing but that it runs.
"""

import argparse
import gc
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import dipole
from dipole.benchmarks.speed.devices import DEVICES
from dipole.benchmarks.speed.model import DTYPES, Case, modelled
from dipole.benchmarks.speed.subjects import SHARP, Subject, subjects
from dipole.benchmarks.speed.timing import floor, rates, time_and_memory
from dipole.benchmarks.speed.work import LAUNCH
from dipole.core.objectives import engine
from dipole.core.utils.errors import DipoleError

RESULTS = Path(__file__).with_name("results")
PARTS = ("losses", "simclr", "agent")
LOSSES = ("infonce", SHARP, "infonce+dp")
PACKAGES = ("torch", "triton", "lightly", "pytorch-metric-learning", "siglip-kernel")


@dataclass(frozen=True)
class Sizes:
    """What is measured on a kind of device."""

    rows: str
    widths: str
    encoder: str
    images: int
    pixels: int
    transitions: int
    stored: int
    hidden: tuple[int, ...]


SIZES = {
    "cuda": Sizes("65536,16384,4096", "128,768", "resnet50", 64, 224, 512, 1500, (1024, 1024)),
    "cpu": Sizes("1280,64", "16", "small-conv", 4, 32, 4, 16, (8,)),
}


@dataclass(frozen=True)
class Job:
    """One measurement: the part of the results it belongs to, what tells it from others, and what gives its numbers."""

    part: str
    setting: dict[str, Any]
    run: Callable[[], dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.part}: {', '.join(str(value) for value in self.setting.values())}"


def jobs(cases: Sequence[Case], device: torch.device, sizes: Sizes, parts: Sequence[str], only: str) -> list[Job]:
    """All measurements, the most telling first."""
    first = cases[0].loss if cases else ""
    found: dict[int, list[Job]] = {}
    if "losses" in parts:
        for case in cases:
            for subject in subjects(case, device):
                if re.search(only, subject.name):
                    late = case.loss != first
                    # Compiling takes longer than what it is compared with.
                    rank = (case.dtype != "bf16") + 2 * late + 2 * (late and subject.name.endswith("compiled"))
                    found.setdefault(2 * rank, []).append(_job_of_loss(case, subject, device))
    if "simclr" in parts:
        found.setdefault(1, []).append(_job_of_simclr(sizes, device))
    if "agent" in parts:
        found.setdefault(1, []).extend(_job_of_agent(sizes, device, precision) for precision in ("float32", "bf16"))
    return [job for rank in sorted(found) for job in found[rank]]


def _job_of_loss(case: Case, subject: Subject, device: torch.device) -> Job:
    def run() -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(0)
        loss, served = subject.loss(case, device), engine.served()
        found = time_and_memory(
            lambda: subject.views(case, device, generator), lambda views: loss(views).backward(), device
        )
        if subject.name.startswith("dipole"):
            return found | {"engine": "fused" if engine.served() > served else "eager"}
        return found

    return Job("losses", asdict(case) | {"subject": subject.name}, run)


def _job_of_simclr(sizes: Sizes, device: torch.device) -> Job:
    setting = {"encoder": sizes.encoder, "images": sizes.images, "pixels": sizes.pixels, "dtype": "bf16"}

    def run() -> dict[str, Any]:
        from dipole.benchmarks.speed.vision import simclr

        calls = simclr(sizes.encoder, batch=sizes.images, size=sizes.pixels, device=device, bf16=True, compiles=False)
        alone, whole = (time_and_memory(lambda: None, lambda _, call=call: call(), device) for call in calls.values())
        return whole | {
            "encoder_ms": alone["ms"],
            "share_outside_encoder": 1 - alone["ms"] / whole["ms"],
            "images_per_second": 1e3 * sizes.images / whole["ms"],
        }

    return Job("simclr", setting, run)


def _job_of_agent(sizes: Sizes, device: torch.device, precision: str) -> Job:
    setting = {"transitions": sizes.transitions, "hidden": list(sizes.hidden), "precision": precision}

    def run() -> dict[str, Any]:
        from dipole.benchmarks.speed.rl import ours

        agent = ours(sizes.transitions, str(device), sizes.stored, hidden=sizes.hidden, precision=precision)

        def sample() -> Any:
            return agent.replay_buffer.sample_views(sizes.transitions, agent._augment, 1)

        # One update with and one without an actor step.
        pair = time_and_memory(sample, lambda batch: [agent.update(batch) for _ in range(2)], device)
        sampled = time_and_memory(lambda: None, lambda _: [agent.update(sample()) for _ in range(2)], device)
        return pair | {
            "updates_per_second": 2e3 / pair["ms"],
            "updates_per_second_with_sampling": 2e3 / sampled["ms"],
        }

    return Job("agent", setting, run)


def attempt(job: Job) -> dict[str, Any]:
    """The numbers of a job, or the error that it ended with."""
    try:
        return job.run()
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # of somebody's library: a result like any other
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
    finally:
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def measure(todo: Sequence[Job], device: torch.device, minutes: float, out: Path | None) -> dict[str, Any]:
    """Everything that begins within some minutes; written after each measurement."""
    began = time.monotonic()
    report: dict[str, Any] = {"modelled": False, "device": name_of(device), "date": date.today().isoformat()}
    report |= {"packages": packages(), "minutes": minutes, "rates": rates(device)}
    report |= {part: [] for part in PARTS} | {"left_out": []}
    for job in todo:
        if time.monotonic() - began > 60 * minutes:
            report["left_out"].append(str(job))
            continue
        found = attempt(job)
        row = job.setting | found
        if job.part == "losses":
            row["floor_ms"] = floor(row["rows"], row["width"], row["dtype"], report["rates"])
        report[job.part].append(row)
        print(f"{job}: {found.get('error') or format(found['ms'], ',.3f') + ' ms'}", flush=True)
        write(out, report)
    report["seconds"] = time.monotonic() - began
    write(out, report)
    return report


def name_of(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "processor (a dry run)"


def packages() -> dict[str, str]:
    """Versions of what is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def write(out: Path | None, report: dict[str, Any]) -> None:
    """Write what is there so far."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def markdown(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [head, ["---"] * len(head), *lines])


def table_of_measured(report: dict[str, Any]) -> str:
    """Tables of what was measured, for the docs."""
    texts = [f"{report['device']}, PyTorch {report['packages']['torch']}, {report['date']}"]
    lines = []
    for row in report["losses"]:
        times = [row.get("error"), "", ""]
        if "ms" in row:
            peak = f"{row['peak_mb']:.0f}" if "peak_mb" in row else ""
            times = [f"{row['ms']:.3f}", f"{row['floor_ms'] / row['ms']:.2f}", peak]
        subject = f"{row['subject']} ({row['engine']})" if "engine" in row else row["subject"]
        lines.append([row["loss"], row["rows"], row["width"], row["dtype"], subject, *times])
    if lines:
        texts.append(markdown(["loss", "rows", "d", "dtype", "by", "ms", "share of the floor", "peak MB"], lines))
    for row in report["simclr"]:
        found = row.get("error") or (
            f"{row['ms']:.1f} ms, {100 * row['share_outside_encoder']:.1f} % outside the encoder, "
            f"{row['images_per_second']:.0f} images/s"
        )
        texts.append(
            f"SimCLR step, {row['encoder']}, 2 x {row['images']} views of {row['pixels']} pixels, bf16: {found}"
        )
    for row in report["agent"]:
        found = row.get("error") or (
            f"{row['updates_per_second']:.0f} updates/s, {row['updates_per_second_with_sampling']:.0f} with sampling"
        )
        texts.append(f"agent, {row['transitions']} transitions, {row['precision']}: {found}")
    if report["left_out"]:
        texts.append("\n".join([f"Left out after {report['minutes']:g} minutes:", *report["left_out"]]))
    return "\n\n".join(texts)


def figure(value: float) -> str:
    """Three digits, never an exponent of ten where the number is large."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def table_of_modelled(rows: Sequence[dict[str, Any]], devices: Sequence[str]) -> str:
    """Counts and least times on every device, then of some devices what each part takes."""
    texts = ["MODELLED, not measured: a step forward and backward, and the least milliseconds at peak rates"]

    def case(row: dict[str, Any]) -> list[Any]:
        return [row["loss"], row["rows"], row["width"], row["dtype"], row["engine"]]

    head = ["loss", "rows", "d", "dtype", "engine"]
    lines = [
        [
            *case(row), row["launches"], figure(row['flops'] / 1e12), figure(row['bytes'] / 1e9),
            figure(row['exponentials'] / 1e9), *(figure(row['milliseconds'][name]['at least']) for name in DEVICES),
        ]
        for row in rows
    ]  # fmt: skip
    counts = ["launches", "TFLOP", "GB", "10^9 exp"]
    texts.append(markdown([*head, *counts, *(f"{name} ms" for name in DEVICES)], lines))
    for name in devices:
        parts = [[*case(row), *(figure(each) for each in row["milliseconds"][name].values())] for row in rows]
        device = DEVICES[name]
        texts.append(
            f"{name}: {device.bf16 / 1e12:g} TFLOP/s bf16, {device.tf32 / 1e12:g} TF32, {device.float32 / 1e12:g} "
            f"float32, {device.bytes / 1e12:g} TB/s, {device.exponentials / 1e12:.3g} 10^12 exp/s ({device.source}); "
            f"{1e6 * LAUNCH:g} microseconds a launch (assumed)"
        )
        texts.append(markdown([*head, *(f"{part} ms" for part in rows[0]["milliseconds"][name])], parts))
    return "\n\n".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dipole.benchmarks.speed.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", help="cuda, cuda:1, or cpu for a dry run; default cuda where there is one")
    parser.add_argument("--model", action="store_true", help="print the model, as it is done without a GPU")
    parser.add_argument("--devices", default="H100", help=f"of the model, in full: {', '.join(DEVICES)}")
    parser.add_argument("--losses", nargs="+", default=LOSSES, metavar="TEXT", help=f"default {', '.join(LOSSES)}")
    parser.add_argument("--rows", help="embeddings of both views, separated by commas; default 65536,16384,4096")
    parser.add_argument("--widths", help="of the embeddings, separated by commas; default 128,768")
    parser.add_argument("--dtypes", default="bf16,float32", help="default bf16,float32")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--only", default="", help="only who computes a loss by this regular expression")
    parser.add_argument("--minutes", type=float, default=7.0, help="nothing begins after them; default 7")
    parser.add_argument("--out", type=Path, help="JSON file; default results/gpu-DEVICE.json where a GPU is measured")
    options = parser.parse_args(arguments)
    device = _device(parser, options)
    sizes = SIZES[device.type if device else "cuda"]
    try:
        cases = _cases(parser, options, sizes)
        if device is None:
            rows = list(modelled(cases))
            print(table_of_modelled(rows, _words(parser, "--devices", options.devices, DEVICES)))
            known = {name: asdict(each) for name, each in DEVICES.items()}
            report = {"modelled": True, "launch_seconds": LAUNCH, "devices": known, "cases": rows}
            write(options.out, report)
            return 0
        parts = _words(parser, "--parts", options.parts, PARTS)
        out = options.out
        if out is None and device.type == "cuda":
            out = RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name_of(device).lower()).strip('-')}.json"
        if device.type == "cpu":
            torch.set_num_threads(1)
        report = measure(jobs(cases, device, sizes, parts, options.only), device, options.minutes, out)
    except DipoleError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out {error.filename}: {error.strerror}; give a file that can be written")
    print("\n" + table_of_measured(report))
    if out is not None:
        print(f"\n{out}")
    return 0


def _device(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device | None:
    """Where it is measured; None for the model."""
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: give a number above 0")
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only {options.only!r} is no regular expression: {error}")
    if options.model and options.device:
        parser.error("--model needs no --device: it reads no hardware; leave one of them out")
    if options.model or not (options.device or torch.cuda.is_available()):
        return None
    name = options.device or "cuda"
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"--device {name!r} is no device; allowed are cuda, cuda:N and cpu")
    if device.type not in SIZES:
        parser.error(f"--device {name}: allowed are cuda, cuda:N and cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(
            f"--device {name}: PyTorch sees {torch.cuda.device_count()} GPUs; without one, --model prints costs"
        )
    return device


def _cases(parser: argparse.ArgumentParser, options: argparse.Namespace, sizes: Sizes) -> list[Case]:
    """Losses by importance: the first loss before others, bf16 before float32, narrow before wide, many rows first."""
    for text in options.losses:
        dipole.objective(text)
    rows = _numbers(parser, "--rows", options.rows or sizes.rows, even=True)
    widths = _numbers(parser, "--widths", options.widths or sizes.widths)
    dtypes = _words(parser, "--dtypes", options.dtypes, DTYPES)
    return [
        Case(loss, number, width, dtype)
        for loss in dict.fromkeys(options.losses)
        for dtype in dtypes
        for width in widths
        for number in rows
    ]


def _numbers(parser: argparse.ArgumentParser, option: str, text: str, even: bool = False) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1 or (even and int(word) % 2):
            kind = "even numbers above 0, as two views share the rows" if even else "numbers above 0"
            parser.error(f"{option} {word!r}: give {kind}, separated by commas")
    return list(dict.fromkeys(map(int, words)))


def _words(parser: argparse.ArgumentParser, option: str, text: str, allowed: Any) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in allowed]:
        parser.error(f"{option}: there is no {', '.join(unknown)}; allowed are {', '.join(allowed)}")
    return list(dict.fromkeys(words))


if __name__ == "__main__":
    sys.exit(main())
