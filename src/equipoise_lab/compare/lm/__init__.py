# SPDX-License-Identifier: Apache-2.0
"""Routers in a small language model, each tuned alike."""

from equipoise_lab.compare.lm._compare import compare_models as compare_models
from equipoise_lab.compare.lm._compare import read_tuned as read_tuned
from equipoise_lab.compare.lm._recipe import CONTENDERS as CONTENDERS
from equipoise_lab.compare.lm._recipe import LanguageModels as LanguageModels
from equipoise_lab.compare.lm._recipe import Run as Run
from equipoise_lab.compare.lm._recipe import quick_language_models as quick_language_models
from equipoise_lab.compare.lm._text import Text as Text
from equipoise_lab.compare.lm._text import Vocabulary as Vocabulary
from equipoise_lab.compare.lm._text import read_text as read_text
from equipoise_lab.compare.lm._train import Trained as Trained
from equipoise_lab.compare.lm._train import train as train
