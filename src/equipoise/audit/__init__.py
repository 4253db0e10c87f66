# SPDX-License-Identifier: Apache-2.0
"""Is a strategy unbiased, and at what variance and cost? Monte-Carlo gradients against the exact one.

`audit` answers it for any strategy, yours included, with declared error rates. `Collector` and `judge` are the test
alone, for any random vector whose mean is claimed.
"""

from equipoise.audit._audit import audit as audit
from equipoise.audit._audit import check_strategy as check_strategy
from equipoise.audit._baselines import BASELINES as BASELINES
from equipoise.audit._baselines import DRAWS as DRAWS
from equipoise.audit._baselines import Control as Control
from equipoise.audit._baselines import NoBaseline as NoBaseline
from equipoise.audit._conditions import Conditions as Conditions
from equipoise.audit._conditions import Problem as Problem
from equipoise.audit._conditions import draw_problem as draw_problem
from equipoise.audit._result import GROUPS as GROUPS
from equipoise.audit._result import AuditResult as AuditResult
from equipoise.audit._result import Finding as Finding
from equipoise.audit._statistics import CONFIDENCE as CONFIDENCE
from equipoise.audit._statistics import FALSE_ALARM as FALSE_ALARM
from equipoise.audit._statistics import POWER as POWER
from equipoise.audit._statistics import TOLERANCE as TOLERANCE
from equipoise.audit._statistics import Collector as Collector
from equipoise.audit._statistics import Evidence as Evidence
from equipoise.audit._statistics import Judgement as Judgement
from equipoise.audit._statistics import Tails as Tails
from equipoise.audit._statistics import Verdict as Verdict
from equipoise.audit._statistics import judge as judge

__all__ = [
    "AuditResult",
    "BASELINES",
    "CONFIDENCE",
    "Collector",
    "Conditions",
    "Control",
    "DRAWS",
    "Evidence",
    "FALSE_ALARM",
    "Finding",
    "GROUPS",
    "Judgement",
    "NoBaseline",
    "POWER",
    "Problem",
    "TOLERANCE",
    "Tails",
    "Verdict",
    "audit",
    "check_strategy",
    "draw_problem",
    "judge",
]
