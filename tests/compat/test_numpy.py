"""Canaries of NumPy."""

from pathlib import Path

import numpy as np

from megamoe.compat.numpy_compat import open_map


def test_open_map(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(8))
    array = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert open_map(array).size() == open_map(array[2:4]).size() == (tmp_path / "a.npy").stat().st_size
    assert open_map(np.arange(8)) is None
    assert not hasattr(array, "mmap"), "NumPy has a public name for it now"
