"""What the ranks of `test_loading_at_ranks` run: they load tiny models as a stage does, and say where they differ."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file

import accelerators
from rlhf.checkpoint import safetensors_writer
from rlhf.checkpoint.export import save_model
from rlhf.config.schema import LoraConfig, ModelConfig, OptimizerConfig
from rlhf.engine import distributed
from rlhf.engine.deepspeed_config import build_deepspeed_config
from rlhf.engine.engine import TrainingEngine, freeze_model
from rlhf.models.forward import ScalarHead
from rlhf.models.loading import load_causal_lm, load_scalar_head
from rlhf.models.lora import add_adapters, merged_adapters
from rlhf.models.weight_loading import is_sharded, place_in_memory, place_sharded
from tests.helpers import build_tokenizer, emulate_bf16
from tests.in_process import make_placement, plain_state_dict

LORA = LoraConfig(rank=4)


def main(folder: str) -> None:
    """`folder` holds float32 checkpoints, each named as its family and what is tried with it."""
    problems: list[str] = []
    safetensors_writer.FILE_SIZE = 20_000
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        emulate_bf16(accelerator)
        for path in sorted(Path(folder).glob("* *")):
            if path.is_dir():
                problems += Check(accelerator, path).differences()
        Path(folder, f"rank {distributed.world().rank}").write_text("\n".join(problems))


class Check:
    def __init__(self, accelerator: Any, path: Path) -> None:
        self.accelerator, self.path, self.precision = accelerator, path, accelerator.precision("bf16")
        self.tokenizer = build_tokenizer()
        self.tokenizer.add_tokens(["<new>"])
        self.scalar = "scalar" in path.name

    def differences(self) -> list[str]:
        torch.manual_seed(3)
        plain, problems = self.load(place_in_memory(torch.float32)), []
        expected = dict(plain.named_parameters(remove_duplicate=False))
        adapted = self.load(place_in_memory(torch.float32))
        add_adapters(adapted, LORA, seed=0)
        self.drawn = {name: tensor.detach().clone() for name, tensor in adapted.named_parameters() if "lora" in name}
        cases = [(0, 0), (1, 0), (2, 4), (3, 0), (3, 4)] if "trained" in self.path.name else []
        for stage, rank in cases:
            model = self.load(self.put(stage))
            if rank:
                add_adapters(model, LORA, seed=0)
            problems += [f"stage {stage}, LoRA {rank}: {line}" for line in self.of_engine(model, stage, expected)]
        frozen = freeze_model(self.load(self.put(3)), **self.placement(3, trained=False))
        problems += [f"frozen: {line}" for line in self.of_weights(frozen, expected)]
        buffers = dict(plain.named_buffers())
        for name, buffer in getattr(frozen, "module", frozen).named_buffers():
            if buffer.dtype != buffers[name].dtype or not torch.equal(buffer, buffers[name]):
                problems.append(f"frozen: buffer {name}")
        return [f"{self.path.name}, {line}" for line in problems]

    def load(self, put: Any) -> Any:
        where = {"attention": "eager", "path": str(self.path), "put": put}
        if self.scalar:
            return load_scalar_head(ModelConfig(), self.tokenizer, seed=5, **where)
        return load_causal_lm(ModelConfig(), self.tokenizer, **where)

    def placement(self, stage: int, *, trained: bool = True) -> dict[str, Any]:
        placement = make_placement(stage, trained=trained)
        return {"accelerator": self.accelerator, "precision": self.precision, "placement": placement}

    def put(self, stage: int) -> Any:
        if stage < 3:
            return place_in_memory(torch.bfloat16, self.accelerator.device())
        return place_sharded(
            build_deepspeed_config(make_placement(3), self.accelerator, self.precision, 1, 1), torch.bfloat16
        )

    def of_engine(self, model: Any, stage: int, expected: dict[str, Any]) -> list[str]:
        engine = TrainingEngine(
            "test",
            ScalarHead(model) if self.scalar else model,
            **self.placement(stage),
            optimizer=OptimizerConfig(),
            total_steps=1,
            micro_batch_size=1,
            accumulation=1,
        )
        problems = [*self.of_weights(model, expected), *self.of_export(engine, model)]
        optimizer = engine.engine.optimizer
        whole = {}
        if stage == 0:
            groups = zip(optimizer.fp16_groups, optimizer.fp32_groups)
            whole = {id(a): b for mine, theirs in groups for a, b in zip(mine, theirs)}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            wanted = self.drawn[name] if "lora" in name else expected[plain_name(name)]
            master = whole[id(parameter)] if stage == 0 else safe_get_full_fp32_param(parameter)
            if master.dtype != torch.float32 or not torch.equal(master, wanted):
                problems.append(f"master of {name}")
        return problems

    def of_export(self, engine: TrainingEngine, model: Any) -> list[str]:
        """What an export leaves is what plain transformers would save of the whole model, in several files."""
        written = self.path.with_name(f"export of {self.path.name.replace(' ', '-')}")
        with torch.no_grad():
            for parameter in model.parameters():
                with GatheredParameters([parameter], modifier_rank=0, enabled=is_sharded(parameter)):
                    if parameter.requires_grad:
                        parameter.add_(0.125)  # so that adapters count
        save_model(engine, self.tokenizer, written)
        problems: list[str] = []
        with engine.whole_weights(), merged_adapters(model), contextlib.ExitStack() as stack:
            if distributed.world().is_main:
                plain = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                model.config.use_cache = True
                model.save_pretrained(plain, state_dict=plain_state_dict(model))
                model.config.use_cache = False
                problems = differences(written, plain)
        distributed.all_gather_objects(None)
        return problems

    def of_weights(self, model: Any, expected: dict[str, Any]) -> list[str]:
        problems, seen = [], set()
        for name, parameter in getattr(model, "module", model).named_parameters(remove_duplicate=False):
            if "lora" in name:
                continue
            seen.add(plain_name(name))
            with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                same = torch.equal(parameter, expected[plain_name(name)].bfloat16())
            if not same or parameter.dtype != torch.bfloat16:
                problems.append(f"weight {name}")
        return problems if seen == expected.keys() else [*problems, f"names {sorted(seen ^ expected.keys())}"]


def differences(written: Path, plain: Path) -> list[str]:
    mine, theirs = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (written, plain)
    )
    index = json.loads((written / "model.safetensors.index.json").read_text())
    problems = [] if index["weight_map"].keys() == mine.keys() else ["index"]
    problems += [f"exported {name}" for name in mine.keys() ^ theirs.keys()]
    problems += [f"export of {name}" for name, tensor in theirs.items() if not same(mine.get(name), tensor)]
    for name in ("config.json", "generation_config.json"):
        if (plain / name).exists() and (plain / name).read_text() != (written / name).read_text():
            problems.append(name)
    return problems


def same(actual: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return actual is not None and actual.dtype == expected.dtype and torch.equal(actual, expected)


def plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


if __name__ == "__main__":
    main(*sys.argv[1:])
