# SPDX-License-Identifier: Apache-2.0
"""The warning about routing that stays bad: after long enough, once, and not otherwise."""

import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from equipoise.nn import MoE, Routing, RoutingWarning, capture
from equipoise.nn._monitor import EVERY, PATIENCE, Monitor, watch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Hundreds of tiny passes: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
LONG = EVERY * PATIENCE


def record(moe: MoE, *, kept: int = 16, heavy: bool = False) -> Routing:
    """A routing with so many rows kept, and one weight that outweighs all others."""
    torch.manual_seed(0)
    with capture(moe) as routings:
        moe(X)
    routing = routings[0]
    rows = torch.arange(16) < kept
    weight = torch.ones(16)
    if heavy:
        weight[0] = 1e3
    return replace(routing, indices=torch.where(rows, 0, 2)[:, None], weight=weight)


def steps(moe: MoE, count: int, **how: object) -> None:
    routing = record(moe, **how)
    for _ in range(count):
        watch(["moe"], [moe], [routing])


def test_dropping_for_long_warns_once_and_says_what_to_change() -> None:
    moe = MoE(4, 2)
    steps(moe, LONG - 1, kept=4)
    with pytest.warns(
        RoutingWarning, match=r"layer 'moe' drops 75% of its tokens.*marginal_entropy.*capacity_factor"
    ) as w:
        steps(moe, 1, kept=4)
    assert len(w) == 1
    assert f"for {LONG} steps" in str(w[0].message)
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        steps(moe, 2 * LONG, kept=4)
    assert again == []


def test_heavy_weights_for_long_warn() -> None:
    with pytest.warns(RoutingWarning, match=r"effective sample size of 6%.*temperature"):
        steps(MoE(4, 2), LONG, heavy=True)


def test_one_good_reading_starts_again() -> None:
    moe = MoE(4, 2)
    steps(moe, LONG - 1, kept=4)
    steps(moe, 1)
    steps(moe, LONG - 1, kept=4)
    with pytest.warns(RoutingWarning):
        steps(moe, 1, kept=4)


def test_evaluation_does_not_count() -> None:
    moe = MoE(4, 2)
    routing = record(moe, kept=4)
    moe.eval()
    for _ in range(2 * LONG):
        watch(["moe"], [moe], [routing])
    assert moe.routing_monitor is None
    moe.train()
    watch(["moe"], [moe], [routing])
    assert moe.routing_monitor is not None
    assert moe.routing_monitor.steps == 1


def test_good_routing_is_read_once_in_a_while_and_never_warns() -> None:
    class Counted(Monitor):
        readings = 0

        def step(self, routing: Routing) -> list[str]:
            had = "stats" in routing.__dict__
            found = super().step(routing)
            Counted.readings += "stats" in routing.__dict__ and not had
            return found

    moe = MoE(4, 2)
    moe.routing_monitor = Counted()
    routing = record(moe)
    for _ in range(2 * LONG):
        watch(["moe"], [moe], [replace(routing)])
    assert Counted.readings == 2 * PATIENCE


def test_through_update_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.nn._monitor.EVERY", 1)
    monkeypatch.setattr("equipoise.nn._monitor.PATIENCE", 3)
    model = nn.Sequential(*(MoE(4, 2, capacity_factor=0.25) for _ in range(2)))
    other = deepcopy(model)

    def update(net: nn.Module) -> None:
        with torch.no_grad(), capture(net) as routings:
            net(X)
        routings.update()

    for net in (model, other):  # what is remembered is the model's own
        update(net)
        update(net)
        with pytest.warns(RoutingWarning, match=r"layer '0' drops .* layer '1' drops") as w:
            update(net)
        assert len(w) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(6):
                update(net)
