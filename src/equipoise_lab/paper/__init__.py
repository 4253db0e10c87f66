# SPDX-License-Identifier: Apache-2.0
"""The paper's experiment, its figures, and its claims judged by rule."""

from equipoise_lab.paper._claims import claims_table as claims_table
from equipoise_lab.paper._claims import read_claims as read_claims
from equipoise_lab.paper._recipe import OPEN_CHOICES as OPEN_CHOICES
from equipoise_lab.paper._recipe import Paper as Paper
from equipoise_lab.paper._recipe import quick_recipe as quick_recipe
from equipoise_lab.paper._reproduce import reproduce as reproduce
from equipoise_lab.paper._results import Result as Result
from equipoise_lab.paper._results import Run as Run
from equipoise_lab.paper._results import read_results as read_results
from equipoise_lab.paper._sensitivity import total_steps as total_steps
from equipoise_lab.paper._train import train as train
