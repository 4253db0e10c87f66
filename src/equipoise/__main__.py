# SPDX-License-Identifier: Apache-2.0
"""The command `equipoise`, and `python -m equipoise`: hands over to `equipoise_lab`, or says how to install it."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from equipoise import __version__

# What the extra `lab` installs, by the names under which it is imported.
_EXTRA = ("typer", "rich", "matplotlib", "jinja2", "sklearn")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 when all went well, 2 after an error of the user.

    Args:
        arguments: what follows the program's name; None takes it from the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from equipoise_lab.cli import main as run

        run(given)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
    if given == ["--version"]:
        sys.stdout.write(f"equipoise {__version__}\n")
        sys.exit(0)
    sys.stderr.write(f"equipoise: error: the command needs {missing}: pip install 'equipoise[lab]'\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
