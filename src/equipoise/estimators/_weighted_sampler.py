# SPDX-License-Identifier: Apache-2.0
"""A strategy made of a sampler and a correction: what a row of the table is.

Legend: n rows (datapoints), k columns (experts), m solves, ... batch dimensions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import check_eps, check_solves, compact_repr
from equipoise.estimators._checks import check_option
from equipoise.estimators._log_p_checks import checked_log_p
from equipoise.estimators._protocol import Noise, draw_noise
from equipoise.estimators._weights import per_expert, probability_ratio
from equipoise.sampling import THIS_PROCESS, Sample, Scope

# Who uses eps, for the message to one that does not.
_MIXING = "a strategy that mixes, such as gm-iw-mix"

Sampler = Callable[..., Sample]
"""Called as `sampler(log_p, noise, temperature=, capacity=, mask=, sinkhorn_first=)`, and `eps=` where it mixes."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WeightedSampler:
    """A strategy made of a sampler and a correction for the rows that were dropped. Meets `Strategy`.

    Attributes:
        name: the name on the command line and in results.
        label: the name in figures; the paper's where it has one.
        sampler: from log_p and noise to a sample; see `Sampler`.
        correction: the part of the weight that makes up for dropped rows.
        skips: whether rows are dropped by priority, so that the noise needs priorities.
        respects_capacity: whether no expert ever processes more rows than its capacity.
        assigns_all: whether every row gets an expert that processes it.
        unbiased: whether the estimate with importance weights is unbiased.
        mixes: whether a flat proposal is mixed in, so that the noise needs a coin for each row.
        eps: the weight of the flat proposal, for a strategy that mixes.
        averages: whether conditionals are averaged over several solves, so that the noise has a matrix for each, and a
            pick.
        solves: the number of solves, for a strategy that averages.
        paper: whether it is one of the paper's strategies.
        doc: what it approximates, with what, what it requires, when it is unbiased.

    Example:
        >>> import equipoise as eq
        >>> def uniform(log_p, noise, *, capacity=None, **how):
        ...     return eq.sample_independent(torch.zeros_like(log_p), noise.gumbel, **how)
        >>> strategy = WeightedSampler(
        ...     name="uniform",
        ...     label="Uniform",
        ...     sampler=uniform,
        ...     respects_capacity=False,
        ...     assigns_all=True,
        ...     unbiased=True,
        ...     doc="Independent draws from the uniform distribution, w = p k.",
        ... )
        >>> log_p = torch.tensor([[0.25, 0.75]]).log()
        >>> s, weight = strategy.draw(log_p, eq.Noise(torch.tensor([[0.0, 1.0]])))
        >>> s.z, weight
        (tensor([1]), tensor([1.5000]))
    """

    name: str
    label: str
    sampler: Sampler
    correction: Callable[[Sample], Tensor] = per_expert
    skips: bool = False
    respects_capacity: bool
    assigns_all: bool = False
    unbiased: bool
    mixes: bool = False
    eps: float = 0.0
    averages: bool = False
    solves: int = 1
    paper: bool = False
    doc: str

    def __repr__(self) -> str:
        """Shows the name, what is claimed, and the options that it has."""
        claims = {"respects_capacity": self.respects_capacity, "assigns_all": self.assigns_all}
        options = {"eps": self.eps if self.mixes else None, "solves": self.solves if self.averages else None}
        return compact_repr(self, name=self.name, **claims, unbiased=self.unbiased, **options)

    def with_options(self, *, eps: float | None = None, solves: int | None = None) -> "WeightedSampler":
        """Makes the same strategy with another mixture weight, or another number of solves.

        Args:
            eps: in [0, 1), for a strategy that mixes; None leaves it.
            solves: at least 1, for a strategy that averages; None leaves it.

        Returns:
            The strategy, of the same name.

        Example:
            >>> from equipoise.estimators import STRATEGIES
            >>> STRATEGIES["gm-iw-avg-mix"].with_options(eps=0.1, solves=4).solves
            4
        """
        check_option("eps", eps, self.mixes, self.name, _MIXING)
        check_option("solves", solves, self.averages, self.name, "a strategy that averages, such as gm-iw-avg")
        eps, solves = self.eps if eps is None else eps, self.solves if solves is None else solves
        check_eps(eps, deterministic=False)
        check_solves(solves)
        return replace(self, eps=eps, solves=solves)

    def draw_noise(
        self,
        shape: Sequence[int],
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Noise:
        """Draws the noise that `draw` needs for logits of this shape.

        Args:
            shape: [..., n, k].
            generator: where the randomness comes from; None is torch's global stream of the device.
            dtype: None is torch's default.
            device: None is the generator's device if there is one, else torch's default.

        Returns:
            The noise, with what the strategy needs: priorities to skip, coins to mix, matrices and picks to average.
        """
        solves = self.solves if self.averages else None
        return draw_noise(
            shape, priority=self.skips, coin=self.mixes, solves=solves, generator=generator, dtype=dtype, device=device
        )

    def draw(
        self,
        log_p: Float[Tensor, "*batch n k"],
        noise: Noise,
        *,
        temperature: float | int | Float[Tensor, "*#batch"] = 1.0,
        capacity: int | Sequence[int] | Int[Tensor, "..."] | None = None,
        mask: Bool[Tensor, "*batch n"] | None = None,
        sinkhorn_first: bool = False,
        importance: bool = True,
        eps: float | int | Float[Tensor, "*#batch"] | None = None,
        scope: Scope = THIS_PROCESS,
    ) -> tuple[Sample, Float[Tensor, "*batch n"]]:
        """Samples experts, and weighs the rows. A pure function of log_p and noise; nothing carries a gradient.

        Args:
            log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1.
            noise: from `draw_noise`.
            temperature: of the proposal, one number or one for each problem.
            capacity: rows an expert may process; None: ceil(rows that are not masked / k).
            mask: False for rows that take no expert.
            sinkhorn_first: balance the proposal in expectation before sampling.
            importance: whether the ratio p/q is part of the weights.
            eps: a mixture weight in place of the strategy's, one number or one for each problem; None is the
                strategy's. Only for one that mixes. It may depend on past batches, not on this noise.
            scope: the rows that share the capacity: those given here, or those of several ranks.

        Returns:
            The sample, and the weights [..., n] for `reinforce` or `gated_loss`.

        Example:
            >>> from equipoise.estimators import STRATEGIES
            >>> log_p = torch.tensor([[0.1, 0.9], [0.2, 0.8]]).log()
            >>> strategy = STRATEGIES["skip-iw"]
            >>> noise = strategy.draw_noise([2, 2], generator=torch.Generator().manual_seed(0))
            >>> s, weight = strategy.draw(log_p, noise, temperature=2.0)
            >>> s.z.shape, weight.shape
            (torch.Size([2]), torch.Size([2]))
        """
        check_option("eps", eps, self.mixes, self.name, _MIXING)
        how: dict[str, Any] = {"temperature": temperature, "capacity": capacity, "mask": mask}
        if self.mixes:
            how["eps"] = self.eps if eps is None else eps
        if scope.ranks > 1:  # a sampler of the user's own need not know it
            how["scope"] = scope
        s = self.sampler(log_p, noise, sinkhorn_first=sinkhorn_first, **how)
        weight = self.correction(s)
        if importance:
            return s, weight * probability_ratio(log_p, s, finite=True)
        return s, checked_log_p(log_p, mask, weight)
