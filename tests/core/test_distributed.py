"""Any number of ranks has the loss and every gradient of one process, in float64, for every objective and layout."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

import dipole
from dipole import Composite, EncodedBatch, LogSumExp, Objective, Pairs, PairsError, Rows
from dipole.core.objectives.registry import registry
from tests.ranks import from_ranks

# The batch statistics of docs/background/core.md: the class VICReg as the page has it.
PAGE = Path(__file__).parents[2] / "docs" / "background" / "core.md"
OF_PAGE = {"Objective": Objective, "torch": torch}
exec(re.search(r"^class VICReg.*?(?=^```)", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0], OF_PAGE)
SIZES = {"equal": (5, 5), "unequal": (7, 3), "three": (4, 5, 1)}
SLOW = [pytest.param(SIZES[name], id=name, marks=pytest.mark.slow) for name in ("equal", "three")]


class Memory(Objective):
    """A number kept for every sample of the data set, weighing its loss: needs to know which sample a row is."""

    def __init__(self) -> None:
        super().__init__("cosine")
        self.register_buffer("kept", torch.linspace(0.5, 1.5, 100, dtype=torch.double))

    def statistics(self):
        return {"negatives": LogSumExp(2.0)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        partners = self.kept[rows.pairs.candidate_index[rows.pairs.positives[:, 0]]]
        return self.kept[rows.pairs.index] * (rows.negatives - positive[:, 0]) * partners


PLUGINS = {"vicreg_of_all": OF_PAGE["VICReg"], "sample_memory": Memory}
SPECS = [
    *(
        entry.name if entry.kind == "objective" else f"infonce + {entry.name}"
        for entry in registry.entries()
        if entry.kind != "diagnostic"
    ),
    *("cacr(cost=rbf)", "cacr(intra_batch=true)", "cacr(k=1, intra_batch=true)"),
    *("blocks(loss=hinge)", "blocks(k=2)", "blocks(b=1)"),
    "blocks(k=9)",  # too many for some anchors where documents or duplicates leave fewer: refused by all ranks
    *("dcl(similarity=dot)", "infonce(similarity=bilinear)", "dp(reduction=mean)", "dp(reduction=sum)"),
    *("infonce + cllr(variant=released, rank=4)", "infonce(temperature=learned) + 0.1*dp", "hcl(temperature=learned)"),
    *PLUGINS,
]
WIDTH, OUT = 6, 5


def batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 10, WIDTH, dtype=torch.double, generator=generator)  # three views of 10 instances
    weight = torch.randn(OUT, WIDTH, dtype=torch.double, generator=generator)
    rows = {
        "labels": torch.arange(10) % 3, "index": torch.randperm(100, generator=generator)[:10],
        "document": torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2]),
        "w": torch.rand(10, dtype=torch.double, generator=generator),
        "ww": torch.rand(10, 2, dtype=torch.double, generator=generator),
    }  # fmt: skip
    return x, weight, rows


def build(spec):
    torch.default_generator.manual_seed(3)  # `torch.manual_seed` formats its stack
    objective = Composite([PLUGINS[spec]()], [1.0]) if spec in PLUGINS else dipole.objective(spec, dim=OUT)
    with torch.no_grad():
        for parameter in objective.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.double))
    return objective


QUEUE = torch.ones(4, OUT, dtype=torch.double).tril()
QUEUE_LABELS = torch.tensor([0, 1, 2, 1])


def cross(a, b, **more):
    return lambda r: Pairs.cross(r[a], r[b], QUEUE, labels=r["labels"], index=r["index"], **more)


def stacked(*given, **more):
    return lambda r: Pairs.from_blocks(torch.stack([r["a"], r["b"], r["c"]], 1), *given, **more)


def weighed_by_hand(r):
    """Two positives in the first document, else one, so that ranks have lists and weights of different widths."""
    own = torch.arange(len(r["a"]))
    second = torch.where(r["document"] == 0, (own + 1) % 4, -1)
    positives = torch.stack([own, second], 1)[:, : 1 + bool((second >= 0).any())]
    return Pairs(r["a"], r["b"], positives, positives[:, :0], weights=r["ww"][:, : positives.shape[1]])


LAYOUTS = {
    "views": lambda r: Pairs.from_views([r["a"], r["b"]], r["labels"], r["index"]),
    "queries of three views": lambda r: Pairs.from_views([r["a"], r["b"], r["c"]], r["labels"], r["index"], "queries"),
    "pairs of three views": lambda r: Pairs.from_views([r["a"], r["b"], r["c"]], r["labels"], r["index"], "view_pairs"),
    "three views": lambda r: Pairs.from_views([r["a"], r["b"], r["c"]], r["labels"]),
    "queue": cross("a", "b", queue_labels=QUEUE_LABELS), "queue of strangers": cross("a", "b"),
    "duplicates": lambda r: Pairs.cross(r["a"], r["b"], QUEUE, ignored=r["duplicate"]),
    "several keys": lambda r: Pairs.cross(r["a"], torch.stack([r["b"], r["c"]], 1), intra_batch=True),
    "queue alone": cross("a", "b", batch_negatives=False),
    "queue and queries": cross("a", "b", batch_negatives=False, intra_batch=True),
    "both directions": lambda r: (Pairs.cross(r["a"], r["b"]), Pairs.cross(r["b"], r["a"])),
    "window": lambda r: Pairs.from_window(r["a"], r["b"], r["document"], 1, "drop", r["labels"], r["index"]),
    "wide window": lambda r: Pairs.from_window(r["a"], r["b"], r["document"], 2, "zero", r["labels"]),
    "blocks": lambda r: stacked("all", labels=r["labels"])(r),
    "first of a block": lambda r: stacked(labels=r["labels"])(r), "drawn blocks": stacked("all", draw=2**40 + 17),
    "block means": stacked("first", "means"), "labels": lambda r: Pairs.from_labels(r["a"], r["labels"], r["index"]),
    "labels of views": lambda r: Pairs.from_labels([r["a"], r["b"]], r["labels"] - 1, None, QUEUE, QUEUE_LABELS),
    "columns": lambda r: Pairs.from_columns(r["a"], r["b"], [r["c"], r["a"]], r["labels"], r["index"]),
    "own columns": lambda r: Pairs.from_columns(r["a"], r["b"], r["c"], negatives_of="own"),
    "hard columns alone": lambda r: Pairs.from_columns(r["a"], r["b"], r["c"], batch_negatives=False),
    "sides": lambda r: Pairs.both(r["a"], r["b"], r["labels"], r["index"]),
    "crops": lambda r: Pairs.from_crops([r["a"], r["b"]], [r["c"]], QUEUE, r["labels"], r["index"]),
    "weights of views": lambda r: Pairs.from_views([r["a"], r["b"], r["c"]], weights=r["w"]),
    "weights of pairs": lambda r: Pairs.cross(r["a"], torch.stack([r["b"], r["c"]], 1), weights=r["ww"]),
    "weights of crops": lambda r: Pairs.from_crops([r["a"], r["b"]], [r["c"]], weights=r["ww"]),
    "weights of classes": lambda r: Pairs.from_labels([r["a"], r["b"]], r["labels"], weights=r["w"]),
    "weights of sides": lambda r: Pairs.both(r["a"], r["b"], weights=r["w"]), "weights by hand": weighed_by_hand,
    "added directions": lambda r: (Pairs.cross(r["a"], r["b"]).added(), Pairs.cross(r["b"], r["a"]).added()),
    "crops of three": lambda r: Pairs.from_crops([r["a"], r["b"], r["c"]], labels=r["labels"]),
}  # fmt: skip


def ways_of(name, number, every):
    """Both ways to pass the rows of a layout, or on every fourth layout one of them."""
    if name == "duplicates":  # indices into the batch are for constructors
        return ["by hand"]
    if every:
        return ["embedded", "by hand"]
    return [] if number % 4 else [["embedded", "by hand"][number // 4 % 2]]


def outcome_of(spec, given, weight):
    """Loss and gradients, of an encoder's weight and of the objective, or why it refuses."""
    objective = build(spec)
    try:
        loss = objective(given).loss
    except PairsError as error:
        return str(error).split(",")[0]
    wanted = [weight, *objective.parameters()]
    return loss.detach(), torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)


def runs(spec, x, weight, rows, every):
    """The outcome of each layout and way."""
    for number, (name, layout) in enumerate(LAYOUTS.items(), SPECS.index(spec)):
        for way in ways_of(name, number, every):
            weight = weight.detach().clone().requires_grad_()
            given = dict(zip("abc", [view @ weight.T for view in x], strict=True)) | rows
            # The next row of this rank is no negative: an index into the rows that this rank gives.
            following = {"duplicate": (torch.arange(len(x[0])).unsqueeze(1) + 1) % len(x[0])}
            batch = EncodedBatch(given, layout) if way == "embedded" else layout(given | following)
            yield (name, way), outcome_of(spec, batch, weight)


def outcomes_of_rank(rank, sizes, every):
    """The outcomes of each spec, with gradients averaged over ranks as DistributedDataParallel does."""
    x, weight, rows = batch()
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    rows = {name: values[mine] for name, values in rows.items()}
    found = {spec: dict(runs(spec, x[:, mine], weight, rows, every)) for spec in SPECS}
    values = [value for of_spec in found.values() for value in of_spec.values() if not isinstance(value, str)]
    grads = [grad for _, of_value in values for grad in of_value]
    together = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(together)
    torch.nn.utils.vector_to_parameters(together / len(sizes), grads)
    return found


@pytest.fixture(scope="module", params=[pytest.param(SIZES["unequal"], id="unequal"), *SLOW])
def ranks(request):
    """Results of the second rank. The slow cases have every layout and way."""
    sizes, every = request.param, request.param != SIZES["unequal"]
    return from_ranks(len(sizes), outcomes_of_rank, sizes, every)[1], sizes, every


@pytest.mark.parametrize("spec", SPECS)
def test_ranks_equal_one_process(spec, ranks):
    found, sizes, every = ranks
    single = dict(runs(spec, *batch(), every))
    assert single.keys() == found[spec].keys()
    carried = 0
    for key, expected in single.items():
        got = found[spec][key]
        if key[0] == "duplicates":
            expected = duplicates_in_one_process(spec, sizes)
        if isinstance(expected, str):
            assert got == expected
            continue
        assert not isinstance(got, str), (key, got)
        carried += 1
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")
    assert carried >= 3


def duplicates_in_one_process(spec, sizes):
    """The same exclusions as every rank's: the next row of the rank's own share, which wraps round at its end."""
    x, weight, _ = batch()
    weight.requires_grad_()
    a, b = (view @ weight.T for view in x[:2])
    following = torch.cat([(torch.arange(n) + 1) % n + sum(sizes[:r]) for r, n in enumerate(sizes)])
    return outcome_of(spec, Pairs.cross(a, b, QUEUE, ignored=following.unsqueeze(1)), weight)


def views_of(rows):
    return Pairs.from_views([rows["a"], rows["b"]], rows.get("labels"))


def given_wrongly(rank):
    """Wrong input on one rank, or both: no rank may be left waiting, and none may compute something else."""
    a, b = torch.randn(2, 4, 3, dtype=torch.double)
    queue = torch.ones(2, 3, dtype=torch.double)

    def rows(**given):
        return EncodedBatch(given, views_of)

    yield "as many rows", rows(a=a, b=b[: 4 - rank])
    yield "a tensor", rows(a=a, b=b, labels=[0, 1, 2, 3] if rank else torch.arange(4))
    yield "a DTensor", rows(a=distribute_tensor(a, init_device_mesh("cpu", (2,)), [Replicate()]), b=b)
    yield "one width", rows(a=a[:, rank:], b=b[:, rank:])
    yield "labels of all or none", rows(a=a, b=b, labels=None if rank else torch.arange(4))
    yield "a row", rows(a=a[: 4 * rank], b=b[: 4 * rank])
    yield "changed", Pairs.cross(a, b, queue, batch_negatives=False).without(torch.full((4, 1), -1))
    yield "none at all", rows()
    yield "nonsense", EncodedBatch({"a": a, "b": b}, lambda rows: rows["a"])
    yield "several on one rank", tuple(Pairs.cross(a, b) for _ in range(1 + rank))
    yield "batches of several sizes", tuple(Pairs.cross(each, each) for each in (a, b[: 4 - rank]))
    yield "no mapping", EncodedBatch([a, b] if rank else {"a": a, "b": b}, views_of)
    yield "a name that is not there", rows(a=a, c=b)
    yield "a queue of its own", Pairs.cross(a, b, queue + rank)
    yield "hard negatives as a queue", EncodedBatch({"a": a, "b": b}, lambda r: Pairs.cross(r["a"], r["b"], a + rank))
    yield "a queue on one rank", Pairs.cross(a, b, queue if rank else None)
    yield "no pairs at all", "pairs" if rank else Pairs.cross(a, b)


def errors_of_rank(rank):
    errors = {}
    for name, given in given_wrongly(rank):
        with pytest.raises(PairsError) as error:
            dipole.objective("infonce")(given)
        errors[name] = str(error.value)
    return errors


def test_what_one_rank_gives_wrongly_is_an_error_on_all():
    errors = first, second = from_ranks(2, errors_of_rank)
    assert first.keys() == second.keys()
    for rank, name, said in (
        (0, "as many rows", "rank 1"), (1, "as many rows", "a (4, 3), b (3, 3)"), (1, "a tensor", "labels list"),
        (0, "a DTensor", ".to_local()"),
        (0, "one width", "(3,)"), (1, "one width", "(2,)"), (1, "a row", "rank 0"), (0, "changed", "EncodedBatch("),
        (0, "several on one rank", "as many Pairs"), (1, "several on one rank", "has 2: "),
        (0, "batches of several sizes", "rank 1"), (1, "batches of several sizes", "one size"),
        (1, "no mapping", "mapping"), (0, "a name that is not there", "'b'"),
        (1, "a name that is not there", "'a', 'c'"), (1, "no pairs at all", "got str"),
    ):  # fmt: skip
        assert said in errors[rank][name]
    for name in ("a queue of its own", "hard negatives as a queue", "a queue on one rank"):
        assert "Pairs.from_columns" in first[name]
        assert first[name] == second[name]


def test_rows_are_checked_in_one_process_alike():
    a, b = torch.randn(2, 4, 3)
    term = dipole.objective("infonce")
    torch.testing.assert_close(term(EncodedBatch({"a": a, "b": b, "labels": None}, views_of)).loss, term(a, b).loss)
    for rows, said in (
        ({"a": a, "b": b, "labels": [0, 1, 2, 3]}, "labels list"), ([a, b], "mapping of names to tensors"),
        ({"a": a}, r"rows 'b', but EncodedBatch\.rows has 'a' alone"),
    ):  # fmt: skip
        with pytest.raises(PairsError, match=said):
            term(EncodedBatch(rows, views_of))
