# SPDX-License-Identifier: Apache-2.0
"""Operators: functions that `torch.compile` calls and does not look into."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from equipoise._core._transforms import reads_values

F = TypeVar("F", bound=Callable[..., Any])


def operator(name: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Registers a function as the operator `torch.ops.equipoise.<name>`, for tensors on any device.

    What `torch.library.custom_op` adds to this costs more than the call: it prepares for gradients, and makes sure that
    no input is returned. So this is for functions that see no gradients (callers detach) and return new tensors only.

    Args:
        name: of the operator.
        fake: what tells the shapes of the results without computing them.
    """

    def register(function: F) -> F:
        qualified = f"equipoise::{name}"
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, "CompositeExplicitAutograd", function)
        torch.library.register_fake(qualified, fake)
        return function

    return register


def value_check(name: str) -> Callable[[F], F]:
    """Registers a check that has to read values, and that returns a tensor like its first argument.

    `torch.compile` calls it as the operator `torch.ops.equipoise.<name>`, since values are not known while it traces.
    Eager code on the CPU calls the function itself, which takes a third of the time.

    Args:
        name: of the operator.
    """

    def register(function: F) -> F:
        called = torch.library.custom_op(f"equipoise::{name}", function, mutates_args=())
        called.register_fake(_like_the_first)

        @functools.wraps(function)
        def check(*arguments: Any) -> Any:
            if torch.compiler.is_compiling() or not reads_values(*(x for x in arguments if isinstance(x, Tensor))):
                return called(*arguments)
            return function(*arguments)

        return cast(F, check)

    return register


def _like_the_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)
