"""An exported folder on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.extras import install_line

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def check_push(repo: str) -> None:
    """Raise ConfigError where a push could not even begin: no such name, no library, no login."""
    if not re.fullmatch(r"(?:[\w.-]+/)?[\w.-]{1,96}", repo):
        raise ConfigError(f"--push {repo}: a repository is called NAME or OWNER/NAME.")
    try:
        from huggingface_hub import get_token
    except ModuleNotFoundError as error:
        raise ConfigError(f"--push needs {error.name}; install it with: {install_line('text')}") from error
    if get_token() is None:
        raise ConfigError(f"--push {repo}: nobody is logged in to the Hugging Face Hub; {LOGIN}.")


def push(folder: Path, repo: str, private: bool = False) -> str:
    """Upload a folder as a model repository and return its address. The repository is created if missing.

    Args:
        folder: the folder to upload. repo: OWNER/NAME, or NAME in your account. private: for a new repository.

    Raises:
        TrainingError: the Hub cannot be reached, or refuses. The folder is kept.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Exported by dipole")
    except Exception as error:  # what carries its requests has changed between versions, and so have the errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TrainingError(
            f"{folder} is written, but could not be pushed to {repo}: {reason} ({LOGIN}). "
            f"Once that is cured: hf upload {repo} {folder}"
        ) from error
    return str(made)
