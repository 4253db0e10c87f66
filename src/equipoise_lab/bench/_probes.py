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

# Seconds that importing torch takes, and then importing equipoise.
IMPORT = """
import json, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import equipoise
print(json.dumps([middle - start, time.perf_counter() - middle]))
"""

# Seconds of the first call, imports excluded.
FIRST_CALL = """
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

# The rise of the resident peak during one call at 131,072 x 64, in multiples of the score matrix.
# The smaller problem loads the kernels that the large one needs; one much smaller would be solved by others.
MEMORY = (
    _PEAK
    + """
import equipoise as eq
scores = torch.randn(131072, 64, dtype=getattr(torch, sys.argv[1]))
eq.assign(scores[:16384])
print(json.dumps(rise(lambda: eq.assign(scores)) / (scores.numel() * scores.element_size())))
"""
)

# Bytes by which the resident peak rises in one training step of a layer, and bytes of its parameters, which are there
# before it. A first step on fewer tokens loads kernels. The gradients of the parameters belong to the step.
LAYER_MEMORY = (
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


def ask(script: str, *arguments: str, threads: int) -> Any:
    """Runs a script in a new interpreter and returns what it printed."""
    # Blocks of a megabyte and more go back to the system when they are freed, and so are not counted twice.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    environment |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"a fresh process could not measure: {last}")
    return json.loads(done.stdout.splitlines()[-1])
