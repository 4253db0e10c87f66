# SPDX-License-Identifier: Apache-2.0
"""Averaged conditionals: one of several solves, with the mean of their conditionals for its probability."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample, sample_averaged, sample_gumbel_matching

INF = float("inf")


@pytest.fixture
def noise(generator: torch.Generator) -> Callable[..., dict[str, Tensor]]:
    """Draws float64 logits, noise of m draws, coins and picks."""

    def draw(*batch: int, m: int, n: int, k: int) -> dict[str, Tensor]:
        return {
            "logits": 1.5 * torch.randn(*batch, n, k, generator=generator, dtype=torch.float64),
            "gumbel": draw_gumbel([*batch, m, n, k], generator=generator, dtype=torch.float64),
            "coin": torch.rand(*batch, m, n, generator=generator, dtype=torch.float64),
            "pick": torch.rand(batch, generator=generator, dtype=torch.float64),
        }

    return draw


HOW: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4, "capacity": 5},
    {"temperature": torch.tensor([0.5, 2.0]), "capacity": [3, 6, 4]},
    {"sinkhorn_first": True, "eps": 0.3},
    {"temperature": 0.7, "eps": torch.tensor([0.0, 0.4]).double()},
    {"mask": torch.tensor([[True] * 8 + [False], [False] * 3 + [True] * 6]), "eps": 0.3},
    {"temperature": 0.0},
    {"temperature": torch.tensor([0.0, 1.0])},
]
EACH = pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(how) or "plain")


def split(x: dict[str, Tensor], draw: int, how: dict[str, Any]) -> Sample:
    """One of the draws alone."""
    coin = {"coin": x["coin"][:, draw]} if "eps" in how else {}
    return sample_gumbel_matching(x["logits"], x["gumbel"][:, draw], **coin, **how)


def average(x: dict[str, Tensor], how: dict[str, Any]) -> Sample:
    coin = {"coin": x["coin"]} if "eps" in how else {}
    return sample_averaged(x["logits"], x["gumbel"], x["pick"], **coin, **how)


@EACH
def test_one_draw_is_gumbel_matching_bit_for_bit(how: dict[str, Any], noise: Callable) -> None:
    x = noise(2, m=1, n=9, k=3)
    s, t = average(x, how), split(x, 0, how)
    for field in ("z", "log_q", "kept", "keep_weight", "capacity", "prices", "gap"):
        assert torch.equal(getattr(s, field), getattr(t, field)), field
    assert s.respects_capacity
    assert s.assigns_all


@EACH
def test_is_one_of_the_draws_with_the_mean_of_their_conditionals(how: dict[str, Any], noise: Callable) -> None:
    x = noise(2, m=5, n=9, k=3)
    x["pick"] = torch.tensor([0.39, 0.99]).double()
    s, parts = average(x, how), [split(x, draw, how) for draw in range(5)]
    for problem, used in enumerate((1, 4)):
        for field in ("z", "prices", "gap"):
            assert torch.equal(getattr(s, field)[problem], getattr(parts[used], field)[problem])
    mean = torch.stack([part.log_q.exp() for part in parts]).mean(0)
    if "mask" in how:
        mean = torch.where(how["mask"].unsqueeze(-1), mean, 1.0)
    torch.testing.assert_close(s.log_q.exp(), mean, rtol=0, atol=1e-13)
    assert bool((s.counts <= s.capacity).all())


def test_forbidden_pairs_stay_forbidden(noise: Callable) -> None:
    x = noise(2, m=3, n=6, k=3)
    x["logits"][:, 0, 1:] = x["logits"][:, 1, 0] = -INF
    s = average(x, {"eps": 0.5, "capacity": 3})
    assert not bool(s.log_q.isnan().any())
    assert s.log_q[:, 0].tolist() == [[0.0, -INF, -INF]] * 2
    assert bool((s.log_q[:, 1, 0] == -INF).all())


def test_without_a_batch(noise: Callable) -> None:
    x = noise(m=3, n=6, k=2)
    s = average(x, {"eps": 0.5})
    batch = {name: value.unsqueeze(0) for name, value in x.items()}
    assert torch.equal(s.log_q, average(batch, {"eps": 0.5}).log_q[0])


@pytest.mark.parametrize("how", [{}, {"eps": 0.4, "temperature": 0.5}])
def test_does_not_depend_on_a_rows_own_noise_coins_and_pick(
    how: dict[str, Any], noise: Callable, generator: torch.Generator
) -> None:
    x = noise(4, m=3, n=8, k=3)
    before = average(x, how).log_q
    for row in range(8):
        y = {name: value.clone() for name, value in x.items()}
        y["gumbel"][:, :, row] = draw_gumbel([4, 3, 3], generator=generator, dtype=torch.float64)
        y["coin"][:, :, row] = 1 - y["coin"][:, :, row]
        y["pick"] = 1 - y["pick"]
        torch.testing.assert_close(average(y, how).log_q[:, row], before[:, row], rtol=0, atol=1e-12)


def test_frequencies_over_a_rows_own_noise_and_pick(generator: torch.Generator) -> None:
    draws, m, n, k, row = 20_000, 3, 5, 3, 1
    logits = 2 * torch.randn(n, k, generator=generator, dtype=torch.float64)
    gumbel = draw_gumbel([m, n, k], generator=generator, dtype=torch.float64).repeat(draws, 1, 1, 1)
    gumbel[:, :, row] = draw_gumbel([draws, m, k], generator=generator, dtype=torch.float64)
    pick = torch.rand(draws, generator=generator, dtype=torch.float64)
    s = sample_averaged(logits.expand(draws, n, k), gumbel, pick, capacity=2)
    seen = torch.bincount(s.z[:, row], minlength=k).double()

    def chi_square(q: Tensor) -> float:
        return float(((seen - draws * q) ** 2 / (draws * q)).sum())

    # With two degrees of freedom P(chi-square > x) = exp(-x / 2), which is 1e-6 here.
    assert chi_square(s.log_q[0, row].exp()) < 27.6
    # The conditional of the first draw alone is rejected.
    assert chi_square(sample_gumbel_matching(logits, gumbel[0, 0], capacity=2).log_q[row].exp()) > 27.6


@pytest.mark.parametrize("how", [{}, {"eps": 0.2}])
def test_weights_vary_less_with_more_draws(how: dict[str, Any], noise: Callable) -> None:
    x = noise(m=8, n=16, k=2)
    batch = noise(4000, m=8, n=16, k=2) | {"logits": x["logits"].expand(4000, 16, 2)}
    variances = []
    for m in (1, 2, 8):
        s = average(batch | {"gumbel": batch["gumbel"][:, :m], "coin": batch["coin"][:, :m]}, how)
        w = s.at_z(batch["logits"].log_softmax(-1) - s.log_q).exp()
        variances.append(float(w.var(0).mean()))
    assert variances[0] > variances[1] > variances[2]
