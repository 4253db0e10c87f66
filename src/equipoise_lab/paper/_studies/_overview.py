# SPDX-License-Identifier: Apache-2.0
"""The paper's figure 1 as numbers: expectations and samples, balanced and not, for one small router.

Legend: n = 12 rows (datapoints), k = 3 columns (experts), capacity c = 4.
"""

from typing import Any

import torch

from equipoise.balancing import sinkhorn
from equipoise.ops import draw_gumbel
from equipoise.sampling import sample_gumbel_matching, sample_independent, sample_skip

NUM_POINTS = 12
NUM_EXPERTS = 3
# The router favours the first expert, as routers do before anything balances them.
_PREFERENCE = (0.9, 0.0, -0.7)


def run(*, quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Draws a router and one sample of each kind from it, all three with the same Gumbel noise.

    Args:
        quick: the same; it takes no time.
        seed: of logits and noise.

    Returns:
        `capacity`; `router` (p) and `sinkhorn` (p balanced in expectation), n lists of k probabilities, rows in order
        of their most probable expert; `independent` and `balanced` (Gumbel-Matching), the expert of each row; `skip`,
        the same experts as `independent` with `kept` saying which rows their experts process.

    Example:
        >>> result = run()
        >>> [result["balanced"].count(expert) for expert in range(3)]
        [4, 4, 4]
    """
    del quick
    generator = torch.Generator().manual_seed(seed)
    shape = [NUM_POINTS, NUM_EXPERTS]
    logits = 1.3 * torch.randn(shape, generator=generator, dtype=torch.float64) + torch.tensor(_PREFERENCE)
    p = logits.softmax(-1)
    best, expert = p.max(-1)
    log_p = p[(expert - best).argsort()].log()
    gumbel = draw_gumbel(shape, generator=generator, dtype=torch.float64)
    priority = torch.rand(NUM_POINTS, generator=generator, dtype=torch.float64)
    skipped = sample_skip(log_p, gumbel, priority)
    return {
        "seed": seed,
        "capacity": NUM_POINTS // NUM_EXPERTS,
        "router": log_p.exp().tolist(),
        "sinkhorn": sinkhorn(log_p, tolerance=1e-9).log_p.exp().tolist(),
        "independent": sample_independent(log_p, gumbel).z.tolist(),
        "skip": skipped.z.tolist(),
        "kept": skipped.kept.tolist(),
        "balanced": sample_gumbel_matching(log_p, gumbel).z.tolist(),
    }
