# SPDX-License-Identifier: Apache-2.0
"""`python -m equipoise`: the command line."""

from equipoise.cli import main

main()
