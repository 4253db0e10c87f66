# SPDX-License-Identifier: Apache-2.0
"""Lets the modules of this folder import each other under pytest, as they do where `make_golden.py` is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
