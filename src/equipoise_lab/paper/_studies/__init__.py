# SPDX-License-Identifier: Apache-2.0
"""Studies of single statements of the paper: what needs no grid of training runs, and what looks inside one.

Each is a function that returns plain numbers, ready for JSON; `STUDIES` names them. Those of `ON_RECIPE` take the
recipe of the experiment as their first argument.
"""

from collections.abc import Callable
from typing import Any

from equipoise_lab.paper._studies import _elbo, _marginals, _maximum_entropy, _noise, _overview, _solver_time, _traces

STUDIES: dict[str, Callable[..., dict[str, Any]]] = {
    "overview": _overview.run,
    "marginals": _marginals.run,
    "maximum_entropy": _maximum_entropy.run,
    "solver_time": _solver_time.run,
    "elbo": _elbo.run,
    "noise": _noise.run,
    "traces": _traces.run,
}
ON_RECIPE = ("elbo", "noise", "traces")
