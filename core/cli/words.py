"""Examples at the end of each command's help, and what other programs' commands are called here."""

from collections.abc import Mapping
from typing import Final

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "add": ("dipole add 3f2a detection/voc/AP50=0.824 --source 'detectron2 0.6, voc.yaml'",),
    "bench": ("dipole bench", "dipole bench lmcl-table4 --plan", "dipole bench lmcl-table4 --seeds 3"),
    "check": (
        'dipole check "infonce(temperature=0.1) + 0.1*dp"',
        "dipole check my_package.losses:MyLoss --option temperature=0.1 --reference infonce",
        "dipole check --all",
    ),
    "compare": ("dipole compare 3f2a 77b0", "dipole compare runs/3f2a9c runs/77b01d --json"),
    "completion": (
        "dipole completion bash > ~/.local/share/bash-completion/completions/dipole",
        "dipole completion zsh > ~/.zfunc/_dipole",
        "dipole completion tcsh > ~/.dipole.tcsh",
    ),
    "data": ("dipole data list", "dipole data get imagenette --to ~/data/imagenette --yes"),
    "demo": ("dipole demo vision", "dipole demo -o demo.html"),
    "doctor": ("dipole doctor", "dipole doctor --runs /scratch/runs --json"),
    "embed": (
        "dipole embed 3f2a photos/ -o photos.parquet",
        "dipole embed runs/3f2a9c sentences.txt -o vectors.npy --device cuda",
    ),
    "eval": ("dipole eval 3f2a", "dipole eval runs/3f2a9c --set vision.data.source=/data/cifar10 --device cuda"),
    "export": (
        "dipole export 3f2a --to sentence-transformers --out my-model",
        "dipole export 3f2a --to transformers --license apache-2.0 --push OWNER/NAME",
    ),
    "list": ("dipole list", "dipole list recipes", "dipole list runs --runs runs --json"),
    "new": ("dipole new my-objectives", "dipole new my-objectives --into ~/projects"),
    "play": ("dipole play 3f2a --episodes 3", "dipole play agent.zip"),
    "report": ("dipole report runs -o report.html", "dipole report shipped -o report.md"),
    "results": ("dipole results add runs --to results", "dipole results list shipped"),
    "rm": ("dipole rm 3f2a", "dipole rm runs/3f2a9c runs/77b01d --yes"),
    "show": ("dipole show infonce", "dipole show digits-simclr", "dipole show train"),
    "sweep": (
        "dipole sweep digits-simclr --metric linear/accuracy --space 'objective.infonce.temperature=log(0.05, 1)'",
    ),
    "theory": (
        "dipole theory 3f2a --k 4 --block 5",
        "dipole theory 3f2a --picture theory.svg",
        "dipole theory --list",
        "dipole theory --figure1 figure1.svg",
    ),
    "train": (
        "dipole train digits-simclr",
        "dipole train cifar10-simclr --set train.epochs=5 'objective=infonce + 0.1*dp' --seed 1",
        "dipole train my-recipe.toml --print-config",
    ),
}  # fmt: skip

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
