# SPDX-License-Identifier: Apache-2.0
"""The examples of CONTRIBUTING.md run as they stand, and are all that is needed."""

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.__main__ import main
from equipoise.assignment import METHODS, conditional_values

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
MOST_LINES = 25
Example = Callable[[str], None]


def example_of(heading: str) -> str:
    """The only block of Python below a heading."""
    sections = re.split(r"^#+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    section = next(text for text in sections if text.startswith(f"{heading}\n"))
    (block,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    return block


@pytest.fixture
def run_example() -> Iterator[Example]:
    """Runs an example; afterwards methods and commands are those of before."""
    commands = importlib.import_module("equipoise_lab.cli").app.registered_commands
    methods_before, commands_before = dict(METHODS), list(commands)
    yield lambda heading: exec(compile(example_of(heading), PAGE.name, "exec"), {"__name__": "example"})
    METHODS.clear()
    METHODS.update(methods_before)
    commands[:] = commands_before


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize("heading", ["An assignment method", "A command"])
def test_examples_are_short(heading: str) -> None:
    assert 10 < len(example_of(heading).splitlines()) <= MOST_LINES


class TestMethod:
    def test_is_known_once_it_is_in_the_table(self, run_example: Example) -> None:
        with pytest.raises(ValueError, match="method must be one of 'auto', .*, got 'first-fit'"):
            eq.assign(torch.zeros(2, 2), method="first-fit")
        run_example("An assignment method")
        assert eq.assign(torch.zeros(2, 2), method="first-fit").z.tolist() == [0, 1]
        with pytest.raises(ValueError, match="'first-fit', got 'first'"):
            eq.assign(torch.zeros(2, 2), method="first")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", [(6, 3), (2, 3, 6, 3), (0, 6, 3), (2, 0, 3), (7, 1)])
    def test_takes_every_legal_input(self, run_example: Example, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        run_example("An assignment method")
        scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        scores[..., :2, 0] = -torch.inf if shape[-1] > 1 else 0.0
        mask = torch.arange(shape[-2]).expand(shape[:-1]) % 3 != 2
        for capacity in (None, shape[-2], [shape[-2] * (j == shape[-1] - 1) for j in range(shape[-1])]):
            best = eq.assign(scores, capacity, mask=mask)
            a = eq.assign(scores, capacity, mask=mask, prices=best.prices, method="first-fit")
            assert torch.equal(a.z < shape[-1], mask)
            assert bool((a.counts <= a.capacity).all())
            torch.testing.assert_close(a.gap >= best.value - a.value - 1e-9, torch.ones_like(a.gap, dtype=torch.bool))

    def test_has_what_methods_have(self, run_example: Example) -> None:
        run_example("An assignment method")
        scores = torch.tensor([[1.0, 3.0], [4.0, 0.0], [0.0, 1.0], [5.0, 4.0]], requires_grad=True)
        a = eq.assign(scores, method="first-fit")
        assert a.z.tolist() == [0, 0, 1, 1]
        a.value.backward()
        assert scores.grad is not None
        assert scores.grad.argmax(-1).tolist() == a.z.tolist()
        both = torch.vmap(lambda x: eq.assign(x, method="first-fit").z)(torch.stack([scores, -scores]).detach())
        assert both[0].tolist() == a.z.tolist()
        with pytest.raises(ValueError, match="assignment must be optimal"):
            conditional_values(scores.detach(), a)

    @pytest.mark.parametrize(
        ("scores", "message"),
        [([[1.0, torch.nan]], "scores must not be NaN"), ([[0.0, -torch.inf]] * 2, "scores must leave the rows room")],
    )
    def test_says_what_is_wrong(self, run_example: Example, scores: list[list[float]], message: str) -> None:
        run_example("An assignment method")
        with pytest.raises(ValueError, match=message):
            eq.assign(torch.tensor(scores), method="first-fit")


class TestCommand:
    def test_help_shows_it(self, run_example: Example, capsys: pytest.CaptureFixture[str]) -> None:
        title = "Print the expert of every row"
        assert title not in run(capsys, "--help")[1]
        run_example("A command")
        code, out, _ = run(capsys, "--help")
        assert (code, title in out) == (0, True)
        assert "--capacity" in run(capsys, "solve", "--help")[1]

    def test_it_runs(self, run_example: Example, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        run_example("A command")
        file = tmp_path / "scores.txt"
        file.write_text("3 1\n3 0\n3 2.5\n0 1\n")
        assert run(capsys, "solve", str(file)) == (0, "0 0 1 1\n", "")
        assert run(capsys, "solve", str(file), "--capacity", "4") == (0, "0 0 0 1\n", "")
        code, out, err = run(capsys, "solve", str(file), "--capacity", "1")
        assert (code, out) == (2, "")
        assert err.startswith("equipoise: error: capacity must sum to at least the number of rows, 4, got 2")

    def test_afterwards_it_is_gone(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(capsys, "solve")[0] == 2
        assert "first-fit" not in METHODS
