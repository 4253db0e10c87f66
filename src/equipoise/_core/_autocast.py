# SPDX-License-Identifier: Apache-2.0
"""Autocast, for tensors of every device."""

import torch


def autocast_device(device: torch.device) -> str:
    """Returns the kind of device to ask autocast about: torch has no autocast for "meta", where nothing is computed."""
    return "cpu" if device.type == "meta" else device.type
