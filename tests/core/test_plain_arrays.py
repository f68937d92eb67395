"""Probes and diagnostics of NumPy arrays and lists, of any size of numbers, and what cannot be measured."""

import numpy as np
import pytest
import torch

from dipole import Pairs, evaluation
from dipole.core.utils.errors import DataError, DipoleError, OptionError, PairsError

ROWS, CLASSES = 24, 4
LABELS = np.arange(ROWS) % CLASSES
X = (np.eye(CLASSES)[LABELS] + 0.05 * np.random.default_rng(0).normal(size=(ROWS, CLASSES))).astype(np.float32)
Y = X + np.float32(0.1) * np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
PROBES = {
    "linear_probe": {}, "few_shot_probe": {"labels_per_class": 2, "draws": 2}, "mean_classifier": {},
    "knn_probe": {"k": 3},
}  # fmt: skip


def histogram(found):
    return found.all.tolist() + found.same.tolist()


# Every diagnostic, as a function of two matched arrays and of labels.
MEASURES = {
    "alignment": lambda x, y, c: evaluation.alignment(x, y),
    "conditional_entropy": lambda x, y, c: evaluation.conditional_entropy(x)[0],
    "distance_histogram": lambda x, y, c: histogram(evaluation.distance_histogram(x, c, bins=6)),
    "effective_rank": lambda x, y, c: evaluation.effective_rank(x),
    "margin_occupancy": lambda x, y, c: evaluation.margin_occupancy(x, delta_neg=0.45),
    "mean_distance": lambda x, y, c: evaluation.mean_distance(x),
    "min_max_ratio": lambda x, y, c: evaluation.min_max_ratio(x),
    "mutual_information": lambda x, y, c: evaluation.mutual_information(x),
    "numerical_rank": lambda x, y, c: evaluation.numerical_rank(x),
    "pair_histogram": lambda x, y, c: evaluation.pair_histogram(x, y, bins=6).error,
    "similarity_error": lambda x, y, c: evaluation.similarity_error(x, c),
    "uniformity": lambda x, y, c: evaluation.uniformity(x),
}
MEASURES |= {
    name: lambda x, y, c, name=name, options=options: getattr(evaluation, name)(x, c, y, c, **options).accuracy
    for name, options in PROBES.items()
}
MEASURES["kmeans_accuracy"] = lambda x, y, c: evaluation.kmeans_accuracy(x, c, inits=2).accuracy
KINDS = {
    "list": lambda x: x.tolist(),
    "list of tensors": lambda x: list(torch.from_numpy(x)),
    "list of arrays": list,
    "double": lambda x: x.astype(np.float64) if x.dtype.kind == "f" else x,
    "big endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "negative strides": lambda x: x[::-1].copy()[::-1],
    "parameter": lambda x: torch.nn.Parameter(torch.from_numpy(x)) if x.dtype.kind == "f" else torch.from_numpy(x),
}

BAD = {
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
    expected = measure(torch.from_numpy(X), torch.from_numpy(Y), torch.from_numpy(LABELS))
    for kind, convert in KINDS.items():
        labels = convert(LABELS)
        found = measure(convert(X), convert(Y), labels)
        assert found == close(expected), kind


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize(
    ("factor", "kind"),
    [(1e20, np.float32), (1e37, np.float32), (1e-25, np.float32), (1e200, np.float64), (1e-100, np.float64)],
)
def test_no_measure_depends_on_the_size_of_numbers(name, factor, kind):
    x, y = (each.astype(kind) * kind(factor) for each in (X, Y))
    assert MEASURES[name](x, y, LABELS) == close(MEASURES[name](X, Y, LABELS))


@pytest.mark.parametrize("name", ["knn_probe", "alignment", "uniformity", "mean_distance"])
def test_rows_of_very_different_sizes_are_directions(name):
    factors = np.array([1e20, 1, 1e-20, 3e-13], np.float32)[(np.arange(ROWS) + np.arange(ROWS) // 4) % 4][:, None]
    assert MEASURES[name](X * factors, Y / factors, LABELS) == close(MEASURES[name](X, Y, LABELS))


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_no_matrix_of_finite_numbers_is_one_clear_error(name):
    for value in (np.nan, np.inf, -np.inf):
        bad = X.copy()
        bad[3, 1] = value
        with pytest.raises(DataError, match="1 of 24 rows are not finite"):
            MEASURES[name](bad, Y, LABELS)
    for kind, bad in BAD.items():
        if name in ("effective_rank", "numerical_rank") and kind in ("no width", "complex"):
            continue  # complex and empty matrices have a rank
        with pytest.raises(DipoleError, match=r"shape|needs positives"):
            MEASURES[name](bad, Y, LABELS)


@pytest.mark.parametrize("name", [*PROBES, "kmeans_accuracy", "distance_histogram", "similarity_error"])
def test_labels_that_do_not_fit_are_named(name):
    wrong = [(LABELS[:5], "24"), (LABELS[:, None], "integers"), (LABELS.astype(float), "integers")]
    wrong += [(LABELS.astype(str), "return_inverse")]
    if name in (*PROBES, "kmeans_accuracy"):
        wrong += [(np.full(ROWS, 2), r"two classes or more; every .*label is 2")]
    for bad, said in wrong:
        with pytest.raises(DipoleError, match=said):
            MEASURES[name](X, Y, bad)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: evaluation.alignment(X), PairsError, r"alignment\(first, second\)"),
        (lambda: evaluation.pair_histogram(X), PairsError, r"pair_histogram\(first, second\)"),
        (lambda: evaluation.alignment(X, Y[:5]), PairsError, r"one shape, got \(24, 4\) and \(5, 4\)"),
        (lambda: evaluation.alignment(Pairs.of_points(torch.from_numpy(X)), Y), PairsError, "got Pairs and an array"),
        (lambda: evaluation.mean_distance_ceiling(1), OptionError, "n must be at least 2"),
        (lambda: evaluation.knn_probe(X, LABELS, Y, LABELS, chunk=0), OptionError, "chunk >= 1"),
        (lambda: evaluation.knn_probe(X, LABELS, Y, LABELS, temperature=np.nan), OptionError, "temperature > 0"),
        (
            lambda: evaluation.linear_probe(X.astype(float) * 1e200, LABELS, Y, LABELS, standardize=False),
            DataError,
            "float32",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, error, said):
    with pytest.raises(error, match=said):
        call()
