# SPDX-License-Identifier: Apache-2.0
"""`MoE`: a mixture of experts in place of a feed-forward block.

Legend: T rows (tokens), E experts, K experts a row, dim features.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from equipoise._core import check_no_tangent, check_not_batched, in_forward_mode, in_transform
from equipoise.estimators import Strategy
from equipoise.nn._capture import RoutingSource, emit
from equipoise.nn._dispatch import Dispatcher, LocalDispatcher
from equipoise.nn._experts import make_experts
from equipoise.nn._make_router import RoutingOptions, check_known_options, make_router
from equipoise.nn._permutation import reshaped
from equipoise.nn._router import Router
from equipoise.nn._router_checks import check_input_dim
from equipoise.nn._routing import Routing
from equipoise.nn._rules import RoutingRule

_NO_VMAP = "put the dimension into x [..., dim], whose rows then share the capacity, or call the layer in a loop"


class MoE(RoutingSource):
    r"""A sparse mixture of experts, `x [..., dim] -> [..., dim]`, in place of a residual block's feed-forward part.

    .. math::
        y_i = \sum_{j \in \text{indices}_i} \text{scores}_{ij} \, e_j(x_i).

    Rows that no expert processes (dropped, masked) get zeros, so that the residual connection passes them on unchanged.
    All leading dimensions together are one batch, which shares the capacity.

    To train the router, open `capture` around the forward pass and pass the losses to `Surrogate`. It computes the
    training loss with the score-function term of each layer, the weights of the rows and the balance losses. Routers
    with running averages and schedules also need an update after each step: pass the optimiser to `capture`, or call
    `routings.update()`.

    Routers by name, with their default balance losses:

    ============================  ===================================================================================
    `sample`, `skip-iw`, `skip`,  The paper's strategies. Marginal entropy 0.1. `sample` has no capacity, the `gm`
    `gm-iw`, `gm-sh`, `gm`        ones assign every row, the `skip` ones drop rows beyond the capacity.
    `skip-iw-mix`, `gm-iw-mix`    The same with bounded weights: a flat proposal is mixed in with weight `eps`.
    `gm-iw-avg`, `gm-iw-avg-mix`  Gumbel-Matching with conditionals averaged over `solves`; `-mix` also takes `eps`.
    `switch`                      The most probable expert, gated; drops rows. Balance loss 0.01.
    `topk`                        The `top_k` most probable experts, gated, as Mixtral; no capacity. Balance loss 0.01.
    `base`                        The exact balanced assignment of the logits, `top_k` experts a row, gated; evaluated
                                  by prices.
    `s-base`                      The largest probability after Sinkhorn balancing, gated; drops rows.
    `hash`                        A hash of `token_ids`, else of the position; not gated; drops rows.
    `loss-free`                   Logits plus a bias that changes by a small step a batch; gated; no capacity.
    `priced`                      Logits minus exact prices, averaged over past batches; gated; no capacity.
    `quantile`                    Logits minus prices of quantile balancing, one step a batch; gated; no capacity.
    `dense`                       All experts, averaged with the router's probabilities.
    ============================  ===================================================================================

    `router` may also be your own strategy, your own rule `rule(logits, request) -> Routing`, or a `Router`.

    Example:
        >>> import equipoise as eq
        >>> moe = eq.nn.MoE(16, 4, router="gm-iw", capacity_factor=1.0)
        >>> with eq.nn.capture(moe) as routings:
        ...     y = moe(torch.randn(2, 8, 16))
        >>> y.shape, routings[0].stats.load.tolist()
        (torch.Size([2, 8, 16]), [4, 4, 4, 4])

    References:
        Kool, Maddison, Mnih, Unbiased gradient estimation with balanced assignments for mixtures of experts (2021).
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        hidden_dim: int | None = None,
        router: str | Strategy | RoutingRule | Router = "skip-iw",
        capacity_factor: float | None = 1.25,
        top_k: int = 1,
        experts: str | nn.Module | Sequence[nn.Module] = "mlp",
        dispatcher: Dispatcher | None = None,
        router_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing: Unpack[RoutingOptions],
    ) -> None:
        """Builds router and experts.

        Args:
            dim: features of a row.
            num_experts: E.
            hidden_dim: width of an expert's hidden layer; None: 4 * dim.
            router: a name, a strategy, a rule or a `Router`. With a `Router`, give it its options and pass none here.
            capacity_factor: in training an expert takes at most K * ceil(capacity_factor * T / E) rows; None: no
                limit. It has no effect on routers without a capacity (see above).
            top_k: K, for `topk`, `base`, `loss-free`, `quantile` and `priced`, and for every strategy, which then draws
                K different experts a row, see `SamplingRule`.
            experts: "mlp" or "swiglu"; a module [m, dim] -> [m, dim] to be copied, or E of them; or an `Experts`.
            dispatcher: brings rows to their experts; None: a `LocalDispatcher`.
            router_dtype: the dtype of the gate's parameters; None: `dtype`.
            device: the device of the parameters.
            dtype: the dtype of the parameters.
            routing: options of the router, see `RoutingOptions`: eval_capacity_factor, evaluation, loss, temperature,
                eps, solves, target_sample_size, sinkhorn_first, importance, balance_loss, marginal_entropy,
                conditional_entropy, z_loss, upstream, rate, seed, token_prior.
        """
        super().__init__()
        check_known_options(routing, MoE.__init__)
        self.dim, self.num_experts = dim, num_experts
        gate_dtype = dtype if router_dtype is None else router_dtype
        self.router = make_router(
            router,
            dim,
            num_experts,
            capacity_factor=capacity_factor,
            top_k=top_k,
            device=device,
            dtype=gate_dtype,
            **routing,
        )
        hidden = 4 * dim if hidden_dim is None else hidden_dim
        self.experts = make_experts(experts, dim, num_experts, hidden, device=device, dtype=dtype)
        self.dispatcher = LocalDispatcher() if dispatcher is None else dispatcher

    def forward(
        self,
        x: Float[Tensor, "*shape dim"],
        *,
        mask: Bool[Tensor, "*shape"] | None = None,
        token_ids: Int[Tensor, "*shape"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "*shape dim"]:
        """Routes the rows, runs the experts, and combines their outputs.

        Args:
            x: the rows.
            mask: False for rows that take no expert (padding).
            token_ids: integers. The router `hash` uses them, and routers with a `token_prior` need them.
            generator: where randomness comes from; None is torch's global stream. `torch.compile` and activation
                checkpointing need None.

        Returns:
            The output, in the shape and dtype of x; zeros for rows that no expert processed.
        """
        check_input_dim(x, self.dim)
        self._check_transforms(x)
        routing: Routing = self.router(x, mask=mask, token_ids=token_ids, generator=generator)
        tokens, metadata = self.dispatcher.dispatch(x.reshape(-1, self.dim), routing)
        y = self.dispatcher.combine(self.experts(tokens), metadata)
        return emit(self, routing, reshaped(y.to(x.dtype), x.shape), x)

    def _check_transforms(self, x: Tensor) -> None:
        """Refuses what the way of rows to their experts and back has no rules for; looks at a number otherwise."""
        if in_transform() or in_forward_mode():
            tensors = (x, *self.parameters())
            check_not_batched("x and the layer's parameters", *tensors, remedy=_NO_VMAP)
            check_no_tangent(
                "x and the layer's parameters", *tensors, remedy="use reverse mode (torch.func.grad, jacrev)"
            )

    def observe(self, routing: Routing) -> None:
        """Updates the router's averages and schedules. `routings.update()` calls it after each step.

        Args:
            routing: of this layer.
        """
        self.router.observe(routing)

    def extra_repr(self) -> str:
        """Shows the sizes."""
        return f"{self.dim}, {self.num_experts}"
