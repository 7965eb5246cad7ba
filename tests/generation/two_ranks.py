"""What two processes of one group generate for `test_two_ranks`, from ZeRO-3's shards; left in a folder."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters

import accelerators
from accelerators import Memory
from rlhf.config.schema import LoraConfig, OptimizerConfig, SamplingConfig, build_config
from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.generation import tensor_parallel
from rlhf.generation.decoder import Completions, Decoder
from rlhf.generation.hybrid_engine import choose_rank_group, generation_mode
from rlhf.generation.rank_groups import LockstepRanks, SingleRank, TensorParallelGroup
from rlhf.models.lora import add_adapters
from tests.families.table import BY_NAME, build
from tests.in_process import make_placement

LENGTH = 12
RANK_GROUPS = {
    "whole": SingleRank,
    "layerwise": LockstepRanks,
    "tensor_parallel": lambda: TensorParallelGroup.create(2),
}
MODELS = ("OPT", "BLOOM", "GPT-NeoX, Pythia", "Llama 3, LoRA", "Qwen3, odd vocabulary")
SLOW = ("BLOOM", "GPT-NeoX, Pythia")
"""Not generated layer by layer, which takes most of the time and does not depend on the architecture."""
GREEDY, SAMPLED = SamplingConfig(temperature=0), SamplingConfig(temperature=0.9, top_k=40)


def model(name: str) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family, _, change = name.rpartition(", ") if name not in BY_NAME else (name, "", "")
    changes = {"vocab_size": 61, "tie_word_embeddings": False} if change == "odd vocabulary" else {}
    found = biased(build(BY_NAME[family].configuration(**changes), MODEL_FOR_CAUSAL_LM_MAPPING))
    if change == "LoRA":
        add_adapters(found, LoraConfig(rank=4), seed=0)
        generator = torch.Generator().manual_seed(1)
        for path, parameter in found.named_parameters():
            if "lora_B" in path:
                parameter.data.normal_(std=0.3, generator=generator)
    return found


def biased(model: Any) -> Any:
    """The model with biases that are not 0, as they are drawn."""
    generator = torch.Generator().manual_seed(2)
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            parameter.data.normal_(std=0.2, generator=generator)
    return model


def prompts(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows, padded left; rank 1's are longer."""
    ids = torch.randint(3, 60, (3, 6 + 3 * rank), generator=torch.Generator().manual_seed(rank))
    ids[0, :3] = 0
    return ids, (ids != 0).long()


def draw(accelerator: Any, module: Any, rank: int, sampling: SamplingConfig, **options: Any) -> Completions:
    """A rank's completions; some rows of a sampled rollout end early."""
    shapes, eos = accelerators.ShapePolicy("dynamic"), range(1, 12) if sampling == SAMPLED else []
    options = {"eos_ids": eos, **options}
    decoder = Decoder(accelerator, pad_id=0, max_new_tokens=LENGTH, shapes=shapes, **options)
    accelerator.seed(3 + rank)
    return decoder.generate(module, *prompts(rank), sampling)


def engine(accelerator: Any, found: Any) -> TrainingEngine:
    return TrainingEngine(
        "test",
        found,
        accelerator=accelerator,
        precision=accelerator.precision("fp32"),
        placement=make_placement(3),
        optimizer=OptimizerConfig(),
        total_steps=1,
        micro_batch_size=1,
        accumulation=1,
    )


CASES = [
    # generation_weights, tensor_parallel, what each rank has of the machine's memory, in times the weights
    ("auto", None, (2.0, 2.0)),
    ("auto", None, (2.0, 1.0)),
    ("auto", 2, (1.0, 2.0)),
    ("auto", None, (1.0, 0.5)),
    ("whole", None, (0.1, 0.1)),
    ("layerwise", None, (2.0, 2.0)),
    ("tensor_parallel", None, (0.1, 2.0)),
]


def chosen(trained: TrainingEngine, rank: int, mode: str, size: int | None, memory: tuple[float, float]) -> Any:
    """(the kind of rank_group, what was said)."""
    lengths = {"max_prompt_length": 8, "max_completion_length": 8}
    values = {"generation_weights": mode, "tensor_parallel": size, "batch_size": 4, "generation_batch_size": 1}
    config = build_config({"data": lengths, "engine": {"zero_stage": 3}, "ppo": values})
    weights = 4 * sum(parameter.ds_numel for parameter in trained.module.parameters())
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained.accelerator, "memory", lambda: Memory(0, 0, int(weights * memory[rank] * 2)))
        rank_group = choose_rank_group(trained, config, say=said.append)
    return type(rank_group).__name__, said


@contextmanager
def watched_gathering(model: Any) -> Iterator[list[int]]:
    """How many of a model's numbers are whole, each time that some are gathered for its parts."""
    numbers: list[int] = []

    @contextmanager
    def gathering(parameters: list[Any]) -> Iterator[None]:
        with GatheredParameters(parameters):
            numbers.append(sum(parameter.numel() for parameter in model.parameters()))  # a shard has none
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "GatheredParameters", gathering)
        yield numbers


def main(folder: str) -> None:
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        rank = distributed.world().rank
        rank_groups = {name: make() for name, make in RANK_GROUPS.items()}
        found: dict[Any, Any] = {}
        for name in MODELS:
            trained = engine(accelerator, model(name))
            for mode, rank_group in rank_groups.items():
                if mode == "layerwise" and name in SLOW:
                    continue
                with generation_mode(trained, rank_group) as module:
                    for sampling in (GREEDY, SAMPLED):
                        found[name, mode, sampling.temperature] = draw(
                            accelerator, module, rank, sampling, batch_size=2, rank_group=rank_group
                        )
        with generation_mode(trained, rank_groups["layerwise"]) as module:
            ends = range(61) if rank else []  # this rank is done after a token, the other never
            found["early"] = draw(accelerator, module, rank, GREEDY, eos_ids=ends, rank_group=rank_groups["layerwise"])
        found["chosen"] = {case: chosen(trained, rank, *case) for case in CASES}
        gc.disable()
        with (
            watched_gathering(trained.module) as gathered,
            generation_mode(trained, rank_groups["tensor_parallel"]) as module,
        ):
            found["gathered"] = max(gathered)
            found["held"] = sum(parameter.numel() for parameter in module.parameters())
            part = weakref.ref(module)
        del module
        found["freed"] = part() is None
        found["sharded"] = all(parameter.numel() == 0 for parameter in trained.module.parameters())
        torch.save(found, Path(folder) / f"rank {rank}")


def groups_of_two(folder: str) -> None:
    """Of four ranks, the first two generate together and the last two."""
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        rank, rank_group = distributed.world().rank, TensorParallelGroup.create(2)
        with generation_mode(engine(accelerator, model("Llama 3, LoRA")), rank_group) as module:
            torch.save(
                draw(accelerator, module, rank, SAMPLED, batch_size=2, rank_group=rank_group),
                Path(folder) / f"rank {rank}",
            )
