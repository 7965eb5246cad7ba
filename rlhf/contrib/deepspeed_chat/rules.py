"""Settings that depend on several flags: one function for each group of such flags, in `RULES`.

A command's flags go in, with DeepSpeed-Chat's defaults for flags that were not given. Settings come out, and remarks
about flags that have no setting.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf.contrib.deepspeed_chat.tables import SCHEDULES, read_source
from rlhf.errors import ConfigError


@dataclass(frozen=True)
class FlagValue:
    """A flag's value, and the flag as it was written or with its default; `explicit` if the command has the flag."""

    value: Any
    text: str
    explicit: bool


@dataclass(frozen=True)
class Setting:
    """The value of a key, and the flags it comes from.

    Attributes:
        explicit: not all of the flags are defaults of DeepSpeed-Chat.
    """

    key: str
    value: Any
    why: str
    explicit: bool = True


@dataclass(frozen=True)
class Note:
    """A sentence for the head of the recipe: what the user should know or decide."""

    text: str


@dataclass(frozen=True)
class Remark:
    """A remark about a flag without a line in the recipe; remarks of one `group` are printed together."""

    flag: str
    text: str
    group: str = ""


@dataclass(frozen=True)
class CommandFlags:
    """The flags of one command.

    Attributes:
        devices: number of devices, on all machines.
        nodes: number of machines.
        earlier: output folders of the other steps in the recipe, by stage.
        alone: the recipe has no other step.
        adapter_rate: whether this version of DeepSpeed-Chat has a learning rate for adapters, which it got on
            2023-08-14; None if neither main.py nor flags tell.
    """

    stage: str
    values: Mapping[str, FlagValue]
    devices: int
    nodes: int = 1
    earlier: Mapping[str, str] = field(default_factory=dict)
    alone: bool = True
    adapter_rate: bool | None = True

    def __getitem__(self, name: str) -> FlagValue:
        return self.values[f"--{name}"]

    def setting(self, key: str, value: Any, *names: str, why: str = "") -> Setting:
        """Return a setting that the named flags determine."""
        sources = [self[name] for name in names]
        link = " x " if why.startswith("x ") else ", "  # a product, or a list
        reason = link.join([*(flag.text for flag in sources), *filter(None, [why.removeprefix("x ")])])
        return Setting(key, value, reason, any(flag.explicit for flag in sources))

    def unused(self, text: str, *names: str) -> Iterator[Remark]:
        """Yield a remark for each named flag that the command has."""
        yield from (Remark(self[name].text, text) for name in names if self[name].explicit)

    @property
    def generation_batch(self) -> int:
        """Prompts of one generation over all devices, in PPO."""
        batch: int = self["per_device_generation_batch_size"].value
        return batch * self.devices


Translation = Iterator[Setting | Remark | Note]


def translate_sources(flags: CommandFlags) -> Translation:
    """Translate the sources of rows, those only for SFT included."""
    rows: list[Any] = [read_source(name) for name in flags["data_path"].value]
    names = ["data_path"]
    if flags.stage == "sft" and flags["sft_only_data_path"].value:
        names.append("sft_only_data_path")
        rows += [{**_mapping(read_source(name)), "stages": ["sft"]} for name in flags["sft_only_data_path"].value]
    if not rows:
        raise ConfigError("--data_path: names no source; add one, or remove the flag for DeepSpeed-Chat's default")
    yield flags.setting("data.datasets", rows, *names)


def _mapping(source: Any) -> dict[str, Any]:
    return {"path": source} if isinstance(source, str) else source


_MODELS = {
    "sft": {"model_name_or_path": ("model.path", "")},
    "reward": {"model_name_or_path": ("reward.model", "sft")},
    "dpo": {"model_name_or_path": ("dpo.model", "sft")},
    "ppo": {
        "actor_model_name_or_path": ("ppo.actor", "sft"),
        "critic_model_name_or_path": ("ppo.reward_model", "reward"),
    },
}
"""The flags of models, each with its key and the stage whose model an empty key takes."""


def translate_models(flags: CommandFlags) -> Translation:
    """Translate the models that a stage starts from; the model of an earlier step in the recipe needs no name."""
    for flag, (key, stage) in _MODELS[flags.stage].items():
        if _is_earlier(flags[flag].value, flags.earlier.get(stage)):
            yield Remark(flags[flag].text, f"the model of this run's {stage} stage")
            continue
        yield flags.setting(key, _required(flags, flag), flag)
        if stage in flags.earlier and flags.stage != "reward":
            yield Note(
                f"{key} is {flags[flag].value} ({flags[flag].text}), not the model that the {stage} stage of this "
                f"recipe saves; to start from that one, remove {key}"
            )


def _required(flags: CommandFlags, name: str) -> str:
    value = flags[name].value
    if value is None:
        raise ConfigError(f"--{name}: missing; DeepSpeed-Chat requires it")
    return str(value)


def _is_earlier(path: str | None, folder: str | None) -> bool:
    """Return whether a model is in the output folder of an earlier step; a `$VARIABLE` is assumed to be."""
    if folder is None or path is None:
        return folder is not None
    return path.startswith("$") or os.path.abspath(path) == os.path.abspath(folder)


def translate_lengths(flags: CommandFlags) -> Translation:
    """Translate the lengths of prompts and completions; steps 1 and 2 only have their sum."""
    if flags.stage == "ppo":
        yield flags.setting("data.max_prompt_length", flags["max_prompt_seq_len"].value, "max_prompt_seq_len")
        yield flags.setting("data.max_completion_length", flags["max_answer_seq_len"].value, "max_answer_seq_len")
        return
    whole = flags["max_seq_len"].value
    if whole < 2:
        raise ConfigError(f"--max_seq_len {whole}: too short for a prompt and a completion; set at least 2")
    for key, value in (("prompt", whole // 2), ("completion", whole - whole // 2)):
        yield flags.setting(f"data.max_{key}_length", value, "max_seq_len", why="half of it")


def translate_batches(flags: CommandFlags) -> Translation:
    """Translate batches per device into global batches, and the rows of one forward pass."""
    devices = f"{flags.devices} device{'s' if flags.devices > 1 else ''}"
    if flags.stage != "ppo":
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        size = math.prod(flags[name].value for name in names) * flags.devices
        yield _check_size(flags.setting(f"{flags.stage}.batch_size", size, *names, why=f"x {devices}"))
        yield flags.setting(f"{flags.stage}.micro_batch_size", flags[names[0]].value, names[0])
        return
    rollout_flags = ("per_device_generation_batch_size", "generation_batches")
    learned = ("per_device_training_batch_size", "gradient_accumulation_steps")
    rollout, update = ppo_batches(flags)
    # Rollouts between two updates are one rollout here: DeepSpeed-Chat's policy does not change between them.
    why = f"x {devices}"
    if (times := rollout // (math.prod(flags[name].value for name in rollout_flags) * flags.devices)) > 1:
        why += f" x {times}, for updates of {update}"
    minibatch = _check_size(flags.setting("ppo.minibatch_size", update, *learned, why=f"x {devices}"))
    yield _check_size(flags.setting("ppo.batch_size", rollout, *rollout_flags, why=why))
    yield minibatch
    yield flags.setting("ppo.generation_batch_size", flags[rollout_flags[0]].value, rollout_flags[0])
    yield flags.setting("ppo.micro_batch_size", flags[learned[0]].value, learned[0])


def ppo_batches(flags: CommandFlags) -> tuple[int, int]:
    """Return (completions of a rollout, rows of an update) over all devices; the first is a multiple of the second."""
    drawn = flags["per_device_generation_batch_size"].value * flags["generation_batches"].value
    update = flags["per_device_training_batch_size"].value * flags["gradient_accumulation_steps"].value
    return math.lcm(drawn, update) * flags.devices, update * flags.devices


def _check_size(setting: Setting) -> Setting:
    if setting.value < 1:
        raise ConfigError(f"{setting.why}: gives no rows; set at least 1")
    return setting


def translate_duration(flags: CommandFlags) -> Translation:
    """Translate the passes over the rows; PPO's test mode ends after a number of rollouts."""
    if flags.stage != "ppo":
        yield flags.setting(f"{flags.stage}.epochs", flags["num_train_epochs"].value, "num_train_epochs")
        return
    steps, test = flags["test_stop_step"], flags["enable_test_mode"]
    if test.value and steps.value:
        rollouts = math.ceil(steps.value * flags.generation_batch / ppo_batches(flags)[0])
        yield flags.setting("ppo.steps", rollouts, "test_stop_step", why=f"batches of {flags.generation_batch} prompts")
        return
    yield from flags.unused("nothing: the test mode needs both of its flags", "test_stop_step")
    if test.value:
        yield flags.setting("ppo.epochs", 1, "enable_test_mode", why="which ends after one pass")
    else:
        yield flags.setting("ppo.epochs", flags["num_train_epochs"].value, "num_train_epochs")


def translate_schedule(flags: CommandFlags) -> Translation:
    """Translate the learning-rate schedule; DeepSpeed-Chat's `constant` ignores the warm-up steps."""
    name, warmup = flags["lr_scheduler_type"], flags["num_warmup_steps"]
    for optimizer in ("optimizer", "critic_optimizer") if flags.stage == "ppo" else ("optimizer",):
        key = f"{flags.stage}.{optimizer}"
        yield flags.setting(f"{key}.schedule", SCHEDULES[name.value], "lr_scheduler_type")
        if name.value == "constant":
            yield flags.setting(f"{key}.warmup", 0, "lr_scheduler_type", why="which has none")
        else:
            yield flags.setting(f"{key}.warmup", warmup.value, "num_warmup_steps")
    if name.value == "constant":
        yield from flags.unused(f"nothing: {name.text} has no warm-up", "num_warmup_steps")


def translate_samples(flags: CommandFlags) -> Translation:
    """Translate how often completions are shown."""
    every = flags["print_answers_interval"]
    if flags["print_answers"].value and every.value:
        rollouts = max(1, every.value * flags.generation_batch // ppo_batches(flags)[0])
        yield flags.setting("ppo.samples_every", rollouts, "print_answers_interval")
    else:
        yield from flags.unused("nothing without --print_answers", "print_answers_interval")


def translate_zero(flags: CommandFlags) -> Translation:
    """Translate the ZeRO stages of PPO's models; a frozen model is sharded if the trained one is at ZeRO-3."""
    for name, frozen in (("actor", "reference"), ("critic", "reward")):
        flag = f"{name}_zero_stage"
        yield flags.setting(f"roles.{name}.zero_stage", flags[flag].value, flag)
        if flags[flag].value == 3 and (frozen == "reward" or has_reference(flags)):
            yield flags.setting(f"roles.{frozen}.zero_stage", 3, flag, why=f"the {frozen} model's too")


def has_reference(flags: CommandFlags) -> bool:
    """Return whether PPO's reference is a separate model: not if only adapters of the policy are trained."""
    return not (flags["actor_lora_dim"].value and flags["only_optimize_lora"].value)


def translate_offload(flags: CommandFlags) -> Translation:
    """Translate what is stored in the host's memory, which depends on the ZeRO stage."""
    roles = {"ppo": ("actor", "critic")}.get(flags.stage, (flags.stage,))
    for role in roles if flags["offload"].value else ():
        stage = flags["zero_stage" if flags.stage != "ppo" else f"{role}_zero_stage"]
        if stage.value:
            what = "all" if stage.value == 3 else "optimizer"
            yield flags.setting(f"roles.{role}.offload", what, "offload", why=f"at {stage.text}")
        else:
            yield Remark(flags["offload"].text, f"nothing for {role}: nothing can be offloaded at ZeRO 0")
    if flags.stage == "dpo":
        why = "automatic: the reference's log-probabilities are computed once, before training (dpo.reference)"
        yield from flags.unused(why, "offload_reference_model")
    if flags.stage != "ppo":
        return
    for role in ("reference", "reward"):
        flag = f"offload_{role}_model"
        if role == "reference" and not has_reference(flags):
            yield from flags.unused("nothing: the reference is the actor without its adapters", flag)
        elif flags[flag].value:
            yield flags.setting(f"roles.{role}.offload", "parameters", flag)


def translate_precision(flags: CommandFlags) -> Translation:
    """Translate the precision, if the command has the flag."""
    dtype = flags["dtype"]
    if dtype.explicit:
        yield flags.setting("precision", dtype.value, "dtype")
    else:
        yield Remark(
            dtype.text, "precision: auto, the accelerator's best; set fp16 to use the precision of DeepSpeed-Chat"
        )
    if dtype.value == "fp16":
        yield Setting("engine.loss_scale_window", 100, "as in DeepSpeed-Chat with fp16", explicit=False)


def translate_lora(flags: CommandFlags) -> Translation:
    """Translate adapters: their layers, rank and learning rate, and what is trained in addition."""
    prefixes = {"actor": "actor_", "critic": "critic_"} if flags.stage == "ppo" else {flags.stage: ""}
    used = {role: prefix for role, prefix in prefixes.items() if flags[f"{prefix}lora_dim"].value}
    scopes, names = [], []
    for role, prefix in prefixes.items():
        if role not in used:
            names_unused = (f"{prefix}lora_module_name", f"{prefix}lora_learning_rate")
            yield from flags.unused(f"nothing without --{prefix}lora_dim", *names_unused)
            continue
        yield flags.setting(f"roles.{role}.lora_rank", flags[f"{prefix}lora_dim"].value, f"{prefix}lora_dim")
        yield from _translate_adapter_rate(flags, role, prefix)
        scopes.append(re.escape(flags[f"{prefix}lora_module_name"].value.removeprefix("rw")))
        names.append(f"{prefix}lora_module_name")
    if not used:
        yield from flags.unused("nothing without adapters", "only_optimize_lora")
        return
    scope = "|".join(dict.fromkeys(scopes))
    scope = f"(?:{scope})" if "|" in scope else scope
    yield flags.setting("lora.target_modules", [f"re:.*{scope}.*"], *names)
    yield Setting("lora.alpha", 1.0, "DeepSpeed-Chat scales adapters by 1 / dim", explicit=False)
    yield Setting("lora.init", "rank", "as in DeepSpeed-Chat", explicit=False)
    if flags["only_optimize_lora"].value:
        yield flags.setting("lora.also_train", [], "only_optimize_lora")
    else:
        parameters = ["norms", "biases", "embeddings"]
        yield Setting("lora.also_train", parameters, "no --only_optimize_lora: these are trained too", explicit=False)


def _translate_adapter_rate(flags: CommandFlags, role: str, prefix: str) -> Translation:
    """Translate the learning rate of adapters, which was that of the other weights before 2023-08-14."""
    key, name, whole = f"roles.{role}.lora_learning_rate", f"{prefix}lora_learning_rate", f"{prefix}learning_rate"
    if flags.adapter_rate is False and not flags[name].explicit:
        why = "of adapters too before 2023-08-14"
        yield flags.setting(key, flags[whole].value, whole, why=why)
        return
    yield flags.setting(key, flags[name].value, name)
    if flags.adapter_rate is None and not flags[name].explicit:
        yield Note(
            f"{key} is {flags[name].value}, the default since 2023-08-14; before, adapters learned at --{whole}: if "
            f"your version is older, set {key}={flags[whole].value}"
        )


def translate_hpz(flags: CommandFlags) -> Translation:
    """Translate hpZ, a second partition of the weights on each machine: DeepSpeed uses it at ZeRO-3 on several."""
    roles = {"ppo": ("actor", "critic")}.get(flags.stage, (flags.stage,))
    for role in roles:
        flag, stage = ("zero_hpz_enabled", "zero_stage")
        if flags.stage == "ppo":
            flag, stage = f"zero_hpz_enabled_{role}", f"{role}_zero_stage"
        if not flags[flag].value:
            continue
        if flags.nodes < 2 or flags[stage].value != 3:
            yield Remark(flags[flag].text, "nothing: hpZ acts at ZeRO-3 on several machines")
            continue
        per_node = flags.devices // flags.nodes
        key = "engine.deepspeed.zero_optimization.zero_hpz_partition_size"
        yield flags.setting(key, per_node, flag, why="the devices of a machine, for all models at ZeRO-3")


def translate_quantized(flags: CommandFlags) -> Translation:
    """Translate MixZ++: DeepSpeed stores the weights under the actor's adapters in 8 bits, at ZeRO-3 alone."""
    name = "enable_mixed_precision_lora"
    if flags[name].value and flags["actor_lora_dim"].value and flags["actor_zero_stage"].value == 3:
        yield flags.setting("roles.actor.frozen", "int8", name)
    else:
        yield from flags.unused("nothing without --actor_lora_dim and --actor_zero_stage 3", name)


def translate_pretraining(flags: CommandFlags) -> Translation:
    """Translate the raw text for PPO's language-modelling loss."""
    name, subset = flags["unsupervised_dataset_name"], flags["unsupervised_dataset_config_name"]
    if name.value and subset.value:
        source = {"path": name.value, "subset": subset.value}
        yield Setting("data.pretraining", [source], f"{name.text}, {subset.text}")
        yield flags.setting("ppo.ptx_coef", flags["unsup_coef"].value, "unsup_coef")
        return
    names = ("unsupervised_dataset_name", "unsupervised_dataset_config_name", "unsup_coef")
    yield from flags.unused("nothing without both --unsupervised_dataset_name and ..._config_name", *names)


def translate_average(flags: CommandFlags) -> Translation:
    """Translate the moving average of the policy: DeepSpeed-Chat updates it per micro-batch, rlhf per update."""
    if not flags["enable_ema"].value:
        return
    micro_batches = flags["gradient_accumulation_steps"]
    why = f"0.992 per micro-batch, {micro_batches.value} of them per update" if micro_batches.value > 1 else ""
    yield flags.setting("ppo.ema", round(0.992**micro_batches.value, 6), "enable_ema", why=why)
    if flags["offload_reference_model"].value:
        yield flags.setting("ppo.ema_on_host", True, "offload_reference_model", why="the average too")


def translate_tensor_parallel(flags: CommandFlags) -> Translation:
    """Translate the splitting of layers among ranks during generation."""
    size = flags["inference_tp_size"]
    if size.value > 1:
        yield flags.setting("ppo.generation_weights", "tensor_parallel", "inference_tp_size")
        yield flags.setting("ppo.tensor_parallel", size.value, "inference_tp_size")


def translate_evaluation(flags: CommandFlags) -> Translation:
    """Translate when the reward model is evaluated, and on how many pairs."""
    if flags["eval_interval"].value:
        yield flags.setting("reward.eval_every", flags["eval_interval"].value, "eval_interval")
    if flags["eval_iters"].explicit:
        names = ("eval_iters", "per_device_eval_batch_size")
        rows = math.prod(flags[name].value for name in names) * flags.devices
        yield _check_size(flags.setting("reward.eval_rows", rows, *names, why=f"x {flags.devices} devices"))


def translate_end_token(flags: CommandFlags) -> Translation:
    """Translate the token that ends a reply."""
    names = ["eot_token"] if flags.stage == "sft" else []  # other steps have a fixed token
    if flags["add_eot_token"].value:
        token = flags["eot_token"].value if names else "<|endoftext|>"
        yield flags.setting("model.eos_token", token, "add_eot_token", *names)
    else:
        yield from flags.unused("nothing without --add_eot_token", *names)


def translate_folder(flags: CommandFlags) -> Translation:
    """Translate the run's folder, which all steps of a recipe share: the folder that contains those of the steps."""
    folder = flags["output_dir"]
    if folder.value is None:
        return
    folders = [folder.value, *(other for other in flags.earlier.values() if other)]
    if not any("$" in other for other in folders):
        common = folder.value
        if len({os.path.normpath(other) for other in folders}) > 1:
            is_mixed = len({os.path.isabs(other) for other in folders}) > 1
            common = "" if is_mixed else os.path.commonpath([os.path.normpath(other) for other in folders])
        if common not in ("", os.path.sep) and not common.startswith(".."):
            yield Setting(
                "output", common, folder.text if common == folder.value else "contains the --output_dir of all steps"
            )
            return
    yield Remark(folder.text, "`--output DIR` sets the run's folder, which all stages share")


RULES: Mapping[str, Callable[[CommandFlags], Translation]] = {
    "sources": translate_sources,
    "models": translate_models,
    "lengths": translate_lengths,
    "batches": translate_batches,
    "duration": translate_duration,
    "schedule": translate_schedule,
    "samples": translate_samples,
    "zero": translate_zero,
    "offload": translate_offload,
    "precision": translate_precision,
    "lora": translate_lora,
    "quantized": translate_quantized,
    "pretraining": translate_pretraining,
    "average": translate_average,
    "tensor_parallel": translate_tensor_parallel,
    "evaluation": translate_evaluation,
    "end_token": translate_end_token,
    "folder": translate_folder,
    "hpz": translate_hpz,
}
"""The rules, by the name in `rule:` of flags.yaml."""
