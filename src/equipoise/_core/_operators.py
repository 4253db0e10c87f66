# SPDX-License-Identifier: Apache-2.0
"""Operators: functions that `torch.compile` calls and does not look into."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

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
