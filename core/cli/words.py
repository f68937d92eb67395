"""Examples at the end of each command's help, and what other programs' commands are called here."""

from collections.abc import Mapping
from typing import Final

EXAMPLES: Final[Mapping[str, tuple[str, str]]] = {
    "add": (
        "dipole add 3f2a detection/voc/AP50=0.824 --source detectron2",
        "dipole add runs/3f2a9c AP=0.5 AP75=0.52 --source 'detectron2 0.6, voc.yaml'",
    ),
    "bench": ("dipole bench lmcl-table4 --plan", "dipole bench lmcl-table4 --seeds 3"),
    "check": (
        'dipole check "infonce(temperature=0.1) + 0.1*dp"',
        "dipole check my_package.losses:MyLoss --option margin=0.1 --dim 64",
    ),
    "compare": ("dipole compare 3f2a 77b0", "dipole compare runs/3f2a9c runs/77b01d --json"),
    "completion": (
        "dipole completion bash > ~/.local/share/bash-completion/completions/dipole",
        "dipole completion zsh > ~/.zfunc/_dipole",
    ),
    "data": ("dipole data list", "dipole data get cifar10 --out ~/data/cifar10 --yes"),
    "data get": ("dipole data get cifar10", "dipole data get senteval --out ~/data/senteval --yes"),
    "data list": ("dipole data list", "dipole data list --json"),
    "data wiki3029": (
        "dipole data wiki3029 enwiki.xml.bz2 wiki3029.jsonl.gz",
        "dipole data wiki3029 texts/ articles.jsonl --articles 100",
    ),
    "demo": ("dipole demo vision", "dipole demo -o demo.html"),
    "doctor": ("dipole doctor", "dipole doctor --runs /scratch/runs --json"),
    "embed": (
        "dipole embed 3f2a photos/ -o photos.parquet",
        "dipole embed runs/3f2a9c sentences.txt -o vectors.npy --device cuda",
    ),
    "eval": ("dipole eval 3f2a", "dipole eval runs/3f2a9c --set vision.data.source=/data/cifar10"),
    "export": (
        "dipole export 3f2a --to sentence-transformers -o my-model",
        "dipole export 3f2a --to transformers --license apache-2.0 --push OWNER/NAME",
    ),
    "list": ("dipole list recipes", "dipole list runs --runs runs --json"),
    "new": ("dipole new my-objectives", "dipole new my-objectives -o ~/projects"),
    "play": ("dipole play 3f2a --episodes 3", "dipole play agent.zip"),
    "report": ("dipole report runs -o report.html", "dipole report shipped -o report.md"),
    "results": ("dipole results add runs --out results", "dipole results list shipped"),
    "rm": ("dipole rm 3f2a", "dipole rm runs/3f2a9c runs/77b01d --yes"),
    "show": ("dipole show infonce", "dipole show digits-simclr"),
    "sweep": (
        "dipole sweep my.toml --metric knn/accuracy --space 'train.epochs=int(5, 50)'",
        "dipole sweep my.toml --metric knn/accuracy --space 'seed=int(0, 9)' --trials 5",
    ),
    "theory": ("dipole theory 3f2a --k 4 --block 5", "dipole theory 3f2a -o theory.svg"),
    "train": ("dipole train digits-simclr", "dipole train digits-simclr --set 'objective=infonce + 0.1*dp' --seed 1"),
}
"""Command, or command and action -> two lines to type, each at most 78 wide."""

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "try and train": ("demo", "train", "sweep", "eval"),
    "use a trained model": ("embed", "export", "play", "theory"),
    "the papers' tables and your runs": ("bench", "compare", "report", "results", "add", "rm"),
    "look up": ("list", "show"),
    "write your own": ("new", "check"),
    "set up": ("data", "doctor", "completion"),
}
"""Title in `dipole --help` -> commands. Those of other packages come last."""

START: Final = (
    ("dipole demo vision", "compare four objectives on digits"),
    ("dipole train digits-simclr", "train one recipe; see `dipole list recipes`"),
    ("dipole bench", "list the papers' tables, each a suite to run"),
)

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
