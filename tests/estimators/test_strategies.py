# SPDX-License-Identifier: Apache-2.0
"""The table of strategies, and the protocol that a user's own has to meet."""

import pickle
import sys
import types

import pytest
import torch
from torch import Tensor

from equipoise.assignment import assign, conditional_values
from equipoise.balancing import sinkhorn
from equipoise.estimators import (
    PAPER_STRATEGIES,
    STRATEGIES,
    Noise,
    StrategyTraits,
    WeightedSampler,
    check_strategy,
    draw_noise,
    get_strategy,
    read_traits,
)
from equipoise.sampling import sample_averaged, sample_gumbel_matching, sample_independent, sample_skip

PAPER = ("sample", "skip-iw", "skip", "gm-iw", "gm-sh", "gm")
BEYOND = ("skip-iw-mix", "gm-iw-mix", "gm-iw-avg", "gm-iw-avg-mix")
NAMES = (*PAPER, *BEYOND)
EACH = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def log_p(generator: torch.Generator) -> Tensor:
    return torch.randn(3, 8, 2, generator=generator, dtype=torch.float64).log_softmax(-1)


@pytest.fixture
def noise(generator: torch.Generator, request: pytest.FixtureRequest) -> Noise:
    """What the strategy of the test needs; priorities too, for tests that compare."""
    callspec = getattr(request.node, "callspec", None)
    name = "skip" if callspec is None else callspec.params["name"]
    if name in PAPER:
        return draw_noise([3, 8, 2], generator=generator, dtype=torch.float64)
    return STRATEGIES[name].draw_noise([3, 8, 2], generator=generator, dtype=torch.float64)


def one_of(noise: Noise, i: int) -> Noise:
    """The noise of one problem."""
    return Noise(*(None if x is None else x[i] for x in (noise.gumbel, noise.priority, noise.coin, noise.pick)))


def test_the_table_is_the_papers_and_ours() -> None:
    assert tuple(STRATEGIES) == NAMES
    assert tuple(PAPER_STRATEGIES) == PAPER
    assert all(STRATEGIES[name] is PAPER_STRATEGIES[name] for name in PAPER)
    assert [s.name for s in STRATEGIES.values() if s.paper] == list(PAPER)
    assert [s.label for s in STRATEGIES.values()] == [
        "Sample",
        "Sample Skip IW",
        "Sample Skip",
        "Gumbel-Matching IW",
        "Gumbel-Matching SH",
        "Gumbel-Matching",
        "Skip IW mix",
        "Gumbel-Matching IW mix",
        "Gumbel-Matching IW avg",
        "Gumbel-Matching IW avg mix",
    ]
    assert [s.name for s in STRATEGIES.values() if s.unbiased] == ["sample", "skip-iw", "gm-iw", *BEYOND]
    assert {s.name: s.eps for s in STRATEGIES.values() if s.mixes} == dict.fromkeys(BEYOND[:2] + BEYOND[3:], 0.2)
    assert {s.name: s.solves for s in STRATEGIES.values() if s.averages} == dict.fromkeys(BEYOND[2:], 8)
    assert all(s.eps == 0 and s.solves == 1 for s in PAPER_STRATEGIES.values())
    assert [s.name for s in STRATEGIES.values() if not s.respects_capacity] == ["sample"]
    assert [s.name for s in STRATEGIES.values() if not s.assigns_all] == ["skip-iw", "skip", "skip-iw-mix"]


@EACH
def test_each_says_what_it_estimates(name: str) -> None:
    lines = STRATEGIES[name].doc.splitlines()
    assert [line.split(":")[0] for line in lines] == ["Approximates", "With", "Requires", "Unbiased when"]


@pytest.mark.parametrize("name", PAPER)
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


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("importance", [False, True])
def test_weights_beyond_the_paper_are_those_of_the_sampler(
    name: str, importance: bool, log_p: Tensor, noise: Noise
) -> None:
    how = {"temperature": 0.5, "capacity": 5, "sinkhorn_first": True}
    s, weight = STRATEGIES[name].draw(log_p, noise, importance=importance, **how)
    t = {
        "skip-iw-mix": lambda: sample_skip(log_p, noise.gumbel, noise.priority, eps=0.2, coin=noise.coin, **how),
        "gm-iw-mix": lambda: sample_gumbel_matching(log_p, noise.gumbel, eps=0.2, coin=noise.coin, **how),
        "gm-iw-avg": lambda: sample_averaged(log_p, noise.gumbel, noise.pick, **how),
        "gm-iw-avg-mix": lambda: sample_averaged(log_p, noise.gumbel, noise.pick, eps=0.2, coin=noise.coin, **how),
    }[name]()
    assert torch.equal(s.z, t.z)
    ratio = t.at_z(log_p - t.log_q).exp() if importance else 1.0
    torch.testing.assert_close(weight, ratio * t.keep_weight * t.kept, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", BEYOND[:2] + BEYOND[3:])
@pytest.mark.parametrize("eps", [0.0, 0.7, torch.tensor([0.0, 0.1, 0.7]).double()])
def test_another_mixture_weight_for_one_draw(name: str, eps, log_p: Tensor, noise: Noise) -> None:
    s, weight = STRATEGIES[name].draw(log_p, noise, eps=eps)
    for i, one in enumerate(torch.as_tensor(eps).expand(3).tolist()):
        t, expected = STRATEGIES[name].with_options(eps=one).draw(log_p[i], one_of(noise, i))
        assert torch.equal(s.z[i], t.z)
        torch.testing.assert_close(weight[i], expected, rtol=1e-6, atol=0)
    plain = {"skip-iw-mix": "skip-iw", "gm-iw-mix": "gm-iw", "gm-iw-avg-mix": "gm-iw-avg"}[name]
    if isinstance(eps, float) and eps == 0:
        assert torch.equal(weight, STRATEGIES[plain].draw(log_p, noise)[1])


def test_options_make_another_strategy() -> None:
    ours = STRATEGIES["gm-iw-avg-mix"].with_options(eps=0.5, solves=3)
    assert (ours.eps, ours.solves, ours.name) == (0.5, 3, "gm-iw-avg-mix")
    assert STRATEGIES["gm-iw-avg-mix"].with_options() == STRATEGIES["gm-iw-avg-mix"]
    noise = ours.draw_noise([5, 4, 2])
    assert [list(x.shape) for x in (noise.gumbel, noise.coin, noise.pick)] == [[5, 3, 4, 2], [5, 3, 4], [5]]
    # One draw still has a dimension.
    assert STRATEGIES["gm-iw-avg"].with_options(solves=1).draw_noise([4, 2]).gumbel.shape == (1, 4, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gm-iw", {"eps": 0.1}, r"eps must be left out for strategy 'gm-iw', which does not use it, got 0.1: it is f"),
        ("gm-iw-avg", {"eps": 0.0}, r"eps must be left out for .*: it is for a strategy that mixes, such as gm-iw-mix"),
        (
            "gm-iw-mix",
            {"solves": 4},
            r"solves must be left out for .*, got 4: it is for .* that averages, such as gm-iw-avg",
        ),
        ("gm-iw-mix", {"eps": 1.0}, r"eps must be in \[0, 1\), got 1.0"),
        ("gm-iw-avg", {"solves": 0}, r"solves must be an integer >= 1, got 0"),
    ],
)
def test_options_that_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        STRATEGIES[name].with_options(**options)


def test_a_mixture_weight_is_refused_by_who_does_not_mix(log_p: Tensor, noise: Noise) -> None:
    with pytest.raises(ValueError, match=r"eps must be left out for strategy 'sample'"):
        STRATEGIES["sample"].draw(log_p, noise, eps=0.1)


@EACH
def test_each_can_be_pickled(name: str, log_p: Tensor, noise: Noise) -> None:
    strategy = STRATEGIES[name]
    if strategy.mixes:
        strategy = strategy.with_options(eps=0.3)
    again = pickle.loads(pickle.dumps(strategy))
    assert torch.equal(again.draw(log_p, noise)[1], strategy.draw(log_p, noise)[1])


@EACH
def test_capacity_is_respected_by_those_that_say_so(name: str, log_p: Tensor, noise: Noise) -> None:
    skewed = (log_p + torch.tensor([3.0, 0.0])).log_softmax(-1)
    s, _ = STRATEGIES[name].draw(skewed, noise, capacity=4)
    processed = torch.stack([((s.z == j) & s.kept).sum(-1) for j in range(2)], -1)
    assert bool((processed <= 4).all()) == STRATEGIES[name].respects_capacity


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
    for i, tau in enumerate(grid.tolist()):
        t, expected = STRATEGIES[name].draw(log_p[i], one_of(noise, i), temperature=tau)
        assert torch.equal(s.z[i], t.z)
        torch.testing.assert_close(weight[i], expected, rtol=1e-6, atol=0)


@EACH
def test_temperature_zero_goes_without_importance_weights(name: str, log_p: Tensor, noise: Noise) -> None:
    if STRATEGIES[name].mixes:
        with pytest.raises(ValueError, match=r"eps must be 0 at temperature 0, got 0.2"):
            STRATEGIES[name].draw(log_p, noise, temperature=0.0, importance=False)
    how = {"eps": 0.0} if STRATEGIES[name].mixes else {}
    s, weight = STRATEGIES[name].draw(log_p, noise, temperature=0.0, importance=False, **how)
    assert bool((weight[s.kept] >= 1).all())
    with pytest.raises(ValueError, match=r"importance weights must have temperature > 0"):
        STRATEGIES[name].draw(log_p, noise, temperature=0.0, **how)


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
    assert (first.coin is not None) == ("mix" in name)
    assert (first.pick is not None) == ("avg" in name)
    assert first.gumbel.dtype == torch.float64
    # Strategies that skip or mix and those that do not see the same Gumbel noise, and the same priorities.
    shared = draw_noise([4, 2], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if first.pick is None:
        assert torch.equal(first.gumbel, shared.gumbel)
    if first.priority is not None:
        assert torch.equal(first.priority, shared.priority)


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


def test_mixing_and_averaging_without_their_noise_is_refused(log_p: Tensor, noise: Noise) -> None:
    with pytest.raises(ValueError, match=r"coin must be given where eps > 0"):
        STRATEGIES["gm-iw-mix"].draw(log_p, noise)
    with pytest.raises(ValueError, match=r"noise.pick must be given here, got None: draw it too"):
        STRATEGIES["gm-iw-avg"].draw(log_p, noise)


@pytest.mark.parametrize("solves", [0, -1, 1.5, True])
@pytest.mark.usefixtures("unchecked")
def test_noise_needs_a_solve(solves: object) -> None:
    with pytest.raises(ValueError, match=r"solves must be an integer >= 1, got"):
        draw_noise([4, 2], solves=solves)


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

    name, label, respects_capacity, unbiased = "uniform", "Uniform", False, True

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


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_and_sample_say_the_same_of_the_capacity(name: str) -> None:
    strategy = STRATEGIES[name]
    s, _ = strategy.draw(torch.zeros(7, 3).log_softmax(-1), strategy.draw_noise([7, 3]))
    assert (s.respects_capacity, s.assigns_all) == (strategy.respects_capacity, strategy.assigns_all)
    if s.assigns_all:
        assert bool(s.kept.all())
    if s.respects_capacity:
        assert int(torch.bincount(s.z[s.kept], minlength=3).max()) <= 3


def test_what_a_strategy_may_have_and_does_not_is_the_default() -> None:
    assert read_traits(StrategyTraits, Uniform()) == StrategyTraits()
    assert read_traits(StrategyTraits, STRATEGIES["gm-iw-avg-mix"]) == StrategyTraits(
        assigns_all=True, mixes=True, averages=True
    )
    assert read_traits(StrategyTraits, STRATEGIES["skip"]) == StrategyTraits(paper=True)


def test_a_users_own_may_be_a_weighted_sampler() -> None:
    def sampler(log_p, noise, **how):
        how.pop("capacity")
        return sample_independent(log_p, noise.gumbel, **how)

    mine = WeightedSampler(name="mine", label="Mine", sampler=sampler, respects_capacity=False, unbiased=True, doc="")
    assert check_strategy(mine) is mine
    _, weight = mine.draw(torch.zeros(2, 2).log_softmax(-1), mine.draw_noise([2, 2]))
    assert weight.tolist() == [1.0, 1.0]


class MixesByWord(Uniform):
    mixes = "yes"


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
        (MixesByWord(), r"strategy 'uniform' must have an attribute mixes of type bool, or none, got 'yes': see"),
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
