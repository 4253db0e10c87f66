# SPDX-License-Identifier: Apache-2.0
"""`Surrogate`: one scalar whose backward pass trains the routers and experts of all layers.

Legend: T rows (tokens), n rows that count, l layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from equipoise._core import check_critic, check_floating, check_mask, check_one_of
from equipoise.estimators import EMABaseline, score_function
from equipoise.nn._capture import Emission
from equipoise.nn._credit import CREDITS, WEIGHTS, counted_rows, credited, product_weight
from equipoise.nn._graph import missing_outputs
from equipoise.nn._layer_baselines import Baseline, LayerBaselines, Residual, pair_baselines, read_baselines
from equipoise.nn._layer_critics import Critics, add_back, fit_critics, read_drawn
from equipoise.nn._readouts import Readouts
from equipoise.nn._recompute import Pending, expect
from equipoise.nn._routings import Routings
from equipoise.nn._surrogate_checks import (
    check_captured,
    check_critic_credit,
    check_critic_layer,
    check_critic_use,
    check_graph,
    check_routings,
    check_same_forward,
    check_targets,
    check_token_shape,
)
from equipoise.sampling import Scope

# The first calls show whether a training loop is put together rightly; later ones are looked at now and then.
_CHECKED_CALLS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class SurrogateLoss:
    """A surrogate's loss and its parts. To compare routers, use `task`: `loss` is not comparable between them.

    Attributes:
        loss: to call backward on; its value is the (weighted) mean loss plus the balance losses.
        task: the plain mean of the token losses that count, detached.
        balance: the sum of the balance losses of all layers, detached.
        readout: the sum of the readouts' losses, detached; `loss` has its gradient and not its value. None without.
        critic: the sum of the critics' squared errors, as for `readout`; None without critics that learn.

    Example:
        >>> import equipoise as eq
        >>> moe, x = eq.nn.MoE(8, 4), torch.randn(16, 8)
        >>> with eq.nn.capture(moe) as routings:
        ...     losses = (x + moe(x)).square().mean(-1)
        >>> parts = eq.nn.Surrogate().parts(losses, routings)
        >>> torch.allclose(parts.loss, parts.task + parts.balance), parts.readout
        (True, None)
    """

    loss: Float[Tensor, ""]
    task: Float[Tensor, ""]
    balance: Float[Tensor, ""]
    readout: Float[Tensor, ""] | None = None
    critic: Float[Tensor, ""] | None = None


class Surrogate(nn.Module):
    r"""Computes the loss to call backward on, from token losses and captured routings.

    With f_i the loss of token i, z_i^l the expert it drew in layer l (or its K experts, in order), and C_i the tokens
    whose losses are credited to its decisions (`credit`), the gradient and the value are

    .. math::
        \frac{1}{n} \sum_i \Big[ V_i \nabla f_i
        + \sum_l \Big( \sum_{m \in C_i} U_{im}^l (f_m - b_m^l) \Big) \nabla \log p(z_i^l) \Big] + \sum_l \nabla B_l,
        \qquad \frac{1}{n} \sum_i V_i f_i + \sum_l B_l.

    Only layers that learn by the score function have the second term; gated layers learn through f as well, or through
    f alone. The gradient of log p is that for the parameters of the layer's own router; with `upstream=True` of the
    router (see `RoutingOptions`), for everything that its logits depend on. B_l are the balance losses of layer l. C_i
    is {i} for credit "token", i and the tokens after it in its sequence for "sequence", all tokens for "batch".

    `weights` says which terms carry the weights w_i^l of the layers' samples (importance weights, and what makes up for
    dropped tokens), with W_i = prod_l w_i^l:

    =========  =====  =======  ===================================================================================
    `weights`  V_i    U_im^l   what the estimate is
    =========  =====  =======  ===================================================================================
    "router"   1      w_i^l    Shared parameters: the model as run. A router: each decision as if drawn from it.
    "all"      W_i    W_m      The paper's: everything as if experts were drawn from the router, none dropped.
    "none"     1      1        The model as run, if what is drawn comes from the router (temperature 1, no balancing).
    =========  =====  =======  ===================================================================================

    With "all" the router's correction adds variance to the gradient of every shared parameter, and the loss of a token
    that one of many layers drops has no effect. With "none" a router under Gumbel-Matching learns from draws that
    are not its own, and collapses. So "router" is the default.

    Unbiased for the quantities in this list, if routers have `upstream=True`. (Tests compare each line with
    enumeration. B_l are left aside: a balance loss is differentiated for the batch as it was routed.) With
    `upstream=False`, the default, the second term of a layer trains its own router in the same way, and nothing else:
    the layers before a router, with the gates of lower layers, learn from the losses with that router's draws held
    fixed. The gradient of the last router, and of every router whose outputs are not gated, is the same in both cases.

    - **"router"**, with `sample`, `skip-iw`, `gm-iw` and what is made of them, at any temperature, under attention too:
      E[(1/n) sum_i grad f_i] of the model as run, its draws held fixed, plus, for each layer l and token i, the exact

      .. math::
          \frac{1}{n} \text{E} \Big[ \sum_j \nabla p(j \mid x_i^l) \,
          \text{E} \big[ \textstyle\sum_{m \in C_i} f_m \mid z_i^l = j \text{, kept} \big] \Big]:

      the effect of this one decision on the losses credited to it, if it is drawn from the router and carried out,
      while all other decisions are made as they are in training. For one layer, in a model without attention, that is
      the gradient of the paper's objective (next line) for the router, and that of the model as run for the experts.
      With `sample` at temperature 1 all w are 1, and the three values of `weights` agree.
    - **"all"**, one layer; f_i depends on no other token's expert. J = E[(1/n) sum_i f_i] with every z_i drawn from the
      router and no token dropped, for all parameters. With the same routers at any temperature, with any number of
      experts a token; biased with `skip`, `gm` and `gm-sh`, which are biased estimators in one layer already.
    - **"all"**, several layers, all token-wise (f_i depends on the experts of token i alone, in all layers): the same
      J, with z_i^l from the router of layer l given what layers before it did. It takes the product W_i in the terms of
      every layer: with w_i^l alone it is biased. A token that one layer drops has W_i = 0, and no layer learns from
      it, though the residual carries it to the output: a fraction d dropped in each of L layers leaves (1 - d)^L.
    - Attention, where z_i moves the losses of later tokens. Credit "token" is biased: it leaves these losses out.
      Credit "sequence" is unbiased with `sample` at temperature 1 (all w = 1), if attention is causal and stays within
      a sequence; J is the loss of the model as run. If attention looks ahead, credit "batch" is.
    - Attention and dropping. A token's expert also moves tokens that it crowds out, anywhere in the batch. With `skip`
      or `skip-iw` at temperature 1 and credit "batch", **"none"** is unbiased for the loss of the model as run, with
      its dropped tokens; **"all"** with `skip-iw` for (1/n) sum_i E_i[f_i], where E_i is the model as run under the
      condition that every layer keeps token i itself (kept sets drawn uniformly among those with i). Credit "sequence"
      leaves crowding out of account; its bias goes away as fewer tokens are dropped. Neither J is that of the model
      that drops nothing: weights correct what happens to a token, not what happens to its context.
    - Attention with **"all"** at another temperature, with Sinkhorn first, or with Gumbel-Matching (`gm-iw`): not
      unbiased for any J in closed form. The context is drawn from q, and W_i corrects token i's own draws alone.
      Weights that correct the context are products over all of its tokens, with a variance that makes them useless.

    With `loss="gated-reinforce"` f depends on the router through its gates, and all of the above holds for the gated
    model. With `loss="gating"` there is no second term, and the estimate is E[grad f] of the first.

    Requires: b_i^l does not depend on any z of layer l or of a layer after it. One baseline for all layers may
    therefore not depend on any z. A statistic of past batches is allowed; a statistic of this batch is not, see
    `leave_one_out_baseline`. `ResidualBaseline`, `Readout` and `Readouts` state what they require.

    Example:
        >>> import equipoise as eq
        >>> moe, surrogate = eq.nn.MoE(8, 4), eq.nn.Surrogate()
        >>> x = torch.randn(2, 16, 8)
        >>> with eq.nn.capture(moe) as routings:
        ...     y = x + moe(x)
        >>> token_losses = y.square().mean(-1)
        >>> loss = surrogate(token_losses, routings)
        >>> loss.backward()
        >>> moe.router.weight.grad.shape
        torch.Size([4, 8])

    References:
        Kool, Maddison, Mnih, Unbiased gradient estimation with balanced assignments for mixtures of experts (2021),
        section 2.
        Schulman and others, Gradient estimation using stochastic computation graphs (2015).
    """

    def __init__(
        self,
        baseline: Baseline | Readouts | Sequence[Baseline] | None = None,
        credit: str = "token",
        *,
        weights: str = "router",
    ) -> None:
        """Sets up the surrogate.

        Args:
            baseline: b. None: an exponential moving average of past losses, `EMABaseline()`. Or an `EMABaseline` of
                your own, a `ResidualBaseline`, a number, or a tensor with a number for each token. Or a list of these,
                one for each layer in order of execution. Or `Readouts`, which have one for every layer of a model.
                Baselines that learn are part of `state_dict`, and each call in training mode with gradients enabled
                updates them. Do not pass a mean over the current batch: under a capacity it is biased, which cannot be
                detected; see `equipoise.reinforce`.
            credit: "token", "sequence" or "batch".
            weights: which terms carry weights: "router", "all" or "none". Except with "all", dropped tokens count with
                the loss that they have.
        """
        super().__init__()
        check_one_of("credit", credit, CREDITS)
        check_one_of("weights", weights, WEIGHTS)
        if isinstance(baseline, Readouts) and baseline.critics:
            check_critic_credit(credit)
        self.credit = credit
        self.weights = weights
        listed = isinstance(baseline, Sequence)
        self.baseline: Any = EMABaseline() if baseline is None else LayerBaselines(baseline) if listed else baseline
        self._calls = 0

    def forward(
        self,
        token_losses: Float[Tensor, "*shape"],
        routings: Routings,
        *,
        targets: Tensor | None = None,
        mask: Bool[Tensor, "*shape"] | None = None,
        residual: Residual | Sequence[Residual | None] | None = None,
        baseline: Float[Tensor, "*shape"] | None = None,
        critic: Float[Tensor, "*shape E"] | None = None,
    ) -> Float[Tensor, ""]:
        """Builds the loss.

        Args:
            token_losses: f, one for each token, in the shape of the tokens [..., positions] or flattened, from the
                forward pass that was captured. With or without gradient. The first calls, and some later ones, check
                that both come from the same pass by a walk over the autograd graph.
            routings: what `capture` yielded; serves one call.
            targets: the targets of the losses, for `Readouts`.
            mask: False for tokens whose loss does not count (prompts, padding). Later losses are still credited to
                their decisions.
            residual: with a `ResidualBaseline`: each token's loss without the experts' output, of the shape of
                token_losses; or a function that returns it, which is called without gradients. With a list of
                baselines: a list, with None for every baseline that is not a `ResidualBaseline`.
            baseline: b for each token of this call and all layers, in place of the surrogate's own.
            critic: c, a predicted loss for each token and expert, from past batches, such as a `RegressionCritic`'s;
                for one layer that draws one expert a token, and credit "token". c at the expert drawn is subtracted
                from the loss as b is, and the exact gradient of sum_j p_ij c_ij is added back, so that the estimate
                stays unbiased. A baseline that learns then learns what the critic leaves of the losses.

        Returns:
            The scalar; at least float32. Scale it, add other losses to it, call backward on it. `parts` returns it with
            its parts.
        """
        how = {"targets": targets, "mask": mask, "residual": residual, "baseline": baseline, "critic": critic}
        return self.parts(token_losses, routings, **cast(Any, how)).loss

    def parts(
        self,
        token_losses: Float[Tensor, "*shape"],
        routings: Routings,
        *,
        targets: Tensor | None = None,
        mask: Bool[Tensor, "*shape"] | None = None,
        residual: Residual | Sequence[Residual | None] | None = None,
        baseline: Float[Tensor, "*shape"] | None = None,
        critic: Float[Tensor, "*shape E"] | None = None,
    ) -> SurrogateLoss:
        """Builds the loss together with its parts. Call it in place of the surrogate.

        Args:
            token_losses: as in `forward`, like the others.
            routings: what `capture` yielded; serves one call.
            targets: for `Readouts`.
            mask: False for tokens whose loss does not count.
            residual: for `ResidualBaseline`.
            baseline: b for each token of this call.
            critic: c for each token and expert.

        Returns:
            The loss to call backward on, with its parts for a log.
        """
        shape = self._check(token_losses, routings, mask, critic)
        own: Any = self.baseline if baseline is None else baseline
        check_targets(targets is not None, isinstance(self.baseline, Readouts))
        pairs = [] if isinstance(own, Readouts) else pair_baselines(own, residual, len(routings))
        emissions = routings.consume()
        self._check_same_forward(token_losses, routings.names, emissions)

        losses = token_losses.reshape(-1).to(torch.promote_types(token_losses.dtype, torch.float32))
        counted = counted_rows(None if mask is None else mask.reshape(-1), routings)
        weight = product_weight(routings, losses.dtype) if self.weights == "all" else torch.ones_like(losses)
        if counted is not None:
            weight = torch.where(counted, weight, 0.0)
        scope = routings[0].scope
        n = _rows_that_count(losses, counted, scope)
        active = weight != 0  # a row of weight 0 has no term, whatever its loss holds
        value = torch.where(active, weight * losses, 0.0).sum() / n
        f = losses.detach()
        task = (f if counted is None else torch.where(counted, f, 0.0)).sum() / n

        critics: list[Tensor | None] = [None] * len(emissions)
        readout = None
        if isinstance(own, Readouts):
            found = own(routings, emissions, targets, token_losses.shape, counted)
            pairs, critics, readout = found.pairs, found.critics, found.loss
        if critic is not None:
            critics = [critic.detach().reshape(emissions[0].routing.log_p.shape)]
        if any(c is not None for c in critics):
            product, graph = self.weights == "all", value.requires_grad
            value = value + add_back(critics, emissions, counted, product=product, differentiable=graph) / n
        advantages, fit = self._advantages(f, active, pairs, critics, emissions, token_losses.shape)
        credits = [
            credited(torch.where(active, weight * advantage, 0.0), shape, self.credit, scope) / n
            for advantage in advantages
        ]
        credits = credits if len(credits) > 1 else credits * len(emissions)
        if self.weights == "router":
            credits = [c * layer.weight for c, layer in zip(credits, routings, strict=True)]
        for learnt in (readout, fit):
            value = value if learnt is None else value + (learnt - learnt.detach())
        loss = _with_routers(value, credits, routings, emissions)
        others = {name: None if x is None else x.detach() for name, x in (("readout", readout), ("critic", fit))}
        with torch.no_grad():
            balance = routings.balance_loss()
        return SurrogateLoss(loss=loss, task=task, balance=balance, **others)

    def _advantages(
        self,
        f: Tensor,
        active: Tensor,
        pairs: Sequence[tuple[Any, Any]],
        critics: Critics,
        emissions: Sequence[Emission],
        shape: Sequence[int],
    ) -> tuple[list[Tensor], Tensor | None]:
        """Computes f less critic and baseline, for each baseline, and the error of critics; lets baselines learn."""
        drawn = read_drawn(critics, emissions)
        lefts = [f if c is None else f - c.detach() for c in drawn]
        moves = self.training and torch.is_grad_enabled()
        # One baseline for all of several layers comes without critics: each is left the same.
        lefts = lefts[: len(pairs)]
        baselines = read_baselines(pairs, lefts, active, shape, moves, emissions[0].routing.scope)
        learns = any(c is not None and c.requires_grad for c in drawn)
        fit = fit_critics(drawn, f, baselines, active, emissions) if learns else None
        return [left - b for left, b in zip(lefts, baselines, strict=True)], fit

    def _check(
        self, token_losses: Tensor, routings: Routings, mask: Tensor | None, critic: Tensor | None
    ) -> tuple[int, ...]:
        """Checks what belongs together; returns the shape of the tokens."""
        check_routings(type(routings).__name__, isinstance(routings, Routings))  # pyright: ignore[reportUnnecessaryIsInstance]
        check_captured(len(routings))
        check_floating("token_losses", token_losses)
        shape = check_token_shape("token_losses", token_losses, [layer.shape for layer in routings])
        check_mask(mask, token_losses.shape)
        if critic is not None:
            layer = routings[0]
            check_critic_use(len(routings), self.credit)
            check_critic_layer(len(layer.samples), layer.score_function)
            check_critic(critic, [*token_losses.shape, layer.num_experts])
        return shape

    def _check_same_forward(self, token_losses: Tensor, names: list[str], emissions: Sequence[Emission]) -> None:
        """Walks the graph in the first calls, and in those whose number is a power of two."""
        self._calls += 1
        if self._calls <= _CHECKED_CALLS or self._calls & (self._calls - 1) == 0:
            check_same_forward([names[index] for index in missing_outputs(token_losses, emissions)])

    def get_extra_state(self) -> dict[str, Tensor]:
        """Returns the state of a moving average; a `ResidualBaseline` is a submodule, with buffers."""
        return self.baseline.state_dict() if isinstance(self.baseline, EMABaseline) else {}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restores a saved moving average.

        Args:
            state: from `get_extra_state`.
        """
        if isinstance(self.baseline, EMABaseline):
            self.baseline.load_state_dict(state)

    def extra_repr(self) -> str:
        """Shows the settings."""
        return f"credit={self.credit!r}, weights={self.weights!r}"


def _rows_that_count(losses: Tensor, counted: Tensor | None, scope: Scope) -> Any:
    """Returns n, at least 1: a number where it is known. Of rows on several ranks, the mean over ranks.

    The loss of the batch is the mean of the ranks' losses, and so the sum over all rows divided by all of them.
    """
    if scope.ranks == 1:
        return max(losses.shape[0], 1) if counted is None else counted.sum().clamp_min(1)
    own = torch.tensor(losses.shape[0], device=losses.device) if counted is None else counted.sum()
    return scope.total(own).clamp_min(1) / scope.ranks


def _with_routers(
    value: Tensor, credits: Sequence[Tensor], routings: Routings, emissions: Sequence[Emission]
) -> Tensor:
    """Adds what trains the routers: score-function terms, which add gradient and no value, and balance losses.

    A layer that ran without a graph, while the losses have one, is being checkpointed; see `equipoise.nn._recompute`.
    """
    names, sources = routings.names, routings.modules
    differentiable = value.requires_grad
    pending: list[Pending] = []
    for index, emission in enumerate(emissions):
        layer, grad_enabled = emission.routing, emission.grad_enabled
        coefficient = credits[index] if layer.score_function else None
        for balance_loss in layer.balance_losses.values():
            value = value + balance_loss
        if coefficient is not None and grad_enabled:
            # A row without credit has no term: its log p may be -inf.
            value = value + score_function(layer.log_prob(), coefficient, coefficient != 0).sum()
        owes = coefficient is not None or len(layer.balance_losses) > 0
        if not grad_enabled and differentiable and owes:
            check_graph(names[index], sources.count(sources[index]), emission.compiled)
            pending.append(Pending(sources[index], layer, coefficient))
    return expect(
        value, pending, [source for source, emission in zip(sources, emissions, strict=True) if emission.compiled]
    )
