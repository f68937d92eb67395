"""Every argument of every entry with every kind of value that cannot work: one clear error. Plain arrays."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import dipole
from dipole import DataError, DipoleError, EncodedBatch, OptionError, Pairs, PairsError, evaluation
from tests.runs import refused

B, D = 6, 4
INFONCE, SUPCON = dipole.objective("infonce"), dipole.objective("supcon")
CACHED = dipole.cached(torch.nn.Identity(), "infonce", microbatch=4)
warnings.filterwarnings("ignore", message=".*(Sparse|nested|NestedTensor).*")
Z, ZEROS = torch.randn(4, 3), torch.zeros(4).long()
NONE = torch.zeros(4, 0).long()
OWN = Pairs(Z[:2], Z[:3], torch.tensor([[0], [2]]), NONE[:2])
CLASSES, CACR = dipole.objective("cross_entropy(classes=5)"), dipole.objective("cacr(k=4)")
THREE = Pairs.from_views([Z, Z, Z], negatives="view_pairs")
COUNT, WAYS = 24, 4
GROUPS = np.arange(COUNT) % WAYS
X = (np.eye(WAYS)[GROUPS] + 0.05 * np.random.default_rng(0).normal(size=(COUNT, WAYS))).astype(np.float32)
Y = X + np.float32(0.1) * np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
PROBES = {
    "linear_probe": {}, "few_shot_probe": {"labels_per_class": 2, "draws": 2}, "mean_classifier": {},
    "knn_probe": {"k": 3},
}  # fmt: skip


def z(*shape):
    return torch.randn(*shape or (B, D))


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2, D), torch.randn(B - 2, D)], layout=layout)


BAD = {
    "none": lambda: None, "number": lambda: 3, "text": lambda: "abc", "list": lambda: [], "object": object,
    "numbers": lambda: [1.0, 2.0], "dictionary": dict, "array": lambda: np.zeros((B, D), np.float32),
    "0-d": lambda: torch.tensor(1.0), "1-d": lambda: z(B), "4-d": lambda: z(B, 2, 2, D), "no rows": lambda: z(0, D),
    "no width": lambda: z(B, 0), "no width of blocks": lambda: z(B, 2, 0), "list of no width": lambda: [z(B, 0)] * 2,
    "other rows": lambda: z(B + 1, D), "other width": lambda: z(B, D + 1),
    "coo": lambda: z().to_sparse(), "csr": lambda: z().to_sparse_csr(), "list of sparse": lambda: [z().to_sparse()] * 2,
    "sparse row": lambda: torch.ones(B).long().to_sparse(),
    "nested": lambda: nested(torch.strided), "jagged": lambda: nested(torch.jagged),
    "list of nested": lambda: [nested(torch.jagged)] * 2,
    "meta": lambda: torch.empty(B, D, device="meta"),
    "meta row": lambda: torch.empty(B, dtype=torch.long, device="meta"),
    "meta indices": lambda: torch.empty(B, 1, dtype=torch.long, device="meta"),
    "list of meta": lambda: [torch.empty(B, D, device="meta")] * 2,
    "float8": lambda: z().to(torch.float8_e4m3fn), "float8 row": lambda: z(B).to(torch.float8_e5m2),
    "list of float8": lambda: [z().to(torch.float8_e4m3fn)] * 2,
    "quantized": lambda: torch.quantize_per_tensor(z(), 0.1, 0, torch.qint8), "double": lambda: z().double(),
    "integers": lambda: torch.ones(B, D).long(), "booleans": lambda: torch.ones(B, D).bool(),
    "unsigned row": lambda: torch.ones(B).to(torch.uint64),
    "half complex": lambda: torch.ones(B, D, dtype=torch.complex32),
    "complex": lambda: torch.ones(B, D) * 1j, "complex row": lambda: torch.ones(B) * 1j,
    "uninitialized": lambda: torch.nn.UninitializedParameter(),
    "list of none": lambda: [None, None], "list of 0-d": lambda: [torch.tensor(1.0)] * 2,
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
    "cross": (Pairs.cross, {
        "queries": z(), "keys": z(), "queue": z(3, D), "queue_labels": torch.arange(3), "ignored": INDICES, **ROWS
    }),
    "both": (Pairs.both, {"a": z(), "b": z(), **ROWS}),
    "from_columns": (Pairs.from_columns, {
        "anchor": z(), "positive": z(), "negatives": [z(), z()], "ignored": INDICES, **ROWS
    }),
    "from_crops": (Pairs.from_crops, {"large": [z(), z()], "small": [z()], "queue": z(3, D), **ROWS}),
    "Pairs": (Pairs, {
        "anchors": z(), "candidates": z(), "positives": torch.arange(B).unsqueeze(1), "ignored": INDICES,
        "candidate_labels": LABELS, "candidate_index": LABELS, **ROWS,
    }),
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
    "compute_loss": (  # which imports the trainer of transformers
        lambda outputs, labels: dipole.compute_loss("supcon")(outputs, labels), {"outputs": z(), "labels": LABELS}
    ),
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


def crops():
    return Pairs.from_crops([z(), z()], [z()])


def queries(weights):
    return Pairs.cross(z(), z(B, 2, D), weights=weights)


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Pairs.cross(z(), z(), 3), r"queue must be a torch tensor of shape \(rows, width\), got int"),
    (lambda: Pairs.cross(z(), z(), torch.tensor(1.0)), "queue must be floating-point embeddings"),
    (lambda: INFONCE(z(), LABELS), r"int64 of shape \(6,\). Classes belong into Pairs.from_labels\(emb"),
    (lambda: Pairs.from_labels(None, LABELS), r"from_labels needs embeddings \(B, d\).* Got NoneType"),
    (lambda: Pairs.from_labels(z(B, 0), LABELS), r"width >= 1\), got torch.float32 of shape \(6, 0\)"),
    (lambda: Pairs.from_blocks(z(B, 2, 0)), r"d >= 1\), got \(6, 2, 0\)"),
    (lambda: Pairs.both(z(), z().to_sparse()), r"b must be a dense tensor .*sparse_coo: use .to_dense\(\)"),
    (lambda: Pairs.both(z(), nested(torch.jagged)), "got a nested tensor: give rows of one length"),
    (lambda: Pairs.both(torch.empty(B, D, device="meta"), z()), "meta device, which has no values"),
    (lambda: Pairs.both(z().to(torch.float8_e5m2), z()), r"torch.float8_e5m2: use .to\(torch.bfloat16\)"),
    (lambda: Pairs.from_views([Z]), "at least two views"),
    (lambda: Pairs.from_views([Z, Z[:, :2]]), r"views\[1\] .* same width, got 2 and 3"),
    (lambda: Pairs.from_views([Z, torch.randn(5, 3)]), r"4 rows like views\[0\], got 5"),
    (lambda: Pairs.from_views([Z, Z.double()]), "same dtype"),
    (lambda: Pairs.from_views([Z, Z], negatives="pairs"), "be 'view_pairs', 'all' or 'queries', got 'pairs'"),
    (lambda: Pairs.cross(Z, Z, None, ZEROS), "intra_batch must be True or False, got a tensor of torch.int64"),
    (lambda: Pairs.cross(Z, Z, batch_negatives=Z), "batch_negatives must be True or False"),
    (lambda: Pairs.from_blocks(torch.ones(4, 3, 6), draw=1.5), "draw must be an integer >= 0, got 1.5"),
    (lambda: Pairs.from_blocks(torch.ones(4, 3, 6), draw=-(10**5000)), "got a number of thousands of digits"),
    (lambda: Pairs.from_columns(Z, Z, batch_negatives=[Z]), "batch_negatives must be .* got a value of type list"),
    (lambda: Pairs.from_columns(Z, Z, negatives_of=Z), r"must be 'batch' or 'own', got a tensor .* \(4, 3\)"),
    (lambda: Pairs.from_blocks(Z.view(2, 2, 3), ZEROS), "anchors must be 'first' or 'all', got a tensor"),
    (lambda: Pairs.from_views([Z, Z], negatives=Z.numpy()), "got a value of type ndarray"),
    (lambda: Pairs.cross(Z, Z[:3]), "keys must be"),
    (lambda: Pairs.cross(Z, Z, torch.randn(9, 2)), "queue and queries .* width"),
    (lambda: Pairs.cross(Z, Z, Z, queue_of="both"), "queue_of must be 'queries' or 'keys', got 'both'"),
    (lambda: Pairs.from_window(Z, Z, torch.zeros(3)), r"document must be a tensor of shape \(4,\)"),
    (lambda: Pairs.from_blocks(torch.randn(4, 1, 3)), r"b \+ 1 >= 2"),
    (lambda: Pairs.from_blocks(torch.randn(0, 2, 3)), r"n >= 1, .* got \(0, 2, 3\)"),
    (lambda: Pairs(Z, Z, torch.full((4, 1), 4), NONE), "positives must index the 4 candidates"),
    (lambda: Pairs(Z, Z, torch.zeros(4, 1), NONE), "positives must be torch.long"),
    (lambda: replace(OWN, index=torch.zeros(3)), r"index must be a tensor of shape \(2,\), .*each row, got \(3,\)"),
    (lambda: replace(OWN, candidate_index=ZEROS[:2]), r"candidate_index must be .*\(3,\), one for each candidate"),
    (lambda: replace(OWN, candidate_labels=[0, 0, 1]), r"candidate_labels must be .* got list.* by torch.as_tensor"),
    (lambda: OWN.first_positives(-1), "count must be an integer >= 0, got -1"),
    (lambda: OWN.with_positives(torch.zeros(3, 1).long()), r"positives must be torch.long of shape \(anchors = 2"),
    (lambda: OWN.without(torch.zeros(2).long()), r"ignored must be torch.long of shape \(anchors = 2"),
    (lambda: Pairs.from_labels(Z, torch.zeros(4)), r"labels must be integers of shape \(4,\).*float32"),
    (lambda: Pairs.from_labels(Z, ZEROS, queue=Z), "queue_labels must be a torch tensor"),
    (lambda: Pairs.from_labels(Z, ZEROS, queue_labels=ZEROS), "give queue="),
    (lambda: Pairs.from_columns(Z, Z[:2]), "positive must have 4 rows like anchor, got 2"),
    (lambda: Pairs.from_columns(Z, Z, Z[:2]), r"negatives\[0\] must have 4 rows like anchor, got 2"),
    (lambda: Pairs.from_columns(Z, Z, batch_negatives=False), "needs negatives"),
    (lambda: Pairs.from_columns(Z, Z, Z, ignored=torch.full((4, 1), 8)), "ignored must index the 8 candidates"),
    (lambda: Pairs.both(Z, Z[:2]), "as many rows, got 4 and 2"),
    (lambda: CLASSES(Pairs.from_views([Z, Z])), "needs labels"),
    (lambda: CLASSES(Pairs.from_views([Z, Z], ZEROS + 7)), "takes labels 0 to 4, got .*; set classes=8"),
    (lambda: CLASSES(Pairs.from_views([Z, Z], ZEROS - 1)), "leave unlabelled rows out"),
    (lambda: dipole.objective("tuple")(Z, Z), "needs labels"),
    (lambda: INFONCE(Z.numpy(), Z.numpy()), r"views are tensors .*Got ndarray and 1 view"),
    (lambda: INFONCE([Z, Z]), r"separate tensors \(objective\(z1, z2\)\).* got list"),
    (lambda: CACR(THREE), r"cacr\(k=4\) needs 4 positives for each anchor, the pairs have 2: use 5 views"),
    (lambda: dipole.objective("cacr(k=2)")(crops()), "needs 2 positives for each anchor"),
    (lambda: dipole.objective("blocks(b=2)")(crops()), "needs 2 positives for each anchor"),
    (lambda: dipole.objective("blocks(k=9)")(Z, Z), "needs 9 other blocks"),
    (lambda: dipole.objective("infonce+cllr(dim=4)")(Z, Z), "width 4, got 3"),
    (lambda: queries(torch.ones(5)), r"weights must be .*\(A,\) = \(6,\) or \(A, K\) = \(6, 2\), got \(5,\)"),
    (lambda: queries([1.0] * 6), "got list"), (lambda: queries(-torch.ones(6)), "finite and >= 0, below 1e30, got -1"),
    (lambda: queries(torch.ones(6, 2)).with_positives(torch.zeros(6, 1).long()), "old positives"),
    (lambda: Pairs.from_views([Z, Z], weights=torch.ones(4, 2)), r"\(B, K\) = \(4, 1\)"),
    (lambda: Pairs.from_labels(Z, ZEROS, weights=torch.ones(4, 1)), r"= \(4,\), got"),
    (lambda: Pairs(Z, Z, ZEROS.unsqueeze(1), NONE, weights=1e38 * torch.ones(4)), "finite and >= 0, below 1e30"),
])  # fmt: skip
def test_errors_say_what_and_how_to_fix_it(make, said):
    with pytest.raises(DipoleError, match=said) as error:
        make()
    assert "\n" not in str(error.value)


def histogram(found):
    return found.all.tolist() + found.same.tolist()


# Every diagnostic, as a function of two matched arrays and of labels.
MEASURES = {
    "alignment": lambda x, y, c: evaluation.alignment(x, y),
    "conditional_entropy": lambda x, y, c: evaluation.conditional_entropy(x)[0],
    "distance_histogram": lambda x, y, c: histogram(evaluation.distance_histogram(x, c, bins=6)),
    "margin_occupancy": lambda x, y, c: evaluation.margin_occupancy(x, delta_neg=0.45),
    "pair_histogram": lambda x, y, c: evaluation.pair_histogram(x, y, bins=6).error,
    "similarity_error": lambda x, y, c: evaluation.similarity_error(x, c),
}
OF_ROWS = "effective_rank", "mean_distance", "min_max_ratio", "mutual_information", "numerical_rank", "uniformity"
MEASURES |= {name: lambda x, y, c, name=name: getattr(evaluation, name)(x) for name in OF_ROWS}
MEASURES |= {
    name: lambda x, y, c, name=name, options=options: getattr(evaluation, name)(x, c, y, c, **options).accuracy
    for name, options in PROBES.items()
}
MEASURES["kmeans_accuracy"] = lambda x, y, c: evaluation.kmeans_accuracy(x, c, inits=2).accuracy
KINDS = {
    "list": lambda x: x.tolist(), "list of tensors": lambda x: list(torch.from_numpy(x)), "list of arrays": list,
    "double": lambda x: x.astype(np.float64) if x.dtype.kind == "f" else x,
    "big endian": lambda x: x.astype(x.dtype.newbyteorder(">")), "negative strides": lambda x: x[::-1].copy()[::-1],
    "parameter": lambda x: torch.nn.Parameter(torch.from_numpy(x)) if x.dtype.kind == "f" else torch.from_numpy(x),
}  # fmt: skip
NO_MATRICES = {
    "1-d": X[0], "3-d": X[:, :, None], "no width": X[:, :0], "ragged": [[1.0, 2.0], [3.0]], "complex": X * 1j,
    "text": X.astype(str), "none": None, "list of none": [None], "dictionary": {"a": X}, "number": 3.0,
}  # fmt: skip


def close(found):
    return pytest.approx(found, rel=1e-5, abs=1e-5)


def test_every_function_is_measured_here():
    assert MEASURES.keys() == set(evaluation.__all__) - {"ProbeResult", "mean_distance_ceiling"}


@pytest.mark.parametrize("name", MEASURES)
def test_every_kind_of_array_is_measured_alike(name):
    measure = MEASURES[name]
    expected = measure(torch.from_numpy(X), torch.from_numpy(Y), torch.from_numpy(GROUPS))
    for kind, convert in KINDS.items():
        assert measure(convert(X), convert(Y), convert(GROUPS)) == close(expected), kind


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize(("factor", "kind"), [
    (1e20, np.float32), (1e37, np.float32), (1e-25, np.float32), (1e200, np.float64), (1e-100, np.float64),
])  # fmt: skip
def test_no_measure_depends_on_the_size_of_numbers(name, factor, kind):
    x, y = (each.astype(kind) * kind(factor) for each in (X, Y))
    assert MEASURES[name](x, y, GROUPS) == close(MEASURES[name](X, Y, GROUPS))


@pytest.mark.parametrize("name", ["knn_probe", "alignment", "uniformity", "mean_distance"])
def test_rows_of_very_different_sizes_are_directions(name):
    factors = np.array([1e20, 1, 1e-20, 3e-13], np.float32)[(np.arange(COUNT) + np.arange(COUNT) // 4) % 4][:, None]
    assert MEASURES[name](X * factors, Y / factors, GROUPS) == close(MEASURES[name](X, Y, GROUPS))


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_no_matrix_of_finite_numbers_is_one_clear_error(name):
    for value in (np.nan, np.inf, -np.inf):
        bad = X.copy()
        bad[3, 1] = value
        refused(DataError, "1 of 24 rows are not finite", MEASURES[name], bad, Y, GROUPS)
    for kind, bad in NO_MATRICES.items():
        if name in ("effective_rank", "numerical_rank") and kind in ("no width", "complex"):
            continue  # complex and empty matrices have a rank
        refused(DipoleError, r"shape|needs positives", MEASURES[name], bad, Y, GROUPS)


@pytest.mark.parametrize("name", [*PROBES, "kmeans_accuracy", "distance_histogram", "similarity_error"])
def test_labels_that_do_not_fit_are_named(name):
    wrong = [(GROUPS[:5], "24"), (GROUPS[:, None], "integers"), (GROUPS + 0.5, "integers")]
    wrong += [(GROUPS.astype(str), "Number the names of classes")]
    if name in (*PROBES, "kmeans_accuracy"):
        wrong += [(np.full(COUNT, 2), r"two classes or more; every .*label is 2")]
    for bad, said in wrong:
        refused(DipoleError, said, MEASURES[name], X, Y, bad)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: evaluation.alignment(X, 2), r"alignment\(first, second\)"),
    (lambda: evaluation.pair_histogram(X), r"pair_histogram\(first, second\)"),
    (lambda: evaluation.alignment(X, Y[:5]), r"one shape, got \(24, 4\) and \(5, 4\)"),
    (lambda: evaluation.alignment(Pairs.of_points(torch.from_numpy(X)), Y), "got Pairs and an array"),
    (lambda: evaluation.uniformity(X, Y), "t must be a number > 0, got array"),
    (lambda: evaluation.kmeans_accuracy(X, GROUPS).predictions, "clusters have no predictions"),
    (lambda: evaluation.knn_probe(X, np.where(GROUPS, GROUPS, np.nan), Y, GROUPS), "-1 in place of NaN"),
    (lambda: evaluation.mean_distance_ceiling(1), "n must be an integer >= 2"),
    (lambda: evaluation.knn_probe(X, GROUPS, Y, GROUPS, chunk=0), "chunk must be an integer >= 1"),
    (lambda: evaluation.knn_probe(X, GROUPS, Y, GROUPS, temperature=np.nan), "temperature must be a number > 0"),
    (lambda: evaluation.linear_probe(X * np.float64(1e200), GROUPS, Y, GROUPS, standardize=False), "float32"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_named(call, said):
    refused((PairsError, OptionError, DataError), said, call)
