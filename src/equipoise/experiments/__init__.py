# SPDX-License-Identifier: Apache-2.0
"""Runs that measure the library: typed recipes, results written as they come, tables and figures."""
