# SPDX-License-Identifier: Apache-2.0
import math

import pytest

import equipoise as eq
import finetune_transformers
import router_only


@pytest.mark.parametrize("router", ["priced", "switch"])
def test_finetune_trains_restores_and_writes(tmp_path, capsys, router):
    small = ["--steps", "2", "--batch", "2", "--positions", "16", "--out", str(tmp_path), "--router", router]
    if router == "switch":  # takes one expert a token, and the model has two
        with pytest.raises(ValueError, match="top_k must be left at 1 with router 'switch'"):
            finetune_transformers.main(small)
        return
    with pytest.warns(eq.nn.RoutingWarning, match="lost the prices"):
        found = finetune_transformers.main(small)
    assert found["text"].startswith("def __init__(self")
    assert math.isfinite(found["loss"])
    assert math.isfinite(found["restored"])
    assert any("routing/model.layers.0.mlp/max_violation" in entry for entry in found["log"])
    assert "nats a byte" in capsys.readouterr().out


def test_router_only_trains_the_gates_in_every_way(capsys):
    found = router_only.main(["--steps", "2", "--batch", "2", "--positions", "16"])
    assert list(found) == ["trained together", "new gates", *router_only.WAYS]
    assert all(math.isfinite(loss) for loss in found.values())
    assert len({round(loss, 6) for loss in found.values()}) == len(found)  # every way moved the gates
