# SPDX-License-Identifier: Apache-2.0
"""Layers people can train: a mixture of experts for any model, with every router behind one interface."""

from equipoise.nn._bias_rules import expert_bias as expert_bias
from equipoise.nn._capture import RoutingSource as RoutingSource
from equipoise.nn._capture import capture as capture
from equipoise.nn._capture import emit as emit
from equipoise.nn._dispatch import Dispatcher as Dispatcher
from equipoise.nn._dispatch import LocalDispatcher as LocalDispatcher
from equipoise.nn._experts import Experts as Experts
from equipoise.nn._grouped import Grouped as Grouped
from equipoise.nn._make_router import RoutingOptions as RoutingOptions
from equipoise.nn._make_router import make_router as make_router
from equipoise.nn._moe import MoE as MoE
from equipoise.nn._monitor import RoutingWarning as RoutingWarning
from equipoise.nn._parameter_groups import parameter_groups as parameter_groups
from equipoise.nn._readout import Readout as Readout
from equipoise.nn._readouts import Readouts as Readouts
from equipoise.nn._residual_baseline import ResidualBaseline as ResidualBaseline
from equipoise.nn._router import Router as Router
from equipoise.nn._routers import ROUTERS as ROUTERS
from equipoise.nn._routing import Routing as Routing
from equipoise.nn._rules import RouteRequest as RouteRequest
from equipoise.nn._rules import RoutingRule as RoutingRule
from equipoise.nn._rules import RuleTraits as RuleTraits
from equipoise.nn._sampling_rule import SamplingRule as SamplingRule
from equipoise.nn._schedules import CosineSchedule as CosineSchedule
from equipoise.nn._schedules import ExponentialSchedule as ExponentialSchedule
from equipoise.nn._schedules import LinearSchedule as LinearSchedule
from equipoise.nn._scoring import Scoring as Scoring
from equipoise.nn._selection import choose as choose
from equipoise.nn._selection import choose_top as choose_top
from equipoise.nn._surrogate import Surrogate as Surrogate
from equipoise.nn._surrogate import SurrogateLoss as SurrogateLoss
from equipoise.nn._token_prior import TokenPrior as TokenPrior

__all__ = [
    "CosineSchedule",
    "Dispatcher",
    "Experts",
    "ExponentialSchedule",
    "Grouped",
    "LinearSchedule",
    "LocalDispatcher",
    "MoE",
    "ROUTERS",
    "Readout",
    "Readouts",
    "ResidualBaseline",
    "RouteRequest",
    "Router",
    "Routing",
    "RoutingOptions",
    "RoutingRule",
    "RoutingSource",
    "RoutingWarning",
    "RuleTraits",
    "SamplingRule",
    "Scoring",
    "Surrogate",
    "SurrogateLoss",
    "TokenPrior",
    "capture",
    "choose",
    "choose_top",
    "emit",
    "expert_bias",
    "make_router",
    "parameter_groups",
]
