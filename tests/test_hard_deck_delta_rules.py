"""The references of kda and gated_delta_rule go in chunks; here the recurrence that they state, token by token."""

import runpy

import pytest
import torch
from conftest import BUNDLE

DECK = BUNDLE / "benchmarks" / "hard_deck"


def walked(q, k, v, g, beta, state):
    """Outputs and the last state of one head: q, k (tokens, K), v (tokens, V), g (tokens, K or 1), beta (tokens)."""
    outputs = []
    for token in range(len(q)):
        state = state * g[token].exp()[:, None]
        state = state + torch.outer(k[token], (v[token] - k[token] @ state) * beta[token])
        outputs.append(q[token] @ state / q.shape[-1] ** 0.5)
    return torch.stack(outputs), state


def in_float64(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.double() if one.is_floating_point() else one for one in inputs]


@pytest.mark.parametrize("tokens", [1, 63, 130])
def test_kimi_delta_attention_in_chunks_is_the_recurrence(tokens):
    task = runpy.run_path(str(DECK / "kda" / "reference.py"))
    inputs = in_float64(task["get_inputs"](batch=1, tokens=tokens, heads=2))
    outputs = task["Model"]()(*inputs)
    for head in range(2):
        expected, _ = walked(*(one[0, :, head] for one in inputs), torch.zeros(128, 128, dtype=torch.float64))
        torch.testing.assert_close(outputs[0, :, head], expected)


def test_the_gated_delta_rule_in_chunks_is_the_recurrence_of_each_sequence():
    task = runpy.run_path(str(DECK / "gated_delta_rule" / "reference.py"))
    *parts, states, offsets = in_float64(task["get_inputs"](sequences=3, tokens=190, heads=2))
    parts[3] = parts[3][..., None]
    outputs, after = task["Model"]()(*parts[:3], parts[3][..., 0], parts[4], states, offsets)
    for sequence in range(3):
        own = slice(offsets[sequence], offsets[sequence + 1])
        for head in range(2):
            expected, last = walked(*(one[own, head] for one in parts), states[sequence, head])
            torch.testing.assert_close(outputs[own, head], expected)
            torch.testing.assert_close(after[sequence, head], last)
