# SPDX-License-Identifier: Apache-2.0
"""Instructions that Python has no words for, and without which a pass over a matrix takes four times as long.

Numba marks arithmetic and comparisons of a `fastmath` function, but not the `select` that its `max` becomes, and LLVM
turns no loop of those into vector instructions. `larger` and `smaller` say the same in the form that it does. Finding
the few large entries of a row is a comparison of eight at a time, whose result is eight bits: `not_below`, and for what
to do with bits, `lowest_bit` and `count_bits`.

These generate LLVM's intermediate language, so they run on whatever processor LLVM compiles for.
"""

from typing import Any, Protocol, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Scores = NDArray[np.floating[Any]]

# Entries that `not_below` compares at once: a vector register of float32, two of float64.
LANES = 8


class _Extreme(Protocol):
    def __call__(self, a: float, b: float) -> float: ...


class _NotBelow(Protocol):
    def __call__(self, row: Scores, prices: Scores, start: int, floor: float) -> int: ...


class _OfBits(Protocol):
    def __call__(self, bits: int) -> int: ...


def _extreme(name: str) -> Any:
    def typed(_: Any, a: Any, b: Any) -> Any:
        if a != b:
            return None

        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind = arguments[0].type
            function = builder.module.declare_intrinsic(name, [kind], ir.FunctionType(kind, [kind, kind]))
            return builder.call(function, arguments, fastmath=("nnan", "nsz"))

        return a(a, b), generate

    return typed


def _not_below(_: Any, row: Any, prices: Any, start: Any, floor: Any) -> Any:
    if row.layout != "C" or prices.layout != "C" or row.dtype != prices.dtype:
        return None  # entries that do not stand side by side

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_data_type(signature.args[0].dtype)
        lanes = ir.VectorType(kind, LANES)

        def load(array_type: Any, array: Any) -> Any:
            data = cgutils.create_struct_proxy(array_type)(context, builder, value=array).data
            pointer = builder.bitcast(builder.gep(data, [arguments[2]]), lanes.as_pointer())
            return builder.load(pointer, align=context.get_abi_sizeof(kind))

        offers = builder.fsub(load(signature.args[0], arguments[0]), load(signature.args[1], arguments[1]))
        nothing, first = ir.Constant(lanes, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        floors = builder.shuffle_vector(builder.insert_element(nothing, arguments[3], first), nothing, everywhere)
        found = builder.bitcast(builder.fcmp_unordered(">=", offers, floors), ir.IntType(LANES))
        return builder.zext(found, ir.IntType(64))

    return types.uint64(row, prices, types.intp, row.dtype), generate


def _lowest_bit(_: Any, bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _count_bits(_: Any, bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


larger = cast(_Extreme, intrinsic(_extreme("llvm.maxnum")))
"""The larger of two numbers of one type, neither of them NaN."""

smaller = cast(_Extreme, intrinsic(_extreme("llvm.minnum")))
"""The smaller of two numbers of one type, neither of them NaN."""

not_below = cast(_NotBelow, intrinsic(_not_below))
"""Which of eight entries `row - prices`, from `start` on, are not below a floor: one bit each, the first lowest.

NaN is not below anything: who looks at what was found sees every NaN and +inf of the row.
"""

lowest_bit = cast(_OfBits, intrinsic(_lowest_bit))
"""The position of the lowest bit that is set; there must be one."""

count_bits = cast(_OfBits, intrinsic(_count_bits))
"""How many bits are set."""
