# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious oracles: what the fast code is compared with.

Everything is float64, one problem at a time (no batch dimensions), for sizes that can be written out or, where dynamic
programming over counts applies, a few dozen rows. Nothing in the fast code imports this package.
"""

from equipoise.reference._birkhoff import birkhoff_decomposition as birkhoff_decomposition
from equipoise.reference._distribution import AssignmentDistribution as AssignmentDistribution
from equipoise.reference._distribution import independent_distribution as independent_distribution
from equipoise.reference._distribution import variance_inflation as variance_inflation
from equipoise.reference._enumeration import assignment_values as assignment_values
from equipoise.reference._enumeration import best_assignment as best_assignment
from equipoise.reference._enumeration import conditional_values as conditional_values
from equipoise.reference._enumeration import enumerate_assignments as enumerate_assignments
from equipoise.reference._expectation import enumerated_expectation as enumerated_expectation
from equipoise.reference._expectation import exact_expectation as exact_expectation
from equipoise.reference._expectation import exact_gradient as exact_gradient
from equipoise.reference._expectation import exact_logit_gradient as exact_logit_gradient
from equipoise.reference._gibbs import gibbs_distribution as gibbs_distribution
from equipoise.reference._gibbs import gibbs_log_marginals as gibbs_log_marginals
from equipoise.reference._gibbs import log_normaliser as log_normaliser
from equipoise.reference._gibbs import sample_gibbs as sample_gibbs
from equipoise.reference._gumbel_matching import MonteCarloMarginals as MonteCarloMarginals
from equipoise.reference._gumbel_matching import gumbel_matching_conditional as gumbel_matching_conditional
from equipoise.reference._gumbel_matching import gumbel_matching_distribution as gumbel_matching_distribution
from equipoise.reference._gumbel_matching import gumbel_matching_marginals as gumbel_matching_marginals
from equipoise.reference._gumbel_matching import gumbel_matching_redraws as gumbel_matching_redraws
from equipoise.reference._maximum_entropy import MaximumEntropy as MaximumEntropy
from equipoise.reference._maximum_entropy import TemperatureFit as TemperatureFit
from equipoise.reference._maximum_entropy import fit_temperature as fit_temperature
from equipoise.reference._maximum_entropy import maximum_entropy as maximum_entropy
from equipoise.reference._permanent import permanent as permanent
from equipoise.reference._skip import SkipOutcomes as SkipOutcomes
from equipoise.reference._skip import skip_outcomes as skip_outcomes

__all__ = [
    "AssignmentDistribution",
    "MaximumEntropy",
    "MonteCarloMarginals",
    "SkipOutcomes",
    "TemperatureFit",
    "assignment_values",
    "best_assignment",
    "birkhoff_decomposition",
    "conditional_values",
    "enumerate_assignments",
    "enumerated_expectation",
    "exact_expectation",
    "exact_gradient",
    "exact_logit_gradient",
    "fit_temperature",
    "gibbs_distribution",
    "gibbs_log_marginals",
    "gumbel_matching_conditional",
    "gumbel_matching_distribution",
    "gumbel_matching_marginals",
    "gumbel_matching_redraws",
    "independent_distribution",
    "log_normaliser",
    "maximum_entropy",
    "permanent",
    "sample_gibbs",
    "skip_outcomes",
    "variance_inflation",
]
