"""The install lines of README, pages and notebooks.

There is no release, so they install from a checkout. `[tool.dipole] repository` in pyproject.toml is the clone address.
It may be empty.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {
    "vision": "data sets, ViT and ResNet backbones, pictures",
    "text": "corpora, tokenizers, transformers as sentence encoders",
    "sentence-transformers": "dipole's loss in `SentenceTransformerTrainer`",
    "rl": "pixel environments and agents of stable-baselines3",
    "report": "charts and HTML reports",
    "tensorboard": "curves of TensorBoard",
    "wandb": "curves of Weights & Biases",
    "mlflow": "curves of MLflow",
    "trackio": "curves of trackio",
    "lora": "LoRA adapters for transformers",
    "timm": "backbones of timm, and export to timm",
    "onnx": "export to ONNX",
    "sweep": "search for settings with Optuna",
    "ray": "jobs of a suite on a Ray cluster",
    "slurm": "jobs of a suite on SLURM",
    "completion": "completion of commands in the shell",
    "docs": "builds this site",
    "all": "vision, text, sentence-transformers, rl, report, tensorboard, lora, onnx and sweep",
    "dev": "everything, and the tools of the tests",
}
"""Each extra with what it adds."""


def repository() -> str:
    """Return the address of the repository, or "" if it has none."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(settings["tool"]["dipole"]["repository"])


def source() -> str:
    """Return where pip finds dipole without a checkout (git+URL), or ""."""
    address = repository()
    return f"git+{address}" if address else ""


def enter() -> str:
    """Return the shell lines that make the checkout the current folder."""
    address = repository()
    if not address:
        return "cd dipole  # your checkout: the folder with pyproject.toml"
    name = address.rstrip("/").rpartition("/")[2].removesuffix(".git")
    return f"git clone {address}\ncd {name}"


def line(*extras: str) -> str:
    """Return the pip line, to be run in the checkout."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    return f'pip install ".{wanted}"' if wanted else "pip install ."


def block(*extras: str) -> str:
    """Return a shell block that installs dipole into a new environment."""
    lines = [
        enter(),
        "python3 -m venv .venv",
        "source .venv/bin/activate  # Windows: .venv\\Scripts\\activate",
        line(*extras),
    ]
    return "\n".join(["```bash", *lines, "```"])


def extras() -> str:
    """Return the table of the extras."""
    rows = [f"| `{name}` | {what} |" for name, what in EXTRAS.items()]
    return "\n".join(["| extra | adds |", "| --- | --- |", *rows])
