# SPDX-License-Identifier: Apache-2.0
"""`Surrogate`: the formula, what it ignores, its state, and what it refuses. See test_surrogate_exact for its mean."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

from equipoise.audit import Collector, judge
from equipoise.estimators import EMABaseline, importance_weight, marginal_entropy_loss, reinforce
from equipoise.nn import MoE, ResidualBaseline, RouteRequest, Surrogate, capture
from equipoise.nn._credit import credited
from equipoise.nn._routings import Routings


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Hundreds of tiny passes: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


X = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def unchecked():
    """Switches the run-time check of signatures off, to see what users see."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def run(model: nn.Module, x: Tensor = X, **how: object) -> tuple[Tensor, Routings]:
    torch.manual_seed(0)
    with capture(model) as routings:
        y = model(x, **how)
    return y.square().mean(-1) + x.abs().mean(-1), routings


def layer(router: str = "skip-iw", **how: object) -> MoE:
    torch.manual_seed(0)
    return MoE(6, 4, hidden_dim=5, router=router, **how)


# --- the formula -----------------------------------------------------------------------------------------------------


def test_one_layer_is_reinforce_and_the_balance_losses() -> None:
    model = layer(marginal_entropy=0.1, conditional_entropy=0.0, capacity_factor=0.7)
    losses, routings = run(model)
    loss = Surrogate(0.5, weights="all")(losses, routings)
    routing = routings[0]
    assert routing.sample is not None
    torch.testing.assert_close(routing.weight, importance_weight(routing.log_p, routing.sample))
    plain = reinforce(routing.log_p, routing.sample, losses.flatten(), baseline=0.5)
    wanted = plain + 0.1 * marginal_entropy_loss(routing.log_p)
    torch.testing.assert_close(loss, wanted)
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters, retain_graph=True), torch.autograd.grad(wanted, parameters)
    )


@pytest.mark.parametrize("weights", ["router", "all", "none"])
@pytest.mark.parametrize("credit", ["token", "sequence", "batch"])
def test_two_layers_against_the_formula(credit: str, weights: str) -> None:
    how = {"temperature": 2.0, "loss": "gated-reinforce", "upstream": True}
    model = nn.Sequential(layer(capacity_factor=0.7), layer("gm-iw", **how))
    losses, routings = run(model)
    b = torch.linspace(-1, 1, 16).reshape(2, 8)
    loss = Surrogate(credit=credit, weights=weights)(losses, routings, baseline=b)
    product = routings[0].weight * routings[1].weight
    assert bool((product == 0).any())
    weight = product if weights == "all" else torch.ones(16)
    advantage = weight.reshape(2, 8) * (losses - b).detach()
    wanted = (weight * losses.flatten()).mean() + sum(sum(layer.balance_losses.values()) for layer in routings)
    for i in range(2):
        for t in range(8):
            credit_of = {"token": advantage[i, t], "sequence": advantage[i, t:].sum(), "batch": advantage.sum()}
            for routing in routings:
                assert routing.sample is not None
                row = 8 * i + t
                log_p_z = routing.log_p[row, routing.sample.z[row]]
                own = routing.weight[row] if weights == "router" else 1.0
                wanted = wanted + own * credit_of[credit] / 16 * (log_p_z - log_p_z.detach())
    torch.testing.assert_close(loss, wanted)
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters, retain_graph=True),
        torch.autograd.grad(wanted, parameters),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("loss", ["reinforce", "gated-reinforce"])
@pytest.mark.parametrize("router", ["skip-iw", "gm-iw"])
def test_the_score_function_ends_at_the_router_unless_upstream(router: str, loss: str) -> None:
    def gradients(upstream: bool, baseline: float) -> tuple[Tensor, Tensor]:
        x, model = X.clone().requires_grad_(), layer(router, loss=loss, upstream=upstream, token_prior=9)
        losses, routings = run(model, x, token_ids=torch.arange(16).reshape(2, 8) % 9)
        total = Surrogate(baseline)(losses, routings)
        by_x, *own = torch.autograd.grad(total, [x, *model.router.parameters()])
        return by_x, torch.cat([g.flatten() for g in own])

    # A baseline changes the score function and nothing else: what it moves is what the score function reaches.
    (x_whole, own_whole), (x_other, _) = gradients(True, 0.0), gradients(True, 5.0)
    (x_alone, own_alone), (x_moved, own_moved) = gradients(False, 0.0), gradients(False, 5.0)
    torch.testing.assert_close(own_alone, own_whole)
    assert torch.equal(x_alone, x_moved)
    for one, other in ((x_whole, x_other), (x_alone, x_whole), (own_alone, own_moved)):
        assert float((one - other).abs().max()) > 1e-5


@pytest.mark.parametrize("router", ["switch", "topk", "dense", "hash", "base"])
def test_routers_that_learn_through_the_loss(router: str) -> None:
    model = layer(router)
    losses, routings = run(model)
    loss = Surrogate()(losses, routings)
    torch.testing.assert_close(loss, losses.mean() + sum(routings[0].balance_losses.values()))


def test_gating_has_weights_and_no_score_function() -> None:
    losses, routings = run(layer(loss="gating", marginal_entropy=0.0, capacity_factor=0.7))
    wanted = (routings[0].weight * losses.flatten()).mean()
    torch.testing.assert_close(Surrogate(weights="all")(losses, routings), wanted)


@pytest.mark.parametrize("weights", ["router", "none"])
def test_without_weights_on_the_losses_dropped_tokens_count(weights: str) -> None:
    losses, routings = run(layer(capacity_factor=0.5, marginal_entropy=0.0))
    assert not bool(routings[0].kept.all())
    torch.testing.assert_close(Surrogate(weights=weights)(losses, routings), losses.mean())


def test_rows_that_do_not_count_may_hold_anything() -> None:
    counts = torch.rand(2, 8, generator=torch.Generator().manual_seed(3)) < 0.7
    model = layer("sample", marginal_entropy=0.0)
    losses, routings = run(model)
    spoilt = torch.where(counts, losses, torch.nan)
    loss = Surrogate(0.5, "sequence")(spoilt, routings, mask=counts)
    torch.testing.assert_close(loss, losses[counts].mean())
    loss.backward()
    assert bool(model.router.weight.grad.isfinite().all())


def test_padding_of_the_layer_is_left_out() -> None:
    real = torch.rand(2, 8, generator=torch.Generator().manual_seed(3)) < 0.7
    losses, routings = run(layer("sample", marginal_entropy=0.0), mask=real)
    torch.testing.assert_close(Surrogate()(losses, routings), losses[real].mean())
    losses, routings = run(layer("sample", marginal_entropy=0.0), mask=torch.zeros_like(real))
    assert float(Surrogate()(losses, routings).detach()) == 0.0


def test_losses_in_a_row_and_losses_in_sequences_are_the_same() -> None:
    model = layer("sample")
    found = []
    for flat in (False, True):
        losses, routings = run(model)
        found.append(Surrogate(0.5, "sequence")(losses.flatten() if flat else losses, routings))
        model.zero_grad()
        found[-1].backward()
        found.append(model.router.weight.grad.clone())
    torch.testing.assert_close(found[2:], found[:2])


def test_half_precision_losses_are_added_up_in_single() -> None:
    losses, routings = run(layer("sample", marginal_entropy=0.0))
    loss = Surrogate()(losses.bfloat16(), routings)
    assert loss.dtype == torch.float32
    loss.backward()


def test_credit() -> None:
    f = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert credited(f, [2, 3], "token").tolist() == f.tolist()
    assert credited(f, [2, 3], "sequence").tolist() == [6.0, 5.0, 3.0, 15.0, 11.0, 6.0]
    assert credited(f, [2, 3], "batch").tolist() == [21.0] * 6
    assert credited(f[:0], [2, 0], "sequence").tolist() == []


def test_no_tokens() -> None:
    losses, routings = run(layer(), X[:, :0])
    assert float(Surrogate()(losses, routings).detach()) == pytest.approx(0.0, abs=1e-6)


# --- state -----------------------------------------------------------------------------------------------------------


def test_the_average_reads_first_and_moves_on_afterwards() -> None:
    surrogate, wanted = Surrogate(weights="all"), EMABaseline()
    for _ in range(3):
        losses, routings = run(layer(capacity_factor=0.7))
        assert routings[0].sample is not None
        found = surrogate(losses, routings)
        fixed = Surrogate(float(wanted.value), weights="all")(*run(layer(capacity_factor=0.7)))
        torch.testing.assert_close(found, fixed)
        wanted.update(losses.detach().flatten(), routings[0].sample)
        torch.testing.assert_close(surrogate.baseline.value, wanted.value)


def test_averages_stand_still_in_evaluation() -> None:
    for stop in (Surrogate.eval, lambda surrogate: surrogate):
        surrogate = Surrogate()
        stop(surrogate)
        with torch.set_grad_enabled(not surrogate.training):
            surrogate(*run(layer()))
        assert float(surrogate.baseline.value) == 0.0


@pytest.mark.parametrize("make", [Surrogate, lambda: Surrogate(ResidualBaseline())])
def test_state_goes_along(make) -> None:
    surrogate = make()
    how = {"residual": lambda: X.abs().mean(-1)} if isinstance(surrogate.baseline, ResidualBaseline) else {}
    surrogate(*run(layer()), **how)
    copies = [deepcopy(surrogate), make()]
    copies[1].load_state_dict(surrogate.state_dict())
    wanted = Surrogate.forward(surrogate, *run(layer()), **how)
    for copy in copies:
        model = layer()
        losses, routings = run(model)
        copy(losses, routings, **how).backward()
        torch.testing.assert_close(copy.state_dict(), surrogate.state_dict())
    assert wanted.requires_grad


# --- refusals --------------------------------------------------------------------------------------------------------


def test_no_routing() -> None:
    model = layer()
    with capture(model) as routings:
        pass
    with pytest.raises(ValueError, match=r"routings must hold the Routing of at least one layer, got none: run"):
        Surrogate()(torch.zeros(2, 8), routings)


@pytest.mark.usefixtures("unchecked")
def test_a_list_of_records() -> None:
    losses, routings = run(layer())
    with pytest.raises(ValueError, match=r"routings must be what equipoise.nn.capture yields, got list"):
        Surrogate()(losses, list(routings))


@pytest.mark.parametrize("shape", [(2, 7), (8, 2), (15,), (), (2, 8, 1)])
def test_wrong_shape(shape: tuple[int, ...]) -> None:
    _, routings = run(layer())
    with pytest.raises(ValueError, match=r"token_losses must have shape \[2, 8\] .* reduction='none'"):
        Surrogate()(torch.zeros(shape), routings)
    # A refusal uses nothing up.
    Surrogate()(torch.zeros(2, 8), routings)


def test_losses_of_another_forward_pass() -> None:
    model = nn.Sequential(layer(), layer())
    losses, routings = run(model)
    other, _ = run(model)
    with pytest.raises(ValueError, match=r"forward pass that was captured, .* output of '0', '1': compute the losses"):
        Surrogate()(other, routings)
    torch.manual_seed(0)
    with capture(model) as routings:
        model(X)
        losses = model(X).square().mean(-1)
    with pytest.raises(ValueError, match="forward pass that was captured"):
        Surrogate()(losses, routings)


def test_losses_of_another_forward_pass_are_looked_for_now_and_then() -> None:
    model, surrogate = layer(), Surrogate()
    for call in range(1, 17):
        other, (_, routings) = run(model)[0], run(model)
        if call in (1, 2, 3, 4, 8, 16):
            with pytest.raises(ValueError, match="forward pass that was captured"):
                surrogate(other, routings)
        else:
            surrogate(other, routings)


def test_losses_without_a_graph_cannot_be_told() -> None:
    model = layer()
    losses, routings = run(model)
    Surrogate()(losses.detach(), routings).backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_second_use() -> None:
    model, surrogate = layer(), Surrogate()
    losses, routings = run(model)
    surrogate(losses, routings)
    with pytest.raises(ValueError, match=r"routings must be used by one Surrogate call once, got the same ones again"):
        surrogate(losses, routings)
    routings.update()
    with pytest.raises(ValueError, match=r"routings must be used by one update once"):
        routings.update()


def test_bad_arguments() -> None:
    losses, routings = run(layer())
    with pytest.raises(ValueError, match=r"credit must be one of 'token', 'sequence', 'batch', got 'all'"):
        Surrogate(credit="all")
    with pytest.raises(ValueError, match=r"weights must be one of 'router', 'all', 'none', got 'some'"):
        Surrogate(weights="some")
    with pytest.raises(ValueError, match=r"residual must be given with a ResidualBaseline"):
        Surrogate(ResidualBaseline())(losses, routings)
    with pytest.raises(ValueError, match=r"residual must come with a ResidualBaseline"):
        Surrogate()(losses, routings, residual=lambda: losses)
    with pytest.raises(ValueError, match=r"residual\(\) must have shape \[2, 8\]"):
        Surrogate(ResidualBaseline())(losses, routings, residual=lambda: losses[0])
    losses, routings = run(layer())
    with pytest.raises(ValueError, match=r"baseline must have shape \[2, 8\]"):
        Surrogate(torch.zeros(8))(losses, routings)


@pytest.mark.usefixtures("unchecked")
def test_critic_that_cannot_serve() -> None:
    losses, routings = run(layer())
    critic = torch.zeros(2, 8, routings[0].num_experts)
    with pytest.raises(ValueError, match=r"critic must have shape \[2, 8, \d\] .*, got \[2, 8\]"):
        Surrogate()(losses, routings, critic=losses)
    with pytest.raises(ValueError, match="critic must come with one layer and credit 'token', got .* 'batch'"):
        Surrogate(credit="batch")(losses, routings, critic=critic)
    for how, got in (({"top_k": 2}, "top_k = 2"), ({"loss": "gating"}, "one that learns through its gates")):
        losses, routings = run(layer(**how))
        with pytest.raises(ValueError, match=f"critic must come with a router that learns by .*, got {got}"):
            Surrogate()(losses, routings, critic=critic)


def test_average_learns_what_the_critic_leaves() -> None:
    losses, routings = run(layer(router="sample"))
    surrogate, critic = Surrogate(), torch.rand(2, 8, routings[0].num_experts)
    sample = routings[0].sample
    assert sample is not None
    left = losses.detach().reshape(-1) - sample.at_z(critic.reshape(16, -1))
    surrogate(losses, routings, critic=critic)
    assert float(surrogate.baseline.value) == pytest.approx(float(left.mean()), rel=1e-4)


@pytest.mark.usefixtures("unchecked")
def test_bad_mask_and_dtype() -> None:
    losses, routings = run(layer())
    with pytest.raises(ValueError, match=r"mask must have shape \[2, 8\]"):
        Surrogate()(losses, routings, mask=torch.ones(8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"token_losses must be floating point"):
        Surrogate()(torch.zeros(2, 8, dtype=torch.int64), routings)


# --- the layer's audit: false-alarm rate 1e-6 a case; see equipoise.audit ---------------------------------

DRAWS = 60


def audited(router: str, **how: object) -> tuple[MoE, Tensor, Tensor]:
    """Rows that nearly all ask for expert 0, and what the gradient of E f should be: a capacity of half must tell."""
    torch.manual_seed(0)
    model = MoE(2, 2, hidden_dim=2, router=router, capacity_factor=1.0, dtype=torch.float64, **how)
    x = torch.tensor([[1.0, 0.3], [0.9, -0.2], [1.2, 0.1], [0.8, 0.4]]).double().repeat(32, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
        model.router.weight.copy_(torch.tensor([[2.0, 0.5], [-0.3, 0.0]]))
    p = (x @ model.router.weight.T).softmax(-1)
    objective = torch.zeros(()).double()
    experts = deepcopy(model)
    experts.router.rule = lambda logits, request: _all_to(chosen, logits, request)
    shared = list(model.experts.parameters())
    for chosen in range(2):
        y = torch.func.functional_call(experts, dict(zip(_expert_names(experts), shared, strict=True)), (x,))
        gates = p[:, chosen] if how.get("loss") == "gated-reinforce" else 1.0
        objective = objective + (p[:, chosen] * (gates * y.T).T.square().sum(-1)).mean()
    exact = torch.autograd.grad(objective, [model.router.weight, *shared])
    return model, x, torch.cat([gradient.flatten() for gradient in exact])


def _expert_names(model: MoE) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.startswith("experts.")]


def _all_to(expert: int, logits: Tensor, request: RouteRequest):
    return request.route(torch.full([len(logits), 1], expert), torch.ones(len(logits), 1).to(logits))


def judgement(router: str, **how: object):
    model, x, exact = audited(router, **how)
    surrogate = Surrogate(0.5, weights="all")
    parameters = [model.router.weight, *model.experts.parameters()]
    collector, draws = Collector(exact), []
    for _ in range(DRAWS):
        with capture(model) as routings:
            losses = model(x).square().sum(-1)
        gradients = torch.autograd.grad(surrogate(losses, routings), parameters)
        draws.append(torch.cat([gradient.flatten() for gradient in gradients]))
    collector.add(torch.stack(draws))
    return judge(collector.evidence())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("router", "loss"),
    [("sample", "reinforce"), ("skip-iw", "reinforce"), ("gm-iw", "reinforce"), ("skip-iw", "gated-reinforce")],
)
def test_unbiased_layers_pass_the_audit(router: str, loss: str) -> None:
    found = judgement(router, loss=loss, marginal_entropy=0.0)
    assert found.verdict != "biased"
    assert found.detectable < 0.5  # not for want of looking


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("router", ["skip", "gm", "switch"])
def test_biased_layers_fail_the_audit(router: str) -> None:
    how = {"balance_loss": 0.0} if router == "switch" else {"loss": "reinforce", "marginal_entropy": 0.0}
    assert judgement(router, **how).verdict == "biased"
