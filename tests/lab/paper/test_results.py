# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise_lab.paper._results import (
    BASELINES,
    COLUMNS,
    LOSSES,
    VARIANTS,
    Result,
    read_results,
    select,
    select_main,
    write_results,
)

RUN = Result(
    loss="reinforce",
    variant="no-iw",
    method="gm-sh",
    temperature=0.3,
    seed=7,
    balance_weight=0.0,
    learning_rate=0.1,
    baseline="ema",
    mse=0.0123456789012345678,
    mse_expected=math.inf,
    solved=True,
)


def test_the_columns_are_those_that_are_promised(tmp_path: Path) -> None:
    write_results(tmp_path / "results.csv", [RUN])
    header, row = (tmp_path / "results.csv").read_text().splitlines()
    assert (
        header == "loss,variant,method,temperature,seed,balance_weight,learning_rate,baseline,mse,mse_expected,solved"
    )
    assert row == "reinforce,no-iw,gm-sh,0.3,7,0.0,0.1,ema,0.012345678901234568,inf,true"


runs = st.builds(
    Result,
    loss=st.sampled_from(LOSSES),
    variant=st.sampled_from(VARIANTS),
    method=st.sampled_from(["sample", "gm, with a comma"]),
    temperature=st.floats(min_value=0.0, exclude_min=True),
    seed=st.integers(min_value=0),
    balance_weight=st.floats(allow_nan=False),
    learning_rate=st.floats(allow_nan=False),
    baseline=st.sampled_from(BASELINES),
    mse=st.floats(),
    mse_expected=st.floats(),
    solved=st.booleans(),
)


@given(written=st.lists(runs, max_size=4))
def test_results_survive_the_file(written: list[Result], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("csv") / "new" / "results.csv"
    write_results(path, written)
    # repr, because nan is not equal to itself.
    assert repr(read_results(path)) == repr(written)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    write_results(path, [RUN])
    before = path.read_bytes()

    def broken() -> Iterator[Result]:
        yield RUN
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_results(path, broken())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_everybody_may_read_the_file(tmp_path: Path) -> None:
    write_results(tmp_path / "results.csv", [RUN])
    assert stat.S_IMODE((tmp_path / "results.csv").stat().st_mode) == 0o644


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("loss,mse\nreinforce,1\n")
    with pytest.raises(
        ValueError, match=r"results.csv must have the columns loss,variant.*got loss,mse: remove the file"
    ):
        read_results(path)
    path.write_text("")
    with pytest.raises(ValueError, match="got none"):
        read_results(path)


@pytest.mark.parametrize(
    ("column", "value"), [(0, "other"), (1, "other"), (3, "warm"), (4, "1.5"), (7, "other"), (10, "maybe")]
)
def test_a_line_that_is_no_run_is_refused(column: int, value: str, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    write_results(path, [RUN, RUN])
    lines = path.read_text().splitlines()
    cells = lines[2].split(",")
    cells[column] = value
    path.write_text("\n".join([*lines[:2], ",".join(cells)]) + "\n")
    with pytest.raises(ValueError, match=rf"results.csv must hold one run a line, got '.*{value}.*' in line 3: remove"):
        read_results(path)


def test_a_cut_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text(",".join(COLUMNS) + "\nreinforce,plain\n")
    with pytest.raises(ValueError, match="got 'reinforce,plain' in line 2"):
        read_results(path)


def test_select_compares_every_column() -> None:
    runs = [RUN, dataclasses.replace(RUN, seed=8), dataclasses.replace(RUN, temperature=0.30000001192092896)]
    assert select(runs) == runs
    assert select(runs, temperature=0.3, seed=7) == [runs[0], runs[2]]
    assert select(runs, seed=8, method="gm-sh", solved=True) == [runs[1]]
    assert select(runs, temperature=0.31) == []
    assert select(runs, balance_weight=0) == runs


def test_select_refuses_a_column_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"columns must be among loss,.* got tau: see Result"):
        select([RUN], tau=1.0)


def test_the_panels_leave_the_sweeps_out(make_results: Any) -> None:
    results = make_results()
    main = select_main(results)
    assert len(main) == 2 * 3 * 6 * 12 * 20
    assert {(r.loss, r.balance_weight, r.learning_rate) for r in main} == {
        ("reinforce", 0.0, 0.1),
        ("gating", 0.01, 0.1),
    }
