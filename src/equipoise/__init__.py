# SPDX-License-Identifier: Apache-2.0
"""Exact balanced assignment and unbiased gradient estimation for sparse mixtures of experts."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from equipoise._warmup import warmup as warmup
from equipoise.assignment import Assignment as Assignment
from equipoise.assignment import assign as assign
from equipoise.assignment import conditional_values as conditional_values
from equipoise.balancing import Balanced as Balanced
from equipoise.balancing import ConvergenceWarning as ConvergenceWarning
from equipoise.balancing import sinkhorn as sinkhorn
from equipoise.estimators import PAPER_STRATEGIES as PAPER_STRATEGIES
from equipoise.estimators import STRATEGIES as STRATEGIES
from equipoise.estimators import EMABaseline as EMABaseline
from equipoise.estimators import Noise as Noise
from equipoise.estimators import RegressionCritic as RegressionCritic
from equipoise.estimators import Strategy as Strategy
from equipoise.estimators import conditional_entropy_loss as conditional_entropy_loss
from equipoise.estimators import draws_baseline as draws_baseline
from equipoise.estimators import gate as gate
from equipoise.estimators import gated_loss as gated_loss
from equipoise.estimators import get_strategy as get_strategy
from equipoise.estimators import importance_weight as importance_weight
from equipoise.estimators import load_balance_loss as load_balance_loss
from equipoise.estimators import marginal_entropy_loss as marginal_entropy_loss
from equipoise.estimators import reinforce as reinforce
from equipoise.estimators import z_loss as z_loss
from equipoise.ops import draw_gumbel as draw_gumbel
from equipoise.sampling import Sample as Sample
from equipoise.sampling import sample_averaged as sample_averaged
from equipoise.sampling import sample_gumbel_matching as sample_gumbel_matching
from equipoise.sampling import sample_independent as sample_independent
from equipoise.sampling import sample_rounds as sample_rounds
from equipoise.sampling import sample_skip as sample_skip

if TYPE_CHECKING:
    from equipoise import audit as audit
    from equipoise import distributed as distributed
    from equipoise import nn as nn

__version__ = "0.1.0"

__all__ = [
    "Assignment",
    "Balanced",
    "ConvergenceWarning",
    "EMABaseline",
    "Noise",
    "PAPER_STRATEGIES",
    "RegressionCritic",
    "STRATEGIES",
    "Sample",
    "Strategy",
    "__version__",
    "assign",
    "audit",
    "conditional_entropy_loss",
    "conditional_values",
    "distributed",
    "draw_gumbel",
    "draws_baseline",
    "gate",
    "gated_loss",
    "get_strategy",
    "importance_weight",
    "load_balance_loss",
    "marginal_entropy_loss",
    "nn",
    "reinforce",
    "sample_averaged",
    "sample_gumbel_matching",
    "sample_independent",
    "sample_rounds",
    "sample_skip",
    "sinkhorn",
    "warmup",
    "z_loss",
]


def __getattr__(name: str) -> ModuleType:
    """Imports `nn` and what stands above when first asked for: who needs only a solver does not wait for layers."""
    if name in ("audit", "distributed", "nn"):
        return importlib.import_module(f"equipoise.{name}")
    raise AttributeError(f"module 'equipoise' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, imported or not."""
    return sorted(__all__)
