"""Which rank's random states a resumed run takes."""

from pathlib import Path

import pytest

from megamoe.checkpoint.format.meta import read_meta
from megamoe.checkpoint.manager import saved_random_rank
from megamoe.parallel.layout import Layout
from tests.support import checkpoint


@pytest.mark.parametrize(
    ("layout", "expected"),
    [(Layout(2), [0, 1]), (Layout(4), [0, 1, None, None]), (Layout(4, tensor=2), [0, 0, 1, 1])],
)
def test_random_states_go_with_the_data_parallel_rank(
    tmp_path: Path, layout: Layout, expected: list[int | None]
) -> None:
    meta = read_meta(checkpoint.write(tmp_path / "step_00000007"))  # of 2 ranks, tensor 1
    assert [saved_random_rank(meta, layout, rank) for rank in range(layout.ranks)] == expected
