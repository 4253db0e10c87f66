# SPDX-License-Identifier: Apache-2.0
"""The compiled parts of the primal-dual solver, from the first pass over the scores to the certificate."""
