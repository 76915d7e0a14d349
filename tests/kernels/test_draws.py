"""Compiled draws are PyTorch's in every bit, and both are the hash on Python's own integers."""

import pytest
import torch

from megamoe.kernels.library import Library
from megamoe.moe import rng
from tests.support.kernels.chosen import uniform
from tests.support.moe.draws import unit

pytestmark = pytest.mark.usefixtures("two_threads")


def test_the_tensors_hash_as_integers_do(compiled: bool) -> None:
    draw_key, tokens, first = rng.key(1, 2, 3, "test"), [0, 5, -7, 2**40, 2**63 - 1], 1000
    expected = [[unit(draw_key, token, first + c) for c in range(19)] for token in tokens]
    found = uniform(draw_key, torch.tensor(tokens), 19, first_column=first)
    assert found.tolist() == expected


@pytest.mark.parametrize("columns", [1, 7, 16, 33, 512])
@pytest.mark.parametrize("draw_key", [0, 3, 2**63 - 1])
def test_compiled_ones_are_the_same(library: Library, columns: int, draw_key: int) -> None:
    wide = torch.randint(-(2**63), 2**63 - 1, (2, 301), generator=torch.Generator().manual_seed(columns))
    for index_T in (wide[0], wide.T[:, 1], torch.arange(5, dtype=torch.int32), wide[0, :0]):
        found = uniform(draw_key, index_T, columns, first_column=columns)
        assert found.dtype == torch.float32 and found.shape == (len(index_T), columns)
        assert torch.equal(found, rng.plain_uniform(draw_key, index_T, columns, first_column=columns))
