"""What the ranks of `test_quantized_shards` run: a quantized Llama at ZeRO-3, next to the same one in one process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelerators
from accelerators import Accelerator
from accelerators.quantized import KINDS
from rlhf.checkpoint.export import save_model
from rlhf.checkpoint.training_state import restore_checkpoint, save_checkpoint
from rlhf.config.schema import ModelConfig
from rlhf.engine import distributed
from rlhf.engine.deepspeed_config import build_deepspeed_config
from rlhf.engine.engine import TrainingEngine, freeze_model
from rlhf.models.loading import load_causal_lm
from rlhf.models.quantized import PackedLayout, find_quantized_layers, quantize_on_load
from rlhf.models.weight_loading import place_in_memory, place_sharded
from rlhf.runs.directory import RunDirectory
from tests.engine.engines import COMPLETION, build, loss, masters
from tests.helpers import build_tokenizer
from tests.in_process import make_placement

ROWS = torch.randint(3, 60, (4, 4 + COMPLETION), generator=torch.Generator().manual_seed(0))
ADAPTERS = {"rank": 4, "also_train": ["norms"]}


def main(folder: str, model: str) -> None:
    """`model` is the folder of a float32 checkpoint."""
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        result = {kind: Shards(accelerator, kind, Path(folder), model).result() for kind in KINDS}
        torch.save(result, Path(folder) / f"rank {distributed.world().rank}")


@contextmanager
def watched_joins() -> Iterator[list[int]]:
    """How many packed weights of a model are whole, each time that one more is."""
    joined: list[Any] = []
    alive: list[int] = []
    join = PackedLayout.join

    def joining(packed: Any) -> Any:
        result = join(packed)
        joined.append(weakref.ref(result[0]))
        alive.append(sum(reference() is not None for reference in joined))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedLayout, "join", joining)
        yield alive


class Shards:
    def __init__(self, accelerator: Accelerator, kind: Any, folder: Path, path: str) -> None:
        self.accelerator, self.kind, self.folder, self.path = accelerator, kind, folder, path
        self.precision = accelerator.precision("fp32")
        self.packing = accelerator.kernels.get("quantized_weights", required=True)
        world = distributed.world()
        self.rows = ROWS.chunk(world.size)[world.rank]

    def result(self) -> dict[str, Any]:
        with watched_joins() as alive:
            sharded = self.load(sharded=True)
        plain = self.load(sharded=False)
        stored = {path: layer._parameters["packed"].ds_tensor.nbytes for path, layer in layers_of(sharded)}
        result: dict[str, Any] = {"whole while loading": max(alive), "stored": stored}
        result["frozen losses"] = self.frozen_losses()
        engines = [self.engine(sharded, 3), self.engine(plain, 0)]
        result["released"] = [layer._parameters["packed"].numel() for _, layer in layers_of(sharded)]
        result["first losses"] = [self.local_loss(engine.engine) for engine in engines]
        result["same bytes"] = self.same_bytes(sharded, plain)
        result["counts"] = [engine.parameter_counts for engine in engines]
        result["steps"] = [[engine.step([self.rows], loss).read() for _ in range(2)] for engine in engines]
        for engine, name in zip(engines, ("sharded", "plain")):
            save_model(engine, build_tokenizer(), self.folder / f"{self.kind}, {name}")
        result["resumed"] = self.resumed(engines[0])
        result["saved for backward"] = self.saved_for_backward(engines[0])
        return result

    def load(self, *, sharded: bool) -> Any:
        put = place_in_memory(torch.float32)
        if sharded:
            put = place_sharded(
                build_deepspeed_config(make_placement(3), self.accelerator, self.precision, 1, 1), torch.float32
            )
        put = quantize_on_load(put, self.kind, self.packing, self.accelerator.device(), sharded=sharded)
        return load_causal_lm(ModelConfig(path=self.path), build_tokenizer(), attention="sdpa", put=put)

    def engine(self, model: Any, zero_stage: int) -> TrainingEngine:
        return build(self.accelerator, zero_stage, model=model, lora=ADAPTERS, rows=len(self.rows))

    def local_loss(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(loss(model, self.rows)[0])

    def saved_for_backward(self, engine: TrainingEngine) -> int:
        """Bytes of packed weights that a pass keeps."""
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss(engine.engine, self.rows)
        packed = [tensor for tensor in saved if tensor.dtype == torch.uint8]
        assert len(packed) >= 7  # the first layers' inputs need no gradients
        return sum(tensor.untyped_storage().nbytes() for tensor in packed)

    def frozen_losses(self) -> list[float]:
        losses = []
        for zero_stage in (3, 0):
            placement = make_placement(zero_stage, trained=False)
            surroundings = {"accelerator": self.accelerator, "precision": self.precision, "placement": placement}
            losses.append(self.local_loss(freeze_model(self.load(sharded=zero_stage == 3), **surroundings)))
        return losses

    def same_bytes(self, sharded: Any, plain: Any) -> bool:
        """Whether gathered weights are those that one process packs, bit for bit."""
        same = True
        for (_, mine), (_, theirs) in zip(layers_of(sharded), layers_of(plain)):
            parameter = mine._parameters["packed"]
            parameter.all_gather()
            for name, tensor in mine.layout.split(parameter.data).items():
                same &= torch.equal(tensor, theirs._buffers[name]) and tensor.dtype == theirs._buffers[name].dtype
            parameter.partition()
        return same

    def resumed(self, engine: TrainingEngine) -> list[dict[str, Tensor]]:
        """The trained numbers after a step that follows a checkpoint, without an end and with one."""
        directory = RunDirectory(self.folder / self.kind).stage("sft")
        if distributed.world().is_main:
            directory.path.mkdir(parents=True)
        save_checkpoint(directory, 2, {"model": engine}, {})
        engine.step([self.rows], loss)
        resumed = self.engine(self.load(sharded=True), 3)
        restore_checkpoint(directory, {"model": resumed})
        resumed.step([self.rows], loss)
        return [masters(engine), masters(resumed)]


def layers_of(model: nn.Module) -> list[tuple[str, Any]]:
    return [(path.replace(".base_layer", ""), layer) for path, layer in find_quantized_layers(model).items()]
