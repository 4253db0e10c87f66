# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on torch.distributed: experts spread over ranks, tokens exchanged, decisions over all of them."""

from equipoise.distributed._average import average_gradients as average_gradients
from equipoise.distributed._clip import clip_grad_norm_ as clip_grad_norm_
from equipoise.distributed._exchange import AllToAllDispatcher as AllToAllDispatcher
from equipoise.distributed._parallelize import parallelize as parallelize
from equipoise.distributed._ranks import RankError as RankError
from equipoise.distributed._training_state import TrainingState as TrainingState

__all__ = [
    "AllToAllDispatcher",
    "RankError",
    "TrainingState",
    "average_gradients",
    "clip_grad_norm_",
    "parallelize",
]
