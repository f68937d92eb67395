"""The packed GRU against `torch.nn.GRU`: states, all gradients, and what it must refuse."""

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from dipole.text.batching import make_batch
from dipole.text.encoders import WordGRU, trained_table
from dipole.text.encoders.recurrent import final_states

LENGTHS = {"many": [9, 9, 7, 4, 4, 2, 1], "one": [5], "one word": [1, 1, 1], "a single word": [1], "equal": [4, 4, 4]}


def packed(lengths, size=3, seed=0):
    torch.manual_seed(seed)
    words = torch.randn(len(lengths), max(lengths), size, dtype=torch.float64)
    found = pack_padded_sequence(words, torch.tensor(lengths), batch_first=True)
    return found.data, found.batch_sizes


def reference(words, sizes, gru):
    state = gru(PackedSequence(words, sizes))[1]  # (directions, B, H)
    return torch.cat(list(state), 1)


def gradients(states, words, gru):
    weight = torch.linspace(-1, 2, states.numel(), dtype=states.dtype).view_as(states)
    return torch.autograd.grad((weight * states**2 + states.sin()).sum(), [words, *gru.parameters()])


@pytest.mark.parametrize("both", [False, True], ids=["uni", "bi"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_states_and_gradients_are_those_of_torch(both, lengths):
    words, sizes = packed(lengths)
    words.requires_grad_()
    gru = torch.nn.GRU(3, 4, bidirectional=both).double()
    expected, found = reference(words, sizes, gru), final_states(words, sizes.tolist(), gru)
    assert found.shape == (len(lengths), 8 if both else 4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    for a, b in zip(gradients(found, words, gru), gradients(expected, words, gru), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("both", [False, True], ids=["uni", "bi"])
def test_gradcheck(both):
    words, sizes = packed([4, 2, 1], size=2)
    words.requires_grad_()
    gru = torch.nn.GRU(2, 2, bidirectional=both).double()
    assert torch.autograd.gradcheck(
        lambda words, *weights: final_states(words, sizes.tolist(), gru), (words, *gru.parameters())
    )


def test_float32_is_as_close_as_rounding_allows():
    words, sizes = packed([20, 15, 9, 3, 1], size=30)
    gru = torch.nn.GRU(30, 40, bidirectional=True)
    found = final_states(words.float(), sizes.tolist(), gru)
    torch.testing.assert_close(found, reference(words.float(), sizes, gru), rtol=0, atol=2e-6)


def test_frozen_words_and_frozen_weights():
    words, sizes = packed(LENGTHS["many"])
    gru = torch.nn.GRU(3, 4).double()
    final_states(words, sizes.tolist(), gru).sum().backward()
    assert all(p.grad is not None for p in gru.parameters())
    gru.requires_grad_(False)
    words.requires_grad_()
    final_states(words, sizes.tolist(), gru).sum().backward()
    found = words.grad.clone()
    words.grad = None
    reference(words, sizes, gru).sum().backward()
    torch.testing.assert_close(found, words.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_nothing_is_learned(quiet):
    words, sizes = packed(LENGTHS["many"])
    gru = torch.nn.GRU(3, 4, bidirectional=True).double()
    with quiet():
        found = final_states(words, sizes.tolist(), gru)
    assert not found.requires_grad
    torch.testing.assert_close(found, reference(words, sizes, gru).detach(), rtol=0, atol=1e-10)
    assert not final_states(words, sizes.tolist(), gru.requires_grad_(False)).requires_grad


def test_a_state_can_be_used_twice_and_changed_weights_are_noticed():
    words, sizes = packed([3, 2])
    gru = torch.nn.GRU(3, 4).double()
    states = final_states(words, sizes.tolist(), gru)
    states.sum().backward(retain_graph=True)
    once = gru.weight_hh_l0.grad.clone()
    states.sum().backward(retain_graph=True)
    torch.testing.assert_close(gru.weight_hh_l0.grad, 2 * once)
    with torch.no_grad():
        gru.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.sum().backward()


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_refused_not_wrong(power):
    words, sizes = packed([3, 2])
    words.requires_grad_()
    states = final_states(words, sizes.tolist(), torch.nn.GRU(3, 4).double())
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad((states**power).sum(), words, create_graph=True)


@pytest.mark.parametrize("other", [{"num_layers": 2}, {"bias": False}])
def test_other_recurrent_networks_are_refused(other):
    words, sizes = packed([3, 2])
    with pytest.raises(ValueError, match="one layer with biases"):
        final_states(words, sizes.tolist(), torch.nn.GRU(3, 4, **other).double())


@pytest.mark.parametrize("direction", ["uni", "bi", "combine"])
def test_under_autocast_the_encoder_computes_with_torch(direction):
    torch.manual_seed(0)
    module = WordGRU(trained_table(30, 5), 6, direction)
    chunk = make_batch([[3, 4, 5], [6], [7, 8], [9, 1, 2, 3, 4]], chunks=1).chunks[0]
    found = module(chunk)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = module(chunk)
    torch.testing.assert_close(rough.float(), found, rtol=0, atol=0.02)
