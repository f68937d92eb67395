"""An encoder that sees some rows at a time has the gradient of the whole batch."""

import os
from collections import UserDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dipole
from dipole import Pairs
from dipole.core.utils.errors import OptionError, PairsError
from tests.ranks import leaving_together, start_ranks

ROWS = 11


class Attention(nn.Module):
    """A transformer layer over 5 tokens, with dropout everywhere; heads are folded into the batch."""

    def __init__(self):
        super().__init__()
        self.mix = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True)

    def forward(self, x):
        x = x.unflatten(1, (-1, 1)) * torch.linspace(0.5, 1.5, 6, dtype=x.dtype)
        return self.layer(x + self.mix(x, x, x, need_weights=True)[0]).mean(1)


ENCODERS = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 12), nn.Dropout(0.3), nn.Linear(12, 6)
    ),
    "attention": Attention,
}


def encoder(name="mlp"):
    torch.manual_seed(1)
    return ENCODERS[name]().double()


def views(count=2, rows=ROWS):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(rows, 6, dtype=torch.double, generator=generator, requires_grad=True) for _ in range(count)]


def measured(loss_of, module, inputs=()):
    """Loss, gradients of parameters and inputs, and the random number that comes next."""
    torch.manual_seed(5)
    loss = loss_of()
    loss.backward()
    return loss.detach(), [x.grad for x in (*module.parameters(), *inputs)], torch.rand(3)


def assert_alike(a, b, tolerance=1e-12):
    torch.testing.assert_close(a[:2], b[:2], rtol=0, atol=tolerance)
    assert torch.equal(a[2], b[2])


def loop(module, x, size):
    return torch.cat([module(part) for part in x.split(size)])


SPEC = "infonce(temperature=0.3) + 0.1*dp"


@pytest.mark.parametrize(
    ("name", "microbatch"), [*((name, 4) for name in ENCODERS), *(("mlp", rows) for rows in (1, 10, 11, 64))]
)
def test_gradient_and_dropout_masks_are_those_of_a_loop_over_microbatches(name, microbatch):
    whole, x, loss = encoder(name), views(), dipole.objective(SPEC)
    expected = measured(lambda: loss(*(loop(whole, each, microbatch) for each in x)).loss, whole, x)
    divided, y = encoder(name), views()
    step = dipole.cached(divided, dipole.objective(SPEC), microbatch=microbatch)
    assert_alike(measured(lambda: step(*y), divided, y), expected)


@pytest.mark.parametrize(
    ("name", "microbatch", "wrap"),
    [
        ("mlp", 1, None), ("attention", 4, None), ("mlp", 64, None),
        ("mlp", 4, lambda module: module.compile(backend="eager") or module),
        ("mlp", 4, lambda module: torch.compile(module, backend="eager")),
    ],
)  # fmt: skip
def test_gradient_without_dropout_is_that_of_the_undivided_batch(name, microbatch, wrap):
    whole, x, loss = encoder(name).eval(), views(), dipole.objective(SPEC)
    expected = measured(lambda: loss(*map(whole, x)).loss, whole, x)
    divided, y = encoder(name).eval(), views()
    step = dipole.cached(wrap(divided) if wrap else divided, loss, microbatch=microbatch)
    assert_alike(measured(lambda: step(*y), divided, y), expected)


@pytest.mark.parametrize("wrap", [lambda layer: layer, nn.utils.parametrizations.spectral_norm])
def test_buffers_move_once_and_are_replayed(wrap):
    def make():
        torch.manual_seed(1)
        layers = nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 6)
        module = nn.Sequential(wrap(nn.Linear(6, 8)), *layers).double()
        with torch.no_grad():  # buffers that are not those of the beginning
            module(views()[0] * 2)
        return module

    whole, x, loss = make(), views(), dipole.objective("infonce")
    expected = measured(lambda: loss(*(loop(whole, each, 4) for each in x)).loss, whole, x)
    divided, y = make(), views()
    step = dipole.cached(divided, "infonce", microbatch=4)
    assert_alike(measured(lambda: step(*y), divided, y), expected)
    torch.testing.assert_close(list(divided.buffers()), list(whole.buffers()), rtol=0, atol=0)


def test_the_encoder_never_sees_more_rows_and_hooks_see_each_gradient_once():
    module, x = encoder(), views()
    seen, finished = [], []
    module[0].register_forward_hook(lambda layer, args, out: seen.append(len(args[0])))
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: finished.append(p.grad.clone()))
    step = dipole.cached(module, "infonce", microbatch=4)
    step(*x).backward()
    assert seen == [4, 4, 3] * 4
    assert len(finished) == len(list(module.parameters()))
    for parameter, found in zip(module.parameters(), reversed(finished), strict=True):
        assert any(torch.equal(parameter.grad, each) for each in finished), found.shape
    assert not step.state_dict().keys() - {f"encoder.{name}" for name in module.state_dict()}


def test_no_graph_and_no_second_pass_without_gradient():
    module, x = encoder().requires_grad_(False), [v.detach() for v in views()]
    seen = []
    module[0].register_forward_hook(lambda layer, args, out: seen.append(len(args[0])))
    assert not dipole.cached(module, "infonce", microbatch=4)(*x).requires_grad
    with torch.no_grad():
        dipole.cached(encoder(), "infonce", microbatch=4)(*x)
    assert seen == [4, 4, 3] * 2


def test_autograd_grad_retained_graphs_and_second_derivatives():
    module, x = encoder(), views()
    step = dipole.cached(module, "infonce", microbatch=4)
    loss = step(*x)
    found = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    torch.rand(3)  # what was drawn in between changes nothing
    loss.backward(retain_graph=True)
    loss.backward()
    for parameter, once in zip(module.parameters(), found, strict=True):
        assert torch.allclose(parameter.grad, 2 * once, rtol=0, atol=1e-13)
    first = torch.autograd.grad(step(*x), module[0].weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class Tokens(nn.Module):
    """What a Hugging Face model looks like: a mapping in, a mapping out, lengths that vary."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 6)

    def forward(self, batch):
        mask = batch["mask"].to(self.table.weight.dtype)
        z = (self.table(batch["ids"]) * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        return {"embedding": z, "count": batch["mask"].sum(1)}


def test_mappings_labels_and_pairs_by_a_function():
    torch.manual_seed(0)
    batch = UserDict(ids=torch.randint(20, (12, 7)), mask=torch.arange(7) < torch.randint(1, 8, (12, 1)))
    labels = torch.arange(12) // 2
    spec = dipole.objective("infonce")

    def pairs(found, labels):
        assert int(found["count"].sum()) == int(batch["mask"].sum())
        return Pairs.from_blocks(found["embedding"].view(6, 2, 6), "all", labels=labels[::2])

    whole = Tokens().double()
    spec(pairs(whole(batch), labels)).loss.backward()
    divided = Tokens().double()
    divided.load_state_dict(whole.state_dict())
    dipole.cached(divided, spec, microbatch=5, pairs=pairs)(batch, labels=labels).backward()
    assert torch.allclose(divided.table.weight.grad, whole.table.weight.grad, rtol=0, atol=1e-14)


class Towers(nn.Module):
    """Two encoders, one for queries and one for documents."""

    def __init__(self):
        super().__init__()
        self.query, self.document = encoder(), encoder()

    def forward(self, both):
        return self.query(both[0]), self.document(both[1])


@pytest.mark.parametrize("microbatch", [4, 64])
def test_two_encoders_are_one_module_that_returns_both(microbatch):
    def pairs(both):
        return Pairs.cross(*both)

    whole, x, loss = Towers().eval(), views(), dipole.objective("infonce")
    expected = measured(lambda: loss(pairs(whole(x))).loss, whole, x)
    divided, y = Towers().eval(), views()
    step = dipole.cached(divided, loss, microbatch=microbatch, pairs=pairs)
    assert_alike(measured(lambda: step(dict(enumerate(y))), divided, y), expected)
    with pytest.raises(PairsError, match=r"Towers returned a tuple, not embeddings .* lambda z: Pairs.cross"):
        dipole.cached(divided, loss, microbatch=microbatch)(dict(enumerate(y)))
    own = dipole.cached(divided, lambda a, b: (a[0] * b[1]).sum(), microbatch=microbatch)
    assert own(dict(enumerate(y)), dict(enumerate(y))).ndim == 0


def test_a_loss_of_ones_own_and_parameters_of_the_objective():
    whole, x = encoder().eval(), views()
    own = lambda a, b: nn.functional.cross_entropy(a @ b.T, torch.arange(ROWS))  # noqa: E731
    expected = measured(lambda: own(whole(x[0]), whole(x[1])), whole)
    divided = encoder().eval()
    assert_alike(measured(lambda: dipole.cached(divided, own, microbatch=3)(*views()), divided), expected)
    learnt = dipole.cached(encoder(), dipole.objective("infonce(similarity=bilinear)", dim=6).double(), microbatch=3)
    learnt(*views()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in learnt.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_both_passes_compute_in_its_dtype(dtype):
    def run(embed):
        module = encoder().float().eval()
        x = [v.float().detach() for v in views()]
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=dtype):
            z = embed(module, x)
            assert z[0].dtype == dtype
        dipole.objective("infonce")(*z).loss.backward()
        return [p.grad for p in module.parameters()]

    def whole(module, x):
        with torch.no_grad():
            module(x[0][:4])  # casts made without a graph must not be kept
        torch.manual_seed(5)
        torch.clear_autocast_cache()
        return [module(v) for v in x]

    expected = run(whole)
    found = run(lambda module, x: [dipole.cached(module, "infonce", microbatch=4).embed(v) for v in x])
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=0.02 * float(b.abs().max()))


def test_a_small_batch_after_a_divided_one_under_autocast_learns():
    module = nn.Linear(6, 6)
    step = dipole.cached(module, "infonce", microbatch=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        big, small = step.embed(torch.randn(12, 6)), step.embed(torch.randn(4, 6))
    (small.float().sum() + 0 * big.float().sum()).backward()
    assert module.weight.grad.abs().sum() > 0


class Pooled(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean(0)


def cached(module=None, objective="infonce", microbatch=4, **more):
    return dipole.cached(encoder() if module is None else module, objective, microbatch=microbatch, **more)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *(
            (lambda wrong=wrong: cached(microbatch=wrong), r"microbatch must be a whole number >= 1, got ")
            for wrong in (0, -1, True, 2.0, "x", None)
        ),
        (lambda: cached(lambda x: x), r"must be a torch.nn.Module, got function"),
        (lambda: cached([encoder(), encoder()]), r"got list\. Several encoders are one module"),
        (lambda: cached(objective=None), r"objective must be an objective, .* got None"),
        (lambda: cached(pairs="cross"), "pairs must be a function from embeddings to Pairs, got 'cross'"),
        (lambda: cached()(views()[0]), r"called with one view, which alone has no positives: .* or `pairs`"),
        (lambda: cached()(), "called with no view, which has no positives"),
        (lambda: cached()(*views(), labels=torch.arange(ROWS)), "labels: only a function `pairs` takes more"),
        (
            lambda: cached(Tokens()).embed({"ids": torch.zeros(11, 5), "mask": torch.zeros(5, 11)}),
            "one number of rows, the instances, .* got 5, 11 rows",
        ),
        (lambda: cached().embed("text"), "nothing that has rows"),
        (
            lambda: cached(Pooled(6, 6).double())(*views()),
            r"was given 4 rows and must return .* a row for each; got shape \(6,\)",
        ),
    ],
)
def test_errors_say_what_to_do(make, said):
    with pytest.raises((OptionError, PairsError), match=said):
        make()


@leaving_together
def rank_main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.path.join(folder, 'meet')}", rank=rank, world_size=2)
    mine = slice(0, 7) if rank == 0 else slice(7, ROWS)
    found = {}
    for way in ("encoder", "all"):
        module = encoder().eval()
        calls = []
        if way == "encoder":
            step = dipole.cached(DistributedDataParallel(module), "infonce", microbatch=3)
        else:
            step = DistributedDataParallel(dipole.cached(module, "infonce", microbatch=3))
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(1))
        for _ in range(2):
            module.zero_grad()
            loss = step(*[v[mine].detach() for v in views()])
            loss.backward()
        found[way] = loss.detach(), [p.grad for p in module.parameters()], len(calls)
    if rank == 0:
        torch.save(found, os.path.join(folder, "found.pt"))


def test_two_ranks_are_one_process_whichever_is_wrapped(tmp_path):
    start_ranks(rank_main, (str(tmp_path),), 2)
    whole, loss = encoder().eval(), dipole.objective("infonce")
    expected = measured(lambda: loss(*map(whole, views())).loss, whole)
    for value, gradients, calls in torch.load(tmp_path / "found.pt").values():
        torch.testing.assert_close((value, gradients), expected[:2], rtol=0, atol=1e-13)
        assert calls == 2 * len(gradients)
