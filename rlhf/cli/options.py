"""The options that commands share, each defined once.

They may stand before or after a subcommand: `rlhf --accelerator cpu ppo` is `rlhf ppo --accelerator cpu`.
A command takes them as one `Options`; see `shared`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rlhf.config.loader import TrackedDict, apply_overrides, names_model_or_data
from rlhf.config.schema import EVERY_STAGE, Config, Stage, load_config
from rlhf.errors import ConfigError
from rlhf.launchers.exit_status import Interrupted
from rlhf.runs.directory import RunDirectory


@dataclass(frozen=True)
class Options:
    """The command line's options for a run; None if one is not given and the config decides."""

    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of settings. Without: the run's own, or the embedded example.", metavar="FILE"),
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Set one key, above the file: [bold]--set ppo.steps=50[/]. Repeatable.", metavar="KEY=VALUE"
        ),
    ] = None
    accelerator: Annotated[
        str | None, typer.Option(help="Backend to run on; see [bold]rlhf accelerators list[/].", metavar="NAME")
    ] = None
    precision: Annotated[str | None, typer.Option(help="auto, bf16, fp16 or fp32.", metavar="NAME")] = None
    output: Annotated[Path | None, typer.Option(help="Folder of the run.", metavar="DIR")] = None
    seed: Annotated[int | None, typer.Option(help="Decides weights, data order and sampling.", metavar="N")] = None
    resume: Annotated[bool, typer.Option("--resume", metavar="", help="Continue the run in the folder.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace the stages in the folder.")] = (
        False
    )
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", metavar="", help="Check everything, show what each stage would do, and stop."),
    ] = False
    ranks: Annotated[int | None, typer.Option(help="Processes to run on this machine.", min=1, metavar="N")] = None
    nodes: Annotated[
        int | None, typer.Option(help="Machines of the run; start rlhf on each of them.", min=1, metavar="N")
    ] = None
    node_rank: Annotated[int | None, typer.Option(help="Which of them this is, from 0.", min=0, metavar="R")] = None
    rendezvous: Annotated[
        str | None, typer.Option(help="Where they meet: machine 0, and a free port there.", metavar="HOST:PORT")
    ] = None
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show tracebacks, and what all ranks print.")] = (
        False
    )

    def with_run_recipe(self, stages: Sequence[Stage]) -> Options:
        """Return these options, with the recipe of the run in the folder if none is given.

        If the options name a model or data and replace the whole run, its recipe would not fit.

        Raises:
            ConfigError: a `--set` is not of its form.
            RunError: a living process writes to the folder.
        """
        if self.config is not None:
            return self
        given = apply_overrides(TrackedDict(), self.overrides or ())
        folder = self.output or given.get("output") or Config().output
        if not isinstance(folder, str | Path):
            return self  # `load` says what is wrong
        run = RunDirectory(Path(os.path.expanduser(folder)))
        run.recover()
        goes_on = run.is_continued(stages, overwrite=self.overwrite) or not names_model_or_data(given)
        recipe = run.ensure_recipe() if goes_on else None
        return replace(self, config=recipe, output=run.path) if recipe else self

    def load(self, *, example: bool = True) -> Config:
        """Load the configuration: defaults, then the file, then `--set`, then the options that are keys.

        Args:
            example: without a file, start from the embedded recipe; see `load_config`.

        Raises:
            ConfigError: the file or a value is wrong.
        """
        options = {"precision": self.precision, "output": self.output, "seed": self.seed}
        return load_config(self.config, self.overrides or (), options=options, example=example)


RUN = tuple(field.name for field in fields(Options))
SETTINGS = ("config", "overrides", "precision", "output", "seed", "debug")


def shared(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options `names` after its own parameters; it receives them as `options`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = {
            name: parameter
            for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
            if name not in {"context", "options"}
        }

        @report_interruption()
        def command(context: typer.Context, **values: Any) -> None:
            function(context, collect_options(context, names, values), **{name: values[name] for name in own})

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return with_signature(command, names, own.values())

    return decorate


def with_signature(
    command: Callable[..., None], names: Sequence[str], own: Iterable[inspect.Parameter] = ()
) -> Callable[..., None]:
    """Set the signature that Typer reads: a context, a command's `own` parameters, and the options `names`."""
    hints = get_type_hints(Options, include_extras=True)
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    parameters += [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(Options)
        if field.name in names
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def collect_options(context: typer.Context, names: Sequence[str], values: Mapping[str, Any]) -> Options:
    """Return the options that stand before the subcommand, overridden by those of its `values` that are given."""
    before: Options = context.obj or Options()
    given = {name: values[name] for name in names if _is_given(values[name])}
    if before.overrides and "overrides" in given:
        given["overrides"] = [*before.overrides, *given["overrides"]]
    return replace(before, **given)


@contextmanager
def report_interruption() -> Iterator[None]:
    """Turn Ctrl-C into an error with a message; Typer would end without one."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted("nothing is half-written") from error


def stages_of(text: str) -> tuple[Stage, ...]:
    """Parse the stages that `--stages` names, such as `sft,reward`.

    Raises:
        ConfigError: a name is no stage's, stands there twice, or before a stage that runs earlier.
    """
    names = [name.strip() for name in text.split(",")]
    stages = tuple(stage for stage in EVERY_STAGE if stage in names)
    for name in names:
        if name not in EVERY_STAGE:
            raise ConfigError(f"--stages {text}: no stage {name!r}; use some of {', '.join(EVERY_STAGE)}")
    if list(stages) != names:
        raise ConfigError(f"--stages {text}: each stage runs once, and in this order: {','.join(stages)}; write that")
    return stages


def _is_given(value: Any) -> bool:
    """Return whether an option is given; `--seed 0` is, although 0 == False."""
    return value is not None and value is not False and value != []
