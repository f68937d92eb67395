"""Networks of the transformers library: from a folder or the Hub, with their weights or from their configuration."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import install_line
from dipole.core.utils.hub import without_retry_messages
from dipole.core.utils.pickles import UNASKED, refusal, safetensors_only
from dipole.core.utils.text import are, counted

Weights = Literal["pretrained", "random"]
READS = {"pixel_values": "images", "input_ids": "text"}
"""What a network takes first -> what that is of."""
_CONFIGS = ("config.json", "preprocessor_config.json", "processor_config.json")
TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer.model",
)  # fmt: skip
"""Files of which one at least comes with a tokenizer."""
_CURES = {
    "GatedRepoError": "it is gated: accept its terms on its page on the Hub, and log in with `hf auth login`",
    "RepositoryNotFoundError": "the Hub has no model of that name, or it is private: check it, or log in with "
    "`hf auth login`",
    "RevisionNotFoundError": "it has no such revision",
    "OfflineModeIsEnabled": "the Hub is switched off (HF_HUB_OFFLINE), and it is not in the cache",
    "LocalEntryNotFoundError": "it is not in the cache, and the Hub cannot be reached, or is switched off "
    "(HF_HUB_OFFLINE): check the connection, or give a folder",
}
"""Errors of the Hub's client, most telling first -> what is wrong."""


@dataclass(frozen=True)
class Source:
    """Where a network comes from.

    Args:
        text: a folder, a configuration file, or a name on the Hub.
        setting: what it is called in a recipe.
        weights: which are wanted; None for those that are there.
        revision: of the Hub, a branch, tag or commit.
    """

    text: str
    setting: str
    weights: Weights | None = None
    revision: str | None = None

    @property
    def path(self) -> Path | None:
        """The folder or file; None for a name on the Hub."""
        path = Path(self.text).expanduser()
        named = self.text.count("/") <= 1 and not self.text.startswith((".", "~")) and not path.is_absolute()
        return None if named and not path.exists() else path

    @property
    def weight_files(self) -> list[Path]:
        """Files of weights in a folder, as transformers chooses them."""
        if self.path is None or not self.path.is_dir():
            return []
        return sorted(self.path.glob("*.safetensors")) or sorted(self.path.glob("*.bin"))

    @property
    def content(self) -> str | None:
        """A hash of the files that determine the network, wherever they lie; None for a name on the Hub.

        A Hub's repository is not asked: a name has to be known before anything is fetched, and without a network.
        """
        if self.path is None or not self.path.exists():
            return None
        files = [self.path] if self.path.is_file() else [self.path / name for name in _CONFIGS]
        files = [file for file in files if file.is_file()] + (self.weight_files if self.weights != "random" else [])
        return _hash_of(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))

    def error(self, problem: str) -> ConfigError:
        """The one message about it.

        Args:
            problem: what is wrong.
        """
        return ConfigError(f"{self.setting}: {self.text!r} cannot be loaded: {problem.rstrip('.')}.")


@dataclass
class Backbone:
    """A network and where its weights come from.

    pretrained: whether they were read; commit: of the Hub; missing: parameters that no file had, which are random.
    """

    model: Any
    pretrained: bool
    commit: str | None = None
    missing: tuple[str, ...] = ()

    def described(self, source: Source) -> dict[str, Any]:
        """For the record: what determines the weights, and not where they lie."""
        found = {
            "source": source.text,
            "architecture": type(self.model).__name__,
            "weights": "pretrained" if self.pretrained else "random",
            "sha256": source.content,
            "commit": self.commit,
        }
        return {key: value for key, value in found.items() if value is not None}

    def remarks(self, source: Source) -> list[str]:
        """What a user is told about the weights."""
        if not self.pretrained:
            return [f"{source.setting}: {type(self.model).__name__} of {source.text} starts from random weights"]
        lines = [f"{source.setting}: {type(self.model).__name__} with the weights of {source.text}"]
        if self.missing:
            shown = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
            lines.append(
                f"{source.setting}: {counted(len(self.missing), 'tensor')} {are(len(self.missing))} not among its "
                f"weights and random: {shown}"
            )
        return lines


def read_config(source: Source, takes: str) -> Any:
    """The configuration of a network that takes "pixel_values" or "input_ids".

    Of one that takes both (CLIP), the part that takes what is asked for.

    Raises:
        ConfigError: there is none, it cannot be reached, or the network takes something else.
    """
    from transformers import AutoConfig

    path = source.path
    if path is not None and not path.exists():
        raise source.error("there is no such folder or file")
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        raise source.error("the folder has no config.json; give one that save_pretrained wrote")
    with _told(source), quietly():
        config = AutoConfig.from_pretrained(str(path or source.text), **_revision(source))
    part = {"pixel_values": "vision_config", "input_ids": "text_config"}[takes]
    if hasattr(config, part):
        config = getattr(config, part)
    first = _first_input(config)
    if first != takes:
        raise source.error(
            f"it is a {config.model_type} model, which reads {READS.get(first, first)}; give one that reads "
            f"{READS[takes]}"
        )
    return config


def load(source: Source, takes: str, edit: Callable[[Any], None] | None = None) -> Backbone:
    """Build a network, in single precision: with its weights, or with random ones from its configuration.

    Where tensors are made without contents (the meta device) nothing but the configuration is read.

    Args:
        edit: changes the configuration before anything is built.

    Raises:
        ConfigError: see `read_config`; or weights are wanted and there are none, or a pickle alone.
    """
    from transformers import AutoModel

    config = read_config(source, takes)
    if edit is not None:
        edit(config)
    there = source.path is None or bool(source.weight_files)
    if source.weights == "pretrained" and not there:
        raise source.error("there are no weights beside its configuration (*.safetensors, *.bin)")
    pretrained = there and source.weights != "random"
    if pretrained and source.path is not None and (refused := refusal(source.path)):
        raise source.error(refused)
    with _told(source), quietly():
        if not pretrained or torch.get_default_device().type == "meta":
            anew = AutoModel.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
            return Backbone(anew, pretrained)
        model, loaded = AutoModel.from_pretrained(
            str(source.path or source.text),
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=safetensors_only(),
            **_revision(source),
        )
    return Backbone(
        model.train(), True, getattr(model.config, "_commit_hash", None), tuple(sorted(loaded["missing_keys"]))
    )


def image_processor(source: Source) -> dict[str, Any]:
    """The settings of the image processor that comes with a network; empty where none does."""
    from transformers.image_processing_base import ImageProcessingMixin

    path = source.path
    if path is not None and not any((path / name).is_file() for name in _CONFIGS[1:]):
        return {}
    try:
        with quietly():
            found, _ = ImageProcessingMixin.get_image_processor_dict(str(path or source.text), **_revision(source))
    except OSError as error:
        if path is None and not any(type(each).__name__ in _CURES for each in _causes(error)):
            return {}  # there is a repository, and no such file in it
        raise source.error(_reason(error)) from error
    except ValueError as error:
        raise source.error(_reason(error)) from error
    return dict(found)


def tokenizer(source: Source) -> Any:
    """The tokenizer that comes with a network.

    Raises:
        ConfigError: none does, or it cannot be read.
    """
    from transformers import AutoTokenizer

    path = source.path
    if path is not None and not any((path / name).is_file() for name in TOKENIZERS):
        raise source.error("there is no tokenizer beside it; write one there with tokenizer.save_pretrained")
    with _told(source), quietly():
        return AutoTokenizer.from_pretrained(str(path or source.text), **_revision(source))


def tokenizer_content(source: Source) -> str | None:
    """A hash of the files of the tokenizer in a folder; None for a name on the Hub."""
    if source.path is None:
        return None
    files = [source.path / name for name in TOKENIZERS if (source.path / name).is_file()]
    return _hash_of(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


def _revision(source: Source) -> dict[str, str]:
    return {} if source.revision is None else {"revision": source.revision}


def _first_input(config: Any) -> str:
    from transformers import MODEL_MAPPING

    model: Any = MODEL_MAPPING.get(type(config), None)
    if model is None:
        return "nothing that AutoModel knows"
    return str((model[0] if isinstance(model, tuple) else model).main_input_name)


@contextmanager
def _told(source: Source) -> Iterator[None]:
    """Errors of the library as our one message."""
    try:
        yield
    except ImportError as error:
        missing = "timm" if "timm" in str(error) else str(error).strip().partition("\n")[0]
        line = f": {install_line('timm')}" if missing == "timm" else ""
        raise source.error(f"it needs a package that is not installed, {missing}{line}") from error
    except ConfigError:
        raise
    except Exception as error:  # safetensors, json, the Hub's client and models each raise their own
        raise source.error(_reason(error)) from error


def _reason(error: BaseException) -> str:
    kinds = {type(each).__name__ for each in _causes(error)}
    known = next((cure for kind, cure in _CURES.items() if kind in kinds), None)
    if known is None and "use_safetensors" in str(error):
        return UNASKED
    return known or str(error).strip().partition("\n")[0] or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def quietly() -> Iterator[None]:
    """Without progress bars and reports: what matters of them is among our remarks."""
    from transformers.utils import logging as library

    bar, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()  # type: ignore[no-untyped-call]
    library.set_verbosity(logging.ERROR)
    try:
        with without_retry_messages():
            yield
    finally:
        library.set_verbosity(level)
        if bar:
            library.enable_progress_bar()  # type: ignore[no-untyped-call]


@lru_cache(maxsize=64)
def _hash_of(known: tuple[tuple[Path, int, int], ...]) -> str:
    """The hash of files that have not changed since they were last looked at."""
    found = hashlib.sha256()
    for path, _, size in known:
        found.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
