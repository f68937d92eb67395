"""Objectives as losses of sentence-transformers: the columns of a data set in, one number out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.objective import Composite, Objective, entry_of
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import check_whole
from dipole.core.train.compute_loss import as_composite
from dipole.core.train.objective_callback import FILE, carry, load_objectives
from dipole.core.utils.distributed import all_sum, as_single_process, world_size
from dipole.core.utils.errors import ConfigError, OptionError, PairsError
from dipole.core.utils.microbatch import microbatched, own_forward, patched_forward
from dipole.core.utils.text import warn

LABELS = {"label", "labels", "score", "scores"}  # columns that sentence-transformers takes for labels
SHARED = ("prompt_length",)  # tensors among the features that belong to the batch, not to its rows
LARGEST = 2**53  # whole numbers up to here have a float of their own
Direction = Literal["query_to_doc", "query_to_query", "doc_to_query"]

# Directions that can be asked for, and how they go together.
MODES: dict[frozenset[str], str] = {
    frozenset(["query_to_doc"]): "joint",
    frozenset(["query_to_doc", "query_to_query"]): "joint",
    frozenset(["query_to_doc", "doc_to_query"]): "per_direction",
}


class ContrastiveLoss(nn.Module):
    """An objective as the loss of a SentenceTransformerTrainer: the first column finds the second among all others.

        >>> loss = ContrastiveLoss(model, "infonce(temperature=0.05) + 0.1*dp")
        >>> columns = [model.preprocess(texts) for texts in (["a cat", "a dog"], ["the cat sleeps", "the dog barks"])]
        >>> loss(columns, labels=None).backward()

    Columns are those of MultipleNegativesRankingLoss: (anchor, positive), or (anchor, positive, negative_1, ...,
    negative_n). Candidates of an anchor are all positives and all negatives of the batch. One column with a label
    column of class numbers has all sentences of a class as positives of each other. `infonce(temperature=t)` is
    MultipleNegativesRankingLoss(scale=1/t).

    Args:
        model: the SentenceTransformer that is trained.
        objective: its text, an Objective or a Composite.
        gather_across_devices: candidates are those of all ranks, with gradient: N ranks of B/N are one process of B.
            Otherwise each rank looks at its own batch alone.
        directions: ("query_to_doc",); with "query_to_query" the other anchors are negatives as well. With
            "doc_to_query" each positive also finds its anchor among all anchors, and both losses are averaged.
        partition_mode: as in MultipleNegativesRankingLoss: "joint", or "per_direction" with "doc_to_query".

    Parameters of the objective are trained, saved as `objective.safetensors` in the trainer's checkpoints and resumed;
    `after_step` runs after each optimizer step (`dipole.core.train.objective_callback`).

    Raises:
        SpecError: for a wrong text.
        ConfigError: `model` is no SentenceTransformer, or `objective` none of these; from a call, a model that gives no
            sentence embedding.
        OptionError: directions that are none of these, or a partition_mode that does not go with them.
        PairsError: the objective has parameters of another width than the model; from a call, columns or labels that
            the objective cannot be evaluated on.

    Source: Henderson et al. 2017, Sec. 4.4, as sentence-transformers computes it. We differ in "joint" over both sides,
    which is refused, and in ranks: the value is that of the batch of all ranks, not of this rank's anchors.
    """

    model: Any  # a wrapped one while a trainer runs
    number: int
    taken: bool
    in_model: bool

    def __init__(
        self,
        model: SentenceTransformer,
        objective: str | Objective | Composite,
        *,
        gather_across_devices: bool = False,
        directions: Sequence[Direction] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
    ) -> None:
        super().__init__()
        if not isinstance(unwrapped(model), SentenceTransformer):
            raise ConfigError(
                f"{type(self).__name__} needs a model that gives sentence embeddings, a SentenceTransformer; "
                f"got {type(unwrapped(model)).__name__}."
            )
        asked = directions if isinstance(directions, list | tuple | set | frozenset) else ()
        wanted = MODES.get(frozenset(map(str, asked)))
        if wanted is None:
            shown = "; ".join(str(tuple(sorted(each, reverse=True))) for each in MODES)
            raise OptionError(
                f"directions must be one of {shown}, got {directions!r}. Both sides in one softmax (GTE) is no sum "
                "over anchors of one matrix of similarities."
            )
        if partition_mode != wanted:
            raise OptionError(f"directions={tuple(directions)} need partition_mode={wanted!r}, got {partition_mode!r}.")
        self.model = model
        self.objective = as_composite(objective)
        self._noted: set[tuple[str, str]] = set()  # said once
        self.gather_across_devices = gather_across_devices
        self.directions = tuple(directions)
        self.partition_mode = partition_mode
        if next(self.objective.parameters(), None) is not None:
            self.objective.build(width_of(unwrapped(model)))
        self.objective.to(unwrapped(model).device)
        for parameter in self.objective.parameters():
            # It is no part of the model, whose gradients DistributedDataParallel averages over the ranks.
            parameter.register_hook(lambda gradient: all_sum(gradient) / world_size())
        carry(self)

    def trains(self, model: nn.Module) -> bool:
        """Return whether this is the loss of a model.

        Args:
            model: as it was given, or wrapped by DistributedDataParallel or torch.compile.
        """
        return unwrapped(self.model) is unwrapped(model)

    def check_dataset(self, dataset: Any) -> None:
        """Check the labels of a training set before the first step. Called by `ObjectiveCallback`.

        Args:
            dataset: of the `datasets` library, or several in a ConcatDataset. Others are left alone.

        Raises:
            PairsError: labels are no numbers.
        """
        for part in getattr(dataset, "datasets", [dataset]):
            features = getattr(part, "features", None) or {}
            for name in (each for each in LABELS & set(features) if hasattr(features[each], "dtype")):  # no list
                kind = str(features[name].dtype)
                if not kind.startswith(("int", "uint", "float", "bool")):
                    raise PairsError(
                        f"the column {name!r} holds values of the type {kind}, and labels are numbers. Give data."
                        f"class_encode_column({name!r}), or data.remove_columns({name!r}) if the loss needs no labels."
                    )
                found = set(part.select_columns(name).unique(name)) if hasattr(part, "unique") else set()  # no stream
                if len(features) == 2 and {-1, 0} <= found:  # of one text
                    warn(
                        f"-1 in the column {name!r} is a class here, and SNLI and others mark rows without a label "
                        f"with it. If yours does, give data.filter(lambda row: row[{name!r}] >= 0)."
                    )
                # Of several sets, some may be for a loss of scores.
                if len(features) > 2 and part is dataset and (found == {0, 1} or (kind[0] == "f" and len(found) > 1)):
                    warn(
                        f"every row is trained as a pair, whatever its {name!r} is. If that says which rows belong "
                        f"together, give data.filter(lambda row: row[{name!r}] > 0), or take CoSENTLoss for scores."
                    )

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, (), with gradient.

        Args:
            sentence_features: of each column, what the model takes: tensors (B, ...) by name.
            labels: (B,) class of each row, for objectives that need them. Floating-point labels of two columns or more
                are ignored. Of one column they are classes if they are whole numbers.

        Raises:
            PairsError: columns or labels that the objective cannot be evaluated on.
            ConfigError: the model gives no sentence embedding.
        """
        if self.training and torch.is_grad_enabled() and not self.taken and list(self.objective.parameters()):
            self.taken = True  # said once
            warn(
                f"no trainer looks after the objective {self.objective}, which has parameters of its own. In "
                "a loop of your own optimise loss.parameters(), call loss.objective.after_step(learning_rate) after "
                "each step, and save loss.state_dict(). A trainer that was built before dipole.text.ContrastiveLoss "
                "was loaded takes callbacks=[dipole.text.ObjectiveCallback()]."
            )
        return self.compute_loss_from_embeddings(self.embed(list(sentence_features)), labels)

    def embed(self, columns: list[dict[str, Tensor]]) -> list[Tensor]:
        """Embeddings (B, d) of each column.

        Args:
            columns: features of each, tensors (B, ...) by name, as `forward` takes them.

        Raises:
            PairsError: there is no column, or one is no features.
            ConfigError: the model gives no sentence embedding.
        """
        if not columns:
            raise PairsError(f"{type(self).__name__} got no column of text; it needs (anchor, positive, ...).")
        if wrong := [type(each).__name__ for each in columns if not isinstance(each, Mapping)]:
            raise PairsError(f"give a list with model.preprocess(texts) of each column, not {wrong[0]}.")
        try:
            return embed_columns(self.model, columns)
        except KeyError as error:
            if error.args != ("sentence_embedding",):
                raise
            name = type(unwrapped(self.model)).__name__
            raise ConfigError(
                f"the model ({name}) gives no sentence_embedding: its modules end before the pooling. "
                "Add a Pooling module, or a module that writes features['sentence_embedding']."
            ) from None

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of embeddings, ().

        Args:
            embeddings: (B, d) of each column.
            labels: (B,) classes, or None.

        Raises:
            PairsError: columns or labels that the objective cannot be evaluated on, or another width than a term's
                parameters.
        """
        embedded = related_columns(embeddings, labels, self.directions)
        width = embeddings[0].shape[1]
        try:
            self.objective.build(width)
        except PairsError as error:
            raise PairsError(
                f"embeddings are {width} wide, but a term has parameters of another width: {error} Under "
                "MatryoshkaLoss leave such a term out, or take matryoshka_dims=[the model's width] alone."
            ) from None
        ranks = nullcontext() if self.gather_across_devices else as_single_process()
        try:
            with ranks:
                outcome = self.objective(embedded)
        except PairsError as error:
            if "needs labels" not in str(error):
                raise
            fix = "give the data set a column 'label' of class numbers."
            if labels is not None:
                fix = f"class numbers, got {labels.dtype} of shape {tuple(labels.shape)}. Scores are no classes: cast "
                fix += "the column 'label' to whole numbers."
            raise PairsError(f"{self.objective} needs labels: {fix}") from None
        advice = (
            "Sentences of one class are positives of each other, and those of other classes negatives: a batch "
            "needs several of each (batch_sampler=BatchSamplers.GROUP_BY_LABEL)."
        )
        if len(embeddings[0]) < 2:
            advice = "A batch needs two rows or more: leave out a last batch of one (dataloader_drop_last=True)."
        for name, term in outcome.terms.items():
            if term.note and (name, term.note) not in self._noted:
                self._noted.add((name, term.note))
                warn(f"{name} is {term.note}. {advice}", stacklevel=3)
        return outcome.loss

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments, for model cards."""
        names = ("gather_across_devices", "directions", "partition_mode")
        return {"objective": str(self.objective), **{name: getattr(self, name) for name in names}}

    @property
    def citation(self) -> str:
        """BibTeX of the objective, with the source of each term, for model cards."""
        named = [(name, entry_of(term)) for name, _, term in self.objective if registry.name_of(type(term))]
        sources = "; ".join(f"{name}: {entry.source}" for name, entry in named if entry.source)
        return f"\n@misc{{dipole,\n    title={{{self.objective}}},\n    note={{{sources}}}\n}}\n"

    def load_objective(self, folder: str | Path) -> None:
        """Read the objective's parameters from a checkpoint of a trainer.

        Args:
            folder: of the checkpoint.

        Raises:
            CheckpointError: the folder holds none, or those of another objective.
        """
        load_objectives(Path(folder) / FILE, [self.objective])

    def projected_model(self) -> SentenceTransformer:
        """Return the model with a Dense module behind it if a term learns a projection (CLLR's L).

        The result shares the model's modules, and `save_pretrained` writes a folder that loads without dipole. If no
        term projects, it is the model itself.
        """
        from sentence_transformers.sentence_transformer import modules

        model = unwrapped(self.model)
        unit = torch.eye(width_of(model), device=model.device)
        with torch.no_grad():
            images = self.objective.transform(unit)  # (d, d'), rows: images of the unit vectors
        if torch.equal(images, unit):
            return model
        dense = modules.Dense(*images.shape, bias=False, activation_function=nn.Identity())
        dense.linear.weight = nn.Parameter(images.T.contiguous())
        found = SentenceTransformer(
            modules=[*model.children(), dense],
            device=str(model.device),
            prompts=model.prompts,
            default_prompt_name=model.default_prompt_name,
            similarity_fn_name=model.similarity_fn_name,
        )
        return found.train(model.training)


class CachedContrastiveLoss(ContrastiveLoss):
    """`ContrastiveLoss` whose memory grows with `mini_batch_size`, while the loss sees the whole batch.

        >>> loss = CachedContrastiveLoss(model, "infonce(temperature=0.05)", mini_batch_size=32)
        >>> columns = [model.preprocess(texts) for texts in (["a cat", "a dog"], ["the cat sleeps", "the dog barks"])]
        >>> loss(columns, labels=None).backward()

    Sentences are embedded without a graph, and again, some at a time, when their gradient is known (Gao et al.
    2021, Sec. 3.2). Without dropout the value and every gradient equal those of ContrastiveLoss. With dropout each
    mini-batch draws its own masks, as in CachedMultipleNegativesRankingLoss.

    Args:
        model: as in `ContrastiveLoss`, and so for the others.
        objective: text, Objective or Composite.
        mini_batch_size: sentences that the model sees at a time, >= 1.
        gather_across_devices: embeddings of all ranks are candidates.
        directions: which column asks which.
        partition_mode: "joint" or "per_direction".

    Raises:
        OptionError: mini_batch_size, directions or partition_mode are none of these.
        SpecError: for a wrong text.
        ConfigError: as `ContrastiveLoss`; from a call inside AdaptiveLayerLoss, which needs the complete batch.
        PairsError: as `ContrastiveLoss`; from a call, features that cannot be given some rows at a time
            (StaticEmbedding, flattened inputs, images of several sizes).
    """

    def __init__(
        self,
        model: SentenceTransformer,
        objective: str | Objective | Composite,
        *,
        mini_batch_size: int = 32,
        gather_across_devices: bool = False,
        directions: Sequence[Direction] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
    ) -> None:
        check_whole("mini_batch_size", mini_batch_size)
        super().__init__(
            model,
            objective,
            gather_across_devices=gather_across_devices,
            directions=directions,
            partition_mode=partition_mode,
        )
        self.mini_batch_size = mini_batch_size

    def embed(self, columns: list[dict[str, Tensor]]) -> list[Tensor]:
        model = unwrapped(self.model)
        if any(hasattr(part.__dict__.get("forward"), "set_layer_idx") for part in model.children()):
            raise ConfigError(
                "CachedContrastiveLoss does not work inside AdaptiveLayerLoss or Matryoshka2dLoss: they read every "
                "layer of the complete batch. Use ContrastiveLoss there, or MatryoshkaLoss here."
            )
        decorator = model.__dict__.get("forward")
        inner = getattr(decorator, "fn", None)  # below the decorator of MatryoshkaLoss
        changed: AbstractContextManager[object]
        if callable(inner):
            changed = mock.patch.object(decorator, "fn", self._rows_at_a_time(model, inner))
        else:
            changed = patched_forward(model, self._rows_at_a_time(model, own_forward(model)))
        with changed:
            return super().embed(columns)

    def _rows_at_a_time(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def divided(features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            rows, shared = _split(model, features)

            def run(part: dict[str, Any]) -> dict[str, Tensor]:
                # A module may change what it is given, and the second pass is given the same.
                own = {name: value.clone() for name, value in part.items()}
                return {"sentence_embedding": forward({**shared, **own}, **kwargs)["sentence_embedding"]}

            return microbatched(model, self.mini_batch_size, run)(rows)

        return divided

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "mini_batch_size": self.mini_batch_size}

    @property
    def citation(self) -> str:
        return super().citation + (
            "\n@misc{gao2021scaling,\n"
            "    title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},\n"
            "    author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan},\n"
            "    year={2021},\n    eprint={2101.06983},\n    archivePrefix={arXiv},\n    primaryClass={cs.LG}\n}\n"
        )


def unwrapped(model: Any) -> Any:
    """Return the model inside of DistributedDataParallel and torch.compile."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def width_of(model: SentenceTransformer) -> int:
    """Width of the embeddings in training, which `truncate_dim` does not cut."""
    with model.truncate_embeddings(None):
        return int(model.get_embedding_dimension() or len(model.encode("a", show_progress_bar=False)))


def related_columns(
    embeddings: Sequence[Tensor], labels: Tensor | None, directions: Sequence[str] = ("query_to_doc",)
) -> EncodedBatch:
    """Pair the columns (B, d) of a batch. Floating-point labels are ignored if there are two columns or more."""
    shapes = [str(tuple(each.shape)) for each in embeddings]
    if len(set(shapes)) != 1 or embeddings[0].ndim != 2:
        raise PairsError(f"columns must be alike, (B, d) each, got {', '.join(shapes) or 'none'}.")
    batch = len(embeddings[0])
    if not isinstance(labels, Tensor | None):
        raise PairsError(f"labels must be a tensor, got {type(labels).__name__}. Give torch.tensor(class numbers).")
    if labels is not None and len(embeddings) == 1:
        if labels.shape != (batch,):
            shown = tuple(labels.shape)
            raise PairsError(f"labels must be one class number for each of {batch} sentences, got {shown}.")
        if labels.is_floating_point() and not bool(((labels == labels.round()) & (labels.abs() < LARGEST)).all()):
            raise PairsError(
                "labels are scores, not classes: one column of text needs a column 'label' of whole numbers. "
                "For pairs with scores take two columns and a loss such as CoSENTLoss."
            )
        labels = labels.long()  # a column of integers with gaps in it is read as floats
    elif labels is not None and (labels.shape != (batch,) or labels.is_floating_point()):
        labels = None
    if len(embeddings) == 1 and labels is None:
        raise PairsError(
            "one column of text and no labels: an objective needs (anchor, positive), (anchor, positive, negative_1, "
            "...), or one column and a column 'label' of class numbers. For two dropout masks of each sentence give "
            "its column twice."
        )

    def paired(rows: dict[str, Tensor]) -> Pairs | tuple[Pairs, ...]:
        anchor, *others = (rows[name] for name in columns)
        if not others:
            return Pairs.from_labels(anchor, rows["labels"])
        positive, *hard = others
        classes = rows.get("labels")
        pairs = Pairs.from_columns(anchor, positive, hard, classes)
        if "query_to_query" in directions:
            pairs = pairs.with_intra_batch()
        if "doc_to_query" in directions:
            return pairs, Pairs.from_columns(positive, anchor, labels=classes)
        return pairs

    columns = {f"column{number}": each for number, each in enumerate(embeddings)}
    return EncodedBatch(columns | {"labels": labels}, paired)


def _split(model: nn.Module, features: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Divide features into tensors with a row for each sentence, and the others."""
    tensors = {n: v for n, v in features.items() if isinstance(v, Tensor) and v.ndim and n not in SHARED}
    counts = set(map(len, tensors.values()))
    if len(counts) != 1 or "offsets" in features or "cu_seq_lens_q" in features:
        shown = ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items())
        raise PairsError(
            f"CachedContrastiveLoss cannot give {type(model).__name__} some sentences at a time: its features must "
            f"have a row for each, got {shown or 'none'}. Use ContrastiveLoss for StaticEmbedding and flattened inputs."
        )
    return tensors, {name: value for name, value in features.items() if name not in tensors}
