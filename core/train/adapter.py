"""The interface of a domain: data, encoder, positives and probes.

The trainer calls, in this order:

    adapter = AdapterClass(config.settings, seed=..., device=..., workdir=..., batch_size=..., rank=..., world_size=...)
    for batch in adapter.batches(epoch, start):
        embedded = adapter.embed(batch)         # inside autocast, with gradients
        ... gather over ranks, pair, objective, backward ...
        adapter.before_step(); optimizer step; adapter.after_step()
    adapter.evaluate(objective)                 # every n epochs and at the end
    adapter.features("test")                    # for diagnostics and pictures

Nothing after `embed` knows the domain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NotRequired, TypedDict, Unpack

from dipole.core.train.config import EvaluatedPart, Settings
from dipole.core.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from dipole.core.objectives.encoded_batch import EncodedBatch
    from dipole.core.objectives.pairs import Pairs
    from dipole.core.record import RunRecord
    from dipole.core.train.inference import Embedder
    from dipole.core.utils.seeding import Seeds


class Context(TypedDict):
    """The keyword arguments that the trainer passes to every domain.

        >>> list(Context.__annotations__)[:4]  # which are always there
        ['seed', 'device', 'workdir', 'batch_size']

    Attributes:
        seed: the run's seeds. Take one generator per purpose, for example `seed.torch("augment", epoch)`.
        device: the device of batches.
        workdir: the run's folder (it exists), for caches and pictures.
        batch_size: instances per step over all ranks. A multiple of world_size.
        rank: the share of every global batch that this process draws, from 0. Default 0.
        world_size: number of ranks. Default 1.
        validation: the share of the training data to set aside for validation. 0, the default, sets none aside. Only a
            domain that `validates` gets another value.
        kept: the folder that `Adapter.keep` filled. Build the module from it alone, and read data only on demand. None
            in training.
    """

    seed: Seeds
    device: torch.device
    workdir: Path
    batch_size: int
    rank: NotRequired[int]
    world_size: NotRequired[int]
    validation: NotRequired[float]
    kept: NotRequired[Path | None]


class Sketch(NamedTuple):
    """The shapes of a run, known without its data.

    Attributes:
        width: of the embedding.
        example: a function (objective, width, *arguments) -> random rows, paired like those of a batch.
        arguments: of `example`. Equal arguments give equal pairs.
    """

    width: int
    example: Callable[..., Pairs | tuple[Pairs, ...]]
    arguments: tuple[Hashable, ...] = ()


class Adapter(ABC):
    """One domain, ready to be trained.

        >>> sorted(Adapter.__abstractmethods__)  # what a subclass must define
        ['batches', 'data_info', 'embed', 'evaluate', 'features']

    A subclass sets the first attributes, to `built_from_data`, in its body and the others in its `__init__`.

    Attributes:
        domain: the recipe's `domain` and the name of its table, such as "vision".
        config_model: the `Settings` subclass of that table. It decides which keys identify a run.
        train_fields: the keys of [train] that have an effect. None means all. Setting another one is an error.
        precisions: the possible values of train.precision. None means all.
        validates: whether it can evaluate a validation part (`Context`).
        sets_aside: whether the validation part is taken from the training data.
        objective_optional: whether `objective = "none"` is allowed (a control without contrast).
        export_formats: what `dipole export RUN --to FORMAT` can write.
        data_fields: the keys of its table with paths of data. `dipole eval RUN --set` may change them.
        built_from_data: whether the module is only valid with its data, as word embeddings are with the vocabulary. A
            run then does not continue on changed data.
        module: all trained networks, without the objective. The run saves its weights. Build it on the CPU: the
            trainer seeds the global generators with the `model` stream before the constructor runs and moves the module
            to `device` afterwards. Parameters with requires_grad=False (a momentum encoder) stay as they are.
        compiles: whether the domain's own table asks for compiling.
        embedding_dim: width d of the anchors that `embed` returns.
        part: the part that `evaluate`, `features("test")` and `held_out_pairs` use, "test" or "validation". It starts
            as "validation" if a share is set aside. The trainer sets it, and the test part is not read before that.
        reported: the part on which the run's results are computed.
        total_steps: updates of the whole run. The trainer sets it. It is None outside a run.
        steps_per_epoch: number of batches that `batches(epoch)` yields on each rank (all ranks yield the same). 1 if
            there are no epochs.
    """

    domain: ClassVar[str]
    config_model: ClassVar[type[Settings]]
    train_fields: ClassVar[frozenset[str] | None] = None
    precisions: ClassVar[tuple[str, ...] | None] = None
    validates: ClassVar[bool] = False
    sets_aside: ClassVar[bool] = True
    objective_optional: ClassVar[bool] = False
    export_formats: ClassVar[tuple[str, ...]] = ()
    data_fields: ClassVar[frozenset[str]] = frozenset()
    built_from_data: ClassVar[bool] = False

    module: nn.Module
    embedding_dim: int
    steps_per_epoch: int
    compiles: bool = False
    part: EvaluatedPart
    reported: EvaluatedPart
    total_steps: int | None = None

    def __init__(self, config: Any, **context: Unpack[Context]) -> None:
        """Store the arguments. A domain extends this and builds data and module.

        Args:
            config: an instance of `config_model`.
            context: see `Context`.
        """
        self.config = config
        self.seed = context["seed"]
        self.device = context["device"]
        self.workdir = context["workdir"]
        self.batch_size = context["batch_size"]
        self.rank = context.get("rank", 0)
        self.world_size = context.get("world_size", 1)
        self.validation = context.get("validation", 0.0)
        self.part = self.reported = "validation" if self.validation else "test"
        self.kept = context.get("kept")

    @classmethod
    def sketch(cls, config: Any, batch_size: int, world_size: int = 1) -> Sketch | None:
        """Return the networks that the settings describe, for `dipole bench --plan`. None if the domain cannot plan.

        No data are read: sizes of missing data are estimated from the settings. Networks are built on the meta device,
        where tensors have a shape but no memory.

        Args:
            config: an instance of `config_model`.
            batch_size: instances per step over all ranks.
            world_size: ranks, >= 1.

        Raises:
            ConfigError: a run with these settings cannot be built.
        """
        return None

    @classmethod
    def missing_data(cls, config: Any) -> Sequence[str]:
        """Describe the data of a configuration that are not there, each with the fix.

        It is called before a run and by `dipole bench`, so it looks only at what takes milliseconds: whether files and
        folders exist, and without a network what the Hub's cache has.

        Args:
            config: an instance of `config_model`.
        """
        return ()

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return an iterator over the batches `start`, `start + 1`, ... of an epoch, as `embed` takes them.

        They depend only on (seed, epoch, index), never on earlier draws. This makes resume exact. With several ranks,
        draw the order of the global batch from the seed and take its rows `rank * b .. (rank + 1) * b`.

        Args:
            epoch: its number, from 0.
            start: number of the first batch, from 0.
        """

    @abstractmethod
    def embed(self, batch: Any) -> EncodedBatch | Pairs | tuple[Pairs, ...]:
        """Embed this rank's share of a batch and pair the rows.

        Args:
            batch: as `batches` yields it.

        Returns:
            `EncodedBatch`: named rows, and a function that pairs the rows of all ranks. Pairs of a constructor
            (`Pairs.from_views(...)`) do as well, as long as they are not changed afterwards.
        """

    def encoders(self) -> Sequence[nn.Module]:
        """Return the modules that `embed` calls. They give one output row for each input row. Default: `module`.

        train.microbatch, train.activation_checkpointing and train.compile apply to them. Their inputs are tensors,
        containers of tensors, or objects with `len` and `split(size)`. With microbatches, only their parameters get a
        gradient.
        """
        return [self.module]

    def remarks(self) -> Sequence[str]:
        """Return lines for the terminal before the first step, such as the weights that a network starts from."""
        return ()

    def noticed(self) -> Sequence[str]:
        """Return notes of the last `evaluate` for the record, such as problems of the data."""
        return ()

    def before_step(self) -> None:  # noqa: B027
        """Change gradients before the optimizer step. They are gradients of the global batch over all ranks."""

    def after_step(self) -> None:  # noqa: B027
        """Update momentum encoders and queues after the optimizer step, also if float16 has skipped it."""

    def metrics(self) -> Mapping[str, Tensor | float]:
        """Return numbers of the last step, () each, without a graph. metrics.jsonl has their means as train/NAME."""
        return {}

    @abstractmethod
    def evaluate(self, objective: Any) -> dict[str, float]:
        """Probe the frozen encoder and return results by name, such as "linear/accuracy", from 0 to 1.

        The trainer has put `module` in eval mode and seeded the global generators with the `probe` stream, and restores
        both afterwards. Pass features through `objective.transform` before probing, as CLLR asks.

        Args:
            objective: the trained `Composite`, or None for "none".
        """

    @abstractmethod
    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings of a split, (n, embedding_dim), and its labels, (n,), or None.

        They are what the objective sees, before `objective.transform`. A negative label means that a row has none.
        Diagnostics run on the device of the embeddings.

        Args:
            split: "train" or "test".
        """

    def pass_features(self) -> int:
        """Let `embed` pass the encoder's features as `EncodedBatch.features`, and return their width.

        It is called before training if a term acts on them (`Objective.on_features`). The default is for domains whose
        embeddings are the encoder's features: nothing more is passed.

        Raises:
            ConfigError: there is a head behind the encoder, and the domain cannot pass what is before it.
        """
        return self.embedding_dim

    def diagnostic_pairs(self) -> EncodedBatch | Pairs | tuple[Pairs, ...] | None:
        """Return a batch of pairs for diagnostics, or None. A domain with its own loop needs this.

        Keep the graph of the embeddings: the run compares the gradients of the terms. Equal states of the training
        give equal pairs, and nothing of training changes.
        """
        return None

    def held_out_pairs(self, objective: Any) -> Pairs | None:
        """Return transformed test points with the pairs that the data define, or None without such pairs.

        Args:
            objective: the trained `Composite`, or None for "none".
        """
        return None

    @abstractmethod
    def data_info(self) -> dict[str, Any]:
        """Return the data entry of the record: at least "name", "fingerprint" (a content hash) and "sizes"."""

    def keep(self, folder: Path) -> None:  # noqa: B027
        """Write what the module needs, apart from weights and configuration, to be used without its data.

        Examples are a vocabulary, names of classes, and statistics of the data. An adapter that is built with `kept`
        reads it.

        Args:
            folder: empty.
        """

    def embedder(self, features: str | None = None, objective: Any = None) -> Embedder:
        """Return the trained module with the preprocessing of its evaluation, for `dipole embed`.

        Args:
            features: the layer, one of the domain's own names. None for what probes see.
            objective: the trained `Composite`, or None for "none".

        Raises:
            ConfigError: the domain does not support it.
        """
        raise ConfigError(f"a run of the domain {self.domain!r} has nothing that `dipole embed` could read.")

    def state_dict(self) -> dict[str, Any]:
        """Return what bit-exact resume needs in addition to `module`: queues, counters, generators.

        Plain values only (core/utils/plain_values.py), as checkpoints hold no code.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned. Check it, because it comes from a file.

        Args:
            state: as `state_dict` returned it.
        """

    def fit(self, run: Any) -> None:
        """Train. A domain with a loop of its own overrides this and calls `run.advance` after each of its updates.

        Args:
            run: the `dipole.core.train.run.Run` in progress.
        """
        run.fit()

    def instead_of(self, objective: Any) -> str:
        """Return what to set instead of an objective that cannot use the pairs, as a sentence. Default: nothing.

        Args:
            objective: the `Composite`.
        """
        return ""

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        """Write the trained module for another library.

        Args:
            to: one of `export_formats`.
            folder: empty.
            record: the run's `RunRecord`.
            objective: the trained `Composite` (None for "none"): where the exported vectors are those that are
                evaluated, its `transform` goes with them.
        """
        raise NotImplementedError


def same_data(adapter: Adapter, record: RunRecord) -> bool:
    """Return whether an adapter reads the data that a run was trained on."""
    return adapter.data_info().get("fingerprint") == record.data.get("fingerprint")
