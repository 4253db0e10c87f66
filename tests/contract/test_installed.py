# SPDX-License-Identifier: Apache-2.0
"""What a user gets who installs the library without extras: everything works.

One fresh process stands for the installation. It refuses to import whatever the declared dependencies do not bring
along, and compiles the kernels that it needs from nothing: Numba, for one, compiles matrix products only where it finds
scipy. `test_warmup.py` shows that no kernel holds one.
"""

import importlib.metadata
import json
import re
from collections.abc import Callable
from pathlib import Path

DEPENDENCIES = ("torch", "numpy", "numba", "jaxtyping")
README = Path(__file__).parents[2] / "README.md"

INSTALLED = """
import json, pathlib, re, sys

class Without:
    # In place of all other finders: these names are as if they were not installed.
    def __init__(self, refused, finders):
        self.refused, self.finders = refused, finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.refused:
            return None
        specs = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in specs if spec is not None), None)

    def find_distributions(self, *context):  # packages ask for their own version
        for finder in self.finders:
            if hasattr(finder, "find_distributions"):
                yield from finder.find_distributions(*context)

readme, refused = sys.argv[1:]
sys.meta_path[:] = [Without(set(json.loads(refused)), sys.meta_path[:])]

try:
    import scipy
except ImportError:
    pass
else:
    raise AssertionError("scipy was not refused")

import torch
import equipoise as eq

torch.manual_seed(0)
names = {}
for block in re.findall(r"```python\\n(.*?)```", pathlib.Path(readme).read_text(encoding="utf-8"), flags=re.DOTALL):
    exec(compile(block, readme, "exec"), names)
scores = torch.randn(16_384, 64)
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    a = eq.assign(scores.to(dtype))
    assert (a.counts == 256).all() and a.gap <= 1e-9 * a.value, dtype

from equipoise.assignment._kernels import _newton

print(json.dumps([len(_newton.descend.stats.cache_misses), len(_newton.descend.stats.cache_hits)]))
"""


def closure(names: tuple[str, ...]) -> set[str]:
    """Distributions that these need, without any extra, and theirs."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        found.add(name)
        waiting += [re.match(r"[\w.-]+", r)[0] for r in requirements if "extra ==" not in r]
    return found


def others(distributions: set[str]) -> set[str]:
    """The top-level names that are installed, but not by these distributions."""
    owners = importlib.metadata.packages_distributions()
    return {
        module
        for module, names in owners.items()
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in names} & distributions
    }


def test_declared_dependencies_are_enough(fresh_python: Callable[..., str], tmp_path: Path) -> None:
    refused = others(closure(DEPENDENCIES) | {"equipoise"})
    assert not {"torch", "numpy", "numba", "llvmlite", "jaxtyping", "equipoise"} & refused
    assert {"scipy", "ot", "ortools", "matplotlib", "typer", "pytest"} <= refused
    cold = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "default"}
    printed = fresh_python(INSTALLED, str(README), json.dumps(sorted(refused)), **cold)
    assert json.loads(printed.splitlines()[-1]) == [2, 0]  # compiled once for each dtype, nothing loaded


def test_dependencies_are_declared() -> None:
    """What the test above allows is what the project asks for."""
    declared = {re.match(r"[\w.-]+", r)[0] for r in importlib.metadata.requires("equipoise") or [] if "extra" not in r}
    assert set(DEPENDENCIES) <= declared
