# SPDX-License-Identifier: Apache-2.0
"""Routers of ours in Hugging Face transformers models, in three lines. Needs the extra `transformers`."""

from equipoise.integrations.transformers._version import check_version

check_version()

from equipoise.integrations.transformers._experts import register_experts  # noqa: E402
from equipoise.integrations.transformers._swap import restore_routers as restore_routers  # noqa: E402
from equipoise.integrations.transformers._swap import swap_routers as swap_routers  # noqa: E402

register_experts()

__all__ = ["restore_routers", "swap_routers"]
