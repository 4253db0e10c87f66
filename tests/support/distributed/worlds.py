# SPDX-License-Identifier: Apache-2.0
"""Which checks run on how many ranks, in every test run and in the slow one."""

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

# Every router on every number of ranks, eight included: before a release.
_COMPARED = tuple(name for name in CHECKS if name.startswith(("parity-", "steps-", "global-")))
SLOW_WORLDS: dict[int, tuple[str, ...]] = {
    1: tuple(name for name in _COMPARED if name not in (*_ONE, "global-gain")),
    4: tuple(name for name in _COMPARED if name not in _FOUR),
    8: tuple(name for name in _COMPARED if not name.startswith(("steps-", "global-uneven-"))),
}
