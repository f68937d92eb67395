"""What a domain provides so that it can be trained: its data, its encoder, its positives and its probes.

The trainer calls, in this order:

    adapter = AdapterClass(config.settings, seed=..., device=..., workdir=..., batch_size=..., rank=..., world_size=...)
    for batch in adapter.batches(epoch, start):
        embedded = adapter.embed(batch)         # inside autocast, gradients on: rows that belong together
        ... gather over ranks, relate, objective, backward ...
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

    from dipole.core.objectives.embedded import Embedded
    from dipole.core.objectives.pairs import Pairs
    from dipole.core.record import RunRecord
    from dipole.core.train.inference import Embedder
    from dipole.core.utils.seeding import Seeds


class Context(TypedDict):
    """What the trainer tells every domain, as keywords.

    Attributes:
        seed: the run's seeds; take a generator per purpose, for example `seed.torch("augment", epoch)`.
        device: where batches are expected.
        workdir: the run's folder (it exists); for caches and pictures.
        batch_size: instances per step over all ranks; divisible by world_size.
        rank: which share of every global batch this process draws, from 0; 0 unless given.
        world_size: of so many; 1 unless given.
        validation: the share of the training data to set aside as validation part; 0, the default, sets none aside.
            Only a domain that `validates` is given another.
        kept: folder that `Adapter.keep` filled when the run ended, for using the model: build the module from it alone,
            and read data only when something asks for them. Absent for training.
    """

    seed: Seeds
    device: torch.device
    workdir: Path
    batch_size: int
    rank: NotRequired[int]
    world_size: NotRequired[int]
    validation: NotRequired[float]
    kept: NotRequired[Path]


class Sketch(NamedTuple):
    """What a domain knows of a run without its data.

    Attributes:
        width: of the embedding.
        related: an objective, a width and `arguments` -> random rows, related as those of a batch.
        arguments: of `related`; equal ones give equal pairs.
    """

    width: int
    related: Callable[..., Pairs | tuple[Pairs, ...]]
    arguments: tuple[Hashable, ...] = ()


class Adapter(ABC):
    """One domain, ready to be trained.

    A subclass sets the first attributes, to `built_from_data`, in its body and the others in its `__init__`.

    Attributes:
        domain: the recipe's `domain` and the name of its table, such as "vision".
        config_model: the `Settings` subclass of that table; it says which of its keys identify a run
            (`Settings.determining`, `Settings.incidental`).
        train_fields: the keys of [train] that have an effect here; None means all. Setting another is an error.
        precisions: the values of train.precision that its loop can compute in; None means all.
        validates: whether it can evaluate a validation part (`Context`).
        sets_aside: whether a validation part is taken from what would be trained on otherwise.
        objective_optional: whether `objective = "none"` is allowed (a control without contrast).
        export_formats: what `dipole export RUN --to FORMAT` can write.
        data_fields: the keys of its table that say where data lie; `dipole eval RUN --set` may give others.
        built_from_data: whether the module means something beside its data alone, as word embeddings do beside the
            vocabulary that was counted: a run that kept nothing (`keep`) is then refused where its data have changed.
        module: everything that is trained except the objective; its weights are what the run saves. Build it on the
            CPU: the trainer seeds the global generators with the `model` stream before the constructor runs and moves
            the module to `device` afterwards. Parameters with requires_grad=False (a momentum encoder) stay as is.
        compiles: whether the domain's own table asks for what train.compile asks for.
        embedding_dim: width d of the anchors that `embed` returns.
        part: what `evaluate`, `features("test")` and `held_out_pairs` are of, "test" or "validation"; at first
            "validation" where a share is set aside. The trainer sets it: the test part is not read before it is that.
        reported: the part that the run's results are of.
        steps_per_epoch: number of batches that `batches(epoch)` yields on this rank (the same on every rank); 1 where
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

    def __init__(self, config: Any, **context: Unpack[Context]) -> None:
        """Keep the arguments under their names; a domain extends this and builds data and module.

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
        """The networks of a run as its settings say, for `dipole bench --plan`; None where a domain cannot tell.

        Nothing is read: sizes of data that are not there are those that the settings let one expect. Networks are built
        on the meta device, on which tensors have a shape and no memory.

        Args:
            config: an instance of `config_model`.
            batch_size: instances per step over all ranks.
            world_size: ranks, >= 1.

        Raises:
            ConfigError: the run could not be built either.
        """
        return None

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches `start`, `start + 1`, ... of an epoch.

        They depend on (seed, epoch, index) alone, never on what was drawn before: that makes resume exact. With several
        ranks, draw the order of the global batch from the seed and take rows `rank * b .. (rank + 1) * b` of it.

        Args:
            epoch: its number, from 0.
            start: number of the first batch, from 0.
        """

    @abstractmethod
    def embed(self, batch: Any) -> Embedded | Pairs | tuple[Pairs, ...]:
        """Run the encoder on this rank's share of a batch and say what belongs together.

        Args:
            batch: as `batches` yields it.

        Returns:
            `Embedded`: named rows, and a function that pairs the rows of all ranks. Pairs of a constructor
            (`Pairs.from_views(...)`) do as well, as long as they are not changed afterwards.
        """

    def encoders(self) -> Sequence[nn.Module]:
        """The modules that `embed` calls with rows and that give a row for each; by default `module`.

        train.microbatch calls them with fewer rows at a time, train.activation_checkpointing keeps less of them,
        train.compile compiles them. What they are called with is tensors, containers of such, or objects that have
        `len` and `split(size)`; parameters that they do not hold get no gradient in microbatches.
        """
        return [self.module]

    def remarks(self) -> Sequence[str]:
        """What is worth a line on the terminal before the first step: which weights a network starts from."""
        return ()

    def noticed(self) -> Sequence[str]:
        """What the last `evaluate` found worth a note in the record: data that are not what they should be."""
        return ()

    def before_step(self) -> None:  # noqa: B027
        """Change gradients before the optimizer sees them; they are those of the whole batch, of all ranks."""

    def after_step(self) -> None:  # noqa: B027
        """Update what follows the optimizer: momentum encoders, queues."""

    def metrics(self) -> Mapping[str, Tensor | float]:
        """Numbers of the last step, () each, without a graph; their means stand in metrics.jsonl as train/NAME."""
        return {}

    @abstractmethod
    def evaluate(self, objective: Any) -> dict[str, float]:
        """Results of probes of the frozen encoder by name, such as "linear/accuracy", from 0 to 1.

        The trainer has put `module` in eval mode and seeded the global generators with the `probe` stream, and restores
        both afterwards. Pass features through `objective.transform` before probing, as CLLR asks.

        Args:
            objective: the trained `Composite`; None for "none".
        """

    @abstractmethod
    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        """Embeddings of a split, (n, embedding_dim), and its labels, (n,), or None.

        They are what the objective sees, before `objective.transform`. A negative label means that a row has none. They
        are measured on the device that the embeddings lie on.

        Args:
            split: "train" or "test".
        """

    def diagnostic_pairs(self) -> Embedded | Pairs | tuple[Pairs, ...] | None:
        """A batch of positives and negatives for diagnostics, or None; of a loop of its own nobody sees the pairs."""
        return None

    def held_out_pairs(self, objective: Any) -> Pairs | None:
        """Test points as the objective transforms them, paired as the data say; None where they say nothing.

        Args:
            objective: the trained `Composite`; None for "none".
        """
        return None

    @abstractmethod
    def data_info(self) -> dict[str, Any]:
        """The data as the record describes them: at least "name", "fingerprint" (a content hash) and "sizes"."""

    def keep(self, folder: Path) -> None:  # noqa: B027
        """Write what the module needs besides weights and configuration so that it can be used without its data.

        A vocabulary, names of classes, shapes and statistics of the data. An adapter that is built with `kept` reads
        it. What a domain builds from its settings alone needs none of this.

        Args:
            folder: empty.
        """

    def embedder(self, features: str | None = None, objective: Any = None) -> Embedder:
        """What `dipole embed` asks for vectors: the trained module with the preprocessing of its evaluation.

        Args:
            features: where they are read, one of the domain's own names; None for what probes see.
            objective: the trained `Composite`; None for "none".

        Raises:
            ConfigError: the domain has nothing that could be read, as is so where a domain does not extend this.
        """
        raise ConfigError(f"a run of the domain {self.domain!r} has nothing that `dipole embed` could read.")

    def state_dict(self) -> dict[str, Any]:
        """What bit-exact resume needs besides `module`: queues, counters, generators.

        Data only (core/utils/plain_values.py): checkpoints hold no code.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned; check it, as it comes from a file.

        Args:
            state: as `state_dict` returned it.
        """

    def fit(self, run: Any) -> None:
        """Train. A domain with a loop of its own overrides this and calls `run.advance` after each of its updates.

        Args:
            run: the `dipole.core.train.run.Run` in progress.
        """
        run.train()

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
    """Whether an adapter reads the data that a run was trained on."""
    return adapter.data_info().get("fingerprint") == record.data.get("fingerprint")
