"""The benchmarks' arithmetic, against numbers counted by hand; that each can be asked for help; and how they go on."""

import argparse
import importlib
import json
from pathlib import Path
from typing import ClassVar

import pytest

BENCH = Path(__file__).parents[2] / "ci" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The folder's modules, found as its scripts find them."""
    monkeypatch.syspath_prepend(str(BENCH))
    import arithmetic
    import report
    import turns

    return argparse.Namespace(arithmetic=arithmetic, report=report, turns=turns)


@pytest.mark.parametrize(
    "name", ["machine", "ppo_step", "rollout", "supervised", "report", "all", "gaudi_sim_step", "tokenizing"]
)
def test_each_says_what_it_measures_and_how_it_is_asked_for(bench, name: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: {name}.py" in shown
    assert "python ci/bench/" in shown or name == "gaudi_sim_step"


SHAPE = {"body": 1000, "vocabulary": 200, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}


def test_a_decode_step_reads_weights_and_cache_once(bench) -> None:
    shape = bench.arithmetic.Shape(**SHAPE)
    # 1,200 weights; keys and values of 2 layers, 2 heads of 8, for 3 rows of 5 tokens; two bytes each.
    assert bench.arithmetic.decode_bytes(shape, 3, 5) == 2 * (1200 + 2 * 2 * 2 * 8 * 3 * 5)
    # Two operations for each weight and row; per row and layer 4 heads x 8 x 5 tokens, times query-key and value.
    assert bench.arithmetic.decode_flops(shape, 3, 5) == 3 * (2 * 1200 + 2 * (2 * 2 * 4 * 8 * 5))


def test_a_causal_pass_sees_half_of_the_square(bench) -> None:
    shape = bench.arithmetic.Shape(**SHAPE)
    # 3 rows of 4 tokens: 1 + 2 + 3 + 4 = 10 pairs a row; the vocabulary for 2 tokens of each.
    pairs = 3 * 10
    assert bench.arithmetic.forward_flops(shape, 3, 4, 2) == 2 * (1000 * 12 + 200 * 6) + pairs * 4 * 2 * 4 * 8


def test_the_limit_takes_the_slower_of_bytes_and_operations_in_each_step(bench) -> None:
    shape, work = bench.arithmetic.Shape(**SHAPE), bench.arithmetic.Work(3, 4, 3)
    seen = (5, 6)  # the third token is drawn from what the second, the sixth of its row, has seen
    read = sum(bench.arithmetic.decode_bytes(shape, 3, each) for each in seen)
    operations = sum(bench.arithmetic.decode_flops(shape, 3, each) for each in seen)
    prefill = bench.arithmetic.forward_flops(shape, 3, 4, 1)
    slow_memory = bench.arithmetic.rollout_limit(shape, work, bytes_per_second=10.0, flops_per_second=1e9)
    assert slow_memory["seconds"] == pytest.approx((2 * 1200 + read) / 10, abs=1e-3)
    slow_products = bench.arithmetic.rollout_limit(shape, work, bytes_per_second=1e9, flops_per_second=100.0)
    assert slow_products["seconds"] == pytest.approx((prefill + operations) / 100, abs=1e-3)


def test_a_step_of_the_135m_benchmark_takes_1_6_tflop(bench) -> None:
    # Of 30 layers, 576 wide: q and o, k and v of 3 heads, three matrices of 1,536; a vocabulary of 49,152.
    body = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    shape = bench.arithmetic.Shape(body, 576 * 49_152, layers=30, heads=9, kv_heads=3, head_dim=64)
    flops = bench.arithmetic.ppo_flops(shape, bench.arithmetic.Work(16, 16, 32))
    # Forward on 768 tokens 0.163, on 512 distributions 0.029: generated, twice scored, three times each trained.
    by_hand = {"generation": 0.192, "scoring": 0.192 + 0.163, "training": 3 * (0.192 + 0.163)}
    assert {phase: each / 1e12 for phase, each in flops.items()} == pytest.approx(by_hand, rel=0.03)


def test_a_shape_is_counted_from_the_model(bench, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(vocab_size=50, num_hidden_layers=3, tie_word_embeddings=True, **sizes).save_pretrained(tmp_path)
    found = bench.arithmetic.Shape.of(tmp_path)
    body = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24)
    assert found == bench.arithmetic.Shape(body, 800, layers=3, heads=4, kv_heads=2, head_dim=4)


def test_a_row_is_judged_by_its_ratio(bench) -> None:
    def judged(goal: str, ours: float, baseline: float, target: float) -> tuple[float, bool]:
        found = bench.report.row("a", ours=ours, baseline=baseline, unit="s", goal=goal, target=target)
        return found["ratio"], found["met"]

    assert judged("at least", 2.0, 5.0, 2.5) == (2.5, True)
    assert judged("at least", 2.0, 5.0, 2.6) == (2.5, False)
    assert judged("at most", 4.0, 5.0, 0.8) == (0.8, True)
    assert judged("at most", 4.1, 5.0, 0.8) == (0.82, False)
    assert judged("at least", 1.0, 1.7999, 1.8) == (1.8, False)  # what is printed is not what is judged
    missed = bench.report.row("a", ours=2.0, baseline=5.0, unit="s", target=2.6)
    assert bench.report.cells(missed) == ("a", "2 s", "5 s", "2.50", "≥ 2.6", "MISSED")


def test_medians_are_of_each_phase_and_memory_is_the_most(bench) -> None:
    steps = [{"seconds": s, "generation": g, "peak_gib": m} for s, g, m in ((3, 1, 2.0), (1, 2, 2.5), (2, 9, 2.4))]
    found = bench.report.summary(steps)
    assert (found["median_seconds"], found["median_generation"], found["peak_gib"]) == (2, 2, 2.5)
    assert found["seconds"] == [3, 1, 2]


class Side:
    """A worker whose steps take a second of its clock."""

    now: ClassVar[float] = 0.0

    ready: ClassVar[dict[str, float]] = {"peak_gib": 1.0, "threads": 2}

    def step(self, *, record: bool) -> dict[str, float]:
        Side.now += 1
        return {"peak_gib": 1.5}

    def stop(self) -> None:
        pass


def test_an_interrupted_measurement_goes_on_and_a_changed_one_begins_anew(bench, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench.turns, "time", argparse.Namespace(perf_counter=lambda: Side.now))
    limits = {"chip": "C", "threads": 1, "torch": "2", "copy_bytes_per_second": 1}
    limits |= {"read_bytes_per_second": {"sum": 1}, "flops_per_second": {"bf16": 1}}
    (tmp_path / "limits.json").write_text(json.dumps(limits))

    def turns(rounds: int, seconds: float | None = None, settings: str = "same"):
        words = ["--rounds", str(rounds), "--warmup", "0", "--limits", str(tmp_path / "limits.json")]
        words += [
            "--output",
            str(tmp_path / "found.json"),
            *(["--seconds", str(seconds)] if seconds is not None else []),
        ]
        parser = argparse.ArgumentParser()
        bench.turns.add_arguments(parser)
        return bench.turns.Turns("name", "what", {"all": settings}, parser.parse_args(words))

    with pytest.raises(SystemExit) as stopped:
        turns(3, seconds=2).measure({"ours": Side, "theirs": Side})
    assert stopped.value.code == bench.turns.UNFINISHED  # one round was taken, and time was up
    again = turns(3)
    assert again.done == 1
    again.measure({"ours": Side, "theirs": Side})
    assert {name: len(steps) for name, steps in again.steps.items()} == {"ours": 3, "theirs": 3}
    assert turns(3, settings="other").done == 0
    again.finish([], note=1)
    assert turns(3).done == 0  # what is complete is measured again
    assert json.loads((tmp_path / "found.json").read_text())["sides"]["ours"]["peak_gib"] == 1.5


def test_sides_that_are_apart_are_never_there_together(bench, tmp_path: Path) -> None:
    limits = {"chip": "C", "threads": 1, "torch": "2", "copy_bytes_per_second": 1}
    limits |= {"read_bytes_per_second": {"sum": 1}, "flops_per_second": {"bf16": 1}}
    (tmp_path / "limits.json").write_text(json.dumps(limits))
    order: list[str] = []

    class Named(Side):
        def __init__(self, name: str) -> None:
            self.name = name
            order.append(f"+{name}")

        def step(self, *, record: bool) -> dict[str, float]:
            order.append(self.name)
            return super().step(record=record)

        def stop(self) -> None:
            order.append(f"-{self.name}")

    parser = argparse.ArgumentParser()
    bench.turns.add_arguments(parser, rounds=3, warmup=1)
    words = ["--apart", "--limits", str(tmp_path / "limits.json"), "--output", str(tmp_path / "found.json")]
    turns = bench.turns.Turns("name", "what", {}, parser.parse_args(words))
    turns.measure({name: lambda name=name: Named(name) for name in "ab"})
    assert " ".join(order) == "+a a a a -a +b b b b -b +a a a -a +b b b -b"
    assert {name: len(steps) for name, steps in turns.steps.items()} == {"a": 3, "b": 3}
