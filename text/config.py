"""The [text] table of a recipe."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from dipole.core.evaluation.probes import PROBE_DEVICE_HELP, Classifier, ProbeDevice
from dipole.core.train.config import Settings
from dipole.core.train.finetuning import FREEZE_HELP, LORA_HELP, WEIGHTS_HELP, FreezeSetting, LoraTable
from dipole.core.utils.backbone import NetworkSource, Weights


class TextSettings(Settings):
    """Corpus, encoders and evaluation of a text run. The defaults are a small run on the embedded corpus."""

    incidental: ClassVar[frozenset[str]] = frozenset({"processes"})

    corpus: str = Field(
        "pydoc",
        description="pydoc, a file or folder (.txt, .jsonl, .csv, .tsv, each also packed, .parquet, or what datasets "
        "saved), or hub:NAME[:SUBSET]",
    )
    unit: Literal["documents", "sentences"] = Field(
        "documents", description="a row is running text to be cut into sentences, or one sentence of one long text"
    )
    column: str | None = Field(None, description="column that holds the text. Default: one with a usual name")
    split: str = Field("train", description="split of a data set")
    encoding: str = Field("utf-8", description="of text files")
    cache: str | None = Field(
        None,
        description="folder for encoded corpora, shared by runs. Default: small ones stay in memory, those above "
        "32 MB are in the user's cache folder (DIPOLE_CACHE)",
    )
    processes: int | None = Field(None, ge=1, description="that read a large corpus. Default: one for each core")
    limit: int | None = Field(None, ge=1, description="use the first sentences only")
    held_out: float = Field(0.05, ge=0, lt=1, description="share of each document's end, held out for evaluation")
    development: float = Field(0.0, ge=0, lt=1, description="share before it that is neither trained on nor evaluated")

    tokenizer: str = Field("words", description="words, a tokenizer.json, a folder, or a name on the Hugging Face Hub")
    vocabulary_size: int = Field(50_000, ge=1, description="most frequent words that get an id (words only)")
    lower: bool = Field(False, description="lower-case everything (words only)")
    max_length: int = Field(50, ge=1, description="tokens of a training sentence, at most (authors' script: 50)")

    encoder: Literal["gru", "bow", "transformer"] = "gru"
    direction: Literal["uni", "bi", "combine"] = Field("bi", description="gru only. combine is uni and bi side by side")
    hidden_size: int = Field(1200, ge=2, description="gru: width of f. Small BERT: its width")
    word_size: int = Field(300, ge=1, description="width of trained word embeddings")
    vectors: str | None = Field(None, description="GloVe or word2vec text file for fixed vectors and for expansion")
    channels: Literal["trained", "fixed", "both"] = Field("trained", description="word embeddings. both: MultiChannel")
    transformer: str | None = Field(None, description="config.json, checkpoint folder or Hub name; default: small BERT")
    weights: Weights | None = Field(None, description=f"with `transformer`: {WEIGHTS_HELP}")
    freeze: FreezeSetting = Field("none", description=f"with `transformer`: {FREEZE_HELP}")
    lora: LoraTable | None = Field(None, description=f"with `transformer`: {LORA_HELP}")
    layers: int = Field(2, ge=1, description="of the small BERT")
    heads: int = Field(4, ge=1, description="of the small BERT")
    pooling: Literal["mean", "cls", "lasttoken"] = Field(
        "mean", description="of a transformer's tokens. lasttoken is for decoders, cls not"
    )
    head: Literal["none", "mlp", "mlp_only_train"] = Field(
        "none",
        description="transformer only: a linear map and tanh over the pooled output (SimCSE). mlp is evaluated and "
        "exported with it, mlp_only_train without",
    )
    sides: Literal[1, 2] = Field(
        2, description="2: f and g without shared weights. 1: one encoder for both, the default of views and columns"
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="window and blocks: one mask for the whole batch and both sides, not rescaled, as the authors do. "
        "views and columns: one of each row, rescaled, or the rate of all layers of a transformer",
    )

    pairs: Literal["window", "blocks", "views", "columns"] = Field(
        "window",
        description="neighbours, members of a block, a sentence and itself under another dropout mask (SimCSE), or the "
        "columns of a table of pairs",
    )
    columns: tuple[str, ...] | None = Field(
        None, description="columns only: anchor, positive and any negatives. Default: usual names"
    )
    label: str | None = Field(
        None, description="columns only: column that says whether, or how much, anchor and positive belong together"
    )
    label_use: Literal["filter", "target"] = Field(
        "filter", description="train pairs with a high enough label only, or weight each pair by its label"
    )
    label_from: float | str | None = Field(
        None,
        description="filter: least label of a pair, or its name, such as 'entailment'. target: label of weight 1. "
        "Default: 1 of the labels 0 and 1, and the highest label",
    )
    no_duplicates: bool = Field(True, description="columns only: no text occurs in two rows of a batch")
    window: int = Field(1, ge=1, le=10_000, description="sentences on each side that are positives")
    self_logit: Literal["zero", "drop"] = Field("zero", description="the sentence itself: logit 0, or left out")
    block_size: int = Field(2, ge=1, description="blocks only: positives b of a sentence. A block has b + 1 sentences")
    blocks: Literal["consecutive", "random"] = Field(
        "consecutive", description="blocks only: neighbours, or any sentences of one document (Arora et al.)"
    )
    block_count: int | None = Field(
        None, ge=1, description="random blocks of each document, drawn once. Default: new ones in every epoch"
    )
    order: Literal["sequential", "shuffled"] = Field(
        "shuffled", description="order of the batches. Within a batch sentences stay consecutive"
    )
    chunks: int = Field(4, ge=1, description="length classes inside a batch. Changes only the speed")
    clip_per_tensor: float | None = Field(None, gt=0, description="largest norm of each tensor's gradient (authors: 5)")

    classifiers: tuple[Classifier, ...] = Field(
        (), description="also tell all held-out sentences by their document: trained, mean, few (Arora et al., Table 1)"
    )
    solver: Literal["convex", "sgd", "adam"] = Field("convex", description="of the classifier `trained`")
    labels_per_class: int = Field(5, ge=1, description="of the classifier `few`")
    losses: bool = Field(
        False,
        description="also the unsupervised loss on blocks of held-out sentences and the supervised loss of the mean "
        "classifier (Arora et al., Figure 2 (c))",
    )
    labelled: str | None = Field(
        None,
        description="labelled documents (a file of rows, or hub:NAME) that a linear classifier is to tell by "
        "the mean of their sentences' vectors",
    )
    normalize: Literal["halves", "unit", "none"] = Field("halves", description="scaling of the evaluated vectors")
    expand: bool = Field(False, description="evaluate and export with the vocabulary expanded by `vectors`")
    senteval: str | None = Field(None, description="folder that holds SentEval's downstream/. Default: no evaluation")
    tasks: tuple[str, ...] = Field(("MR", "CR", "SUBJ", "MPQA", "TREC", "MRPC"), description="SentEval tasks")
    protocol: Literal["fast", "senteval-torch", "senteval-sklearn", "skip-thoughts"] = "fast"
    kfold: int = Field(10, ge=2)
    probe_device: ProbeDevice = Field("auto", description=PROBE_DEVICE_HELP)

    @property
    def rows_drop(self) -> bool:
        """True if `dropout` draws a mask for each row."""
        return self.pairs in ("views", "columns")

    def determining(self) -> dict[str, Any]:
        """Return what identifies a run. A transformer's files are identified by their content."""
        found = super().determining()
        if self.transformer and (content := NetworkSource(self.transformer, "", self.weights).content):
            found["transformer"] = content  # what lies there, wherever it lies
        if self.pairs == "blocks":
            found["blocks_version"] = 2
        return found

    @model_validator(mode="after")
    def _fits(self) -> "TextSettings":
        if self.rows_drop and "sides" not in self.model_fields_set:
            # The model is frozen for everybody else: the stored configuration must be complete.
            self.__dict__["sides"] = 1
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        problems = self._pair_problems(changed)
        if self.held_out + self.development >= 1:
            problems.append("held_out and development together leave nothing for training; their sum must be below 1")
        of_transformer = [name for name in ("weights", "freeze", "lora") if name in changed]
        if of_transformer and self.transformer is None:
            problems.append(f"{', '.join(of_transformer)}: no effect without transformer, a checkpoint or config.json")
        if self.channels != "trained" and self.vectors is None:
            problems.append(f"channels {self.channels!r} needs vectors, a GloVe or word2vec text file")
        if self.expand and (self.vectors is None or self.channels == "fixed" or self.encoder == "transformer"):
            problems.append("expand needs vectors and trained word embeddings")
        if self.vectors is not None and self.channels == "trained" and not self.expand:
            problems.append("vectors has no effect with channels 'trained'. Use channels 'fixed' or 'both', or expand")
        if self.encoder == "gru" and self.direction != "uni" and self.hidden_size % 2:
            problems.append(
                f"hidden_size {self.hidden_size} cannot be halved for direction {self.direction!r}. Choose an even one"
            )
        if self.encoder == "transformer" and self.transformer is None and self.hidden_size % self.heads:
            problems.append(f"hidden_size {self.hidden_size} is no multiple of heads {self.heads}. Change one of them")
        if self.encoder == "transformer" and self.channels != "trained":
            problems.append("channels has no effect with encoder 'transformer'")
        if self.classifiers and not self.held_out:
            problems.append("classifiers are tested on held-out sentences. Set held_out above 0")
        if self.losses and not self.held_out:
            problems.append("losses are those of held-out sentences. Set held_out above 0")
        if self.tokenizer != "words" and self.vectors is not None:
            problems.append("vectors needs tokenizer 'words'")
        for other, value, keys in (
            ("pairs", "columns", ("columns", "no_duplicates", "label")),
            ("pairs", "window", ("window", "self_logit")),
            ("pairs", "blocks", ("block_size", "blocks")),
            ("blocks", "random", ("block_count",)),
            ("encoder", "gru", ("direction",)),
            ("encoder", "transformer", ("transformer", "layers", "heads", "pooling", "head")),
            ("tokenizer", "words", ("vocabulary_size", "lower")),
        ):
            if (used := getattr(self, other)) != value:
                without = [key for key in keys if key in changed]
                problems += [f"{key} has no effect with {other} {used!r}; it belongs to {value!r}" for key in without]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _pair_problems(self, changed: list[str]) -> list[str]:
        problems = []
        if self.pairs == "views":
            if self.sides == 2:
                problems.append("views are two passes through one encoder. Leave sides out, or set sides = 1")
            if not self.dropout and (self.encoder != "transformer" or self.transformer is None):
                problems.append(
                    "views differ by their dropout masks alone, and dropout is 0: both would be the same. Set "
                    "text.dropout, for example 0.1"
                )
        if self.pairs == "columns":
            if self.corpus == "pydoc":
                problems.append("columns need a table of pairs: set corpus to a file, a folder or hub:NAME")
            names = self.columns
            if names is not None and (len(names) < 2 or len(set(names)) < len(names) or not all(names)):
                problems.append(
                    f"columns must name an anchor, a positive and any negatives, each once, got {list(names)}; for "
                    f'example ["anchor", "positive", "negative"]'
                )
            if self.label is None and (self.label_use != "filter" or self.label_from is not None):
                problems.append("label_use and label_from need label, the column of labels")
            start = self.label_from
            if self.label_use == "target" and start is not None and (isinstance(start, str) or start <= 0):
                problems.append("label_from must be a number above 0 with label_use 'target'")
            without = [key for key in ("unit", "column", "classifiers", "losses", "development") if key in changed]
            problems += [f"{key} has no effect with pairs 'columns', whose rows are no documents" for key in without]
        return problems
