# SPDX-License-Identifier: Apache-2.0
"""The examples of CONTRIBUTING.md are complete: what they define works everywhere that the text says."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import equipoise as eq
from equipoise.audit import Conditions

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
MOST_LINES = 25
SOURCES = Path(eq.__file__).parent


def example(title: str) -> str:
    """The one block of code below a heading."""
    _, found, rest = PAGE.read_text(encoding="utf-8").partition(f"\n### {title}\n")
    assert found, title
    (block,) = re.findall(r"```python\n(.*?)```", rest.partition("\n### ")[0], flags=re.DOTALL)
    assert len(block.splitlines()) <= MOST_LINES
    return block


def run(title: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(example(title), f"CONTRIBUTING.md, {title}", "exec"), names)
    return names


def train(layer: eq.nn.MoE) -> Any:
    """One step; returns the record of it."""
    with eq.nn.capture(layer) as routings:
        y = layer(torch.randn(24, layer.dim, generator=torch.Generator().manual_seed(0)))
    eq.nn.Surrogate()((y - 1).square().mean(-1), routings).backward()
    routings.update()
    assert bool((layer.router.weight.grad != 0).any())
    return routings[0]


def test_strategy_is_all_that_layer_and_audit_need(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = run("A strategy")["uniform"]
    conditions = Conditions(n=4, draws=100_000, row_effect=0.0)
    assert eq.audit.audit(strategy, conditions).verdict == "unbiased"
    for how in ({}, {"top_k": 2}, {"loss": "gating"}):
        routing = train(eq.nn.MoE(16, 4, router=strategy, **how))
        assert routing.sample is not None
        assert len(routing.samples) == how.get("top_k", 1)

    module = types.ModuleType("a_package_of_your_own")
    module.uniform = strategy  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "a_package_of_your_own", module)
    assert eq.get_strategy("a_package_of_your_own:uniform") is strategy
    train(eq.nn.MoE(16, 4, router="a_package_of_your_own:uniform"))


def test_strategy_in_the_table_is_one_file() -> None:
    """The file of the strategies with the example in it: the table has it, and so would every router."""
    lines = example("A strategy").split("\nuniform = ")
    source = (SOURCES / "estimators" / "_strategies.py").read_text(encoding="utf-8")
    table = source.replace("\n_TABLE = (\n", f"\n{lines[0]}\n_TABLE = (\n    {lines[1].rstrip()},\n")
    names: dict[str, Any] = {}
    exec(compile(table, "_strategies.py", "exec"), names)
    assert list(names["STRATEGIES"]) == ["uniform", *eq.STRATEGIES]
    assert "uniform" not in names["PAPER_STRATEGIES"]
    train(eq.nn.MoE(16, 4, router=names["STRATEGIES"]["uniform"]))


def test_router_is_all_that_a_layer_needs() -> None:
    names = run("A router")
    routing = train(names["layer"])
    assert routing.capacity is not None
    assert int(routing.stats.load.max()) <= routing.capacity
    layer = names["layer"].eval()
    x = torch.randn(24, 16)
    assert torch.equal(layer(x), layer(x))  # no noise in evaluation


def test_router_in_the_table_is_one_file() -> None:
    """The file of the peers with the rule and a row in it."""
    rule = example("A router").partition("\nlayer = ")[0]
    row = 'NamedRouter(name="noisy-top", make=without_buffers(NoisyTop), doc="")'
    source = (SOURCES / "nn" / "_peer_rules.py").read_text(encoding="utf-8")
    table = source.replace("\nPEER_ROUTERS = (\n", f"\n{rule}\nPEER_ROUTERS = (\n    {row},\n")
    module = types.ModuleType("peer_rules")
    sys.modules["peer_rules"] = module  # where dataclasses look for their module
    try:
        exec(compile(table, "_peer_rules.py", "exec"), vars(module))
    finally:
        del sys.modules["peer_rules"]
    row, *rest = vars(module)["PEER_ROUTERS"]
    assert (row.name, len(rest)) == ("noisy-top", 6)
    train(eq.nn.MoE(16, 4, router=row.make(4, None)))
