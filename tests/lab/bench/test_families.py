# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from equipoise_lab.bench._families import FAMILIES, draw_scores


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "k"), [(0, 3), (1, 1), (7, 3), (64, 8)])
def test_family_draws_float32_of_the_size(family: str, n: int, k: int) -> None:
    scores = draw_scores(family, n, k, seed=0)
    assert scores.shape == (n, k)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()
    assert not scores.isposinf().any()
    assert scores.isfinite().all() or family == "forbidden"


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_scores_and_global_stream_untouched(family: str) -> None:
    before = torch.random.get_rng_state()
    assert torch.equal(draw_scores(family, 32, 4, seed=3), draw_scores(family, 32, 4, seed=3))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_seed_other_scores(family: str) -> None:
    assert not torch.equal(draw_scores(family, 32, 4, seed=3), draw_scores(family, 32, 4, seed=4))


def test_forbidden_leaves_a_balanced_assignment() -> None:
    scores = draw_scores("forbidden", 40, 4, seed=0)
    rows = torch.arange(40)
    assert scores[rows, rows % 4].isfinite().all()
    assert scores.isneginf().any()


def test_favourite_is_everybodys_first_choice() -> None:
    share = (draw_scores("favourite", 4000, 8, seed=0).argmax(-1) == 0).float().mean()
    assert share > 0.95


@pytest.mark.parametrize(("family", "rank"), [("rank-1", 1), ("rank-2", 2), ("identical", 1)])
def test_rank(family: str, rank: int) -> None:
    assert torch.linalg.matrix_rank(draw_scores(family, 30, 6, seed=0)) == rank


def test_duplicates_have_ties_and_gumbel_has_none() -> None:
    assert draw_scores("duplicates", 50, 4, seed=0).unique().numel() < 60
    assert draw_scores("gumbel", 50, 4, seed=0).unique().numel() == 200


def test_gumbel_has_the_moments_of_its_sum() -> None:
    scores = draw_scores("gumbel", 50_000, 4, seed=0).double()
    euler = 0.5772156649
    variance = 1.0 + torch.pi**2 / 6.0
    # Five standard errors of the mean.
    assert abs(scores.mean().item() - euler) < 5.0 * (variance / scores.numel()) ** 0.5
    assert scores.var().item() == pytest.approx(variance, rel=0.05)


def test_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="family must be one of 'gumbel'.*got 'nice'"):
        draw_scores("nice", 2, 2, seed=0)
