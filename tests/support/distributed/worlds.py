# SPDX-License-Identifier: Apache-2.0
"""Which checks run on how many ranks."""

from support.distributed.checks import CHECKS

# What needs two axes, or is a matter of how ranks are counted, runs on four ranks; the rest on two.
_FOUR = (
    "parity-skip-iw",
    "parity-gm-iw-mix-2",
    "parity-switch",
    "parity-topk-2",
    "parity-priced",
    *(name for name in CHECKS if name.startswith(("ddp-", "fsdp-", "uneven-"))),
    "global-gm-iw-mix",
    "global-skip-iw-2",
    "global-switch",
    "global-uneven-gm",
    "copies",
    "clip",
    "noise",
    "resumed",
    "steps-gm-iw-mix-2",
)
_ONE = ("parity-skip-iw", "parity-gm-iw-mix-2", "global-gm-iw", "clip", "resumed")
WORLDS: dict[int, tuple[str, ...]] = {
    1: _ONE,
    2: tuple(name for name in CHECKS if not name.startswith(("ddp-", "fsdp-")) or name.endswith("-skip-iw")),
    4: _FOUR,
}
