"""Loads and stores of blocks of a matrix in rows, which the kernels share."""

import triton
import triton.language as tl


@triton.jit
def inside(row, column, rows, columns):  # type: ignore[no-untyped-def]
    """Return which places of a block lie in a matrix of so many rows and columns."""
    return (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def load_block(matrix, row, column, rows, columns):  # type: ignore[no-untyped-def]
    """Return matrix[row, column], 0 beyond the edges."""
    place = row[:, None] * columns + column[None, :]
    return tl.load(matrix + place, mask=inside(row, column, rows, columns), other=0)


@triton.jit
def load_turned(matrix, row, column, rows, columns):  # type: ignore[no-untyped-def]
    """Return matrix[row, column]^T, 0 beyond the edges."""
    place = row[None, :] * columns + column[:, None]
    return tl.load(matrix + place, mask=inside(column, row, columns, rows), other=0)


@triton.jit
def store_block(matrix, row, column, rows, columns, block):  # type: ignore[no-untyped-def]
    """Write matrix[row, column] = block, rounded to the matrix's numbers, within the edges."""
    place = row[:, None] * columns + column[None, :]
    numbers = block.to(matrix.dtype.element_ty)
    tl.store(matrix + place, numbers, mask=inside(row, column, rows, columns))
