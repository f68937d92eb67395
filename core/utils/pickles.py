"""Read pickled weights of other programs, only if the user allows it.

PyTorch's restricted reader builds only tensors, numbers, strings, lists and dictionaries, but it runs the pickle's
program to do so. `python -m dipole.core.utils.pickles pytorch_model.bin` writes a file of weights as safetensors.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from dipole.core.utils.errors import ConfigError, DataError, DipoleError
from dipole.core.utils.files import replacing
from dipole.core.utils.text import shortened

SWITCH = "DIPOLE_PICKLES"
MODULE = "dipole.core.utils.pickles"
UNASKED = (
    "it has no weights in safetensors. If it comes from who you trust, set DIPOLE_PICKLES=restricted in the "
    "environment: PyTorch's restricted reader reads its pickle then"
)
_WEIGHTS = ("pytorch_model*.bin", "adapter_model*.bin")
"""Files that libraries read if there is no safetensors file."""


def allowed() -> bool:
    """Return whether the environment allows PyTorch's restricted reader."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value not in ("", "none", "restricted"):
        raise ConfigError(
            f"{SWITCH} must be none or restricted (PyTorch's reader with weights_only=True may read pickles), got "
            f"{value[:80]!r}."
        )
    return value == "restricted"


def read_pickle(path: Path) -> Any:
    """Read a file of `torch.save`, with tensors on the CPU. Check `allowed` first."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def refusal(folder: Path, deep: bool = False) -> str:
    """Return why pickled weights of a folder, and of its subfolders if `deep`, are refused, or ""."""
    files = [path for kind in _WEIGHTS for path in sorted(folder.rglob(kind) if deep else folder.glob(kind))]
    found = next((path for path in files if not _twin(path).is_file()), None)
    if found is None or allowed():
        return ""
    fix = "If"
    if "-of-" not in found.name:
        fix = f"Convert it with python -m {MODULE} {found}, or if"
    return (
        f"its weights {found.relative_to(folder)} are a pickle, which is not read unasked. {fix} it comes from who "
        f"you trust, set {SWITCH}=restricted in the environment: PyTorch's restricted reader reads it then"
    )


def _twin(path: Path) -> Path:
    return path.with_name(path.name.replace("pytorch_model", "model")).with_suffix(".safetensors")


def convert(path: Path) -> Path:
    """Write the tensors of a file of `torch.save` as safetensors next to it."""
    from safetensors.torch import save_file
    from torch import Tensor

    try:
        values = read_pickle(path)
    except Exception as error:  # the restricted reader raises whatever it meets
        raise DataError(f"{path} cannot be read: {shortened(str(error).strip(), 300)}") from error
    if not isinstance(values, dict) or not all(isinstance(each, Tensor) for each in values.values()):
        raise DataError(f"{path} holds something else than named tensors: it is no file of weights.")
    with replacing(_twin(path)) as temporary:  # tensors of one storage each become their own
        save_file({name: each.contiguous().clone() for name, each in values.items()}, temporary, {"format": "pt"})
    return _twin(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument(
        "path", type=Path, metavar="FILE", help="pytorch_model.bin, read by PyTorch's restricted reader"
    )
    try:
        print(convert(parser.parse_args(argv).path))
    except DipoleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
