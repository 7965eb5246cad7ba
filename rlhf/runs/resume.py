"""Compare the settings in `run.json` with the current ones, to decide if a run may resume."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from rlhf.config.data import DatasetConfig
from rlhf.config.paths import is_path
from rlhf.config.schema import EVERY_STAGE, Config, Stage, build_config
from rlhf.errors import ConfigError
from rlhf.roles.lineage import base_models
from rlhf.roles.model_identity import StartModel, describe_change
from rlhf.roles.roles import ROLES

# The keys among them that set how long a stage is trained: a complete stage is not trained further.
_LENGTHS = {"steps", "epochs", "max_steps"}
# Keys that may differ when a stage is resumed: they change where, how long, how often and with how much memory a stage
# runs, not what it learns (but for rounding: other batches may be computed by other routines); or
# (data.datasets.*.prefer.nothing) they confirm that a column is no preference label.
CHANGEABLE_ON_RESUME = _LENGTHS | {
    *("output", "accelerator", "timeout", "disk_wait", "reward_timeout", "kernels", "nothing", "deterministic"),
    *("log_every", "checkpoint_every", "eval_every", "samples_every", "samples"),
    *("zero_stage", "zero_persistence_threshold", "offload", "nvme", "micro_batch_size", "gradient_checkpointing"),
    *("share_base", "merge", "reuse_forward", "ema_on_host"),
    *("generation_batch_size", "generation_weights", "tensor_parallel", "where", "weights", "save", "save_critic"),
    *("teacher_servers", "teacher_timeout"),
}
# Sections in which all stages of one run agree, and all points of a sweep with its shared stages: they decide which
# rows each stage sees and which model it starts from.
SHARED_SECTIONS = ("seed", "model", "data")
# The part of them that only PPO reads (`data.pretraining`): no other stage depends on it.
_OF_PPO = {"pretraining"}
_SEEDS = {"seed", "data.seed"}
# The keys of `data`, and those of a source, that decide which of the source's prompts each stage gets and holds out.
_DIVISION = ("stage_split", "heldout_fraction")
_DIVISION_OF_SOURCE = ("stages", "heldout", "heldout_subset", "heldout_split", "heldout_revision")
# Sections that every stage is trained with; stages of one run may differ in them.
_OF_EVERY_STAGE = ("engine", "lora")

StartModels = Mapping[Stage, Mapping[str, StartModel]]
"""For each stage: the models that it starts from, by the keys that name them."""

Fingerprints = Mapping[str, Mapping[str, Any]]
"""For each source: its `rows`, and a `digest` of them as training sees them."""


def find_started_from(recorded: dict[str, Any], stage: Stage) -> list[Stage]:
    """Return the stages of the run whose models `stage` started from; `recorded` is the contents of `run.json`."""
    values, sections = recorded.get("config", {}), Config.model_fields
    # Not validated: another version may have recorded keys or values that this one does not know.
    config = Config.model_construct(
        **{
            name: type(sections[name].default).model_construct(**values.get(name, {}))
            for name in (*EVERY_STAGE, "model")
        }
    )
    return [ref.trained_by for ref in base_models(config, stage) if ref.trained_by and not ref.named_in(config)]


def stage_settings(config: Config, stage: Stage, precision: str | None) -> dict[str, Any]:
    """Return the records of `run.json` about a stage in addition to its section; `precision` is the resolved `auto`."""
    values = config.model_dump(mode="json")
    shared = {key: values[key] for key in _OF_EVERY_STAGE}
    return shared | {"roles": _select_roles(values, stage), "precision": precision or config.precision}


def find_differences(
    recorded: dict[str, Any],
    config: Config,
    resumed: Sequence[Stage],
    precision: str | None = None,
    *,
    kept: Sequence[Stage] = (),
) -> list[str]:
    """Return the keys that prevent a run from resuming, each as `key (recorded there, given now)`.

    Args:
        recorded: the contents of `run.json`.
        config: the settings given now.
        resumed: stages that would resume from a checkpoint; other stages must only share the run's rows and model.
        precision: the value of `config.precision` with `auto` resolved on this machine; None if it is not known yet.
        kept: stages that do not change.
    """
    then, now = _recorded_config(recorded), config.model_dump(mode="json")
    harmless = _harmless_in_shared([*resumed, *kept])
    differences = [text for key in SHARED_SECTIONS for text in _compare_section(then, now, key, harmless)]
    for stage in resumed:
        differences += _compare_shared(recorded, config, stage, precision)
        differences += _compare_section(then, now, stage)
    return list(dict.fromkeys(differences))


def find_row_differences(trained: Config, config: Config, stages: Collection[Stage]) -> list[tuple[str, Any, Any]]:
    """Return (key, value there, value here) of settings by which a run cannot start from stages of another.

    Rows would be divided in another way, so that a stage may train on, or hold out, rows that the models it starts from
    were trained on; or the models are others.

    Args:
        trained: the settings of the other run.
        config: the settings of the run that starts from it.
        stages: the stages of the other run.
    """
    then, now = trained.model_dump(mode="json"), config.model_dump(mode="json")
    leaves = [
        leaf
        for key in SHARED_SECTIONS
        for leaf in _differing_leaves(then[key], now[key], key, _harmless_in_shared(stages))
    ]
    same_split = trained.data_seed == config.data_seed
    return [leaf for leaf in leaves if not (same_split and leaf[0] in _SEEDS)]


def find_other_division(recorded: dict[str, Any], config: Config) -> list[str]:
    """Return the settings by which a run divides rows differently than a recorded one, as `find_differences` does.

    Only rows of sources that both runs read count. If this run starts from a model of the recorded run, it may hold out
    rows that the model was trained on.

    Args:
        recorded: the contents of `run.json` of the other run.
        config: the settings of this run.
    """
    try:
        trained = build_config(recorded.get("config", {}))
    except ConfigError:  # keys that this version does not know
        return []
    sources = {_source_key(source): source for source in trained.data.datasets}
    common = {
        index: (sources[key], source)
        for index, source in enumerate(config.data.datasets)
        if (key := _source_key(source)) in sources
    }
    if not common:
        return []
    values = [("data.seed", trained.data_seed, config.data_seed)]
    values += [(f"data.{key}", getattr(trained.data, key), getattr(config.data, key)) for key in _DIVISION]
    for index, pair in common.items():
        values += [
            (f"data.datasets.{index}.{key}", *(getattr(one, key) for one in pair)) for key in _DIVISION_OF_SOURCE
        ]
    return [f"{key} ({there!r} there, {here!r} now)" for key, there, here in values if there != here]


def _source_key(source: DatasetConfig) -> tuple[str, str | None, str]:
    """Return what identifies a source in two runs."""
    path = os.path.realpath(source.path) if is_path(source.path) else source.path
    return path, source.subset, source.split


def find_differences_in_complete(
    recorded: dict[str, Any], config: Config, complete: Sequence[Stage], *, only_complete: bool
) -> list[str]:
    """Return the keys in which `complete` stages differ from the current settings, in the form of `find_differences`.

    Args:
        recorded, config: as for `find_differences`.
        complete: the stages to compare.
        only_complete: no other stage is requested, so no key can be meant for another stage.
    """
    then, now = _recorded_config(recorded), config.model_dump(mode="json")
    harmless = CHANGEABLE_ON_RESUME - _LENGTHS
    differences = [text for stage in complete for text in _compare_section(then, now, stage, harmless)]
    if only_complete:
        differences += [text for stage in complete for text in _compare_shared(recorded, config, stage, None)]
    return list(dict.fromkeys(differences))


def find_changed_data(recorded: dict[str, Any], config: Config, data: Fingerprints) -> list[str]:
    """List sources whose rows differ from `run.json`, each as `source (76 rows there, 57 now)`."""
    fingerprints = recorded.get("data", {})
    folders = _run_folders(_recorded_config(recorded), config.model_dump(mode="json"))
    changed = []
    for source, now in data.items():
        then = fingerprints.get(source) or fingerprints.get(_move(source, *reversed(folders)))
        if then and dict(then) != dict(now):
            rows = f"{then['rows']:,} rows there, {now['rows']:,} now"
            changed.append(f"{source} ({rows if then['rows'] != now['rows'] else 'as many rows, but others'})")
    return changed


def find_changed_models(
    recorded: dict[str, Any], config: Config, models: StartModels, stages: Collection[Stage] = EVERY_STAGE
) -> list[str]:
    """List models whose content differs from `run.json`, each as `path (other weights)`.

    A model is compared with the record of its stage, and with the records of others under its path, of `stages` alone.
    """
    folders = _run_folders(_recorded_config(recorded), config.model_dump(mode="json"))
    changed = []
    for stage, starts in models.items():
        for key, (path, now) in starts.items():
            for other, record in recorded.get("stages", {}).items():
                for other_key, then in record.get("models", {}).items() if other in stages else ():
                    identity = then["identity"]
                    if (stage, key) != (other, other_key):
                        if path not in (then["path"], _move(then["path"], *folders)):
                            continue
                        identity = now | {part: identity[part] for part in identity.keys() & now.keys()}
                    if change := describe_change(identity, now):
                        changed.append(f"{path} ({change})")
    return list(dict.fromkeys(changed))


def find_first_difference(configs: Sequence[dict[str, Any]]) -> str:
    """Return the first setting of a rank, in rank order, that differs from that of rank 0; empty if none does."""
    for rank, config in enumerate(configs):
        if leaves := _differing_leaves(configs[0], config, "", frozenset()):
            key, first, other = leaves[0]
            return f"{key} ({first!r} on rank 0, {other!r} on rank {rank})"
    return ""


def list_differing_settings(then: Mapping[str, Any], now: Mapping[str, Any], harmless: Set[str]) -> list[str]:
    """Return the settings that differ between two dumped configurations, each as `key (then, now)`."""
    return [f"{key} ({old!r}, now {new!r})" for key, old, new in list_differing_leaves(then, now, harmless)]


def list_differing_leaves(
    first: Mapping[str, Any], second: Mapping[str, Any], harmless: Set[str] = frozenset()
) -> list[tuple[str, Any, Any]]:
    """Return (key, first value, second value) of each setting that differs between two dumped configurations."""
    return _differing_leaves(dict(first), dict(second), "", harmless)


def _recorded_config(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `run.json`, completed with the keys that were added in later versions."""
    config: dict[str, Any] = recorded.get("config", {})
    try:
        return build_config(config).model_dump(mode="json")
    except ConfigError:  # keys that this version does not know
        return config


def _compare_shared(recorded: dict[str, Any], config: Config, stage: Stage, precision: str | None) -> list[str]:
    """List differences outside a stage's own section: engine, LoRA, its roles and precision."""
    now = config.model_dump(mode="json")
    then = _recorded_config(recorded) | recorded.get("stages", {}).get(stage, {})
    then, now = then | {"roles": _select_roles(then, stage)}, now | {"roles": _select_roles(now, stage)}
    differences = [text for key in (*_OF_EVERY_STAGE, "roles") for text in _compare_section(then, now, key)]
    is_auto = config.precision == "auto"
    if then.get("precision") not in (config.precision, precision or config.precision) and (precision or not is_auto):
        given = f"auto, which is {precision} here," if is_auto else repr(config.precision)
        differences.append(f"precision ({then.get('precision')!r} there, {given} now)")
    return differences


def _harmless_in_shared(stages: Collection[Stage]) -> Set[str]:
    """Return names of keys of `SHARED_SECTIONS` in which other stages may differ from `stages`."""
    return CHANGEABLE_ON_RESUME if "ppo" in stages else CHANGEABLE_ON_RESUME | _OF_PPO


def _select_roles(values: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """Return the settings in `roles` of a stage's own models."""
    names = {role.name for role in ROLES[stage]}
    return {name: settings for name, settings in values.get("roles", {}).items() if name in names}


def _compare_section(
    then: dict[str, Any], now: dict[str, Any], section: str, harmless: Set[str] = CHANGEABLE_ON_RESUME
) -> list[str]:
    """List leaves of a section that differ, as `key (recorded there, given now)`; the whole project may have moved."""
    moved = _move_all(then.get(section), *_run_folders(then, now))
    keys = {key for key, *_ in _differing_leaves(moved, now[section], section, harmless)}
    leaves = _differing_leaves(then.get(section), now[section], section, harmless)
    return [f"{key} ({recorded!r} there, {given!r} now)" for key, recorded, given in leaves if key in keys]


def _run_folders(then: dict[str, Any], now: dict[str, Any]) -> tuple[str, str]:
    return then.get("output") or "/", now.get("output") or "/"


def _move_all(value: Any, old: str, new: str) -> Any:
    """Return nested values in which every path is moved in the same way as the run's folder."""
    if isinstance(value, dict):
        return {name: _move_all(below, old, new) for name, below in value.items()}
    if isinstance(value, list):
        return [_move_all(below, old, new) for below in value]
    return _move(value, old, new) if isinstance(value, str) else value


def _move(path: str, old: str, new: str) -> str:
    return os.path.normpath(os.path.join(new, os.path.relpath(path, old))) if os.path.isabs(path) else path


def _differing_leaves(then: Any, now: Any, key: str, harmless: Set[str]) -> list[tuple[str, Any, Any]]:
    """Return (key, recorded value, value now) of each leaf that differs between two dumped configurations."""
    if key.rpartition(".")[2] in harmless:
        return []
    prefix = f"{key}." if key else ""
    if isinstance(then, dict) and isinstance(now, dict):
        pairs = [(name, then.get(name), now.get(name)) for name in sorted(then.keys() | now.keys())]
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = [(str(index), old, new) for index, (old, new) in enumerate(zip(then, now, strict=True))]
    else:
        return [] if then == now else [(key, then, now)]
    return [leaf for name, old, new in pairs for leaf in _differing_leaves(old, new, f"{prefix}{name}", harmless)]
