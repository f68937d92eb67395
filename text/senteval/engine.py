"""SentEval's engine, and the encoders it takes. Each distinct sentence is encoded once."""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal, cast, get_args, overload

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.evaluation.arrays import as_matrix, finite_rows
from dipole.core.objectives.similarity import full_precision
from dipole.core.objectives.spec import check_whole
from dipole.core.utils.cache import found
from dipole.core.utils.errors import DataError, OptionError
from dipole.core.utils.files import atomic_file, disk_refusing
from dipole.core.utils.freezing import in_mode
from dipole.core.utils.progress import Progress
from dipole.core.utils.text import counted
from dipole.text.senteval.protocols import ProbeSettings, check_device
from dipole.text.senteval.scoring import Result, score
from dipole.text.senteval.tasks import READERS, Sentence, Task, load_task
from dipole.text.senteval.torch_classifier import Classifier

# Known entries of `params`. Scripts can add others, unless they look like a misspelt one of these.
KNOWN = (
    "task_path", "usepytorch", "kfold", "seed", "batch_size", "nhid", "classifier", "similarity",
    "protocol", "halves", "cache", "cache_key", "device", "check", "progress", "current_task",
)  # fmt: skip

ASKED = 16  # sentences that are encoded again to check cached features
BATCH = 32  # sentences that a model sees at a time

Encode = Callable[[list[Any]], Any]
Pooling = Literal["mean", "cls", "pooler"]
Batcher = Callable[["Params", list[Sentence]], Any]
Prepare = Callable[["Params", list[Sentence]], Any]


class Params(dict):
    """SentEval's parameters: a dictionary whose keys are attributes, too. A missing one is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


class SE:
    """SentEval's engine.

    Args:
        params: SentEval's parameters and some of dipole's. SentEval has `task_path`, `usepytorch`, `kfold` (>= 2,
            default 5, while the literature uses 10), `seed` (0 to 2**32 - 1, default 1111), `batch_size` of the encoder
            (>= 1, default 128), `classifier`, and `similarity` for STS, a function of two vectors (d,).
            dipole adds: `protocol`, one of `PROTOCOLS`, instead of `usepytorch`. `halves` (>= 1, default 1), the number
            of parts that "skip-thoughts" scales to unit length. Use 2 for encoders that concatenate f and g. `cache`
            and `cache_key`, a folder for features and a unique name of this encoder. `device` (default "cpu"), where
            classifiers are trained, except those of scikit-learn, which stay on the CPU. `check`: False reads task
            files whose counts differ from the published ones. `progress`: False prints nothing.
        batcher: `batcher(params, sentences)` with token lists (some are empty) gives an array (n, d).
        prepare: `prepare(params, all sentences of the task)`, called once before a task is encoded.

    Raises:
        OptionError: a parameter is wrong. `eval` raises it if `halves` does not divide the vectors.
        DataError: from `eval`, see there.
    """

    def __init__(self, params: Mapping[str, Any], batcher: Batcher, prepare: Prepare | None = None) -> None:
        if not isinstance(params, Mapping):
            raise OptionError(f"params must be a dictionary of SentEval's parameters, got {type(params).__name__}")
        if not callable(batcher) or not (prepare is None or callable(prepare)):
            raise OptionError("batcher and prepare must be functions: batcher(params, sentences) gives an array (n, d)")
        self.params = Params({"seed": 1111, "batch_size": 128, "nhid": 0, "kfold": 5, **params})
        self.params["classifier"] = self.params.classifier or {"nhid": 0}
        _check(self.params)
        given, named = self.params.usepytorch, self.params.protocol
        implied = {None: None, True: "senteval-torch", False: "senteval-sklearn"}[given]
        if named and implied and named != implied:
            raise OptionError(f"protocol {named!r} and usepytorch={given} contradict each other. Give one of them")
        self.settings = ProbeSettings(
            named or implied or "fast",
            self.params.kfold,
            self.params.seed,
            Classifier.from_params(self.params.classifier),
            check_device(self.params.device or "cpu"),
        )
        self.batcher = batcher
        self.prepare = prepare or (lambda params, samples: None)
        self.list_tasks = list(READERS)
        self.progress = Progress(quiet=self.params.get("progress", True) is False)
        self.results: Any = None

    @overload
    def eval(self, name: str) -> Result: ...
    @overload
    def eval(self, name: list[str] | tuple[str, ...]) -> dict[str, Result]: ...
    def eval(self, name: str | list[str] | tuple[str, ...]) -> Result | dict[str, Result]:
        """Score one or several tasks.

        Args:
            name: a name as in SentEval (`load_task`), or a nonempty list or tuple of names.

        Returns:
            A `Result`. For several tasks, a dict by name.

        Raises:
            OptionError: `name` is none of these.
            DataError: a task is unknown, a file is missing or damaged, or the encoder's vectors are not numbers (n, d).
        """
        check = self.params.get("check", True) is not False
        # A missing file shows before hours of encoding.
        tasks = [load_task(each, self.params.task_path, check) for each in task_names(name)]
        self.results = {}
        for task in tasks:
            self.params["current_task"] = task.name
            self.results[task.name] = score(task, self._encode(task), self.settings, self.params, self.progress)
        if isinstance(name, str):
            self.results = self.results[name]
        return self.results

    def _encode(self, task: Task) -> dict[tuple[str, ...], np.ndarray]:
        """Encode each distinct sentence of the task once, short ones first."""
        distinct = _distinct(task.samples())
        self.prepare(self.params, task.samples())
        path = None
        if self.params.cache:
            digest = hashlib.sha256(str(self.params.cache_key).encode())
            for sentence in distinct:
                digest.update("\x1f".join(sentence).encode() + b"\x1e")
            path = Path(self.params.cache) / f"{task.name}-{digest.hexdigest()[:20]}.npy"
            rows = found(partial(np.load, path, allow_pickle=False))
            if rows is not None and rows.ndim == 2 and len(rows) == len(distinct) and self._gives(distinct, rows):
                return dict(zip(distinct, as_rows(rows, len(distinct), task.name), strict=True))
        self.progress.start(f"encode {task.name}", len(distinct), 0)
        encode = _in_batches(
            partial(self.batcher, self.params), self.params.batch_size, task.name, self.progress.update
        )
        matrix = encode([list(sentence) for sentence in distinct])
        self.progress.close(len(distinct))
        if path is not None:
            with atomic_file(path) as file:
                np.save(file, matrix)
        return dict(zip(distinct, matrix, strict=True))

    def _gives(self, distinct: Sequence[tuple[str, ...]], rows: np.ndarray) -> bool:
        """Return whether this encoder gives the cached rows, of sentences of all lengths. A key can be reused."""
        places = np.unique(np.linspace(0, len(distinct) - 1, ASKED).astype(int))
        asked = [list(distinct[place]) for place in places]
        mine = as_rows(self.batcher(self.params, asked), len(asked), str(self.params.current_task))
        kept = rows[places]
        return mine.shape == kept.shape and np.allclose(mine, kept, rtol=1e-3, atol=1e-4 * float(np.abs(kept).max()))


def _check(params: Params) -> None:
    """Raise OptionError for misspelt or wrong parameters."""
    for name in params:
        near = get_close_matches(str(name), KNOWN, n=1, cutoff=0.8)
        if near and name not in KNOWN and abs(len(str(name)) - len(near[0])) < 3:  # not eval_batch_size
            raise OptionError(f"params has no {name!r}. Did you mean {near[0]!r}?")
    if not isinstance(params.classifier, Mapping):
        raise OptionError(f"classifier must be a dictionary such as {{'nhid': 0}}, got {params.classifier!r}")
    if "nhid" not in params.classifier:
        raise OptionError("classifier needs 'nhid', the number of hidden units (0: logistic regression)")
    if not params.task_path or not isinstance(params.task_path, str | Path):
        raise OptionError("params needs 'task_path', the folder that holds SentEval's downstream/")
    check_whole("batch_size", params.batch_size)
    check_whole("halves", params.halves or 1)
    if params.usepytorch not in (None, True, False):
        raise OptionError(f"usepytorch must be True or False, got {params.usepytorch!r}")
    if params.similarity is not None and not callable(params.similarity):
        raise OptionError(f"similarity must be a function of two vectors, got {params.similarity!r}")
    if not params.cache:
        return
    if not params.cache_key:
        raise OptionError("cache needs 'cache_key', a name that tells this encoder's features from others'")
    if not isinstance(params.cache, str | Path):
        raise OptionError(f"cache must be a folder, got {params.cache!r:.60}")
    # Before hours of encoding.
    with disk_refusing(f"cache: the folder {str(params.cache)[:200]} cannot be written", OptionError, "cache"):
        Path(params.cache).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=params.cache):
            pass


def _distinct(sentences: Iterable[Sentence]) -> list[tuple[str, ...]]:
    return sorted(set(map(tuple, sentences)), key=lambda sentence: (len(sentence), sentence))


def evaluate(
    encode: Any,
    tasks: Sequence[str],
    task_path: str | Path,
    *,
    batch_size: int | None = None,
    tokenizer: Any = None,
    pooling: Pooling = "mean",
    protocol: str = "fast",
    kfold: int = 10,
    halves: int = 2,
    seed: int = 1111,
    check: bool = True,
    progress: bool = True,
    device: torch.device | str = "cpu",
) -> dict[str, Result]:
    """Score an encoder on several tasks. A sentence of several tasks is encoded once.

    Args:
        encode: a SentenceTransformer, another object with a method `encode`, a model of transformers, or a function
            from a list of sentences (tokens joined by blanks, some of them empty) to an array (n, d).
        tasks: names as in SentEval.
        task_path: folder that holds SentEval's downstream/.
        batch_size: sentences that are encoded at a time, >= 1. None: a function gets all of them, a model 32.
        tokenizer: of a model of transformers. None: the one that is saved with it.
        pooling: of a model of transformers: "mean" of the last hidden states, that of the first token ("cls"), or the
            model's "pooler".
        protocol: one of `PROTOCOLS`.
        kfold: folds of tasks without a test part, >= 2, and at most the samples of the rarest class.
        halves: parts of the vector, >= 1, that "skip-thoughts" scales to unit length one by one (2: f and g).
        seed: of folds and classifiers, from 0 to 2**32 - 1.
        check: False reads task files whose counts differ from the published ones.
        progress: False prints nothing.
        device: where classifiers are trained, such as "cuda" or "auto". Classifiers of scikit-learn stay on the CPU.

    Returns:
        A `Result` for each task, by name.

    Raises:
        OptionError: an argument is out of its range, or the device is not here.
        DataError: a task is unknown, a file is missing or damaged, or `encode` gives no finite numbers (n, d).
    """
    settings = ProbeSettings(protocol, kfold, seed, device=check_device(device))
    check_whole("halves", halves)
    encode = as_encode(encode, batch_size, tokenizer, pooling)
    shown = Progress(quiet=not progress)
    loaded = [load_task(name, task_path, check) for name in task_names(tasks)]
    distinct = _distinct(sentence for task in loaded for sentence in task.samples())
    shown.start("SentEval", len(loaded), 0, "task")
    results: dict[str, Result] = {}
    with closing(shown):
        shown.status(f"encoding {len(distinct)} sentences")
        matrix = as_rows(encode([" ".join(sentence) for sentence in distinct]), len(distinct), "encode")
        embeddings = dict(zip(distinct, matrix, strict=True))
        for count, task in enumerate(loaded, start=1):
            shown.status(f"scoring {task.name}")
            results[task.name] = score(task, embeddings, settings, {"halves": halves}, shown)
            shown.update(count)
        shown.close(len(loaded))
    return results


def for_genuine(encode: Any) -> tuple[Prepare, Batcher]:
    """Return `prepare` and `batcher` for the genuine SentEval, so that its own code judges our encoder.

    All sentences of a task are encoded once, in `prepare`, where they can be sorted and batched well.

        prepare, batcher = senteval.for_genuine(encoder.encode)
        senteval_of_facebook.engine.SE(params, batcher, prepare).eval(tasks)

    Args:
        encode: as in `evaluate`.

    Raises:
        DataError: from a call, `encode` gives no finite numbers (n, d).
    """
    encode = as_encode(encode)
    known: dict[str, np.ndarray] = {}

    def add(sentences: Iterable[str]) -> None:
        if new := sorted(set(sentences) - known.keys()):
            known.update(zip(new, as_rows(encode(new), len(new), "encode"), strict=True))

    def prepare(params: Params, samples: list[Sentence]) -> None:
        known.clear()
        add(" ".join(sentence) for sentence in samples)

    def batcher(params: Params, batch: list[Sentence]) -> np.ndarray:
        sentences = [" ".join(sentence) for sentence in batch]
        add(sentences)
        return np.stack([known[sentence] for sentence in sentences])

    return prepare, batcher


def as_encode(encoder: Any, batch_size: int | None = None, tokenizer: Any = None, pooling: Pooling = "mean") -> Encode:
    """Return a function from sentences to vectors (n, d). Arguments are those of `evaluate`.

    Raise OptionError if the encoder is of another kind, an option is out of range, or there is no tokenizer.
    """
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    method = getattr(encoder, "encode", None)
    # Texts and tokenizers have a method of this name too.
    is_other = isinstance(encoder, str | type) or hasattr(encoder, "convert_ids_to_tokens")
    if is_other or not (callable(method) or callable(encoder)):
        raise OptionError(
            f"the encoder must be a function from sentences to vectors (n, d), a SentenceTransformer or a model of "
            f"transformers, got {encoder!r:.60}"
        )
    if isinstance(encoder, nn.Module) and not callable(method):
        return _in_batches(_pooled_states(encoder, tokenizer, pooling), batch_size or BATCH)
    if tokenizer is not None or pooling != "mean":
        raise OptionError(f"tokenizer and pooling are of a model of transformers, and {type(encoder).__name__} is none")
    if not callable(method):
        return encoder if batch_size is None else _in_batches(encoder, batch_size)
    known = signature(method).parameters
    given = {"batch_size": batch_size or BATCH, "show_progress_bar": False}
    encode = partial(method, **{name: value for name, value in given.items() if name in known})
    if batch_size is None or "batch_size" in known:
        return encode
    return _in_batches(encode, batch_size)


def _in_batches(
    encode: Encode, size: int, where: str = "encode", tell: Callable[[int], object] = lambda done: None
) -> Encode:
    def encode_all(sentences: list[Any]) -> np.ndarray:
        parts = []
        for start in range(0, len(sentences), size):
            batch = sentences[start : start + size]
            parts.append(as_rows(encode(batch), len(batch), where))
            tell(start + len(batch))
        widths = sorted({part.shape[1] for part in parts})
        if len(widths) > 1:
            raise DataError(f"{where}: the encoder returned vectors of {' and '.join(map(str, widths[:4]))} numbers")
        return np.concatenate(parts)

    return encode_all


def _pooled_states(model: nn.Module, tokenizer: Any, pooling: Pooling) -> Encode:
    config, base = getattr(model, "config", None), getattr(model, "base_model", None)
    if config is None or not isinstance(base, nn.Module):
        raise OptionError(
            f"{type(model).__name__} is no model of transformers and has no method `encode`: give a function from "
            "sentences to vectors (n, d)"
        )
    if pooling not in get_args(Pooling):
        raise OptionError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    from transformers import AutoTokenizer

    from dipole.core.utils.backbone import positions
    from dipole.text.model import is_first_token_blind  # it needs the packages of such models

    if getattr(config, "is_encoder_decoder", False):
        base = cast(Any, base).get_encoder()
    if pooling == "cls" and is_first_token_blind(base):
        raise OptionError(
            f"pooling='cls' takes the first token, which sees no other token in the causal model "
            f"{type(model).__name__}: sentences would have one vector. Take pooling='mean'"
        )
    name = getattr(model, "name_or_path", "")
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise OptionError(
                f"no tokenizer is saved with {type(model).__name__} ({name or 'made in memory'}): give tokenizer=..."
            ) from error
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    if not callable(tokenizer):
        raise OptionError(f"tokenizer must be one of transformers, such as AutoTokenizer gives, got {tokenizer!r}")
    if tokenizer.pad_token is None:
        raise OptionError("the tokenizer has no padding token: set tokenizer.pad_token = tokenizer.eos_token")
    limit = min(tokenizer.model_max_length, positions(base) or torch.inf)
    options: dict[str, Any] = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
    if limit < 10**6:  # tokenizers without a limit say 10^30
        options |= {"truncation": True, "max_length": int(limit)}
    empty = "." if not tokenizer("")["input_ids"] else ""

    @torch.inference_mode()
    def encode(sentences: list[str]) -> Tensor:
        tokens = tokenizer([sentence or empty for sentence in sentences], **options)
        tokens = tokens.to(next(model.parameters()).device)
        with in_mode(False, model):
            found = base(**tokens, return_dict=True)
        if pooling == "pooler":
            if getattr(found, "pooler_output", None) is None:
                raise OptionError(f"{type(model).__name__} has no pooler: take pooling='mean' or 'cls'")
            return found.pooler_output
        states = found.last_hidden_state.float()
        if pooling == "cls":
            return states[:, 0]
        mask = tokens["attention_mask"].unsqueeze(2)
        return (states * mask).sum(1) / mask.sum(1).clamp_min(1)

    return encode


def as_rows(value: Any, count: int, where: str) -> np.ndarray:
    """Return the vectors of `count` sentences, (n, d), finite, in float32 or float64. Raise DataError for others."""
    name = f"{where}: the vectors of {counted(count, 'sentence')}"
    if isinstance(value, Tensor):
        value = value.to_dense()
    elif hasattr(value, "toarray"):  # a sparse matrix of scipy
        value = value.toarray()
    found = full_precision(as_matrix(name, value, error=DataError))
    if len(found) != count:
        raise DataError(f"{name} have shape {tuple(found.shape)}: the encoder must return one each, (n, d).")
    return finite_rows(found, where, "vector").cpu().numpy()


def task_names(tasks: Any) -> list[str]:
    """Names of tasks as a list, each once. Raise OptionError for anything else, and for none."""
    if isinstance(tasks, str):
        return [tasks]
    if isinstance(tasks, Iterable) and not isinstance(tasks, bytes):
        names = sorted(tasks, key=str) if isinstance(tasks, set | frozenset) else list(tasks)
        if names and all(isinstance(name, str) for name in names):
            return list(dict.fromkeys(names))
    raise OptionError(f"tasks must be names such as ['MR', 'CR'], got {str(tasks)[:60]!r}")
