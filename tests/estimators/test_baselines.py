# SPDX-License-Identifier: Apache-2.0
"""Baselines."""

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise.estimators import EMABaseline, ema_update, leave_one_out_baseline
from equipoise.sampling import Sample, sample_gumbel_matching, sample_independent, sample_skip


def kept_only(kept: list) -> Sample:
    """A sample of one expert that kept these rows."""
    flags = torch.tensor(kept)
    z = torch.zeros_like(flags, dtype=torch.int64)
    return Sample(z, torch.zeros(*z.shape, 1), flags, torch.ones_like(z, dtype=torch.float32))


def test_the_average_is_of_what_was_seen_from_the_first_batch_on() -> None:
    ema, s, means = EMABaseline(decay=0.9, start=7.0), kept_only([True, True]), torch.tensor([2.0, 4.0, -1.0, 0.5])
    assert float(ema.value) == 7.0
    for t, mean in enumerate(means):
        ema.update(mean + torch.tensor([-1.0, 1.0]), s)
        weights = 0.9 ** torch.arange(t, -1, -1)
        assert float(ema.value) == pytest.approx(float((weights * means[: t + 1]).sum() / weights.sum()), rel=1e-6)


def test_after_many_batches_the_start_makes_no_difference() -> None:
    averages, s = [EMABaseline(decay=0.5, corrected=corrected) for corrected in (True, False)], kept_only([True])
    for t in range(60):
        for average in averages:
            average.update(torch.tensor([float(t % 7)], dtype=torch.float64), s)
    torch.testing.assert_close(averages[0].value, averages[1].value, rtol=1e-12, atol=0)


def test_each_problem_has_a_start_of_its_own() -> None:
    ema = EMABaseline(decay=0.5, shape=[2])
    ema.update(torch.tensor([[4.0], [9.0]]), kept_only([[True], [False]]))
    ema.update(torch.tensor([[8.0], [6.0]]), kept_only([[True], [True]]))
    assert ema.value.tolist() == pytest.approx([(2 + 8) / 1.5, 6.0])


def test_the_papers_starts_at_zero_and_is_read_before_it_is_updated() -> None:
    ema, s = EMABaseline(decay=0.9, corrected=False), kept_only([True, True])
    read = []
    for losses in ([1.0, 3.0], [4.0, 4.0]):
        read.append(float(ema.value))
        ema.update(torch.tensor(losses), s)
    assert read == pytest.approx([0.0, 0.1 * 2])
    assert float(ema.value) == pytest.approx(0.9 * 0.2 + 0.1 * 4)


def test_average_is_over_kept_rows_without_weights() -> None:
    ema = EMABaseline(decay=0.0)
    ema.update(torch.tensor([1.0, torch.nan, 5.0]), kept_only([True, False, True]))
    assert float(ema.value) == 3.0


def test_one_number_for_each_problem() -> None:
    ema = EMABaseline(decay=0.5, shape=[2], corrected=False)
    ema.update(torch.tensor([[1.0, 3.0], [10.0, 30.0]]), kept_only([[True, True], [True, False]]))
    assert ema.value.tolist() == [1.0, 5.0]


def test_one_number_for_all_problems_counts_rows_not_problems() -> None:
    ema = EMABaseline(decay=0.0)
    ema.update(torch.tensor([[1.0, 3.0], [8.0, 30.0]]), kept_only([[True, True], [True, False]]))
    assert float(ema.value) == 4.0


def test_without_kept_rows_the_value_stays() -> None:
    ema = EMABaseline(decay=0.5, shape=[2])
    ema.update(torch.tensor([[2.0], [2.0]]), kept_only([[True], [False]]))
    assert ema.value.tolist() == [2.0, 0.0]
    assert EMABaseline().value.tolist() == 0.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("corrected", [True, False])
def test_a_loss_that_is_not_finite_does_not_stay_in_the_average(bad: float, corrected: bool) -> None:
    """The losses of such a step are not finite, which says so; the steps after it must not be."""
    ema, without = (EMABaseline(decay=0.5, corrected=corrected) for _ in range(2))
    for losses, finite in (([1.0, 4.0], [True, True]), ([bad, 8.0], [False, True]), ([3.0, 5.0], [True, True])):
        ema.update(torch.tensor(losses), kept_only([True, True]))
        without.update(torch.tensor(losses), kept_only(finite))
        assert torch.equal(ema.value, without.value)
    state = ema.state_dict()
    ema.update(torch.tensor([bad, bad]), kept_only([True, True]))
    assert all(torch.equal(value, state[name]) for name, value in ema.state_dict().items())
    each = EMABaseline(decay=0.5, shape=[2], corrected=False)
    each.update(torch.tensor([[bad], [4.0]]), kept_only([[True], [True]]))
    assert each.value.tolist() == [0.0, 2.0]


def test_state_round_trip() -> None:
    ema, s = EMABaseline(shape=[2]), kept_only([[True], [True]])
    ema.update(torch.tensor([[1.0], [2.0]]), s)
    state = ema.state_dict()
    resumed = EMABaseline(shape=[2])
    resumed.load_state_dict(state)
    for baseline in (ema, resumed):
        baseline.update(torch.tensor([[5.0], [6.0]]), s)
    assert torch.equal(ema.value, resumed.value)
    assert not torch.equal(state["value"], ema.value)
    resumed.load_state_dict({"value": torch.ones(2)})  # of version 0.1
    resumed.update(torch.tensor([[5.0], [6.0]]), s)
    torch.testing.assert_close(resumed.value, 0.99 + 0.01 * torch.tensor([5.0, 6.0]))


def test_value_carries_no_gradient_and_is_at_least_float32() -> None:
    ema = EMABaseline()
    ema.update(torch.ones(1, dtype=torch.bfloat16, requires_grad=True), kept_only([True]))
    assert ema.value.dtype == torch.float32
    assert not ema.value.requires_grad


def test_functional_form_leaves_its_input_alone() -> None:
    value = torch.zeros(())
    ema_update(value, torch.ones(1), kept_only([True]), 0.9)
    assert float(value) == 0.0


def test_leave_one_out(generator: torch.Generator) -> None:
    logits = torch.randn(2, 6, 2, generator=generator)
    s = sample_skip(logits, torch.zeros(2, 6, 2), torch.rand(2, 6, generator=generator), capacity=2)
    losses = torch.rand(2, 6, generator=generator)
    baseline = leave_one_out_baseline(losses.masked_fill(~s.kept, torch.nan), s, allow_biased=True)
    for b in range(2):
        for i in range(6):
            others = [float(losses[b, r]) for r in range(6) if s.kept[b, r] and r != i]
            assert float(baseline[b, i]) == pytest.approx(sum(others) / len(others), rel=1e-5)


def test_leave_one_out_of_a_single_row_is_zero() -> None:
    s = sample_independent(torch.zeros(1, 2), torch.zeros(1, 2))
    assert leave_one_out_baseline(torch.tensor([3.0]), s).tolist() == [0.0]


def test_leave_one_out_is_refused_where_it_is_biased() -> None:
    zeros, losses = torch.zeros(4, 2), torch.ones(4)
    for s, how in (
        (sample_skip(zeros, zeros, torch.rand(4), capacity=4), "a capacity by which rows are dropped"),
        (sample_gumbel_matching(zeros, zeros), "Gumbel-Matching"),
    ):
        with pytest.raises(ValueError, match=f"s must have independent rows .* under {how}: .* draws_baseline"):
            leave_one_out_baseline(losses, s)
        assert leave_one_out_baseline(losses, s, allow_biased=True).tolist() == [1.0] * 4


def draws(kept: list) -> Sample:
    """Some draws of a batch [D, n] that kept these rows."""
    return kept_only(kept)


def test_other_draws_of_the_same_row() -> None:
    s = draws([[True, True], [True, False], [True, True]])
    losses = torch.tensor([[1.0, 10.0], [2.0, torch.nan], [6.0, 30.0]])
    expected = torch.tensor([[4.0, 30.0], [3.5, 20.0], [1.5, 10.0]])
    torch.testing.assert_close(eq.draws_baseline(losses, s), expected)


def test_other_draws_by_weight() -> None:
    s, losses = draws([[True], [True], [True]]), torch.tensor([[1.0], [2.0], [6.0]])
    weight = torch.tensor([[0.5], [3.0], [1.0]])
    expected = torch.tensor([[12 / 4], [6.5 / 1.5], [6.5 / 3.5]])
    torch.testing.assert_close(eq.draws_baseline(losses, s, weight=weight), expected)


def test_row_that_no_other_draw_kept_is_compared_with_all_rows_of_the_others() -> None:
    s = draws([[True, True, True], [False, True, True], [False, True, False]])
    losses = torch.tensor([[7.0, 1.0, 1.0], [torch.nan, 2.0, 3.0], [torch.inf, 4.0, torch.nan]])
    baseline = eq.draws_baseline(losses, s)
    assert baseline[:, 0].tolist() == [3.0, 7.0, 7.0]
    assert eq.draws_baseline(losses, draws([[True, True, True], *[[False] * 3] * 2]))[0].tolist() == [0.0] * 3


def test_other_draws_never_see_their_own(generator: torch.Generator) -> None:
    s = draws([[[True] * 3] * 4] * 5)
    losses = torch.rand(5, 4, 3, generator=generator, dtype=torch.float64)
    changed = losses.clone()
    changed[2] *= 1e6
    before, after = eq.draws_baseline(losses, s), eq.draws_baseline(changed, s)
    assert torch.equal(before[2], after[2])
    assert not bool((before[1] == after[1]).any())


def test_other_draws_carry_no_gradient_and_are_at_least_float32() -> None:
    baseline = eq.draws_baseline(torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True), draws([[True], [False]]))
    assert baseline.dtype == torch.float32
    assert not baseline.requires_grad
    assert baseline.tolist() == [[0.0], [1.0]]


@pytest.mark.usefixtures("unchecked")
def test_other_draws_need_another_draw() -> None:
    with pytest.raises(ValueError, match="losses must hold at least 2 independent draws in their first dim.*, got 1:"):
        eq.draws_baseline(torch.zeros(1, 3), draws([[True] * 3]))
    with pytest.raises(ValueError, match="losses must hold at least 2 independent draws in their first dim.*, got 1:"):
        eq.draws_baseline(torch.zeros(3), kept_only([True] * 3))
    with pytest.raises(ValueError, match=r"losses must have shape \[2, 1\] .* of each draw\), got \[2\]"):
        eq.draws_baseline(torch.zeros(2), draws([[True], [True]]))
    with pytest.raises(ValueError, match=r"weight must have shape \[2, 1\] .* of each draw\), got \[2\]"):
        eq.draws_baseline(torch.zeros(2, 1), draws([[True], [True]]), weight=torch.zeros(2))


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5, float("nan")])
def test_decay_must_be_a_fraction(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got"):
        EMABaseline(decay)


@pytest.mark.usefixtures("unchecked")
def test_decay_must_be_a_number() -> None:
    with pytest.raises(ValueError, match=r"decay must be a number, got 'a': give a Python float"):
        EMABaseline("a")  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("unchecked")
def test_shapes_must_agree() -> None:
    s: Sample = kept_only([[True], [True]])
    with pytest.raises(ValueError, match=r"value must have shape \[2\] \(one number for each problem\), got \[3\]"):
        EMABaseline(shape=[3]).update(torch.zeros(2, 1), s)
    with pytest.raises(ValueError, match=r"losses must have shape \[2, 1\]"):
        EMABaseline().update(torch.zeros(2), s)
    with pytest.raises(ValueError, match=r"losses must have shape \[2, 1\]"):
        leave_one_out_baseline(torch.zeros(2), s)
    state: dict[str, Tensor] = {"value": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"state\['value'\] must have shape \[3\]"):
        EMABaseline(shape=[3]).load_state_dict(state)


@pytest.mark.parametrize("kept", [[True, False, True], [False] * 3])
def test_average_takes_a_sample_or_the_rows_that_it_kept(kept: list[bool]) -> None:
    losses = torch.tensor([1.0, float("nan"), 4.0])
    by_sample, by_rows = eq.EMABaseline(decay=0.5), eq.EMABaseline(decay=0.5)
    by_sample.update(losses, kept_only(kept))
    by_rows.update(losses, torch.tensor(kept))
    assert float(by_rows.value) == float(by_sample.value) == (2.5 if any(kept) else 0.0)
