# SPDX-License-Identifier: Apache-2.0
"""`token_prior`: a balanced start, part of the logits of every router, and exact gradients with it."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

from equipoise.estimators import STRATEGIES, Noise
from equipoise.nn import ROUTERS, MoE, SamplingRule, Surrogate, TokenPrior, capture, make_router
from equipoise.nn._token_prior import TokenTable

IDS = torch.tensor([[0, 3, 3, 1, 9], [2, 9, 5, 5, 7]])


def layer(router: Any = "skip-iw", prior: TokenPrior | int = 10, **how: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(6, 3, hidden_dim=5, router=router, token_prior=prior, **how)


def run(moe: MoE, x: Tensor, ids: Tensor = IDS, **how: Any) -> Any:
    torch.manual_seed(1)
    with capture(moe) as routings:
        moe(x, token_ids=ids, **how)
    return routings[0]


@pytest.mark.parametrize(("vocab_size", "num_experts"), [(256, 8), (10, 3), (2, 5), (7, 1)])
def test_starts_at_a_balanced_hash(vocab_size: int, num_experts: int) -> None:
    tables = [TokenTable(TokenPrior(vocab_size, 2.5, seed), num_experts).weight.detach() for seed in (0, 1)]
    for table in tables:
        chosen = table == 2.5
        assert bool((chosen.sum(1) == 1).all())
        assert bool((table[~chosen] == 0).all())
        load = chosen.sum(0)
        assert int(load.max() - load.min()) <= 1
    assert vocab_size < 10 or not torch.equal(*tables)


@pytest.mark.parametrize("router", [name for name, row in ROUTERS.items() if row.inert is None])
def test_every_router_adds_it_to_its_logits(router: str) -> None:
    moe, x = layer(router), torch.randn(2, 5, 6)
    for training in (True, False):
        routing = run(moe.train(training), x)
        wanted = x.reshape(-1, 6) @ moe.router.weight.T + moe.router.prior.weight[IDS.flatten()]
        torch.testing.assert_close(routing.logits, wanted)
        torch.testing.assert_close(routing.log_p, wanted.log_softmax(-1))


def test_an_argmax_router_starts_at_the_hash() -> None:
    moe = layer("switch", capacity_factor=None)
    routing = run(moe, torch.zeros(2, 5, 6))
    assert torch.equal(routing.indices.flatten(), moe.router.prior.weight.argmax(1)[IDS.flatten()])


def test_it_learns_and_state_goes_along() -> None:
    moe = layer("skip-iw", TokenPrior(10, strength=3.0, seed=4), loss="gated-reinforce")
    x, optimizer = torch.randn(2, 5, 6), torch.optim.SGD(moe.parameters(), lr=0.1)
    with capture(moe) as routings:
        losses = moe(x, token_ids=IDS).square().mean(-1)
    Surrogate()(losses, routings).backward()
    gradient = moe.router.prior.weight.grad
    assert bool((gradient[IDS.unique()] != 0).any(1).all())
    assert bool((gradient[[4, 6, 8]] == 0).all())  # ids that the batch does not have
    optimizer.step()
    assert "router.prior.weight" in moe.state_dict()
    other = layer("skip-iw", 10, loss="gated-reinforce")
    other.load_state_dict(moe.state_dict())
    for copy in (other, deepcopy(moe)):
        assert torch.equal(run(copy, x).logits, run(moe, x).logits)
    moe.router.reset_parameters()
    assert float(moe.router.prior.weight.detach().max()) == 3.0


def test_padding_may_have_any_id() -> None:
    moe, x, mask = layer(), torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    routing = run(moe, x, IDS.masked_fill(~mask, -100), mask=mask)
    assert torch.equal(routing.logits[mask.flatten()], run(moe, x).logits[mask.flatten()])


def test_half_precision_and_autocast() -> None:
    moe, x = layer(dtype=torch.bfloat16), torch.randn(2, 5, 6, dtype=torch.bfloat16)
    assert run(moe, x).logits.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert run(layer(), torch.randn(2, 5, 6)).logits.dtype == torch.float32


# --- exact gradients: the prior is part of the logits ----------------------------------------------------------------


@pytest.fixture
def _unchecked() -> Iterator[None]:
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("_unchecked")
def test_estimate_is_exactly_unbiased_for_the_table_too() -> None:
    """Three rows of two experts off-policy: every draw, against the exact gradient of the gated model."""

    class Played:
        noise: Noise

        def __getattr__(self, name: str) -> Any:
            return getattr(STRATEGIES["sample"], name)

        def draw_noise(self, shape: Any, **how: Any) -> Noise:
            return self.noise

    torch.manual_seed(0)
    played, x, ids = Played(), torch.randn(3, 2).double(), torch.tensor([1, 0, 1])
    rule = SamplingRule(played, loss="gated-reinforce")
    how = {"hidden_dim": 2, "temperature": 0.5, "dtype": torch.float64, "capacity_factor": None}
    moe = MoE(2, 2, router=rule, token_prior=TokenPrior(2, 0.8), **how)
    estimate, objective = torch.zeros(()).double(), torch.zeros(()).double()
    for z in product(range(2), repeat=3):
        played.noise = Noise(60.0 * nn.functional.one_hot(torch.tensor(z), 2).double())
        with capture(moe) as routings:
            losses = (moe(x, token_ids=ids) - 1.0).square().sum(-1)
        logits = x @ moe.router.weight.T + moe.router.prior.weight[ids]
        p, q = (torch.stack([row[j] for row, j in zip(a.softmax(-1), z, strict=True)]) for a in (logits, 2 * logits))
        objective = objective + p.prod() * losses.mean()
        estimate = estimate + q.prod().detach() * Surrogate(0.7, weights="all")(losses, routings)
    parameters = list(moe.parameters())
    wanted = torch.autograd.grad(objective, parameters, retain_graph=True)
    for gradient, exact in zip(torch.autograd.grad(estimate, parameters), wanted, strict=True):
        assert float((gradient - exact).abs().max()) < 1e-12


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_ids_are_needed_and_must_be_in_range() -> None:
    with pytest.raises(ValueError, match=r"token_ids must be given to a router with token_prior \(vocab_size=10\)"):
        layer()(torch.randn(2, 5, 6))
    for ids, got in ((IDS + 1, "1 to 10"), (IDS - 1, "-1 to 8")):
        with pytest.raises(ValueError, match=rf"token_ids must be in \[0, 10\), .* got {got}: build"):
            layer()(torch.randn(2, 5, 6), token_ids=ids)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be an integer >= 1, got 0"):
        TokenPrior(0)
    with pytest.raises(ValueError, match=r"strength must be finite and >= 0, got -1"):
        TokenPrior(4, -1.0)
    with pytest.raises(ValueError, match=r"token_prior must be None with router 'hash', got 10: a hash routes"):
        make_router("hash", 6, 3, token_prior=10)
