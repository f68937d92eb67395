"""`dipole doctor`: check this machine."""

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from types import ModuleType

from packaging.requirements import Requirement

from dipole.core.cli.app import broken_plugins
from dipole.core.cli.output import say
from dipole.core.cli.parser import Runner, add_runs
from dipole.core.train.domains import Domain, domains
from dipole.core.utils.download import free_bytes, offline_by
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.extras import install_line
from dipole.core.utils.files import why
from dipole.core.utils.machine import processor_facts, processors
from dipole.core.utils.plugins import GROUPS, SWITCH, distribution, is_ours, points, switched_off
from dipole.core.utils.text import counted

WIDTH = 128  # of the rows with which the engine is timed


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Check packages, GPU, data folders and disk, with fixes.

    It also reports plug-ins that cannot be used.
    """
    add_runs(parser, "folder of runs to look at")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    return run


def run(arguments: argparse.Namespace) -> int:
    findings = []
    for finding in examine(arguments.runs):
        findings.append(finding)
        if not arguments.json:
            say(f"{finding.state:<8} {finding.name}: {finding.detail}", sys.stdout)
            if finding.fix:
                say(f"{'':<8}   -> {finding.fix}", sys.stdout)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return int(any(finding.state == "broken" for finding in findings))


@dataclass(frozen=True)
class Finding:
    """The result of one check. "missing" affects some work, "broken" stops all work."""

    name: str
    state: str  # "ok", "missing" or "broken"
    detail: str
    fix: str = ""


LOW_DISK = 2 * 2**30


def examine(runs: Path) -> Iterator[Finding]:
    """Yield the findings. `runs` is the folder of runs."""
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}, {platform.machine()}")
    yield from _torch()
    yield from _packages()
    yield from _plugins()
    for domain in domains().values():
        for title, target in domain.probes.items():
            yield _probe(domain, f"{domain.name}: {title}", target)
    yield _data_folder()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = Path(os.environ.get("HF_HOME") or caches / "huggingface").absolute()
    offline = f" (offline by {offline_by()})" * bool(offline_by())
    yield _writable("hub cache", hub, "missing", "Set HF_HOME to a folder you may write.", offline)
    runs = runs.absolute()
    yield _writable("runs folder", runs, "broken", "Choose another folder with --runs.")
    free, state, fix = free_bytes(runs), "ok", ""
    if free < LOW_DISK:
        state, fix = "missing", "Free some space, or choose another folder with --runs."
    yield Finding("disk", state, f"{free / 2**30:.1f} GiB free", fix)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:
        fix = "Install it again: pip install --force-reinstall torch"
        yield Finding("torch", "broken", f"cannot be imported: {error}", fix)
        return
    yield Finding("torch", "ok", torch.__version__)
    available, threads = processors(), torch.get_num_threads()
    state, fix = "ok", ""
    if threads > available:
        state, fix = "missing", f"There are more threads than processors. Set OMP_NUM_THREADS={available}"
    yield Finding("threads", state, f"{threads} for {counted(available, 'processor')}", fix)
    yield _gpu(torch)
    yield _bfloat16(torch)
    yield _engine(torch)


def _gpu(torch: ModuleType) -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("gpu", "ok", ", ".join(names))
    if torch.backends.mps.is_available():
        return Finding("gpu", "ok", "Apple GPU (mps)")
    if shutil.which("nvidia-smi") is None:
        return Finding("gpu", "ok", "none. Everything runs on the CPU")
    fix = f"This torch needs CUDA {torch.version.cuda}: update the driver, or install a torch for this driver."
    if torch.version.cuda is None:
        fix = "This torch is a CPU build. Install one for CUDA, see https://pytorch.org/get-started"
    return Finding("gpu", "missing", "nvidia-smi exists, but torch sees no GPU", fix)


def _bfloat16(torch: ModuleType) -> Finding:
    name = "bf16"
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() >= (8, 0):
            return Finding(name, "ok", "native on the GPU")
        return Finding(name, "missing", "this GPU emulates it", 'Use train.precision = "16-mixed" or "32".')
    flags = processor_facts().get("flags", processor_facts().get("Features", ""))
    if not flags:
        return Finding(name, "ok", "unknown for this processor")
    if re.search(r"\b(amx_bf16|avx512_bf16|bf16)\b", flags):
        return Finding(name, "ok", "native on the processor")
    return Finding(name, "missing", "this processor emulates it, slowly", 'Keep train.precision = "32".')


def _engine(torch: ModuleType) -> Finding:
    """Report the engine of the objectives, its self-check and the time of a forward and backward pass."""
    from dipole.core.objectives import engine
    from dipole.core.objectives.pairs import Pairs
    from dipole.core.objectives.similarity import Factors
    from dipole.core.objectives.statistics import LogSumExp

    wanted, seconds = LogSumExp(2.0), []
    try:
        device = engine.usual_device()
        against = engine.reason_against(device)
        interpreted = not against and engine.interpreter()
        rows, passes = 16384, 4
        if device.type == "cpu":
            rows = 1024
        if interpreted:
            rows, passes = 64, 2
        noted, served = len(engine.failures()), engine.served()
        for _ in range(passes):
            x = torch.nn.functional.normalize(torch.randn(rows, WIDTH, device=device), dim=1).requires_grad_()
            start = time.perf_counter()
            engine.statistics_of(Factors(x, x, 1.0), Pairs.of_points(x), [wanted])[wanted].sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
    except DipoleError as error:
        what, _, fix = str(error).partition(": ")
        return Finding("engine", "missing", what, fix or what)
    took = f"{rows} rows x {WIDTH} take {median(seconds[1:]) * 1e3:.3g} ms"
    if not against and engine.served() > served:
        how = "interpreted on the processor" if interpreted else f"on {torch.cuda.get_device_name(device)}"
        return Finding("engine", "ok", f"triton {version('triton')}, {how}, {took}, self-check ok")
    failures = "; ".join(engine.failures()[noted:])
    detail = f"eager tiles ({failures or against}), {took}"
    if failures:
        fix = f"Report it. Tiles are used instead. {engine.VARIABLE}=eager silences the warning."
        return Finding("engine", "missing", f"{detail}, self-check of kernels: {failures}", fix)
    return Finding("engine", "ok", f"{detail}, nothing to check")


def _packages() -> Iterator[Finding]:
    """Compare installed packages with the requirements of dipole and of each of its extras."""
    try:
        lines, extras = requires("dipole") or [], metadata("dipole").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        yield Finding("packages", "broken", "dipole itself is not installed", "pip install -e .")
        return
    left = [each for each in map(Requirement, lines) if each.name != "dipole"]
    for extra in ("", *(each for each in extras if each not in ("dev", "all"))):
        packages = [each for each in left if each.marker is None or each.marker.evaluate({"extra": extra})]
        left = [each for each in left if each not in packages]
        absent, problems = _compare(packages)
        name, install = f"packages of {extra or 'core'}", install_line(extra)
        if problems:
            install += " --upgrade"
        if absent:
            problems.insert(0, f"not installed: {', '.join(absent)}")
        if problems:
            yield Finding(name, "missing" if extra else "broken", ", ".join(problems), install)
        elif packages:
            yield Finding(name, "ok", ", ".join(f"{each.name}{each.specifier}" for each in packages))


def _compare(packages: list[Requirement]) -> tuple[list[str], list[str]]:
    """Return missing packages, and packages of another version."""
    absent, old = [], []
    for package in packages:
        try:
            found = version(package.name)
        except PackageNotFoundError:
            absent.append(package.name)
        else:
            if not package.specifier.contains(found, prereleases=True):
                old.append(f"{package.name} {found} (wanted {package.specifier})")
    return absent, old


def _plugins() -> Iterator[Finding]:
    """Yield a finding for each plug-in package, and for each of its parts that cannot be used."""
    if not any(map(is_ours, points("domains"))):
        fix = "Install it again: `make`, or pip install -e . in the checkout."
        yield Finding("entry points", "broken", "dipole's own entry points are missing", fix)
    if switched_off():
        yield Finding("plug-ins", "ok", f"switched off by {SWITCH}=none")
    declared: dict[str, list[str]] = {}
    for kind in GROUPS:
        for point in points(kind):
            if not is_ours(point):
                declared.setdefault(distribution(point), []).append(f"{kind}: {point.name}")
    for name, parts in declared.items():
        yield Finding(f"plug-in {name}", "ok", ", ".join(parts))
    for kind in GROUPS:
        try:
            errors = broken_plugins(kind)
        except Exception as error:  # dipole's own
            yield Finding(kind, "broken", f"{type(error).__name__}: {error}", "Install dipole again.")
            continue
        for each in errors:
            name = f"plug-in {distribution(each.point)}: {kind} {each.point.name}"
            fix = f"Repair it, or remove it with: pip uninstall {each.package}"
            yield Finding(name, "missing", each.reason, fix)


def _probe(domain: Domain, name: str, target: str) -> Finding:
    try:
        found = resolve_name(target)()
    except DipoleError as error:
        what, _, fix = str(error).partition(". ")
        return Finding(name, "missing", what, fix or what)
    except ModuleNotFoundError as error:
        return Finding(name, "missing", f"{error.name} is not installed", domain.install)
    except (Exception, SystemExit) as error:  # plug-ins may call sys.exit
        fix = "This domain cannot be used until the error is fixed."
        return Finding(name, "missing", f"{type(error).__name__}: {error}", fix)
    detail = "loads"
    if isinstance(found, str):
        detail = found
    return Finding(name, "ok", detail)


def _data_folder() -> Finding:
    text = os.environ.get("DIPOLE_DATA")
    if not text:
        return Finding("data folder", "ok", "DIPOLE_DATA is not set: embedded data and the Hub are used")
    folder = Path(text)
    if not folder.is_dir():
        return Finding("data folder", "missing", f"DIPOLE_DATA={text} is not a folder", "Correct or unset DIPOLE_DATA.")
    if not os.access(folder, os.R_OK | os.X_OK):
        return Finding("data folder", "missing", f"{text} cannot be read", f"Change its mode: chmod -R a+rX {text}")
    names = ", ".join(sorted(each.name for each in folder.iterdir())) or "empty"
    return Finding("data folder", "ok", f"{text}: {names}")


def _writable(name: str, folder: Path, state: str, fix: str, note: str = "") -> Finding:
    """Try to write in a folder or in its nearest parent."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Finding(name, "ok", f"{folder}{note}")
    except OSError as error:
        return Finding(name, state, f"{folder}: {why(error, '')}", fix)
