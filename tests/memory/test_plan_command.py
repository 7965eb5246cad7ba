"""`rlhf plan`: a table, JSON, advice that works, and errors of one line; neither DeepSpeed nor data libraries load."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerators import known_device, known_device_names
from tests.forks import Forks
from tests.helpers import user_environment

SEVEN = ["--set", "model.path=llama-2-7b", "--set", "data.datasets=rows.jsonl"]


def plan_reports(forks: Forks, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    done = forks.run("plan", *SEVEN, "--json", *arguments, timeout=60)
    assert done.returncode == code, done.stderr
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    return reports


@pytest.mark.slow
def test_plan_with_given_memory_loads_no_deepspeed() -> None:
    code = (
        "import sys; from typer.main import get_command; from rlhf.cli.app import app\n"
        f"get_command(app).main({['plan', *SEVEN, '--memory', '1TB']!r}, standalone_mode=False)\n"
        "print({'deepspeed', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=user_environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
    assert "PPO  fits: peak about" in done.stdout


@pytest.mark.parametrize(
    "tight", [["--memory", "40GiB"], ["--memory", "24GB", "--set", "model.path=opt-13b", "--set", "lora.rank=8"]]
)
def test_cheapest_changes_make_the_stage_fit(forks: Forks, tight: list[str]) -> None:
    tight = [*tight, "--stage", "ppo"]
    (report,) = plan_reports(forks, *tight, code=3)
    items = [(item["role"], item["kind"], item["host"]) for item in report["items"]]
    assert len(items) == len(set(items))
    (fullest,) = [phase for phase in report["phases"] if phase["phase"] == report["fullest"]]
    assert sum(item["bytes"] for item in report["items"] if not item["host"]) == fullest["device"]
    change = report["advice"]["cheapest change"].partition(" (")[0].split()
    assert change.count("--set") > 1, "several changes are options of one command"
    assert plan_reports(forks, *tight, *change)[0]["fits"]


def test_fewest_devices_suffice_and_half_of_them_do_not(forks: Forks) -> None:
    sharded = ["--set", "engine.zero_stage=3", "--stage", "ppo", "--memory", "80GiB", "--set", "ppo.batch_size=64"]
    (report,) = plan_reports(forks, *sharded, code=3)
    few = int(report["advice"]["fewest devices"].split()[0])
    assert plan_reports(forks, *sharded, "--devices", str(few))[0]["fits"]
    assert not plan_reports(forks, *sharded, "--devices", str(few // 2), code=3)[0]["fits"]


def test_fewest_devices_share_the_memory_of_one_host(forks: Forks) -> None:
    """All optimizer states are on the host: 12 bytes of 6.7e9 numbers, 75 GiB, whatever the number of devices."""
    offloaded = ["--set", "engine.zero_stage=3", "--set", "engine.offload=all", "--stage", "sft", "--memory", "40GiB"]
    offloaded += ["--host-memory", "192GiB", "--set", "sft.micro_batch_size=1"]
    (eight,), (one,) = plan_reports(forks, *offloaded, "--devices", "8"), plan_reports(forks, *offloaded)
    assert one["fits"] and eight["advice"]["fewest devices"] == one["advice"]["fewest devices"] == "1 of these"


def test_fewest_devices_of_a_host_share_its_memory(forks: Forks) -> None:
    large = ["--accelerator", "cpu", "--set", "model.path=opt-13b", "--stage", "sft", "--set", "engine.zero_stage=3"]
    (report,) = plan_reports(forks, *large, code=3)
    assert report["advice"]["fewest devices"] == "with these settings no number is enough"


def test_host_memory_limits_a_plan_of_this_machine_too(forks: Forks) -> None:
    done = forks.run("plan", *SEVEN, "--accelerator", "cpu", "--host-memory", "1GiB", timeout=60)
    assert done.returncode == 2 and "--host-memory: cpu uses the host's memory; leave this option out" in done.stderr


def test_rows_of_the_largest_micro_batch_are_pairs_where_the_key_counts_pairs(forks: Forks) -> None:
    stages = [part for stage in ("sft", "reward", "dpo") for part in ("--stage", stage)]
    most = [report["advice"]["largest micro-batch"] for report in plan_reports(forks, *stages, "--memory", "10TB")]
    assert [text.split(maxsplit=1)[1] for text in most] == ["rows at a time", "pairs at a time", "pairs at a time"]


def test_largest_micro_batch_fits_and_twice_its_rows_do_not(forks: Forks) -> None:
    lora = ["--set", "lora.rank=8", "--stage", "ppo", "--memory", "40GiB", "--set", "ppo.batch_size=1024"]
    lora += ["--set", "ppo.generation_batch_size=1"]
    most = int(plan_reports(forks, *lora, code=3)[0]["advice"]["largest micro-batch"].split()[0])
    assert plan_reports(forks, *lora, "--set", f"ppo.micro_batch_size={most}")[0]["fits"]
    assert not plan_reports(forks, *lora, "--set", f"ppo.micro_batch_size={2 * most}", code=3)[0]["fits"]


def test_auto_shows_the_value_that_a_run_would_take(forks: Forks) -> None:
    auto = ["--set", "engine.zero_stage=auto", "--stage", "sft", "--devices", "8"]
    roomy = plan_reports(forks, *auto, "--memory", "640GiB")[0]
    tight = plan_reports(forks, *auto, "--memory", "60GiB")[0]
    assert roomy["advice"]["engine.zero_stage"] == "0 (auto)"
    assert tight["advice"]["engine.zero_stage"] in ("1 (auto)", "2 (auto)", "3 (auto)")


def test_hours_and_money_follow_from_a_throughput(forks: Forks) -> None:
    common = ["--memory", "1TB", "--stage", "sft", "--tflops", "100", "--price", "2", "--rows", "3200"]
    (single,) = plan_reports(forks, *common)
    # 100 steps of 32 rows of 512 tokens: 6 operations a number and token.
    expected = 100 * 32 * 512 * 6 * 6_738_415_616 / 100e12 / 3600
    assert single["hours"] == pytest.approx(expected)
    assert single["cost"] == pytest.approx(2 * expected)
    (four,) = plan_reports(forks, *common, "--devices", "4")
    assert four["hours"] == pytest.approx(expected / 4) and four["cost"] == pytest.approx(2 * expected)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ("3200", "3.68 hours (100 steps of 132.48 s), cost 7.36"),
        ("32", "2.2 minutes (1 step of 132.48 s), cost 0.07"),
    ],
)
def test_time_is_in_minutes_below_an_hour(forks: Forks, rows: str, text: str) -> None:
    """6 operations for each of 6,738,415,616 numbers and 32 x 512 tokens, at 5e12 a second."""
    common = ["--memory", "1TB", "--stage", "sft", "--tflops", "5", "--price", "2", "--rows", rows]
    assert plan_reports(forks, *common)[0]["advice"]["time"] == text


def test_verdict_names_the_whole_memory_and_what_is_reserved(forks: Forks) -> None:
    for memory, whole in (("400MiB", "400 MiB"), ("100GiB", "100.0 GiB")):
        (report,) = plan_reports(forks, "--memory", memory, "--stage", "sft", code=3)
        verdict = report["verdict"]
        assert f" of {whole} on each device (" in verdict, verdict
        assert ", plus 512 MiB for the device's runtime, of" in verdict, verdict
    assert report["memory"] == 100 * 2**30 - 2**29


def plan_on(forks: Forks, machine: str, *arguments: str) -> dict[str, Any]:
    common = ("--set", "lora.rank=8", "--set", "ppo.micro_batch_size=1", "--stage", "ppo")
    (report,) = plan_reports(forks, "--on", machine, *common, *arguments)
    return report


def test_machine_by_name_gives_memory_hours_and_cost(forks: Forks) -> None:
    report = plan_on(forks, "8xA100-80")
    device = known_device("a100-80")
    assert report["fits"] and report["devices"] == 8 and report["precision"] == "bf16"
    assert report["memory"] == device.memory - 2**29
    # 100 steps of 32 rows of 512 tokens. Generation: one pass of the actor. The rest: three scores, the actor's again,
    # and two updates of four operations a number.
    actor, critic, reward = (report["parameters"][role]["all"] for role in ("actor", "critic", "reward"))
    tokens, peak = 100 * 32 * 512, 8 * 312e12
    generation = tokens * 2 * actor / (device.generation_share * peak)
    rest = tokens * (2 * (2 * actor + critic + reward) + 4 * (actor + critic)) / (device.training_share * peak)
    assert report["hours"] == pytest.approx((generation + rest) / 3600)
    assert report["generation_share"] == pytest.approx(generation / (generation + rest))
    assert device.price and report["cost"] == pytest.approx(report["hours"] * 8 * device.price.dollars)
    advice = report["advice"]
    assert advice["time"].startswith("about ") and "of it generation), cost " in advice["time"]
    assert "12 % and training at 28 % of 312 TFLOP/s" in advice["estimated from"]
    assert advice["estimated from"].endswith(f"({device.price.source}, {device.price.date})")


def test_given_speed_and_price_replace_those_of_the_machine(forks: Forks) -> None:
    known, given = plan_on(forks, "a100_80"), plan_on(forks, "a100 80", "--tflops", "10", "--price", "5")
    again = plan_on(forks, "1 x a100-80", "--tflops", "20", "--price", "5")
    assert known["devices"] == 1 and known["memory"] == given["memory"]
    assert given["hours"] == pytest.approx(2 * again["hours"]) and given["hours"] > known["hours"]
    assert given["cost"] == pytest.approx(5 * given["hours"])
    assert given["advice"]["estimated from"] == "10 TFLOP/s (--tflops)"


def test_machine_decides_the_precision_that_a_run_would_take(forks: Forks) -> None:
    report = plan_on(forks, "v100-32")
    assert report["precision"] == "fp16" and "cost" not in report
    assert report["advice"]["estimated from"].endswith("; no price is known, give --price")


def test_speed_that_is_not_known_is_said(forks: Forks) -> None:
    report = plan_on(forks, "gaudi3", "--precision", "fp32")
    assert report["fits"] and "hours" not in report
    assert report["advice"]["time"] == "not known: no speed in fp32 is known; give --tflops, or --measured"


def test_help_lists_every_known_device(forks: Forks) -> None:
    words = forks.run("plan", "--help", timeout=60).stdout.replace("\u2502", " ").split()
    assert set(known_device_names()) <= {word.strip(",.:") for word in words}


def test_measured_run_gives_its_pace(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "stage.json").write_text(json.dumps({"stage": "ppo", "steps": 10, "seconds": 50.0}))
    measured = ["--memory", "1TB", "--measured", str(tmp_path), "--stage", "ppo", "--set", "ppo.steps=720"]
    assert plan_reports(forks, *measured)[0]["hours"] == pytest.approx(1.0)


def test_run_on_other_devices_predicts_no_hours(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "sft").mkdir()
    summary = {"stage": "sft", "steps": 10, "seconds": 50.0, "ranks": 8}
    (tmp_path / "sft" / "stage.json").write_text(json.dumps(summary))
    measured = ["plan", *SEVEN, "--memory", "1TB", "--measured", str(tmp_path), "--stage", "sft"]
    done = forks.run(*measured, timeout=60)
    assert done.returncode == 2
    assert "was measured on 8 ranks, and the plan has 1 device; give --devices 8" in done.stderr
    assert forks.run(*measured, "--devices", "8", timeout=60).returncode == 0


def test_measured_run_sets_up_once(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "ppo").mkdir()
    summary = {"stage": "ppo", "steps": 10, "seconds": 50.0, "set_up_seconds": 20.0}
    (tmp_path / "ppo" / "stage.json").write_text(json.dumps(summary))
    measured = ["--memory", "1TB", "--measured", str(tmp_path), "--stage", "ppo", "--set", "ppo.steps=720"]
    assert plan_reports(forks, *measured)[0]["hours"] == pytest.approx((720 * 3 + 20) / 3600)


PROFILE = {
    "rows": 100,
    "start_seconds": 36.0,
    "set_up_seconds": 7.0,
    "first_step_seconds": 5.0,
    "step_seconds": [1.0, 2.0],
    "recording_seconds": 0.5,
    "evaluation_seconds": 10.0,
    "checkpoint_seconds": 3.0,
    "saving_seconds": 4.0,
}


def profiled_plans(forks: Forks, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the plan of SFT and PPO after a profile with the numbers of `PROFILE`."""
    file = folder / "profile.json"
    file.write_text(json.dumps([{"stage": stage, "phases": [], **PROFILE} for stage in ("sft", "ppo")]))
    options = ["--memory", "1TB", "--measured", str(file), "--stage", "sft", "--stage", "ppo", *arguments]
    return plan_reports(forks, *options)


def test_profile_predicts_every_part_of_a_stage(forks: Forks, tmp_path: Path) -> None:
    sft = ["sft.batch_size=32", "sft.epochs=3", "sft.eval_every=epoch", "sft.checkpoint_every=5"]
    ppo = ["ppo.steps=10", "ppo.eval_every=5", "ppo.keep=best(reward)", "ppo.checkpoint_every=0"]
    plans = profiled_plans(forks, tmp_path, *(word for setting in sft + ppo for word in ("--set", setting)))
    # 100 rows are 4 steps of an epoch and 12 in all, of 1.5 + 0.5 s. The first takes 3.5 s more. Four evaluations:
    # before, after steps 4 and 8, after; three checkpoints: after 5, 10, 12; one model.
    # PPO: ten steps; evaluations before, after step 5, after; each may be the best, but for the first; one checkpoint.
    seconds = {"sft": 12 * 2 + 7 + 3.5 + 4 * 10 + 3 * 3 + 4, "ppo": 10 * 2 + 7 + 3.5 + 3 * 10 + 3 + 2 * 4}
    assert {plan["stage"]: 3600 * plan["hours"] for plan in plans} == pytest.approx(seconds)
    assert [plan["steps"] for plan in plans] == [12, 10] and plans[0]["start_hours"] == pytest.approx(0.01)


def test_given_rows_replace_the_profiled_ones(forks: Forks, tmp_path: Path) -> None:
    plans = profiled_plans(forks, tmp_path, "--rows", "3200", "--set", "sft.batch_size=32", "--set", "sft.epochs=1")
    assert plans[0]["steps"] == 100


def test_plan_of_several_stages_ends_with_their_sum(forks: Forks, tmp_path: Path) -> None:
    profiled_plans(forks, tmp_path)
    options = ["--memory", "1TB", "--measured", str(tmp_path / "profile.json"), "--stage", "sft", "--stage", "ppo"]
    options += ["--set", "sft.batch_size=100", "--set", "sft.epochs=1", "--set", "ppo.steps=1"]
    done = forks.run("plan", *SEVEN, *options, timeout=60)
    # Each stage: one step of 2 s, 7 of set-up, 3.5 more of the first, two evaluations, a checkpoint and a model.
    total = 36 + 2 * (2 + 7 + 3.5 + 20 + 3 + 4)
    assert (
        done.stdout.splitlines()[-1].split()
        == f"all stages {total / 60:.1f} minutes, with the start of the run".split()
    )


def test_stage_that_was_not_profiled_has_no_hours(forks: Forks, tmp_path: Path) -> None:
    profiled_plans(forks, tmp_path)
    (report,) = plan_reports(
        forks, "--memory", "1TB", "--measured", str(tmp_path / "profile.json"), "--stage", "reward"
    )
    assert "hours" not in report and report["advice"]["time"].startswith("not known: ")


def test_profile_of_one_process_predicts_no_other_number(forks: Forks, tmp_path: Path) -> None:
    profiled_plans(forks, tmp_path)
    options = ["--memory", "1TB", "--devices", "2", "--measured", str(tmp_path / "profile.json")]
    done = forks.run("plan", *SEVEN, *options, timeout=60)
    assert done.returncode == 2 and "was measured in one process, and the plan has 2 devices" in done.stderr


@pytest.mark.parametrize("text", ["", "{}", '[{"stage": "ppo"}]', "not JSON"])
def test_file_without_profiles_is_a_one_line_error(forks: Forks, tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    done = forks.run("plan", *SEVEN, "--memory", "1TB", "--measured", str(tmp_path / "profile.json"), timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "holds no output of rlhf profile --json" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "lots"], "--memory: must be a size, got lots"),
        (["--memory", "1TB", "--host-memory", "64"], "--host-memory: needs a unit, got 64"),
        (["--memory", "1TB", "--set", "ppo.generation_weights=layerwise"], "ppo.generation_weights: layerwise"),
        (["--memory", "1TB", "--set", "model.path=opt-13"], "opt-13: not a folder, .* did you mean opt-13b"),
        (["--memory", "1TB", "--accelerator", "cpu"], "--memory and --accelerator: "),
        (["--memory", "1TB", "--stage", "kto"], "--stage: no stage 'kto'"),
        (["--memory", "1TB", "--devices", "3"], "sft.batch_size: 32 rows cannot be divided among 3 ranks"),
        (
            ["--on", "8xa100"],
            "--on: must be a number and a known device, such as 8xa100-40, got 8xa100; "
            "did you mean a100-40 or a100-80\\? known are ",
        ),
        (
            ["--on", "b200"],
            "--on: .*got b200; did you mean h200 or h100\\? known are a100-40, .*gaudi3; for others give --dev",
        ),
        (["--on", "0xh100"], "--on: .*got 0xh100; known are "),
        (["--on", "h100", "--devices", "2"], "--on and --devices: each describes the devices; give one of them"),
        (["--on", "h100", "--memory", "2GiB"], "--on and --memory: "),
        (["--on", "h100", "--accelerator", "cpu"], "--on and --accelerator: "),
        (
            ["--on", "v100-16", "--precision", "bf16"],
            "precision: NVIDIA V100 16 GB .* does not have bf16; set it to auto, which is fp16",
        ),
        (["--memory", "1TB", "--measured", "absent"], "--measured absent: holds no run"),
    ],
)
def test_wrong_option_is_a_one_line_error(forks: Forks, arguments: list[str], message: str) -> None:
    import re

    done = forks.run("plan", *SEVEN, *arguments, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(rf"rlhf: error: {message}.*\n", done.stderr), done.stderr
