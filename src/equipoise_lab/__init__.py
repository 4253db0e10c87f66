# SPDX-License-Identifier: Apache-2.0
"""The laboratory: the command line, the paper's experiment, benchmarks and comparisons of the library `equipoise`."""
