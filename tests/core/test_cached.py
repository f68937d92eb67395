"""An encoder that sees some rows at a time has the gradient of the whole batch. An objective in a Trainer."""

from collections import UserDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dipole
from dipole import CheckpointError, ConfigError, OptionError, Pairs, PairsError, SpecError
from tests.ranks import from_ranks
from tests.runs import Counts, refused

ROWS = 11
ENCODERS = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 12), nn.Dropout(0.3), nn.Linear(12, 6)
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 2, 12, dropout=0.3, batch_first=True), nn.Flatten()
    ),
}
SPEC = "infonce(temperature=0.3) + 0.1*dp"
COUNT = 24


def encoder(name="mlp", training=True):
    torch.manual_seed(1)
    return ENCODERS[name]().double().train(training)


def views(count=2, rows=ROWS):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(rows, 6, dtype=torch.double, generator=generator, requires_grad=True) for _ in range(count)]


def measured(loss_of, module, inputs=()):
    """Loss, gradients of parameters and inputs, and the random number that comes next."""
    torch.manual_seed(5)
    loss = loss_of()
    loss.backward()
    return loss.detach(), [x.grad for x in (*module.parameters(), *inputs)], torch.rand(3)


def assert_alike(a, b):
    torch.testing.assert_close(a[:2], b[:2], rtol=0, atol=1e-12)
    assert torch.equal(a[2], b[2])


def loop(module, x, size):
    return torch.cat([module(part) for part in x.split(size)])


def check_against(whole, divided, step, microbatch=None):
    """Compare with the undivided batch, or with a loop over microbatches, in one forward pass after the other."""
    x, y, loss = views(), views(), dipole.objective(SPEC)
    size = microbatch or ROWS
    expected = measured(lambda: loss(*(loop(whole, each, size) for each in x)).loss, whole, x)
    assert_alike(measured(lambda: step(*y), divided, y), expected)


@pytest.mark.parametrize(("name", "microbatch", "wrap", "training"), [
    *((name, 4, nn.Sequential, True) for name in ENCODERS),
    *(("mlp", rows, nn.Sequential, True) for rows in (1, 10, 11, 64)),
    *(("mlp", rows, nn.Sequential, False) for rows in (1, 64)), ("attention", 4, nn.Sequential, False),
    ("mlp", 4, lambda module: module.compile(backend="eager") or module, False),
    ("mlp", 4, lambda module: torch.compile(module, backend="eager"), False),
])  # fmt: skip
def test_gradient_is_that_of_a_loop_over_microbatches_or_without_dropout_of_the_batch(name, microbatch, wrap, training):
    divided = encoder(name, training)
    step = dipole.cached(wrap(divided), SPEC, microbatch=microbatch)
    check_against(encoder(name, training), divided, step, microbatch if training else None)


@pytest.mark.parametrize("wrap", [lambda layer: layer, nn.utils.parametrizations.spectral_norm])
def test_buffers_move_once_and_are_replayed(wrap):
    def make():
        torch.manual_seed(1)
        layers = nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 6)
        module = nn.Sequential(wrap(nn.Linear(6, 8)), *layers).double()
        with torch.no_grad():  # buffers that are not those of the beginning
            module(views()[0] * 2)
        return module

    whole, divided = make(), make()
    check_against(whole, divided, dipole.cached(divided, SPEC, microbatch=4), 4)
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
    for parameter in module.parameters():
        assert any(torch.equal(parameter.grad, each) for each in finished)
    assert not step.state_dict().keys() - {f"encoder.{name}" for name in module.state_dict()}
    # Without gradient there is no graph and no second pass.
    seen.clear()
    with torch.no_grad():
        step(*x)
    module.requires_grad_(False)
    assert not step(*[v.detach() for v in x]).requires_grad
    assert seen == [4, 4, 3] * 4


def test_autograd_grad_retained_graphs_and_second_derivatives():
    module, x = encoder(), views()
    step = dipole.cached(module, "infonce", microbatch=4)
    loss = step(*x)
    found = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    torch.rand(3)  # what was drawn in between changes nothing
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [2 * each for each in found], rtol=0, atol=1e-13)
    first = torch.autograd.grad(step(*x), module[0].weight, create_graph=True)[0]
    refused(RuntimeError, "once_differentiable", first.sum().backward)


class Tokens(nn.Embedding):  # what a Hugging Face model looks like: a mapping in, a mapping out, lengths that vary
    def forward(self, batch):
        mask = batch["mask"].to(self.weight.dtype)
        z = (super().forward(batch["ids"]) * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        return {"embedding": z, "count": batch["mask"].sum(1)}


def test_mappings_labels_and_pairs_by_a_function():
    torch.manual_seed(0)
    batch = UserDict(ids=torch.randint(20, (12, 7)), mask=torch.arange(7) < torch.randint(1, 8, (12, 1)))
    labels = torch.arange(12) // 2
    spec = dipole.objective("infonce")

    def pairs(found, labels):
        assert int(found["count"].sum()) == int(batch["mask"].sum())
        return Pairs.from_blocks(found["embedding"].view(6, 2, 6), "all", labels=labels[::2])

    whole, divided = (Tokens(20, 6).double() for _ in range(2))
    divided.load_state_dict(whole.state_dict())
    expected = measured(lambda: spec(pairs(whole(batch), labels)).loss, whole)
    step = dipole.cached(divided, spec, microbatch=5, pairs=pairs)
    assert_alike(measured(lambda: step(batch, labels=labels), divided), expected)


class Towers(nn.ModuleList):  # two encoders, one for queries and one for documents
    def forward(self, both):
        return self[0](both[0]), self[1](both[1])


@pytest.mark.parametrize("microbatch", [4, 64])
def test_two_encoders_are_one_module_that_returns_both(microbatch):
    whole, x, loss = Towers([encoder(), encoder()]).eval(), views(), dipole.objective("infonce")
    expected = measured(lambda: loss(Pairs.cross(*whole(x))).loss, whole, x)
    divided, y = Towers([encoder(), encoder()]).eval(), views()
    given = dict(enumerate(y))
    step = dipole.cached(divided, loss, microbatch=microbatch, pairs=lambda both: Pairs.cross(*both))
    assert_alike(measured(lambda: step(given), divided, y), expected)
    with pytest.raises(PairsError, match=r"Towers returned a tuple, not embeddings .* lambda z: Pairs.cross"):
        dipole.cached(divided, loss, microbatch=microbatch)(given)
    own = dipole.cached(divided, lambda a, b: (a[0] * b[1]).sum(), microbatch=microbatch)
    assert own(given, given).ndim == 0


def test_a_loss_of_ones_own_and_parameters_of_the_objective():
    def own(a, b):
        return nn.functional.cross_entropy(a @ b.T, torch.arange(ROWS))

    whole, divided, x = encoder(training=False), encoder(training=False), views()
    expected = measured(lambda: own(*map(whole, x)), whole)
    assert_alike(measured(lambda: dipole.cached(divided, own, microbatch=3)(*x), divided), expected)
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
    module = nn.Linear(6, 6)  # a small batch after a divided one learns
    step = dipole.cached(module, "infonce", microbatch=8)
    with torch.autocast("cpu", dtype=dtype):
        big, small = step.embed(torch.randn(12, 6)), step.embed(torch.randn(4, 6))
    (small.float().sum() + 0 * big.float().sum()).backward()
    assert module.weight.grad.abs().sum() > 0


def cached(module=None, objective="infonce", microbatch=4, **more):
    return dipole.cached(encoder() if module is None else module, objective, microbatch=microbatch, **more)


@pytest.mark.parametrize(("make", "said"), [
    (lambda: cached(lambda x: x), r"must be a torch.nn.Module, got function"),
    (lambda: cached([encoder(), encoder()]), r"got list\. Several encoders are one module"),
    (lambda: cached(objective=None), r"objective must be an objective, .* got None"),
    (lambda: cached(pairs="cross"), "pairs must be a function from embeddings to Pairs, got 'cross'"),
    (lambda: cached()(views()[0]), r"called with one view, which alone has no positives: .* or `pairs`"),
    (lambda: cached()(), "called with no view, which has no positives"),
    (lambda: cached()(*views(), labels=torch.arange(ROWS)), "labels: only a function `pairs` takes more"),
    (lambda: cached().embed({"a": torch.zeros(11), "b": torch.zeros(5)}), "one number of rows, .* got 5, 11 rows"),
    (lambda: cached().embed("text"), "nothing that has rows"),
    (lambda: dipole.compute_loss("infonc"), "Did you mean 'infonce'"),
    (lambda: dipole.compute_loss("infonce", embeddings="z", pairs=len), "not both"),
    *((lambda e=e: dipole.compute_loss("infonce", embeddings=e), "names of .* outputs, got .?2") for e in (2, [2])),
    (lambda: dipole.compute_loss("infonce", pairs=2), "pairs must be a function from outputs .*, got 2"),
    (lambda: dipole.compute_loss("infonce", model=2), "model must be the module that is trained, got 2"),
    (lambda: dipole.compute_loss("infonce", gradient_accumulation_steps=0), "whole number >= 1"),
    (lambda: dipole.compute_loss(5), "must be a text such as .* an Objective or a Composite, got int"),
    (lambda: dipole.compute_loss("infonce + cllr"), "give that width"),
    (lambda: dipole.compute_loss("infonce + cllr", dim=4), "give compute_loss.*model=model"),
    (lambda: dipole.compute_loss("infonce")({"logits": torch.ones(2, 2)}), "returned logits, and no"),
    (lambda: dipole.compute_loss("infonce")(torch.ones(2, 2)), "no positives without labels"),
    (lambda: cached(nn.BatchNorm1d(6).double(), microbatch=10)(*views()), "one row, and 11 rows in .* of 10 leave one"),
    (lambda: cached(nn.Flatten(0))(*views()), r"given 4 rows .* a row for each; got shape \(24,\)"),
])  # fmt: skip
def test_errors_say_what_to_do(make, said):
    refused((ConfigError, OptionError, PairsError, SpecError), said, make)
    for wrong in (0, -1, True, 2.0, "x", None):
        refused(OptionError, "microbatch must be a whole number >= 1, got ", cached, microbatch=wrong)


def both_ways(rank):
    """Loss, gradients and the number of their hooks' calls, where the encoder or the whole step is wrapped."""
    mine, found = slice(0, 7) if rank == 0 else slice(7, ROWS), []
    for wraps_encoder in (True, False):
        module, calls = encoder(training=False), []
        if wraps_encoder:
            step = dipole.cached(DistributedDataParallel(module), "infonce", microbatch=3)
        else:
            step = DistributedDataParallel(dipole.cached(module, "infonce", microbatch=3))
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(1))
        for _ in range(2):
            module.zero_grad()
            loss = step(*[v[mine].detach() for v in views()])
            loss.backward()
        found.append((loss.detach(), [p.grad for p in module.parameters()], len(calls)))
    # The trainer takes the loss of each of two processes: it multiplies by their number, and DDP averages.
    trained = gradient_of([slice(0, 5), slice(5, 8)][rank], 2)
    for grad in trained:
        dist.all_reduce(grad)
        grad /= 2
    return [*found, trained]


def test_two_ranks_are_one_process_whichever_is_wrapped_and_in_a_trainer():
    whole, loss = encoder(training=False), dipole.objective("infonce")
    expected = measured(lambda: loss(*map(whole, views())).loss, whole)
    *wrapped, trained = from_ranks(2, both_ways)[0]
    for value, gradients, calls in wrapped:
        torch.testing.assert_close((value, gradients), expected[:2], rtol=0, atol=1e-13)
        assert calls == 2 * len(gradients)
    torch.testing.assert_close(trained, gradient_of(slice(None), 1), rtol=1e-4, atol=1e-6)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x, y):
        return {"query_embeds": self.query(x), "document_embeds": self.key(y)}


class One(Two):
    def forward(self, x):
        return {"embeddings": self.query(x)}


def rows(names, labels=True):
    draw = torch.Generator().manual_seed(1)
    data = {name: torch.randn(COUNT, 5, generator=draw) for name in names}
    return [
        {name: value[n] for name, value in data.items()} | ({"labels": torch.tensor(n % 3)} if labels else {})
        for n in range(COUNT)
    ]


def trained(model, loss, data, tmp_path, batch=8, accumulation=3, resume=None, **more):
    """Return a Trainer after plain gradient descent. Ranks import this module, and need no transformers."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(tmp_path), learning_rate=0.5, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0, report_to=[],
        disable_tqdm=True, use_cpu=True, remove_unused_columns=False, per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation, **({"max_steps": 1, "save_strategy": "no"} | more),
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, compute_loss_func=loss)
    trainer._get_train_sampler = lambda *given: torch.utils.data.SequentialSampler(data)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def test_a_trainer_resumes_with_the_same_objective_alone(tmp_path):
    """It is told before the optimizer, whose error would be of another library, gets the other parameters."""
    pytest.importorskip("transformers")

    def run(text, **more):
        model = Two()
        return trained(model, dipole.compute_loss(text, model=model, dim=4), rows("xy"), tmp_path / "out", **more)

    learned = "infonce(temperature=learned)"
    run(learned, save_strategy="steps", save_steps=1)
    given = {"max_steps": 2, "resume": tmp_path / "out" / "checkpoint-1"}
    for other in ("infonce", "infonce(similarity=bilinear)", "siglip", f"{learned} + 0.1*cllr"):
        refused(CheckpointError, r"infonce\(temperature=learned\), and this loss is", run, other, **given)
    trainer = run(learned, **given)
    assert (trainer.state.global_step, len(trainer.model._load_state_dict_pre_hooks)) == (2, 0)  # the check is gone


def symmetric(a, b, temperature):
    """CLIP: cross entropy of rows and of columns, averaged."""
    s = nn.functional.normalize(a) @ nn.functional.normalize(b).T / temperature
    own = torch.arange(len(a))
    return (nn.functional.cross_entropy(s, own) + nn.functional.cross_entropy(s.T, own)) / 2


@pytest.mark.parametrize(("labels", "count"), [(True, 24), (False, 24), (True, 20)])
def test_batches_of_a_step_are_averaged(tmp_path, labels, count):
    """By the labels of each batch (the last may be smaller), or by the number of batches where there are none."""
    data, model = rows("xy", labels)[:count], Two()
    batches = [[torch.stack([row[n] for row in data[k : k + 8]]) for n in "xy"] for k in (0, 8, 16)]
    values = [len(x) * symmetric(model.query(x), model.key(y), 0.1) for x, y in batches]
    grads = torch.autograd.grad(sum(values) / count, [*model.parameters()])
    wanted = [(p - 0.5 * grad).detach() for p, grad in zip(model.parameters(), grads, strict=True)]
    loss = dipole.compute_loss("infonce(temperature=0.1)", gradient_accumulation_steps=1 if labels else 3)
    trained(model, loss, data, tmp_path)
    torch.testing.assert_close([each.detach() for each in model.parameters()], wanted, rtol=1e-5, atol=1e-6)


def test_classes_and_a_term_with_parameters(tmp_path):
    from safetensors.torch import load_file

    text = "infonce(temperature=0.1) + 1.0*cllr(solver=proximal, alpha=0.4)"
    data, model = rows("x"), One()
    loss = dipole.compute_loss(text, model=model, dim=4)
    assert "objective.terms.1.L" in dict(model.named_parameters())
    trainer = trained(model, loss, data, tmp_path, batch=COUNT, accumulation=1)
    L = model.objective.terms[1].L.detach()
    assert bool((torch.eye(4) != L).any())
    # The gradient moved L as a plain step does, and then every column was shortened by lr alpha.
    x, labels = torch.stack([row["x"] for row in data]), torch.stack([row["labels"] for row in data])
    other = dipole.objective(text, dim=4)
    other(dipole.Pairs.from_labels(One().query(x), labels)).loss.backward()
    moved = torch.eye(4) - 0.5 * other.terms[1].L.grad
    lengths = moved.norm(dim=0)
    torch.testing.assert_close(L, moved * (1 - 0.5 * 0.4 / lengths).clamp_min(0), rtol=1e-5, atol=1e-6)
    trainer.save_model(str(tmp_path / "saved"))
    torch.testing.assert_close(load_file(tmp_path / "saved" / "model.safetensors")["objective.terms.1.L"], L)


def test_pairs_of_ones_own_and_names():
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    wanted = dipole.objective("infonce")(dipole.Pairs.cross(a, b)).loss
    loss = dipole.compute_loss("infonce", pairs=lambda outputs, labels: dipole.Pairs.cross(*outputs))
    assert loss((a, b)) == wanted
    named = dipole.compute_loss("infonce", embeddings=("u", "v"))
    torch.testing.assert_close(named({"u": a, "v": b}), symmetric(a, b, 0.5))
    assert torch.isfinite(dipole.compute_loss("infonce")(a, torch.tensor([0, 0, 1, 1, 2, 2])))


def gradient_of(rows_of_it, processes):
    """Of one batch of 8 among the 24 of a step."""
    model, draw = Two(), torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 5, generator=draw)[rows_of_it] for _ in range(2))
    loss = dipole.compute_loss("infonce(temperature=0.1)")(model(x, y), torch.arange(len(x)), torch.tensor(24))
    (loss * processes).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("joined", [False, True])
def test_after_step_is_told_step_and_total_with_and_without_a_model(tmp_path, joined):
    data, model, term, idle = rows("xy", labels=False), Two(), Counts(), Counts()
    dipole.compute_loss(idle)  # of no trainer
    loss = dipole.compute_loss(term, model=model if joined else None)
    trained(model, loss, data, tmp_path, max_steps=-1, num_train_epochs=2, eval_strategy="epoch")
    assert (term.seen, term.rates, idle.seen) == ([(1, 2), (2, 2)], [0.5, 0.5], [])
