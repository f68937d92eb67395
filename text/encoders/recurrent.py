"""A GRU over packed sentences on the CPU. Padding costs nothing, and each weight gradient is one product.

PyTorch's own GRU adds up the gradient of the recurrent weights step by step, one matrix for every position of the
sentence. For short sentences these additions cost more than the padding that packing saves.
"""

from typing import Any

import torch
from torch import Tensor


def final_states(words: Tensor, sizes: list[int], gru: torch.nn.GRU) -> Tensor:
    """Return the last states (B, directions * H) of a one-layer `torch.nn.GRU`, equal to its own result.

    Args:
        words: (N, E) packed by position, longest sentence first (`pack_padded_sequence(...).data`).
        sizes: sentences that have a word at each position, falling; their sum is N.

    Raises:
        ValueError: several layers or no biases, which only PyTorch's own GRU has.
        RuntimeError: in the backward sweep, when second derivatives are asked for.
    """
    if gru.num_layers != 1 or not gru.bias:
        raise ValueError(f"only a GRU of one layer with biases, got {gru}")
    learns = torch.is_grad_enabled()  # inside of a function of its own it never is
    states = []
    for suffix in ("", "_reverse") if gru.bidirectional else ("",):
        weights = [getattr(gru, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        keep = learns and any(tensor.requires_grad for tensor in (words, *weights))
        states.append(_GRU.apply(words, sizes, bool(suffix), keep, *weights))
    return torch.cat(states, 1)


def _steps(sizes: list[int], backwards: bool) -> list[tuple[slice, int]]:
    """Rows of each position in the order in which they are read, and how many of them have been read from before."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    steps, before = [], 0
    for size, end in list(zip(sizes, ends, strict=True))[:: -1 if backwards else 1]:
        steps.append((slice(end - size, end), min(before, size)))
        before = size
    return steps


class _GRU(torch.autograd.Function):
    """r, z = sigmoid(..), n = tanh(W_in x + b_in + r (W_hn h + b_hn)), h' = n + z (h - n), as `torch.nn.GRU`.

    Longest first: a position's sentences are the first rows of the state, read forwards (rows drop out at the end) or
    backwards (rows come in with state 0, for which nothing is multiplied).
    """

    @staticmethod
    def forward(
        ctx: Any, words: Tensor, sizes: list[int], backwards: bool, keep: bool, w_ih: Tensor, w_hh: Tensor,
        b_ih: Tensor, b_hh: Tensor,
    ) -> Tensor:  # fmt: skip
        units = w_hh.shape[1]
        two = 2 * units
        bias = b_ih.clone()
        bias[:two] += b_hh[:two]
        gates = torch.addmm(bias, words, w_ih.T)  # (N, 3H): r, z, n, later overwritten by their values
        state = words.new_zeros(max(sizes), units)
        before = words.new_zeros(len(words) if keep else 0, units)  # states that each row was computed from
        inner = words.new_empty(len(words) if keep else max(sizes), units)  # W_hn h + b_hn
        w_gates, w_new, b_new = w_hh[:two].T, w_hh[two:].T, b_hh[two:]
        for rows, known in _steps(sizes, backwards):
            h, gate = state[: rows.stop - rows.start], gates[rows]
            candidate = inner[rows] if keep else inner[: len(h)]
            gate[:known, :two].addmm_(h[:known], w_gates)
            torch.addmm(b_new, h[:known], w_new, out=candidate[:known])
            candidate[known:] = b_new
            reset, update, new = gate.split(units, 1)
            gate[:, :two].sigmoid_()
            new.addcmul_(reset, candidate).tanh_()
            if keep:
                before[rows][:known] = h[:known]
            torch.lerp(new, h, update, out=h)
        if keep:
            ctx.save_for_backward(words, w_ih, w_hh, gates, before, inner)
            ctx.sizes, ctx.backwards = sizes, backwards
        return state

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: the result would silently count as a constant
            raise RuntimeError("the packed GRU has no second derivatives; call backward without create_graph")
        words, w_ih, w_hh, gates, before, inner = ctx.saved_tensors
        units = w_hh.shape[1]
        grad = grad.clone()
        # Gradients at the gates, in the order n, r, z, inner: the first three belong to the input's weights, the last
        # three to the recurrent ones.
        found = gates.new_empty(len(gates), 4 * units)
        for rows, known in reversed(_steps(ctx.sizes, ctx.backwards)):
            g = grad[: rows.stop - rows.start]
            reset, update, new = gates[rows].split(units, 1)
            h, out = before[rows], found[rows]
            d_new, d_reset, d_update, d_inner = out.split(units, 1)
            torch.sub(h, new, out=d_update).mul_(g).mul_(update).addcmul_(d_update, update, value=-1)
            g_update = g * update
            torch.sub(g, g_update, out=d_new).addcmul_(d_new * new, new, value=-1)
            torch.mul(d_new, reset, out=d_inner)
            torch.mul(d_inner, inner[rows], out=d_reset).addcmul_(d_reset, reset, value=-1)
            torch.addmm(g_update[:known], out[:known, units:], w_hh, out=g[:known])
        to_input, to_state = found[:, : 3 * units], found[:, units:]
        order = torch.arange(3 * units).roll(-units)  # n, r, z to r, z, n
        sums = found.sum(0)
        to_words = None
        if ctx.needs_input_grad[0]:
            to_words = torch.mm(to_input, w_ih[order.roll(2 * units)])
        return (
            to_words,
            None,
            None,
            None,
            torch.mm(to_input.T, words)[order],
            torch.mm(to_state.T, before),
            sums[: 3 * units][order],
            sums[units:],
        )
