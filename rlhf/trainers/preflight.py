"""Checks before the first step: the run's folder, batches, models, data, disk space.

`check` loads nothing and runs in the launcher too; `examine` runs with the accelerator, on rank 0. Both call the
functions that would fail during the run, so the errors are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.paths import WORLD, is_path
from rlhf.config.schema import Config, Stage, share_of
from rlhf.data import pretraining, readers
from rlhf.errors import ConfigError, RunError
from rlhf.generation.hybrid_engine import check_generation as check_rollouts
from rlhf.models.compatibility import check_model_folder
from rlhf.reporting.sinks import check_sinks
from rlhf.rewards.process import check_reward_functions
from rlhf.roles import base_sharing
from rlhf.roles.lineage import (
    ACTOR,
    JUDGE,
    MODEL,
    REWARD_MODEL,
    STUDENTS_JUDGE,
    TEACHER,
    ResolvedBaseModel,
    base_models,
    resolve_base_model,
    resolve_base_models,
)
from rlhf.roles.model_identity import check_model_files
from rlhf.roles.roles import check_placements, model_placements
from rlhf.runs.description import read_description
from rlhf.runs.directory import RunDirectory, find_run
from rlhf.runs.resume import Fingerprints, StartModels, find_other_division
from rlhf.utils.process_info import current_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from accelerators import Accelerator
    from rlhf.data.cache import StageCache
    from rlhf.data.load_sources import SourceReader
    from rlhf.data.stage_dataset import StageData
    from rlhf.models.compatibility import AttentionChoice


@dataclass(frozen=True)
class StagePlan:
    """The models that a stage starts from, and its rows.

    `data` has a sample of the rows, or all rows if they were requested. `parameters` is the number of parameters of the
    model that the stage trains; None for the embedded one. `teachers` has a line about each of a teacher's servers.
    """

    stage: Stage
    bases: tuple[ResolvedBaseModel, ...]
    parameters: int | None
    tokenizer: PreTrainedTokenizerBase
    data: StageData
    teachers: tuple[str, ...] = ()

    def steps(self, config: Config) -> int:
        """Return the optimizer steps of the stage, in PPO its rollouts; slightly too many if `data` is a sample."""
        rows = len(self.data.train) + sum(report.unseen for report in self.data.reports)
        return config.total_steps(self.stage, rows)


@dataclass(frozen=True)
class Findings:
    """Results of `examine`: a plan for each stage, the content of sources and models, and each model's attention."""

    plans: tuple[StagePlan, ...]
    data: Fingerprints
    models: StartModels
    attention: dict[str, AttentionChoice]


def check(
    config: Config,
    stages: Sequence[Stage],
    ranks: int,
    *,
    resume: bool = False,
    overwrite: bool = False,
    run_code: bool = True,
) -> list[Stage]:
    """Check everything that can be checked without loading anything; `run_code` imports reward functions, too.

    Returns:
        The stages that are still to be run.

    Raises:
        RLHFError: the run's folder must not be written to; a batch cannot be divided over `ranks`; or a model or data
            set that the stages name does not exist, or would be replaced by `overwrite`.
    """
    directory = RunDirectory(config.output)
    if current_process().rank == 0:
        directory.recover()
        directory.check(config, stages=stages, resume=resume, overwrite=overwrite)
    pending = [stage for stage in stages if overwrite or not directory.stage(stage).done]
    if pending and current_process().rank == 0:
        check_sinks(config)
    for stage in pending:
        config.check_batches(stage, ranks)
    _check_rule(config, pending)
    check_placements(config, pending)
    if "ppo" in pending:
        check_rollouts(config, ranks)
        pretraining.check_pretraining(config)
        if current_process().rank == 0:
            check_reward_functions(config, ranks, run_code=run_code)
    if overwrite:
        _check_nothing_needed_goes(config, directory, stages)
    base_sharing.check_sharing(config, pending, directory.finished_model)
    for stage in pending:
        for ref in base_models(config, stage):
            if ref.named_in(config):
                base = resolve_base_model(config, ref)
                check_model_folder(str(base.path))
                if base.adapter:
                    check_model_files(base.adapter, whole=False)
            elif ref.trained_by and ref.trained_by not in stages:
                directory.finished_model(ref.trained_by, ref.alternatives)
        for source in config.data.datasets:
            if share_of(stage) in source.stages:
                readers.check_source_exists(source.path)
                readers.check_source_exists(source.heldout or source.path)
        if not overwrite:
            directory.stage(stage).check_checkpoint()
    return pending


def describe_divisions(config: Config, pending: Sequence[Stage]) -> list[str]:
    """Return a warning for each model whose own run divides the rows that both runs read differently than this run."""
    lines = []
    for ref in dict.fromkeys(ref for stage in pending for ref in base_models(config, stage)):
        path = ref.named_in(config)
        run = find_run(path) if path and is_path(path) else None
        if run is None or run.path.resolve() == config.output.resolve():
            continue
        if differences := find_other_division(read_description(run.description), config):
            lines.append(
                f"{ref.key}: the run that trained {path} divides the same rows differently: {', '.join(differences)}; "
                "use its values, or this run may hold out rows that the model was trained on"
            )
    return lines


def examine(
    config: Config,
    pending: Sequence[Stage],
    directory: RunDirectory,
    accelerator: Accelerator,
    *,
    ranks: int = 1,
    overwrite: bool = False,
    whole: bool = False,
) -> Findings:
    """Check that the stages still to be run can work with their models and rows; write nothing.

    Args:
        ranks: number of ranks of the run.
        overwrite: existing results of the stages will be replaced.
        whole: tokenize all rows, so that their number and lengths can be shown; False: a sample.

    Raises:
        RLHFError, AcceleratorError: a stage would fail on a model, its tokenizer, LoRA layers, rows or the disk.
    """
    from rlhf.engine import deepspeed_config
    from rlhf.runs.disk_space import StorageNeed, check_disk_space
    from rlhf.trainers.ppo.exact import exact_numbers
    from rlhf.trainers.teacher_servers import check_teachers, identify_teachers

    precision = accelerator.precision(config.precision)
    accelerator.kernels.get("adamw", required=True)
    placements = [placement for stage in pending for placement in model_placements(config, stage).values()]
    if any(placement.offloads_optimizer for placement in placements):
        accelerator.kernels.get("adamw_cpu_offload", required=True)
    if any(placement.quantization for placement in placements):
        accelerator.kernels.get("quantized_weights", required=True)
    deepspeed_config.check_zero_stages(placements, accelerator)
    deepspeed_config.check_deepspeed_keys(config)
    deepspeed_config.check_nvme(config, accelerator)
    accelerator.memory()  # called at the end of a stage; a plugin's method may fail
    accelerator.kernels.get("attention", required=True)
    for stage in pending:
        with exact_numbers(config, stage, accelerator):
            pass  # it fails if the device cannot do that
    models = BaseModels(config, accelerator, ranks)
    bases = {stage: resolve_base_models(config, stage, pending, directory.finished_model) for stage in pending}
    for stage in pending:
        for base in bases[stage]:
            if base.path and not base.through:
                check_model_files(base.path)
        models.check(stage, bases[stage])
    started_from = {stage: base_sharing.identify_bases(config, stage, bases[stage]) for stage in pending}
    caches = {stage: models.cache(stage, bases[stage][0]) for stage in pending}
    teachers: dict[Stage, tuple[str, ...]] = {}
    if "distill" in pending and config.distill.teacher_servers:
        teachers["distill"] = tuple(check_teachers(config, caches["distill"].tokenizer)[1])
        started_from["distill"] |= identify_teachers(config, "distill")
    data_of_stages, sources = _read_data(caches, config, whole=whole, show=True)
    documents = pretraining.read_documents(config, show=True) if "ppo" in pending else []
    plans, needs = [], {}
    for (stage, cache), data in zip(caches.items(), data_of_stages):
        if stage == "ppo" and documents:
            pretraining.pack_documents(config, documents, cache.tokenizer, max_rows=config.ppo.pretraining_rows)
        outline = models.outline(bases[stage][0])
        parameters = outline.num_parameters() if outline else None
        plan = StagePlan(stage, bases[stage], parameters, cache.tokenizer, data, teachers.get(stage, ()))
        if not overwrite:
            directory.stage(stage).check_steps(plan.steps(config))
        plans.append(plan)
        needs[stage] = StorageNeed(models.trained(stage, plan.bases), plan.steps(config))
    check_disk_space(config, directory.path, needs, precision)
    fingerprints = sources.fingerprints() | pretraining.fingerprint_documents(documents)
    for plan in plans:
        fingerprints |= plan.data.fingerprints
    return Findings(tuple(plans), fingerprints, started_from, models.attention)


def look_at_data(config: Config, stages: Sequence[Stage], *, show: bool = False) -> Iterator[StagePlan]:
    """Yield the data of each stage, with all rows tokenized, without loading weights or reading a run's folder.

    Raises:
        RLHFError: a source or a tokenizer cannot be read, or a stage would have no rows.
    """
    models = BaseModels(config)
    firsts = {stage: resolve_base_model(config, base_models(config, stage)[0]) for stage in stages}
    caches = {stage: models.cache(stage, first) for stage, first in firsts.items()}
    for (stage, cache), data in zip(caches.items(), _read_data(caches, config, whole=True, show=show)[0]):
        yield StagePlan(stage, (firsts[stage],), None, cache.tokenizer, data)


def _read_data(
    caches: Mapping[Stage, StageCache], config: Config, *, whole: bool, show: bool
) -> tuple[Iterator[StageData], SourceReader]:
    """Return the data of each stage, and a reader of the sources for stages whose tokenized rows are not cached."""
    from rlhf.data.load_sources import read_sources
    from rlhf.data.stage_dataset import check_stage, load_stage

    cached_data = {stage: data for stage, cache in caches.items() if (data := cache.find())}
    sources = read_sources(
        config.data, [stage for stage in caches if stage not in cached_data], seed=config.data_seed, show=show
    )
    load = load_stage if whole else check_stage

    def read(stage: Stage, cache: StageCache) -> StageData:
        return load(config.data, stage, cache.tokenizer, seed=config.data_seed, end_ids=cache.end_ids, sources=sources)

    return (cached_data.get(stage) or read(stage, cache) for stage, cache in caches.items()), sources


class BaseModels:
    """The models that the stages start from and their tokenizers, each loaded once and without weights.

    Only models are loaded for an accelerator; their tokenizers need none.
    """

    def __init__(self, config: Config, accelerator: Accelerator | None = None, ranks: int = 1) -> None:
        self._config, self._accelerator, self._ranks = config, accelerator, ranks
        self.attention: dict[str, AttentionChoice] = {}
        self._outlines: dict[tuple[str, bool, bool], PreTrainedModel] = {}
        self._tokenizers: dict[tuple[str | None, str | None], PreTrainedTokenizerBase] = {}

    def tokenizer(self, base: ResolvedBaseModel) -> PreTrainedTokenizerBase:
        """Return the tokenizer that the stage will load with the model.

        Raises:
            ConfigError: `model.eos_token` is set for the embedded model.
            ModelError: the tokenizer cannot be loaded.
        """
        from rlhf.data.toy_world import build_world_tokenizer
        from rlhf.models.loading import load_model_tokenizer

        # `model.tokenizer` belongs to the model that fine-tuning starts from; SFT saves it next to its model.
        is_first_model = base.ref == MODEL or "sft" in base.through
        config, path = self._config.model, None if is_first_model else base.path
        if base.path is None and config.eos_token:
            raise ConfigError(
                "model.eos_token: the embedded model has its own; remove this key, or set model.path to another model"
            )
        is_trained = base.ref in (JUDGE, REWARD_MODEL, TEACHER, STUDENTS_JUDGE) and not base.through
        if is_trained:  # so it cannot know a new token
            config = config.model_copy(update={"eos_token": None})
        key = path, config.eos_token
        if key not in self._tokenizers:
            self._tokenizers[key] = (
                build_world_tokenizer() if base.path is None else load_model_tokenizer(config, path)[0]
            )
        return self._tokenizers[key]

    def cache(self, stage: Stage, base: ResolvedBaseModel) -> StageCache:
        """Return the cache of the stage's examples, tokenized for that model."""
        from rlhf.data.cache import StageCache
        from rlhf.models.compatibility import load_generation_config
        from rlhf.models.tokenizers import find_end_tokens

        tokenizer = self.tokenizer(base)
        settings = load_generation_config(base.path, self._config.model) if base.path else None
        return StageCache.of(self._config, stage, tokenizer, find_end_tokens(tokenizer, settings))

    def check(self, stage: Stage, bases: Sequence[ResolvedBaseModel]) -> None:
        """Raise `ModelError` or `ConfigError` if a model cannot serve the stage."""
        from rlhf.generation.hybrid_engine import check_generation_model
        from rlhf.models.compatibility import check_positions
        from rlhf.models.dropout import check_dropout
        from rlhf.models.loading import build_llama_on_meta, check_same_vocabulary, check_tokenizer_fits
        from rlhf.models.lora import find_adapter_targets
        from rlhf.models.scalar_head import check_final_norm

        for base in bases:
            outline = self.outline(base)
            if outline is None or base.path is None:
                continue
            check_positions(base.path, outline.config, self._config.data.max_length)
            if base.ref == ACTOR and self._config.ppo.ptx_coef:
                check_positions(base.path, outline.config, pretraining.row_length(self._config), "ppo.ptx_length")
            check_tokenizer_fits(self.tokenizer(base), outline, base.path)
            placements = [item for item in model_placements(self._config, stage).values() if item.role.base == base.ref]
            for placement in placements:
                is_critic = placement.role.name == "critic"
                check_dropout(outline, placement.dropout, f"{stage}.{'critic_' * is_critic}dropout")
            if stage == "reward":
                check_final_norm(outline, self._config.reward.reset_final_norm)
            if any(placement.lora.rank for placement in placements):
                find_adapter_targets(outline, self._config.lora.target_modules)
        if stage in ("ppo", "distill"):
            trained, *others = bases
            for other in others:
                where = other.adapter or other.path or "the embedded model"
                way_out = "call this one in a function of ppo.reward_functions" if stage == "ppo" else ""
                check_same_vocabulary(self.tokenizer(trained), self.tokenizer(other), where, way_out)
        if stage == "ppo":
            actor = bases[0]
            outline = self.outline(actor) or build_llama_on_meta(self.tokenizer(actor))
            check_generation_model(outline, self._config.ppo, self._ranks)

    def outline(self, base: ResolvedBaseModel) -> PreTrainedModel | None:
        """Build the model without its weights; None for the embedded one."""
        from rlhf.models.compatibility import EMBEDDED_MODEL, choose_attention
        from rlhf.models.loading import load_on_meta

        name = base.path or EMBEDDED_MODEL
        if name not in self.attention:
            assert self._accelerator
            self.attention[name] = choose_attention(self._accelerator, base.path, self._config.model)
        if base.path is None:
            return None
        # A new head may be initialized, except in PPO's reward model, which must be trained.
        trained = not base.ref.scalar_head or not (base.ref.new_head or base.through)
        key = base.path, base.ref.scalar_head, trained
        if key not in self._outlines:
            self._outlines[key] = load_on_meta(
                base.path,
                self._config.model,
                attention=self.attention[name].name,
                scalar_head=base.ref.scalar_head,
                trained=trained,
            )
        return self._outlines[key]

    def trained(self, stage: Stage, bases: Sequence[ResolvedBaseModel]) -> list[PreTrainedModel]:
        """Return the models that the stage trains, if they are read from a folder or the hub."""
        placements = model_placements(self._config, stage).values()
        refs = {placement.role.base for placement in placements if placement.role.trained}
        outlines = (self.outline(base) for base in bases if base.ref in refs)
        return [outline for outline in outlines if outline is not None]


def _check_rule(config: Config, stages: Sequence[Stage]) -> None:
    has_rule = any(dataset.path == WORLD for dataset in config.data.datasets)
    other = {"ppo": "best(reward)", "distill": "best(loss)"}
    for stage in stages:
        if getattr(config, stage).selection_metric == "approved_share" and not has_rule:
            raise ConfigError(
                f"{stage}.keep: best(approved_share) needs a rule that approves, which only the embedded data have; "
                f"use best(judge_reward) with {stage}.judge, {other[stage]}, or last"
            )


def _check_nothing_needed_goes(config: Config, directory: RunDirectory, stages: Sequence[Stage]) -> None:
    named = {"model.tokenizer": config.model.tokenizer}
    named |= {ref.key: ref.named_in(config) for stage in stages for ref in base_models(config, stage)}
    for key, path in named.items():
        for stage in stages:
            if path and Path(path).resolve().is_relative_to(directory.stage(stage).path.resolve()):
                raise RunError(
                    f"{key}: {path} lies in the {stage} stage that --overwrite replaces; "
                    "copy it elsewhere, or choose another --output"
                )
