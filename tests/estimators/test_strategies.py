# SPDX-License-Identifier: Apache-2.0
"""The table of strategies, and the protocol that a user's own has to meet."""

import sys
import types

import pytest
import torch
from torch import Tensor

from equipoise.assignment import assign, conditional_values
from equipoise.balancing import sinkhorn
from equipoise.estimators import STRATEGIES, Combination, Noise, check_strategy, draw_noise, get_strategy
from equipoise.sampling import sample_independent

NAMES = ("sample", "skip-iw", "skip", "gm-iw", "gm-sh", "gm")
EACH = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def log_p(generator: torch.Generator) -> Tensor:
    return torch.randn(3, 8, 2, generator=generator, dtype=torch.float64).log_softmax(-1)


@pytest.fixture
def noise(generator: torch.Generator) -> Noise:
    return draw_noise([3, 8, 2], generator=generator, dtype=torch.float64)


def test_the_table_is_the_papers() -> None:
    assert tuple(STRATEGIES) == NAMES
    assert [s.label for s in STRATEGIES.values()] == [
        "Sample",
        "Sample Skip IW",
        "Sample Skip",
        "Gumbel-Matching IW",
        "Gumbel-Matching SH",
        "Gumbel-Matching",
    ]
    assert [s.name for s in STRATEGIES.values() if s.unbiased] == ["sample", "skip-iw", "gm-iw"]
    assert [s.name for s in STRATEGIES.values() if not s.balanced] == ["sample"]


@EACH
def test_each_says_what_it_estimates(name: str) -> None:
    lines = STRATEGIES[name].doc.splitlines()
    assert [line.split(":")[0] for line in lines] == ["Approximates", "With", "Requires", "Unbiased when"]


@EACH
@pytest.mark.parametrize("sinkhorn_first", [False, True])
@pytest.mark.parametrize("importance", [False, True])
def test_weights_are_those_of_the_definition(
    name: str, sinkhorn_first: bool, importance: bool, log_p: Tensor, noise: Noise
) -> None:
    tau, capacity = 0.5, 4
    s, weight = STRATEGIES[name].draw(
        log_p, noise, temperature=tau, capacity=capacity, sinkhorn_first=sinkhorn_first, importance=importance
    )
    proposal = sinkhorn(log_p / tau).log_p if sinkhorn_first else (log_p / tau).log_softmax(-1)
    scores = proposal + noise.gumbel
    a = assign(scores, capacity)
    z = a.z if name.startswith("gm") else scores.argmax(-1)
    assert torch.equal(s.z, z)
    log_q = {
        "gm-iw": (conditional_values(scores, a) - noise.gumbel).log_softmax(-1),
        "gm-sh": sinkhorn(proposal, capacity).log_p,
    }.get(name, proposal)
    ratio = (log_p - log_q).exp().gather(-1, z[..., None])[..., 0]
    drew = torch.stack([(z == j).sum(-1) for j in range(2)], -1).gather(-1, z)
    correction = {
        "skip-iw": s.kept * drew / drew.clamp_max(capacity),
        "skip": s.kept * 8 / s.kept.sum(-1, keepdim=True),
    }.get(name, torch.ones_like(ratio))
    expected = correction * ratio if importance else correction.double()
    torch.testing.assert_close(weight, expected.double(), rtol=1e-6 if importance else 1e-7, atol=0)


@EACH
def test_capacity_is_respected_by_those_that_say_so(name: str, log_p: Tensor, noise: Noise) -> None:
    skewed = (log_p + torch.tensor([3.0, 0.0])).log_softmax(-1)
    s, _ = STRATEGIES[name].draw(skewed, noise, capacity=4)
    processed = torch.stack([((s.z == j) & s.kept).sum(-1) for j in range(2)], -1)
    assert bool((processed <= 4).all()) == STRATEGIES[name].balanced


@EACH
def test_a_draw_is_a_pure_function_of_its_noise(name: str, log_p: Tensor, noise: Noise) -> None:
    before = torch.get_rng_state()
    first, second = (STRATEGIES[name].draw(log_p, noise, temperature=0.7) for _ in range(2))
    assert torch.equal(first[0].z, second[0].z)
    assert torch.equal(first[1], second[1])
    assert torch.equal(torch.get_rng_state(), before)


@EACH
def test_a_grid_of_temperatures_is_a_batch(name: str, log_p: Tensor, noise: Noise) -> None:
    grid = torch.tensor([0.1, 1.0, 10.0])
    s, weight = STRATEGIES[name].draw(log_p, noise, temperature=grid)
    assert noise.priority is not None
    for i, tau in enumerate(grid.tolist()):
        alone = Noise(noise.gumbel[i], noise.priority[i])
        t, expected = STRATEGIES[name].draw(log_p[i], alone, temperature=tau)
        assert torch.equal(s.z[i], t.z)
        torch.testing.assert_close(weight[i], expected, rtol=1e-6, atol=0)


@EACH
def test_temperature_zero_goes_without_importance_weights(name: str, log_p: Tensor, noise: Noise) -> None:
    s, weight = STRATEGIES[name].draw(log_p, noise, temperature=0.0, importance=False)
    assert bool((weight[s.kept] >= 1).all())
    with pytest.raises(ValueError, match=r"importance weights must have temperature > 0"):
        STRATEGIES[name].draw(log_p, noise, temperature=0.0)


@EACH
def test_noise_comes_from_the_generator(name: str) -> None:
    strategy = STRATEGIES[name]
    before = torch.get_rng_state()
    first, second = (
        strategy.draw_noise([4, 2], generator=torch.Generator().manual_seed(5), dtype=torch.float64) for _ in range(2)
    )
    assert torch.equal(first.gumbel, second.gumbel)
    assert torch.equal(torch.get_rng_state(), before)
    assert (first.priority is not None) == ("skip" in name)
    assert first.gumbel.dtype == torch.float64
    # Strategies that skip and those that do not see the same Gumbel noise.
    shared = draw_noise([4, 2], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert torch.equal(first.gumbel, shared.gumbel)


def test_noise_without_a_generator_is_the_global_stream() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        first = STRATEGIES["skip"].draw_noise([4, 2])
        torch.manual_seed(9)
        second = STRATEGIES["skip"].draw_noise([4, 2])
    assert torch.equal(first.gumbel, second.gumbel)
    assert first.priority is not None
    assert second.priority is not None
    assert torch.equal(first.priority, second.priority)


def test_skipping_without_priorities_is_refused(log_p: Tensor, noise: Noise) -> None:
    with pytest.raises(ValueError, match=r"noise.priority must be given here, got None: draw it too"):
        STRATEGIES["skip"].draw(log_p, Noise(noise.gumbel))


@EACH
def test_each_meets_the_protocol_and_is_found_by_name(name: str) -> None:
    assert check_strategy(get_strategy(name)) is STRATEGIES[name]


def test_unknown_name() -> None:
    with pytest.raises(
        ValueError, match=r"strategy must be one of sample, skip-iw, .*, or package.module:name .*'best'"
    ):
        get_strategy("best")


class Uniform:
    """A user's own: independent draws from a uniform proposal."""

    name, label, balanced, unbiased = "uniform", "Uniform", False, True

    def draw_noise(self, shape, **how):
        return draw_noise(shape, **how)

    def draw(self, log_p, noise, *, temperature=1.0, capacity=None, mask=None, sinkhorn_first=False, importance=True):
        s = sample_independent(torch.zeros_like(log_p), noise.gumbel, mask=mask)
        return s, (s.at_z(log_p) - s.at_z(s.log_q)).exp()


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("a_users_module")
    monkeypatch.setitem(sys.modules, "a_users_module", module)
    return module


def test_a_users_own_is_imported(user_module: types.ModuleType) -> None:
    user_module.mine = Uniform()
    assert get_strategy("a_users_module:mine") is user_module.mine


def test_a_users_own_may_be_a_combination() -> None:
    def sampler(log_p, noise, **how):
        how.pop("capacity")
        return sample_independent(log_p, noise.gumbel, **how)

    mine = Combination(name="mine", label="Mine", sampler=sampler, balanced=False, unbiased=True, doc="")
    assert check_strategy(mine) is mine
    _, weight = mine.draw(torch.zeros(2, 2).log_softmax(-1), mine.draw_noise([2, 2]))
    assert weight.tolist() == [1.0, 1.0]


class NoDraw(Uniform):
    draw = None


class NoLabel(Uniform):
    label = None


class FewKeywords(Uniform):
    def draw(self, log_p, noise, *, temperature=1.0):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            object(),
            r"strategy 'object' must have an attribute name of type str, got none: see equipoise.estimators.Strat",
        ),
        (NoLabel(), r"strategy 'uniform' must have an attribute label of type str, got None"),
        (NoDraw(), r"strategy 'uniform' must have a method draw, got none"),
        (
            FewKeywords(),
            r"draw of strategy 'uniform' must take the keywords .* without capacity, mask, sinkhorn_first, imp",
        ),
    ],
)
def test_what_does_not_meet_the_protocol_is_refused(strategy: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_strategy(strategy)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:x", r"strategy must be in a module that can be imported, got 'no_such_module:x'"),
        (
            "a_users_module:x",
            r"strategy must name an object of its module, got 'a_users_module:x': a_users_module has no x",
        ),
        ("a_users_module:", r"strategy must be the name of a known one or package.module:name, got 'a_users_module:'"),
    ],
)
@pytest.mark.usefixtures("user_module")
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_strategy(path)
