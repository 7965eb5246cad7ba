"""`rlhf config --from-deepspeed-chat`, as it is typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.config.schema import load_config
from tests.contrib.deepspeed_chat import commands
from tests.forks import Forks


def translation(forks: Forks, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.run("config", *arguments, timeout=120)


def test_a_script_on_standard_input_becomes_a_recipe_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf", "config", "--from-deepspeed-chat", "-", "--devices", "8"]
    done = subprocess.run(command, input=commands.LLAMA_2_7B, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(done.stdout, encoding="utf-8")
    config = load_config(recipe)
    assert (config.model.path, config.roles.actor.zero_stage, config.ppo.batch_size) == (
        "meta-llama/Llama-2-7b-hf",
        3,
        8,
    )


def test_several_commands_may_be_given_one_by_one(forks: Forks) -> None:
    sft = "step1_supervised_finetuning/main.py --model_name_or_path a"
    reward = "step2_reward_model_finetuning/main.py --model_name_or_path b"
    done = translation(forks, "--from-deepspeed-chat", sft, "--from-deepspeed-chat", reward)
    assert "# Start it: rlhf sft --config recipe.yaml\n# Start it: rlhf reward --config recipe.yaml\n" in done.stdout


def test_a_script_may_be_named_and_what_its_caller_gives_it_assigned(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "step3_rlhf_finetuning" / "run_13b.sh"  # whose folder tells the step
    script.parent.mkdir()
    script.write_text(
        '#!/bin/bash\nACTOR=$1\nZERO=$2\nif [ "$ZERO" == "" ]; then\n    ZERO=3\nfi\n'
        "deepspeed --num_gpus 2 main.py --actor_model_name_or_path $ACTOR \\\n"
        "   --critic_model_name_or_path c --actor_zero_stage $ZERO &> log\n",
        encoding="utf-8",
    )
    done = translation(forks, "--from-deepspeed-chat", "ACTOR=out/actor", "--from-deepspeed-chat", str(script))
    assert (done.returncode, done.stderr) == (0, "")
    assert "  actor: out/actor  # --actor_model_name_or_path out/actor\n" in done.stdout
    assert "    zero_stage: 3  # --actor_zero_stage 3\n" in done.stdout
    refused = translation(forks, "--from-deepspeed-chat", str(script))
    assert refused.stderr.endswith("the shell variable $ACTOR has no value here; put ACTOR=VALUE before the command\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--from-deepspeed-chat", "main.py --model_name_or_path m --lora_dimm 8"],
            "rlhf: error: --lora_dimm: unknown flag of DeepSpeed-Chat's step 1; did you mean --lora_dim?\n",
        ),
        (
            ["--from-deepspeed-chat", "main.py --model_name_or_path m", "--set", "seed=1"],
            "rlhf: error: --from-deepspeed-chat: prints what the command means; give other options to rlhf later\n",
        ),
        (["--devices", "8"], "rlhf: error: --devices: is for --from-deepspeed-chat; leave it out\n"),
    ],
)
def test_what_cannot_be_is_one_line(forks: Forks, arguments: list[str], line: str) -> None:
    done = translation(forks, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
