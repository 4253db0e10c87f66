# SPDX-License-Identifier: Apache-2.0
"""Is a strategy unbiased, and at what variance and cost? Monte-Carlo gradients against the exact one."""

from equipoise.experiments.audit._baselines import DRAWS as DRAWS
from equipoise.experiments.audit._cost_figure import save_cost_figure as save_cost_figure
from equipoise.experiments.audit._draws import Outcome as Outcome
from equipoise.experiments.audit._draws import measure as measure
from equipoise.experiments.audit._draws import prepare as prepare
from equipoise.experiments.audit._figure import save_figure as save_figure
from equipoise.experiments.audit._recipe import BASELINES as BASELINES
from equipoise.experiments.audit._recipe import Audit as Audit
from equipoise.experiments.audit._recipe import Baseline as Baseline
from equipoise.experiments.audit._recipe import Problem as Problem
from equipoise.experiments.audit._recipe import draw_problem as draw_problem
from equipoise.experiments.audit._report import Finding as Finding
from equipoise.experiments.audit._report import audit_table as audit_table
from equipoise.experiments.audit._report import findings as findings
from equipoise.experiments.audit._report import judge_outcome as judge_outcome
from equipoise.experiments.audit._report import verdict_text as verdict_text
from equipoise.experiments.audit._report import write_figures as write_figures
from equipoise.experiments.audit._statistics import Collector as Collector
from equipoise.experiments.audit._statistics import Evidence as Evidence
from equipoise.experiments.audit._statistics import Judgement as Judgement
from equipoise.experiments.audit._statistics import Tails as Tails
from equipoise.experiments.audit._statistics import judge as judge
