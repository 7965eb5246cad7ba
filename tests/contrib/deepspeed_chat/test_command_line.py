"""`rlhf config --from-deepspeed-chat`, as it is typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf.cli.app import app
from rlhf.config.schema import load_config
from rlhf.errors import ConfigError
from tests.contrib.deepspeed_chat.originals import SCRIPTS


def translate(*commands: str) -> str:
    options = [part for command in commands for part in ("--from-deepspeed-chat", command)]
    done = CliRunner().invoke(app, ["config", *options])
    if done.exception:
        raise done.exception
    return done.stdout


def test_script_on_standard_input_becomes_a_recipe_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf", "config", "--from-deepspeed-chat", "-", "--devices", "8"]
    done = subprocess.run(command, input=SCRIPTS["llama_2_7b"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(done.stdout, encoding="utf-8")
    config = load_config(recipe)
    assert (config.model.path, config.ppo.batch_size) == ("meta-llama/Llama-2-7b-hf", 8)
    assert config.roles.actor.zero_stage == 3


def test_invalid_bytes_on_standard_input_are_replaced() -> None:
    command = b"deepspeed main.py --model_name_or_path a\xff --beta 0.1"
    done = CliRunner().invoke(app, ["config", "--from-deepspeed-chat", "-"], input=command)
    assert done.exit_code == 0 and "--model_name_or_path a\N{REPLACEMENT CHARACTER}" in done.stdout


def test_commands_may_be_given_one_by_one() -> None:
    sft = "step1_supervised_finetuning/main.py --model_name_or_path a"
    reward = "step2_reward_model_finetuning/main.py --model_name_or_path b"
    lines = "# Start it: rlhf sft --config recipe.yaml\n# Start it: rlhf reward --config recipe.yaml\n"
    assert lines in translate(sft, reward)


def test_script_may_be_named_and_its_variables_assigned(tmp_path: Path) -> None:
    script = tmp_path / "step3_rlhf_finetuning" / "run_13b.sh"  # its folder tells the step
    script.parent.mkdir()
    script.write_text(
        '#!/bin/bash\nACTOR=$1\nZERO=$2\nif [ "$ZERO" == "" ]; then\n    ZERO=3\nfi\n'
        "deepspeed --num_gpus 2 main.py --actor_model_name_or_path $ACTOR \\\n"
        "   --critic_model_name_or_path c --actor_zero_stage $ZERO &> log\n",
        encoding="utf-8",
    )
    recipe = translate("ACTOR=out/actor", str(script))
    assert "  actor: out/actor  # --actor_model_name_or_path out/actor\n" in recipe
    assert "    zero_stage: 3  # --actor_zero_stage 3\n" in recipe
    with pytest.raises(ConfigError, match=r"the shell variable \$ACTOR has no value here; put ACTOR=VALUE before"):
        translate(str(script))


def test_other_options_are_refused() -> None:
    done = CliRunner().invoke(app, ["config", "--from-deepspeed-chat", "main.py --beta 1", "--set", "seed=1"])
    assert isinstance(done.exception, ConfigError) and "--from-deepspeed-chat: " in str(done.exception)
