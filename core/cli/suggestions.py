"""Commands that people know from other programs, and what does the same here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SUGGESTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "To continue a run, repeat its `dipole train ...`, or: dipole train runs/HASH/config.toml": (
        "resume", "continue", "restart",
    ),
    "To train: dipole train RECIPE": ("run", "fit", "start", "pretrain", "learn", "launch"),
    "To evaluate a run again: dipole eval RUN": ("evaluate", "evaluation", "validate", "score", "probe"),
    "To evaluate a run again: dipole eval RUN; to test a loss: dipole check TARGET": ("test", "verify"),
    "To embed your own inputs: dipole embed RUN INPUT": (
        "predict", "encode", "features", "extract", "infer", "inference", "embeddings",
    ),
    "To list runs: dipole list runs": ("ls", "runs", "status", "history", "ps"),
    "To list recipes: dipole list recipes": ("recipes", "recipe", "models", "tasks"),
    "To list objectives: dipole list objectives": ("objectives", "losses", "objective", "loss"),
    "To run the papers' tables: dipole bench": ("benchmark", "benchmarks", "suite", "suites", "tables", "reproduce"),
    "To explain a name: dipole show NAME": ("info", "describe", "explain", "doc", "docs", "man"),
    "To print the settings of a recipe: dipole train RECIPE --print-config": ("config", "settings"),
    "To search settings: dipole sweep RECIPE --metric NAME --space KEY=KIND(...)": (
        "tune", "search", "optimize", "hpo", "grid",
    ),
    "To remove a run: dipole rm RUN": ("delete", "remove", "del", "clean"),
    "To start your own package: dipole new NAME": ("init", "create", "scaffold"),
    "To fetch a data set: dipole data get NAME": ("download", "get", "fetch", "dataset", "datasets", "prepare"),
    "To compare two runs: dipole compare RUN RUN": ("diff",),
    "To draw charts and tables of runs: dipole report RUNS": ("plot", "figures", "html", "summary"),
    "To export for another library: dipole export RUN --to FORMAT": ("convert", "save"),
    "To upload to the Hugging Face Hub: dipole export RUN --to FORMAT --push OWNER/NAME": ("push", "publish", "upload"),
    "To play an agent: dipole play AGENT": ("rollout", "watch", "enjoy", "render"),
    "To check this machine: dipole doctor": ("env", "diagnose", "debug", "setup"),
    "To see the version: dipole --version": ("version",),
}  # fmt: skip
"""What to type -> the unknown commands that it answers."""

SUGGESTION_FOR: Final[Mapping[str, str]] = {word: text for text, words in SUGGESTIONS.items() for word in words}
