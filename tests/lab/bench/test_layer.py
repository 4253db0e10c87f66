# SPDX-License-Identifier: Apache-2.0
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from equipoise.nn import ROUTERS
from equipoise_lab.bench import BENCHMARKS, Log, Measurement
from equipoise_lab.bench import _layer as layer_module
from equipoise_lab.bench._layer import layer_steps, layer_verdicts, times_dense_memory
from equipoise_lab.bench._layer_models import MEMORY, LayerSize, build_moe, named_layer
from equipoise_lab.bench._probes import LAYER_MEMORY, ask
from equipoise_lab.cli import main

LAYER = BENCHMARKS["layer"]
SIZE = LayerSize(tokens=48, dim=8, hidden_dim=16, num_experts=4)
TINY = replace(
    LAYER.recipes["quick"], size=SIZE, threads=(1,), repeats=1, routers=("switch", "gm-iw", "dense"), memory=False
)
FULL = LAYER.recipes["full"]


class Block(nn.Module):
    """Stands for the peer's block: a gate, stacked experts, and a loop over them."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        e, d, h = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate = nn.Linear(d, e, bias=False)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(e, 2 * h, d))
        self.experts.down_proj = nn.Parameter(torch.empty(e, d, h))
        self.top_k, self.mode = config.num_experts_per_tok, config._experts_implementation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.squeeze(0)
        top, z = self.gate(x).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(x)
        for e, (both, down) in enumerate(zip(self.experts.gate_up_proj, self.experts.down_proj, strict=True)):
            gate, up = (x @ both.T).chunk(2, -1)
            factor = torch.where(z == e, top, 0.0).sum(-1, keepdim=True) / top.sum(-1, keepdim=True)
            y = y + factor * ((nn.functional.silu(gate) * up) @ down.T)
        return y.unsqueeze(0)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers that has nothing but the block."""
    mixtral = ModuleType("transformers.models.mixtral.modeling_mixtral")
    mixtral.MixtralConfig, mixtral.MixtralSparseMoeBlock = SimpleNamespace, Block  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("transformers", "transformers.models", "transformers.models.mixtral"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, mixtral.__name__, mixtral)
    monkeypatch.setattr(layer_module, "need", lambda *names: None)


@pytest.mark.usefixtures("peer")
def test_run_measures_compares_and_writes(tmp_path: Path) -> None:
    log = Log(LAYER, TINY, tmp_path)
    for step in layer_steps(TINY):
        assert log.run(step).status == "measured", step.key
    paths, _ = log.finish()
    assert [path.name for path in paths] == ["bench-layer.json", "bench-layer.svg", "bench-layer.png"]
    assert all(path.stat().st_size > 0 for path in paths)
    stored = json.loads(paths[0].read_text())
    (ratios,) = stored["ratios"]
    for name in ("times_switch", "router_share", "times_transformers"):
        assert set(ratios[name]) == set(ratios[f"median_{name}"])
        assert all(ratio > 0 for ratio in ratios[f"median_{name}"].values())
    assert set(ratios["times_switch"]) == {"dense", "gm-iw", "skip-iw"}
    assert set(ratios["router_share"]) == {"switch", "gm-iw", "dense"}
    assert all(ratio > 0 for ratio in (*ratios["times_switch"].values(), *ratios["times_transformers"].values()))
    for k in (1, 2):  # the same parameters give the same output, so the same work is compared
        assert stored["records"][f"1 threads/peer {k}"]["figures"]["difference"] < 1e-6


def test_missing_peer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    step = next(step for step in layer_steps(TINY) if step.key == "1 threads/peer 1")
    record = step.run({})
    assert record.status == "not installed"
    assert record.note == "needs transformers: pip install 'equipoise[transformers]'"
    assert any(v.note == record.note and v.figure is None for v in layer_verdicts(TINY, {step.key: record}))


@pytest.mark.usefixtures("peer")
def test_mode_that_would_copy_the_weights_of_every_token_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_module, "_PEER_BYTES", 100_000)  # 48 tokens, 3 matrices of 8 x 16 floats: 73,728 bytes
    first, second = (step.measure() for step in layer_steps(TINY) if "peer" in step.key)
    assert "batched_mm" in first.figures
    assert "batched_mm" not in second.figures
    assert second.note.startswith("batched_mm would copy")


def test_full_run_is_the_one_that_limits_are_stated_for() -> None:
    assert asdict(FULL.size) == {"tokens": 8192, "dim": 512, "hidden_dim": 2048, "num_experts": 16}
    keys = [step.key for step in layer_steps(FULL)]
    assert len(keys) == len(set(keys))
    for threads in (1, 2):
        assert {f"{threads} threads/contenders", f"{threads} threads/peer 2", f"{threads} threads/router gm-iw"} <= {
            *keys
        }
    assert {"memory dense", "memory gm-iw", "memory dense-swiglu-2", "memory topk-2"} <= {*keys}


def test_verdicts_compare_with_the_limits() -> None:
    bench = replace(FULL, threads=(1,), routers=("switch", "gm-iw"))
    records = {
        "1 threads/contenders": Measurement(
            figures={"dense": 1.0, "switch": 1.0, "gm-iw": 1.04, "skip-iw": 1.06}
            | {"dense (median)": 2.0, "switch (median)": 2.0, "gm-iw (median)": 2.2, "skip-iw (median)": 2.0}
        ),
        "1 threads/router switch": Measurement(figures={"router": 0.01, "layer": 1.0}),
        "1 threads/router gm-iw": Measurement(figures={"router": 0.09, "layer": 1.0}),
        "1 threads/peer 1": Measurement(figures={"ours": 1.0, "eager": 2.0, "grouped_mm": 1.1}),
        "1 threads/peer 2": Measurement(figures={"ours": 1.0, "eager": 0.9, "grouped_mm": 1.1}),
        "memory dense": Measurement(figures={"bytes": 10.0, "parameters": 1.0}),
        "memory gm-iw": Measurement(figures={"bytes": 15.0, "parameters": 16.0}),
        "memory switch": Measurement(figures={"bytes": 17.0, "parameters": 16.0}),
    }
    verdicts = layer_verdicts(bench, records)
    assert [verdict.note for verdict in verdicts[:3]] == ["median 1.1", "median 1", ""]
    passed = {verdict.title: verdict.passed for verdict in verdicts}
    memory = {f"peak memory of a step, {name}, times the dense layer": None for name in MEMORY}
    assert passed == memory | {
        "one thread: gm-iw at capacity factor 1, times switch at 1.25": True,
        "one thread: skip-iw at capacity factor 1, times switch at 1.25": False,
        "one thread: largest share of a router in its layer (gm-iw)": False,
        "one thread: topk with K = 1, times transformers in its fastest mode": True,
        "one thread: topk with K = 2, times transformers in its fastest mode": False,
        "peak memory of a step, switch, times the dense layer": False,
        "peak memory of a step, gm-iw, times the dense layer": True,
    }
    assert times_dense_memory(records, "gm-iw", parameters=True) == pytest.approx(31 / 11)
    small = replace(bench, size=SIZE)
    assert {verdict.passed for verdict in layer_verdicts(small, records)} == {None}


def test_layers_of_the_memory_measurement_have_the_same_active_size() -> None:
    assert {*MEMORY} == {*ROUTERS} - {"dense"} | {"topk-1", "topk-2"}
    per_expert = {}
    for name, dense in MEMORY.items():
        layer, baseline = (named_layer(which, SIZE, 0) for which in (name, dense))
        k = getattr(layer.router.rule, "top_k", 1)
        per_expert[name] = k * sum(p.numel() for p in layer.experts.parameters()) // SIZE.num_experts
        assert per_expert[name] == sum(p.numel() for p in baseline.parameters())
    assert len(set(per_expert.values())) == 3


def test_memory_of_a_step_includes_what_the_backward_pass_needs() -> None:
    size = LayerSize(tokens=8192, dim=64, hidden_dim=256, num_experts=4)
    rise, parameters = ask(LAYER_MEMORY, "switch", json.dumps(asdict(size)), "0", threads=1)
    hidden = 8192 * 256 * 4
    assert hidden < rise < 5 * hidden
    assert parameters == sum(p.numel() for p in build_moe(size, 0, router="switch").parameters()) * 4


def test_parameters_depend_on_the_seed_alone() -> None:
    first, second, other = (build_moe(SIZE, seed, router="topk").experts.up for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert named_layer("dense", SIZE, 0)(torch.zeros(2, 8)).shape == (2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": (1, 0)}, r"threads must be numbers of at least 1, got \[1, 0\]"),
        ({"threads": ()}, r"threads must be numbers of at least 1, got \[\]"),
        ({"repeats": 0}, "repeats must be an integer >= 1, got 0"),
        ({"seed": -1}, "seed must be an integer from 0 to .*, got -1"),
        ({"grid": "endless"}, "grid must be one of 'full', 'quick'"),
    ],
)
def test_bad_run_is_refused(change: dict[str, object], message: str) -> None:
    options = {"grid": "quick", "threads": (1,), "repeats": 5, "seed": 0, **change}
    with pytest.raises(ValueError, match=message):
        LAYER.recipe(**options)


def test_command_prints_tables_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LAYER.recipes, "quick", TINY)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # the command sets them; this restores them
    command = ["bench", "layer", "--grid", "quick", "--repeats", "1", "--threads", "1", "--out", str(tmp_path)]
    for arguments in (command, [*command, "--resume"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert "48 tokens, dim 8, hidden 16, 4 experts" in out
        assert "needs transformers" in out
        assert "Limits" in out
        assert "bench-layer.json" in out
