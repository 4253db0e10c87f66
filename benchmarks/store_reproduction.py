# SPDX-License-Identifier: Apache-2.0
"""Keeps what `equipoise reproduce` found, and brings the documents up to date with it.

    python benchmarks/store_reproduction.py out/reproduce 2026-11-18

Copies the claims and two figures into this folder under the date, and what `--sensitivity` and `--beyond` found if they
were run; makes the documents show these figures, and fills in verdicts (`fill_documents.py`).
"""

import argparse
import re
import shutil
from pathlib import Path

from fill_documents import DOCUMENTS, update_documents

# What is kept of the command's folder, and under which name.
FILES = {
    "claims.json": "claims.json",
    "figures/main.png": "reproduce.png",
    "figures/minority.png": "minority.png",
}
# What the command writes if it is asked to.
EXTRAS = {
    "sensitivity/sensitivity.json": "sensitivity.json",
    "beyond/beyond.json": "beyond.json",
    "figures/beyond.png": "beyond.png",
}


def store(found: Path, date: str, root: Path) -> list[Path]:
    """Copies the files, and updates the documents.

    Args:
        found: the folder of the command.
        date: in front of the names.
        root: of the repository.

    Returns:
        The files written.
    """
    kept: list[Path] = []
    extras = {source: name for source, name in EXTRAS.items() if (found / source).exists()}
    for source, name in (FILES | extras).items():
        path = root / "benchmarks" / f"{date}-{name}"
        shutil.copyfile(found / source, path)
        kept.append(path)
    pictures = "|".join(re.escape(name) for name in (FILES | extras).values() if name.endswith(".png"))
    for path in (root / name for name in DOCUMENTS):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(rf"\d{{4}}-\d\d-\d\d-({pictures})", rf"{date}-\1", text), encoding="utf-8")
    return kept + update_documents(root)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", type=Path, help="the folder of the command")
    parser.add_argument("date", help="as in 2026-11-18")
    options = parser.parse_args()
    for path in store(options.found, options.date, Path(__file__).parents[1]):
        print(f"wrote {path}")
