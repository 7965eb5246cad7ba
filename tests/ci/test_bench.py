"""Test the benchmarks' arithmetic against numbers counted by hand, their help, and how measurements resume."""

import argparse
import importlib
import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch

BENCH = Path(__file__).parents[2] / "ci" / "bench"
SCRIPTS = sorted(
    path.stem
    for path in BENCH.glob("*.py")
    if "ArgumentParser(" in path.read_text(encoding="utf-8") and not path.stem.endswith("_worker")
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return the modules of ci/bench, imported as its scripts import them."""
    monkeypatch.syspath_prepend(str(BENCH))
    import arithmetic
    import machine
    import report
    import scaling
    import turns

    return argparse.Namespace(arithmetic=arithmetic, machine=machine, report=report, scaling=scaling, turns=turns)


@pytest.mark.parametrize(
    ("model", "flags", "name"),
    [
        ("Intel(R) Xeon(R) Processor", {"avx512_bf16", "amx_bf16", "avx2"}, "Intel Xeon with AMX"),
        ("Intel(R) Xeon(R) Processor", {"avx512_bf16"}, "Intel Xeon with AVX512-BF16"),
        ("AMD EPYC", {"avx512_bf16"}, "AMD EPYC with AVX512-BF16"),
        ("AMD EPYC", {"avx2"}, "AMD EPYC without bf16 instructions"),
    ],
)
def test_name_of_a_chip_tells_processors_of_one_name_apart(bench, monkeypatch, model, flags, name) -> None:
    monkeypatch.setattr(bench.machine.cpu_info, "cpu_model", lambda: model)
    monkeypatch.setattr(bench.machine.cpu_info, "cpu_flags", lambda: frozenset(flags))
    assert bench.machine.chip_name() == name
    assert bench.machine.usual_precision("cpu") == ("fp32" if name.endswith("without bf16 instructions") else "bf16")


def test_results_of_processors_of_one_name_are_apart(bench, tmp_path: Path) -> None:
    for number, instructions in enumerate((["avx512_bf16"], [])):
        result = {"machine": {"model": "AMD EPYC", "bf16": instructions}, "rows": [{"ratio": number}]}
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    assert bench.report.results(tmp_path) == {
        "AMD EPYC with AVX512-BF16": [{"ratio": 0}],
        "AMD EPYC without bf16 instructions": [{"ratio": 1}],
    }


def test_limits_are_the_better_of_two_measurements(bench) -> None:
    first = {"chip": "C", "threads": 2, "flops_per_second": {"fp32": 5, "bf16": 9}, "copy_bytes_per_second": 3}
    second = {"chip": "C", "threads": 2, "flops_per_second": {"fp32": 7, "bf16": 8}, "copy_bytes_per_second": 2}
    assert bench.machine.better(first, second) == first | {"flops_per_second": {"fp32": 7, "bf16": 9}}
    without = second | {"flops_per_second": {"fp32": 7}}  # of another precision
    assert bench.machine.better(first, without)["flops_per_second"] == {"fp32": 7, "bf16": 9}
    assert bench.machine.better(without, first)["flops_per_second"] == {"fp32": 7, "bf16": 9}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_help_prints_usage_and_commands(bench, name: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module(name).main()
    assert exit_info.value.code == 0
    help_text = capsys.readouterr().out
    assert f"usage: {name}.py" in help_text
    assert f"python ci/bench/{name}.py" in help_text


def test_start_up_finds_the_step_of_the_started_process(bench, tmp_path: Path) -> None:
    startup, metrics = importlib.import_module("startup"), tmp_path / "metrics.jsonl"
    assert startup.find_step(metrics, 3, begin=100.0) is None
    earlier = {"stage": "ppo", "step": 3, "time": 90.0, "seconds": 2.0}
    sample = {"stage": "ppo", "step": 3, "time": 110.0, "tag": "heldout_0", "text": "red"}
    step = earlier | {"time": 111.0}
    metrics.write_text("".join(json.dumps(record) + "\n" for record in (earlier, sample)) + '{"stage": "pp')
    assert startup.find_step(metrics, 3, begin=100.0) is None
    metrics.write_text("".join(json.dumps(record) + "\n" for record in (earlier, sample, step)))
    assert startup.find_step(metrics, 3, begin=100.0) == step


SHAPE = {"body": 1000, "vocabulary": 200, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}


def test_decode_step_counts_weights_and_cache_once(bench) -> None:
    shape = bench.arithmetic.Shape(**SHAPE)
    # 1,200 weights; keys and values of 2 layers, 2 heads of 8, for 3 rows of 5 tokens; two bytes each.
    assert bench.arithmetic.decode_bytes(shape, 3, 5) == 2 * (1200 + 2 * 2 * 2 * 8 * 3 * 5)
    assert bench.arithmetic.decode_bytes(shape, 3, 5, "fp32") == 4 * (1200 + 2 * 2 * 2 * 8 * 3 * 5)
    # Two operations per weight and row; per row and layer 4 heads x 8 x 5 tokens, for query x key and again for values.
    assert bench.arithmetic.decode_flops(shape, 3, 5) == 3 * (2 * 1200 + 2 * (2 * 2 * 4 * 8 * 5))


def test_forward_flops_of_causal_pass_count_half_the_square(bench) -> None:
    shape = bench.arithmetic.Shape(**SHAPE)
    # 3 rows of 4 tokens: 1 + 2 + 3 + 4 = 10 pairs per row; the output matrix for 2 tokens per row.
    pairs = 3 * 10
    assert bench.arithmetic.forward_flops(shape, 3, 4, 2) == 2 * (1000 * 12 + 200 * 6) + pairs * 4 * 2 * 4 * 8


def test_rollout_limit_takes_slower_of_bytes_and_operations(bench) -> None:
    shape, work = bench.arithmetic.Shape(**SHAPE), bench.arithmetic.Work(3, 4, 3)
    lengths = (5, 6)  # the third token is sampled after the second, the sixth of its row, attends to 6 tokens
    bytes_read = sum(bench.arithmetic.decode_bytes(shape, 3, seen) for seen in lengths)
    operations = sum(bench.arithmetic.decode_flops(shape, 3, seen) for seen in lengths)
    prefill = bench.arithmetic.forward_flops(shape, 3, 4, 1)
    slow_memory = bench.arithmetic.rollout_limit(shape, work, bytes_per_second=10.0, flops_per_second=1e9)
    assert slow_memory["seconds"] == pytest.approx((2 * 1200 + bytes_read) / 10, abs=1e-3)
    slow_products = bench.arithmetic.rollout_limit(shape, work, bytes_per_second=1e9, flops_per_second=100.0)
    assert slow_products["seconds"] == pytest.approx((prefill + operations) / 100, abs=1e-3)


def test_ppo_flops_of_135m_step_match_count_by_hand(bench) -> None:
    # 30 layers of width 576: q and o, k and v of 3 heads, three matrices of 1,536; a vocabulary of 49,152.
    body = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    shape = bench.arithmetic.Shape(body, 576 * 49_152, layers=30, heads=9, kv_heads=3, head_dim=64)
    flops = bench.arithmetic.ppo_flops(shape, bench.arithmetic.Work(16, 16, 32))
    # Forward on 768 tokens 0.163, the output matrix on 512 tokens 0.029. Scoring runs two models, and training is
    # three passes of each; only the language models have the output matrix. The sum is 1.6 TFLOP.
    by_hand = {"generation": 0.192, "scoring": 0.192 + 0.163, "training": 3 * (0.192 + 0.163)}
    assert {phase: count / 1e12 for phase, count in flops.items()} == pytest.approx(by_hand, rel=0.03)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.7])
def test_fit_line_returns_the_exponent_of_a_power(bench, exponent: float) -> None:
    sizes = (4, 8, 16, 32, 64)
    found, distances = bench.scaling.fit_line(sizes, [0.03 * size**exponent for size in sizes])
    assert found == pytest.approx(exponent, abs=1e-9)
    assert distances == pytest.approx([0] * 5, abs=1e-9)


def test_fit_line_returns_distances_as_shares_of_the_line(bench) -> None:
    # Symmetric, so the slope stays 1; the logarithms of 2, 1, 2 have the mean log(4) / 3.
    exponent, distances = bench.scaling.fit_line((1, 10, 100), (2.0, 10.0, 200.0))
    assert exponent == pytest.approx(1)
    assert distances == pytest.approx([2 / 4 ** (1 / 3) - 1, 1 / 4 ** (1 / 3) - 1, 2 / 4 ** (1 / 3) - 1])


def test_parts_of_least_time_add_up_to_the_limits_of_its_phases(bench) -> None:
    shape, work = bench.arithmetic.Shape(**SHAPE), bench.arithmetic.Work(3, 4, 3)
    flops = bench.arithmetic.ppo_flops(shape, work)
    update = 2 * 1200 * 28 / 1e6  # policy and critic; 28 bytes: 2 + 2 of 16 bits, 3 x (4 + 4) of 32
    for flops_per_second in (1e5, 1e9):  # products decide, reads decide
        speeds = {"bytes_per_second": 1e6, "flops_per_second": flops_per_second}
        parts = bench.scaling.least_seconds(shape, "ppo", work, **speeds)
        passes = (flops["scoring"] + flops["training"]) / flops_per_second
        rollout = bench.arithmetic.rollout_limit(shape, work, **speeds)
        products = rollout["prefill"]["flops"] / flops_per_second  # of the prefill, reads are not counted here
        decoding = rollout["decode_steps"]["seconds"]
        assert sum(parts.values()) == pytest.approx(update + passes + products + decoding, rel=1e-3, abs=1e-4)
        assert ("reads of the weights" in parts) == (flops_per_second == 1e9)
    sft = bench.scaling.least_seconds(shape, "sft", work, bytes_per_second=1e6, flops_per_second=1e5)
    forward = bench.arithmetic.forward_flops(shape, 3, 7, 3)
    assert sum(sft.values()) == pytest.approx(1200 * 28 / 1e6 + 3 * forward / 1e5)


def test_curve_names_the_part_that_takes_a_point_off_its_line(bench) -> None:
    sizes = (1, 10, 100)
    parts = [{"products": 0.1 * size, "reads": 1.0} for size in sizes]
    steps = [{"median_seconds": 2 * sum(point.values())} for point in parts]
    curve = bench.scaling.describe_curve(sizes, steps, parts)
    assert curve["exponents"]["step"] == pytest.approx(curve["exponents"]["least time"])
    marks = [point["mark"] for point in curve["points"]]
    # Shares of reads: 1 of 1.1, 1 of 2, 1 of 11, on average 0.5.
    assert marks[0] == "off the line: more reads (91 % of the least time, 50 % on average)"
    assert "fewer" in marks[1] or marks[1] == ""
    # The arithmetic has the same steps on a line, or bends the other way.
    for part in (lambda size: 0.1 * size, lambda size: 1 / (0.1 + 1 / size)):
        curve = bench.scaling.describe_curve(sizes, steps, [{"products": part(size)} for size in sizes])
        assert curve["points"][0]["mark"] == "off the line; not in the arithmetic"
    assert bench.scaling.table("rows", curve).splitlines()[-1].split()[:2] == ["exponent", "0.50"]


def test_shape_of_model_counts_its_matrices(bench, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(vocab_size=50, num_hidden_layers=3, tie_word_embeddings=True, **sizes).save_pretrained(tmp_path)
    shape = bench.arithmetic.Shape.of(tmp_path)
    body = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24)
    assert shape == bench.arithmetic.Shape(body, 800, layers=3, heads=4, kv_heads=2, head_dim=4)


def test_row_verdict_uses_unrounded_ratio(bench) -> None:
    def ratio_and_verdict(goal: str, ours: float, baseline: float, target: float) -> tuple[float, bool]:
        row = bench.report.row("a", ours=ours, baseline=baseline, unit="s", goal=goal, target=target)
        return row["ratio"], row["met"]

    assert ratio_and_verdict("at least", 2.0, 5.0, 2.5) == (2.5, True)
    assert ratio_and_verdict("at least", 2.0, 5.0, 2.6) == (2.5, False)
    assert ratio_and_verdict("at most", 4.0, 5.0, 0.8) == (0.8, True)
    assert ratio_and_verdict("at most", 4.1, 5.0, 0.8) == (0.82, False)
    assert ratio_and_verdict("at least", 1.0, 1.7999, 1.8) == (1.8, False)  # printed as 1.8, but smaller
    missed = bench.report.row("a", ours=2.0, baseline=5.0, unit="s", target=2.6)
    assert bench.report.cells(missed) == ("a", "2 s", "5 s", "2.50", "≥ 2.6", "MISSED")


@pytest.mark.parametrize(("predicted", "met"), [(84.0, False), (86.0, True), (114.0, True), (116.0, False)])
def test_predicted_time_may_be_neither_too_long_nor_too_short(bench, predicted: float, met: bool) -> None:
    plan_time = importlib.import_module("plan_time")
    row = plan_time.compare("sft", predicted, 100.0)
    assert row["met"] is met and row["ratio"] == predicted / 100


def test_summarize_returns_medians_and_highest_memory(bench) -> None:
    steps = [
        {"seconds": seconds, "generation": generation, "peak_gib": peak}
        for seconds, generation, peak in ((3, 1, 2.0), (1, 2, 2.5), (2, 9, 2.4))
    ]
    summary = bench.report.summarize(steps)
    assert (summary["median_seconds"], summary["median_generation"], summary["peak_gib"]) == (2, 2, 2.5)
    assert summary["seconds"] == [3, 1, 2]


class FakeWorker:
    """A worker that advances a shared clock by one second per step."""

    now: ClassVar[float] = 0.0

    ready: ClassVar[dict[str, float]] = {"peak_gib": 1.0, "threads": 2}

    def step(self, *, record: bool) -> dict[str, float]:
        FakeWorker.now += 1
        return {"peak_gib": 1.5}

    def stop(self) -> None:
        pass


def test_turns_resume_unless_complete_or_settings_changed(bench, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench.turns, "time", argparse.Namespace(perf_counter=lambda: FakeWorker.now))
    limits = {"chip": "C", "threads": 1, "torch": "2", "copy_bytes_per_second": 1}
    limits |= {"read_bytes_per_second": {"sum": 1}, "flops_per_second": {"bf16": 1}}
    (tmp_path / "limits.json").write_text(json.dumps(limits))

    def make_turns(rounds: int, seconds: float | None = None, settings: str = "same", apart: bool = False):
        words = ["--apart" if apart else "--no-apart", "--rounds", str(rounds), "--warmup", "0"]
        words += ["--limits", str(tmp_path / "limits.json")]
        words += ["--output", str(tmp_path / "results.json")]
        words += ["--seconds", str(seconds)] if seconds is not None else []
        parser = argparse.ArgumentParser()
        bench.turns.add_arguments(parser)
        return bench.turns.Turns("name", "what", {"all": settings}, parser.parse_args(words))

    with pytest.raises(SystemExit) as exit_info:
        make_turns(3, seconds=2).measure({"ours": FakeWorker, "theirs": FakeWorker})
    assert exit_info.value.code == bench.turns.UNFINISHED  # time ran out after one round
    resumed = make_turns(3)
    assert resumed.completed_rounds == 1
    resumed.measure({"ours": FakeWorker, "theirs": FakeWorker})
    assert {name: len(steps) for name, steps in resumed.steps.items()} == {"ours": 3, "theirs": 3}
    assert make_turns(3, settings="other").completed_rounds == 0
    assert make_turns(3, apart=True).completed_rounds == 0
    resumed.finish([], note=1)
    assert make_turns(3).completed_rounds == 0  # a complete measurement starts again
    assert json.loads((tmp_path / "results.json").read_text())["sides"]["ours"]["peak_gib"] == 1.5


@pytest.mark.parametrize(
    ("apart", "expected"),
    [
        ("", "+a a a a -a +b b b b -b +a a a -a +b b b -b"),
        ("--no-apart", "+a +b a b a a b b a a b b a a b b -a -b"),
    ],
)
def test_sides_run_apart_or_in_turns_after_an_untimed_step(bench, tmp_path: Path, apart: str, expected: str) -> None:
    limits = {"chip": "C", "threads": 1, "torch": "2", "copy_bytes_per_second": 1}
    limits |= {"read_bytes_per_second": {"sum": 1}, "flops_per_second": {"bf16": 1}}
    (tmp_path / "limits.json").write_text(json.dumps(limits))
    order: list[str] = []

    class RecordingWorker(FakeWorker):
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
    words = [*apart.split(), "--limits", str(tmp_path / "limits.json"), "--output", str(tmp_path / "results.json")]
    turns = bench.turns.Turns("name", "what", {}, parser.parse_args(words))
    turns.measure({name: lambda name=name: RecordingWorker(name) for name in "ab"})
    assert " ".join(order) == expected
    assert {name: len(steps) for name, steps in turns.steps.items()} == {"a": 3, "b": 3}


SIZES = {"shape": "smollm2-135m", "layers": None, "batch": 16, "micro_batch": None, "estimator": "gae"}
SIZES |= {"prompt": 16, "completion": 32, "accelerator": "cpu", "stage": "sft", "lora": None, "precision": "bf16"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "ppo_step-16+32"),
        ({"estimator": "grpo", "prompt": 128, "completion": 128}, "grpo_step-128+128"),
        ({"shape": "smollm2-360m", "batch": 8, "micro_batch": 4}, "ppo_step-16+32-smollm2-360m-x8-by4"),
        ({"layers": 2}, "ppo_step-16+32-smollm2-135m-2-layers"),
        ({"estimator": "rloo", "lora": 8}, "rloo_step-16+32-lora8"),
        ({"precision": "fp32"}, "ppo_step-16+32-fp32"),
    ],
)
def test_results_of_a_step_are_named_by_its_sizes(bench, changes: dict, name: str) -> None:
    import ppo_step

    assert ppo_step.result_name(argparse.Namespace(**SIZES | changes)) == name


def test_targets_are_two_or_more_times_as_fast_unless_layers_are_few(bench) -> None:
    import ppo_step

    def targets(precision: str = "bf16", **changes: object) -> list[float | None]:
        names = ("ours", *ppo_step.SIDES[precision].values())
        sides = {name: {"median_seconds": 1.0, "peak_gib": 1.0} for name in names}
        return [row["target"] for row in ppo_step.rows(sides, argparse.Namespace(**SIZES | changes))]

    assert targets() == [2.0, 4.0, 0.8]
    assert targets(prompt=512, completion=512) == [2.0, 2.0, 0.8]
    assert targets(estimator="rloo", shape="smollm2-360m") == [2.0, 2.0, None]
    assert targets(layers=1) == [None, None, None]
    assert targets("fp32") == [2.0, 0.8]


def test_side_that_drew_other_tokens_is_an_error(bench) -> None:
    import ppo_step

    ppo_step.check_tokens({"ours": [{"tokens": 512}], "theirs": [{"tokens": 512}]}, 512)
    with pytest.raises(SystemExit, match=r"^theirs: 511 tokens were drawn in a step, expected 512$"):
        ppo_step.check_tokens({"ours": [{"tokens": 512}], "theirs": [{"tokens": 512}, {"tokens": 511}]}, 512)


def test_trl_tries_passes_and_caches_with_the_whole_batch(bench) -> None:
    import ppo_step

    passes = ("1 pass", "4 passes")
    caches = ("dynamic cache, ", "static cache, ")
    for estimator, expected in (
        ("gae", set(passes)),
        ("grpo", {cache + number for cache in caches for number in passes}),
    ):
        tried = ppo_step.ways(argparse.Namespace(**SIZES | {"estimator": estimator}))
        assert set(tried) == expected
        for options in tried.values():
            assert options["per_device_train_batch_size"] * options["gradient_accumulation_steps"] == 16
    fixed = ppo_step.ways(argparse.Namespace(**SIZES | {"estimator": "grpo", "micro_batch": 4}))
    assert list(fixed.values()) == [{}, {"cache_implementation": "static"}]


def test_texts_of_numbers_keep_every_token(bench) -> None:
    import trl_worker

    tokenizer = trl_worker.number_tokenizer(40)
    prompt, completion = [7, 0, 39], [1, 2, 0]
    text = tokenizer.decode(prompt) + " " + tokenizer.batch_decode([completion], skip_special_tokens=True)[0]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == prompt + completion
    assert {tokenizer.pad_token_id, tokenizer.eos_token_id} == {40, 41}  # no model of 40 tokens draws them


@pytest.mark.parametrize(
    ("loader", "task"),
    [("AutoModelForCausalLM", "CAUSAL_LM"), ("AutoModelForSequenceClassification", "SEQ_CLS")],
)
def test_trl_adapts_the_layers_that_ours_adapts(bench, model_folder: Path, loader: str, task: str) -> None:
    import transformers
    import trl_worker
    from peft import get_peft_model

    from rlhf.config.schema import LoraConfig
    from rlhf.models.lora import add_adapters

    def load():
        return getattr(transformers, loader).from_pretrained(model_folder, num_labels=1)

    def trained_shapes(model) -> list[tuple[int, ...]]:
        return sorted(tuple(weight.shape) for weight in model.parameters() if weight.requires_grad)

    theirs = get_peft_model(load(), trl_worker.adapters({"lora": 4}, task)["peft_config"])
    ours = load()
    add_adapters(ours, LoraConfig(rank=4), seed=0)
    assert trained_shapes(theirs) == trained_shapes(ours)
    assert trl_worker.adapters({}, task) == {}


@pytest.mark.parametrize(
    ("precision", "lora", "trained", "frozen"),
    [
        ("bf16-autocast", None, torch.float32, torch.bfloat16),
        ("bf16-autocast", 8, torch.bfloat16, torch.bfloat16),
        ("bf16-weights", None, torch.bfloat16, torch.bfloat16),
        ("fp32", None, torch.float32, torch.float32),
        ("fp32", 8, torch.float32, torch.float32),
    ],
)
def test_weights_of_trl_have_the_dtype_of_its_side(bench, precision, lora, trained, frozen) -> None:
    import trl_worker

    assert trl_worker.trained_dtype({"lora": lora}, precision) is trained
    assert trl_worker.frozen_dtype(precision) is frozen


@pytest.mark.parametrize(("stage", "replies"), [("sft", 1), ("dpo", 2)])
def test_rows_have_the_lengths_that_are_asked_for(bench, model_folder: Path, stage: str, replies: int) -> None:
    import supervised

    arguments = argparse.Namespace(**SIZES | {"stage": stage, "micro_batch": 4})
    work = supervised.workload(model_folder, arguments, (3, 5))
    assert [list(map(len, row)) for row in work["rows"]] == [[3] + [5] * replies] * 16
    assert supervised.count_tokens(work) == 16 * replies * 8
    drawn = supervised.workload(model_folder, arguments)["rows"]
    lengths = [[len(prompt) + len(reply) for reply in rest] for prompt, *rest in drawn]
    each = {length for row in lengths for length in row}
    assert len(each) > 4 and each <= set(range(16, 129))
    longest = [max(row) for row in lengths]
    assert longest == sorted(longest, reverse=True)  # so that rows of one micro-batch have little padding


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (3, 0.75)),
        ({"prompt": 128, "completion": 128, "batch": 64}, (3, 0.6)),
        ({"prompt": 128, "completion": 1}, (None, 0.6)),
        ({"batch": 32}, (None, None)),
        ({"prompt": 20}, (None, None)),
        ({"copies": 4}, (None, None)),
        ({"shape": "llama-2-7b"}, (None, None)),
        ({"accelerator": "cuda"}, (None, None)),
        ({"accelerator": "cuda", "shape": "llama-2-7b"}, (7.1, 0.6)),
    ],
)
def test_rollouts_have_their_targets(bench, changes: dict, expected: tuple[float | None, float | None]) -> None:
    import rollout

    usual = {"accelerator": "cpu", "shape": rollout.SHAPE, "prompt": 16, "completion": 32, "batch": 16, "copies": 1}
    assert rollout.targets(argparse.Namespace(**usual | changes)) == expected


def test_operations_of_a_step_are_counted_by_hand(bench) -> None:
    """No attention: three passes, two operations for each weight and token, once for both prompts of a pair.

    SFT predicts its replies.
    """
    import supervised

    shape = bench.arithmetic.Shape(**SHAPE | {"body": 10, "vocabulary": 100, "layers": 0})
    rows = [[[1] * 3, [1] * 5, [1] * 4], [[1] * 2, [1] * 7, [1]]]
    demonstrations = [row[:2] for row in rows]
    assert supervised.step_flops(shape, {"stage": "sft", "rows": demonstrations}) == 6 * (10 * 17 + 100 * 12)
    assert supervised.step_flops(shape, {"stage": "reward", "rows": rows}) == 6 * 10 * (3 + 5 + 4 + 2 + 7 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo", "rollout", "grpo"])
def test_worker_takes_steps(bench, stage: str, model_folder: Path, tmp_path: Path) -> None:
    """What a benchmark times on our side, with a tiny model."""
    rows = [[[5, 6], [7, 8, 9], [10, 11]][: 2 if stage == "sft" else 3] for _ in range(4)]
    work = {"stage": stage, "accelerator": "cpu", "model": str(model_folder), "batch_size": 4, "learning_rate": 1e-5}
    work |= {"micro_batch_size": 2, "prompt_tokens": 4, "completion_tokens": 64, "parameters": 0}
    work |= {"rows": rows, "prompts": [[5, 6, 7, 8]] * 4, "precision": bench.machine.usual_precision("cpu")}
    if stage == "grpo":
        work |= {"stage": "ppo", "ppo": {"estimator": "grpo", "completions_per_prompt": 2, "kl_coef": 0.1}}
    command = bench.turns.ours_command(bench.turns.write(work, tmp_path))
    worker = bench.turns.start_worker(command, stage, tmp_path, "cpu")
    replies = [worker.step(record=True) for _ in range(2)]
    worker.stop()
    assert len(worker.seconds) == 2 and all(reply["peak_gib"] > 0 for reply in replies)
    if stage in ("sft", "reward"):
        assert all(reply["loss"] > 0 for reply in replies)
    if stage in ("ppo", "grpo"):
        assert all(reply["tokens"] == 4 * 64 for reply in replies)  # no token ends a completion
