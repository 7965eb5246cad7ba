"""Translate command lines of DeepSpeed-Chat into recipes of rlhf that train in the same way.

The recipe says what each key becomes and why, and what became of every flag without a key. It has those defaults of
DeepSpeed-Chat that differ from the defaults of rlhf.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from rlhf.config.dump import format_scalar
from rlhf.config.loader import parse_yaml
from rlhf.config.schema import STAGES, Config, build_config, share_of
from rlhf.contrib.deepspeed_chat.command import Command, expand_script, find_shell_variable, parse_commands
from rlhf.contrib.deepspeed_chat.rules import RULES, CommandFlags, FlagValue, Remark, Setting
from rlhf.contrib.deepspeed_chat.tables import READERS, STEPS, Flag, find_flag, load_flags, load_implied
from rlhf.contrib.deepspeed_chat.variables import PREFIX, to_arguments
from rlhf.errors import ConfigError

SOURCES = "data.datasets"
_OF_ENGINE: Mapping[str, Any] = {"zero_stage": 0, "offload": "none", "gradient_checkpointing": False, "lora_rank": 0}
"""Values of a role's empty keys, if `engine`, `model` and `lora` have their defaults."""


@dataclass
class TranslatedRecipe:
    """The settings that differ from the defaults, in the order of the schema, and remarks about the rest.

    Attributes:
        notes: what the user should know or decide.
        options: options of `rlhf` that start the run.
    """

    stages: list[str] = field(default_factory=list)
    settings: dict[str, Setting] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)


def translate_commands(
    texts: Sequence[str], environment: Mapping[str, str], devices: int | None = None
) -> TranslatedRecipe:
    """Translate command lines, at most one per step, into a recipe.

    Args:
        texts: the pasted command lines.
        environment: variables; those named HL_* are the fork's.
        devices: number of devices, for commands that do not say.

    Raises:
        ConfigError: a text is not a command, a flag is unknown, a value is invalid, or two flags contradict.
    """
    commands, alone = _commands(texts, environment)
    recipe = TranslatedRecipe(stages=[command.stage for command in commands] or [*STAGES])
    found: list[tuple[str, list[Setting]]] = []
    for command in commands:
        count = _count_devices(command, devices, recipe)
        mine = _flags(command, count, [one for one in commands if one is not command])
        settings = _settings(command, mine, recipe)
        found.append((command.stage, settings + _variable_settings(command.variables, [command.stage], recipe)))
    if not commands:
        found.append((STAGES[0], _variable_settings(alone, STAGES, recipe)))
    _merge(found, recipe)
    _keep_what_differs(recipe)
    return recipe


def _commands(texts: Sequence[str], environment: Mapping[str, str]) -> tuple[list[Command], dict[str, str]]:
    """Return (the commands in the order of their steps, the variables in texts without commands)."""
    commands, assigned = parse_commands(texts)
    if not commands and not any(name.startswith(PREFIX) for name in assigned):
        raise ConfigError("--from-deepspeed-chat: no command found; paste a `deepspeed main.py --...`")
    stages = [command.stage for command in commands]
    for stage in stages:
        if stages.count(stage) > 1:
            raise ConfigError(f"--from-deepspeed-chat: {STEPS[stage]} is given more than once; paste it once")
    ordered = sorted(commands, key=lambda command: [*STEPS].index(command.stage))
    found = [
        expand_script(one, environment, [other for other in ordered if other is not one]) if one.script else one
        for one in ordered
    ]
    return found, assigned


def _count_devices(command: Command, default: int | None, recipe: TranslatedRecipe) -> int:
    """Return the number of devices: the launcher's, else `default`; note how to start on them."""
    launcher = {name: command.given[name][0] for name in ("--num_gpus", "--num_nodes") if name in command.given}
    for name, value in launcher.items():
        if not value.isdecimal() or not int(value):
            raise ConfigError(f"{name} {value}: expected a whole number of at least 1; correct it")
    nodes = int(launcher.get("--num_nodes", 1))
    if "--num_gpus" in launcher:
        count = int(launcher["--num_gpus"])
    elif default:
        if default % nodes:
            raise ConfigError(f"--devices {default}: not a multiple of --num_nodes {nodes}; change it")
        count = default // nodes
    else:
        count = 1
        recipe.notes.append(
            f"{STEPS[command.stage]}: DeepSpeed's launcher uses all devices that it finds; 1 is assumed here. Set "
            "--devices N to translate the global batches"
        )
    options = [*(["--ranks", str(count)] if count > 1 else [])]
    if nodes > 1:
        options += ["--nodes", str(nodes), "--node-rank", "R", "--rendezvous", "FIRST-MACHINE:29400"]
    if recipe.options and options != recipe.options:
        recipe.notes.append(
            f"{STEPS[command.stage]}: uses other devices than the step before; start it with {' '.join(options)}"
        )
    recipe.options = recipe.options or options
    if command.guess:
        others = " and ".join(STEPS[stage] for stage in command.guess)
        recipe.notes.append(
            f"assumed to be {STEPS[command.stage]}; the flags also fit {others}. Paste the path of main.py or of its "
            "script to tell them apart"
        )
    return count * nodes


def _flags(command: Command, devices: int, others: Sequence[Command]) -> CommandFlags:
    """Return all flags of a program, with their values in the command or their defaults."""
    values = {name: _default(row, command.stage) for name, row in load_flags().items() if command.stage in row.of}
    for name, texts in command.given.items():
        row = find_flag(command.stage, name)
        if row:
            values[name] = _given(row, texts, command, kept=bool(others) and row.rule == "models")
    earlier, bases = (
        {one.stage: " ".join(one.given.get(flag, ())) for one in others}
        for flag in ("--output_dir", "--model_name_or_path")
    )
    return CommandFlags(command.stage, values, devices, earlier, bases, alone=not others)


def _default(row: Flag, stage: str) -> FlagValue:
    value = row.of[stage]
    if row.reader and isinstance(value, str):
        value = READERS[row.reader](value)
    shown = " ".join(value) if isinstance(value, list) and row.reader == "names" else row.of[stage]
    text = f"{row.name} (not given)" if value is None else f"{row.name} {shown} (default)"
    return FlagValue(value, text, explicit=False)


def _given(row: Flag, texts: Sequence[str], command: Command, *, kept: bool) -> FlagValue:
    written = command.written[row.name]
    text = " ".join(texts)
    variable = find_shell_variable(text)
    keys = row.keys_of(command.stage)
    if variable and keys and row.rule != "folder" and not kept:
        name = variable.strip("${}`")
        advice = f"put {name}=VALUE before the command" if name.isidentifier() else "replace it by its value"
        raise ConfigError(f"{written}: the shell variable {variable} has no value here; {advice}")
    if not row.reader:
        return FlagValue(True, written, explicit=True)
    if row.reader == "names":
        return FlagValue([*texts], written, explicit=True)
    try:
        return FlagValue(READERS[row.reader](text) if keys else text, written, explicit=True)
    except ValueError as error:
        raise ConfigError(f"{written}: expected {error}; correct it") from error


def _settings(command: Command, given: CommandFlags, recipe: TranslatedRecipe) -> list[Setting]:
    """Return the settings of a command's flags and of DeepSpeed-Chat's fixed behavior; add remarks to the recipe."""
    stage = command.stage
    found = [
        Setting(one.key, one.value, f"as in DeepSpeed-Chat: {one.why}", explicit=False)
        for one in load_implied()
        if stage in one.stages
    ]
    for rule in dict.fromkeys(row.rule for row in load_flags().values() if stage in row.of and row.rule):
        for one in RULES[rule](given):
            (recipe.remarks if isinstance(one, Remark) else found).append(one)  # type: ignore[arg-type]
    for name, value in given.values.items():
        row = load_flags()[name]
        if row.keys and not row.rule and (value.explicit or row.of[stage] is not None):
            read = value.value if row.reader else row.value
            found += [Setting(key, read, value.text, value.explicit) for key in row.keys_of(stage)]
    for name, written in command.written.items():
        of_any = find_flag(stage, name) or find_flag("deepspeed", name)
        if of_any and not of_any.keys:
            recipe.remarks.append(Remark(written, _describe_replacement(of_any)))
    return found


def _describe_replacement(row: Flag) -> str:
    """Return what replaces a flag that has no key."""
    if row.automatic:
        return f"automatic: {row.automatic}"
    if row.nothing:
        return f"nothing: {row.nothing}"
    return (row.option or row.command) + (f" ({row.note})" if row.note else "")


def _merge(found: Sequence[tuple[str, Sequence[Setting]]], recipe: TranslatedRecipe) -> None:
    """Merge the steps into one setting per key: the last one within a step, the first one of several steps."""
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
                    f"start rlhf {stage} separately, with --set {key}={format_scalar(one.value)}"
                )
            elif key in merged and key != SOURCES and one.explicit and one.why != merged[key].why:
                recipe.remarks.append(Remark(one.why, key, "Same as in the step before"))
            merged.setdefault(key, one)
    sources = [(stage, one) for stage, settings in found for one in settings if one.key == SOURCES]
    if len({str(one.value) for _, one in sources}) > 1:
        merged[SOURCES] = Setting(SOURCES, [*_shared(sources)], "--data_path of each step")
        rows = [row for _, one in sources for row in one.value if isinstance(row, dict)]
        own = {row["path"] for row in rows if "stages" in row}  # --sft_only_data_path
        if fewer := [row["path"] for row in merged[SOURCES].value if "stages" in row and row["path"] not in own]:
            recipe.notes.append(
                f"{', '.join(fewer)}: used by some steps only, which have all of its rows there; here the shares of "
                "the other steps are unused"
            )


def _shared(sources: Sequence[tuple[str, Setting]]) -> Iterator[dict[str, Any]]:
    """Yield each source once, with the stages that name it."""
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


def _variable_settings(variables: Mapping[str, str], stages: Sequence[str], recipe: TranslatedRecipe) -> list[Setting]:
    """Return the settings of HL_* variables without a script of the fork; they override flags."""
    options, meanings = to_arguments(variables, stages)
    found = []
    names = {pair.partition(": ")[0]: pair for pair in meanings}
    for option, value in zip(options[::2], options[1::2]):
        if option == "--set":
            key, _, text = value.partition("=")
            found.append(Setting(key, parse_yaml(text), next(name for name in names if f"{key}=" in names[name])))
        else:
            recipe.options += [option, value]
    recipe.remarks += [Remark(*pair.split(": ", 1)) for pair in meanings if "=" not in pair.partition(": ")[2]]
    return found


def _keep_what_differs(recipe: TranslatedRecipe) -> None:
    """Drop settings that are defaults, with a remark if the command has their flag."""
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
            recipe.remarks.append(Remark(setting.why, key, "Same as the default of rlhf"))
    recipe.settings = differs


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


_LINE = 120
_LIST = 60  # characters of a list on one line


def format_translation(recipe: TranslatedRecipe) -> str:
    """Return the recipe as YAML: each line names its flag, and comments at the top name the other flags."""
    lines = [*_format_head(recipe), ""]
    tree: dict[str, Any] = {}
    for key, setting in recipe.settings.items():
        node = tree
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = setting
    return "\n".join([*lines, *_format_section(tree, Config)]) + "\n"


def _format_head(recipe: TranslatedRecipe) -> Iterator[str]:
    steps = ", ".join(f"{STEPS[stage]} ({stage})" for stage in recipe.stages)
    yield f"# DeepSpeed-Chat's {steps}, translated to a recipe of rlhf; each line names its flag."
    options = " ".join(["", *recipe.options])
    names = [""] if recipe.stages == [*STAGES] else [f" {stage}" for stage in recipe.stages]
    for name in names:
        yield f"# Start it: rlhf{name} --config recipe.yaml{options}"
    yield "# Paths are relative to the folder of this file."
    for note in recipe.notes:
        yield from _comment(f"Note: {note}.", "# ")
    if recipe.remarks:
        yield "#"
        yield "# Flags without a line below:"
    groups: dict[str, list[str]] = {}
    for remark in dict.fromkeys(recipe.remarks):
        if remark.group:
            groups.setdefault(remark.group, []).append(f"{remark.flag} ({remark.text})")
        else:
            yield from _comment(f"{remark.flag}: {remark.text}", "#   ")
    for group, remarks in groups.items():
        yield from _comment(f"{group}: {', '.join(remarks)}.", "# ")


def _format_section(tree: Mapping[str, Any], section: Any, depth: int = 0) -> Iterator[str]:
    """Yield the lines of the keys below a section, in the order of the schema."""
    fields = section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else {}
    indent = "  " * depth
    for position, name in enumerate(sorted(tree, key=lambda name: [*fields].index(name) if name in fields else 0)):
        value = tree[name]
        if isinstance(value, Setting):
            yield from _format_setting(name, value, indent)
            continue
        if depth == 0 and position:
            yield ""
        yield f"{indent}{name}:"
        yield from _format_section(value, fields[name].annotation if name in fields else None, depth + 1)


def _format_setting(name: str, setting: Setting, indent: str) -> Iterator[str]:
    value = "null" if setting.value is None else format_scalar(setting.value)
    several = isinstance(setting.value, list) and len(value) > _LIST
    line = f"{indent}{name}:" if several else f"{indent}{name}: {value}"
    if len(line) + len(setting.why) > _LINE:
        yield from _comment(setting.why, f"{indent}# ", deeper=False)
        yield line
    else:
        yield f"{line}  # {setting.why}"
    if several:
        yield from (f"{indent}  - {format_scalar(item)}" for item in setting.value)


def _comment(text: str, mark: str, *, deeper: bool = True) -> list[str]:
    """Return a text as comment lines that start with `mark`."""
    return textwrap.wrap(
        text, _LINE, initial_indent=mark, subsequent_indent=mark + "  " * deeper, break_on_hyphens=False
    )
