# SPDX-License-Identifier: Apache-2.0
import pytest

from equipoise.integrations.transformers import _version


@pytest.mark.parametrize("version", ["4.57.1", "5.23.0", "6.0.0.dev0"])
def test_versions_that_were_not_tried_are_refused_in_one_line(monkeypatch, version):
    monkeypatch.setattr(_version.transformers, "__version__", version)
    with pytest.raises(ImportError, match=r"^transformers must be 5\.22\.\* for .*, got " + version) as error:
        _version.check_version()
    assert "\n" not in str(error.value)


def test_patch_versions_are_known(monkeypatch):
    monkeypatch.setattr(_version.transformers, "__version__", "5.22.9")
    _version.check_version()
