"""A recorded function gives what the function gives, and what cannot be repeated is refused."""

import pytest
import torch
from torch import Tensor

from dipole.core.objectives.tape import UnplayableError, record


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def played(function, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What a tape of other numbers of the same shapes gives on these inputs."""
    others = [leaf(*each.shape, seed=7) if each.requires_grad else each for each in inputs]
    return record(lambda given: [function(*given)], others).play(inputs, lambda given: function(*given))


def writes_to_its_own(x: Tensor, y: Tensor) -> Tensor:
    scores = (x @ y.T).exp().clone()
    scores.masked_fill_(torch.eye(len(x), dtype=torch.bool), 0.5)
    scores[:, 0].mul_(2)
    return scores.sum(1).add_(1).log().mean()


def several_results(x: Tensor, y: Tensor) -> Tensor:
    top, place = (x @ y.T).max(1)
    return (top * place).sum() + x[place].sum() + torch.cat(x.chunk(2)).square().sum()


def scatters(x: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[torch.arange(4), torch.arange(4)] = True
    return torch.where(mask, -torch.inf, x @ y.T).logsumexp(1).mean() + x[:, 1:3].sum() - y[..., -1:].sum()


@pytest.mark.parametrize("function", [writes_to_its_own, several_results, scatters])
def test_a_tape_gives_the_value_and_the_gradient_to_the_last_bit(function) -> None:
    inputs = leaf(4, 3, seed=1), leaf(4, 3, seed=2)
    value = function(*inputs)
    expected = torch.autograd.grad(value, inputs)
    (found,) = played(function, *inputs)
    assert torch.equal(found, value)
    for grad, other in zip(torch.autograd.grad(found, inputs, retain_graph=True), expected, strict=True):
        assert torch.equal(grad, other)
    # Once more from the same graph: nothing that was kept has been written to.
    for grad, other in zip(torch.autograd.grad(found, inputs), expected, strict=True):
        assert torch.equal(grad, other)


def test_second_derivatives_are_those_of_the_function() -> None:
    inputs = leaf(4, 3, seed=1), leaf(4, 3, seed=2)
    (found,) = played(scatters, *inputs)
    grads = torch.autograd.grad(found, inputs, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in grads), inputs)
    reference = torch.autograd.grad(scatters(*inputs), inputs, create_graph=True)
    expected = torch.autograd.grad(sum(each.square().sum() for each in reference), inputs)
    for a, b in zip(second, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert any(each.abs().max() > 0 for each in expected)


def test_an_input_that_takes_no_part_has_no_gradient_and_one_without_gradient_is_read_anew() -> None:
    def function(x: Tensor, unused: Tensor, index: Tensor) -> Tensor:
        return x[index].square().sum()

    x, unused = leaf(4, 3), leaf(2)
    tape = record(lambda given: [function(*given)], [x, unused, torch.tensor([0, 1])])
    index = torch.tensor([3, 3])
    (found,) = tape.play([x, unused, index], lambda given: function(*given))
    assert torch.equal(found, function(x, unused, index))
    grads = torch.autograd.grad(found, [x, unused], allow_unused=True)
    assert grads[1] is None
    assert torch.equal(grads[0], torch.autograd.grad(function(x, unused, index), x)[0])


def test_what_no_input_decides_is_made_once() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).fill_diagonal_(False)
        return torch.where(mask, x @ x.T, 0.0).sum()

    x = leaf(4, 3)
    tape = record(lambda given: [function(*given)], [x])
    with torch.profiler.profile() as profile, torch.no_grad():
        tape.forward(x)
    calls = [event.name for event in profile.events()]
    assert "aten::mm" in calls
    assert not {"aten::ones", "aten::fill_diagonal_"} & set(calls)


def test_an_output_that_is_the_first_again_has_no_graph() -> None:
    x = leaf(4, 3)

    def function(given):
        loss = given[0].square().sum()
        return [loss, loss.detach()]

    loss, value = record(function, [x]).play([x], lambda given: function(given)[0])
    assert loss.requires_grad
    assert not value.requires_grad
    assert torch.equal(loss.detach(), value)


def test_a_tensor_from_outside_that_is_written_to_tells() -> None:
    scale = torch.tensor(2.0, dtype=torch.float64)
    tape = record(lambda given: [(given[0] * scale).sum()], [leaf(3)])
    assert tape.current
    scale.fill_(3.0)
    assert not tape.current


OUTSIDE = torch.zeros(3, dtype=torch.float64)
LEARNED = leaf(3)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.sum() * float(x.detach().sum()), "is read"),
        (lambda x: x.sum() if x.detach().sum() > 0 else -x.sum(), "is read"),
        (lambda x: x[x > 0].sum(), "decides about shapes"),
        (lambda x: x[x.detach().nonzero()].sum(), "decides about shapes"),
        (lambda x: (x * torch.rand(3)).sum(), "is drawn"),
        (lambda x: torch.nn.functional.dropout(x, 0.5).sum(), "is drawn"),
        (lambda x: (x + OUTSIDE.add_(1)).sum(), "writes to a tensor that was there before"),
        (lambda x: (x.detach().mul_(2) + x).sum(), "writes to a tensor that was there before"),
        (lambda x: (x * LEARNED).sum(), "with gradient that is no input"),
    ],
)
def test_what_cannot_be_repeated_is_refused(function, why: str) -> None:
    with pytest.raises(UnplayableError, match=why):
        record(lambda given: [function(given[0])], [leaf(3)])
