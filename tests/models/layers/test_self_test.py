"""The rules hold on this machine, and the self-test finds an operation that breaks them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.models.layers.operations import EXACT, exact_linear
from rlhfuse.models.layers.self_test import self_test


@pytest.mark.parametrize(
    ("hidden", "mlp", "vocab"), [(64, 172, 512), (128, 344, 1000), (96, 50, 77), (512, 1376, 4096)]
)
def test_the_rules_hold_here(hidden, mlp, vocab):
    self_test(hidden=hidden, mlp=mlp, vocab=vocab)


def test_the_self_test_names_what_breaks():
    """Stock silu at width 172, and stock linear, depend on the number of rows: the self-test must say so."""
    stock = replace(EXACT, swiglu=lambda x: F.silu(x[:, :172].contiguous()) * x[:, 172:])
    with pytest.raises(InputError, match=r"swiglu \[172\]"):
        self_test(stock, hidden=64, mlp=172, vocab=512)
    with pytest.raises(InputError, match="linear hidden .* for 1 rows"):
        self_test(replace(EXACT, linear=F.linear), hidden=512, mlp=172, vocab=512)


@examples(60)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 90))
def test_linear_is_the_product_and_keeps_bits(rows, width, out):
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    x, weight = torch.randn(60, width, generator=generator), torch.randn(out, width, generator=generator)
    y = exact_linear(x[:rows], weight)
    assert torch.equal(y, exact_linear(x, weight)[:rows])
    assert (y - x[:rows].double() @ weight.double().T).abs().max() < 1e-4
    assert torch.equal(exact_linear(x[:rows].view(1, rows, width), weight)[0], y)
