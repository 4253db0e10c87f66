# SPDX-License-Identifier: Apache-2.0
"""Derivatives of higher order, `torch.func` and the meta device: what works agrees, and the rest is refused."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call

from equipoise.nn import ROUTERS, MoE, Surrogate, capture
from equipoise.nn._experts import MLPExperts, SwiGLUExperts
from equipoise.nn._grouped import Grouped

DIM, EXPERTS = 4, 2
# One of each way to learn: drawn, drawn in balance, gated, gated with Sinkhorn, several experts, all experts.
KINDS = ("skip-iw", "gm-iw", "switch", "s-base", "topk", "dense")

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def make(router: str, device: str = "cpu") -> MoE:
    torch.manual_seed(0)
    return MoE(
        DIM,
        EXPERTS,
        hidden_dim=3,
        router=router,
        top_k=2 if router == "topk" else 1,
        dtype=torch.float64,
        device=device,
        balance_loss=0.0 if router in ("switch", "topk") else None,
    )


def rows() -> Tensor:
    return torch.randn(6, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def token_losses(y: Tensor) -> Tensor:
    return (y - rows()).square().mean(-1)


@pytest.mark.parametrize("experts", [MLPExperts, SwiGLUExperts])
@pytest.mark.parametrize("slots", [None, 3])
def test_fused_experts_pass_the_check_of_second_derivatives(experts: type, slots: int | None) -> None:
    layer = experts(DIM, EXPERTS, hidden_dim=3, compute="fused", dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    counts = torch.tensor([2, 3] if slots is None else [3, 3])

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        groups = Grouped(rows=x, counts=counts, slots=slots)
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (groups,))

    inputs = [rows().requires_grad_(), *(p.detach().requires_grad_() for p in layer.parameters())]
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.filterwarnings("ignore::equipoise.nn.RoutingWarning")  # nothing is captured, on purpose
@pytest.mark.parametrize("router", ROUTERS)
def test_layer_can_be_differentiated_twice(router: str) -> None:
    moe = make(router)
    x = rows().requires_grad_()
    (gradient,) = torch.autograd.grad(moe(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    assert bool((x.grad != 0).any())


@pytest.mark.parametrize("router", KINDS)
def test_gradient_of_the_surrogate_by_a_transform_is_that_of_backward(router: str) -> None:
    moe = make(router)

    def objective(parameters: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(2)
        with capture(moe) as routings:
            y = functional_call(moe, parameters, (rows(),))
        return Surrogate()(token_losses(y), routings)

    parameters = {name: p.detach() for name, p in moe.named_parameters()}
    found = torch.func.grad(objective)(parameters)
    objective(dict(moe.named_parameters())).backward()
    for name, p in moe.named_parameters():
        torch.testing.assert_close(found[name], torch.zeros_like(p) if p.grad is None else p.grad)


def test_jacobian_by_rows_is_that_of_backward() -> None:
    moe = make("switch")
    expected = torch.autograd.functional.jacobian(moe, rows())
    torch.testing.assert_close(torch.func.jacrev(moe)(rows()), expected)


def test_vmap_over_rows_or_parameters_is_refused() -> None:
    moe, x = make("switch"), rows()
    message = r"x and the layer's parameters must not be mapped over by torch\.vmap.*: put the dimension into x"
    with pytest.raises(ValueError, match=message):
        torch.vmap(moe)(x.expand(3, -1, -1))
    stacked = {name: p.detach().expand(3, *p.shape) for name, p in moe.named_parameters()}
    with pytest.raises(ValueError, match=message):
        torch.vmap(lambda p: functional_call(moe, p, (x,)))(stacked)


def test_forward_mode_is_refused() -> None:
    moe = make("switch")
    message = r"x and the layer's parameters must not be differentiated in forward mode .*: use reverse mode"
    with pytest.raises(ValueError, match=message):
        torch.func.jvp(moe, (rows(),), (rows(),))
    with forward_ad.dual_level(), pytest.raises(ValueError, match=message):
        moe(forward_ad.make_dual(rows(), rows()))


def test_constant_layer_within_a_transform_is_left_alone() -> None:
    moe, x = make("switch"), rows()
    found = torch.vmap(lambda scale: scale * moe(x).sum())(torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(found, moe(x).sum().expand(2))


@pytest.mark.parametrize("router", ROUTERS)
def test_meta_device_tells_shapes(router: str) -> None:
    y = make(router, "meta")(rows().to("meta"))
    assert y.shape == (6, DIM)
    assert y.device.type == "meta"
