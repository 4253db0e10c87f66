# SPDX-License-Identifier: Apache-2.0
"""The strategies, the paper's and those beyond it, as a table of named combinations of a sampler and a correction.

log_p is the router's, at temperature 1. The proposal is q_tau = softmax(a / tau) with a = log_p, or, with Sinkhorn
first, q_tau = sinkhorn(log_p / tau). The estimate is (1/n) sum_i w_i [(f_i - b) grad log p(z_i) + grad f_i] with the
weights of the table; without importance weights the ratio p/q is dropped from them, and the rest stays.

Beyond the paper, against rare huge weights: a mixture with a flat proposal, which bounds them, and conditionals
averaged over several solves.

To add a strategy, write its sampler (or its correction) and add one row to the table.
"""

from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from equipoise.estimators._checks import check_given
from equipoise.estimators._protocol import Noise, Strategy, import_strategy
from equipoise.estimators._weighted_sampler import WeightedSampler
from equipoise.estimators._weights import over_batch
from equipoise.sampling import (
    Marginals,
    Sample,
    sample_averaged,
    sample_gumbel_matching,
    sample_independent,
    sample_skip,
)


def _independent(log_p: Tensor, noise: Noise, *, capacity: object = None, **how: Any) -> Sample:
    """Draws rows independently; capacity has no say."""
    del capacity
    return sample_independent(log_p, noise.gumbel, **how)


def _skip(log_p: Tensor, noise: Noise, **how: Any) -> Sample:
    """Draws rows independently, then drops what exceeds the capacity."""
    return sample_skip(log_p, noise.gumbel, check_given("noise.priority", noise.priority), coin=noise.coin, **how)


def _gumbel_matching(log_p: Tensor, noise: Noise, *, marginals: Marginals = "conditional", **how: Any) -> Sample:
    """Draws balanced assignments, and takes q to be the given marginals."""
    return sample_gumbel_matching(log_p, noise.gumbel, marginals=marginals, coin=noise.coin, **how)


def _averaged(log_p: Tensor, noise: Noise, **how: Any) -> Sample:
    """Draws balanced assignments, and takes q to be the mean of their conditionals."""
    return sample_averaged(log_p, noise.gumbel, check_given("noise.pick", noise.pick), coin=noise.coin, **how)


_TABLE = (
    WeightedSampler(
        name="sample",
        label="Sample",
        sampler=_independent,
        respects_capacity=False,
        assigns_all=True,
        unbiased=True,
        paper=True,
        doc="""Approximates: the gradient of the expected loss of a batch under the router, eq. (2).
With: independent draws from q_tau and w = p/q_tau. The ideal that ignores capacity.
Requires: q_tau > 0 wherever p > 0; experts that can process any number of rows.
Unbiased when: always.""",
    ),
    WeightedSampler(
        name="skip-iw",
        label="Sample Skip IW",
        sampler=_skip,
        skips=True,
        respects_capacity=True,
        unbiased=True,
        paper=True,
        doc="""Approximates: the gradient of the expected loss of a batch under the router, eq. (3).
With: independent draws from q_tau, a uniform subset of each expert's rows, and w = p/q_tau * kept * n_z/min(n_z, c_z).
Requires: q_tau > 0 wherever p > 0; every capacity at least 1.
Unbiased when: always.""",
    ),
    WeightedSampler(
        name="skip",
        label="Sample Skip",
        sampler=_skip,
        correction=over_batch,
        skips=True,
        respects_capacity=True,
        unbiased=False,
        paper=True,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: the same subset as skip-iw, and the average over what is left: w = p/q_tau * kept * n/sum(kept).
Requires: q_tau > 0 wherever p > 0; every capacity at least 1.
Unbiased when: never, unless no row is ever dropped; rows of crowded experts count too little.""",
    ),
    WeightedSampler(
        name="gm-iw",
        label="Gumbel-Matching IW",
        sampler=_gumbel_matching,
        respects_capacity=True,
        assigns_all=True,
        unbiased=True,
        paper=True,
        doc="""Approximates: the gradient of the expected loss of a batch under the router, eq. (6).
With: Gumbel-Matching on a/tau and w = p/q(z_i given the other rows' noise).
Requires: q > 0 wherever p > 0; capacities that hold every row.
Unbiased when: always. The weights can be huge where p is high and the balancing makes q low.""",
    ),
    WeightedSampler(
        name="gm-sh",
        label="Gumbel-Matching SH",
        sampler=partial(_gumbel_matching, marginals="sinkhorn"),
        respects_capacity=True,
        assigns_all=True,
        unbiased=False,
        paper=True,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: Gumbel-Matching on a/tau and w = p/sinkhorn(a/tau), which stands in for the marginals.
Requires: q > 0 wherever p > 0; capacities that hold every row.
Unbiased when: never exactly, nearly for many rows.""",
    ),
    WeightedSampler(
        name="gm",
        label="Gumbel-Matching",
        sampler=partial(_gumbel_matching, marginals="proposal"),
        respects_capacity=True,
        assigns_all=True,
        unbiased=False,
        paper=True,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: Gumbel-Matching on a/tau and w = p/q_tau, which corrects for the temperature and not for the balancing.
Requires: q_tau > 0 wherever p > 0; capacities that hold every row.
Unbiased when: never, unless the capacity never binds.""",
    ),
    WeightedSampler(
        name="skip-iw-mix",
        label="Skip IW mix",
        sampler=_skip,
        skips=True,
        respects_capacity=True,
        unbiased=True,
        mixes=True,
        eps=0.2,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: skip-iw, where each row draws from the uniform distribution with probability eps: q = (1 - eps) q_tau + eps / k.
Requires: every capacity at least 1; coins among the noise.
Unbiased when: always. p/q is at most k / eps.""",
    ),
    WeightedSampler(
        name="gm-iw-mix",
        label="Gumbel-Matching IW mix",
        sampler=_gumbel_matching,
        respects_capacity=True,
        assigns_all=True,
        unbiased=True,
        mixes=True,
        eps=0.2,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: gm-iw, where each row's logits are replaced by Sinkhorn's prices with probability eps, and the exact conditional.
Requires: capacities that hold every row, and can for every expert that p allows; coins among the noise.
Unbiased when: always. p/q is at most k / eps times exp(how far the other rows' noise moves the prices).""",
    ),
    WeightedSampler(
        name="gm-iw-avg",
        label="Gumbel-Matching IW avg",
        sampler=_averaged,
        respects_capacity=True,
        assigns_all=True,
        unbiased=True,
        averages=True,
        solves=8,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: one of m solves of Gumbel-Matching, for all rows, and w = p / the mean of the m conditionals.
Requires: q > 0 wherever p > 0; capacities that hold every row; m matrices and a pick among the noise.
Unbiased when: always. The weights approach those of the true marginals as m grows.""",
    ),
    WeightedSampler(
        name="gm-iw-avg-mix",
        label="Gumbel-Matching IW avg mix",
        sampler=_averaged,
        respects_capacity=True,
        assigns_all=True,
        unbiased=True,
        mixes=True,
        eps=0.2,
        averages=True,
        solves=8,
        doc="""Approximates: the gradient of the expected loss of a batch under the router.
With: gm-iw-avg, where each row's logits are replaced by Sinkhorn's prices with probability eps in each of the m solves.
Requires: capacities that hold every row, and can for every expert that p allows; m matrices, coins and a pick.
Unbiased when: always. p/q is bounded as in gm-iw-mix.""",
    ),
)

STRATEGIES: MappingProxyType[str, WeightedSampler] = MappingProxyType({row.name: row for row in _TABLE})
"""The strategies by name: the paper's, in its order, then those beyond it."""

PAPER_STRATEGIES: MappingProxyType[str, WeightedSampler] = MappingProxyType(
    {row.name: row for row in _TABLE if row.paper}
)
"""The paper's six strategies."""


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
