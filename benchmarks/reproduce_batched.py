# SPDX-License-Identifier: Apache-2.0
"""How much faster the experiment trains in batches than one run at a time.

The loop is what one writes first: two `torch.nn.Linear`, `torch.optim.Adam`, the library's sampler and estimator on a
single problem. Both do the same steps on the same noise; `tests/lab/paper/test_train.py` holds that they end at
the same parameters. One thread. Prints, for each method, the time of a step of one run in the loop and in the batch of
all seeds and temperatures of the paper, and their ratio; the median of three repeats.

Usage: python benchmarks/reproduce_batched.py [--steps 200] [--repeats 3]
"""

import argparse
import statistics
import time

import torch

import equipoise as eq
from equipoise.estimators import STRATEGIES
from equipoise_lab.paper import Paper, Run, train
from equipoise_lab.paper._task import draw_data


def loop(run: Run, recipe: Paper) -> None:
    """Trains one run the obvious way."""
    x, y = draw_data(0, recipe.num_points, recipe.noise_sd)
    gate, experts = torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)
    optimiser = torch.optim.Adam([*gate.parameters(), *experts.parameters()], lr=run.learning_rate)
    strategy, baseline = STRATEGIES[run.method], eq.EMABaseline(0.99, corrected=False)
    for _ in range(recipe.steps):
        a = gate(x[:, None])
        log_p = torch.log_softmax(torch.cat([torch.zeros_like(a), a], 1), 1)
        noise = strategy.draw_noise(log_p.shape)
        s, weight = strategy.draw(log_p.detach(), noise, temperature=run.temperature)
        losses = (y - experts(x[:, None]).gather(1, s.z[:, None])[:, 0]) ** 2
        loss = eq.reinforce(log_p, s, losses, baseline=baseline.value, weight=weight)
        baseline.update(losses.detach(), s)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Paper(steps=options.steps, losses=("reinforce",), variants=("plain",), sweeps=())
    print(f"{'method':<10}{'loop, us':>12}{'batch, us':>12}{'ratio':>8}   per run and step; {options.steps} steps")
    for name, runs in recipe.units().items():
        times: dict[str, list[float]] = {"loop": [], "batch": []}
        train(runs, Paper(steps=2))
        for _ in range(options.repeats):
            start = time.perf_counter()
            loop(next(run for run in runs if run.temperature == 1), recipe)
            times["loop"].append((time.perf_counter() - start) / options.steps)
            start = time.perf_counter()
            train(runs, recipe)
            times["batch"].append((time.perf_counter() - start) / options.steps / len(runs))
        one, many = (statistics.median(times[key]) for key in ("loop", "batch"))
        print(f"{runs[0].method:<10}{1e6 * one:>12.0f}{1e6 * many:>12.1f}{one / many:>8.0f}   {name}, {len(runs)} runs")


if __name__ == "__main__":
    main()
