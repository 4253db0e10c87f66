# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import equipoise as eq
from equipoise.nn import Scoring


def random_logits(rows=6, experts=8):
    return torch.randn(rows, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_factors_and_probabilities_by_hand(function, normalise):
    logits = random_logits().requires_grad_()
    scoring = Scoring(function=function, normalise=normalise, scale=1.5)
    s = logits.softmax(-1) if function == "softmax" else logits.sigmoid()
    indices = torch.tensor([[0, 3]] * 6)
    chosen = s.gather(1, indices)
    expected = 1.5 * (chosen / chosen.sum(-1, keepdim=True) if normalise else chosen)
    found = scoring.factors(logits, indices)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(scoring.log_p(logits).exp(), s / s.sum(-1, keepdim=True), rtol=1e-12, atol=0)
    upstream = torch.randn(found.shape, dtype=torch.float64)
    (a,) = torch.autograd.grad(found, logits, upstream, retain_graph=True)
    (b,) = torch.autograd.grad(expected, logits, upstream)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_what_is_compared():
    logits, bias = random_logits(), torch.arange(8.0)
    assert Scoring().compared(logits, None) is not None
    assert torch.equal(Scoring().compared(logits, None), logits)
    assert torch.equal(Scoring().compared(logits, bias), logits.softmax(-1) + bias)
    assert torch.equal(Scoring(function="sigmoid").compared(logits, bias), logits.sigmoid() + bias)
    assert not Scoring().compared(logits.requires_grad_(), None).requires_grad


def test_groups_are_those_with_the_largest_sum_of_two():
    x = torch.tensor([[5.0, 0.0, 3.0, 3.0, 4.0, 1.5]])
    limited = Scoring(num_groups=3, kept_groups=1).limit(x)
    assert limited.tolist() == [[-torch.inf, -torch.inf, 3, 3, -torch.inf, -torch.inf]]
    assert Scoring(num_groups=3, kept_groups=3).limit(x) is x


@pytest.mark.parametrize("name", ["topk", "priced", "loss-free", "quantile", "base", "skip-iw"])
def test_routers_evaluate_by_the_scoring(name):
    logits, bias = random_logits(), torch.linspace(-0.3, 0.3, 8, dtype=torch.float64)
    options = {"loss": "gating"} if name == "skip-iw" else {}
    router = eq.nn.make_router(name, None, 8, top_k=2, **options).eval()
    router.scoring = Scoring(function="sigmoid", scale=2.0, num_groups=4, kept_groups=2)
    routing = router.route(logits, bias=bias)
    expected = router.scoring.limit(logits.sigmoid() + bias).topk(2).indices
    assert torch.equal(routing.indices, expected)
    torch.testing.assert_close(routing.scores, router.scoring.factors(logits, expected))
    torch.testing.assert_close(routing.scores.sum(-1), torch.full([6], 2.0, dtype=torch.float64))


@pytest.mark.parametrize("name", ["priced", "quantile"])
def test_prices_are_in_units_of_what_is_compared(name):
    logits = random_logits(64) + torch.linspace(2, -2, 8)
    router = eq.nn.make_router(name, None, 8, top_k=2)
    router.scoring = Scoring(function="sigmoid")
    before = router.route(logits)
    for _ in range(30):
        router.observe(router.route(logits))
    after = router.route(logits)
    assert before.stats.max_violation > 1
    assert after.stats.max_violation < 0.2
    selection = logits.sigmoid() - after.prices
    assert torch.equal(after.indices, selection.topk(2).indices)


def test_priced_evaluation_of_a_strategy_and_dense():
    logits = random_logits(64) + torch.linspace(2, -2, 8)
    router = eq.nn.make_router("skip-iw", None, 8, top_k=2, loss="gating", evaluation="priced")
    router.scoring = Scoring(function="sigmoid", normalise=False)
    router.observe(router.route(logits))
    routing = router.eval().route(logits)
    assert routing.stats.max_violation < 0.2
    torch.testing.assert_close(routing.scores, logits.sigmoid().gather(1, routing.indices))
    dense = eq.nn.make_router("dense", None, 8)
    dense.scoring = Scoring(function="sigmoid", normalise=False, scale=3.0)
    torch.testing.assert_close(dense.route(logits).scores, 3 * logits.sigmoid())


def test_bad_settings_and_logits():
    with pytest.raises(ValueError, match="function must be one of"):
        Scoring(function="tanh")
    with pytest.raises(ValueError, match="scale must be"):
        Scoring(scale=0.0)
    router = eq.nn.make_router("topk", None, 4)
    assert router.weight is None
    assert list(router.parameters()) == []
    with pytest.raises(ValueError, match=r"dim must be a number .*, got None: call route\(logits\)"):
        router(torch.zeros(2, 3))
    with pytest.raises(
        ValueError, match=r"logits must be floating point of shape \[6, 4\] .*, got .* of shape \[5, 4\]"
    ):
        router.route(torch.zeros(5, 4), shape=(2, 3))
