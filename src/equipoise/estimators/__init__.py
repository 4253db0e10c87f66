# SPDX-License-Identifier: Apache-2.0
"""Gradient estimates from sampled experts: weights, surrogates, baselines, balance losses, and the named strategies."""

from equipoise.estimators._balance_losses import conditional_entropy_loss as conditional_entropy_loss
from equipoise.estimators._balance_losses import load_balance_loss as load_balance_loss
from equipoise.estimators._balance_losses import marginal_entropy_loss as marginal_entropy_loss
from equipoise.estimators._balance_losses import mean_probabilities as mean_probabilities
from equipoise.estimators._balance_losses import z_loss as z_loss
from equipoise.estimators._baselines import EMABaseline as EMABaseline
from equipoise.estimators._baselines import draws_baseline as draws_baseline
from equipoise.estimators._baselines import ema_update as ema_update
from equipoise.estimators._baselines import leave_one_out_baseline as leave_one_out_baseline
from equipoise.estimators._critic import RegressionCritic as RegressionCritic
from equipoise.estimators._gating import gate as gate
from equipoise.estimators._gating import gated_loss as gated_loss
from equipoise.estimators._protocol import Noise as Noise
from equipoise.estimators._protocol import Strategy as Strategy
from equipoise.estimators._protocol import StrategyTraits as StrategyTraits
from equipoise.estimators._protocol import check_strategy as check_strategy
from equipoise.estimators._protocol import draw_noise as draw_noise
from equipoise.estimators._protocol import read_traits as read_traits
from equipoise.estimators._reinforce import expected_critic as expected_critic
from equipoise.estimators._reinforce import reinforce as reinforce
from equipoise.estimators._reinforce import score_function as score_function
from equipoise.estimators._strategies import PAPER_STRATEGIES as PAPER_STRATEGIES
from equipoise.estimators._strategies import STRATEGIES as STRATEGIES
from equipoise.estimators._strategies import get_strategy as get_strategy
from equipoise.estimators._weighted_sampler import WeightedSampler as WeightedSampler
from equipoise.estimators._weights import importance_weight as importance_weight
from equipoise.estimators._weights import over_batch as over_batch
from equipoise.estimators._weights import per_expert as per_expert
from equipoise.estimators._weights import probability_ratio as probability_ratio

__all__ = [
    "EMABaseline",
    "Noise",
    "PAPER_STRATEGIES",
    "RegressionCritic",
    "STRATEGIES",
    "Strategy",
    "StrategyTraits",
    "WeightedSampler",
    "check_strategy",
    "conditional_entropy_loss",
    "draw_noise",
    "draws_baseline",
    "ema_update",
    "expected_critic",
    "gate",
    "gated_loss",
    "get_strategy",
    "importance_weight",
    "leave_one_out_baseline",
    "load_balance_loss",
    "marginal_entropy_loss",
    "mean_probabilities",
    "over_batch",
    "per_expert",
    "probability_ratio",
    "read_traits",
    "reinforce",
    "score_function",
    "z_loss",
]
