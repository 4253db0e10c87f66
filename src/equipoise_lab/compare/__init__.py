# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts trained on real data: the library's recipes against Switch and BASE, tuned alike."""

from equipoise_lab.compare._compare import compare as compare
from equipoise_lab.compare._recipe import CONTENDERS as CONTENDERS
from equipoise_lab.compare._recipe import Comparison as Comparison
from equipoise_lab.compare._recipe import Run as Run
from equipoise_lab.compare._recipe import quick_comparison as quick_comparison
from equipoise_lab.compare._task import TASKS as TASKS
from equipoise_lab.compare._task import Split as Split
from equipoise_lab.compare._task import Task as Task
from equipoise_lab.compare._task import load_task as load_task
from equipoise_lab.compare._task import split_task as split_task
from equipoise_lab.compare._train import Trained as Trained
from equipoise_lab.compare._train import train as train
