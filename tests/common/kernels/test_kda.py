"""kda_gate, chunk_kda and recurrent_kda against formulas and a token-by-token recurrence written here, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xpu_ports.common.kernels.kda import chunk_kda, kda_gate, recurrent_kda


def by_token(q, k, v, g, beta, state, scale: float, l2norm: bool) -> tuple[Tensor, Tensor]:
    """S = exp(g) S + beta k (v - k exp(g) S), o = scale q S, one token after the other."""
    if l2norm:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    B, T, H, K = q.shape
    S = torch.zeros(B, H, K, v.shape[-1], dtype=q.dtype) if state is None else state.clone()
    outputs = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None]
        wrong = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], wrong)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outputs, 1), S


def inputs(B: int, T: int, H: int, K: int, V: int) -> tuple[Tensor, ...]:
    """Log-decays from almost none to -30 a token, as trained layers have."""
    q, k = torch.randn(2, B, T, H, K, dtype=torch.double)
    g = -30 * torch.rand(B, T, H, K, dtype=torch.double).pow(6)
    return q, k, torch.randn(B, T, H, V, dtype=torch.double), g, torch.rand(B, T, H, dtype=torch.double)


@pytest.mark.parametrize("T", [1, 15, 16, 63, 64, 65, 200])
@pytest.mark.parametrize(("K", "V"), [(8, 4), (4, 8)])
@pytest.mark.parametrize("l2norm", [False, True])
def test_chunks_equal_tokens(T: int, K: int, V: int, l2norm: bool) -> None:
    given, state = inputs(2, T, 3, K, V), torch.randn(2, 3, K, V, dtype=torch.double)
    for start in (None, state):
        o, final = chunk_kda(*given, start, 0.5, l2norm)
        expected, expected_final = by_token(*given, start, 0.5, l2norm)
        torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(final, expected_final, rtol=1e-9, atol=1e-9)


def test_sequences_one_after_the_other() -> None:
    given, lengths = inputs(1, 100, 2, 4, 3), (70, 0, 1, 29)
    ends = [sum(lengths[:i]) for i in range(5)]
    states = torch.randn(4, 2, 4, 3, dtype=torch.double)
    states[1] = float("nan")  # of the empty one: it must not reach another
    o, final = chunk_kda(*given, states, 0.5, True, torch.tensor(ends, dtype=torch.int32))
    for i, length in enumerate(lengths):
        if length:
            part = [t[:, ends[i] : ends[i + 1]] for t in given]
            expected, expected_final = by_token(*part, states[i : i + 1], 0.5, True)
            torch.testing.assert_close(o[:, ends[i] : ends[i + 1]], expected, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(final[i : i + 1], expected_final, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("T", [1, 3, 64])
def test_recurrent_moves_the_state_in_place(T: int) -> None:
    given, state = inputs(2, T, 3, 4, 5), torch.randn(2, 3, 4, 5, dtype=torch.double)
    expected, expected_state = by_token(*given, state, 0.5, True)
    o = recurrent_kda(state, *given, 0.5, True, None)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, expected_state, rtol=1e-9, atol=1e-9)


def test_a_masked_token_never_writes() -> None:
    given, state = inputs(2, 4, 3, 4, 5), torch.randn(2, 3, 4, 5, dtype=torch.double)
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]])
    before = state.clone()
    o = recurrent_kda(state, *given, 0.5, True, mask)
    kept = [t[:1, [0, 2, 3]] for t in given]
    expected, expected_state = by_token(*kept, before[:1], 0.5, True)
    torch.testing.assert_close(o[:1, [0, 2, 3]], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state[:1], expected_state, rtol=1e-9, atol=1e-9)
    assert torch.equal(state[1], before[1])
    assert not o[1].any()


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gate(bound: float | None) -> None:
    f, A_log, bias = torch.randn(2, 3, 2, 4).double(), torch.randn(2).double(), torch.randn(8).double()
    g = kda_gate(f, A_log, bias, bound)
    for h in range(2):
        x = f[:, :, h] + bias.view(2, 4)[h]
        rate = A_log[h].exp()
        expected = -rate * torch.log1p(x.exp()) if bound is None else bound / (1 + (-rate * x).exp())
        torch.testing.assert_close(g[:, :, h], expected.to(g.dtype), rtol=1e-6, atol=1e-6)
    assert (g <= 0).all()
