"""Text tables."""

from dipole.core.utils.text import number, results_table


def test_baselines_are_columns_beside_the_trained_numbers():
    values = {"linear/accuracy": 0.5, "knn/accuracy": None, "raw/linear/accuracy": 0.25, "wall": 12345.6}
    assert results_table(values).splitlines() == [
        "                    trained     raw",
        "linear/accuracy      0.5000  0.2500",
        "knn/accuracy     not finite",
        "wall              1.235e+04",
    ]
    assert results_table({"a": 0.0, "long": 0.00001}) == "a     0.0000\nlong   1e-05"
    assert number(-3.0) == "-3.0000"
