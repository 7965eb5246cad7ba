"""Processes that open the device: `python -m rlhf.certify.tasks TASK REPORT ARGUMENTS`, the arguments as a JSON list.

A task publishes facts while it runs, so that they survive a crash; an exception becomes one line in the same file.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerators
from rlhf.certify import fixed_state
from rlhf.certify.environment import record_backend
from rlhf.certify.processes import CheckFailed
from rlhf.config.schema import STAGES, Config, Stage, load_config
from rlhf.runs.directory import RunDirectory
from rlhf.utils.atomic_io import atomic_write_json

if TYPE_CHECKING:
    from accelerators import Accelerator
    from rlhf.trainers.context import StageContext
    from rlhf.trainers.trainer import Trainer

Publish = Callable[[dict[str, Any]], None]
Settings = Mapping[str, Any]

_STEP_RECORD = re.compile(
    r"(\w+_)?seconds|tflops|peak_share|peak_memory|compilations|skipped_steps|kl|tokens_per_second"
)
"""Metrics of PPO's steps that are reported."""


def record_environment(publish: Publish, name: str) -> None:
    """Publish what the backend states about the device, without opening it."""
    publish(record_backend(_select(name)))


def list_exceptions(publish: Publish, name: str) -> None:
    """Publish the failures that the backend declares as known."""
    publish({"exceptions": [vars(exception) for exception in _select(name).exceptions()]})


def list_other_modes(publish: Publish, name: str) -> None:
    """Publish the environment variables of the backend's other modes."""
    accelerator = _select(name)
    accelerator.bind(0)
    publish({mode: dict(variables) for mode, variables in accelerator.other_modes().items()})


def compare_with_cpu(publish: Publish, name: str, comparison: str, full: bool) -> None:
    """Run one comparison of `accelerators.testing`."""
    from accelerators import testing

    accelerator = _select(name)
    accelerator.bind(0)
    publish(testing.compare_with_cpu(comparison, accelerator, full=full))


def compare_operators(publish: Publish, name: str) -> None:
    """Repeat every recorded operator on the device."""
    from accelerators import testing

    accelerator = _select(name)
    accelerator.bind(0)
    publish(testing.compare_operators(accelerator, publish))


def compare_operations(publish: Publish, name: str) -> None:
    """Check every implementation of every operation on the device."""
    from accelerators import testing

    accelerator = _select(name)
    accelerator.bind(0)
    publish(testing.compare_operations(accelerator))


def compare_decoding(publish: Publish, name: str, full: bool) -> None:
    """Compare recorded steps of generation with plain ones."""
    selection = accelerators.select(name, environ={})
    selection.export(os.environ)
    from rlhf.certify import decoding
    from rlhf.engine import distributed

    with distributed.start_process_group(selection) as accelerator:
        publish(decoding.compare_decoding(accelerator, full=full))


def train_stages(publish: Publish, name: str, output: str, settings: Settings) -> None:
    """Run the three stages in one process; publish the memory that each leaves, and the parts that ran uncompiled."""
    config = _configure(name, output, settings)
    from rlhf.trainers import run as launch

    with launch.open_run(config, STAGES) as (resolved, accelerator):
        from rlhf.trainers import pipeline  # imports DeepSpeed, which `open_run` has configured for the device

        separate = accelerator.host_device() != accelerator.device()
        facts: dict[str, Any] = {"separate memory": separate, "start": _measure_memory(accelerator)}
        for stage in STAGES:
            pipeline.run(resolved, accelerator, RunDirectory(config.output), (stage,))
            facts |= {stage: _measure_memory(accelerator), "fallbacks": accelerator.fallbacks}
            publish(facts)


def train_adapters(publish: Publish, name: str, output: str, settings: Settings, steps: int) -> None:
    """Take steps of fine-tuning with LoRA; publish which weights have changed."""
    with _open_stage(_configure(name, output, settings), "sft") as (trainer, context):
        (engine,) = trainer.engines.values()
        network = engine.module
        host = context.accelerator.host_device()
        before = {key: weight.detach().to(host, copy=True) for key, weight in network.named_parameters()}
        for _ in _take_steps(trainer, context, steps):
            pass
        changed = {
            key: bool((weight.detach().to(host) != before[key]).any()) for key, weight in network.named_parameters()
        }
        adapters = {key for key, weight in network.named_parameters() if weight.requires_grad}
        publish(
            {
                "adapters": len(adapters),
                "frozen": len(changed) - len(adapters),
                "unchanged adapters": sorted(key for key in adapters if not changed[key]),
                "changed frozen weights": sorted(key for key in changed if changed[key] and key not in adapters),
            }
        )


def save_in_the_middle(publish: Publish, name: str, output: str, settings: Settings, saved: int, steps: int) -> None:
    """Take steps of fine-tuning, and save a checkpoint after some of them; publish the losses of all."""
    losses: list[float] = []
    with _open_stage(_configure(name, output, settings), "sft") as (trainer, context):
        from rlhf.trainers import loop  # imports torch, whose environment `_open_stage` has set

        for metrics in _take_steps(trainer, context, steps):
            losses.append(metrics["loss"])
            if len(losses) == saved:
                loop.save_checkpoint(trainer, context, saved)
        publish({"losses": losses})


def train_until_killed(publish: Publish, name: str, output: str, settings: Settings, saved: int, killed: int) -> None:
    """Take steps of fine-tuning, save a checkpoint after some of them, and end as by the system's SIGKILL."""
    with _open_stage(_configure(name, output, settings), "sft") as (trainer, context):
        from rlhf.trainers import loop

        for step, _ in enumerate(_take_steps(trainer, context, killed), start=1):
            if step == saved:
                loop.save_checkpoint(trainer, context, step)
        os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(publish: Publish, name: str, output: str, settings: Settings, before: int, steps: int) -> None:
    """Take steps of fine-tuning, and fill the memory after some of them; publish the message and the losses of all."""
    losses: list[float] = []
    with _open_stage(_configure(name, output, settings), "sft") as (trainer, context):
        from rlhf.errors import OutOfMemory
        from rlhf.trainers.oom import translate_stage_errors

        facts: dict[str, Any] = {"precision": context.precision.name, "recognized": False}
        for metrics in _take_steps(trainer, context, steps):
            losses.append(metrics["loss"])
            publish(facts | {"losses": losses})
            if len(losses) == before:
                try:
                    with translate_stage_errors(context):
                        facts["message"] = _fill_memory(context.accelerator)
                except OutOfMemory as error:
                    facts |= {"recognized": True, "message": str(error)}
                except Exception as error:
                    facts["message"] = accelerators.describe_error(error)
                gc.collect()
                context.accelerator.empty_cache()
        publish(facts | {"losses": losses})


def _fill_memory(accelerator: Accelerator) -> str:
    """Allocate more than the device has left; one that shares the host's is asked for more than any host has.

    In one block, so that a simulated device refuses it before the host's memory is full.
    """
    import torch

    separate = accelerator.host_device() != accelerator.device()
    size = accelerator.memory().total if separate else 2**50
    torch.empty(size, dtype=torch.uint8, device=accelerator.device()).fill_(1)
    accelerator.synchronize()
    return f"a block of {size:,} bytes was allocated without an error"


def watch_steps(publish: Publish, name: str, output: str, stage: Stage, settings: Settings, steps: int) -> None:
    """Take steps of a stage; publish memory and compilations after each."""
    records: list[dict[str, Any]] = []
    with _open_stage(_configure(name, output, settings), stage) as (trainer, context):
        for _ in _take_steps(trainer, context, steps):
            accelerator = context.accelerator
            records.append({"memory": accelerator.memory().allocated, "compilations": accelerator.compilations()})
            publish({"steps": records})


def save_random_models(publish: Publish, name: str, folders: Mapping[str, str], shape: Settings) -> None:
    """Save a policy and a reward model of a shape, with random weights and the embedded tokenizer; opens no device."""
    accelerators.select(name, environ={}).export(os.environ)  # torch may import the vendor's software
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    from rlhf.data.toy_world import build_world_tokenizer

    tokenizer = build_world_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    # transformers takes minutes to draw a billion numbers on the host. Each weight repeats these, whose count is prime.
    numbers = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).mul(0.02).to(torch.bfloat16)
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        folder = folders["actor" if kind is AutoModelForCausalLM else "reward_model"]
        with torch.device("meta"):
            model = kind.from_config(LlamaConfig(**shape, **special, num_labels=1), dtype=torch.bfloat16)
        model.to_empty(device=numbers.device)
        model.tie_weights()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:  # of a norm
                    weight.fill_(1)
                else:
                    weight.copy_(numbers.repeat(weight.numel() // len(numbers) + 1)[: weight.numel()].view_as(weight))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def take_ppo_steps(publish: Publish, name: str, output: str, settings: Settings, steps: int) -> None:
    """Take steps of PPO; publish each step's seconds by phase."""
    records = []
    with _open_stage(_configure(name, output, settings), "ppo") as (trainer, context):
        parameters = {role: engine.parameter_counts for role, engine in trainer.engines.items()}
        for metrics in _take_steps(trainer, context, steps):
            records.append({key: value for key, value in metrics.items() if _STEP_RECORD.fullmatch(key)})
            facts = {"precision": context.precision.name, "fallbacks": context.accelerator.fallbacks}
            publish({"parameters": parameters, **facts, "steps": records})


def write_fixed_state(publish: Publish, name: str, folder: str) -> None:
    """Write the state from which the golden numbers start; publish the precisions of each stage. Opens no device."""
    accelerators.select(name, environ={}).export(os.environ)  # torch may import the vendor's software
    from rlhf.certify.fixed_state import write_state
    from rlhf.certify.golden import read_golden

    write_state(Path(folder))
    publish({"stages": {stage: list(right.bands) for stage, right in read_golden().items()}})


def compare_with_golden(publish: Publish, name: str, folder: str, stage: Stage, precision: str, steps: int) -> None:
    """Take a stage's steps from the fixed state, with the golden completions; publish how they compare."""
    with fixed_state.open_stage(name, Path(folder), stage, precision) as side:
        from rlhf.certify.verdicts import compare_steps

        publish(compare_steps(side, stage, precision, steps))


def compare_draws(publish: Publish, name: str, folder: str, precision: str, steps: int) -> None:
    """Take PPO's steps with completions that the device draws; publish how these compare."""
    with fixed_state.open_stage(name, Path(folder), "ppo", precision) as side:
        from rlhf.certify.verdicts import compare_draws

        publish(compare_draws(side, precision, steps))


def compare_captured(publish: Publish, name: str, folder: str, precision: str) -> None:
    """Take PPO's first step recorded or compiled, and operator by operator; publish how these compare."""
    with fixed_state.open_stage(name, Path(folder), "ppo", precision) as side:
        from rlhf.certify.verdicts import compare_captured

        publish(compare_captured(side, Path(folder), precision))


@contextmanager
def _open_stage(config: Config, stage: Stage) -> Iterator[tuple[Trainer, StageContext]]:
    """Set up a stage whose steps the block takes itself."""
    from rlhf.trainers import run as launch

    with launch.open_run(config, (stage,)) as (resolved, accelerator):
        from rlhf.trainers import loop, pipeline
        from rlhf.trainers.oom import translate_stage_errors

        directory = RunDirectory(config.output)
        with (
            pipeline.stage_context(stage, resolved, accelerator, directory) as context,
            translate_stage_errors(context),
        ):
            pipeline.log_plan(context)
            trainer = pipeline.build_trainer(context)
            loop.resume_or_seed(trainer, context)
            yield trainer, context


def _take_steps(trainer: Trainer, context: StageContext, steps: int) -> Iterator[dict[str, float]]:
    """Take steps, and yield and record the metrics of each; they are finite."""
    from rlhf.trainers import loop

    for index in range(steps):
        with loop.measure_step(trainer, context, index) as metrics:
            metrics |= trainer.step(index)
        context.recorder.log(index + 1, metrics)
        context.commit()
        yield metrics


def _measure_memory(accelerator: Accelerator) -> dict[str, int]:
    """Return the memory in use, and the bytes of all parameters that are alive: of finished stages, there is none."""
    import torch

    gc.collect()
    accelerator.empty_cache()
    # Not by isinstance, which would import what lazy modules stand for.
    alive = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Parameter)]
    memory = accelerator.memory()
    return {
        "allocated": memory.allocated,
        "peak": memory.peak,
        "parameters": sum(parameter.numel() * parameter.element_size() for parameter in alive),
    }


def _configure(name: str, output: str, settings: Settings) -> Config:
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_config(None, overrides, options={"output": output, "accelerator": name})


def _select(name: str) -> Accelerator:
    selection = accelerators.select(name, environ={})
    selection.export(os.environ)
    return selection.create()


TASKS: Mapping[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        record_environment,
        list_exceptions,
        list_other_modes,
        compare_with_cpu,
        compare_operators,
        compare_operations,
        compare_decoding,
        train_stages,
        train_adapters,
        save_in_the_middle,
        train_until_killed,
        run_out_of_memory,
        watch_steps,
        save_random_models,
        take_ppo_steps,
        write_fixed_state,
        compare_with_golden,
        compare_draws,
        compare_captured,
    )
}


def main() -> None:
    """Run the task of the command line."""
    from rlhf.launchers.exit_status import ExitStatus
    from rlhf.reporting import verbosity

    task, report, arguments = sys.argv[1:]
    verbosity.configure_logging(debug=False)
    document: dict[str, Any] = {}

    def publish(facts: dict[str, Any]) -> None:
        document["facts"] = facts
        atomic_write_json(Path(report), document)

    try:
        TASKS[task](publish, *json.loads(arguments))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        if isinstance(error, CheckFailed):
            document["facts"] = error.facts
        expected = isinstance(error, (CheckFailed, AssertionError))
        line = str(error) if expected else ExitStatus.summarize(error).message
        document["error"] = " ".join(line.split()) or type(error).__name__
        document["refused"] = isinstance(error, accelerators.AcceleratorError)
        atomic_write_json(Path(report), document)
        sys.exit(1)


if __name__ == "__main__":
    main()
