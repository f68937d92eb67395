"""Load networks of the transformers library from a folder or the Hub, with or without their weights."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dipole.core.utils.download import without_retry_messages
from dipole.core.utils.errors import ConfigError, causes
from dipole.core.utils.extras import install_line
from dipole.core.utils.freezing import in_mode
from dipole.core.utils.pickles import UNASKED, allowed, refusal
from dipole.core.utils.text import are, counted

Weights = Literal["pretrained", "random"]
READS = {"pixel_values": "images", "input_ids": "text"}
"""Main input of a network -> its name in messages."""
_CONFIGS = ("config.json", "preprocessor_config.json", "processor_config.json")
TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer.model",
)  # fmt: skip
"""A tokenizer has at least one of these files."""
_REASONS = {
    "GatedRepoError": "it is gated: accept its terms on its page on the Hub, and log in with `hf auth login`",
    "RepositoryNotFoundError": "the Hub has no model of that name, or it is private: check it, or log in with "
    "`hf auth login`",
    "RevisionNotFoundError": "it has no such revision",
    "OfflineModeIsEnabled": "it is not in the cache, and the Hub is switched off (HF_HUB_OFFLINE)",
    "LocalEntryNotFoundError": "it is not in the cache, and the Hub cannot be reached or is switched off "
    "(HF_HUB_OFFLINE): check the connection, or give a folder",
}
"""Errors of the Hub's client, most specific first -> what is wrong."""


@dataclass(frozen=True)
class NetworkSource:
    """A network: a folder, a configuration file, or a name on the Hub.

    `setting` is its name in a recipe. Without `weights`, pretrained ones are taken if there are any.
    """

    text: str
    setting: str
    weights: Weights | None = None
    revision: str | None = None

    @property
    def path(self) -> Path | None:
        """Return the folder or file, or None for a name on the Hub."""
        path = Path(self.text).expanduser()
        named = self.text.count("/") <= 1 and not self.text.startswith((".", "~")) and not path.is_absolute()
        if named and not path.exists():
            return None
        return path

    @property
    def weight_files(self) -> list[Path]:
        """Return the weight files of a folder that transformers would read."""
        if self.path is None or not self.path.is_dir():
            return []
        return sorted(self.path.glob("*.safetensors")) or sorted(self.path.glob("*.bin"))

    @property
    def content(self) -> str | None:
        """Return a hash of the files that determine the network, or None for a name on the Hub.

        The hash of a run must be known without a network, so the Hub is not asked.
        """
        if self.path is None or not self.path.exists():
            return None
        files = [file for file in (self.path, *(self.path / name for name in _CONFIGS)) if file.is_file()]
        if self.weights != "random":
            files += self.weight_files
        return _hash_of_files(files)

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.setting}: {self.text!r} cannot be loaded: {problem.rstrip('.')}.")


@dataclass
class Backbone:
    """A network and the origin of its weights. `missing` are parameters that no file had: they are random."""

    model: Any
    pretrained: bool
    commit: str | None = None
    missing: tuple[str, ...] = ()

    def described(self, source: NetworkSource) -> dict[str, Any]:
        """Return what determines the weights, for the record."""
        found = {
            "source": source.text,
            "architecture": type(self.model).__name__,
            "weights": "pretrained" if self.pretrained else "random",
            "sha256": source.content,
            "commit": self.commit,
        }
        return {key: value for key, value in found.items() if value is not None}

    def remarks(self, source: NetworkSource) -> list[str]:
        """Return notes about the weights for the user."""
        if not self.pretrained:
            return [f"{source.setting}: {type(self.model).__name__} of {source.text} starts from random weights"]
        lines = [f"{source.setting}: {type(self.model).__name__} with the weights of {source.text}"]
        if self.missing:
            shown = ", ".join([*self.missing[:3], "..."][: len(self.missing)])
            lines.append(
                f"{source.setting}: {counted(len(self.missing), 'tensor')} {are(len(self.missing))} not among its "
                f"weights and random: {shown}"
            )
        return lines


def read_config(source: NetworkSource, takes: str) -> Any:
    """Return the configuration of a network that takes "pixel_values" or "input_ids", of CLIP the part that does.

    Raise ConfigError if it is missing, cannot be reached, or the network takes another input.
    """
    from transformers import MODEL_MAPPING, AutoConfig

    path = source.path
    if path is not None and not path.exists():
        raise source.error("there is no such folder or file")
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        raise source.error("the folder has no config.json; give one that save_pretrained wrote")
    with _as_config_error(source), without_transformers_output():
        config = AutoConfig.from_pretrained(str(path or source.text), trust_remote_code=False, **_revision(source))
    part = {"pixel_values": "vision_config", "input_ids": "text_config"}[takes]
    config = getattr(config, part, config)
    model: Any = MODEL_MAPPING.get(type(config), None)
    first = "nothing that AutoModel knows"
    if model is not None:
        first = str((model[0] if isinstance(model, tuple) else model).main_input_name)
    if first != takes:
        raise source.error(
            f"it is a {config.model_type} model, which reads {READS.get(first, first)}; give one that reads "
            f"{READS[takes]}"
        )
    return config


def load(source: NetworkSource, takes: str, edit: Callable[[Any], None] | None = None) -> Backbone:
    """Build a network in single precision, with its weights or with random ones. `edit` changes its configuration.

    On the meta device only the configuration is read. Raise ConfigError also if weights are missing or a pickle.
    """
    config = read_config(source, takes)
    if edit is not None:
        edit(config)
    there = source.path is None or bool(source.weight_files)
    if source.weights == "pretrained" and not there:
        raise source.error("there are no weights next to its configuration (*.safetensors, *.bin)")
    pretrained = there and source.weights != "random"
    if pretrained and source.path is not None and (refused := refusal(source.path)):
        raise source.error(refused)
    network = network_class(config)
    make = getattr(network, "from_config", None) or network._from_config
    with _as_config_error(source), without_transformers_output():
        if not pretrained or torch.get_default_device().type == "meta":
            return Backbone(make(config, dtype=torch.float32), pretrained)
        model, loaded = network.from_pretrained(
            str(source.path or source.text),
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=None if allowed() else True,
            **_revision(source),
        )
    for parameter in model.parameters():
        # Files cannot hold parts of one tensor, as of a fused q, k and v.
        if parameter.untyped_storage().nbytes() > parameter.nbytes:
            parameter.data = parameter.data.clone()
    return Backbone(
        model.train(), True, getattr(model.config, "_commit_hash", None), tuple(sorted(loaded["missing_keys"]))
    )


def network_class(config: Any) -> Any:
    """Return the class of transformers that loads a network: AutoModel, or the encoder of T5 and its kind alone."""
    import transformers

    return getattr(transformers, type(config).__name__.removesuffix("Config") + "EncoderModel", transformers.AutoModel)


def open_exported(folder: Path, device: torch.device, takes: str, edit: Callable[[Any], None] | None = None) -> Any:
    """Return the model in a folder that `save_pretrained` wrote, for evaluation, as `load`."""
    return load(NetworkSource(str(folder), "RUN", "pretrained"), takes, edit).model.eval().to(device)


def reads_images(folder: Path) -> bool:
    """Return whether the model in a folder reads images, as CLIP does beside sentences."""
    with suppress(ConfigError):
        read_config(NetworkSource(str(folder), "RUN"), "pixel_values")
        return True
    return False


# Names of the most tokens in configurations of transformers.
_LIMITS = (
    "max_position_embeddings",
    "max_seq_len",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)


def positions(model: Any) -> int | None:
    """Return the most tokens that a model of transformers can read, or None."""
    found = [getattr(model.config, name, None) for name in _LIMITS]
    for name, module in model.named_modules():
        table = getattr(module, "weight", None)
        if name.endswith("position_embeddings") and isinstance(table, Tensor):
            found.append(len(table))
            if (padding := getattr(module, "padding_idx", None)) is not None:
                # RoBERTa and its kind count from the position after that of padding.
                found.append(len(table) - (padding + 1))
    return min((each for each in found if isinstance(each, int) and each > 0), default=None)


def is_random(model: nn.Module, run: Callable[[], Tensor]) -> bool:
    """Return whether a network in evaluation mode gives `run` two outputs for one input, as with a random mask.

    The mode of each submodule is restored. On meta the answer is False.
    """
    if torch.get_default_device().type == "meta":
        return False
    with in_mode(False, model), torch.no_grad():
        one, other = run(), run()
    return bool((one - other).norm() > 1e-3 * one.norm())


def image_processor(source: NetworkSource) -> dict[str, Any]:
    """Return the settings of a network's image processor, {} if it has none."""
    from transformers.image_processing_base import ImageProcessingMixin

    path = source.path
    if path is not None and not any((path / name).is_file() for name in _CONFIGS[1:]):
        return {}
    try:
        with without_transformers_output():
            found, _ = ImageProcessingMixin.get_image_processor_dict(str(path or source.text), **_revision(source))
    except (OSError, ValueError) as error:
        known = any(type(each).__name__ in _REASONS for each in causes(error))
        if isinstance(error, OSError) and path is None and not known:
            return {}  # the repository has no such file
        raise source.error(_reason(error)) from error
    return dict(found)


def tokenizer(source: NetworkSource) -> Any:
    """Return the tokenizer of a network. Raise ConfigError if it has none, or it cannot be read."""
    from transformers import AutoTokenizer

    path = source.path
    if path is not None and not any((path / name).is_file() for name in TOKENIZERS):
        raise source.error("there is no tokenizer next to it. Write one there with tokenizer.save_pretrained")
    with _as_config_error(source), without_transformers_output():
        return AutoTokenizer.from_pretrained(str(path or source.text), trust_remote_code=False, **_revision(source))


def tokenizer_content(source: NetworkSource) -> str | None:
    """Return a hash of the tokenizer's files in a folder, or None for a name on the Hub."""
    if source.path is None:
        return None
    return _hash_of_files([source.path / name for name in TOKENIZERS if (source.path / name).is_file()])


def _revision(source: NetworkSource) -> dict[str, str]:
    return {} if source.revision is None else {"revision": source.revision}


@contextmanager
def _as_config_error(source: NetworkSource) -> Iterator[None]:
    """Turn errors of the library into a ConfigError."""
    try:
        yield
    except ImportError as error:
        missing = str(error).strip().partition("\n")[0]
        if "timm" in missing:
            missing = f"timm: {install_line('timm')}"
        raise source.error(f"it needs a package that is not installed, {missing}") from error
    except ConfigError:
        raise
    except Exception as error:  # safetensors, json, the Hub's client and models each raise their own
        raise source.error(_reason(error)) from error


def _reason(error: BaseException) -> str:
    kinds = {type(each).__name__ for each in causes(error)}
    known = next((reason for kind, reason in _REASONS.items() if kind in kinds), None)
    if known is None and "use_safetensors" in str(error):
        return UNASKED
    if known is None and "trust_remote_code" in str(error):
        return (
            "its code lies in the folder, and foreign code is not run. Give a model of transformers' own, such as an "
            "export of a resnet18 with stem = 'imagenet'; or continue the run itself"
        )
    return known or str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def without_transformers_output() -> Iterator[None]:
    """Switch off progress bars and reports of transformers. `Backbone.remarks` has what matters."""
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


def _hash_of_files(files: list[Path]) -> str:
    return _hash_of(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=64)
def _hash_of(known: tuple[tuple[Path, int, int], ...]) -> str:
    """Return the hash of files. `known` has their times and sizes, so that changed files are read again."""
    found = hashlib.sha256()
    for path, _, size in known:
        found.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
