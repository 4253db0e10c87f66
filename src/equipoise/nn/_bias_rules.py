# SPDX-License-Identifier: Apache-2.0
"""Rules that select by the logits and a number for each expert, which is updated between steps, outside forward.

Legend: T rows (tokens), E experts, K experts a row.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from equipoise._core import check_at_least, check_fraction, check_positive
from equipoise.assignment import assign
from equipoise.nn._named_router import NamedRouter, with_buffers
from equipoise.nn._routing import Routing
from equipoise.nn._rules import RouteRequest
from equipoise.nn._selection import choose_top
from equipoise.ops import count_groups
from equipoise.sampling import THIS_PROCESS, Scope

# Averages over some 64 batches to the last one alone; neighbours differ too little for more of them to help.
_RATES = tuple(2.0**-halvings for halvings in range(6, -1, -1))
# Of the errors by which one is chosen: long enough to compare them, short enough to notice that the drift changed.
_ERROR_DECAY = 0.95


class WideBuffers(nn.Module):
    """A module whose floating-point buffers stay float32 when the model is cast: small steps vanish in half precision.

    They still move between devices.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "WideBuffers":
        wide = {name: x for name, x in self._buffers.items() if x is not None and x.is_floating_point()}
        super()._apply(fn, recurse)
        for name, before in wide.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


def average(
    x: Float[Tensor, "..."], rows: Int[Tensor, ""], scope: Scope
) -> tuple[Float[Tensor, "..."], Int[Tensor, ""]]:
    """Averages what each rank found over all ranks, with its rows for weight; without any, 0.

    Args:
        x: this rank's.
        rows: that it was found from.
        scope: of the rows.

    Returns:
        The average, and the rows of all ranks. In one process x itself, and the rows.
    """
    total = scope.everywhere(rows)
    return scope.everywhere(x * (rows / total.clamp_min(1)).to(x.dtype)), total


class RunningPrices(WideBuffers):
    r"""The exact prices of balanced assignments, averaged over past batches, over as many as they stay true for.

    For each batch that is observed, the noise-free assignment of the logits is solved, with K experts a row and
    capacity ceil(K n / E). Its prices, shifted to mean 0, are those of the distribution plus sampling noise, and the
    distribution drifts as the model trains: a long average lags, a short one is noisy. Several are kept,

    .. math::
        \lambda^r \leftarrow \lambda^r + \max\{r, 1/t\} (\lambda_t - \lambda^r), \qquad r = 1/64, 1/32, \ldots, 1,

    all of them plain means at first. In use is the one that predicted best: whose squared distance to the prices of the
    next batch, before it entered, was the least over some 20 batches. No rate has to be tuned to the drift.
    `argmax_j a_ij - prices_j` then needs no batch, is causal, and stays near balance as long as the rows resemble those
    seen. Prices are in logit units.

    Example:
        >>> average = RunningPrices(2)
        >>> average.take(torch.tensor([[3.0, 0.0], [1.0, 0.0]]))
        >>> average.prices  # any price between 1 and 3 would do; 2 apart from each other, mean 0
        tensor([...])
    """

    prices: Tensor
    averages: Tensor
    errors: Tensor
    batches: Tensor

    def __init__(
        self, num_experts: int, decay: float | None = None, *, device: torch.device | str | None = None
    ) -> None:
        """Starts at 0.

        Args:
            num_experts: E.
            decay: how much of the average stays, in [0, 1), for one rate 1 - decay; 0.95 remembers some 20 batches.
                None: the rate follows the drift.
            device: of the buffers.
        """
        super().__init__()
        if decay is not None:
            check_fraction("decay", decay)
        self.decay = decay
        self.rates = _RATES if decay is None else (1 - decay,)
        self.register_buffer("prices", torch.zeros(num_experts, device=device))
        self.register_buffer("averages", torch.zeros(len(self.rates), num_experts, device=device))
        self.register_buffer("errors", torch.zeros(len(self.rates), device=device))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64, device=device))
        self.register_load_state_dict_pre_hook(_complete_state)

    def reset_parameters(self) -> None:
        """Forgets all batches. Deferred initialisation calls this after `to_empty`."""
        for buffer in (self.prices, self.averages, self.errors, self.batches):
            buffer.zero_()

    @torch.no_grad()
    def take(
        self,
        logits: Float[Tensor, "T E"],
        mask: Tensor | None = None,
        top_k: int = 1,
        *,
        stands_for: int = 1,
        scope: Scope = THIS_PROCESS,
    ) -> None:
        """Solves one batch and takes its prices in. A batch without rows changes nothing.

        Over several ranks the prices of each scope are averaged, with its number of rows for weight.

        Args:
            logits: the router's, without noise.
            mask: False for rows that do not count.
            top_k: K: prices that balance one expert a row do not balance several.
            stands_for: how many batches this one stands for, where not every batch is solved.
            scope: the rows that are balanced together.
        """
        a = scope.assign(logits, top_k=top_k, mask=mask)
        own = torch.as_tensor(logits.shape[0] if mask is None else mask.sum(), device=logits.device)
        solved, rows = average(a.prices - a.prices.mean(), own, scope)
        self._enter(solved, rows > 0, stands_for)

    def _enter(self, solved: Float[Tensor, "E"], counts: Bool[Tensor, ""], stands_for: int) -> None:
        """Takes in the prices of a batch, if it counts, with the rates of as many batches as it stands for."""
        change = solved - self.averages
        # Before the first batch there is no prediction, and so no error.
        predictions = self.batches.clamp_min(1)
        share = (1 / predictions).clamp_min(1 - _ERROR_DECAY**stands_for) * (counts & (self.batches > 0))
        self.errors += (share * (change.square().sum(-1) - self.errors)).to(self.errors.dtype)
        self.batches += counts
        rates = torch.tensor([1 - (1 - rate) ** stands_for for rate in self.rates], device=change.device)
        rates = rates.clamp_min(1 / self.batches.clamp_min(1)) * counts
        self.averages += (rates.unsqueeze(-1) * change).to(self.averages.dtype)
        # Of equal errors, as after the first batch, the longest average.
        best = self.averages.index_select(0, self.errors.argmin().reshape(1)).squeeze(0)
        self.prices.copy_(torch.where(counts, best, self.prices))

    def extra_repr(self) -> str:
        """Shows the settings."""
        return f"{self.prices.shape[0]}, decay={self.decay}"


def _complete_state(average: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets a state of version 0.1.0 be loaded, which had one average: all of them begin there."""
    prices = state.get(f"{prefix}prices")
    if isinstance(average, RunningPrices) and prices is not None and f"{prefix}averages" not in state:
        state[f"{prefix}averages"] = prices.expand(len(average.rates), -1)
        state[f"{prefix}errors"] = prices.new_zeros(len(average.rates))


class Priced(nn.Module):
    """Selects by logits minus the average price of past batches, gated by p. No batch is needed to route.

    What loss-free biases and quantile balancing approach step by step, from the exact solution of the dual problem.
    """

    gated = True

    def __init__(
        self,
        num_experts: int,
        *,
        top_k: int = 1,
        decay: float | None = None,
        limited: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Sets up the rule.

        Args:
            num_experts: E.
            top_k: K.
            decay: of the average; None: it follows the drift.
            limited: whether the layer's capacity holds in training.
            device: of the buffers.
        """
        super().__init__()
        check_at_least("top_k", top_k, 1)
        self.top_k, self.limited = top_k, limited
        self.average = RunningPrices(num_experts, decay, device=device)

    def extra_repr(self) -> str:
        """Shows the settings."""
        return f"top_k={self.top_k}, limited={self.limited}"

    def forward(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        """Chooses experts.

        Args:
            logits: the router's.
            request: everything else.

        Returns:
            The decision, with the prices that were used.
        """
        prices = self.average.prices.clone()  # a record of this step may not change with the next
        return choose_top(logits.detach() - prices, request, top_k=self.top_k, prices=prices)

    def observe(self, routing: Routing) -> None:
        """Takes in a batch, after its step.

        Args:
            routing: what this rule decided.
        """
        self.average.take(routing.compared, routing.mask, self.top_k, scope=routing.scope)


class Quantile(WideBuffers):
    r"""Selects by logits minus prices that one step of quantile balancing a batch moves; gated by p.

    Coordinate descent on the dual of the balanced assignment, whose exact solution `Priced` averages. With t_i half-way
    between row i's K-th and next offer, and c = K n / E,

    .. math::
        p_j \leftarrow \text{half-way between the } c\text{-th and the next largest of } a_{ij} - t_i \text{ over } i.

    To compare with: Megatron-core and torchtitan balance in this way, one step for each batch.

    References:
        Su, Quantile balancing (2026), as in Megatron-core's `qb_dual_update`.
    """

    gated = True
    prices: Tensor

    def __init__(
        self,
        num_experts: int,
        *,
        top_k: int = 1,
        steps: int = 1,
        limited: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Starts with equal prices.

        Args:
            num_experts: E.
            top_k: K.
            steps: of coordinate descent on each batch.
            limited: whether the layer's capacity holds in training.
            device: of the buffer.
        """
        super().__init__()
        check_at_least("top_k", top_k, 1)
        check_at_least("steps", steps, 1)
        self.top_k, self.steps, self.limited = top_k, steps, limited
        self.register_buffer("prices", torch.zeros(num_experts, device=device))

    def reset_parameters(self) -> None:
        """Makes all prices equal again. Deferred initialisation calls this after `to_empty`."""
        self.prices.zero_()

    def extra_repr(self) -> str:
        """Shows the settings."""
        return f"{self.prices.shape[0]}, top_k={self.top_k}, steps={self.steps}, limited={self.limited}"

    def forward(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        """Chooses experts.

        Args:
            logits: the router's.
            request: everything else.

        Returns:
            The decision, with the prices that were used.
        """
        prices = self.prices.clone()
        return choose_top(logits.detach() - prices, request, top_k=self.top_k, prices=prices)

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        """Moves the prices, after a step.

        Args:
            routing: what this rule decided.
        """
        logits = routing.compared
        logits = routing.scope.rows(logits if routing.mask is None else logits[routing.mask])
        rows, num_experts = logits.shape
        if self.top_k >= num_experts:
            return
        prices, share = self.prices.to(logits.dtype), min(max(self.top_k * rows // num_experts, 1), rows)
        for _ in range(self.steps if rows else 0):
            top = (logits - prices).topk(self.top_k + 1, dim=-1).values[:, -2:]
            wanted = (logits - top.mean(-1, keepdim=True)).sort(dim=0, descending=True).values
            prices = (wanted[share - 1] + wanted[min(share, rows - 1)]) / 2
        prices, rows = average(prices - prices.mean(), torch.tensor(rows, device=logits.device), routing.scope)
        self.prices.copy_(torch.where(rows > 0, prices, self.prices))


def expert_bias(
    logits: Float[Tensor, "*batch T E"], top_k: int = 1, *, mask: Bool[Tensor, "*batch T"] | None = None
) -> Float[Tensor, "*batch E"]:
    r"""Computes the bias that balances a batch: `(logits + bias).topk(top_k)` gives every expert K T / E rows.

    The bias is minus the prices of the exact balanced assignment, shifted to mean 0. The K largest of logits plus bias
    are the optimal balanced choice, except for rows that are tied at these prices, at most about one an expert.
    Loss-free biases and quantile balancing approach this vector in many steps. Use `expert_bias` with a router of your
    own.

    Args:
        logits: what the router compares; the bias is in their units.
        top_k: K.
        mask: False for rows that do not count.

    Returns:
        The bias, in the dtype of the logits, without gradient.

    Example:
        All rows prefer expert 0. With the bias two do, one is tied, and one prefers expert 1.

        >>> logits = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
        >>> bias = expert_bias(logits)
        >>> bias, (logits + bias).diff().squeeze(-1)
        (tensor([-0.5000,  0.5000]), tensor([-2.0000, -1.0000,  0.0000,  0.5000]))
    """
    a = assign(logits.detach(), top_k=top_k, mask=mask)
    return (a.prices.mean(-1, keepdim=True) - a.prices).to(logits.dtype)


class LossFree(WideBuffers):
    r"""Selects by logits plus a bias that is nudged towards balance after each step; gated by p, without the bias.

    .. math::
        b_j \leftarrow b_j + u \, \text{sign}(\bar c - c_j),

    with c_j the rows of expert j and the mean over experts. DeepSeek adds the bias to sigmoid scores; here it is added
    to the logits, so that it is minus a price.

    References:
        Wang, Gao, Zhao, Sun, Dai, Auxiliary-loss-free load balancing strategy for mixture-of-experts (2024).
    """

    gated = True
    bias: Tensor

    def __init__(
        self,
        num_experts: int,
        *,
        top_k: int = 1,
        rate: float = 1e-3,
        limited: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Starts without bias.

        Args:
            num_experts: E.
            top_k: K.
            rate: u, in logit units a step. The published 0.001 is for long runs; short ones need more.
            limited: whether the layer's capacity holds in training.
            device: of the buffer.
        """
        super().__init__()
        check_at_least("top_k", top_k, 1)
        check_positive("rate", rate)
        self.top_k, self.rate, self.limited = top_k, rate, limited
        self.register_buffer("bias", torch.zeros(num_experts, device=device))

    def reset_parameters(self) -> None:
        """Takes the bias away again. Deferred initialisation calls this after `to_empty`."""
        self.bias.zero_()

    def extra_repr(self) -> str:
        """Shows the settings."""
        return f"{self.bias.shape[0]}, top_k={self.top_k}, rate={self.rate}, limited={self.limited}"

    def forward(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        """Chooses experts.

        Args:
            logits: the router's.
            request: everything else.

        Returns:
            The decision, with minus the bias as prices.
        """
        return choose_top(logits.detach() + self.bias, request, top_k=self.top_k, prices=-self.bias)

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        """Moves the bias, after a step.

        Args:
            routing: what this rule decided.
        """
        num_experts = routing.num_experts
        load = routing.scope.everywhere(count_groups(routing.indices.reshape(-1), num_experts + 1)[:num_experts])
        self.bias += self.rate * torch.sign(load.sum() - num_experts * load)


BIAS_ROUTERS = (
    NamedRouter(
        name="loss-free",
        make=with_buffers(LossFree),
        options=("top_k", "rate"),
        doc="logits plus a bias that is moved towards balance after each step, gated; no capacity",
    ),
    NamedRouter(
        name="quantile",
        make=with_buffers(Quantile),
        options=("top_k",),
        doc="logits minus prices that one step of quantile balancing a batch moves, gated; no capacity",
    ),
    NamedRouter(
        name="priced",
        make=with_buffers(Priced),
        options=("top_k",),
        doc="logits minus a running average of the exact prices of past batches, gated; no capacity",
    ),
)
"""The rules of this file as routers with a name."""
