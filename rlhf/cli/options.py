"""The options that commands share, each defined once; a command takes them as one `Options`, see `shared`.

They may stand before or after a subcommand: `rlhf --accelerator cpu ppo` is `rlhf ppo --accelerator cpu`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from rlhf.config.loader import TrackedDict, apply_overrides, names_model_or_data
from rlhf.config.schema import EVERY_STAGE, Config, Stage, load_config
from rlhf.config.trust import admit_code
from rlhf.errors import ConfigError
from rlhf.launchers.exit_status import Interrupted
from rlhf.runs.directory import RunDirectory

RunOrModel = Annotated[
    str, typer.Argument(help="Folder of a run or of a model, or a hub name.", metavar="RUN_OR_MODEL")
]
PolicyStage = Annotated[
    Literal["sft", "dpo", "ppo", "distill"] | None,
    typer.Option("--stage", help="Stage of a run. Default: distill, ppo, dpo or sft, the first that is finished."),
]
UseAverage = Annotated[
    bool, typer.Option("--ema", metavar="", help="Use the moving average of the policy's weights (ppo.ema).")
]


@dataclass(frozen=True)
class Options:
    """The command line's options for a run; None if an option is not given, so that the configuration decides."""

    config: Annotated[
        Path | None,
        typer.Option(help="Recipe, a YAML file. Default: the run's own, else the embedded example.", metavar="FILE"),
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Set one key of the recipe: [bold]--set ppo.steps=50[/]. Repeatable.", metavar="KEY=VALUE"
        ),
    ] = None
    accelerator: Annotated[
        str | None, typer.Option(help="Backend to run on; see [bold]rlhf accelerators list[/].", metavar="NAME")
    ] = None
    precision: Annotated[str | None, typer.Option(help="auto, bf16, fp16 or fp32.", metavar="NAME")] = None
    output: Annotated[Path | None, typer.Option(help="Folder of the run.", metavar="DIR")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data order and sampling.", metavar="N")] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            metavar="[=step-N]",
            help="Resume the run in the folder of --output, from its newest checkpoint or from step-N.",
        ),
    ] = False
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", hidden=True, help="The value of --resume=step-N.")
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="Replace the stages in the folder of --output.")
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", metavar="", help="Check everything, show what each stage would do, and stop."),
    ] = False
    ranks: Annotated[int | None, typer.Option(help="Processes to run on this machine.", min=1, metavar="N")] = None
    nodes: Annotated[
        int | None, typer.Option(help="Number of machines; start rlhf on each of them.", min=1, metavar="N")
    ] = None
    node_rank: Annotated[int | None, typer.Option(help="Number of this machine, from 0.", min=0, metavar="R")] = None
    rendezvous: Annotated[
        str | None, typer.Option(help="Address of machine 0, with a free port on it.", metavar="HOST:PORT")
    ] = None
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            metavar="",
            help="Run code that another user could have written, and with --dry-run code of models; needed once.",
        ),
    ] = False
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", metavar="", help="Show warnings and the verdict only; console.log has the rest."),
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", metavar="", help="Show tracebacks, and the output of all ranks.")
    ] = False

    def with_run_recipe(self, stages: Sequence[Stage]) -> Options:
        """Return these options, with the recipe of the run in the folder if none is given.

        If the options name a model or data and replace the whole run, its recipe would not fit.

        Raises:
            ConfigError: a `--set` has a wrong form.
            RunError: a living process writes to the folder.
        """
        if self.config is not None:
            return self
        given = apply_overrides(TrackedDict(), self.overrides or ())
        folder = self.output or given.get("output") or Config().output
        if not isinstance(folder, str | Path):
            return self  # `load` reports the error
        run = RunDirectory(Path(os.path.expanduser(folder)))
        run.recover()
        continued = run.is_continued(stages, overwrite=self.overwrite) or not names_model_or_data(given)
        recipe = run.ensure_recipe() if continued else None
        return replace(self, config=recipe, output=run.path) if recipe else self

    def load_for(self, stages: Sequence[Stage], *, example: bool = True) -> Config:
        """Load the configuration for a command that may run code that it names.

        Args:
            stages: the stages that the command runs.
            example: as for `load`.

        Raises:
            ConfigError: as `load`; or the code is another user's, and `--trust` was never given; or a dry run without
                `--trust` would run it.
        """
        config = self.load(example=example)
        files = [self.config] if self.config else []
        admit_code([config], files, stages, trust=self.trust, dry_run=self.dry_run)
        return config

    def load(self, *, example: bool = True) -> Config:
        """Load the configuration: defaults, then the file, then `--set`, then the options that are keys.

        Args:
            example: without a file, start from the embedded recipe; see `load_config`.

        Raises:
            ConfigError: the file or a value is wrong.
        """
        options = {"precision": self.precision, "output": self.output, "seed": self.seed}
        return load_config(self.config, self.overrides or (), options=options, example=example)


def split_resume(arguments: Sequence[str]) -> list[str]:
    """Write `--resume=step-N` as two options, since an option has a value always or never."""
    split: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        split += [name, "--checkpoint", value] if name == "--resume" and value else [argument]
    return split


RUN = tuple(field.name for field in fields(Options))
_HINTS = get_type_hints(Options, include_extras=True)


def shared(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options `names` after its own parameters; it receives them as `options`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        taken = [name for name in signature.parameters if name != "options"]
        parameters = [signature.parameters[name] for name in taken if name != "context"]

        @report_interruption()
        def command(context: typer.Context, **values: Any) -> None:
            given = values | {"context": context}
            function(options=collect_options(context, names, values), **{name: given[name] for name in taken})

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return with_signature(command, names, parameters)

    return decorate


def with_signature(
    command: Callable[..., None], names: Sequence[str], parameters: Sequence[inspect.Parameter] = ()
) -> Callable[..., None]:
    """Set the signature that Typer reads: a context, the command's `parameters`, and the options `names`."""
    kind = inspect.Parameter.KEYWORD_ONLY
    signature = [
        inspect.Parameter("context", kind, annotation=typer.Context),
        *(parameter.replace(kind=kind) for parameter in parameters),
        *(
            inspect.Parameter(field.name, kind, default=field.default, annotation=_HINTS[field.name])
            for field in fields(Options)
            if field.name in names
        ),
    ]
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    return command


def collect_options(context: typer.Context, names: Sequence[str], values: Mapping[str, Any]) -> Options:
    """Return the options before the subcommand, overridden by those given after it (`values`).

    Raises:
        ConfigError: an option before the subcommand is not among `names`.
    """
    before: Options = context.obj or Options()
    refuse_options(before, names, context.info_name)
    overriding = {name: values[name] for name in names if _is_given(values[name])}
    if before.overrides and "overrides" in overriding:
        overriding["overrides"] = [*before.overrides, *overriding["overrides"]]
    return replace(before, **overriding)


def refuse_options(before: Options, names: Sequence[str], command: str | None) -> None:
    """Raise `ConfigError` if an option before a subcommand is not among its `names`; `--debug` suits every one."""
    for field in fields(Options):
        if field.name not in (*names, "debug") and _is_given(getattr(before, field.name)):
            declared = _HINTS[field.name].__metadata__[0].default  # in an annotation, the option's name stands there
            option = declared if isinstance(declared, str) else f"--{field.name.replace('_', '-')}"
            raise ConfigError(f"{option}: `rlhf {command}` has no such option; leave it out")


def _is_given(value: Any) -> bool:
    return value not in (None, []) and value is not False  # `is not False`: `--seed 0` is given


def join_lines(text: str | None) -> str:
    """Return help text with each paragraph on one line, since Typer keeps line breaks at any terminal width."""
    return inspect.cleandoc(text or "").replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n")


@contextmanager
def report_interruption() -> Iterator[None]:
    """Turn Ctrl-C into an error with a message; Typer would end without one."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted("nothing is half-written") from error


def require_folder(option: str, file: Path | None) -> None:
    """Refuse a file whose folder is missing, before the work whose result it would receive.

    Raises:
        ConfigError: its folder is missing.
    """
    if file and not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} {file}: its folder is missing; create it, or name another file")


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Parse the stages of `--stages`, such as `sft,reward`.

    Raises:
        ConfigError: a stage is unknown, is named twice, or stands before one that runs earlier.
    """
    names = [name.strip() for name in text.split(",")]
    stages = sort_stages(names, f"--stages {text}")
    if list(stages) != names:
        raise ConfigError(f"--stages {text}: each stage runs once, and in this order: {','.join(stages)}; write that")
    return stages


def sort_stages(names: Sequence[str], option: str) -> tuple[Stage, ...]:
    """Return the stages that an option names, each once, in the order in which they run.

    Raises:
        ConfigError: a stage is unknown.
    """
    for name in names:
        if name not in EVERY_STAGE:
            raise ConfigError(f"{option}: no stage {name!r}; use some of {', '.join(EVERY_STAGE)}")
    return tuple(stage for stage in EVERY_STAGE if stage in names)
