# SPDX-License-Identifier: Apache-2.0
"""Compiled primitives."""
