# SPDX-License-Identifier: Apache-2.0
"""The command line. One file a command, registered with one line in `_app`."""

from equipoise_lab.cli._app import app as app
from equipoise_lab.cli._app import main as main
