"""An objective as the loss of transformers' Trainer: what it is given, and how it is divided over an optimizer step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dipole
from dipole import Objective
from dipole.core.utils.errors import ConfigError, OptionError, PairsError, SpecError
from tests.ranks import leaving_together, start_ranks

ROWS = 24


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
    data = {name: torch.randn(ROWS, 5, generator=draw) for name in names}
    return [
        {name: value[n] for name, value in data.items()} | ({"labels": torch.tensor(n % 3)} if labels else {})
        for n in range(ROWS)
    ]


def trainer_of(model, loss, data, tmp_path, **more):
    """Return a Trainer of plain gradient descent. Ranks import this module, and need no transformers."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(tmp_path), learning_rate=0.5, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0, report_to=[],
        disable_tqdm=True, use_cpu=True, remove_unused_columns=False, save_strategy="no", **more,
    )  # fmt: skip
    return Trainer(model, args, train_dataset=data, eval_dataset=data, compute_loss_func=loss)


def trained(model, loss, data, tmp_path, batch=8, accumulation=3):
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    trainer = trainer_of(model, loss, data, tmp_path, **sizes)
    trainer._get_train_sampler = lambda *given: torch.utils.data.SequentialSampler(data)
    trainer.train()
    return trainer


def stepped(model, value):
    """Parameters after a step of plain gradient descent on a loss."""
    grads = torch.autograd.grad(value, [*model.parameters()])
    return [(p - 0.5 * grad).detach() for p, grad in zip(model.parameters(), grads, strict=True)]


def check_parameters(model, wanted):
    torch.testing.assert_close([each.detach() for each in model.parameters()], wanted, rtol=1e-5, atol=1e-6)


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
    wanted = stepped(model, sum(values) / count)
    loss = dipole.compute_loss("infonce(temperature=0.1)", gradient_accumulation_steps=1 if labels else 3)
    trained(model, loss, data, tmp_path)
    check_parameters(model, wanted)


def test_classes_and_a_term_with_parameters(tmp_path):
    data, model = rows("x"), One()
    loss = dipole.compute_loss("infonce(temperature=0.1) + 1.0*cllr(solver=proximal, alpha=0.4)", model=model, dim=4)
    assert "objective.terms.1.L" in dict(model.named_parameters())
    trainer = trained(model, loss, data, tmp_path, batch=ROWS, accumulation=1)
    L = model.objective.terms[1].L.detach()
    assert bool((torch.eye(4) != L).any())
    # The gradient moved L as a plain step does, and then every column was shortened by lr alpha.
    again = One()
    other = dipole.objective("infonce(temperature=0.1) + 1.0*cllr(solver=proximal, alpha=0.4)", dim=4)
    x, labels = torch.stack([row["x"] for row in data]), torch.stack([row["labels"] for row in data])
    other(dipole.Pairs.from_labels(again.query(x), labels)).loss.backward()
    moved = torch.eye(4) - 0.5 * other.terms[1].L.grad
    lengths = moved.norm(dim=0)
    torch.testing.assert_close(L, moved * (1 - 0.5 * 0.4 / lengths).clamp_min(0), rtol=1e-5, atol=1e-6)
    trainer.save_model(str(tmp_path / "saved"))
    from safetensors.torch import load_file

    torch.testing.assert_close(load_file(tmp_path / "saved" / "model.safetensors")["objective.terms.1.L"], L)


def test_pairs_of_ones_own_and_names():
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    wanted = dipole.objective("infonce")(dipole.Pairs.cross(a, b)).loss
    loss = dipole.compute_loss("infonce", pairs=lambda outputs, labels: dipole.Pairs.cross(*outputs))
    assert loss((a, b)) == wanted
    named = dipole.compute_loss("infonce", embeddings=("u", "v"))
    torch.testing.assert_close(named({"u": a, "v": b}), symmetric(a, b, 0.5))
    assert torch.isfinite(dipole.compute_loss("infonce")(a, torch.tensor([0, 0, 1, 1, 2, 2])))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dipole.compute_loss("infonc"), SpecError, "Did you mean 'infonce'"),
        (lambda: dipole.compute_loss("infonce", embeddings="z", pairs=len), OptionError, "not both"),
        (lambda: dipole.compute_loss("infonce", gradient_accumulation_steps=0), OptionError, "whole number >= 1"),
        (lambda: dipole.compute_loss(5), OptionError, "must be its text, an Objective or a Composite, got 5"),
        (lambda: dipole.compute_loss("infonce + cllr"), ConfigError, "give that width"),
        (lambda: dipole.compute_loss("infonce + cllr", dim=4), ConfigError, "give compute_loss.*model=model"),
        (lambda: dipole.compute_loss("infonce")({"logits": torch.ones(2, 2)}), PairsError, "returned logits, and no"),
        (lambda: dipole.compute_loss("infonce")(torch.ones(2, 2)), PairsError, "no positives without labels"),
    ],
)  # fmt: skip
def test_one_message_for_each_mistake(make, error, message):
    with pytest.raises(error, match=message):
        make()


@leaving_together
def rank_main(rank, folder):
    """What the trainer does with the loss of each of two processes: it multiplies by their number, and DDP averages."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = gradient_of([slice(0, 5), slice(5, 8)][rank], 2)
    for grad in found:
        dist.all_reduce(grad)
        grad /= 2
    torch.save(found, f"{folder}/{rank}.pt")


def gradient_of(rows_of_it, processes):
    """Of one batch of 8 among the 24 of a step."""
    model, draw = Two(), torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 5, generator=draw)[rows_of_it] for _ in range(2))
    loss = dipole.compute_loss("infonce(temperature=0.1)")(model(x, y), torch.arange(len(x)), torch.tensor(24))
    (loss * processes).backward()
    return [p.grad for p in model.parameters()]


def test_two_processes_are_one(tmp_path):
    start_ranks(rank_main, (str(tmp_path),), 2)
    wanted = gradient_of(slice(None), 1)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), wanted, rtol=1e-4, atol=1e-6)


class Counts(Objective):
    """Notes its steps."""

    def __init__(self):
        super().__init__("cosine")
        self.seen = []

    def loss(self, positive, rows):
        return -rows.over_positives(positive)

    needs_negatives = False

    def after_step(self, learning_rate, weight, step=None, total=None):
        self.seen.append((learning_rate, step, total))


@pytest.mark.parametrize("joined", [False, True])
def test_after_step_is_told_step_and_total_with_and_without_a_model(tmp_path, joined):
    data, model, term, idle = rows("xy", labels=False), Two(), Counts(), Counts()
    dipole.compute_loss(idle)  # of no trainer
    loss = dipole.compute_loss(term, model=model if joined else None)
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
    trainer_of(model, loss, data, tmp_path, **sizes, eval_strategy="epoch").train()
    assert (term.seen, idle.seen) == ([(0.5, 1, 2), (0.5, 2, 2)], [])
