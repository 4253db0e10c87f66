# SPDX-License-Identifier: Apache-2.0
"""Compiled parts of the estimators."""
