"""Find where numbers stop being finite in a step that was not taken: the rows, the model, and its first such layer.

The weights are those before the update, so its passes can be repeated, with a look at the output of every layer and at
its gradient. Without dropout they repeat to the bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf.engine import distributed
from rlhf.engine.engine import NotFiniteError
from rlhf.errors import summarize_error
from rlhf.utils.atomic_io import atomic_write

if TYPE_CHECKING:
    from rlhf.trainers.context import StageContext
    from rlhf.trainers.trainer import Trainer

_TEXT = 2_000  # characters of a row that are kept


@dataclass(frozen=True)
class Origin:
    """The first numbers that are not finite, in the order of computation.

    Attributes:
        model: the role of the model that computed them.
        layer: the module's path; empty: the loss.
        quantity: `output`, or `gradient` of the layer's output.
        count: how many they are.
        size: numbers of the tensor.
        rows: the rows of the micro-batch that have them; all if they cannot be told apart.
    """

    model: str
    layer: str
    quantity: str
    count: int
    size: int
    rows: tuple[int, ...]

    def __str__(self) -> str:
        place = f"the {self.quantity} of {self.layer}" if self.layer else "the loss"
        return f"{place} ({self.model} model, {self.count:,} of {self.size:,} numbers)"


class Watch:
    """Hooks on all layers of models; a context manager that removes them.

    Attributes:
        micro_batch: what is being computed; set by the caller.
        origin: the first numbers that are not finite; None if all were.
        rows: the micro-batch of `origin`.
        first: the first output with a gradient since it was set to None.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self._handles: list[Any] = []
        self.micro_batch: Any = None
        self.origin: Origin | None = None
        self.rows: Any = None
        self.first: Tensor | None = None

    def __enter__(self) -> Watch:
        for model, module in self._models.items():
            for path, layer in module.named_modules():
                self._handles.append(layer.register_forward_hook(partial(self._look_at_output, model, path)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _look_at_output(self, model: str, path: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _list_tensors(output):
            self.look_at(tensor, model, path, "output")
            if tensor.requires_grad:  # on every rank: backward passes of ZeRO-3 gather weights
                tensor.register_hook(partial(self.look_at, model=model, layer=path, quantity="gradient"))
                self.first = tensor if self.first is None else self.first

    def look_at(self, tensor: Tensor, model: str, layer: str, quantity: str) -> None:
        """Remember where a tensor comes from if it is the first that is not finite."""
        if self.origin is not None or not (wrong := ~torch.isfinite(tensor.detach())).any():
            return
        count = len(_get(self.micro_batch, "input_ids"))
        rows: list[int] = list(range(count))
        if wrong.dim() > 1 and len(wrong) == count:
            rows = wrong.flatten(1).any(1).nonzero().flatten().tolist()
        self.origin = Origin(model, layer, quantity, int(wrong.sum()), wrong.numel(), tuple(rows))
        self.rows = self.micro_batch


def explain_step(trainer: Trainer, context: StageContext, step: int, failed: NotFiniteError) -> str:
    """Repeat the passes of a step that was not taken, and keep what they show; every rank calls it.

    Returns:
        Where the first numbers are that are not finite, and the file with their rows.
    """
    found: tuple[Origin, str] | str | None
    try:
        found = _find_origin(trainer, context, step, failed)
    except Exception as error:  # such as a lack of memory; the step is the error to report
        found = f"its passes could not be repeated to find out where ({summarize_error(error)})"
    # Also if the search has failed on this rank, because the others wait for its result.
    results = distributed.all_gather_objects(found)
    origins = [result for result in results if isinstance(result, tuple)]
    if origins:
        origin, path = origins[0]
        return f"the first numbers that are not finite are in {origin}; their rows are in {path}"
    failures = [result for result in results if isinstance(result, str)]
    default = "its passes are finite when they are repeated, so random numbers (dropout) or the device caused it"
    return failures[0] if failures else default


def _find_origin(
    trainer: Trainer, context: StageContext, step: int, failed: NotFiniteError
) -> tuple[Origin, str] | None:
    """Repeat the passes of this rank; return the first numbers that are not finite, and the file with their rows."""
    models: dict[str, Any] = {name: getattr(model, "module", model) for name, model in context.models.items()}
    with Watch(models) as watch:
        for micro_batch, score in trainer.repeat_scoring():
            watch.micro_batch = micro_batch
            score()
        _repeat_training(failed, watch)
    if watch.origin is None:
        return None
    file = context.directory.not_finite / f"step-{step:08d}-rank{context.world.rank}.json"
    _write_rows(file, step, watch, trainer.tokenizer)
    return watch.origin, str(file)


def _repeat_training(failed: NotFiniteError, watch: Watch) -> None:
    """Repeat the forward and backward passes of an update, without gradients of weights."""
    engine = failed.engine
    engine.train()
    for part in failed.micro_batches:
        # Activations of passes that scored the rollout are gone.
        watch.micro_batch = replace(part, passes=()) if getattr(part, "passes", ()) else part
        watch.first = None
        with engine.precision.autocast():
            value, _ = failed.loss(engine.module, watch.micro_batch)
        watch.look_at(value, engine.name, "", "output")
        if watch.first is not None and value.requires_grad:
            torch.autograd.grad(value, watch.first, allow_unused=True)
        engine.accelerator.step_boundary(f"{engine.name}/repeat")


def _write_rows(file: Any, step: int, watch: Watch, tokenizer: Any) -> None:
    assert watch.origin
    ids, mask = (_get(watch.rows, name).tolist() for name in ("input_ids", "attention_mask"))
    rows = []
    for row in watch.origin.rows:
        present = [token for token, there in zip(ids[row], mask[row]) if there]
        rows.append({"row": row, "ids": present, "text": tokenizer.decode(present)[:_TEXT]})
    file.parent.mkdir(mode=0o700, exist_ok=True)  # texts of the data
    content = {"step": step, **asdict(watch.origin), "rows": rows}
    atomic_write(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    os.chmod(file, 0o600)


def _get(micro_batch: Any, name: str) -> Tensor:
    tensor: Tensor = micro_batch[name] if isinstance(micro_batch, Mapping) else getattr(micro_batch, name)
    return tensor


def _list_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of numbers in a layer's output."""
    if torch.is_tensor(output):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _list_tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _list_tensors(value)
