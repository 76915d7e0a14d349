"""The activation of gpt-oss and the biases of experts: values and gradients are those of plain operators."""

import pytest
import torch

from megamoe.kernels.experts.ffn import (
    LIMIT,
    add_expert_bias,
    clamped_swiglu,
    experts_of_rows,
    plain_clamped_swiglu,
)

NEAR = LIMIT - 1e-5


@pytest.mark.parametrize("rows", [0, 1, 50])
def test_gradients_are_autograds(rows: int) -> None:
    """Within the limits, beyond them, and near them: on them PyTorch's gradient is 1 up to 2.13, then 0."""
    rows_N2F = 6 * torch.randn(rows, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if rows:
        rows_N2F[0, :4] = rows_N2F[0, 12:16] = torch.tensor([NEAR, -NEAR, 100.0, -100.0])
    # fp64 takes the same steps in fp32, so the comparison is with plain operators in fp32.
    rows_N2F = rows_N2F.float().requires_grad_()
    found_NF, plain_NF = clamped_swiglu(rows_N2F), plain_clamped_swiglu(rows_N2F)
    assert torch.equal(found_NF, plain_NF)
    sent_NF = torch.randn(rows, 12, generator=torch.Generator().manual_seed(2))
    (found_N2F,) = torch.autograd.grad(found_NF, rows_N2F, sent_NF)
    (plain_N2F,) = torch.autograd.grad(plain_NF, rows_N2F, sent_NF)
    torch.testing.assert_close(found_N2F, plain_N2F, rtol=1e-5, atol=1e-5)
    if rows:
        assert not found_N2F[0, 2].any() and not found_N2F[0, 14:16].any()  # beyond: no gradient


def test_bf16_is_rounded_once() -> None:
    rows_N2F = (6 * torch.randn(50, 24)).bfloat16()
    assert torch.equal(clamped_swiglu(rows_N2F), plain_clamped_swiglu(rows_N2F.float()).bfloat16())


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0, 0], [0, 4, 0]], ids=str)
def test_biases_of_rows(counts: list[int]) -> None:
    expert_N = experts_of_rows(torch.tensor(counts), sum(counts))
    assert expert_N.tolist() == [expert for expert, count in enumerate(counts) for _ in range(count)]
    rows_NG = torch.randn(sum(counts), 5).requires_grad_()
    bias_EG = torch.randn(3, 5).requires_grad_()
    found_NG, plain_NG = add_expert_bias(rows_NG, bias_EG, expert_N), rows_NG + bias_EG[expert_N]
    assert torch.equal(found_NG, plain_NG)
    sent_NG = torch.randn(sum(counts), 5)
    found, plain = (torch.autograd.grad(each, (rows_NG, bias_EG), sent_NG) for each in (found_NG, plain_NG))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)
