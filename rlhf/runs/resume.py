"""Compare the settings that `run.json` recorded with those given now, to decide if a run may resume."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlhf.config.schema import EVERY_STAGE, Config, Stage, build_config
from rlhf.errors import ConfigError
from rlhf.roles.lineage import base_models
from rlhf.roles.roles import ROLES

_PACKAGES = ("rlhf", "torch", "deepspeed", "transformers", "peft")
# Keys that may differ when a stage is resumed: they change where, how long, how often and with how much memory, not
# what is learned; or say (data.datasets.*.prefer.nothing) that a column does not decide, which none did then.
CHANGEABLE_ON_RESUME = {"output", "accelerator", "log_every", "checkpoint_every", "steps", "epochs", "max_steps"}
CHANGEABLE_ON_RESUME |= {"micro_batch_size", "gradient_checkpointing", "offload", "timeout", "nothing"}
CHANGEABLE_ON_RESUME |= {"generation_batch_size", "generation_weights", "tensor_parallel", "reuse_forward"}
CHANGEABLE_ON_RESUME |= {"share_base", "merge", "save", "save_critic"}
CHANGEABLE_ON_RESUME |= {"eval_every", "samples_every", "samples", "ema_on_host", "reward_timeout", "kernels"}
# Of those, what says how long a stage is trained: a complete one is not trained further.
_LENGTHS = {"steps", "epochs", "max_steps"}
# Decided by the plan if the settings say auto: a resumed stage keeps what was decided when it started.
_DECIDED = {"engine.zero_stage", "engine.offload"}
# What an empty key comes to: earlier versions recorded that in its place.
_UNSAID = {"heldout_split": "test", "whiten_advantages": True}
# Sections that all stages of one run share: they decide which rows each stage sees and which model it starts from.
SHARED_SECTIONS = ("seed", "model", "data")
# What PPO alone reads of them (`data.pretraining`): if PPO has not started, nothing was made with it.
_OF_PPO = {"pretraining"}
# Sections that every stage is trained with; stages of one run may differ in them.
_OF_EVERY_STAGE = ("engine", "lora")


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
    """Return what `run.json` records for a stage besides its section; `precision` is what `auto` resolved to."""
    values = config.model_dump(mode="json")
    shared = {key: values[key] for key in _OF_EVERY_STAGE}
    return shared | {"roles": _roles(values, stage), "precision": precision or config.precision}


def find_differences(
    recorded: dict[str, Any],
    config: Config,
    resumed: Sequence[Stage],
    precision: str | None = None,
    *,
    kept: Sequence[Stage] = (),
) -> list[str]:
    """Return the keys that keep a run from resuming, each as `key (recorded there, given now)`.

    Args:
        recorded: the contents of `run.json`.
        resumed: stages that would continue from what is there; others only have to share the run's rows and model.
        precision: what `config.precision` came to on this machine; None where that is not known yet.
        kept: stages that stay as they are.
    """
    there, now = _recorded(recorded), config.model_dump(mode="json")
    harmless = CHANGEABLE_ON_RESUME if "ppo" in {*resumed, *kept} else CHANGEABLE_ON_RESUME | _OF_PPO
    found = [text for key in SHARED_SECTIONS for text in _differing(there, now, key, harmless)]
    for stage in resumed:
        found += _differing_beside(recorded, config, stage, precision)
        found += _differing(there, now, stage)
    return list(dict.fromkeys(found))


def find_differences_in_complete(
    recorded: dict[str, Any], config: Config, complete: Sequence[Stage], *, all_of_it: bool
) -> list[str]:
    """Keys in which `complete` stages differ from what is asked for now, as `differences` gives them.

    Args:
        all_of_it: no other stage is asked for, so that no key can be meant for one.
    """
    there, now = _recorded(recorded), config.model_dump(mode="json")
    found = [text for stage in complete for text in _differing(there, now, stage, CHANGEABLE_ON_RESUME - _LENGTHS)]
    if all_of_it:
        found += [text for stage in complete for text in _differing_beside(recorded, config, stage, None)]
    return list(dict.fromkeys(found))


def find_changed_data(recorded: dict[str, Any], config: Config, found: Fingerprints) -> list[str]:
    """List sources whose rows differ from `run.json`, each as `source (76 rows there, 57 now)`."""
    then = recorded.get("data", {})
    folders = _folders(config.model_dump(mode="json"), _recorded(recorded))
    changed = []
    for source, now in found.items():
        there = then.get(source) or then.get(_moved(source, *folders))
        if there and dict(there) != dict(now):
            rows = f"{there['rows']:,} rows there, {now['rows']:,} now"
            changed.append(f"{source} ({rows if there['rows'] != now['rows'] else 'as many rows, but others'})")
    return changed


def find_first_difference(configs: Sequence[dict[str, Any]]) -> str:
    """Return the first setting of a rank, in rank order, that differs from that of rank 0; empty if none does."""
    for rank, config in enumerate(configs):
        if found := _leaves(configs[0], config, "", frozenset()):
            key, first, other = found[0]
            return f"{key} ({first!r} on rank 0, {other!r} on rank {rank})"
    return ""


def _recorded(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `run.json` as this version writes them: absolute paths, and keys added since."""
    there: dict[str, Any] = recorded.get("config", {})
    try:
        return build_config(there).model_dump(mode="json")
    except ConfigError:  # keys that it no longer knows
        return there


def _differing_beside(recorded: dict[str, Any], config: Config, stage: Stage, precision: str | None) -> list[str]:
    """List differences outside a stage's own section: engine, LoRA and precision."""
    own, now = _recorded(recorded) | recorded.get("stages", {}).get(stage, {}), config.model_dump(mode="json")
    there = own.get("precision")
    if there == "auto":  # recorded as it was given; what it came to may stand with the hardware
        there = ((recorded.get("accelerator") or {}).get("precision") or {}).get("name", "auto")
    own, now = own | {"roles": _roles(own, stage)}, now | {"roles": _roles(now, stage)}
    found = [text for key in (*_OF_EVERY_STAGE, "roles") for text in _differing(own, now, key)]
    return found + _precision(there, config.precision, precision)


def _roles(values: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """Return the settings in `roles` of a stage's own models."""
    names = {role.name for role in ROLES[stage]}
    return {name: own for name, own in values.get("roles", {}).items() if name in names}


def _precision(there: Any, given: str, resolved: str | None) -> list[str]:
    if there in (given, resolved or given) or (given == "auto" and resolved is None):
        return []
    now = f"auto, which is {resolved} here," if given == "auto" else repr(given)
    return [f"precision ({there!r} there, {now} now)"]


def _differing(
    there: dict[str, Any], now: dict[str, Any], section: str, harmless: Set[str] = CHANGEABLE_ON_RESUME
) -> list[str]:
    """Leaves of a section that differ, as `key (recorded there, given now)`; a project may have moved as a whole."""
    moved = _moved_all(there.get(section), *_folders(there, now))
    differ = {key for key, *_ in _leaves(moved, now[section], section, harmless)}
    leaves = _leaves(there.get(section), now[section], section, harmless)
    return [f"{key} ({then!r} there, {given!r} now)" for key, then, given in leaves if key in differ]


def _folders(there: dict[str, Any], now: dict[str, Any]) -> tuple[str, str]:
    """Return the run's folder in both."""
    return there.get("output") or "/", now.get("output") or "/"


def _moved_all(value: Any, old: str, new: str) -> Any:
    """Nested values in which every path is what it would be if it had moved as the run's folder has."""
    if isinstance(value, dict):
        return {name: _moved_all(below, old, new) for name, below in value.items()}
    if isinstance(value, list):
        return [_moved_all(below, old, new) for below in value]
    return _moved(value, old, new) if isinstance(value, str) else value


def _moved(path: str, old: str, new: str) -> str:
    return os.path.normpath(os.path.join(new, os.path.relpath(path, old))) if os.path.isabs(path) else path


def _leaves(there: Any, now: Any, key: str, harmless: Set[str]) -> list[tuple[str, Any, Any]]:
    """Leaves that differ between two dumped configurations: (key, this there, that now)."""
    if key.rpartition(".")[2] in harmless:
        return []
    before = f"{key}." if key else ""
    if isinstance(there, dict) and isinstance(now, dict):
        names = sorted(there.keys() | now.keys())
        return [leaf for name in names for leaf in _leaves(there.get(name), now.get(name), before + name, harmless)]
    if isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        pairs = enumerate(zip(there, now, strict=True))
        return [leaf for place, pair in pairs for leaf in _leaves(*pair, f"{before}{place}", harmless)]
    if now == "auto" and key in _DECIDED:
        return []
    unsaid = _UNSAID.get(key.rpartition(".")[2])
    return [] if there == now or (there, now) in ((None, unsaid), (unsaid, None)) else [(key, there, now)]


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a distribution"
    return found
