# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts trained on real data: the library's recipes against Switch and BASE, tuned alike."""

from equipoise.experiments.training._compare import Compared as Compared
from equipoise.experiments.training._compare import compare as compare
from equipoise.experiments.training._contenders import CONTENDERS as CONTENDERS
from equipoise.experiments.training._contenders import Contender as Contender
from equipoise.experiments.training._contenders import Setting as Setting
from equipoise.experiments.training._recipe import Comparison as Comparison
from equipoise.experiments.training._recipe import Run as Run
from equipoise.experiments.training._recipe import quick as quick_comparison
from equipoise.experiments.training._summary import Difference as Difference
from equipoise.experiments.training._summary import Outcome as Outcome
from equipoise.experiments.training._tables import result_tables as result_tables
from equipoise.experiments.training._task import TASKS as TASKS
from equipoise.experiments.training._task import Split as Split
from equipoise.experiments.training._task import Task as Task
from equipoise.experiments.training._task import load_task as load_task
from equipoise.experiments.training._task import split_task as split_task
from equipoise.experiments.training._train import Trained as Trained
from equipoise.experiments.training._train import train as train

__all__ = [
    "CONTENDERS",
    "TASKS",
    "Compared",
    "Comparison",
    "Contender",
    "Difference",
    "Outcome",
    "Run",
    "Setting",
    "Split",
    "Task",
    "Trained",
    "compare",
    "load_task",
    "quick_comparison",
    "result_tables",
    "split_task",
    "train",
]
