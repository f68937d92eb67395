"""A program: import all of dipole as on a system without POSIX, train, look at and remove a run, find every test.

    python tests/core/without_posix.py FOLDER

Other packages are imported before: they know such systems themselves.
"""

import importlib
import os
import pkgutil
import select
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
OF_OS = (
    "fork", "forkpty", "geteuid", "getuid", "getloadavg", "killpg", "mkfifo", "posix_fallocate", "sched_getaffinity",
    "sched_setaffinity", "setsid", "statvfs", "sysconf", "uname", "wait3",
)  # fmt: skip
OF_SIGNAL = ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "alarm", "pthread_kill", "setitimer")
OTHERS = (
    "torch", "torch.distributed", "torch.utils.checkpoint", "torch._inductor", "torch.ao.quantization", "accelerate",
    "sklearn.linear_model", "sklearn.cluster", "scipy.stats", "datasets", "transformers", "gymnasium", "mujoco",
    "stable_baselines3", "altair", "matplotlib.pyplot", "optuna", "sentence_transformers", "PIL.Image", "rich.progress",
    "multiprocessing.util", "concurrent.futures.process", "subprocess", "tempfile", "shutil", "psutil", "filelock",
    "nltk", "dm_control", "imageio", "triton", "submitit", "onnx", "onnxruntime", "platformdirs",
    "pytest", "xdist.plugin", "hypothesis", "mkdocs.commands.build", "http.server", "webbrowser", "tarfile", "pdb",
    "multiprocessing.forkserver", "multiprocessing.pool", "multiprocessing.popen_spawn_posix",
)  # fmt: skip


def take_away() -> None:
    for name in OTHERS:
        try:
            importlib.import_module(name)
        except Exception:  # an extra that is not here, or a device that it wants
            continue
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL), (select, ("poll", "epoll"))):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in MODULES:
        sys.modules[name] = None


def main(folder: Path) -> None:
    import dipole

    failed = []
    for found in pkgutil.walk_packages(dipole.__path__, "dipole."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except Exception as error:
            if not missing_extra(error):
                failed.append(f"{found.name}: {type(error).__name__}: {error}")
    print("\n".join(failed) or "every module")
    from dipole.core.cli import main as command

    os.chdir(folder)
    small = ["train.steps=2", "train.epochs=", "train.warmup=0", "train.batch_size=16", "vision.data.limit=64"]
    small += ["vision.probe.probes=['knn']", "vision.probe.baselines=false"]
    codes = [command(["train", "digits-simclr", "--quiet", "--set", *small])]
    run = next(path for path in Path("runs").iterdir() if (path / "config.toml").is_file())
    codes += [command(words) for words in (["eval", str(run)], ["list", "runs"], ["rm", str(run), "--yes"])]
    print("codes", *codes, flush=True)


def missing_extra(error: Exception) -> bool:
    """Whether an import failed because a package is not installed, and not because of the modules hidden here."""
    return (isinstance(error, ModuleNotFoundError) and error.name not in MODULES) or "is not installed" in str(error)


def collect() -> int:
    """Let pytest import every test, and say what it cannot. The last line says how many tests there are."""
    import pytest

    os.chdir(ROOT)
    return int(pytest.main(["--collect-only", "-q", "-q", "-p", "no:cacheprovider", "-m", "", "tests"]))


if __name__ == "__main__":
    take_away()
    main(Path(sys.argv[1]))
    sys.exit(collect())
