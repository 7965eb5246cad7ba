"""Stages one after the other: SFT, reward model, PPO; or DPO; each from what the ones before left in the run directory.

A configuration, an accelerator and a run directory flow in; models, records and a closing table flow out.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import accelerators
from rlhf.config.schema import STAGES, Config, Stage
from rlhf.data import toy_world as embedded
from rlhf.data.readers import WORLD
from rlhf.data.stage_dataset import StageData
from rlhf.data.toy_world import world_tokenizer
from rlhf.engine import cpu_offload, distributed
from rlhf.engine.deepspeed_config import build_deepspeed_config
from rlhf.memory import auto
from rlhf.models.attention import EMBEDDED_MODEL, choose_attention, describe_attention
from rlhf.models.compatibility import load_generation_config
from rlhf.models.loading import load_causal_lm, load_model_tokenizer, load_scalar_head
from rlhf.models.quantized import quantize_on_load
from rlhf.models.shared_base import build_on_base
from rlhf.models.toy_model import build_llama
from rlhf.models.weight_loading import PlaceParameter, place_in_memory
from rlhf.models.zero3_loading import place_sharded
from rlhf.reporting import verbosity
from rlhf.reporting.console import console, copy_console_to
from rlhf.reporting.recorder import Recorder
from rlhf.reporting.summary import print_summary
from rlhf.roles.base_sharing import decide_sharing
from rlhf.roles.lineage import ACTOR, CRITIC, REWARD_MODEL, BaseModelRef, ResolvedBaseModel, resolve_base_models
from rlhf.roles.roles import ModelPlacement
from rlhf.runs.stage_directory import parse_step
from rlhf.trainers import dpo, oom, reward, sft
from rlhf.trainers.context import StageContext, Trial
from rlhf.trainers.dataset import stage_rows
from rlhf.trainers.ppo import stage as ppo
from rlhf.trainers.ppo.evaluation import Judge
from rlhf.utils.command_line import get_command_line
from rlhf.utils.process_info import current_process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from accelerators import Accelerator
    from rlhf.runs.directory import RunDirectory


def run(config: Config, accelerator: Accelerator, directory: RunDirectory, stages: Sequence[Stage] = STAGES) -> None:
    """Run the stages that are not complete yet and print the closing table.

    Raises:
        RLHFError, AcceleratorError: anything the user can mend.
    """
    for stage in stages:
        if not directory.stage(stage).done:
            run_stage(stage, config, accelerator, directory)
    if distributed.world().is_main:
        print_summary([place.summary() for place in directory.stages if place.done], console)


def run_stage(
    stage: Stage, config: Config, accelerator: Accelerator, directory: RunDirectory, trial: Trial | None = None
) -> None:
    """Run one stage to its end, or a trial of it as far as that goes."""
    with surroundings(stage, config, accelerator, directory, trial) as context:
        planned = prepare(context)
        with oom.explained(context):
            summary = {"sft": _sft, "reward": _reward, "dpo": _dpo, "ppo": _ppo}[stage](context)
        finish(context, summary | planned)


@contextmanager
def surroundings(
    stage: Stage, config: Config, accelerator: Accelerator, directory: RunDirectory, trial: Trial | None = None
) -> Iterator[StageContext]:
    """What a stage runs in, its records begun, or continued after the newest checkpoint."""
    verbosity.quiet_imported_libraries()
    world, place = distributed.world(), directory.stage(stage)
    shapes = accelerator.shape_policy()
    if config.engine.shapes != "auto":
        shapes = accelerators.ShapePolicy(config.engine.shapes)
    checkpoint = place.latest_checkpoint
    step = parse_step(checkpoint) if checkpoint else None
    with (
        Recorder(place, enabled=world.is_main, resume_step=step) as recorder,
        copy_console_to(place.console, _title()) if world.is_main else nullcontext(),
    ):
        if step is None and place.started and world.is_main:
            console.print(f"{stage}: its earlier steps were not saved; it begins anew", markup=False)
        precision = accelerator.precision(config.precision)
        yield StageContext(config, accelerator, precision, shapes, world, directory, place, recorder, trial=trial)


def _title() -> str:
    """What stands above a process's lines in a stage's `console.log`."""
    return f"{datetime.now(timezone.utc).isoformat(timespec='seconds')} {get_command_line()}"


def prepare(context: StageContext) -> dict[str, Any]:
    """Say how a stage's models will be held and what that will take; gives what `finish` keeps of it."""
    planned = _planned(context.directory.name, context)
    context.accelerator.reset_peak()
    if line := cpu_offload.describe_offload(context.placements.values(), context.accelerator):
        context.say(f"{context.directory.name}: {line}")
    return planned


def finish(context: StageContext, summary: dict[str, Any]) -> None:
    """Mark a stage as complete, with what it cost; every rank calls it."""
    stage = context.directory.name
    free(context.accelerator)
    peak = max(distributed.all_gather_objects(context.phases.highest_memory()))
    with distributed.on_main(f"finishing {stage}") as main:
        if main:
            took = {"seconds": context.clock.seconds(), "peak_memory": peak, **context.phases.summary()}
            context.directory.finish({"stage": stage, **summary, **took})


def free(accelerator: Accelerator) -> None:
    """Give back what a stage's models held: the next needs it."""
    gc.collect()  # engines refer to themselves
    accelerator.empty_cache()


def _planned(stage: Stage, context: StageContext) -> dict[str, Any]:
    """Say what the stage will take; what is kept of that stands beside what it took."""
    config = context.config
    bases = _resolve_bases(context)
    attention = {choose_attention(context.accelerator, base.path, config.model).name for base in bases}
    plan, lines = auto.stage_plan(
        config,
        stage,
        context.accelerator,
        bases,
        ranks=context.world.size,
        local=current_process().count_local_ranks(context.world.size),
        fused="eager" not in attention,
    )
    for line in lines:
        context.say(line)
    return {"planned_memory": plan.fullest.device, "planned_phase": plan.fullest.name} if plan else {}


def _sft(context: StageContext) -> dict[str, Any]:
    config = context.config
    path = config.model.path
    (attention,) = _attention(context, path)
    tokenizer = _tokenizer(context) if path else world_tokenizer()

    def load(placement: ModelPlacement) -> Any:
        if path:
            return load_causal_lm(config.model, tokenizer, attention=attention, put=_put(context, placement))
        return build_llama(tokenizer, attention=attention, seed=config.seed, max_length=config.data.max_length)

    data = stage_rows(context, tokenizer, load_generation_config(path, config.model) if path else None)
    return sft.run(context, load, tokenizer, data) | data.written


def _reward(context: StageContext) -> dict[str, Any]:
    config = context.config
    path: Any = _resolve_bases(context)[0].path
    tokenizer = _tokenizer(context, path)
    (attention,) = _attention(context, path)

    def load(placement: ModelPlacement) -> Any:
        return load_scalar_head(
            config.model,
            tokenizer,
            attention=attention,
            path=path,
            seed=config.seed,
            reset_norm=config.reward.reset_final_norm,
            say=context.say,
            put=_put(context, placement),
        )

    data = stage_rows(context, tokenizer, load_generation_config(path, config.model))
    return reward.run(context, load, tokenizer, data) | data.written


def _dpo(context: StageContext) -> dict[str, Any]:
    config = context.config
    path: Any = _resolve_bases(context)[0].path
    tokenizer = _tokenizer(context, path)
    (attention,) = _attention(context, path)

    def load(placement: ModelPlacement) -> Any:
        return load_causal_lm(config.model, tokenizer, attention=attention, path=path, put=_put(context, placement))

    data = stage_rows(context, tokenizer, load_generation_config(path, config.model))
    return dpo.run(context, load, tokenizer, data) | data.written


def _ppo(context: StageContext) -> dict[str, Any]:
    needed = policy_needs(context)
    return ppo.run(context, *needed) | needed.data.written


class PolicyNeeds(NamedTuple):
    """What PPO takes beside its surroundings."""

    models: ppo.Models
    tokenizer: PreTrainedTokenizerBase
    data: StageData
    judge: Judge | None


def policy_needs(context: StageContext) -> PolicyNeeds:
    """How PPO's models are loaded, its prompts, and who judges the embedded world's answers in evaluation."""
    config = context.config
    paths: dict[BaseModelRef, Any] = {base.ref: base.path for base in _resolve_bases(context)}
    actor_path = paths[ACTOR]
    tokenizer = _tokenizer(context, actor_path)
    attention = dict(zip(paths, _attention(context, *paths.values())))

    sharing = decide_sharing(config, context.placements, actor_path, paths.get(REWARD_MODEL))
    if line := sharing.describe(context.placements):
        context.say(f"ppo: {line}")

    def policy(placement: ModelPlacement) -> Any:
        if donor := sharing.donors.get(placement.role.name):
            return build_on_base(context.bases[donor], config.model, attention=attention[ACTOR])
        put = _put(context, placement)
        return load_causal_lm(config.model, tokenizer, attention=attention[ACTOR], path=actor_path, put=put)

    said: list[str] = []

    def say(line: str) -> None:
        """The critic and the reward model may begin as one model; what there is to say of it is said once."""
        if line not in said:
            said.append(line)
            context.say(line)

    def scalar(placement: ModelPlacement) -> Any:
        ref = placement.role.base
        if donor := sharing.donors.get(placement.role.name):
            base = context.bases[donor]
            return build_on_base(
                base, config.model, attention=attention[ref], scalar_head=True, adapter=sharing.adapter
            )
        may_be_new: dict[str, Any] = {"seed": config.seed, "reset_norm": "auto"} if ref == CRITIC else {}
        return load_scalar_head(
            config.model,
            tokenizer,
            attention=attention[ref],
            path=paths[ref],
            put=_put(context, placement),
            say=say,
            **may_be_new,
        )

    models = ppo.Models(actor=policy, reference=policy, critic=scalar, reward=scalar)
    on_world = any(dataset.path == WORLD for dataset in config.data.datasets)
    judge = embedded.approves if on_world else None
    data = stage_rows(context, tokenizer, load_generation_config(actor_path, config.model))
    return PolicyNeeds(models, tokenizer, data, judge)


def _put(context: StageContext, placement: ModelPlacement) -> PlaceParameter:
    """What makes a role's parameters: in the compute precision, and where its engine will have them."""
    accelerator, precision = context.accelerator, context.precision
    if placement.zero_stage == 3:
        return place_sharded(build_deepspeed_config(placement, accelerator, precision, 1, 1), precision.dtype)
    parked = not placement.role.trained and placement.offloads_parameters
    place = accelerator.host_device() if parked else accelerator.device()
    put = place_in_memory(precision.dtype, place)
    if kind := placement.quantization:
        put = quantize_on_load(put, kind, accelerator.kernels.get("quantized_weights", required=True), place)
    return put


def _resolve_bases(context: StageContext) -> tuple[ResolvedBaseModel, ...]:
    """Return the models that the stage starts from; earlier stages are complete."""
    return resolve_base_models(context.config, context.directory.name, (), context.run.finished_model)


def _attention(context: StageContext, *paths: str | None) -> list[str]:
    """transformers' name of the attention of each model; one line says where that is not the backend's first choice."""
    found = {path: choose_attention(context.accelerator, path, context.config.model) for path in paths}
    if said := describe_attention({_short(path): choice for path, choice in found.items()}):
        context.say(said)
    return [found[path].name for path in paths]


def _short(path: str | None) -> str:
    """How lines call a model: by the end of its name, and one that a stage left by the stage's too."""
    return "/".join(Path(path).parts[-2 if path.endswith("/model") else -1 :]) if path else EMBEDDED_MODEL


def _tokenizer(context: StageContext, path: str | None = None) -> PreTrainedTokenizerBase:
    tokenizer, notes = load_model_tokenizer(context.config.model, path)
    for note in notes:
        context.say(f"note: {note}")
    return tokenizer
