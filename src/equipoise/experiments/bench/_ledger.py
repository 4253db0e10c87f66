# SPDX-License-Identifier: Apache-2.0
"""Measurements, and the file that holds them from the moment they are made."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["measured", "skipped", "failed", "not installed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One measured figure, or the reason why there is none.

    Attributes:
        status: "measured", "skipped" (over the time budget), "failed" or "not installed".
        seconds: the best time, where time was measured.
        repeats: repetitions behind it.
        value: the value of the assignment that was found, in float64.
        certificate: the gap that the solver itself proved, where it proves one.
        figures: further numbers, by name.
        note: why it was skipped, or what to know about it.
    """

    status: Status = "measured"
    seconds: float | None = None
    repeats: int = 0
    value: float | None = None
    certificate: float | None = None
    figures: dict[str, float] = field(default_factory=dict[str, float])
    note: str = ""


Records = Mapping[str, Measurement]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One measurement that is planned: a key, a title for the progress bar, and how to make it.

    `measure` receives what was measured before it, so that a solver's larger problems can be skipped on the evidence of
    its smaller ones.
    """

    key: str
    title: str
    measure: Callable[[Records], Measurement]


class Ledger:
    """The results of one run, in a JSON file that is complete and valid after every measurement.

    Args:
        path: the file; its folder is created.
        header: what identifies the run (options) and where it was made; stored beside the measurements.
        resume: keep what the file already holds. Refused when it was made with other options.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool = False) -> None:
        self.path = path
        self.header = dict(header)
        self.records: dict[str, Measurement] = {}
        if resume and path.exists():
            self.records = self._load()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def run(self, step: Step) -> Measurement:
        """Makes the step's measurement and writes it, unless the file has it already."""
        if step.key not in self.records:
            self.records[step.key] = step.measure(self.records)
            self.save()
        return self.records[step.key]

    def save(self, **summary: Any) -> None:
        """Writes everything, `summary` entries included; a reader never sees half a file."""
        records = {key: _without_defaults(record) for key, record in self.records.items()}
        text = json.dumps({**self.header, **summary, "records": records}, indent=2)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self.path)

    def _load(self) -> dict[str, Measurement]:
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            options, records = stored["options"], stored["records"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"--resume needs a results file of an earlier run, {self.path} is not one: start anew without it"
            ) from error
        # Through JSON and back, because tuples come back as lists.
        now = json.loads(json.dumps(self.header["options"]))
        changed = sorted(name for name in now if options.get(name) != now[name])
        if changed:
            difference = ", ".join(f"{name} {options.get(name)}, now {now[name]}" for name in changed)
            raise ValueError(
                f"--resume needs the options of the run in {self.path}, got others ({difference}): "
                "repeat them, or start anew without --resume"
            )
        return {key: Measurement(**record) for key, record in records.items()}


def _without_defaults(record: Measurement) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if value is not None and value not in ("", {})}
