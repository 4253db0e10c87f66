# SPDX-License-Identifier: Apache-2.0
"""An accelerator that is none: tensors that say they are on a device of their own, with values in the CPU's memory.

torch has a place for a backend of somebody else's, `privateuseone`, and lets Python fill it. Operations run on the
values, so that layers compute and learn here as they do elsewhere. What a real device would not allow is refused:
tensors on the device and on the CPU do not mix. What makes the host wait for a device is noted, with the function that
does it.
"""

import os
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import equipoise as eq

NAME = "pretended"
SOURCE = str(Path(eq.__file__).parent)
aten = torch.ops.aten
# What returns a number, or a tensor whose size is a number that only the device knows.
WAITING = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


@cache
def register() -> None:
    """Makes the device known to torch, once in a process."""
    _setup_privateuseone_for_python_backend(NAME, _Module())


class Away(Tensor):
    """A tensor on the accelerator; `values` are what it holds."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, requires_grad: bool = False) -> "Away":
        away = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        away.values = values
        return away

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Away({self.values})"

    def tolist(self) -> Any:
        """Python numbers; torch refuses to read those of a subclass."""
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} was called outside of `Accelerator`")


class Accelerator(TorchDispatchMode):
    """Runs operations for tensors on the device.

    Attributes:
        waits: where the host waited for the device: "file.py:function", and how often.
        largest: the number of bytes of the largest tensor that was copied to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        register()
        self.waits: Counter[str] = Counter()
        self.largest = 0
        self._before: list[bool] = []

    def __enter__(self) -> "Accelerator":
        self._before.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes a tensor on the CPU first, and copies it
        return super().__enter__()  # pyright: ignore[reportReturnType]

    def __exit__(self, *error: object) -> None:
        torch._C._set_only_lift_cpu_tensors(self._before.pop())
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        away = [x for x in tensors if isinstance(x, Away)]
        if func.namespace == "equipoise" and away:  # in Python: what it does inside is looked at as well
            with self:
                return _implementation(func)(*args, **kwargs)
        if away:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == NAME
        to_host = target is not None and not to_device
        if to_device:
            kwargs["device"] = torch.device("cpu")
        here = [x for x in tensors if not isinstance(x, Away) and x.ndim > 0]
        if away and here and func not in (aten.copy_.default,):
            raise RuntimeError(f"{func} mixes tensors on the device and on the CPU")
        self._note(func, args, away, to_host)
        out = func(*pytree.tree_map(_inner, args), **pytree.tree_map(_inner, kwargs))
        if func is aten.copy_.default:
            return args[0]
        if (away and not to_host) or to_device:
            return _wrapped(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: Any, away: list[Away], to_host: bool) -> None:
        if not away:
            return
        by_mask = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        down = func is aten.copy_.default and not isinstance(args[0], Away)
        if func in WAITING or by_mask or to_host or down:
            self.waits[_place()] += 1
            if to_host or down:
                self.largest = max(self.largest, away[0].numel() * away[0].element_size())


def _inner(x: Any) -> Any:
    return x.values if isinstance(x, Away) else x


def _wrapped(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Wraps results; an argument that was changed in place is returned itself."""
    same = {id(x.values): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Away)}

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return same[id(x)] if id(x) in same else Away(x)

    return pytree.tree_map(wrap, out)


@cache
def _implementation(func: Any) -> Any:
    """The Python function behind an operator of the library."""
    for key in (torch._C.DispatchKey.CompositeExplicitAutograd, torch._C.DispatchKey.CPU):
        if key in func.py_kernels:
            return func.py_kernels[key]
    return lambda *args, **kwargs: func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _place() -> str:
    """The innermost function of the library that is at work."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(SOURCE):
            return f"{os.path.relpath(frame.filename, SOURCE)}:{frame.name}"
    return "elsewhere"
