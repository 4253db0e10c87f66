# SPDX-License-Identifier: Apache-2.0
"""Layers people can train: a mixture of experts for any model, with every router behind one interface."""

from equipoise.nn._auto import AutoProposal as AutoProposal
from equipoise.nn._bias_rules import LossFree as LossFree
from equipoise.nn._bias_rules import Priced as Priced
from equipoise.nn._bias_rules import RunningPrices as RunningPrices
from equipoise.nn._capture import RoutingSource as RoutingSource
from equipoise.nn._capture import capture as capture
from equipoise.nn._capture import emit as emit
from equipoise.nn._dispatch import Dispatcher as Dispatcher
from equipoise.nn._dispatch import LocalDispatcher as LocalDispatcher
from equipoise.nn._dispatch import LocalMetadata as LocalMetadata
from equipoise.nn._experts import Experts as Experts
from equipoise.nn._experts import MLPExperts as MLPExperts
from equipoise.nn._experts import ModuleExperts as ModuleExperts
from equipoise.nn._experts import SwiGLUExperts as SwiGLUExperts
from equipoise.nn._experts import make_experts as make_experts
from equipoise.nn._grouped import Grouped as Grouped
from equipoise.nn._layer_baselines import LayerBaselines as LayerBaselines
from equipoise.nn._moe import MoE as MoE
from equipoise.nn._monitor import RoutingWarning as RoutingWarning
from equipoise.nn._parameter_groups import parameter_groups as parameter_groups
from equipoise.nn._peer_rules import Base as Base
from equipoise.nn._peer_rules import Dense as Dense
from equipoise.nn._peer_rules import Hash as Hash
from equipoise.nn._peer_rules import SinkhornBase as SinkhornBase
from equipoise.nn._peer_rules import TopK as TopK
from equipoise.nn._plain_experts import experts_by_loop as experts_by_loop
from equipoise.nn._readout import Readout as Readout
from equipoise.nn._readout import ReadoutLoss as ReadoutLoss
from equipoise.nn._residual_baseline import ResidualBaseline as ResidualBaseline
from equipoise.nn._router import Router as Router
from equipoise.nn._routers import ROUTERS as ROUTERS
from equipoise.nn._routers import NamedRouter as NamedRouter
from equipoise.nn._routing import Routing as Routing
from equipoise.nn._routings import Routings as Routings
from equipoise.nn._rules import Choice as Choice
from equipoise.nn._rules import RouteRequest as RouteRequest
from equipoise.nn._rules import RoutingRule as RoutingRule
from equipoise.nn._rules import RuleTraits as RuleTraits
from equipoise.nn._rules import drop_overflow as drop_overflow
from equipoise.nn._sampling_rule import SamplingRule as SamplingRule
from equipoise.nn._schedules import CosineSchedule as CosineSchedule
from equipoise.nn._schedules import ExponentialSchedule as ExponentialSchedule
from equipoise.nn._schedules import LinearSchedule as LinearSchedule
from equipoise.nn._schedules import Schedule as Schedule
from equipoise.nn._selection import choose as choose
from equipoise.nn._selection import choose_top as choose_top
from equipoise.nn._stats import RoutingStats as RoutingStats
from equipoise.nn._surrogate import Surrogate as Surrogate

__all__ = [
    "AutoProposal",
    "Base",
    "Choice",
    "CosineSchedule",
    "Dense",
    "Dispatcher",
    "Experts",
    "ExponentialSchedule",
    "Grouped",
    "Hash",
    "LayerBaselines",
    "LinearSchedule",
    "LocalDispatcher",
    "LocalMetadata",
    "LossFree",
    "MLPExperts",
    "MoE",
    "ModuleExperts",
    "NamedRouter",
    "Priced",
    "ROUTERS",
    "Readout",
    "ReadoutLoss",
    "ResidualBaseline",
    "RouteRequest",
    "Router",
    "Routing",
    "RoutingRule",
    "RoutingSource",
    "RoutingStats",
    "RoutingWarning",
    "Routings",
    "RuleTraits",
    "RunningPrices",
    "Schedule",
    "SinkhornBase",
    "SamplingRule",
    "Surrogate",
    "SwiGLUExperts",
    "TopK",
    "capture",
    "choose",
    "choose_top",
    "drop_overflow",
    "emit",
    "experts_by_loop",
    "make_experts",
    "parameter_groups",
]
