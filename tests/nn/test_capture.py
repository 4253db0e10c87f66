# SPDX-License-Identifier: Apache-2.0
"""`capture`: every layer's record, in order, once; and gradients that do not depend on how the graph was made."""

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise.nn import MoE, Routing, Surrogate, capture


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Hundreds of tiny passes: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layer(router: str = "skip-iw", experts: int = 4, **how: object) -> MoE:
    return MoE(6, experts, hidden_dim=5, router=router, **how)


class Block(nn.Module):
    """A residual block, checkpointed or not."""

    def __init__(self, reentrant: bool | None = None, **how: object) -> None:
        super().__init__()
        self.norm, self.moe, self.reentrant = nn.LayerNorm(6), layer(**how), reentrant

    def inner(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


def net(*reentrant: bool | None, **how: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *(Block(flag, **how) for flag in reentrant), nn.Linear(6, 6))


X = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None, scale: float = 1.0) -> list[Tensor]:
    """One backward pass from a fixed seed; the gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    with capture(model) as routings:
        losses = (forward or model)(X).square().mean(-1)
    (scale * Surrogate(0.3)(losses, routings)).backward()
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]


# --- what is collected -----------------------------------------------------------------------------------------------


def test_layers_at_any_depth_in_order_of_execution() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = layer(experts=2), net(None, experts=3), layer(experts=5)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.inner(self.last(x)))

    model = Backwards()
    with capture(model) as routings:
        assert len(routings) == 0
        model(X)
    assert [routing.num_experts for routing in routings] == [5, 3, 2]
    assert routings.names == ["last", "inner.1.moe", "first"]
    assert routings.modules == [model.last, model.inner[1].moe, model.first]
    assert all(isinstance(routing, Routing) and routing.shape == (2, 8) for routing in routings)
    assert routings[1:] == [routings[1], routings[2]]
    assert set(routings.stats()) == set(routings.names)


def test_a_layer_that_is_called_twice_has_two_records() -> None:
    moe = layer()
    with capture(moe) as routings:
        moe(moe(X) + X)
    assert len(routings) == 2
    assert routings.names == ["", ""]
    assert not torch.equal(routings[0].logits, routings[1].logits)


def test_an_expert_that_is_a_mixture_itself() -> None:
    inner = layer(experts=2)
    model = MoE(6, 2, router="switch", experts=[inner, nn.Identity()], capacity_factor=None)
    with capture(model) as routings:
        model(X)
    assert routings.names[-1] == ""
    assert routings.modules[0] is inner


def test_nothing_is_collected_outside() -> None:
    model, other = layer(), layer()
    with capture(model) as routings:
        other(X)
    model(X)
    assert len(routings) == 0
    assert model.routing_sink is None
    deepcopy(model)


def test_an_error_inside_closes_the_capture() -> None:
    model = layer()
    with pytest.raises(ValueError, match="dim"), capture(model):
        model(X[..., :3])
    assert model.routing_sink is None


def test_captures_nest() -> None:
    model = net(None, None)
    with capture(model) as outer:
        model(X)
        with capture(model[2]) as inner:
            model(X)
        model(X)
    assert inner.names == ["moe"]
    assert sorted(outer.names) == sorted(3 * ["1.moe", "2.moe"])
    assert any(routing is inner[0] for routing in outer)


def test_evaluation_without_gradients() -> None:
    model = net(None).eval()
    with torch.no_grad(), capture(model) as routings:
        losses = model(X).square().mean(-1)
        value = Surrogate()(losses, routings)
    assert value == losses.mean()


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must hold at least one equipoise.nn.MoE, got Linear with none"):
        capture(nn.Linear(2, 2)).__enter__()


# --- activation checkpointing ----------------------------------------------------------------------------------------

ROUTERS = ["skip-iw", "gm-iw", "switch"]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("flags", [(False, False), (True, True), (None, True)])
def test_checkpointing_changes_no_gradient(router: str, flags: tuple[bool | None, ...]) -> None:
    how = {"router": router, "z_loss": 0.1}
    plain, checkpointed = net(None, None, **how), net(*flags, **how)
    for scale in (1.0, 0.25):
        wanted = step(plain, scale=scale)
        found = step(checkpointed, scale=scale)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    names = [name for name, _ in plain.named_parameters()]
    assert float(wanted[names.index("1.moe.router.weight")].abs().max()) > 1e-4


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_there_once(reentrant: bool) -> None:
    model = net(reentrant, reentrant)
    with capture(model) as routings:
        losses = model(X).square().mean(-1)
        Surrogate()(losses, routings).backward()
        assert routings.names == ["1.moe", "2.moe"]
    assert len(routings) == 2
    assert all(block.moe.routing_pending is None for block in (model[1], model[2]))


def test_backward_within_a_capture_that_no_surrogate_has_used() -> None:
    model = net(True, False)
    with capture(model) as routings:
        model(X).sum().backward()
    assert len(routings) == 2


# The inner one's first pass is within the outer one's, which has no graph.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_nested_reentrant_checkpoints() -> None:
    plain, nested = net(None, None), net(True, True)
    torch.testing.assert_close(
        step(nested, lambda x: nested[-1](checkpoint(nested[:-1], x.requires_grad_(), use_reentrant=True))),
        step(plain),
        rtol=1e-5,
        atol=1e-7,
    )
    X.requires_grad_(False)


@pytest.mark.filterwarnings("ignore::equipoise.nn.RoutingWarning")  # nothing is captured, on purpose
def test_gradients_accumulate_and_nothing_is_left_behind() -> None:
    plain, checkpointed = net(None, loss="reinforce"), net(True, loss="reinforce")
    grads = []
    for model in (plain, checkpointed):
        for seed in (1, 2):
            torch.manual_seed(seed)
            with capture(model) as routings:
                losses = model(X).square().mean(-1)
            (Surrogate(0.3)(losses, routings) / 2).backward()
        grads.append(model[1].moe.router.weight.grad.clone())
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)
    # A backward pass of something else through the same layer owes the router nothing.
    for model in (plain, checkpointed):
        model.zero_grad()
        model(X).sum().backward()
        assert model[1].moe.router.weight.grad is None


def test_a_part_under_no_grad_gets_no_gradient_and_leaves_nothing() -> None:
    torch.manual_seed(0)
    frozen, trained = layer(), layer()
    model = nn.ModuleList([frozen, trained])
    with capture(model) as routings:
        with torch.no_grad():
            h = frozen(X)
        losses = trained(h).square().mean(-1)
    Surrogate()(losses, routings).backward()
    assert frozen.router.weight.grad is None
    assert frozen.routing_pending is None
    assert trained.router.weight.grad is not None


def test_a_recomputation_that_routes_otherwise_is_found_out() -> None:
    model = net(True)
    generator = torch.Generator().manual_seed(0)
    block = model[1]
    block.inner = lambda x: x + block.moe(x, generator=generator)
    with pytest.raises(ValueError, match="recomputation must route as the first forward pass did"):
        step(model)


def test_a_layer_shared_by_reentrant_checkpoints_is_refused() -> None:
    model = net(True)
    with pytest.raises(ValueError, match=r"layer '1.moe' must be called once .* 2 calls.* use_reentrant=False"):
        step(model, lambda x: model[1](model[1](model[0](x))))
    shared = net(False)
    step(shared, lambda x: shared[1](shared[1](shared[0](x))))


# --- torch.compile ---------------------------------------------------------------------------------------------------

COMPILED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import equipoise as eq
from equipoise.nn import MoE, Surrogate, capture

class Block(nn.Module):
    def __init__(self, router):
        super().__init__()
        self.moe = MoE(6, 4, hidden_dim=5, router=router)
    def forward(self, x):
        return x + self.moe(x)

def step(model, run):
    torch.manual_seed(1)
    model.zero_grad()
    with capture(model) as routings:
        losses = run(x).square().mean(-1)
    loss = Surrogate(0.3)(losses, routings)
    loss.backward()
    routings.update()
    return routings, [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

x = torch.randn(2, 8, 6)
model = nn.Sequential(nn.Linear(6, 6), Block("skip-iw"), Block("gm-iw"))
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
for _ in range(3):
    routings, found = step(model, compiled)
    assert routings.names == ["1.moe", "2.moe"], routings.names
    torch.testing.assert_close(found, step(model, model)[1], rtol=1e-4, atol=1e-6)
# Later steps find the graph of the first.
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, torch._dynamo.utils.counters["stats"]

# Losses of another forward pass are found out through a compiled graph too.
with capture(model) as routings:
    compiled(x)
try:
    Surrogate()(model(x).square().mean(-1), routings)
except ValueError as error:
    assert "token_losses must come from the forward pass" in str(error)
else:
    raise AssertionError("not refused")

# A compiled layer within a reentrant checkpoint has no graph to give its router a gradient by.
torch._dynamo.reset()
block = torch.compile(Block("skip-iw"), backend="aot_eager")
with capture(block) as routings:
    losses = checkpoint(block, x.requires_grad_(), use_reentrant=True).square().mean(-1)
try:
    Surrogate()(losses, routings)
except ValueError as error:
    assert "got a compiled layer within a reentrant checkpoint" in str(error), error
else:
    raise AssertionError("not refused")
with capture(block) as routings:
    losses = checkpoint(block, x, use_reentrant=False).square().mean(-1)
Surrogate()(losses, routings).backward()
assert float(block.moe.router.weight.grad.abs().max()) > 0

# Blocks that are compiled one by one share a graph, and come in order.
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
model = nn.Sequential(*(Block("switch") for _ in range(4)))
runs = [torch.compile(block, fullgraph=True, backend="aot_eager") for block in model]
def backwards(x):
    for index in (2, 0, 3, 1):
        x = runs[index](x)
    return x
routings, _ = step(model, backwards)
assert routings.names == ["2.moe", "0.moe", "3.moe", "1.moe"], routings.names
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, torch._dynamo.utils.counters["stats"]
assert all(block.moe.routing_sink is None for block in model)

# A checkpoint within a compiled graph: appending once, in the first pass, is what torch calls skipping.
torch._dynamo.reset()
class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)
model = nn.Sequential(nn.Linear(6, 6), Checkpointed("switch"))
with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
    routings, found = step(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
assert len(routings) == 1
torch.testing.assert_close(found, step(model, model)[1], rtol=1e-4, atol=1e-6)
print("done")
"""


def test_compiled(fresh_python: Callable[..., str]) -> None:
    """In an interpreter of its own: dynamo cannot trace the wrappers that check signatures."""
    assert fresh_python(COMPILED).strip() == "done"
