# SPDX-License-Identifier: Apache-2.0
"""What compiled kernels call, read from the files that hold them."""

import glob
import re
from pathlib import Path
from typing import Any

# Numba's own names for BLAS and LAPACK (`numba_xxgemm`, `numba_xgesv`, `numba_ez_gesdd`). It asks for scipy where it
# compiles a call of one of them, and nowhere else.
_LINEAR_ALGEBRA = re.compile(rb"numba_(?:x|ez_)[a-z]+")


def compiled_files(kernel: Any) -> list[Path]:
    """The files with the compiled versions of a kernel, those of its present source."""
    found: list[Path] = []
    for file in kernel._cache._files:
        name = glob.escape(file._data_name_pattern.format(number=0)).removesuffix("0.nbc")
        found += Path(file._cache_path).glob(f"{name}*.nbc")
    return found


def linear_algebra(kernel: Any) -> set[str]:
    """Functions of BLAS and LAPACK that the compiled versions of a kernel call."""
    return {name.decode() for file in compiled_files(kernel) for name in _LINEAR_ALGEBRA.findall(file.read_bytes())}
