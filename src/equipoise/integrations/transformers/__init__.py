# SPDX-License-Identifier: Apache-2.0
"""equipoise's routers in Hugging Face transformers models, in three lines. Needs the extra `transformers`."""

from equipoise.integrations.transformers import _version

_version.check_version()

from equipoise.integrations.transformers import _experts  # noqa: E402
from equipoise.integrations.transformers._replay import RecordedCall as RecordedCall  # noqa: E402
from equipoise.integrations.transformers._replay import Replay as Replay  # noqa: E402
from equipoise.integrations.transformers._replay import RoutingRecord as RoutingRecord  # noqa: E402
from equipoise.integrations.transformers._replay import record_routing as record_routing  # noqa: E402
from equipoise.integrations.transformers._replay import replay_routing as replay_routing  # noqa: E402
from equipoise.integrations.transformers._swap import restore_routers as restore_routers  # noqa: E402
from equipoise.integrations.transformers._swap import swap_routers as swap_routers  # noqa: E402
from equipoise.integrations.transformers._trainer import RoutedTrainer as RoutedTrainer  # noqa: E402
from equipoise.integrations.transformers._trainer import RoutedTrainerMixin as RoutedTrainerMixin  # noqa: E402
from equipoise.integrations.transformers._trainer import token_losses as token_losses  # noqa: E402

_experts.register_experts()

__all__ = [
    "RecordedCall",
    "Replay",
    "RoutedTrainer",
    "RoutedTrainerMixin",
    "RoutingRecord",
    "record_routing",
    "replay_routing",
    "restore_routers",
    "swap_routers",
    "token_losses",
]
