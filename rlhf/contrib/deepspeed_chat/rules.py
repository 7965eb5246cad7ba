"""The flags that only several of which together say what a key is: one function for each group of them.

A command's flags flow in, with DeepSpeed-Chat's defaults for those that were not given; settings, and remarks about
flags that become none, flow out. `RULES` has them by the name that flags.yaml knows them by.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlhf.contrib.deepspeed_chat.given import Flags, Remark, Setting
from rlhf.contrib.deepspeed_chat.values import SCHEDULES
from rlhf.errors import ConfigError
from rlhf.models.shape import shape_of

Found = Iterator[Setting | Remark]


def sources(flags: Flags) -> Found:
    """Sources of rows; those of SFT alone beside them."""
    found: list[Any] = [_source(name) for name in flags["data_path"].value]
    names = ["data_path"]
    if flags.stage == "sft" and flags["sft_only_data_path"].value:
        names.append("sft_only_data_path")
        found += [{**_mapping(_source(name)), "stages": ["sft"]} for name in flags["sft_only_data_path"].value]
    if not found:
        raise ConfigError("--data_path: names no source; give one, or leave it out for DeepSpeed-Chat's own")
    if len(found) > 1:  # all rows of each, where rlhf blends them in equal parts
        found = [{**_mapping(source), "weight": "all"} for source in found]
    yield flags.setting("data.datasets", found, *names)


def _source(name: str) -> Any:
    return {"path": "data/train.json", "heldout": "data/eval.json"} if "local/jsonfile" in name else name


def _mapping(source: Any) -> dict[str, Any]:
    return {"path": source} if isinstance(source, str) else source


def models(flags: Flags) -> Found:
    """What each stage starts from; what an earlier step of the same recipe leaves needs no name."""
    if flags.stage != "ppo":
        key = {"sft": "model.path", "reward": "reward.model", "dpo": "dpo.model"}[flags.stage]
        yield flags.setting(key, _required(flags, "model_name_or_path"), "model_name_or_path")
        return
    for name, key, stage in (("actor", "ppo.actor", "sft"), ("critic", "ppo.reward_model", "reward")):
        flag = f"{name}_model_name_or_path"
        if _is_earlier(flags[flag].value, flags.earlier.get(stage)):
            yield Remark(flags[flag].said, f"what {stage} of this run leaves")
        else:
            yield flags.setting(key, _required(flags, flag), flag)


def _required(flags: Flags, name: str) -> str:
    value = flags[name].value
    if value is None:
        raise ConfigError(f"--{name}: missing; DeepSpeed-Chat requires it")
    return str(value)


def _is_earlier(path: str | None, folder: str | None) -> bool:
    """Whether a model is the one in the folder that an earlier step writes to; a `$VARIABLE` is taken for it."""
    if folder is None or path is None:
        return folder is not None
    return path.startswith("$") or path.rstrip("/") == folder.rstrip("/")


def lengths(flags: Flags) -> Found:
    """Of prompts and completions; the first two steps know their sum alone."""
    if flags.stage == "ppo":
        yield flags.setting("data.max_prompt_length", flags["max_prompt_seq_len"].value, "max_prompt_seq_len")
        yield flags.setting("data.max_completion_length", flags["max_answer_seq_len"].value, "max_answer_seq_len")
        return
    whole = flags["max_seq_len"].value
    if whole < 2:
        raise ConfigError(f"--max_seq_len {whole}: too short for a prompt and a completion; give at least 2")
    for key, value in (("prompt", whole // 2), ("completion", whole - whole // 2)):
        yield flags.setting(f"data.max_{key}_length", value, "max_seq_len", why="half of it")


def batches(flags: Flags) -> Found:
    """Global batches, of what each device holds; the rows of one pass."""
    devices = f"{flags.devices} device{'s' if flags.devices > 1 else ''}"
    if flags.stage != "ppo":
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        size = math.prod(flags[name].value for name in names) * flags.devices
        yield _sized(flags.setting(f"{flags.stage}.batch_size", size, *names, why=f"x {devices}"))
        yield flags.setting(f"{flags.stage}.micro_batch_size", flags[names[0]].value, names[0])
        return
    drawn = ("per_device_generation_batch_size", "generation_batches")
    learned = ("per_device_training_batch_size", "gradient_accumulation_steps")
    rollout, update = ppo_batches(flags)
    # Rollouts that an update gathers are together one rollout here, as the policy stays the same between them there.
    why = f"x {devices}"
    if (times := rollout // (math.prod(flags[name].value for name in drawn) * flags.devices)) > 1:
        why += f" x {times}, for updates of {update}"
    yield _sized(flags.setting("ppo.batch_size", rollout, *drawn, why=why))
    yield _sized(flags.setting("ppo.minibatch_size", update, *learned, why=f"x {devices}"))
    yield flags.setting("ppo.generation_batch_size", flags[drawn[0]].value, drawn[0])
    yield flags.setting("ppo.micro_batch_size", flags[learned[0]].value, learned[0])


def ppo_batches(flags: Flags) -> tuple[int, int]:
    """(completions of a rollout, rows of an update) over all devices; the first is a multiple of the second."""
    drawn = flags["per_device_generation_batch_size"].value * flags["generation_batches"].value
    update = flags["per_device_training_batch_size"].value * flags["gradient_accumulation_steps"].value
    return math.lcm(drawn, update) * flags.devices, update * flags.devices


def _sized(setting: Setting) -> Setting:
    if setting.value < 1:
        raise ConfigError(f"{setting.why}: makes no rows; give at least 1")
    return setting


def duration(flags: Flags) -> Found:
    """Passes over the rows; PPO's tests end after a number of rollouts."""
    if flags.stage != "ppo":
        yield flags.setting(f"{flags.stage}.epochs", flags["num_train_epochs"].value, "num_train_epochs")
        return
    steps, test = flags["test_stop_step"], flags["enable_test_mode"]
    if test.value and steps.value:
        drawn = flags["per_device_generation_batch_size"].value * flags.devices
        rollouts = math.ceil(steps.value * drawn / ppo_batches(flags)[0])
        yield flags.setting("ppo.steps", rollouts, "test_stop_step", why=f"batches of {drawn} prompts")
        return
    if steps.explicit:
        yield Remark(steps.said, "nothing: the test mode needs both of its flags")
    if test.value:
        yield flags.setting("ppo.epochs", 1, "enable_test_mode", why="which ends after a pass")
    else:
        yield flags.setting("ppo.epochs", flags["num_train_epochs"].value, "num_train_epochs")


def schedule(flags: Flags) -> Found:
    """The course of the rate; there `constant` has no warm-up, whatever its steps."""
    name, warmup = flags["lr_scheduler_type"], flags["num_warmup_steps"]
    for optimizer in ("optimizer", "critic_optimizer") if flags.stage == "ppo" else ("optimizer",):
        key = f"{flags.stage}.{optimizer}"
        yield flags.setting(f"{key}.schedule", SCHEDULES[name.value], "lr_scheduler_type")
        if name.value == "constant":
            yield flags.setting(f"{key}.warmup", 0, "lr_scheduler_type", why="which has none")
        else:
            yield flags.setting(f"{key}.warmup", warmup.value, "num_warmup_steps")
    if name.value == "constant" and warmup.explicit:
        yield Remark(warmup.said, f"nothing: {name.said} has no warm-up")


def samples(flags: Flags) -> Found:
    """How often completions are shown."""
    every = flags["print_answers_interval"]
    if flags["print_answers"].value and every.value:
        drawn = flags["per_device_generation_batch_size"].value * flags.devices
        rollouts = max(1, every.value * drawn // ppo_batches(flags)[0])
        yield flags.setting("ppo.samples_every", rollouts, "print_answers_interval")
    elif every.explicit:
        yield Remark(every.said, "nothing without --print_answers")


def zero(flags: Flags) -> Found:
    """Of PPO's four models; a frozen one is whole, or sharded as the one beside it is."""
    for name, frozen in (("actor", "reference"), ("critic", "reward")):
        flag = f"{name}_zero_stage"
        yield flags.setting(f"roles.{name}.zero_stage", flags[flag].value, flag)
        if flags[flag].value == 3 and (frozen == "reward" or has_reference(flags)):
            yield flags.setting(f"roles.{frozen}.zero_stage", 3, flag, why=f"the {frozen} model's too")


def has_reference(flags: Flags) -> bool:
    """Whether PPO's reference is a model of its own: not where only adapters of the policy are trained."""
    return not (flags["actor_lora_dim"].value and flags["only_optimize_lora"].value)


def offload(flags: Flags) -> Found:
    """What waits in the host's memory; what that is follows from the ZeRO stage."""
    roles = {"ppo": ("actor", "critic")}.get(flags.stage, (flags.stage,))
    for role in roles if flags["offload"].value else ():
        stage = flags["zero_stage" if flags.stage != "ppo" else f"{role}_zero_stage"]
        if stage.value:
            what = "all" if stage.value == 3 else "optimizer"
            yield flags.setting(f"roles.{role}.offload", what, "offload", why=f"at {stage.said}")
        else:
            yield Remark(flags["offload"].said, f"nothing for {role}: at ZeRO 0 nothing can wait in the host's memory")
    if flags.stage == "dpo" and flags["offload_reference_model"].value:
        why = "automatic: the reference's log-probabilities are computed once, before training (dpo.reference)"
        yield Remark(flags["offload_reference_model"].said, why)
    if flags.stage != "ppo":
        return
    for role, there in (("reference", has_reference(flags)), ("reward", True)):
        flag = f"offload_{role}_model"
        if flags[flag].value and there:
            yield flags.setting(f"roles.{role}.offload", "parameters", flag)
        elif flags[flag].value:
            yield Remark(flags[flag].said, "nothing: the reference is the actor without its adapters")


def precision(flags: Flags) -> Found:
    """What is computed in, where it was said."""
    dtype = flags["dtype"]
    if dtype.explicit:
        yield flags.setting("precision", dtype.value, "dtype")
    else:
        yield Remark(
            dtype.said, "precision: auto, the accelerator's best; set it to fp16 for what DeepSpeed-Chat takes"
        )
    if dtype.value == "fp16":
        yield Setting("engine.loss_scale_window", 100, "as there, for fp16", explicit=False)


def lora(flags: Flags) -> Found:
    """Adapters: of which layers, of what size and rate, and what is trained beside them."""
    prefixes = {"actor": "actor_", "critic": "critic_"} if flags.stage == "ppo" else {flags.stage: ""}
    used = {role: prefix for role, prefix in prefixes.items() if flags[f"{prefix}lora_dim"].value}
    scopes, names = [], []
    for role, prefix in prefixes.items():
        if role not in used:
            for name in ("lora_module_name", "lora_learning_rate"):
                if flags[f"{prefix}{name}"].explicit:
                    yield Remark(flags[f"{prefix}{name}"].said, f"nothing without --{prefix}lora_dim")
            continue
        yield flags.setting(f"roles.{role}.lora_rank", flags[f"{prefix}lora_dim"].value, f"{prefix}lora_dim")
        rate = f"{prefix}lora_learning_rate"
        yield flags.setting(f"roles.{role}.lora_learning_rate", flags[rate].value, rate)
        scopes.append(re.escape(flags[f"{prefix}lora_module_name"].value.removeprefix("rw")))
        names.append(f"{prefix}lora_module_name")
    if not used:
        if flags["only_optimize_lora"].value:
            yield Remark(flags["only_optimize_lora"].said, "nothing without adapters")
        return
    scope = "|".join(dict.fromkeys(scopes))
    scope = f"(?:{scope})" if "|" in scope else scope
    yield flags.setting("lora.target_modules", [f"re:.*{scope}.*"], *names)
    yield from _alpha(flags, *next(iter(used.items())))
    if flags["only_optimize_lora"].value:
        yield flags.setting("lora.also_train", [], "only_optimize_lora")
    else:
        beside = ["norms", "biases", "embeddings"]
        yield Setting("lora.also_train", beside, "no --only_optimize_lora: these are trained too", explicit=False)


def _alpha(flags: Flags, role: str, prefix: str) -> Found:
    """What adapters are scaled by: there 1 / dim, on ones that begin larger.

    Their input side begins within 1 / sqrt(dim) there, and within 1 / sqrt(width) here, as in peft.
    """
    model = flags[f"{prefix}model_name_or_path"].value
    base = flags.bases.get({"actor": "sft", "critic": "reward"}.get(role, ""), "")
    for name in filter(None, (model, base)):
        try:
            ratio = math.sqrt(shape_of(name).hidden / flags[f"{prefix}lora_dim"].value)
        except ConfigError:
            continue
        why = f"1 / dim there, on adapters that begin {ratio:.1f} times larger: sqrt(width / dim)"
        yield Setting("lora.alpha", round(ratio, 1), why)
        return
    yield Setting("lora.alpha", 1.0, "1 / dim there, on adapters that begin larger: see above")
    yield Remark("lora.alpha", f"to sqrt(width / dim), for the width of {model} is not known here", "To be set by you")


def pretraining(flags: Flags) -> Found:
    """Raw text that PPO goes on to model."""
    name, subset = flags["unsupervised_dataset_name"], flags["unsupervised_dataset_config_name"]
    if name.value and subset.value:
        source = {"path": name.value, "subset": subset.value}
        yield Setting("data.pretraining", [source], f"{name.said}, {subset.said}")
        yield flags.setting("ppo.ptx_coef", flags["unsup_coef"].value, "unsup_coef")
        return
    for given in (name, subset, flags["unsup_coef"]):
        if given.explicit:
            yield Remark(given.said, "nothing without both --unsupervised_dataset_name and ..._config_name")


def average(flags: Flags) -> Found:
    """The average of the policy's weights: of each micro-batch there, of each update here."""
    if not flags["enable_ema"].value:
        return
    micro_batches = flags["gradient_accumulation_steps"]
    why = f"0.992 for each micro-batch, of which an update has {micro_batches.value}" if micro_batches.value > 1 else ""
    yield flags.setting("ppo.ema", round(0.992**micro_batches.value, 6), "enable_ema", why=why)
    if flags["offload_reference_model"].value:
        yield flags.setting("ppo.ema_on_host", True, "offload_reference_model", why="the average too")


def teams(flags: Flags) -> Found:
    """Layers split among ranks while completions are drawn."""
    size = flags["inference_tp_size"]
    if size.value > 1:
        yield flags.setting("ppo.generation_weights", "tensor_parallel", "inference_tp_size")
        yield flags.setting("ppo.tensor_parallel", size.value, "inference_tp_size")


def evaluation(flags: Flags) -> Found:
    """When the reward model is evaluated, and on how many pairs."""
    if flags["eval_interval"].value:
        yield flags.setting("reward.eval_every", flags["eval_interval"].value, "eval_interval")
    if flags["eval_iters"].explicit:
        names = ("eval_iters", "per_device_eval_batch_size")
        rows = math.prod(flags[name].value for name in names) * flags.devices
        yield _sized(flags.setting("reward.eval_rows", rows, *names, why=f"x {flags.devices} devices"))


def end_token(flags: Flags) -> Found:
    """The token that ends a reply."""
    named = flags.values.get("--eot_token")  # of step 1 alone
    if flags["add_eot_token"].value:
        said = f", {named.said}" if named else ""
        yield Setting("model.eos_token", named.value if named else "<|endoftext|>", f"--add_eot_token{said}")
    elif named and named.explicit:
        yield Remark(named.said, "nothing without --add_eot_token")


def folder(flags: Flags) -> Found:
    """The run's folder; several steps of one recipe have one."""
    given = flags["output_dir"]
    if given.value is None:
        return
    if (flags.alone or set(flags.earlier.values()) == {given.value}) and "$" not in given.value:
        yield flags.setting("output", given.value, "output_dir")
    else:
        yield Remark(given.said, "`--output DIR` names the run's folder, which all stages share")


RULES: Mapping[str, Callable[[Flags], Found]] = {
    rule.__name__: rule
    for rule in (
        *(sources, models, lengths, batches, duration, schedule, samples, zero, offload, precision, lora),
        *(pretraining, average, teams, evaluation, end_token, folder),
    )
}
"""By name."""
