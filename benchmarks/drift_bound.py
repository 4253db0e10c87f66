# SPDX-License-Identifier: Apache-2.0
"""How near to the floor any average of past prices can come while logits drift.

`equipoise bench balance` measures `priced` on logits that drift. The exact prices of one batch are those of the
distribution plus sampling noise, and the distribution moves by independent steps. With both covariances known, the best
linear prediction is Kalman's filter, which no router can have, since it knows neither. This script estimates both from
the distribution itself, runs the filter with them beside `priced`, and prints MaxVio on fresh batches relative to the
floor: the mean over seeds, and over fresh batches after 20, 25, ..., 40 observed ones. It also prints what exact prices
of the distribution before its last move give, which is the limit for filters of any kind.

Usage: python benchmarks/drift_bound.py [--experts 64] [--top-k 8] [--seeds 8]
"""

import argparse
from statistics import fmean

import torch
from torch import Tensor

from equipoise.nn import choose_top, expert_bias
from equipoise_lab.bench._balance import RULES, _mean_violation, _request, _Source

ROWS, MANY, DRIFT = 4096, 131_072, 0.01
MEASURED = range(20, 41, 5)


def filter_gain(source: _Source, top_k: int) -> Tensor:
    """Kalman's gain in the steady state, for a bias that is observed with noise and takes a random walk."""
    noisy = torch.stack([expert_bias(source.draw(ROWS), top_k) for _ in range(200)]).double()
    start, features = source.weight.clone(), torch.randn(MANY // 2, source.weight.shape[0] - 1)

    def exact() -> Tensor:
        return expert_bias(features @ source.weight[:-1] + source.weight[-1], top_k).double()

    before, moves = exact(), list[Tensor]()
    for _ in range(150):  # moves of ten times the size, on the same rows, so that their noise is not seen as drift
        source.weight, source.drift = start.clone(), 10 * DRIFT
        source.move()
        moves.append((exact() - before) / 10)
    source.weight, source.drift = start, DRIFT
    noise, drift = torch.cov(noisy.T), torch.cov(torch.stack(moves).T)
    error, gain = noise.clone(), torch.zeros_like(noise)
    for _ in range(500):
        error = error + drift
        gain = error @ torch.linalg.pinv(error + noise, rtol=1e-6)
        error = error - gain @ error
    return gain


def measure(num_experts: int, top_k: int, seed: int, ratios: dict[str, list[float]]) -> None:
    """Adds the ratios to the floor of one seed."""
    torch.manual_seed(seed)
    source, rule = _Source(num_experts, DRIFT, seed), RULES["priced"](num_experts, top_k)
    gain, state = filter_gain(source, top_k), None
    for step in range(1, MEASURED[-1] + 1):
        batch = _request(source.draw(ROWS))
        rule.observe(rule(batch.logits, batch))
        solved = expert_bias(batch.logits, top_k).double()
        state = solved if state is None else state + gain @ (solved - state)
        before = expert_bias(source.draw(MANY), top_k) if step in MEASURED else None
        source.move()
        if before is None:
            continue
        floor = expert_bias(source.draw(MANY), top_k)
        fresh = [_request(source.draw(ROWS)) for _ in range(8)]

        def violation(bias: Tensor, fresh: list = fresh) -> float:
            return _mean_violation([choose_top(x.logits + bias, x, top_k=top_k) for x in fresh])

        least = violation(floor)
        ratios["exact prices before the last move"].append(violation(before) / least)
        ratios["Kalman's filter, covariances known"].append(violation(state.float()) / least)
        ratios["priced"].append(_mean_violation([rule(x.logits, x) for x in fresh]) / least)


def main() -> None:
    """Prints the mean ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {
        name: [] for name in ("exact prices before the last move", "Kalman's filter, covariances known", "priced")
    }
    for seed in range(6000, 6000 + options.seeds):
        measure(options.experts, options.top_k, seed, ratios)
    for name, found in ratios.items():
        print(f"{name}: {fmean(found):.3f} times the floor")


if __name__ == "__main__":
    main()
