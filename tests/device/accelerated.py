# SPDX-License-Identifier: Apache-2.0
"""Run by `test_accelerator.py` in a new interpreter, because a pretended device stays known to torch for good.

Each part computes on the CPU and on the device, from the same noise, and compares. A tensor that lands on the CPU by
accident meets one on the device sooner or later, which `Accelerator` refuses, or is found among the results. Prints the
name of each part that held, and the places that made the host wait.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import equipoise as eq
from equipoise.assignment import assign_with_traffic, detour_costs
from support.accelerator import NAME, Accelerator, Away, register

PLACES: Counter[str] = Counter()


def compare(compute: Callable[[str], Any], tolerance: float = 1e-5) -> Accelerator:
    """Computes on both, and requires results on the device that are equal to those on the CPU."""
    torch.manual_seed(0)
    here = pytree.tree_leaves(compute("cpu"))
    torch.manual_seed(0)
    with Accelerator() as accelerator:
        away = pytree.tree_leaves(compute(NAME))
    assert len(here) == len(away) > 0
    for x, y in zip(here, away, strict=True):
        if isinstance(x, Tensor):
            assert isinstance(y, Away), f"on the CPU: {y}"
            torch.testing.assert_close(y.values, x.detach(), rtol=tolerance, atol=tolerance)
    PLACES.update(accelerator.waits)
    return accelerator


def fields(a: eq.Assignment) -> list[Tensor]:
    """What does not depend on which of several optimal prices were found; the order of a row's experts does."""
    return [a.z.sort(-1).values if a.z.ndim > a.mask.ndim else a.z, a.counts, a.capacity, a.mask, a.value, a.gap]


def matrix(device: str, n: int = 4000, k: int = 16) -> Tensor:
    logits = torch.randn(n, k, device=device) + torch.linspace(0, 2, k, device=device)
    return logits - torch.empty(n, k, device=device).exponential_().log()


def assignment() -> None:
    for top_k in (None, 3):
        seen = compare(lambda device, top_k=top_k: fields(eq.assign(matrix(device), top_k=top_k)))
        assert set(seen.waits) == {"assignment/_exchange.py:read"}
        assert seen.waits.total() <= 8
        assert seen.largest <= 0.25 * 4000 * 16 * 4, "much of the matrix was copied"

    def difficult(device: str) -> Any:
        scores = matrix(device).reshape(2, 2000, 16).double()
        mask = torch.rand(2, 2000, device=device) < 0.8
        capacity = torch.full([2, 16], 150, device=device)
        capacity[:, 2] = 0
        a = eq.assign(scores, capacity, mask=mask)
        return fields(eq.assign(scores, capacity, mask=mask, prices=a.prices))

    compare(difficult)


def traffic_is_counted_honestly() -> None:
    """What `Traffic` says is what the device saw."""
    for shape, prices in [((4000, 16), False), ((40, 16), False), ((3, 2000, 16), True)]:
        with Accelerator() as accelerator:
            scores = torch.randn(*shape, device=NAME)
            start = torch.zeros([*shape[:-2], 16], device=NAME) if prices else None
            accelerator.waits.clear()
            _, traffic = assign_with_traffic(scores, prices=start)
            assert accelerator.waits.total() == traffic.waits, (accelerator.waits, traffic)
            assert accelerator.largest <= traffic.bytes_copied


def conditional_values() -> None:
    def compute(device: str) -> Any:
        scores = matrix(device).double()
        a = eq.assign(scores)
        return eq.conditional_values(scores, a), detour_costs(scores, a)

    seen = compare(compute)
    assert seen.largest <= 0.25 * 4000 * 16 * 8, "much of the matrix was copied"


def samplers() -> None:
    def compute(device: str) -> Any:
        logits = torch.randn(4000, 16, device=device)
        gumbel, priority = eq.draw_gumbel([4000, 16], device=device), torch.rand(4000, device=device)
        samples = [
            eq.sample_independent(logits, gumbel),
            eq.sample_skip(logits, gumbel, priority),
            eq.sample_gumbel_matching(logits, gumbel),
            eq.sample_gumbel_matching(logits, gumbel, eps=0.2, coin=priority, capacity=300),
        ]
        return [(s.z, s.log_q, s.kept, s.keep_weight) for s in samples]

    seen = compare(compute, 1e-4)
    assert seen.largest <= 0.25 * 4000 * 16 * 4, "much of the matrix was copied"


def balancing() -> None:
    def compute(device: str) -> Any:
        logits = torch.randn(64, 8, device=device, requires_grad=True)
        b = eq.sinkhorn(logits, 9)
        b.log_p.square().mean().backward()
        return b.log_p.detach(), b.prices, b.converged, logits.grad

    compare(compute)


def estimators() -> None:
    for strategy in eq.STRATEGIES.values():

        def compute(device: str, strategy: Any = strategy) -> Any:
            logits = torch.randn(64, 8, device=device, requires_grad=True)
            log_p = logits.log_softmax(-1)
            noise = strategy.draw_noise([64, 8], device=device)
            sample, weight = strategy.draw(log_p, noise, capacity=10)
            losses = torch.rand(64, device=device)
            baseline = eq.EMABaseline()
            baseline.update(losses, sample)
            loss = eq.reinforce(log_p, sample, losses, baseline=baseline.value, weight=weight)
            loss = loss + eq.gated_loss(log_p, sample, losses * eq.gate(log_p, sample), weight=weight)
            loss = loss + eq.marginal_entropy_loss(log_p) + eq.z_loss(logits) + eq.load_balance_loss(log_p)
            loss.backward()
            return loss.detach(), logits.grad

        compare(compute, 1e-4)


def layers() -> None:
    for router in eq.nn.ROUTERS:

        def compute(device: str, router: str = router) -> Any:
            moe = eq.nn.MoE(8, 4, hidden_dim=8, router=router, device=device)
            surrogate = eq.nn.Surrogate().to(device)
            for _ in range(2):  # the second step sees what the first has learnt: prices, biases, baselines
                with eq.nn.capture(moe) as routings:
                    out = moe(torch.randn(64, 8, device=device))
                loss = surrogate(out.square().mean(-1), routings)
                loss.backward()
            moe.eval()
            evaluated = moe(torch.randn(64, 8, device=device))
            grads = [x.grad for x in moe.parameters() if x.grad is not None]
            return out.detach(), loss.detach(), evaluated.detach(), grads, list(moe.buffers())

        compare(compute, 1e-4)


def several_experts() -> None:
    for router in ("base", "priced", "topk", "quantile"):

        def compute(device: str, router: str = router) -> Any:
            moe = eq.nn.MoE(8, 4, hidden_dim=8, router=router, top_k=2, device=device)
            out = moe(torch.randn(64, 8, device=device))
            out.square().mean().backward()
            bias = eq.nn.expert_bias(torch.randn(64, 4, device=device), 2)
            return out.detach(), bias, list(moe.buffers())

        compare(compute, 1e-4)


if __name__ == "__main__":
    register()
    for part in (
        assignment,
        traffic_is_counted_honestly,
        conditional_values,
        samplers,
        balancing,
        estimators,
        layers,
        several_experts,
    ):
        part()
        sys.stdout.write(f"{part.__name__}\n")
    sys.stdout.write(f"places {' '.join(sorted(PLACES))}\n")
    sys.stdout.flush()
    os._exit(0)  # all is written; a thread of torch's for the pretended device now and then aborts a regular exit
