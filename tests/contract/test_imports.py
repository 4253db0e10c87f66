# SPDX-License-Identifier: Apache-2.0
"""What `import equipoise` costs: nothing that a training loop does not need."""

import json
from collections.abc import Callable

HEAVY = ("matplotlib", "typer", "ot", "ortools", "scipy", "numba", "hypothesis", "beartype", "jinja2")

SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import equipoise
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_import_loads_nothing_heavy(fresh_python: Callable[..., str]) -> None:
    assert set(json.loads(fresh_python(SCRIPT))) & set(HEAVY) == set()
