# SPDX-License-Identifier: Apache-2.0
"""Which transformers the integration knows."""

try:
    import transformers
except ModuleNotFoundError as error:
    raise ImportError(
        "transformers must be installed for equipoise.integrations.transformers: pip install 'equipoise[transformers]'"
    ) from error

KNOWN = ("5.22",)
"""The versions whose contract between gates, experts and Trainer was tried."""


def check_version() -> None:
    """Requires a version of transformers that the integration knows.

    Raises:
        ImportError: it is another one.
    """
    found = transformers.__version__
    if ".".join(found.split(".")[:2]) not in KNOWN:
        raise ImportError(
            f"transformers must be {' or '.join(f'{known}.*' for known in KNOWN)} for "
            f"equipoise.integrations.transformers, "
            f"which does not know how gates and experts of other versions meet, got {found}: pip install "
            f"'equipoise[transformers]'"
        )
