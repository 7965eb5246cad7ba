"""Command lines of DeepSpeed-Chat become recipes that mean the same training; expected keys are computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.loader import parse_yaml
from rlhf.config.schema import Config, load_config
from rlhf.contrib.deepspeed_chat.translate import format_translation, translate_commands
from rlhf.errors import ConfigError
from rlhf.roles.roles import check_placements
from tests.contrib.deepspeed_chat.originals import FORK, SCRIPTS

MAIN = {
    "sft": "step1_supervised_finetuning/main.py --model_name_or_path m",
    "reward": "step2_reward_model_finetuning/main.py --model_name_or_path m",
    "dpo": "step2_dpo_finetuning/main.py --model_name_or_path m",
    "ppo": "step3_rlhf_finetuning/main.py --actor_model_name_or_path a --critic_model_name_or_path c",
}
REFUSALS = parse_yaml(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
UNADAPTED = ["norms", "biases", "embeddings"]
RM_STATIC = {"path": "Dahoas/rm-static", "heldout_split": "test"}
FULL_HH = {"path": "Dahoas/full-hh-rlhf", "heldout_split": "test"}
ALWAYS = {"data.chat_template": False, "data.datasets": [RM_STATIC]}
FP16 = {"engine.loss_scale_window": 100}


def text(*texts: str, devices: int | None = None, **environment: str) -> str:
    return format_translation(translate_commands(texts, environment, devices))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result


def keys(*texts: str, devices: int | None = None, **environment: str) -> dict[str, Any]:
    """Return the values of the translated recipe by their full keys."""
    return flat(parse_yaml(text(*texts, devices=devices, **environment)))


def of(stage: str, rest: str = "", **more: Any) -> dict[str, Any]:
    return keys(f"deepspeed --num_gpus 1 training/{MAIN[stage]} {rest}", **more)


def loaded(recipe: str, folder: Path) -> Config:
    path = folder / "recipe.yaml"
    path.write_text(recipe, encoding="utf-8")
    return load_config(path)


def optimizer(section: str, rate: float | None, decay: float | None, warmup: int) -> dict[str, Any]:
    values = {"learning_rate": rate, "weight_decay": decay, "warmup": warmup, "min_lr_ratio": 0.0}
    return {f"{section}.{name}": value for name, value in values.items() if value is not None}


GIVEN = {  # defaults of ours too, which the scripts of several devices name
    "data.stage_split": [2, 4, 4],
    "data.max_prompt_length": 256,
    "data.max_completion_length": 256,
    "sft.batch_size": 32,
    "sft.optimizer.weight_decay": 0.0,
    "sft.optimizer.schedule": "cosine",
    "reward.epochs": 1,
    "reward.optimizer.schedule": "cosine",
    "ppo.ppo_epochs": 1,
    "ppo.dropout": 0.0,
    "ppo.optimizer.schedule": "cosine",
    "ppo.critic_optimizer.schedule": "cosine",
}
ADAPTERS = {"lora.alpha": 1.0, "lora.init": "rank"}
LORA = {"lora.target_modules": [r"re:.*decoder\.layers\..*"], "lora.also_train": UNADAPTED} | ADAPTERS

EXPECTED: dict[str, tuple[int | None, dict[str, Any]]] = {
    "opt_1_3b": (  # 16 x 8 rows in step 1, 16 x 4 pairs in step 2, and in step 3 updates of 16 x 2 completions: 32
        None,
        ALWAYS
        | FP16
        | LORA
        | {f"roles.{role}.zero_stage": 0 for role in ("sft", "reward", "actor", "critic")}
        | {"output": "output", "ppo.dropout": 0.0}  # the folder that contains those of the steps
        | {"seed": 1234, "model.path": "facebook/opt-1.3b", "data.too_long": "truncate"}
        | {"roles.sft.lora_rank": 128, "roles.sft.lora_learning_rate": 5e-4}
        | {"sft.batch_size": 128, "sft.micro_batch_size": 16, "sft.eval_every": "epoch", "sft.loss_on": "all"}
        | optimizer("sft.optimizer", 1e-3, None, 0)
        | {"reward.model": "facebook/opt-350m", "reward.batch_size": 64, "reward.micro_batch_size": 16}
        | {"reward.eval_every": "epoch", "reward.dropout": 0.0}
        | optimizer("reward.optimizer", 5e-5, 0.1, 0)
        | {"roles.actor.lora_rank": 128, "roles.actor.lora_learning_rate": 5e-4}
        | {"roles.actor.gradient_checkpointing": True}
        | {"ppo.minibatch_size": 32, "ppo.micro_batch_size": 16, "ppo.generation_batch_size": 16, "ppo.epochs": 1}
        | {"ppo.critic_dropout": None, "ppo.whiten_advantages": False, "ppo.score_clip": 5.0}
        | optimizer("ppo.optimizer", 9.65e-6, None, 100)
        | optimizer("ppo.critic_optimizer", 5e-6, None, 100),
    ),
    "opt_13b": (  # on 8 devices 4 x 8 rows (our default), 8 x 8 pairs, 16 x 8 of a rollout and of an update
        None,
        FP16
        | LORA
        | GIVEN
        | {"output": "output", "roles.reward.zero_stage": 0}
        | {
            "data.datasets": [
                RM_STATIC,
                FULL_HH | {"stages": ["sft", "reward"]},
                {"path": "stanfordnlp/SHP", "heldout_split": "validation", "stages": ["reward"]},
            ]
        }
        | {"seed": 1234, "data.chat_template": False, "data.too_long": "truncate"}
        | {"model.path": "facebook/opt-13b", "reward.model": "facebook/opt-350m"}
        | {f"roles.{role}.gradient_checkpointing": True for role in ("sft", "actor")}
        | {f"roles.{role}.lora_rank": 128 for role in ("sft", "actor")}
        | {f"roles.{role}.lora_learning_rate": 5e-4 for role in ("sft", "actor")}
        | {f"roles.{role}.offload": "all" for role in ("sft", "actor", "critic")}
        | {f"roles.{role}.zero_stage": 3 for role in ("sft", "actor", "critic", "reference")}
        | {"roles.reference.offload": "parameters"}
        | {"sft.micro_batch_size": 4, "sft.epochs": 16, "sft.eval_every": "epoch", "sft.loss_on": "all"}
        | optimizer("sft.optimizer", 1e-4, None, 0)
        | {"reward.batch_size": 64, "reward.micro_batch_size": 8, "reward.eval_every": "epoch"}
        | optimizer("reward.optimizer", 5e-5, 0.1, 0)
        | {"ppo.batch_size": 128, "ppo.minibatch_size": 128, "ppo.micro_batch_size": 16}
        | {"ppo.generation_batch_size": 16, "ppo.epochs": 1}
        | {"ppo.generation_weights": "tensor_parallel", "ppo.tensor_parallel": 2}
        | {"ppo.critic_dropout": None, "ppo.whiten_advantages": False, "ppo.score_clip": 5.0}
        | optimizer("ppo.optimizer", 5e-4, None, 100)
        | optimizer("ppo.critic_optimizer", 5e-6, None, 100),
    ),
    "llama_2_7b": (  # on 8 devices 4 x 8 rows (our default), 8 x 8 pairs, 1 x 8 completions
        8,
        FP16
        | GIVEN
        | {
            "data.datasets": [
                RM_STATIC,
                FULL_HH | {"stages": ["sft"]},
                {"path": "Dahoas/synthetic-instruct-gptj-pairwise", "stages": ["sft"]},
                {"path": "yitingxie/rlhf-reward-datasets", "heldout_split": "test", "stages": ["sft"]},
            ]
        }
        | {"data.chat_template": False, "data.too_long": "truncate"}
        | {"seed": 1234, "model.path": "meta-llama/Llama-2-7b-hf", "reward.model": "meta-llama/Llama-2-7b-hf"}
        | {f"roles.{role}.zero_stage": 3 for role in ("sft", "reward", "actor", "critic", "reference")}
        | {f"roles.{role}.gradient_checkpointing": True for role in ("sft", "reward", "actor", "critic")}
        | {"roles.reward.offload": "all", "roles.reference.offload": "parameters"}
        | {"sft.micro_batch_size": 4, "sft.epochs": 4, "sft.eval_every": "epoch", "sft.loss_on": "all"}
        | optimizer("sft.optimizer", 9.65e-6, None, 0)
        | {"reward.batch_size": 64, "reward.micro_batch_size": 8, "reward.eval_every": "epoch"}
        | optimizer("reward.optimizer", 9.65e-6, 0.1, 0)
        | {"ppo.batch_size": 8, "ppo.minibatch_size": 8, "ppo.micro_batch_size": 1, "ppo.generation_batch_size": 1}
        | {"ppo.epochs": 1, "ppo.critic_dropout": None, "ppo.whiten_advantages": False, "ppo.score_clip": 5.0}
        | optimizer("ppo.optimizer", 9.65e-6, 0.1, 100)
        | optimizer("ppo.critic_optimizer", 5e-6, 0.1, 100),
    ),
    "bloom": (  # on 8 devices 128 rows, 64 pairs and 32 completions (our default): 8, 8 and 2 at a time
        None,
        {"output": "/logs/bloom", "seed": 10, "precision": "bf16", "engine.kernels.adamw": "torch-foreach"}
        | {"data.datasets": [RM_STATIC, FULL_HH]}
        | {"data.chat_template": False, "data.too_long": "truncate"}
        | {"reward.optimizer.weight_decay": 0.0, "ppo.batch_size": 32, "ppo.optimizer.learning_rate": 1e-5}
        | {"ppo.dropout": 0.0, "ppo.critic_dropout": 0.0}
        | {f"roles.{role}.zero_stage": 2 for role in ("sft", "reward", "actor", "critic")}
        | {f"roles.{role}.gradient_checkpointing": True for role in ("sft", "actor")}
        | {"model.path": "bigscience/bloom-1b1", "reward.model": "bigscience/bloom-560m"}
        | {"sft.batch_size": 128, "sft.micro_batch_size": 8, "sft.epochs": 4, "sft.dropout": 0.1}
        | {"sft.eval_every": "epoch", "sft.loss_on": "all"}
        | optimizer("sft.optimizer", 2e-5, None, 20)
        | {"reward.batch_size": 64, "reward.micro_batch_size": 8, "reward.epochs": 2, "reward.dropout": 0.0}
        | {"reward.eval_every": "epoch"}
        | optimizer("reward.optimizer", 2e-5, None, 0)
        | {"ppo.minibatch_size": 32, "ppo.micro_batch_size": 2, "ppo.generation_batch_size": 2, "ppo.epochs": 1}
        | {"ppo.whiten_advantages": False, "ppo.score_clip": 5.0}
        | optimizer("ppo.optimizer", None, 0.1, 100)
        | optimizer("ppo.critic_optimizer", 6e-6, 0.1, 100),
    ),
    "opt_350m": (
        None,
        ALWAYS
        | FP16
        | {"output": "./output", "seed": 1234, "data.too_long": "truncate", "reward.model": "facebook/opt-350m"}
        | {"roles.reward.zero_stage": 0}
        | {"reward.batch_size": 64, "reward.micro_batch_size": 16, "reward.eval_every": "epoch", "reward.dropout": 0.0}
        | optimizer("reward.optimizer", 5e-5, 0.1, 0),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_script_becomes_these_keys_and_no_other(name: str, tmp_path: Path) -> None:
    devices, expected = EXPECTED[name]
    assert keys(SCRIPTS[name], devices=devices) == expected
    recipe = translate_commands([SCRIPTS[name]], {}, 8)
    shown = format_translation(recipe)
    assert [word for word in SCRIPTS[name].split() if word.startswith("--") and word not in shown] == []
    config = loaded(shown, tmp_path)
    ranks = 1 if name in ("opt_1_3b", "opt_350m") else 8
    check_placements(config, recipe.stages)  # type: ignore[arg-type]
    assert config.ppo.minibatch(ranks)[0] == (config.ppo.minibatch_size or 32)
    assert recipe.options == ([] if ranks == 1 else ["--ranks", "8"])


def test_rollout_is_at_least_as_large_as_an_update() -> None:
    recipe = of("ppo", "--per_device_generation_batch_size 4 --per_device_training_batch_size 2 --generation_batches 3")
    assert [recipe[f"ppo.{name}"] for name in ("batch_size", "minibatch_size", "micro_batch_size")] == [12, 2, 2]
    earlier = "--per_device_train_batch_size 4 --per_device_mini_train_batch_size 2 --generation_batch_numbers 3"
    assert of("ppo", earlier) == recipe, "names of earlier versions mean the same"
    recipe = of("ppo", "--per_device_generation_batch_size 4 --gradient_accumulation_steps 6")  # updates of 16 x 6
    assert [recipe[f"ppo.{name}"] for name in ("batch_size", "minibatch_size", "generation_batch_size")] == [96, 96, 4]


@pytest.mark.parametrize(
    ("stage", "flags", "expected"),
    [
        ("sft", "--offload --zero_stage 3", {"roles.sft.offload": "all"}),
        ("sft", "--offload --zero_stage 2", {"roles.sft.offload": "optimizer"}),
        ("ppo", "--offload --actor_zero_stage 2", {"roles.actor.offload": "optimizer"}),
        ("ppo", "--offload_reward_model", {"roles.reward.offload": "parameters"}),
        ("sft", "--lr_scheduler_type constant_with_warmup", {"sft.optimizer.schedule": "constant"}),
        ("sft", "--lr_scheduler_type=polynomial --num_warmup_steps=7",
         {"sft.optimizer.schedule": "linear", "sft.optimizer.warmup": 7}),
        ("ppo", "--lr_scheduler_type constant --num_warmup_steps 50",  # transformers' has no warm-up
         {"ppo.optimizer.schedule": "constant", "ppo.optimizer.warmup": 0, "ppo.critic_optimizer.warmup": 0}),
        ("ppo", "--lr_scheduler_type constant_with_warmup", {"ppo.optimizer.warmup": 100}),
        ("ppo", "--enable_test_mode --num_train_epochs 3", {"ppo.epochs": 1}),  # it ends after the first
        ("sft", "--max_seq_len 1023", {"data.max_prompt_length": 511, "data.max_completion_length": 512}),
        ("ppo", "--max_prompt_seq_len 100 --max_answer_seq_len 60",
         {"data.max_prompt_length": 100, "data.max_completion_length": 60}),
        ("sft", "--data_split 6,2,2", {"data.stage_split": [6, 2, 2]}),
        ("sft", "--data_path a b --sft_only_data_path c",
         {"data.datasets": ["a", "b", {"path": "c", "stages": ["sft"]}]}),
        ("sft", "--data_path local/jsonfile",
         {"data.datasets": [{"path": "data/train.json", "heldout": "data/eval.json"}]}),
        ("sft", "--lora_dim 8 --lora_module_name transformer.h. --only_optimize_lora",
         {"lora.target_modules": [r"re:.*transformer\.h\..*"], "roles.sft.lora_rank": 8} | ADAPTERS),
        ("reward", "--lora_dim 8 --lora_module_name rwtransformer.h.",
         {"lora.target_modules": [r"re:.*transformer\.h\..*"]}),
        ("ppo", "--actor_lora_dim 8 --actor_lora_module_name q. --critic_lora_dim 4 --critic_lora_module_name v.",
         {"lora.target_modules": [r"re:.*(?:q\.|v\.).*"], "roles.critic.lora_rank": 4}),
        ("dpo", "--beta 0.3 --label_smoothing 0.1", {"dpo.beta": 0.3, "dpo.label_smoothing": 0.1, "dpo.dropout": None}),
        ("dpo", "", {"dpo.optimizer.learning_rate": 1e-3, "dpo.model": "m"}),
        ("reward", "--eval_interval 50 --eval_iters 10", {"reward.eval_every": 50, "reward.eval_rows": 160}),
        ("ppo", "--enable_ema", {"ppo.ema": 0.992}),
        ("ppo", "--enable_ema --gradient_accumulation_steps 4 --offload_reference_model",  # 0.992 four times an update
         {"ppo.ema": 0.968382, "ppo.ema_on_host": True}),
        ("ppo", "--print_answers --print_answers_interval 20", {"ppo.samples_every": 20}),
        ("ppo", "--enable_test_mode --test_stop_step 10", {"ppo.steps": 10}),
        ("ppo", "--enable_test_mode --test_stop_step 10 --gradient_accumulation_steps 4", {"ppo.steps": 3}),
        ("ppo", "--unsupervised_dataset_name wikitext --unsupervised_dataset_config_name wikitext-103-v1",
         {"data.pretraining": [{"path": "wikitext", "subset": "wikitext-103-v1"}], "ppo.ptx_coef": 27.8}),
        ("sft", "--add_eot_token", {"model.eos_token": "<|endoftext|>"}),
        ("sft", "--add_eot_token --eot_token </s>", {"model.eos_token": "</s>"}),
        ("sft", "--dtype fp16", {"precision": "fp16", "engine.loss_scale_window": 100}),
        ("ppo", "--disable_critic_dropout", {"ppo.dropout": None}),
        (
            "ppo",
            "--enable_mixed_precision_lora --actor_lora_dim 8 --actor_zero_stage 3 --critic_zero_stage 3",
            {"roles.actor.frozen": "int8", "roles.reward.frozen": "missing"},
        ),
        ("sft", "--seed 3 --seed 4", {"seed": 4}),
    ],
)  # fmt: skip
def test_flags_set_keys(stage: str, flags: str, expected: dict[str, Any]) -> None:
    recipe = of(stage, flags)
    assert {key: recipe.get(key, "missing") for key in expected} == expected


@pytest.mark.parametrize(
    ("stage", "flags", "absent", "remark"),
    [
        ("sft", "--offload", "roles", "--offload: nothing for sft: nothing can be offloaded at ZeRO 0"),
        ("sft", "--only_optimize_lora", "lora", "--only_optimize_lora: nothing without adapters"),
        ("sft", "--lora_learning_rate 1e-3", "lora", "--lora_learning_rate 1e-3: nothing without --lora_dim"),
        ("ppo", "--unsup_coef 2", "ptx", "--unsup_coef 2: nothing without both --unsupervised_dataset_name"),
        ("ppo", "--test_stop_step 2", "steps", "--test_stop_step 2: nothing: the test mode needs both of its flags"),
        ("sft", "--lr_scheduler_type constant --num_warmup_steps 5", "5", "--num_warmup_steps 5: nothing: --lr"),
        ("ppo", "--print_answers_interval 2", "samples", "--print_answers_interval 2: nothing without --print_answers"),
        (
            "ppo",
            "--enable_mixed_precision_lora --actor_lora_dim 8 --actor_zero_stage 2",
            "frozen",
            "--enable_mixed_precision_lora: nothing without --actor_lora_dim and --actor_zero_stage 3",
        ),
        ("sft", "--eot_token </s>", "eos", "--eot_token </s>: nothing without --add_eot_token"),
        (
            "ppo",
            "--actor_lora_dim 8 --only_optimize_lora --offload_reference_model",
            "reference",
            "--offload_reference_model: nothing: the reference is the actor without its adapters",
        ),
        ("dpo", "--offload_reference_model", "reference", "--offload_reference_model: automatic: the reference's"),
    ],
)
def test_flag_without_effect_becomes_a_comment(stage: str, flags: str, absent: str, remark: str) -> None:
    recipe = text(f"deepspeed --num_gpus 1 {MAIN[stage]} {flags}")
    assert f"#   {remark}" in recipe
    assert not [line for line in recipe.splitlines() if absent in line.partition("#")[0]]


def test_each_key_names_its_flag() -> None:
    lines = [line.strip() for line in text(f"deepspeed --num_gpus 2 {MAIN['sft']} --seed 5").splitlines()]
    assert "seed: 5  # --seed 5" in lines
    assert "learning_rate: 0.001  # --learning_rate 0.001 (default)" in lines
    assert "loss_on: all  # as in DeepSpeed-Chat: prompts are trained on too" in lines
    size = "--per_device_train_batch_size 16 (default) x --gradient_accumulation_steps 1 (default) x 2 devices"
    assert f"batch_size: 32  # {size}" not in lines  # our default too
    assert "#   --num_gpus 2: --ranks" in lines


def test_devices_are_the_launchers_or_the_options_or_one() -> None:
    script = f"{MAIN['sft']} --per_device_train_batch_size 4"
    assert keys(f"deepspeed --num_gpus 8 --num_nodes 2 {script}")["sft.batch_size"] == 64
    assert keys(f"deepspeed --num_nodes 2 {script}", devices=16)["sft.batch_size"] == 64
    alone = text(f"deepspeed {script}")
    assert flat(parse_yaml(alone))["sft.batch_size"] == 4
    assert "1 is assumed here" in alone
    both = translate_commands([f"deepspeed {MAIN['sft']}", f"deepspeed {MAIN['reward']}"], {})
    assert [note[:16] for note in both.notes if "1 is assumed here" in note] == ["step 1, step 2: "]
    assert "--nodes 2 --node-rank R" in text(f"deepspeed --num_gpus 8 --num_nodes 2 {script}")


def test_flags_tell_the_step_if_no_path_does() -> None:
    assert translate_commands(["main.py --model_name_or_path m --beta 0.1"], {}, 1).stages == ["dpo"]
    assert translate_commands(["--model_name_or_path m --eval_interval 5"], {}, 1).stages == ["reward"]
    assert translate_commands(["--actor_model_name_or_path a --critic_model_name_or_path c"], {}, 1).stages == ["ppo"]
    unclear = translate_commands(["main.py --model_name_or_path m"], {}, 1)
    assert unclear.stages == ["sft"]
    assert unclear.notes[0].startswith("assumed to be step 1; the flags also fit step 2 and step 2 (DPO)")


def test_steps_that_disagree_are_noted_with_a_remedy() -> None:
    texts = [f"deepspeed --num_gpus 1 {MAIN['sft']} --seed 1", f"deepspeed --num_gpus 1 {MAIN['reward']} --seed 2"]
    recipe = translate_commands(texts, {})
    assert recipe.settings["seed"].value == 1
    note = "seed is 1 (--seed 1); step 2 has 2 (--seed 2): start rlhf reward separately, with --set seed=2"
    assert recipe.notes == [note]
    shares, sharding = sorted(translate_commands([SCRIPTS["opt_13b"]], {}).notes)
    note = (
        "There, the shares of the other steps are unused; here, these steps divide all rows, so they have more of them"
    )
    assert shares == f"Dahoas/full-hh-rlhf, stanfordnlp/SHP: used by some steps only. {note} than there"
    note = "roles.reward.zero_stage is 0 (--zero_stage 0); step 3 has 3 (--critic_zero_stage 3, the reward"
    assert sharding.startswith(note)


def test_whole_script_can_be_translated() -> None:
    script = r"""
    #!/bin/bash
    OUTPUT=$1
    if [ "$OUTPUT" == "" ]; then
        OUTPUT=./output
    fi
    Lr=${RATE:-2e-5}
    mkdir -p $OUTPUT && echo "started; wait"
    deepspeed --num_gpus 1 step1_supervised_finetuning/main.py --model_name_or_path m --learning_rate ${Lr} \
       --output_dir $OUTPUT 2>&1 | tee $OUTPUT/training.log
    """
    recipe = keys(script)
    assert (recipe["output"], recipe["sft.optimizer.learning_rate"]) == ("./output", 2e-5)


def test_variable_may_contain_flags_or_be_unset() -> None:
    script = """
    ZERO="--actor_zero_stage 3"
    ACTOR= # to be filled in
    OUTPUT=./output
    deepspeed --num_gpus 1 step3_rlhf_finetuning/main.py --critic_model_name_or_path c \
       --actor_model_name_or_path $ACTOR ${ZERO} ${OFFLOAD}\
       --deepspeed $NOTHING --output_dir $OUTPUT
    """
    recipe = keys("ACTOR=out/actor OUTPUT=out/ppo", script)
    assert (recipe["roles.actor.zero_stage"], recipe["ppo.actor"], recipe["output"]) == (3, "out/actor", "out/ppo")
    with pytest.raises(ConfigError, match=r"the shell variable \$ACTOR has no value"):
        keys(script)


def test_working_directory_tells_the_step() -> None:
    plain = "deepspeed main.py --model_name_or_path m"
    assert translate_commands([f"cd training/step2_dpo_finetuning\n{plain}"], {}, 1).stages == ["dpo"]
    several = [f"cd a/step1_x && {plain}", f"cd b/step2_x && {plain}"]
    assert translate_commands(several, {}, 1).stages == ["sft", "reward"]
    assert translate_commands([f"cd step1_x; {plain.replace('main', '../step2_x/main')}"], {}, 1).stages == ["reward"]


@pytest.mark.parametrize("actor", ["./out/sft", "out/sft", "out/sft/", "{here}/out/sft", "$ACTOR_MODEL_PATH"])
def test_model_of_an_earlier_step_is_compared_as_a_path(actor: str) -> None:
    step = f"deepspeed --num_gpus 1 {MAIN['sft']} --output_dir ./out/sft"
    flag = f"--actor_model_name_or_path {actor.format(here=Path.cwd())}"
    recipe = translate_commands([step, f"deepspeed --num_gpus 1 {MAIN['ppo']} {flag}"], {})
    assert "ppo.actor" not in recipe.settings


def test_other_actor_than_that_of_the_recipe_is_noted() -> None:
    recipe = translate_commands([f"{MAIN['sft']} --output_dir out/sft", MAIN["ppo"]], {}, 1)
    assert recipe.settings["ppo.actor"].value == "a"
    note = "ppo.actor is a (--actor_model_name_or_path a), not the model that the sft stage of this recipe saves"
    assert [line for line in recipe.notes if line.startswith(note)]


def test_folders_without_a_common_one_are_noted() -> None:
    steps = [f"{MAIN['sft']} --output_dir ./out1", f"{MAIN['reward']} --output_dir ./out2"]
    recipe = translate_commands(steps, {}, 1)
    assert "output" not in recipe.settings
    assert recipe.notes == [
        "output is not set, because --output_dir is ./out1, ./out2: the run is written to runs/default, or to the "
        "folder of --output DIR"
    ]


@pytest.mark.parametrize(
    ("launcher", "rows", "options"),
    [
        ("deepspeed --include localhost:0,1,2,3", 16, ["--ranks", "4"]),
        ("deepspeed -i a:0,1@b:2,3", 16, ["--ranks", "2", "--nodes", "2"]),
        ("torchrun --nproc_per_node=4 --standalone", 16, ["--ranks", "4"]),
        ("torchrun --nnodes 2 --nproc-per-node 4 --rdzv_endpoint a:29400", 32, ["--ranks", "4", "--nodes", "2"]),
        ("python -m torch.distributed.run --nproc_per_node 4", 16, ["--ranks", "4"]),
        ("python3 -m torch.distributed.launch --nproc_per_node=2 --use_env", 8, ["--ranks", "2"]),
    ],
)
def test_launchers_tell_the_devices(launcher: str, rows: int, options: list[str]) -> None:
    recipe = translate_commands([f"{launcher} {MAIN['sft']} --per_device_train_batch_size 4"], {})
    assert recipe.settings["sft.batch_size"].value == rows
    assert recipe.options[: len(options)] == options
    assert not recipe.notes or "nodes" in recipe.options


def test_unequal_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="--include a:0@b:0,1: other numbers of devices on the machines; include as"):
        translate_commands([f"deepspeed --include a:0@b:0,1 {MAIN['sft']}"], {})


def test_environment_applies_to_scripts_of_the_fork() -> None:
    script = f"bash {FORK}/train_step1_bloom_1.1b.sh"
    recipe = keys(script, HL_DATASET_PATH="d", HL_LORA_DIM="8", HL_DEVICES_PER_NODE="2")
    assert recipe["model.path"] == "bigscience/bloom-1b1"
    # 128 rows, 8 at a time on each of 2 devices; adapters alone, of the layers below transformer.h, at their own rate
    assert (recipe["sft.batch_size"], recipe["sft.micro_batch_size"], recipe["sft.epochs"]) == (128, 8, 4)
    assert (recipe["roles.sft.lora_rank"], recipe["roles.sft.lora_learning_rate"]) == (8, 2e-5)
    assert recipe["lora.also_train"] == []
    assert (recipe["sft.dropout"], recipe["sft.optimizer.warmup"]) == (0.1, 20)
    assert keys(f"HL_DATASET_PATH=d HL_SEED=3 {script}")["seed"] == 3
    assert keys("HL_DATASET_PATH=d HL_SEED=4", script, HL_SEED="5")["seed"] == 4


def test_hpz_is_the_devices_of_a_machine_at_zero_3_on_several() -> None:
    script = f"{FORK}/train_step1_bloom_1.1b.sh"
    given = {"HL_DATASET_PATH": "d", "HL_HPZ_ENABLED": "1", "HL_ACTOR_ZERO_STAGE": "3", "HL_NUM_NODES": "2"}
    key = "engine.deepspeed.zero_optimization.zero_hpz_partition_size"
    assert keys(script, **given)[key] == 8
    for other in ({"HL_NUM_NODES": "1"}, {"HL_ACTOR_ZERO_STAGE": "2"}, {"HL_HPZ_ENABLED": "0"}):
        assert key not in keys(script, **(given | other))


def test_variables_before_a_command_override_its_flags() -> None:
    recipe = of("sft", "--seed 1") | keys(f"HL_SEED=7 HL_EPOCHS=3 deepspeed --num_gpus 1 {MAIN['sft']} --seed 1")
    assert (recipe["seed"], recipe["sft.epochs"]) == (7, 3)
    assert keys("HL_ACTOR_ZERO_STAGE=1 HL_GBS=64")["roles.actor.zero_stage"] == 1
    assert of("sft", "--seed 1", HL_SEED="9")["seed"] == 1  # the environment is the fork's scripts' alone


def test_values_of_variables_may_look_like_settings() -> None:
    variables = 'HL_DATASET_PATH=x/seed=1 HL_ACTOR_MODEL=ppo.actor=a HL_LOG_FILE="f: g=1" HL_TAG="a b" HL_SEED=4'
    recipe = translate_commands([variables], {}, 1)
    assert recipe.settings["seed"].why == "HL_SEED=4"
    assert [remark.flag for remark in recipe.remarks] == ["HL_TAG=a b", "HL_LOG_FILE=f: g=1"]
    assert "# Start it: rlhf --config recipe.yaml --output 'runs/a b'\n" in format_translation(recipe)


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case["line"][:40])
def test_refusal_is_one_line(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        translate_commands(
            [text.replace("SFT", MAIN["sft"]).replace("FORK", str(FORK)) for text in case["texts"]], {}, 1
        )
    assert str(error.value) == case["line"].replace("FORK", str(FORK))
