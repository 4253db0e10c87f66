# SPDX-License-Identifier: Apache-2.0
import sys

import pytest
import torch

from equipoise_lab.compare import load_task, split_task


def test_digits_are_divided_once_and_for_all() -> None:
    task = load_task("digits")
    assert (len(task.train), len(task.validation), len(task.test)) == (1078, 359, 360)
    assert (task.dim, task.num_classes) == (64, 10)
    assert torch.equal(task.test.y, load_task("digits").test.y)
    raw = load_task("digits-raw")
    pixels = torch.cat([raw.train.x, raw.validation.x, raw.test.x])
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert torch.equal(task.test.y, raw.test.y)
    torch.testing.assert_close(task.train.x.mean(0), torch.zeros(64), rtol=0, atol=1e-6)
    torch.testing.assert_close(task.test.x + raw.train.x.mean(0), raw.test.x)


def test_no_row_is_in_two_splits() -> None:
    x = torch.arange(101.0)[:, None]
    task = split_task(x, torch.arange(101) % 4, centred=False)
    rows = torch.cat([task.train.x, task.validation.x, task.test.x]).flatten()
    assert torch.equal(rows.sort().values, x.flatten())
    for split in (task.train, task.validation, task.test):
        assert torch.equal(split.y, split.x.flatten().long() % 4)


def test_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="task must be one of 'digits', 'digits-raw', got 'letters'"):
        load_task("letters")


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"needs scikit-learn, which is missing: pip install 'equipoise\[lab\]'"):
        load_task("digits")
