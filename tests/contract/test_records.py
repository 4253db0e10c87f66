# SPDX-License-Identifier: Apache-2.0
"""Results compare by identity, say briefly what they are, and move between devices as a whole."""

import copy
import dataclasses
import importlib
import pickle
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise._core import Record
from equipoise.nn import ROUTERS, MoE, Routing, capture

N, K = 6, 3


def tensor_dataclasses() -> list[type]:
    """Every dataclass of the library, public or not, that holds a tensor."""
    found: set[type] = set()
    for module in pkgutil.walk_packages(eq.__path__, "equipoise."):
        if not module.name.startswith(("equipoise.__main__", "equipoise.assignment._")):
            values = vars(importlib.import_module(module.name)).values()
            found |= {x for x in values if isinstance(x, type) and dataclasses.is_dataclass(x)}
    return sorted((x for x in found if x.__module__.startswith("equipoise") and holds_a_tensor(x)), key=str)


def holds_a_tensor(kind: type) -> bool:
    texts = [str(field.type) for field in dataclasses.fields(kind)]
    return any("Tensor" in text and "Callable" not in text for text in texts)


def make(name: str, seed: int = 0) -> Any:
    """Makes a result of each kind."""
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.randn(N, K, generator=generator).log_softmax(-1)
    strategy = eq.STRATEGIES["gm-iw"]
    noise = strategy.draw_noise([N, K], generator=generator)
    if name == "Routing":
        layer = MoE(4, K, router="gm-iw", z_loss=0.1)
        with capture(layer) as routings:
            layer(torch.randn(2, N // 2, 4, generator=generator), generator=generator)
        return routings[0]
    kinds = {
        "Assignment": lambda: eq.assign(log_p),
        "Balanced": lambda: eq.sinkhorn(log_p),
        "Sample": lambda: eq.sample_gumbel_matching(log_p, noise.gumbel, mask=torch.arange(N) < 5),
        "Rounds": lambda: eq.sample_rounds(log_p, strategy, [noise, noise])[0],
        "Noise": lambda: eq.STRATEGIES["gm-iw-avg-mix"].draw_noise([N, K], generator=generator),
    }
    return kinds[name]()


KINDS = ("Assignment", "Balanced", "Sample", "Rounds", "Noise", "Routing")

TEXTS = {
    "Assignment": r"Assignment\(n=6, k=3, value=-\d\S+, gap=\S+\)",
    "Balanced": r"Balanced\(n=6, k=3, converged=True, iterations=\d+, error=\S+\)",
    "Sample": r"Sample\(n=6, k=3, respects_capacity=True, assigns_all=True, deterministic=False, gap=\S+\)",
    "Rounds": r"Sample\(n=6, k=3, K=2, respects_capacity=True, assigns_all=True, deterministic=False, gap=\S+\)",
    "Noise": r"Noise\(gumbel=float32\[8, 6, 3\], coin=float32\[8, 6\], pick=0\.\d+\)",
    "Routing": r"Routing\(T=6, E=3, K=1, shape=\(2, 3\), capacity=\d, score_function=True, gap=\S+\)",
}


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a result, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Record):
        for field in dataclasses.fields(value):  # pyright: ignore
            yield from tensors(getattr(value, field.name))
    elif isinstance(value, tuple | dict):
        for x in value.values() if isinstance(value, dict) else value:
            yield from tensors(x)


@pytest.mark.parametrize("kind", tensor_dataclasses(), ids=lambda kind: kind.__name__)
def test_no_record_of_tensors_compares_them(kind: type) -> None:
    assert kind.__eq__ is object.__eq__
    assert kind.__hash__ is object.__hash__


def test_the_records_that_users_see_are_among_them() -> None:
    assert set(KINDS) - {"Rounds"} <= {kind.__name__ for kind in tensor_dataclasses()}
    assert {"RoutingStats", "RouteRequest", "Grouped"} <= {kind.__name__ for kind in tensor_dataclasses()}


@pytest.mark.parametrize("name", KINDS)
def test_results_are_equal_to_themselves_alone(name: str) -> None:
    a, b = make(name), make(name)
    assert a == a
    assert a != b
    assert len({a, b, a}) == 2
    assert a in [b, a]


@pytest.mark.parametrize("name", KINDS)
def test_results_say_briefly_what_they_are(name: str) -> None:
    assert re.fullmatch(TEXTS[name], repr(make(name)))


@pytest.mark.parametrize("name", KINDS)
def test_to_moves_every_tensor_and_keeps_dtypes(name: str) -> None:
    a = make(name)
    b = a.to("meta")
    assert type(b) is type(a)
    assert b is not a
    before, after = list(tensors(a)), list(tensors(b))
    assert len(before) == len(after) > 0
    assert {x.device.type for x in after} == {"meta"}
    assert [(x.dtype, x.shape) for x in after] == [(x.dtype, x.shape) for x in before]
    assert {x.device.type for x in before} == {"cpu"}
    repr(b)  # reads no value
    for x, y in zip(before, tensors(a.to(torch.device("cpu"))), strict=True):
        assert x is y


def test_to_keeps_what_is_no_tensor_and_the_gradient() -> None:
    a = make("Routing")
    b = a.to("cpu")
    assert isinstance(b, Routing)
    assert (b.shape, b.capacity, b.score_function) == (a.shape, a.capacity, a.score_function)
    assert set(b.balance_losses) == {"marginal-entropy", "conditional-entropy", "z"}
    assert b.log_p.requires_grad


@pytest.mark.parametrize("name", KINDS[:-1])
def test_results_can_be_copied_and_stored(name: str) -> None:
    a = make(name)
    for b in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        for x, y in zip(tensors(a), tensors(b), strict=True):
            torch.testing.assert_close(x, y)


def test_batches_are_shown_by_their_shape() -> None:
    text = repr(eq.assign(torch.zeros(2, 5, N, K)))
    assert text == "Assignment(batch=[2, 5], n=6, k=3, value=float64[2, 5], gap=float64[2, 5])"
    text = repr(eq.sample_independent(torch.zeros(2, N, K), torch.zeros(2, N, K)))
    assert text.startswith("Sample(batch=[2], n=6, k=3, respects_capacity=False")


def test_what_learns_shows_its_settings() -> None:
    average = eq.EMABaseline(0.5)
    average.value = torch.tensor(0.25)
    assert repr(average) == "EMABaseline(decay=0.5, value=0.25)"
    assert repr(eq.EMABaseline(shape=[3])) == "EMABaseline(decay=0.99, value=float32[3])"
    assert repr(eq.RegressionCritic(4, 2)) == "RegressionCritic(num_experts=4, num_features=2, decay=0.99)"
    assert repr(eq.RegressionCritic(4, shape=[3])).endswith("shape=(3,))")


def test_captured_records_are_shown_by_layer() -> None:
    model = torch.nn.Sequential(MoE(4, K), torch.nn.ReLU(), MoE(4, 2))
    with capture(model) as routings:
        model(torch.randn(N, 4))
    assert re.fullmatch(r"Routings\('0': Routing\(T=6, E=3, .*\), '2': Routing\(T=6, E=2, .*\)\)", repr(routings))


def test_strategies_show_their_options() -> None:
    text = "WeightedSampler(name='gm', respects_capacity=True, assigns_all=True, unbiased=False)"
    assert repr(eq.STRATEGIES["gm"]) == text
    assert repr(eq.STRATEGIES["gm-iw-avg-mix"]).endswith("unbiased=True, eps=0.2, solves=8)")


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_and_rules_show_no_addresses(name: str) -> None:
    for thing in (ROUTERS[name], MoE(4, K, router=name).router.rule, eq.nn.LocalDispatcher()):
        assert " at 0x" not in repr(thing)
        assert len(repr(thing)) < 400
