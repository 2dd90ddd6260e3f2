"""What compiled code is made of: the decorator, type names, and three instructions that numba has no name for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic as _intrinsic

from .cache import keep

Int = Any  # in kernels: an int to Python, an int64 once compiled
FLOAT32_MAX = float(np.finfo(np.float32).max)
U = np.uintp  # for indices in hot loops: numba does not look whether they are negative


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called, for good (`cache` keeps the result); it releases the GIL.

    It is at the top level of a file in `codec` or `methods`, and its arguments are numbers, arrays and tuples of them.
    """
    compiled = njit(nogil=True, error_model="numpy")(function)
    keep(compiled)
    return compiled


def _instruction(function: Callable[..., Any]) -> Any:
    """An intrinsic, called without its first argument."""
    return _intrinsic(function)


LANES = 16  # float32 entries that one comparison looks at


@_instruction
def large_lanes(typing_context: Any, flat: Any, at: Any, cut: Any) -> Any:
    """A bit for each of flat[at], ..., flat[at + 15] (float32, in bounds): is its magnitude at least that of `cut`?

    Magnitudes are compared as integers, which order them alike; `cut` is the bits of a positive float32.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, vector = ir.IntType(32), ir.VectorType(ir.IntType(32), LANES)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), vector.as_pointer())
        bits = builder.load(address, align=4)
        sizes = builder.and_(bits, ir.Constant(vector, [0x7FFFFFFF] * LANES))
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[2], ir.Constant(number, 0))
        cuts = builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(vector, [0] * LANES))
        lanes = builder.icmp_signed(">=", sizes, cuts)
        return builder.zext(builder.bitcast(lanes, ir.IntType(LANES)), ir.IntType(64))

    return types.int64(flat, types.int64, types.int32), generate


@_instruction
def lowest_bit(typing_context: Any, mask: Any) -> Any:
    """The place of the lowest bit that is set in a mask that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@_instruction
def high_product(typing_context: Any, a: Any, b: Any) -> Any:
    """The upper 64 of the 128 bits of a * b (both uint64)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate
