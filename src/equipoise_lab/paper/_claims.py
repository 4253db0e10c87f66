# SPDX-License-Identifier: Apache-2.0
"""The paper's claims, each judged by a rule over the results, and `claims.json`, which holds the verdicts."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from equipoise_lab._ledger import write_whole
from equipoise_lab.paper._claims_gating import (
    judge_gating,
    judge_gating_no_weights,
    judge_gating_sinkhorn,
    judge_noise,
)
from equipoise_lab.paper._claims_reinforce import (
    judge_balance_loss,
    judge_learning_rate,
    judge_matching,
    judge_no_weights,
    judge_sinkhorn,
    judge_skip_only,
    judge_solved_from_one,
)
from equipoise_lab.paper._claims_studies import (
    judge_elbo,
    judge_marginals,
    judge_maximum_entropy,
    judge_solver_time,
    judge_variance,
)
from equipoise_lab.paper._results import Result
from equipoise_lab.paper._rules import Outcomes, Part

Verdict = Literal["reproduced", "partly", "not reproduced", "not judged"]
Study = Mapping[str, Any]

VERDICT_RULE = (
    "reproduced, if every statement holds; not reproduced, if a main statement does not hold even in part; partly, "
    "in between; not judged, if a result that the rule needs was not run"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim of the paper with what was found.

    Attributes:
        number: 1 to 16.
        title: the paper's sentence, in our words.
        rule: how it is judged, with all limits.
        measured: what was found, in words and figures.
        verdict: see `VERDICT_RULE`.
        figures: what was measured, by name.
        parts: the statements that the rule consists of, each with its grade.
    """

    number: int
    title: str
    rule: str
    measured: str
    verdict: Verdict
    figures: dict[str, float]
    parts: tuple[Part, ...] = ()


_FROM_RESULTS: dict[int, tuple[str, Callable[[Outcomes], list[Part]]]] = {
    1: ("With REINFORCE, Sample and Sample Skip IW solve the task at every temperature >= 1.", judge_solved_from_one),
    2: (
        "Sample Skip IW is the only estimator within capacity that matches Sample; Sample Skip does not.",
        judge_skip_only,
    ),
    3: (
        "Gumbel-Matching IW and SH are less effective, but good at large temperature; biased Gumbel-Matching is not.",
        judge_matching,
    ),
    5: ("With Sinkhorn first, REINFORCE works only at high temperature.", judge_sinkhorn),
    6: (
        "Gating needs a balance loss of 0.01 or 0.03, balanced sampling, importance weights and a low temperature.",
        judge_gating,
    ),
    7: (
        "Gating works better with Sinkhorn first than without, and then needs a very low temperature.",
        judge_gating_sinkhorn,
    ),
    8: ("Gating without importance weights fails.", judge_gating_no_weights),
    9: (
        "REINFORCE without importance weights works at low temperature, but not with Gumbel-Matching.",
        judge_no_weights,
    ),
    10: (
        "REINFORCE works with and without a balance loss; at a weight of 0.1 everything fails.",
        judge_balance_loss,
    ),
    14: ("Of the learning rates, 0.1 works best overall.", judge_learning_rate),
}
_FROM_STUDIES: dict[int, tuple[str, str, Callable[[Study], list[Part]]]] = {
    4: (
        "traces",
        "The reason why Gumbel-Matching falls short is the variance that large importance weights bring; a higher "
        "temperature avoids them.",
        judge_variance,
    ),
    11: (
        "marginals",
        "Sinkhorn closely approximates the marginals of Gumbel-Matching for n >= 4, and those of the Gibbs "
        "distribution.",
        judge_marginals,
    ),
    12: (
        "maximum_entropy",
        "In the maximum-entropy distribution with marginals p, u_ij is about p_ij^(1/tau) for some tau.",
        judge_maximum_entropy,
    ),
    13: (
        "solver_time",
        "For k << n, cycle cancelling is much faster than the Hungarian algorithm and needs few improvements.",
        judge_solver_time,
    ),
    15: (
        "elbo",
        "Training the ELBO, and not the marginal likelihood, keeps the router's choices deterministic at the end.",
        judge_elbo,
    ),
    16: (
        "noise",
        "For gating, scaled Gumbel noise on the log-probabilities does as well as Gaussian noise or input jitter.",
        judge_noise,
    ),
}


def judge(results: Iterable[Result], studies: Mapping[str, Study]) -> list[Claim]:
    """Judges all claims; one whose results are missing is "not judged".

    Args:
        results: the training runs.
        studies: the other experiments by name.

    Returns:
        The sixteen claims in order.

    Example:
        >>> {claim.verdict for claim in judge([], {})}
        {'not judged'}
    """
    outcomes = Outcomes(results)
    claims = [make_claim(number, title, rule(outcomes)) for number, (title, rule) in _FROM_RESULTS.items()]
    for number, (name, title, rule) in _FROM_STUDIES.items():
        claims.append(make_claim(number, title, rule(studies.get(name, {}))))
    return sorted(claims, key=lambda claim: claim.number)


def decide(parts: Sequence[Part]) -> Verdict:
    """Turns the grades of a claim's statements into a verdict: see `VERDICT_RULE`.

    Args:
        parts: the statements.

    Returns:
        The verdict.

    Example:
        >>> decide([Part(rule="", measured="", grade=1.0), Part(rule="", measured="", grade=0.0, core=False)])
        'partly'
    """
    if not parts or any(part.grade is None for part in parts):
        return "not judged"
    if all(part.grade == 1.0 for part in parts):
        return "reproduced"
    if any(part.grade == 0.0 for part in parts if part.core):
        return "not reproduced"
    return "partly"


def make_claim(number: int, title: str, parts: Sequence[Part]) -> Claim:
    """Puts a claim together from its statements."""
    names = [f"({'abcdefghij'[i]})" for i in range(len(parts))]
    kinds = ["" if part.core else "(secondary) " for part in parts]
    return Claim(
        number=number,
        title=title,
        rule=" ".join(f"{n} {kind}{p.rule}." for n, kind, p in zip(names, kinds, parts, strict=True)),
        measured=" ".join(f"{n} {p.measured}." for n, p in zip(names, parts, strict=True)),
        verdict=decide(parts),
        figures={name: value for part in parts for name, value in part.figures.items() if math.isfinite(value)},
        parts=tuple(parts),
    )


def write_claims(path: Path, claims: Sequence[Claim]) -> None:
    """Writes `claims.json`.

    Args:
        path: the file; its folder is made if it is missing.
        claims: what was judged.
    """
    content = {"verdicts": VERDICT_RULE, "claims": [asdict(claim) for claim in claims]}
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_claims(path: Path) -> list[Claim]:
    """Reads what `write_claims` wrote.

    Args:
        path: the file.

    Returns:
        The claims.
    """
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["claims"]
    parts = [tuple(Part(**part) for part in entry.pop("parts")) for entry in entries]
    return [Claim(**entry, parts=each) for entry, each in zip(entries, parts, strict=True)]
