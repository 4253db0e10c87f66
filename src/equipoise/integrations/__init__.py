# SPDX-License-Identifier: Apache-2.0
"""Other libraries' models with routers of ours. Each integration is a package that needs an extra of its name."""

__all__: list[str] = []
