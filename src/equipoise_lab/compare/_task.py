# SPDX-License-Identifier: Apache-2.0
"""The tasks: rows with labels, divided once and for all into what is trained on, what is tuned on and what is reported.

Legend: n rows, d features.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise._core import check_one_of

# The split belongs to the task: it is the same for every seed, setting and contender.
_SPLIT_SEED = 2109


@dataclass(frozen=True, slots=True)
class Split:
    """Rows with labels."""

    x: Float[Tensor, "n d"]  # the features
    y: Int[Tensor, "n"]  # the labels, 0 to the number of classes - 1

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.x.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A classification task."""

    train: Split  # what gradients come from
    validation: Split  # what settings are chosen on
    test: Split  # what is reported, once
    num_classes: int  # C

    @property
    def dim(self) -> int:
        """Features of a row, d."""
        return self.train.x.shape[1]


def split_task(x: Float[Tensor, "n d"], y: Int[Tensor, "n"], *, centred: bool = True) -> Task:
    """Divides rows at random into 60% for training, 20% for validation and 20% for the test.

    The features are `centred` on the mean of the training rows, unless asked otherwise: a router has no bias, and in a
    network what it sees is normalised.

    Example:
        >>> task = split_task(torch.arange(10.0)[:, None], torch.arange(10) % 2)
        >>> len(task.train), len(task.validation), len(task.test), task.num_classes
        (6, 2, 2, 2)
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    first, second = len(x) * 6 // 10, len(x) * 8 // 10
    if centred:
        x = x - x[order[:first]].mean(0)
    parts = [Split(x[rows], y[rows]) for rows in order.tensor_split([first, second])]
    return Task(train=parts[0], validation=parts[1], test=parts[2], num_classes=int(y.max()) + 1)


TASKS = ("digits", "digits-raw")
"""Pixels of handwritten digits, from 0 to 1: with their mean over the training rows taken off, or as they are."""


def load_task(name: str) -> Task:
    """Loads one of `TASKS`: 1,797 images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded.

    Raises:
        ValueError: there is no such task, or scikit-learn is missing.
    """
    check_one_of("task", name, TASKS)
    try:
        # By name: an extra that most environments do not have.
        datasets: Any = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ValueError("task 'digits' needs scikit-learn, which is missing: pip install 'equipoise[lab]'") from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels).long()
    return split_task(x, y, centred=name == "digits")
