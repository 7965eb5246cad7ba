"""The processes of the conformance kit: `python -m accelerators.testing.worker TASK REPORT ARGUMENTS...`.

A task writes its results to the file REPORT as JSON, and an exception as one line. This module does not import torch,
because some tasks check that.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

import accelerators
from accelerators import AcceleratorSpec, hookspecs

if TYPE_CHECKING:
    from accelerators import Accelerator

Publish = Callable[[Any], None]


class UnboundError(Exception):
    """The backend has no device for this rank."""


def offers(point: EntryPoint) -> list[AcceleratorSpec]:
    """Return the backends of one plugin, as the registry does."""
    plugins = pluggy.PluginManager(hookspecs.PROJECT)
    plugins.add_hookspecs(hookspecs)
    plugins.register(point.load())
    return [spec for answer in plugins.hook.rlhf_accelerators() for spec in answer]


def discovery(publish: Publish, point: str, value: str) -> None:
    """Load a plugin and call its hook; publish {"torch": where torch was imported, or null}."""
    entry_point = EntryPoint(point, value, hookspecs.ENTRY_POINT_GROUP)
    entry_point.load()
    if "torch" in sys.modules:
        publish({"torch": f"importing {value}"})
        return
    offers(entry_point)
    publish({"torch": "the hook rlhf_accelerators" if "torch" in sys.modules else None})


def probe(publish: Publish, point: str, value: str, name: str) -> None:
    """Probe, then use the device in a forked child; publish {"seconds", "devices", "torch", "child": error or null}."""
    specs = offers(EntryPoint(point, value, hookspecs.ENTRY_POINT_GROUP))
    (spec,) = (spec for spec in specs if spec.name == name)
    imported = "torch" in sys.modules  # by the discovery, which has a separate check
    start = time.monotonic()
    probed = spec.probe()
    seconds = time.monotonic() - start
    torch = not imported and "torch" in sys.modules
    report: dict[str, Any] = {"seconds": seconds, "devices": probed.devices, "torch": torch, "child": None}
    publish(report)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _compute(name)
            os._exit(0)
        except BaseException as error:
            os.write(writer, _line(error).encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        message = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        publish(report | {"child": message or f"it ended with exit code {code}"})


def collectives(publish: Publish, name: str) -> None:
    """Publish the results of each collective on this rank of two."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    accelerator = _created(name)
    try:
        device = accelerator.bind(rank)
    except Exception as error:
        raise UnboundError(_line(error)) from error
    dist.init_process_group(accelerator.dist_backend())
    total = torch.full((4,), rank + 1.0, device=device)
    dist.all_reduce(total)
    parts = [torch.zeros(2, device=device) for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), rank + 1.0, device=device))
    sent = torch.full((3,), 10.0 * rank, device=device)
    dist.broadcast(sent, src=1)
    on_host = torch.full((2,), rank + 1.0)
    if accelerator.collectives_on_host():
        dist.all_reduce(on_host)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    publish(
        {
            "all_reduce": total.tolist(),
            "all_gather": torch.cat(parts).tolist(),
            "broadcast": sent.tolist(),
            "all_gather_object": objects,
        }
        | ({"all_reduce on the host": on_host.tolist()} if accelerator.collectives_on_host() else {})
    )
    dist.destroy_process_group()


def deepspeed(publish: Publish, name: str) -> None:
    """Publish DeepSpeed's device, then pairs of updates and loss of a few steps for each ZeRO stage.

    {"device", "expected", "precision", "losses": {stage: pairs}, "errors": {stage: line}}
    """
    import torch.distributed as dist

    accelerator = _created(name)
    accelerator.bind(0)
    accelerator.prepare_deepspeed()
    from deepspeed.accelerator import get_accelerator

    device, expected = get_accelerator().device_name(), accelerator.deepspeed_name
    precision = accelerator.precision().name
    report: dict[str, Any] = {"device": device, "expected": expected, "precision": precision}
    report |= {"losses": {}, "errors": {}}
    publish(report)
    if device != expected:
        raise RuntimeError(f"DeepSpeed uses the device {device!r}, not {expected!r}")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    from deepspeed import init_distributed

    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group(accelerator.dist_backend(), init_method=rendezvous, rank=0, world_size=1)
        init_distributed(dist_backend=accelerator.dist_backend(), verbose=False)
        for stage in range(4):
            try:
                report["losses"][str(stage)] = _deepspeed_losses(accelerator, stage)
            except Exception as error:
                report["errors"][str(stage)] = _line(error)
            publish(report)
        dist.destroy_process_group()


def _deepspeed_losses(accelerator: Accelerator, stage: int) -> list[tuple[int, float]]:
    """Train the reference's model; return for each step the updates before it (fp16 skips some), and its loss."""
    import deepspeed
    import torch

    from accelerators.testing import reference

    precision = accelerator.precision()
    # DeepSpeed does not shard small parameters, so it would shard nothing of a small model.
    thresholds = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    sharded = {f"stage3_{threshold}": 0 for threshold in thresholds} if stage == 3 else {}
    config = {
        "train_micro_batch_size_per_gpu": reference.ROWS,
        "zero_optimization": {"stage": stage, **sharded},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **precision.deepspeed_config(),
    }
    # Before the optimizer: not every device's tensors can take the place of the host's in a parameter.
    model = reference.model().to(accelerator.device())
    adamw = accelerator.kernels.get("adamw", required=True)
    # In 16 bits at ZeRO 0, DeepSpeed 0.19 takes a step to allocate states: at rate 0, and undone in their counts.
    optimizer = adamw(list(model.parameters()), lr=0.0, **reference.ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for state in getattr(getattr(engine.optimizer, "optimizer", None), "state", {}).values():
        if torch.is_tensor(state.get("step")):
            state["step"].zero_()
    tokens, labels = accelerator.to_device(reference.batch())
    losses = []
    for _ in range(reference.STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = reference.LEARNING_RATE
        updates = engine.global_steps - engine.skipped_steps
        with precision.autocast():
            logits = engine(tokens)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        accelerator.step_boundary("check/loss")
        # At ZeRO 0, DeepSpeed 0.19 divides fp16 gradients by the loss scale without having multiplied the loss.
        scale = engine.optimizer.loss_scale if precision.loss_scaling and stage == 0 else 1.0
        engine.backward(loss * scale)
        accelerator.step_boundary("check/backward")
        engine.step()
        accelerator.step_boundary("check/step")
        losses.append((updates, float(loss)))
    engine.destroy()
    return losses


def _created(name: str) -> Accelerator:
    selection = accelerators.select(name)
    selection.export(os.environ)
    return selection.create()


def _compute(name: str) -> None:
    accelerator = _created(name)
    device = accelerator.bind(0)
    import torch

    total = float((torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum())
    if total != 512.0:
        raise ArithmeticError(f"the product of two 8x8 matrices of ones sums up to {total}, expected 512")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


TASKS: dict[str, Callable[..., None]] = {
    "discovery": discovery,
    "probe": probe,
    "collectives": collectives,
    "deepspeed": deepspeed,
}


def main() -> None:
    """Run the task of the command line."""
    task, report, *arguments = sys.argv[1:]
    document: dict[str, Any] = {}

    def publish(value: Any) -> None:
        document["value"] = value
        Path(report).write_text(json.dumps(document), encoding="utf-8")

    try:
        TASKS[task](publish, *arguments)
    except Exception as error:
        traceback.print_exc()
        message = " ".join(str(error).split()) if isinstance(error, UnboundError) else _line(error)
        document |= {"error": message, "kind": type(error).__name__}
        Path(report).write_text(json.dumps(document), encoding="utf-8")
        sys.exit(1)


if __name__ == "__main__":
    main()
