# SPDX-License-Identifier: Apache-2.0
"""A text that is read in no time, and a comparison in small."""

from pathlib import Path

import pytest

from equipoise_lab.compare.lm import LanguageModels, Text, read_text


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    for number in range(60):
        path = folder / "package" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f_{number}(x):\n    return x + {number}\n")
    return folder


@pytest.fixture
def text(sources: Path) -> Text:
    return read_text(sources)


@pytest.fixture
def small() -> LanguageModels:
    return LanguageModels(
        contenders=("dense", "switch", "skip-iw-prior"),
        seeds=2,
        steps=3,
        batch_size=2,
        context=8,
        dim=8,
        heads=2,
        num_experts=4,
        hidden_dim=8,
        validation_pieces=4,
        test_pieces=4,
    )
