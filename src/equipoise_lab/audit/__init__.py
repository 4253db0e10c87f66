# SPDX-License-Identifier: Apache-2.0
"""The audit of many strategies and baselines at once: table, figures, file."""

from equipoise_lab.audit._recipe import BASELINES as BASELINES
from equipoise_lab.audit._recipe import Audit as Audit
from equipoise_lab.audit._recipe import measure as measure
from equipoise_lab.audit._recipe import prepare as prepare
from equipoise_lab.audit._report import audit_table as audit_table
from equipoise_lab.audit._report import save_figures as save_figures
from equipoise_lab.audit._report import verdict_text as verdict_text
from equipoise_lab.audit._report import write_figures as write_figures
