# SPDX-License-Identifier: Apache-2.0
"""Figures that only a fresh process can give: import time, first call, peak memory.

Each probe is a short script for a new interpreter, which prints one line of JSON.
"""

import json
import os
import subprocess
import sys
from typing import Any

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_IMPORT = """
import json, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import equipoise
print(json.dumps([middle - start, time.perf_counter() - middle]))
"""

_FIRST_CALL = """
import json, time
import torch
import equipoise as eq
scores = torch.randn(4096, 64)
start = time.perf_counter()
eq.assign(scores)
print(json.dumps(time.perf_counter() - start))
"""

# On Linux, writing 5 to clear_refs lowers the recorded peak to what is resident now, so that the peak of the call is
# not hidden behind that of start-up.
_PEAK = """
import json, resource, sys
import torch

def resident(field):
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

def rise(call):
    try:
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
    except OSError:
        pass
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before)
"""

# The smaller problem loads the kernels that the large one needs; one much smaller would be solved by others.
_MEMORY = (
    _PEAK
    + """
import equipoise as eq
scores = torch.randn(131072, 64, dtype=getattr(torch, sys.argv[1]))
eq.assign(scores[:16384])
print(json.dumps(rise(lambda: eq.assign(scores)) / (scores.numel() * scores.element_size())))
"""
)

# One training step of a layer whose parameters are resident before it. A first step on fewer tokens loads kernels. The
# gradients of the parameters belong to the step.
_LAYER_MEMORY = (
    _PEAK
    + """
from equipoise_lab.bench._layer_models import LayerSize, named_layer, plain_step, training_step
name, size, seed = sys.argv[1], LayerSize(**json.loads(sys.argv[2])), int(sys.argv[3])
torch.manual_seed(seed)
layer = named_layer(name, size, seed)
step = plain_step if name.startswith("dense") else training_step
x, grad = torch.randn(size.tokens, size.dim, requires_grad=True), torch.randn(size.tokens, size.dim)
few = min(size.tokens, 128 * size.num_experts)
step(layer, x.detach()[:few].clone().requires_grad_(), grad[:few])
layer.zero_grad(set_to_none=True)
parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
print(json.dumps([rise(lambda: step(layer, x, grad)), parameters]))
"""
)


def probe_import(*, threads: int) -> tuple[float, float]:
    """Seconds that a fresh process takes to import torch, and then to import equipoise."""
    base, own = _ask(_IMPORT, threads=threads)
    return float(base), float(own)


def probe_first_call(*, threads: int) -> float:
    """Seconds of the first `eq.assign` of a fresh process, imports excluded."""
    return float(_ask(_FIRST_CALL, threads=threads))


def probe_memory(dtype: str, *, threads: int) -> float:
    """The rise of the resident peak during one call at 131,072 x 64, in multiples of the score matrix."""
    return float(_ask(_MEMORY, dtype, threads=threads))


def probe_layer_memory(name: str, size: dict[str, int], *, seed: int, threads: int) -> tuple[float, float]:
    """Bytes by which the resident peak rises in one training step of a layer, and bytes of its parameters.

    The rise includes gradients. The parameters were resident before.
    """
    rise, parameters = _ask(_LAYER_MEMORY, name, json.dumps(size), str(seed), threads=threads)
    return float(rise), float(parameters)


def _ask(script: str, *arguments: str, threads: int) -> Any:
    # Blocks of a megabyte and more go back to the system when they are freed, and so are not counted twice.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    environment |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"a fresh process could not measure: {last}")
    return json.loads(done.stdout.splitlines()[-1])
