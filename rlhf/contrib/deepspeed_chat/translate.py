"""Translate command lines of DeepSpeed-Chat into recipes of rlhf that train in the same way.

The recipe says what each key becomes and why, and what became of every flag without a key. It has those defaults of
DeepSpeed-Chat that differ from the defaults of rlhf.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from rlhf.config.dump import format_scalar
from rlhf.config.schema import STAGES, Config, build_config, share_of
from rlhf.contrib.deepspeed_chat.command import Command, find_shell_variable, parse_commands
from rlhf.contrib.deepspeed_chat.rules import RULES, CommandFlags, FlagValue, Note, Remark, Setting
from rlhf.contrib.deepspeed_chat.tables import READERS, STEPS, Flag, find_flag, load_flags, load_implied
from rlhf.contrib.deepspeed_chat.variables import PREFIX, output_folder, translate_variables
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
    commands, assigned = parse_commands(texts, environment)
    if not commands and not any(name.startswith(PREFIX) for name in assigned):
        raise ConfigError("--from-deepspeed-chat: no command found; paste a `deepspeed main.py --...`")
    stages = [command.stage for command in commands]
    if twice := next((stage for stage in stages if stages.count(stage) > 1), None):
        raise ConfigError(f"--from-deepspeed-chat: {STEPS[twice]} is given more than once; paste it once")
    commands.sort(key=lambda command: [*STEPS].index(command.stage))
    recipe = TranslatedRecipe(stages=[command.stage for command in commands] or [*STAGES])
    steps: list[tuple[str, list[Setting]]] = []
    for command in commands:
        count, nodes = _count_devices(command, devices, recipe)
        flags = _collect_flags(command, count, nodes, [other for other in commands if other is not command])
        settings = _apply_rules(command, flags, recipe)
        steps.append((command.stage, settings + _apply_variables(command.variables, [command.stage], recipe)))
    if not commands:
        steps.append((STAGES[0], _apply_variables(assigned, STAGES, recipe)))
    if assumed := [STEPS[command.stage] for command in commands if not devices and not _names_devices(command)]:
        recipe.notes.append(
            f"{', '.join(assumed)}: DeepSpeed's launcher uses all devices that it finds; 1 is assumed here. Set "
            "--devices N to translate the global batches"
        )
    _merge(steps, recipe)
    if "output" not in recipe.settings and not {"--output", PREFIX} & {*recipe.options}:
        folders = [" ".join(folder) for command in commands if (folder := command.given.get("--output_dir"))]
        if folders:
            recipe.notes.append(
                f"output is not set, because --output_dir is {', '.join(folders)}: the run is written to "
                f"{Config().output}, or to the folder of --output DIR"
            )
    _drop_defaults(recipe)
    return recipe


def _names_devices(command: Command) -> bool:
    return "--num_gpus" in command.given or _read_include(command) is not None


def _read_include(command: Command) -> list[int] | None:
    """Return the number of devices on each machine of `--include host:0,1@host:2`; None if it does not name them."""
    hosts = " ".join(command.given.get("--include", ())).split("@")
    counts = [len([slot for slot in host.partition(":")[2].split(",") if slot]) for host in hosts]
    return counts if all(counts) else None


def _count_devices(command: Command, default: int | None, recipe: TranslatedRecipe) -> tuple[int, int]:
    """Return the number of devices and of machines: the launcher's, else `default`; note how to start on them."""
    launcher = {name: command.given[name][0] for name in ("--num_gpus", "--num_nodes") if name in command.given}
    for name, value in launcher.items():
        if not value.isdecimal() or not int(value):
            raise ConfigError(f"{name} {value}: expected a whole number of at least 1; correct it")
    nodes = int(launcher.get("--num_nodes", 1))
    if "--num_gpus" in launcher:
        count = int(launcher["--num_gpus"])
    elif included := _read_include(command):
        count, nodes = included[0], len(included)
        if len({*included}) > 1:
            raise ConfigError(
                f"{command.written['--include']}: other numbers of devices on the machines; include as many on each"
            )
    elif default:
        if default % nodes:
            raise ConfigError(f"--devices {default}: not a multiple of --num_nodes {nodes}; change it")
        count = default // nodes
    else:
        count = 1
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
    return count * nodes, nodes


def _collect_flags(command: Command, devices: int, nodes: int, others: Sequence[Command]) -> CommandFlags:
    """Return all flags of a program, with their values in the command or their defaults."""
    values = {
        name: _read_given(row, command, is_alone=not others) if name in command.given else _read_default(row, command)
        for name, row in load_flags().items()
        if command.stage in row.of
    }
    earlier = {other.stage: " ".join(other.given.get("--output_dir", ())) for other in others}
    adapter_rate = _has_adapter_rate(command, others)
    return CommandFlags(command.stage, values, devices, nodes, earlier, not others, adapter_rate)


_ADAPTER_RATE = "2023-08-14"
"""The day when DeepSpeed-Chat got a learning rate for adapters."""


def _has_adapter_rate(command: Command, others: Sequence[Command]) -> bool | None:
    """Return whether a command's version has a learning rate for adapters; None if nothing tells.

    Its main.py tells, if it is here. Otherwise flags do that older versions do not have, or newer ones.
    """
    if command.defaults is not None:
        return any("lora_learning_rate" in name for name in command.defaults)
    since: set[str] = set()
    until: set[str] = set()
    for each in (command, *others):
        for name, written in each.written.items():
            if row := find_flag(each.stage, name):
                is_renamed = written.split()[0] in row.was
                (until if is_renamed else since).add(row.since)
                until.add(row.until)
    if any(day >= _ADAPTER_RATE for day in since):
        return True
    return False if until - {""} else None


def _read_default(row: Flag, command: Command) -> FlagValue:
    value = default = (command.defaults or {}).get(row.name, row.of[command.stage])
    if row.reader and isinstance(default, str):
        value = READERS[row.reader](default)
    shown = " ".join(default) if isinstance(default, list) else default
    text = f"{row.name} (not given)" if value is None else f"{row.name} {shown} (default)"
    return FlagValue(value, text, explicit=False)


def _read_given(row: Flag, command: Command, *, is_alone: bool) -> FlagValue:
    texts, written = command.given[row.name], command.written[row.name]
    text = " ".join(texts)
    variable = find_shell_variable(text)
    keys = row.keys_of(command.stage)
    # The models and the folder of a step may be variables: other steps of the recipe tell what they are.
    if variable and keys and row.rule != "folder" and (is_alone or row.rule != "models"):
        name = variable.strip("${}`")
        advice = f"put {name}=VALUE before the command" if name.isidentifier() else "replace it by its value"
        raise ConfigError(f"{written}: the shell variable {variable} has no value here; {advice}")
    value: Any = text
    if not row.reader:
        value = True
    elif row.reader == "names":
        value = [*texts]
    elif keys:
        try:
            value = READERS[row.reader](text)
        except ValueError as error:
            raise ConfigError(f"{written}: expected {error}; correct it") from error
    return FlagValue(value, written, explicit=True)


def _apply_rules(command: Command, flags: CommandFlags, recipe: TranslatedRecipe) -> list[Setting]:
    """Return the settings of a command's flags and of DeepSpeed-Chat's fixed behavior; add remarks to the recipe."""
    stage = command.stage
    settings = []
    for implied in load_implied():
        if stage in implied.stages:
            value = (command.defaults or {}).get(implied.constant, implied.value)
            why = f"{implied.constant} in ppo_trainer.py" if value != implied.value else implied.why
            settings.append(Setting(implied.key, value, f"as in DeepSpeed-Chat: {why}", explicit=False))
    rows = {name: load_flags()[name] for name in flags.values}
    for rule in dict.fromkeys(row.rule for row in rows.values() if row.rule):
        for result in RULES[rule](flags):
            if isinstance(result, Remark):
                recipe.remarks.append(result)
            elif isinstance(result, Note):
                recipe.notes.append(result.text)
            else:
                settings.append(result)
    for name, row in rows.items():
        flag = flags.values[name]
        if not row.rule and (flag.explicit or row.of[stage] is not None):
            value = flag.value if row.reader else row.value
            settings += [Setting(key, value, flag.text, flag.explicit) for key in row.keys_of(stage)]
    for name, written in command.written.items():
        known = find_flag(stage, name) or find_flag("deepspeed", name)
        if known and not known.keys:
            recipe.remarks.append(Remark(written, _describe_replacement(known)))
    return settings


def _describe_replacement(row: Flag) -> str:
    """Return what replaces a flag that has no key."""
    if row.automatic:
        return f"automatic: {row.automatic}"
    if row.nothing:
        return f"nothing: {row.nothing}"
    return (row.option or row.command) + (f" ({row.note})" if row.note else "")


def _merge(steps: Sequence[tuple[str, Sequence[Setting]]], recipe: TranslatedRecipe) -> None:
    """Merge the steps into one setting per key: the last one within a step, the first one of several steps."""
    merged = recipe.settings
    for stage, settings in steps:
        for key, setting in {setting.key: setting for setting in settings}.items():
            first = merged.setdefault(key, setting)
            if first is setting or key == SOURCES:
                continue
            if first.value == setting.value:
                if setting.explicit and setting.why != first.why:
                    recipe.remarks.append(Remark(setting.why, key, "Same as in the step before"))
            elif setting.explicit or first.explicit:
                value = format_scalar(setting.value)
                recipe.notes.append(
                    f"{key} is {format_scalar(first.value)} ({first.why}); {STEPS[stage]} has {value} ({setting.why}): "
                    f"start rlhf {stage} separately, with --set {shlex.quote(f'{key}={value}')}"
                )
    sources = [(stage, setting) for stage, settings in steps for setting in settings if setting.key == SOURCES]
    if len({str(setting.value) for _, setting in sources}) > 1:
        merged[SOURCES] = Setting(SOURCES, [*_share_sources(sources)], "--data_path of each step")
        rows = [row for _, setting in sources for row in setting.value if isinstance(row, dict)]
        sft_only = {row["path"] for row in rows if "stages" in row}  # --sft_only_data_path
        paths = [row["path"] for row in merged[SOURCES].value if "stages" in row and row["path"] not in sft_only]
        if paths:
            recipe.notes.append(
                f"{', '.join(paths)}: used by some steps only. There, the shares of the other steps are unused; here, "
                "these steps divide all rows, so they have more of them than there"
            )


def _share_sources(sources: Sequence[tuple[str, Setting]]) -> Iterator[dict[str, Any]]:
    """Yield each source once, with the stages that name it."""
    by_path: dict[str, dict[str, Any]] = {}
    for stage, setting in sources:
        for source in setting.value:
            row = {"path": source} if isinstance(source, str) else source
            merged = by_path.setdefault(row["path"], {"stages": []})
            merged["stages"] += [name for name in row.get("stages", [_share(stage)]) if name not in merged["stages"]]
            by_path[row["path"]] = row | merged
    steps = {_share(stage) for stage, _ in sources}
    for row in by_path.values():
        yield {name: value for name, value in row.items() if name != "stages" or set(value) != steps}


def _share(stage: str) -> str:
    return share_of(stage)  # type: ignore[arg-type]


def _apply_variables(variables: Mapping[str, str], stages: Sequence[str], recipe: TranslatedRecipe) -> list[Setting]:
    """Return the settings of HL_* variables without a script of the fork; they override flags."""
    settings = []
    for variable in translate_variables(variables, stages):
        recipe.options += variable.options
        settings += [Setting(key, value, variable.text) for key, value in variable.settings.items()]
        if not variable.settings:
            recipe.remarks.append(Remark(variable.text, variable.meaning))
    if output := output_folder(variables):
        recipe.options += ["--output", output]
    return settings


def _drop_defaults(recipe: TranslatedRecipe) -> None:
    """Drop settings that are defaults of both; those of flags in the command stay, to be compared with it."""
    known = {key: setting.value for key, setting in recipe.settings.items()}
    values = build_config(_nest(known), source="these flags").model_dump()
    defaults = Config().model_dump()

    def is_default(key: str) -> bool:
        default = _OF_ENGINE.get(key.rpartition(".")[2]) if key.startswith("roles.") else _get(defaults, key)
        return bool(_get(values, key) == default)

    recipe.settings = {
        key: setting for key, setting in recipe.settings.items() if setting.explicit or not is_default(key)
    }


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of keys with dots as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        node = tree
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _get(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


_LINE = 120
_LIST = 60  # characters of a list on one line


def format_translation(recipe: TranslatedRecipe) -> str:
    """Return the recipe as YAML: each line names its flag, and comments at the top name the other flags."""
    return "\n".join([*_format_head(recipe), "", *_format_section(_nest(recipe.settings), Config)]) + "\n"


def _format_head(recipe: TranslatedRecipe) -> Iterator[str]:
    steps = ", ".join(f"{STEPS[stage]} ({stage})" for stage in recipe.stages)
    yield f"# DeepSpeed-Chat's {steps}, translated to a recipe of rlhf; each line names its flag."
    options = f" {shlex.join(recipe.options)}" if recipe.options else ""
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
