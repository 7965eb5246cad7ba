"""Each check finds the fault that it is for, in the results of processes; tests/accelerators runs real ones."""

from __future__ import annotations

import json
import math
import os
import shlex
import time
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from accelerators import OPERATIONS, AcceleratorError
from rlhf.certify import runner
from rlhf.certify.checks import FIRST_CONTACT, Subject, check_zero
from rlhf.certify.endurance import KILLED_AFTER, fit_slope
from rlhf.certify.learning import check_golden
from rlhf.certify.levels import LEVELS, select_levels
from rlhf.certify.processes import CheckFailed, Finished, Processes
from rlhf.errors import ConfigError

LOSSES = [3.0, 2.5, 2.0, 1.5]
MEMORY = {"allocated": 0, "peak": 2**30, "parameters": 0}
EXPLANATION = {
    "operations": {name: {"ok": True, "reason": "fast"} for name in OPERATIONS},
    "precisions": {name: {"ok": True, "name": "fp32", "reason": ""} for name in ("auto", "fp32", "bf16", "fp16")},
    "memory": {"total": 2**36},
}
LORA: dict[str, Any] = {"adapters": 4, "frozen": 3, "unchanged adapters": [], "changed frozen weights": []}
TASKS: dict[str, Any] = {
    "compare_with_cpu": {"fp32": 1e-7},
    "compare_decoding": {},
    "train_stages": {
        "separate memory": True,
        "start": MEMORY,
        "sft": MEMORY,
        "reward": MEMORY,
        "ppo": MEMORY,
        "fallbacks": [],
    },
    "train_adapters": LORA,
    "save_in_the_middle": {"losses": LOSSES},
    "list_other_modes": {"eager": {"MODE": "0"}},
    "compare_operators": {"operators": 2, "failures": []},
    "compare_operations": {"implementations": [{"operation": "adamw"}], "failures": []},
    "train_until_killed": CheckFailed("SIGKILL"),
    "run_out_of_memory": {"precision": "fp32", "recognized": True, "message": "out of memory", "losses": LOSSES},
    "watch_steps": {"steps": [{"memory": 10**6 + step % 2, "compilations": 7} for step in range(120)]},
    "save_random_models": {},
    "take_ppo_steps": {
        "fallbacks": [],
        "steps": [{"seconds": 1.0, "compilations": count, "skipped_steps": 0.0} for count in (5, 6, 7, 7)],
    },
    "write_fixed_state": {"stages": {stage: ["fp32", "bf16"] for stage in ("sft", "reward", "dpo", "ppo")}},
    "compare_draws": {"compared": 1, "rows": [], "failure": ""},
    "compare_captured": {"recorded by": "graphs", "fallbacks": [], "compared": 9, "rows": [], "failure": ""},
    "compare_with_golden": {"compared": 9, "rows": [{"stage": "sft", "of band": 0.1}], "failure": ""},
}
KIT = [{"check": "shapes", "result": "passed", "reason": ""}, {"check": "memory", "result": "skipped", "reason": "x"}]


class Fake(Processes):
    """Processes that give these results, and write the files of runs; `commands` are the calls."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "check.log", 10.0)
        self.log.touch()
        self.tasks, self.explanation, self.kit = deepcopy((TASKS, EXPLANATION, KIT))
        self.losses: Callable[[str, dict[str, str]], list[float]] = lambda command, variables: LOSSES
        self.grad_norm: Callable[[str], float] = lambda command: 1.0
        self.perplexity = (100.0, 50.0)
        self.code: Callable[[str], int] = lambda command: 0
        self.refusal = "it is refused"
        self.precision = "fp32"
        self.recorded = KILLED_AFTER
        self.commands: list[str] = []

    def task(self, name: str, *arguments: Any, variables: Any = None) -> dict[str, Any]:
        self.commands.append(name)
        if name == "train_until_killed":
            write_steps(Path(arguments[1]), [{"loss": 1.0}] * self.recorded)
        result = self.tasks[name]
        if isinstance(result, Exception):
            raise result
        if name == "train_stages":
            for stage in ("sft", "reward", "ppo"):
                before, after = ({"perplexity": value} for value in self.perplexity)
                summary = {"stage": stage, "before": before, "after": after, "seconds": 1.0, "peak_memory": 2**30}
                write(Path(arguments[1]) / stage / "stage.json", summary)
        if name == "save_in_the_middle":
            write(Path(arguments[1]) / "run.json", {})
        return result

    def rlhf(self, *arguments: str, variables: Any = None) -> Finished:
        command = " ".join(arguments)
        self.commands.append(command)
        if arguments[1] == "explain":
            return Finished(0, json.dumps(self.explanation), "", 10.0)
        if arguments[1] == "check":
            failed = any(check["result"] == "failed" for check in self.kit)
            return Finished(int(failed), json.dumps(self.kit), "", 10.0)
        if code := self.code(command):
            return Finished(code, "", f"rlhf: error: {self.refusal}", 10.0)
        output = Path(arguments[arguments.index("--output") + 1])
        write(output / "run.json", {"accelerator": {"precision": {"name": self.precision}}})
        records = [
            {"loss": loss, "grad_norm": self.grad_norm(command)} for loss in self.losses(command, variables or {})
        ]
        write_steps(output, records)
        return Finished(0, "", "", 10.0)


def write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def write_steps(output: Path, records: list[dict[str, float]]) -> None:
    (output / "sft").mkdir(parents=True, exist_ok=True)
    (output / "sft" / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))


def run(processes: Fake, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    (check,) = {check for level in LEVELS for check in level.checks if check.name == name}
    check.run(Subject("npu", 8, False, processes), facts)
    return facts


def change(path: str, value: Any) -> Callable[[Fake], None]:
    """Return a fault: the value at a path such as `tasks.train_stages.ppo.parameters` of the fake."""
    first, *middle, last = path.split(".")

    def apply(processes: Fake) -> None:
        place = getattr(processes, first)
        for key in middle:
            place = place[int(key) if isinstance(place, list) else key]
        place[int(last) if isinstance(place, list) else last] = value

    return apply


def attribute(name: str, value: Any) -> Callable[[Fake], None]:
    return lambda processes: setattr(processes, name, value)


def end_with(code: int, words: str, unless: str = "no such words") -> Callable[[Fake], None]:
    """Let commands with these words end with a code."""
    return attribute("code", lambda command: code if words in command and unless not in command else 0)


FAULTS: list[tuple[str, Callable[[Fake], None], str]] = [
    ("product", change("tasks.compare_with_cpu", CheckFailed("SIGSEGV")), "SIGSEGV"),
    (
        "explain",
        change("explanation.operations.attention", {"ok": False, "reason": "no library"}),
        "no attention: no library",
    ),
    ("explain", change("explanation.precisions.auto", {"ok": False, "reason": "old"}), "no precision: old"),
    ("conformance", change("kit.1.result", "failed"), "memory failed: x"),
    ("attention", change("tasks.compare_with_cpu", CheckFailed("not finite")), "not finite"),
    ("indexing", change("tasks.compare_with_cpu", CheckFailed("topk differs")), "topk differs"),
    ("decoding", change("tasks.compare_decoding", CheckFailed("stale")), "stale"),
    ("stages", attribute("perplexity", (100.0, 100.0)), "SFT has not learned: held-out perplexity 100.0 before, 100.0"),
    (
        "stages",
        change("tasks.train_stages.reward", MEMORY | {"parameters": 8}),
        "reward has left 8 bytes of parameters",
    ),
    ("stages", change("tasks.train_stages.ppo", MEMORY | {"allocated": 2**30}), "ppo has left 1,073,741,824 bytes on"),
    ("stages", change("tasks.train_stages.fallbacks", ["generation"]), "generation were not recorded"),
    (
        "zero",
        attribute("losses", lambda command, _: [3.0, 2.4] if "zero_stage=2" in command else [3.0, 2.5]),
        "ZeRO 2 with 2 ranks: losses are 3.0000, 2.4000, expected 3.0000, 2.5000 within 0.2%",
    ),
    ("zero", end_with(2, "zero_stage=1"), "ZeRO 1 with 2 ranks: it is refused"),
    ("zero", end_with(1, "zero_stage=3"), "ZeRO 3 with 2 ranks: exit code 1"),
    ("zero", end_with(2, "zero_stage=3", unless="--dry-run"), "ZeRO 3 with 2 ranks: it is refused"),
    (
        "zero",
        change("tasks.train_adapters.unchanged adapters", ["a.lora_A"]),
        "unchanged adapters after 4 steps: 1, expected none; the first",
    ),
    ("zero", change("tasks.train_adapters.changed frozen weights", ["a"]), "changed frozen weights after 4 steps: 1"),
    ("zero", change("tasks.train_adapters.adapters", 0), "expected adapters and frozen weights"),
    (
        "resume",
        attribute("losses", lambda _, variables: [3.0, 2.5, 9.0, 1.5] if variables else LOSSES),
        "resumed on eager mode: losses are 9.0000, 1.5000, expected 2.0000, 1.5000",
    ),
    (
        "resume",
        attribute("losses", lambda command, _: LOSSES[: 2 if "cpu" in command else 4]),
        "on the CPU: 2 steps are",
    ),
    ("resume", end_with(2, "cpu"), "resumed on the CPU: it is refused"),
    ("resume", change("tasks.compare_with_cpu", CheckFailed("SIGSEGV")), "SIGSEGV"),
    (
        "zero",
        attribute("grad_norm", lambda command: 2.0 if "--ranks 2" in command else 1.0),
        "ZeRO 0 with 2 ranks: norms of gradients are 2.0000",
    ),
    ("zero", end_with(2, "zero_stage=3"), "ZeRO 3 with 2 ranks: it is refused"),
    (
        "operators",
        change("tasks.compare_operators.failures", [{"operator": "aten.mm", "failure": "aten.mm in bf16: 1 at [0]"}]),
        "1 of 2 operators: aten.mm; aten.mm in bf16: 1 at [0]",
    ),
    ("operators", change("tasks.compare_operators", CheckFailed("SIGSEGV")), "SIGSEGV"),
    (
        "operations",
        change("tasks.compare_operations.failures", [{"operator": "adamw: fast", "failure": "adamw by fast: nan"}]),
        "1 of 1 implementations: adamw: fast; adamw by fast: nan",
    ),
    ("golden", change("tasks.compare_with_golden.failure", "sft in fp32: update"), "sft in fp32: update"),
    ("golden", change("tasks.write_fixed_state.stages.dpo", ["fp8"]), "dpo: no golden numbers of a precision"),
    ("drawn", change("tasks.compare_draws.failure", "ppo in fp32: rollout"), "ppo in fp32: rollout"),
    ("captured", change("tasks.compare_captured.failure", "ppo in fp32: scores"), "ppo in fp32: scores"),
    ("captured", change("tasks.compare_captured.fallbacks", ["generation"]), "generation were not recorded"),
    ("captured", change("tasks.compare_captured.graphs", 0), "its count of graphs is 0"),
    (
        "kill",
        attribute("losses", lambda command, _: [3.0, 2.5, 2.0, 1.6] if "--resume" in command else LOSSES),
        "killed and resumed: losses are 3.0000, 2.5000, 2.0000, 1.6000, expected",
    ),
    ("kill", attribute("recorded", 2), "2 steps were recorded when the run was killed, expected 5"),
    ("kill", change("tasks.train_until_killed", CheckFailed("exit code 1; no such key")), "no such key"),
    (
        "out-of-memory",
        change("tasks.run_out_of_memory", {"recognized": False, "message": "RuntimeError: synStatus 26"}),
        "full memory is not recognized as out of memory: RuntimeError: synStatus 26",
    ),
    (
        "out-of-memory",
        change("tasks.run_out_of_memory.losses", [3.0, 2.5, 2.5, 1.5]),
        "after memory was full: losses are 3.0000, 2.5000, 2.5000",
    ),
    ("flat", change("tasks.watch_steps.steps.119.compilations", 9), "sft: 2 graphs were compiled after step 72"),
    (
        "flat",
        change(
            "tasks.watch_steps.steps",
            [{"memory": 10**6 + 10**4 * step, "compilations": None} for step in range(120)],
        ),
        "sft: memory grows by 10,000 bytes per step",
    ),
    (
        "flat",
        change("tasks.watch_steps.steps", [{"memory": 0, "compilations": None}] * 120),
        "sft: the backend's memory() reports 0 bytes in use after every step",
    ),
    ("ppo-steps", change("tasks.take_ppo_steps.steps.3.compilations", 9), "2 graphs were compiled after step 3"),
    ("ppo-steps", change("tasks.take_ppo_steps.fallbacks", ["generation"]), "generation were not recorded"),
    ("ppo-steps", change("tasks.take_ppo_steps.steps.2.skipped_steps", 11.0), "11 of 20 steps were skipped"),
    ("ppo-steps", change("tasks.take_ppo_steps", CheckFailed("kl became nan at step 7")), "kl became nan at step 7"),
]


@pytest.mark.parametrize(("name", "fault", "line"), FAULTS, ids=[f"{name}-{line[:24]}" for name, _, line in FAULTS])
def test_check_finds_its_fault(tmp_path: Path, name: str, fault: Callable[[Fake], None], line: str) -> None:
    processes = Fake(tmp_path)
    fault(processes)
    with pytest.raises(CheckFailed) as failure:
        run(processes, name)
    assert line in str(failure.value)


NAMES = sorted({check.name for level in LEVELS for check in level.checks})


def test_every_check_has_a_fault() -> None:
    assert sorted({name for name, _, _ in FAULTS}) == NAMES


def test_slope_and_its_interval_are_those_of_least_squares() -> None:
    """By hand: residuals 0.3, -0.4, -0.1, 0.2 of 1.1 per place; t for two degrees of freedom is 4.303."""
    slope, margin = fit_slope([1.0, 1.4, 2.8, 4.2])
    residuals = [value - (0.71 + 1.1 * place) for place, value in enumerate([1.0, 1.4, 2.8, 4.2])]
    assert slope == pytest.approx(1.1)
    assert margin == pytest.approx(4.3027 * (sum(left**2 for left in residuals) / 2 / 5) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_check_passes_without_a_fault(tmp_path: Path, name: str) -> None:
    run(Fake(tmp_path), name)


def test_zero_3_may_be_refused_before_it_starts(tmp_path: Path) -> None:
    processes = Fake(tmp_path)
    end_with(2, "zero_stage=3")(processes)
    processes.refusal = "engine.zero_stage: the mode crashes"
    assert run(processes, "zero")["ZeRO 3 with 2 ranks"] == "refused: engine.zero_stage: the mode crashes"


@pytest.mark.parametrize(("devices", "refused"), [(1, True), (2, False)])
def test_two_ranks_may_be_refused_on_one_device_alone(tmp_path: Path, devices: int, refused: bool) -> None:
    processes = Fake(tmp_path)
    end_with(2, "--ranks 2")(processes)
    facts: dict[str, Any] = {}
    with nullcontext() if refused else pytest.raises(CheckFailed, match="ZeRO 0 with 2 ranks: it is refused"):
        check_zero(Subject("npu", devices, False, processes), facts)
    assert facts.get("ZeRO 0 with 2 ranks", "").endswith("share a device here: it is refused") == refused
    assert ("ZeRO 3 with 1 rank" in facts) == refused


def test_precision_without_golden_numbers_is_named(tmp_path: Path) -> None:
    processes = Fake(tmp_path)
    facts = run(processes, "golden")
    assert facts["note"] == "not compared, for lack of golden numbers: sft, reward, dpo, ppo in fp16"
    assert processes.commands.count("compare_with_golden") == 2 * 4  # fp32 and bf16 of four stages


def test_stages_after_one_that_differs_are_compared_too(tmp_path: Path) -> None:
    processes = Fake(tmp_path)
    processes.tasks["compare_with_golden"]["failure"] = "update"
    facts: dict[str, Any] = {}
    with pytest.raises(CheckFailed):
        check_golden(Subject("npu", 1, False, processes), facts)
    assert len(facts["worst of each phase"]) == 2 * 4


def test_device_that_records_nothing_says_so(tmp_path: Path) -> None:
    processes = Fake(tmp_path)
    processes.tasks["compare_captured"] = {"recorded by": "nothing: not offered by this backend (no graphs)"}
    assert run(processes, "captured")["recorded by"] == "nothing: not offered by this backend (no graphs)"


def test_overflowing_gradients_have_no_norm_to_compare(tmp_path: Path) -> None:
    processes = Fake(tmp_path)
    processes.precision = "fp16"
    processes.grad_norm = lambda command: float("inf") if "--ranks 2" in command else 1.0
    run(processes, "zero")


def test_mode_that_the_software_lacks_is_a_note(tmp_path: Path) -> None:
    processes = Fake(tmp_path)
    processes.tasks["compare_with_cpu"] = CheckFailed("this torch has no eager mode", refused=True)
    facts = run(processes, "resume")
    assert facts["eager mode"] == "not available: this torch has no eager mode"
    assert facts["this device"] == facts["the CPU"] == LOSSES


def test_first_failure_ends_all_levels_and_the_certificate_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(tmp_path)
    fake.kit[0] |= {"result": "failed", "reason": "bucket(3) is 2"}
    monkeypatch.setattr(
        fake, "tasks", fake.tasks | {"record_environment": {"facts": {}}, "list_exceptions": {"exceptions": []}}
    )
    monkeypatch.setattr(runner, "Processes", lambda *arguments: fake)
    lines: list[str] = []
    options = {"level": "all", "output": tmp_path / "c", "report_progress": lines.append}
    report, folder = runner.certify("cpu", size="toy", **options)
    assert {path.name for path in folder.iterdir()} == {"certificate.json", "certificate.html", "bundle.zip"}
    assert not report["passed"]
    assert [check["result"] for check in report["checks"]] == ["passed", "passed", "failed"]
    assert report["checks"][2]["facts"]["report"] == fake.kit
    later = [check.name for level in LEVELS[1:] for check in level.checks]
    assert report["not run"] == [check.name for check in FIRST_CONTACT[3:]] + later
    assert [level["result"] for level in report["levels"]] == ["failed"] + ["not run"] * (len(LEVELS) - 1)
    assert lines[0].startswith("cpu: first-contact, interface, ")
    assert lines[-1].endswith("shapes failed: bucket(3) is 2")


def test_note_of_a_check_is_shown_after_it_and_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path)
    fake.tasks |= {"record_environment": {"facts": {}}, "list_exceptions": {"exceptions": []}}
    monkeypatch.setattr(runner, "Processes", lambda *arguments: fake)
    lines: list[str] = []
    _, folder = runner.certify(
        "cpu", level="learning", size="toy", only=["golden"], output=tmp_path / "c", report_progress=lines.append
    )
    note = "not compared, for lack of golden numbers: sft, reward, dpo, ppo in fp16"
    assert lines[-1].strip() == note
    assert f"<div>{note}</div>" in (folder / "certificate.html").read_text()


def test_exceptions_that_cannot_be_read_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path)
    fake.tasks |= {"record_environment": {}, "list_exceptions": CheckFailed("ValueError: expires is 'soon'")}
    monkeypatch.setattr(runner, "Processes", lambda *arguments: fake)
    with pytest.raises(AcceleratorError, match="cpu: exceptions\\(\\) failed: ValueError: expires is 'soon'"):
        runner.certify("cpu", size="toy", output=tmp_path / "c")


def test_numbers_that_json_lacks_are_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path)
    worst = [{"operator": "aten.mm", "units": math.inf, "value": math.nan}]
    fake.tasks |= {"record_environment": {}, "list_exceptions": {"exceptions": []}}
    fake.tasks["compare_operators"] |= {"worst": worst}
    monkeypatch.setattr(runner, "Processes", lambda *arguments: fake)
    runner.certify("cpu", level="numerics", size="toy", output=tmp_path / "c")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    document = json.loads((tmp_path / "c" / "certificate.json").read_text(), parse_constant=refuse)
    assert document["checks"][0]["facts"]["worst"] == [{"operator": "aten.mm", "units": "inf", "value": "nan"}]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("loss"), "the check itself failed: KeyError: 'loss'"),
        (OSError(28, "No space left on device"), "the check itself failed: "),
        (KeyboardInterrupt(), None),
    ],
)
def test_certificate_is_written_whatever_ends_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str | None
) -> None:
    fake = Fake(tmp_path)
    monkeypatch.setattr(
        fake, "tasks", fake.tasks | {"record_environment": {"facts": {}}, "list_exceptions": {"exceptions": []}}
    )
    monkeypatch.setattr(runner, "Processes", lambda *arguments: fake)

    def rlhf(*arguments: str, variables: Any = None) -> Finished:
        raise error

    monkeypatch.setattr(fake, "rlhf", rlhf)
    lines: list[str] = []
    folder = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt) if reason is None else nullcontext():
        runner.certify("cpu", size="toy", output=folder, report_progress=lines.append)
    with zipfile.ZipFile(folder / "bundle.zip") as bundle:
        report = json.loads(bundle.read("report.json"))
    assert not report["passed"]
    assert [check["result"] for check in report["checks"]] == ["passed", "failed"][: 2 if reason else 1]
    if reason:
        assert report["checks"][1]["reason"].startswith(reason)
    else:
        assert lines[-1] == f"stopped; certificate of the checks so far: {folder}"


def test_folder_that_cannot_be_written_is_refused_before_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="it cannot be written; name a folder in another place"):
        runner.certify("cpu", size="toy", output=tmp_path / "c")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"only": ["attntion"]}, "--only attntion: no such check; use one of product, explain, "),
        ({"output": Path("missing", "c")}, "the folder missing does not exist; create it, or name another"),
        ({"output": Path(__file__)}, f"--output {__file__}: it is a file; name a folder"),
        ({"level": "numeric"}, "--level numeric: no such level; use one of first-contact, interface"),
        ({"up_to": "all"}, "--up-to all: no such level; use one of first-contact, "),
        ({"level": "all", "up_to": "interface"}, "--level all and --up-to interface exclude each other; leave one out"),
        ({"level": "interface", "only": ["product"]}, "--only product: no such check; add --level first-contact"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        runner.certify("cpu", size="toy", **options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["first-contact"]),
        ({"level": "interface"}, ["interface"]),
        ({"up_to": "interface"}, ["first-contact", "interface"]),
        ({"level": "all"}, [level.name for level in LEVELS]),
        ({"level": "all", "only": ["product"]}, ["first-contact"]),
    ],
)
def test_levels_are_chosen_in_their_order(options: dict[str, Any], names: list[str]) -> None:
    assert [level.name for level in select_levels(**options)] == names


def test_conformance_kit_runs_once_for_two_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path)
    monkeypatch.setattr(
        fake, "tasks", fake.tasks | {"record_environment": {"facts": {}}, "list_exceptions": {"exceptions": []}}
    )
    monkeypatch.setattr(runner, "Processes", lambda *arguments: fake)
    report, _ = runner.certify("cpu", up_to="interface", only=["conformance"], size="toy", output=tmp_path / "c")
    first, second = report["checks"]
    assert [first["level"], second["level"]] == ["first-contact", "interface"]
    assert second["result"] == "passed" and second["facts"] == {"found in": "first-contact"}
    assert report["passed"] and fake.commands.count("accelerators check cpu --json") == 1


def test_level_that_takes_too_long_fails(tmp_path: Path) -> None:
    processes = Processes(tmp_path, tmp_path / "log", 60.0, deadline=time.monotonic() + 0.6)
    assert processes.python("-c", "import time; time.sleep(60)").error.startswith("did not end within")
    with pytest.raises(CheckFailed, match="the time of the level was over before the check began"):
        processes.python("-c", "0")


@pytest.mark.parametrize(("backend", "full", "minutes"), [("cpu", True, 30), ("npu", True, 10), ("npu", False, 30)])
def test_level_has_ten_minutes_on_a_device_and_thirty_on_a_cpu(backend: str, full: bool, minutes: int) -> None:
    assert {level.seconds(backend, full=full) for level in LEVELS} == {None, 60.0 * minutes}


@pytest.mark.parametrize(
    ("code", "seconds", "error"),
    [
        ("import os; os.abort()", 60.0, "SIGABRT"),
        ("import time; time.sleep(60)", 0.5, "did not end within 0 s"),
        ("import sys; sys.exit('rlhf: error: no card')", 60.0, "exit code 1; no card"),
        ("1 / 0", 60.0, "exit code 1; ZeroDivisionError: division by zero"),
    ],
)
def test_end_of_a_process_is_one_line(tmp_path: Path, code: str, seconds: float, error: str) -> None:
    processes = Processes(tmp_path, tmp_path / "log", seconds)
    assert processes.python("-c", code).error == error
    assert (tmp_path / "log").read_text().startswith(f"$ python {shlex.join(['-c', code])}\n")


def test_process_that_hangs_is_reported_with_its_last_line() -> None:
    assert Finished(None, "step 3\n", "", 9.0).error == "did not end within 9 s; its last line: step 3"


def test_processes_do_not_get_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    code = "import os; print('HF_TOKEN' in os.environ, 'DS_ACCELERATOR' in os.environ, os.environ['MODE'])"
    finished = Processes(tmp_path, tmp_path / "log", 60.0).python("-c", code, variables={"MODE": "0"})
    assert finished.stdout == "False False 0\n"
