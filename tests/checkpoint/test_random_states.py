"""Which rank's random states a resumed run takes."""

from pathlib import Path

import pytest

from megamoe.checkpoint.format.files import META
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


def test_a_checkpoint_that_an_earlier_version_converted_keeps_its_own_random_layout(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path / "step_00000007")
    content = checkpoint.load(path / META)
    content["layout"] |= {"ranks": 8, "expert": 4}
    checkpoint.dump(path / META, content | {"random_layout": {"ranks": 2, "tensor": 1}})
    meta = read_meta(path)
    assert [saved_random_rank(meta, Layout(4), rank) for rank in range(4)] == [0, 1, None, None]
