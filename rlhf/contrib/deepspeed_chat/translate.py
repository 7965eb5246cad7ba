"""A command line of DeepSpeed-Chat as settings of rlhf that mean the same training.

Texts and an environment flow in; a `Recipe` flows out: what each key becomes and why, and what became of every flag
that is none. Of DeepSpeed-Chat's own defaults those are in it that differ from ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.config.dump import format_scalar
from rlhf.config.loader import parse_yaml
from rlhf.config.schema import STAGES, Config, build_config, share_of
from rlhf.contrib.deepspeed_chat.command import Command, parsed, unknown_variable
from rlhf.contrib.deepspeed_chat.given import Flags, Given, Remark, Setting
from rlhf.contrib.deepspeed_chat.rules import RULES
from rlhf.contrib.deepspeed_chat.script import started
from rlhf.contrib.deepspeed_chat.tables import STEPS, Flag, flag_of, flags, implied
from rlhf.contrib.deepspeed_chat.values import READERS
from rlhf.contrib.deepspeed_chat.variables import PREFIX, arguments
from rlhf.errors import ConfigError

SOURCES = "data.datasets"
_OF_ENGINE: Mapping[str, Any] = {"zero_stage": 0, "offload": "none", "gradient_checkpointing": False, "lora_rank": 0}
"""What an empty key of a role comes to, where nothing is said of all models."""


@dataclass
class Recipe:
    """The settings that differ from the defaults, in the order of the schema, and what is to be said of the rest."""

    stages: list[str] = field(default_factory=list)
    settings: dict[str, Setting] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)


def translated(texts: Sequence[str], environment: Mapping[str, str], devices: int | None = None) -> Recipe:
    """The recipe of one command line or several, of which each step is given once.

    Args:
        environment: the HL_* variables in it are those of the fork's scripts.
        devices: of the run, where a command does not say.

    Raises:
        ConfigError: a text is no command, a flag is unknown, a value cannot be read, or two do not fit together.
    """
    commands, alone = _commands(texts, environment)
    recipe = Recipe(stages=[command.stage for command in commands] or [*STAGES])
    found: list[tuple[str, list[Setting]]] = []
    for command in commands:
        count = _devices(command, devices, recipe)
        mine = _flags(command, count, [one for one in commands if one is not command])
        settings = _settings(command, mine, recipe)
        found.append((command.stage, settings + _varied(command.variables, [command.stage], recipe)))
    if not commands:
        found.append((STAGES[0], _varied(alone, STAGES, recipe)))
    _merge(found, recipe)
    _keep_what_differs(recipe)
    return recipe


def _commands(texts: Sequence[str], environment: Mapping[str, str]) -> tuple[list[Command], dict[str, str]]:
    """(the commands in the order of their steps, the variables of a text that holds nothing else)."""
    commands, assigned = parsed(texts)
    if not commands and not any(name.startswith(PREFIX) for name in assigned):
        raise ConfigError("--from-deepspeed-chat: holds no command; give a `deepspeed main.py --...`")
    stages = [command.stage for command in commands]
    for stage in stages:
        if stages.count(stage) > 1:
            raise ConfigError(f"--from-deepspeed-chat: holds {STEPS[stage]} more than once; give it once")
    ordered = sorted(commands, key=lambda command: [*STEPS].index(command.stage))
    found = [
        started(one, environment, [other for other in ordered if other is not one]) if one.script else one
        for one in ordered
    ]
    return found, assigned


def _devices(command: Command, otherwise: int | None, recipe: Recipe) -> int:
    """The devices of a command: what the launcher is told, else what we are."""
    said = {name: command.given[name][0] for name in ("--num_gpus", "--num_nodes") if name in command.given}
    for name, value in said.items():
        if not value.isdecimal() or not int(value):
            raise ConfigError(f"{name} {value}: expected a whole number of at least 1; correct it")
    nodes = int(said.get("--num_nodes", 1))
    if "--num_gpus" in said:
        count = int(said["--num_gpus"])
    elif otherwise:
        if otherwise % nodes:
            raise ConfigError(f"--devices {otherwise}: no multiple of --num_nodes {nodes}; change it")
        count = otherwise // nodes
    else:
        count = 1
        recipe.notes.append(
            f"{STEPS[command.stage]}: the launcher takes all devices that it finds, here 1 is taken; say how many with "
            "--devices N, and global batches follow"
        )
    options = [*(["--ranks", str(count)] if count > 1 else [])]
    if nodes > 1:
        options += ["--nodes", str(nodes), "--node-rank", "R", "--rendezvous", "FIRST-MACHINE:29400"]
    if recipe.options and options != recipe.options:
        recipe.notes.append(
            f"{STEPS[command.stage]}: of other devices than the step before; start it with {' '.join(options)}"
        )
    recipe.options = recipe.options or options
    if command.guess:
        others = " and ".join(STEPS[stage] for stage in command.guess)
        recipe.notes.append(
            f"taken for {STEPS[command.stage]}; the flags fit {others} too, and the path of the main.py "
            "or of its script would say which"
        )
    return count * nodes


def _flags(command: Command, devices: int, others: Sequence[Command]) -> Flags:
    """All flags of a program, with the values that were given, or their defaults."""
    values = {name: _default(row, command.stage) for name, row in flags().items() if command.stage in row.of}
    for name, texts in command.given.items():
        row = flag_of(command.stage, name)
        if row:
            values[name] = _given(row, texts, command, kept=bool(others) and row.rule == "models")
    earlier, bases = (
        {one.stage: " ".join(one.given.get(flag, ())) for one in others}
        for flag in ("--output_dir", "--model_name_or_path")
    )
    return Flags(command.stage, values, devices, earlier, bases, alone=not others)


def _default(row: Flag, stage: str) -> Given:
    value = row.of[stage]
    if row.reader and isinstance(value, str):
        value = READERS[row.reader](value)
    shown = " ".join(value) if isinstance(value, list) and row.reader == "names" else row.of[stage]
    said = f"{row.name} (not given)" if value is None else f"{row.name} {shown} (default)"
    return Given(value, said, explicit=False)


def _given(row: Flag, texts: Sequence[str], command: Command, *, kept: bool) -> Given:
    written = command.written[row.name]
    text = " ".join(texts)
    variable = unknown_variable(text)
    keys = row.keys_of(command.stage)
    if variable and keys and row.rule != "folder" and not kept:
        name = variable.strip("${}`")
        advice = f"put {name}=VALUE before the command" if name.isidentifier() else "write its value in its place"
        raise ConfigError(f"{written}: {variable} is the shell's, and has no value here; {advice}")
    if not row.reader:
        return Given(True, written, explicit=True)
    if row.reader == "names":
        return Given([*texts], written, explicit=True)
    try:
        return Given(READERS[row.reader](text) if keys else text, written, explicit=True)
    except ValueError as error:
        raise ConfigError(f"{written}: expected {error}; correct it") from error


def _settings(command: Command, given: Flags, recipe: Recipe) -> list[Setting]:
    """What a command's flags and DeepSpeed-Chat's own ways come to; remarks go to the recipe."""
    stage = command.stage
    found = [
        Setting(one.key, one.value, f"as there: {one.why}", explicit=False) for one in implied() if stage in one.stages
    ]
    for rule in dict.fromkeys(row.rule for row in flags().values() if stage in row.of and row.rule):
        for one in RULES[rule](given):
            (recipe.remarks if isinstance(one, Remark) else found).append(one)  # type: ignore[arg-type]
    for name, value in given.values.items():
        row = flags()[name]
        if row.keys and not row.rule and (value.explicit or row.of[stage] is not None):
            read = value.value if row.reader else row.value
            found += [Setting(key, read, value.said, value.explicit) for key in row.keys_of(stage)]
    for name, written in command.written.items():
        of_any = flag_of(stage, name) or flag_of("deepspeed", name)
        if of_any and not of_any.keys:
            recipe.remarks.append(Remark(written, _instead(of_any)))
    return found


def _instead(row: Flag) -> str:
    """What a flag is, that is no key."""
    if row.automatic:
        return f"automatic: {row.automatic}"
    if row.nothing:
        return f"nothing: {row.nothing}"
    return (row.option or row.command) + (f" ({row.note})" if row.note else "")


def _merge(found: Sequence[tuple[str, Sequence[Setting]]], recipe: Recipe) -> None:
    """One setting for each key. Within a step the last stands, a flag's; of two steps the first."""
    merged = recipe.settings
    for stage, settings in found:
        for key, one in {one.key: one for one in settings}.items():
            if key in merged and key != SOURCES and merged[key].value != one.value:
                if not (one.explicit or merged[key].explicit):
                    continue
                kept = merged[key]
                recipe.notes.append(
                    f"{key} is {format_scalar(kept.value)} ({kept.why}); {STEPS[stage]} has {format_scalar(one.value)} "
                    f"({one.why}): "
                    f"start rlhf {stage} by itself, with --set {key}={format_scalar(one.value)}"
                )
            elif key in merged and key != SOURCES and one.explicit and one.why != merged[key].why:
                recipe.remarks.append(Remark(one.why, key, "As the step before has it"))
            merged.setdefault(key, one)
    sources = [(stage, one) for stage, settings in found for one in settings if one.key == SOURCES]
    if len({str(one.value) for _, one in sources}) > 1:
        merged[SOURCES] = Setting(SOURCES, [*_shared(sources)], "--data_path of each step")
        rows = [row for _, one in sources for row in one.value if isinstance(row, dict)]
        own = {row["path"] for row in rows if "stages" in row}  # --sft_only_data_path
        if fewer := [row["path"] for row in merged[SOURCES].value if "stages" in row and row["path"] not in own]:
            recipe.notes.append(
                f"{', '.join(fewer)}: of some steps alone, which have all of its rows; there the others' part is unused"
            )


def _shared(sources: Sequence[tuple[str, Setting]]) -> Iterator[dict[str, Any]]:
    """Each source once, with the stages that name it."""
    by_path: dict[str, dict[str, Any]] = {}
    for stage, setting in sources:
        for source in setting.value:
            row = {"path": source} if isinstance(source, str) else dict(source)
            mine = by_path.setdefault(row["path"], row | {"stages": []})
            mine.update({name: value for name, value in row.items() if name not in mine})
            mine["stages"] = [*dict.fromkeys([*mine["stages"], *row.get("stages", [share_of(stage)])])]  # type: ignore[arg-type]
    steps = {share_of(stage) for stage, _ in sources}  # type: ignore[arg-type]
    for row in by_path.values():
        yield {name: value for name, value in row.items() if name != "stages" or set(value) != steps}


def _varied(variables: Mapping[str, str], stages: Sequence[str], recipe: Recipe) -> list[Setting]:
    """What HL_* variables set that stand before no script of the fork: it is above the flags."""
    more, said = arguments(variables, stages)
    found = []
    names = {pair.partition(": ")[0]: pair for pair in said}
    for option, value in zip(more[::2], more[1::2]):
        if option == "--set":
            key, _, text = value.partition("=")
            found.append(Setting(key, parse_yaml(text), next(name for name in names if f"{key}=" in names[name])))
        else:
            recipe.options += [option, value]
    recipe.remarks += [Remark(*pair.split(": ", 1)) for pair in said if "=" not in pair.partition(": ")[2]]
    return found


def _keep_what_differs(recipe: Recipe) -> None:
    """Leave out what is so by default; of a flag that was given, say so."""
    values: dict[str, Any] = {}
    for key, setting in recipe.settings.items():
        _put(values, key.split("."), setting.value)
    chosen = build_config(values, source="these flags").model_dump()
    ours = Config().model_dump()
    differs: dict[str, Setting] = {}
    for key, setting in recipe.settings.items():
        default = _OF_ENGINE.get(key.rpartition(".")[2]) if key.startswith("roles.") else _at(ours, key)
        if _at(chosen, key) != default:
            differs[key] = setting
        elif setting.explicit:
            recipe.remarks.append(Remark(setting.why, key, "As by default here"))
    recipe.settings = differs


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
