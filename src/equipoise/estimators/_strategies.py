# SPDX-License-Identifier: Apache-2.0
"""The strategies of the paper, as a table of named combinations of a sampler and a correction.

log_p is the router's, at temperature 1. The proposal is q_tau = softmax(a / tau) with a = log_p, or, with Sinkhorn
first, q_tau = sinkhorn(log_p / tau). The estimate is (1/n) sum_i w_i [(f_i - b) grad log p(z_i) + grad f_i] with the
weights of the table; without importance weights the ratio p/q is dropped from them, and the rest stays.

To add a strategy, write its sampler (or its correction) and add one row to the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import check_given
from equipoise.estimators._protocol import Noise, Strategy, draw_noise, import_strategy
from equipoise.estimators._weights import over_batch, per_expert, probability_ratio
from equipoise.sampling import Marginals, Sample, sample_gumbel_matching, sample_independent, sample_skip

Sampler = Callable[..., Sample]
"""Called as `sampler(log_p, noise, temperature=, capacity=, mask=, sinkhorn_first=)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A strategy made of a sampler and a correction for the rows that were dropped. Meets `Strategy`.

    Attributes:
        name: the name on the command line and in results.
        label: the paper's name, for figures.
        sampler: from log_p and noise to a sample; see `Sampler`.
        correction: the part of the weight that makes up for dropped rows.
        skips: whether rows are dropped by priority, so that the noise needs one.
        balanced: whether no expert ever processes more rows than its capacity.
        unbiased: whether the estimate with importance weights is.
        doc: what it approximates, with what, what it requires, when it is unbiased.
    """

    name: str
    label: str
    sampler: Sampler
    correction: Callable[[Sample], Tensor] = per_expert
    skips: bool = False
    balanced: bool
    unbiased: bool
    doc: str

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
            The noise, with priorities only where rows are skipped.
        """
        return draw_noise(shape, priority=self.skips, generator=generator, dtype=dtype, device=device)

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

        Returns:
            The sample, and the weights [..., n] for `reinforce` or `gated_loss`.

        Example:
            >>> log_p = torch.tensor([[0.1, 0.9], [0.2, 0.8]]).log()
            >>> strategy = STRATEGIES["skip-iw"]
            >>> noise = strategy.draw_noise([2, 2], generator=torch.Generator().manual_seed(0))
            >>> s, weight = strategy.draw(log_p, noise, temperature=2.0)
            >>> s.z.shape, weight.shape
            (torch.Size([2]), torch.Size([2]))
        """
        s = self.sampler(
            log_p, noise, temperature=temperature, capacity=capacity, mask=mask, sinkhorn_first=sinkhorn_first
        )
        weight = self.correction(s)
        return s, weight * probability_ratio(log_p, s) if importance else weight


def _independent(log_p: Tensor, noise: Noise, *, capacity: object = None, **how: Any) -> Sample:
    """Draws rows independently; capacity has no say."""
    del capacity
    return sample_independent(log_p, noise.gumbel, **how)


def _skip(log_p: Tensor, noise: Noise, **how: Any) -> Sample:
    """Draws rows independently, then drops what exceeds the capacity."""
    return sample_skip(log_p, noise.gumbel, check_given("noise.priority", noise.priority), **how)


def _gumbel_matching(marginals: Marginals) -> Sampler:
    """Draws balanced assignments, and takes q to be the given marginals."""

    def sampler(log_p: Tensor, noise: Noise, **how: Any) -> Sample:
        return sample_gumbel_matching(log_p, noise.gumbel, marginals=marginals, **how)

    return sampler


_TABLE = (
    Combination(
        name="sample",
        label="Sample",
        sampler=_independent,
        balanced=False,
        unbiased=True,
        doc="""Approximates: the gradient of the expected loss of a batch under the router, eq. (2).
With: independent draws from q_tau and w = p/q_tau. The ideal that ignores capacity.
Requires: q_tau > 0 wherever p > 0; experts that can process any number of rows.
Unbiased when: always.""",
    ),
    Combination(
        name="skip-iw",
        label="Sample Skip IW",
        sampler=_skip,
        skips=True,
        balanced=True,
        unbiased=True,
        doc="""Approximates: the gradient of the expected loss of a batch under the router, eq. (3).
With: independent draws from q_tau, a uniform subset of each expert's rows, and w = p/q_tau * kept * n_z/min(n_z, c_z).
Requires: q_tau > 0 wherever p > 0; every capacity at least 1.
Unbiased when: always.""",
    ),
    Combination(
        name="skip",
        label="Sample Skip",
        sampler=_skip,
        correction=over_batch,
        skips=True,
        balanced=True,
        unbiased=False,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: the same subset as skip-iw, and the average over what is left: w = p/q_tau * kept * n/sum(kept).
Requires: q_tau > 0 wherever p > 0; every capacity at least 1.
Unbiased when: never, unless no row is ever dropped; rows of crowded experts count too little.""",
    ),
    Combination(
        name="gm-iw",
        label="Gumbel-Matching IW",
        sampler=_gumbel_matching("conditional"),
        balanced=True,
        unbiased=True,
        doc="""Approximates: the gradient of the expected loss of a batch under the router, eq. (6).
With: Gumbel-Matching on a/tau and w = p/q(z_i given the other rows' noise).
Requires: q > 0 wherever p > 0; capacities that hold every row.
Unbiased when: always. The weights can be huge where p is high and the balancing makes q low.""",
    ),
    Combination(
        name="gm-sh",
        label="Gumbel-Matching SH",
        sampler=_gumbel_matching("sinkhorn"),
        balanced=True,
        unbiased=False,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: Gumbel-Matching on a/tau and w = p/sinkhorn(a/tau), which stands in for the marginals.
Requires: q > 0 wherever p > 0; capacities that hold every row.
Unbiased when: never exactly, nearly for many rows.""",
    ),
    Combination(
        name="gm",
        label="Gumbel-Matching",
        sampler=_gumbel_matching("proposal"),
        balanced=True,
        unbiased=False,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: Gumbel-Matching on a/tau and w = p/q_tau, which corrects for the temperature and not for the balancing.
Requires: q_tau > 0 wherever p > 0; capacities that hold every row.
Unbiased when: never, unless the capacity never binds.""",
    ),
)

STRATEGIES: MappingProxyType[str, Combination] = MappingProxyType({row.name: row for row in _TABLE})
"""The strategies by name, in the paper's order."""


def get_strategy(name: str) -> Strategy:
    """Finds a strategy by its name in the table, or imports a user's own.

    Args:
        name: one of `STRATEGIES`, or "package.module:name".

    Returns:
        The strategy.

    Example:
        >>> get_strategy("gm-iw").label
        'Gumbel-Matching IW'
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if ":" in name:
        return import_strategy(name)
    raise ValueError(
        f"strategy must be one of {', '.join(STRATEGIES)}, or package.module:name for one of your own, got {name!r}"
    )
