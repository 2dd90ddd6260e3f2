"""Random numbers with a normal distribution that every machine draws alike: made of +, -, *, / and square roots alone.

Logarithms of a library may differ in their last bit, so this has one of its own.
"""

from __future__ import annotations

import math

import numpy as np

from fedfq.types import Array

from ..kernels import kernel
from .random_numbers import uniform

LN_2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
TERMS = 11  # of the series of the logarithm


@kernel
def fill_with_normals(key: np.uint64, width: int, columns: Array, numbers: Array) -> None:
    """Some columns of a matrix of independent standard normal numbers with an even `width`, as float32.

    Its entries are drawn row by row (Marsaglia's polar method): points in a square, two numbers of the sequence each,
    until one lies in the unit disk, which gives two normal numbers.
    """
    drawn = 0
    row = np.empty(width, np.float32)
    for i in range(numbers.shape[0]):
        for k in range(0, width, 2):
            x = y = 0.0
            square = 2.0
            while square >= 1.0 or square == 0.0:
                x = 2.0 * uniform(key, drawn) - 1.0
                y = 2.0 * uniform(key, drawn + 1) - 1.0
                drawn += 2
                square = x * x + y * y
            factor = math.sqrt(-2.0 * log(square) / square)
            row[k] = x * factor
            row[k + 1] = y * factor
        for j in range(columns.size):
            numbers[i, j] = row[columns[j]]


@kernel
def log(x: float) -> float:
    """The natural logarithm of a number between 0 and 1: x = m 2^e, and ln m = 2 (z + z^3 / 3 + z^5 / 5 + ...)."""
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m *= 2.0
        e -= 1
    z = (m - 1.0) / (m + 1.0)
    square = z * z
    total = 0.0
    for k in range(TERMS - 1, -1, -1):
        total = total * square + 1.0 / (2 * k + 1)
    return e * LN_2 + 2.0 * z * total
