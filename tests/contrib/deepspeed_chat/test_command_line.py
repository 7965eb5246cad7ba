"""`rlhf config --from-deepspeed-chat`, as it is typed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf.cli.app import app
from rlhf.config.schema import load_config
from rlhf.errors import ConfigError
from tests.contrib.deepspeed_chat.originals import FORK, SCRIPTS


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


def test_first_commands_of_the_page_start_the_recipe_as_its_head_says(tmp_path: Path, monkeypatch) -> None:
    page = (Path(__file__).parents[3] / "docs/deepspeed-chat.md").read_text(encoding="utf-8")
    first, check, start = page.partition("```bash\n")[2].partition("```")[0].splitlines()
    script = tmp_path / "step3_rlhf_finetuning/training_scripts/opt/single_node/run_13b.sh"
    script.parent.mkdir(parents=True)
    script.write_text(
        "deepspeed main.py --actor_model_name_or_path $1 --critic_model_name_or_path $2 --inference_tp_size 2\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path / "step3_rlhf_finetuning")
    done = CliRunner().invoke(app, shlex.split(first.partition(" > ")[0])[1:])
    assert f"# Start it: {start}\n" in done.stdout
    assert check.partition("  #")[0].split() == [*start.split(), "--dry-run"]


SCRIPT = """#!/bin/bash
ACTOR=$1
ZERO=$2
OUTPUT=${3:-./output}
if [ "$ZERO" == "" ]; then
    ZERO=3
fi
mkdir -p $OUTPUT
deepspeed --num_gpus 2 main.py --actor_model_name_or_path $ACTOR --critic_model_name_or_path c \\
   --actor_zero_stage $ZERO --output_dir $OUTPUT &> $OUTPUT/training.log
"""


@pytest.mark.parametrize("start", ["bash {}", "sh {}", "{}", "nohup bash {}"])
def test_script_may_be_started_with_arguments(start: str, tmp_path: Path) -> None:
    script = tmp_path / "step3_rlhf_finetuning" / "run_13b.sh"
    script.parent.mkdir()
    script.write_text(SCRIPT, encoding="utf-8")
    recipe = translate(f"{start.format(script)} out/actor 2 out3")
    assert "  actor: out/actor  # --actor_model_name_or_path out/actor\n" in recipe
    assert "output: out3  # --output_dir out3\n" in recipe and "    zero_stage: 2  # --actor_zero_stage 2\n" in recipe
    recipe = translate(f"{start.format(script)} out/actor")
    assert "output: ./output  #" in recipe and "    zero_stage: 3  # --actor_zero_stage 3\n" in recipe


def test_edited_copy_of_a_script_of_the_fork_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HL_DATASET_PATH", "d")
    name = "train_step1_bloom_1.1b.sh"
    text = (FORK / name).read_text(encoding="utf-8")
    copy = tmp_path / name
    copy.write_text(text.replace("HL_MBS:-8", "HL_MBS:-4").replace("2e-5}", "7e-5}").replace("steps 20", "steps 77"))
    config = tmp_path / "recipe.yaml"
    config.write_text(translate(f"bash {copy}"), encoding="utf-8")
    sft = load_config(config).sft
    assert (sft.micro_batch_size, sft.optimizer.learning_rate, sft.optimizer.warmup) == (4, 7e-5, 77)


def test_defaults_are_those_of_the_main_that_is_there(tmp_path: Path) -> None:
    """Versions differ, and users edit them: what a script would start decides."""
    script = tmp_path / "step3_rlhf_finetuning" / "training_scripts" / "run_13b.sh"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.replace("deepspeed --num_gpus 2 main.py", "deepspeed main.py --actor_lora_dim 8"))
    main = script.parents[1] / "main.py"
    main.write_text(
        "parser.add_argument('--data_path', nargs='*', default=['Dahoas/rm-static'])\n"
        "parser.add_argument('--data_split', type=str, default='6,2,2')\n"
        "parser.add_argument('--actor_learning_rate', type=float, default=3e-4)\n"
        "parser.add_argument('--actor_weight_decay', type=float, default=0.1)\n"
    )
    (main.parent / "ppo_trainer.py").write_text("class T:\n    def __init__(self):\n        self.kl_ctl = 0.02\n")
    config = tmp_path / "recipe.yaml"
    config.write_text(translate(f"bash {script} facebook/opt-1.3b"), encoding="utf-8")
    loaded = load_config(config)
    assert (loaded.data.stage_split, loaded.ppo.optimizer.weight_decay) == ((6, 2, 2), 0.1)
    assert (loaded.ppo.kl_coef, loaded.roles.actor.lora_learning_rate) == (0.02, 3e-4)  # no rate of adapters yet


def test_sweep_that_is_a_loop_names_our_grid(tmp_path: Path) -> None:
    script = tmp_path / "step2_reward_model_finetuning" / "sweep" / "mine.sh"
    script.parent.mkdir(parents=True)
    script.write_text("for z in {2..3}\ndo\n  bash run_single.sh $z\n  pkill -9 python\ndone\n")
    with pytest.raises(ConfigError, match=r"for a sweep use `rlhf sweep example_scripts/sweeps/step2.yaml`"):
        translate(str(script))


def test_other_options_are_refused() -> None:
    done = CliRunner().invoke(app, ["config", "--from-deepspeed-chat", "main.py --beta 1", "--set", "seed=1"])
    assert isinstance(done.exception, ConfigError) and "--from-deepspeed-chat: " in str(done.exception)
