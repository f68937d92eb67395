"""Every argument of every entry with every kind of value that cannot work: one PairsError, and no error of torch."""

import warnings

import numpy as np
import pytest
import torch

import dipole
from dipole import Pairs, evaluation
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.utils.errors import DipoleError

B, D = 6, 4
INFONCE, SUPCON = dipole.objective("infonce"), dipole.objective("supcon")
CACHED, COMPUTE = dipole.cached(torch.nn.Identity(), "infonce", microbatch=4), dipole.compute_loss("supcon")
warnings.filterwarnings("ignore", message=".*(Sparse|nested|NestedTensor).*")


def z(*shape):
    return torch.randn(*shape or (B, D))


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2, D), torch.randn(B - 2, D)], layout=layout)


def quantized():
    return torch.quantize_per_tensor(z(), 0.1, 0, torch.qint8)


BAD = {
    "none": lambda: None,
    "number": lambda: 3,
    "text": lambda: "abc",
    "list": lambda: [],
    "numbers": lambda: [1.0, 2.0],
    "object": object,
    "dictionary": dict,
    "array": lambda: np.zeros((B, D), np.float32),
    "0-d": lambda: torch.tensor(1.0),
    "1-d": lambda: z(B),
    "4-d": lambda: z(B, 2, 2, D),
    "no rows": lambda: z(0, D),
    "no width": lambda: z(B, 0),
    "no width of blocks": lambda: z(B, 2, 0),
    "other rows": lambda: z(B + 1, D),
    "other width": lambda: z(B, D + 1),
    "coo": lambda: z().to_sparse(),
    "csr": lambda: z().to_sparse_csr(),
    "sparse row": lambda: torch.ones(B).long().to_sparse(),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "meta": lambda: torch.empty(B, D, device="meta"),
    "meta row": lambda: torch.empty(B, dtype=torch.long, device="meta"),
    "meta indices": lambda: torch.empty(B, 1, dtype=torch.long, device="meta"),
    "float8": lambda: z().to(torch.float8_e4m3fn),
    "float8 row": lambda: z(B).to(torch.float8_e5m2),
    "quantized": quantized,
    "integers": lambda: torch.ones(B, D).long(),
    "booleans": lambda: torch.ones(B, D).bool(),
    "unsigned row": lambda: torch.ones(B).to(torch.uint64),
    "half complex": lambda: torch.ones(B, D, dtype=torch.complex32),
    "complex": lambda: torch.ones(B, D) * 1j,
    "complex row": lambda: torch.ones(B) * 1j,
    "double": lambda: z().double(),
    "uninitialized": lambda: torch.nn.UninitializedParameter(),
    "list of none": lambda: [None, None],
    "list of 0-d": lambda: [torch.tensor(1.0)] * 2,
    "list of sparse": lambda: [z().to_sparse()] * 2,
    "list of nested": lambda: [nested(torch.jagged)] * 2,
    "list of float8": lambda: [z().to(torch.float8_e4m3fn)] * 2,
    "list of meta": lambda: [torch.empty(B, D, device="meta")] * 2,
    "list of no width": lambda: [z(B, 0)] * 2,
}  # fmt: skip

LABELS = torch.arange(B) % 2
INDICES = torch.full((B, 1), -1)
ROWS = {"labels": LABELS, "index": torch.arange(B), "weights": torch.ones(B)}
# Each entry with arguments that fit. One of them at a time is replaced.
ENTRIES = {
    "from_views": (Pairs.from_views, {"views": [z(), z()], **ROWS}),
    "from_labels": (Pairs.from_labels, {"z": z(), "queue": z(3, D), "queue_labels": torch.arange(3), **ROWS}),
    "from_window": (Pairs.from_window, {"f": z(), "g": z(), "document": LABELS.sort().values, "window": 1, **ROWS}),
    "from_blocks": (Pairs.from_blocks, {"x": z(B, 2, D), **ROWS}),
    "of_points": (Pairs.of_points, {"points": z()}),
    "cross": (
        Pairs.cross,
        {"queries": z(), "keys": z(), "queue": z(3, D), "queue_labels": torch.arange(3), "ignored": INDICES, **ROWS},
    ),
    "both": (Pairs.both, {"a": z(), "b": z(), **ROWS}),
    "from_columns": (
        Pairs.from_columns,
        {"anchor": z(), "positive": z(), "negatives": [z(), z()], "ignored": INDICES, **ROWS},
    ),
    "from_crops": (Pairs.from_crops, {"large": [z(), z()], "small": [z()], "queue": z(3, D), **ROWS}),
    "Pairs": (
        Pairs,
        {
            "anchors": z(), "candidates": z(), "positives": torch.arange(B).unsqueeze(1), "ignored": INDICES,
            "candidate_labels": LABELS, "candidate_index": LABELS, **ROWS,
        },
    ),
    "with_positives": (Pairs.cross(z(), z()).with_positives, {"positives": torch.arange(B).unsqueeze(1)}),
    "without": (Pairs.cross(z(), z()).without, {"ignored": INDICES}),
    "objective": (lambda a, b: INFONCE(a, b), {"a": z(), "b": z()}),
    "one view": (INFONCE, {"pairs": Pairs.both(z(), z())}),
    "rows": (
        lambda rows, y: SUPCON(
            EncodedBatch({"z": rows, "labels": y}, lambda each: Pairs.from_labels(each["z"], each["labels"]))
        ),
        {"rows": z(), "y": LABELS},
    ),
    "compute_loss": (COMPUTE, {"outputs": z(), "labels": LABELS}),
    "cached": (lambda a, b: CACHED(a, b), {"a": z(), "b": z()}),
    **{
        name: (getattr(evaluation, name), {"pairs": Pairs.both(z(), z())})
        for name in ("alignment", "uniformity", "margin_occupancy", "pair_histogram")
    },
    "mean_distance": (evaluation.mean_distance, {"embeddings": z()}),
    "numerical_rank": (evaluation.numerical_rank, {"matrix": z()}),
    "effective_rank": (evaluation.effective_rank, {"matrix": z()}),
}  # fmt: skip
ARGUMENTS = [(entry, name) for entry, (_, given) in ENTRIES.items() for name in given]


@pytest.mark.parametrize(("entry", "name"), ARGUMENTS, ids=map(" ".join, ARGUMENTS))
def test_a_value_that_cannot_work_is_one_clear_error(entry, name):
    call, given = ENTRIES[entry]
    call(**given)
    foreign = []
    for kind, bad in BAD.items():
        try:
            found = call(**{**given, name: bad()})
            if isinstance(found, Pairs):
                INFONCE(found)
        except DipoleError:
            continue
        except Exception as error:
            foreign.append((kind, repr(error)[:100]))
    assert not foreign


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pairs.cross(z(), z(), 3), r"queue must be a torch tensor of shape \(rows, width\), got int"),
        (lambda: Pairs.cross(z(), z(), torch.tensor(1.0)), "queue must be floating-point embeddings"),
        (lambda: Pairs.from_labels(None, LABELS), r"from_labels needs embeddings \(B, d\).* Got NoneType"),
        (lambda: Pairs.from_labels(z(B, 0), LABELS), r"width >= 1\), got torch.float32 of shape \(6, 0\)"),
        (lambda: Pairs.from_blocks(z(B, 2, 0)), r"d >= 1\), got \(6, 2, 0\)"),
        (lambda: Pairs.both(z(), z().to_sparse()), r"b must be a dense tensor .*sparse_coo: use .to_dense\(\)"),
        (lambda: Pairs.both(z(), nested(torch.jagged)), "got a nested tensor: give rows of one length"),
        (lambda: Pairs.both(torch.empty(B, D, device="meta"), z()), "meta device, which has no values"),
        (lambda: Pairs.both(z().to(torch.float8_e5m2), z()), r"torch.float8_e5m2: use .to\(torch.bfloat16\)"),
    ],
)
def test_errors_say_what_and_how_to_fix_it(make, said):
    with pytest.raises(DipoleError, match=said):
        make()
