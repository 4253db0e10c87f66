# SPDX-License-Identifier: Apache-2.0
"""Sampling experts for rows: pure functions of logits and noise."""

from equipoise.sampling._averaged import sample_averaged as sample_averaged
from equipoise.sampling._gumbel_matching import Marginals as Marginals
from equipoise.sampling._gumbel_matching import sample_gumbel_matching as sample_gumbel_matching
from equipoise.sampling._independent import sample_independent as sample_independent
from equipoise.sampling._rounds import DrawsWeighted as DrawsWeighted
from equipoise.sampling._rounds import sample_rounds as sample_rounds
from equipoise.sampling._sample import Sample as Sample
from equipoise.sampling._scope import THIS_PROCESS as THIS_PROCESS
from equipoise.sampling._scope import Scope as Scope
from equipoise.sampling._scope import this_process as this_process
from equipoise.sampling._skip import sample_skip as sample_skip

__all__ = [
    "DrawsWeighted",
    "Marginals",
    "Sample",
    "Scope",
    "THIS_PROCESS",
    "sample_averaged",
    "sample_gumbel_matching",
    "sample_independent",
    "sample_rounds",
    "sample_skip",
    "this_process",
]
