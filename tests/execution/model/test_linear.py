"""A packed weight multiplies in the same way as a plain weight."""

import pytest
import torch

from streamserve.execution.model.linear import Linear, packs


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "f32"), (torch.bfloat16, "bf16")])
def test_linear_is_x_times_w_transposed_plus_b(dtype, name, bias, rows):
    generator = torch.Generator().manual_seed(rows)
    x, w, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in [(rows, 48), (70, 48), (70,)])
    linear = Linear(w, b if bias else None)
    expected = x.double() @ w.double().T + (b.double() if bias else 0.0)
    assert (linear.format, linear.out_features, linear.in_features) == (name, 70, 48)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=8 * tolerance)


def test_bf16_is_packed_where_the_processor_can_and_float32_keeps_its_tensor():
    weight = torch.randn(64, 64)
    assert not packs(torch.float32)
    assert Linear(weight).weight is weight
    assert Linear(weight.bfloat16()).weight.is_mkldnn == packs(torch.bfloat16)


def test_rows_may_be_a_view_with_gaps():
    x, weight = torch.randn(5, 96).bfloat16(), torch.randn(32, 48).bfloat16()
    assert torch.equal(Linear(weight)(x[:, :48]), Linear(weight)(x[:, :48].contiguous()))
