"""What people type for a command that dipole calls otherwise, and what does it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CURES: Final[Mapping[str, tuple[str, ...]]] = {
    "To go on with a run, repeat its `dipole train ...`, or: dipole train runs/HASH/config.toml": (
        "resume", "continue", "restart",
    ),
    "To train: dipole train RECIPE": ("run", "fit", "start", "pretrain", "learn", "launch"),
    "To measure a run again: dipole eval RUN": ("evaluate", "evaluation", "validate", "score", "probe"),
    "To measure a run again: dipole eval RUN; to test a loss: dipole check TARGET": ("test", "verify"),
    "For vectors of inputs of your own: dipole embed RUN INPUT": (
        "predict", "encode", "features", "extract", "infer", "inference", "embeddings",
    ),
    "For the runs there are: dipole list runs": ("ls", "runs", "status", "history", "ps"),
    "For what can be trained: dipole list recipes": ("recipes", "recipe", "models", "tasks"),
    "For what can stand in an objective: dipole list objectives": ("objectives", "losses", "objective", "loss"),
    "For the papers' tables: dipole bench": ("benchmark", "benchmarks", "suite", "suites", "tables", "reproduce"),
    "To explain a name: dipole show NAME": ("info", "describe", "explain", "doc", "docs", "man"),
    "For the settings of a recipe: dipole train RECIPE --print-config": ("config", "settings"),
    "To search settings: dipole sweep RECIPE --metric NAME --space KEY=KIND(...)": (
        "tune", "search", "optimize", "hpo", "grid",
    ),
    "To remove a run: dipole rm RUN": ("delete", "remove", "del", "clean"),
    "To begin a package of your own: dipole new NAME": ("init", "create", "scaffold"),
    "To fetch a data set: dipole data get NAME": ("download", "get", "fetch", "dataset", "datasets", "prepare"),
    "To compare two runs: dipole compare RUN RUN": ("diff",),
    "For charts and tables of runs: dipole report RUNS": ("plot", "figures", "html", "summary"),
    "For another library: dipole export RUN --to FORMAT": ("convert", "save"),
    "For the Hugging Face Hub: dipole export RUN --to FORMAT --push OWNER/NAME": ("push", "publish", "upload"),
    "To play an agent: dipole play AGENT": ("rollout", "watch", "enjoy", "render"),
    "For what is missing on this machine: dipole doctor": ("env", "diagnose", "debug", "setup"),
    "To see the version: dipole --version": ("version",),
}  # fmt: skip
"""What to type -> the words that are answered with it."""

CURE_OF: Final[Mapping[str, str]] = {word: cure for cure, words in CURES.items() for word in words}
