# SPDX-License-Identifier: Apache-2.0
"""Everything that takes log_p refuses logits in its place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import (
    STRATEGIES,
    gate,
    gated_loss,
    importance_weight,
    load_balance_loss,
    marginal_entropy_loss,
    reinforce,
    sample_independent,
)
from equipoise.estimators._log_p_checks import checked_log_p

N, K = 40, 3

# Dynamo traces the checking wrappers that the tests put around every function, and cannot: hence a new interpreter.
COMPILED = """
import torch
import equipoise as eq

s = eq.sample_independent(torch.zeros(40, 3), torch.zeros(40, 3))
losses = torch.ones(40)
step = torch.compile(lambda x: eq.reinforce(x, s, losses, weight=losses), fullgraph=True, backend="aot_eager")
step(torch.zeros(40, 3, requires_grad=True).log_softmax(-1)).backward()
try:
    step(-3.0 - torch.rand(40, 3, requires_grad=True))
except ValueError as error:
    print(error)
"""


def call(name: str, log_p: Tensor, mask: Tensor | None = None) -> Any:
    """Calls one of the functions, with a sample that belongs to the shape."""
    s = sample_independent(torch.zeros(log_p.shape), torch.zeros(log_p.shape), mask=mask)
    losses = torch.ones(log_p.shape[:-1])
    strategy = STRATEGIES["skip-iw"]
    noise = strategy.draw_noise(log_p.shape, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], Any]] = {
        "importance_weight": lambda: importance_weight(log_p, s),
        "reinforce": lambda: reinforce(log_p, s, losses),
        "reinforce, weights given": lambda: reinforce(log_p, s, losses, weight=losses),
        "gate": lambda: gate(log_p, s),
        "gated_loss": lambda: gated_loss(log_p, s, losses),
        "gated_loss, weights given": lambda: gated_loss(log_p, s, losses, weight=losses),
        "draw": lambda: strategy.draw(log_p, noise, mask=mask),
        "draw without importance": lambda: strategy.draw(log_p, noise, mask=mask, importance=False),
        "load_balance_loss": lambda: load_balance_loss(log_p, mask=mask),
        "marginal_entropy_loss": lambda: marginal_entropy_loss(log_p, mask=mask),
    }
    return calls[name]()


NAMES = (
    "importance_weight",
    "reinforce",
    "reinforce, weights given",
    "gate",
    "gated_loss",
    "gated_loss, weights given",
    "draw",
    "draw without importance",
    "load_balance_loss",
    "marginal_entropy_loss",
)


@pytest.mark.parametrize("name", NAMES)
def test_logits_in_the_place_of_log_p_are_refused(name: str) -> None:
    # Below zero, so that no single number shows that it is not a log-probability.
    logits = torch.full([N, K], -3.0)
    message = r"log_p must hold log-probabilities, with rows that sum to 1, got .* 0\.1494 in row 0: pass torch"
    with pytest.raises(ValueError, match=message):
        call(name, logits)
    call(name, logits.log_softmax(-1))


@pytest.mark.parametrize("name", NAMES)
def test_masked_rows_may_hold_anything(name: str) -> None:
    log_p = torch.zeros(N, K).log_softmax(-1)
    mask = torch.ones(N, dtype=torch.bool)
    mask[::3] = False
    wanted = call(name, log_p, mask)
    log_p[::3] = torch.nan
    found = call(name, log_p, mask)
    if name.startswith("draw"):
        (wanted_s, wanted), (found_s, found) = wanted, found
        assert torch.equal(found_s.z, wanted_s.z)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("k", [1, 64, 1024])
def test_rounding_is_no_reason_to_refuse(dtype: torch.dtype, k: int) -> None:
    logits = torch.randn(16, k, generator=torch.Generator().manual_seed(0)).to(dtype)
    through = torch.zeros(())
    assert checked_log_p(logits.log_softmax(-1), None, through) is through


def test_the_row_is_named_within_its_problem() -> None:
    log_p = torch.zeros(5, 40, K).log_softmax(-1)
    log_p[4, 39] += 1.0
    with pytest.raises(ValueError, match=r"sum to 2\.718 in row 39 of problem \[4\]"):
        checked_log_p(log_p, None, torch.zeros(()))


def test_no_rows_have_nothing_to_refuse() -> None:
    assert float(reinforce(torch.zeros(0, K), *_empty(), weight=torch.zeros(0))) == 0.0


def _empty() -> tuple[Any, Tensor]:
    return sample_independent(torch.zeros(0, K), torch.zeros(0, K)), torch.zeros(0)


def test_check_is_a_well_formed_operator() -> None:
    log_p = torch.zeros(4, 2).log_softmax(-1)
    found = torch.library.opcheck(
        torch.ops.equipoise.checked_log_p, (torch.ones(4), log_p, torch.ones(4, dtype=torch.bool))
    )
    assert set(found.values()) == {"SUCCESS"}


def test_compiled_code_refuses_logits_too(fresh_python: Callable[..., str]) -> None:
    assert "log_p must hold log-probabilities, with rows that sum to 1" in fresh_python(COMPILED)
