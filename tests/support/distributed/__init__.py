# SPDX-License-Identifier: Apache-2.0
"""What ranks run in the tests of `equipoise.distributed`; started by `tests/distributed/conftest.py`."""
