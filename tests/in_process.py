"""What tests need that call a stage in their own process: its surroundings, a scalar model, and rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerators import Accelerator, Precision, ShapePolicy
from rlhf.config.schema import Stage, build_config
from rlhf.data.records import Message, Row
from rlhf.data.stage_dataset import load_stage
from rlhf.engine import distributed
from rlhf.models.lora import to_plain_name
from rlhf.reporting.recorder import Recorder
from rlhf.reporting.step_records import RankStep
from rlhf.roles.roles import ModelPlacement, model_placements
from rlhf.runs.directory import RunDirectory
from rlhf.trainers.context import StageContext
from rlhf.trainers.oom import measure_models
from rlhf.trainers.ppo.trainer import PPOTrainer
from rlhf.trainers.trainer import EvalResult
from tests.helpers import llama

ROW = Row((Message("user", "a"),), "a", "b", "b", "c", "")
OPTIMIZER = {"learning_rate": 0.05, "warmup": 0, "schedule": "constant", "max_grad_norm": 1e-3}


def stage_context(
    accelerator: Accelerator,
    folder: Path,
    stage: Stage,
    values: dict[str, Any],
    *,
    precision: Precision | None = None,
    recorder: Recorder | None = None,
) -> StageContext:
    """A context of the settings `values`, but in fp32 and static shapes unless they say otherwise.

    It records nothing unless a recorder is given.
    """
    run = RunDirectory(folder)
    place = run.stage(stage)
    place.path.mkdir(parents=True, exist_ok=True)
    return StageContext(
        build_config(values),
        accelerator,
        precision or accelerator.precision(values.get("precision", "fp32")),
        ShapePolicy(values.get("engine", {}).get("shapes", "static")),
        distributed.world(),
        run,
        place,
        recorder or Recorder(place, enabled=False),
    )


def scalar_llama(vocabulary: int, *, seed: int = 0, **changes: Any) -> Any:
    """`tests.helpers.llama` with a scalar head, as a reward model or a critic has it."""
    import torch
    from transformers import LlamaForSequenceClassification

    config = llama(vocabulary, **changes).config
    config.num_labels = 1
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(config)


class GivenModels:
    """A `ModelFactory` of loaded models; `load` returns the one of a role."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self.causal_lm = self.scalar_head = load


def ppo_models(actor: Any, reference: Any, critic: Any, reward: Any, judge: Any = None) -> Any:
    models = {"actor": actor, "reference": reference, "critic": critic, "reward": reward, "judge": judge}
    return GivenModels(models.__getitem__)


def one_model(model: Any) -> Any:
    """A `ModelFactory` that gives `model` for every role."""
    return GivenModels(given(model))


def build_ppo(
    accelerator: Accelerator,
    folder: Path,
    recipe: dict[str, Any],
    tokenizer: Any,
    models: Any,
    *,
    engine: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    precision: Precision | None = None,
    **changes: Any,
) -> PPOTrainer:
    """PPO on `models` by a recipe with other settings of `engine`, `lora` and `ppo`; see `stage_context`."""
    values = {**recipe, "lora": lora or {}, "ppo": {**recipe["ppo"], **changes}}
    values["engine"] = {**recipe["engine"], **(engine or {})}
    context = stage_context(accelerator, folder, "ppo", values, precision=precision)
    return PPOTrainer(context, models, tokenizer, load_stage(context.config.data, "ppo", tokenizer, seed=0))


class StubTrainer:
    """A `Trainer` without models, whose steps, evaluations and saving are the functions that a test passes."""

    def __init__(
        self,
        settings: Any,
        step: Callable[[int], dict[str, float]] = lambda index: {"rows": 1.0},
        *,
        total_steps: int,
        unit: str = "rows",
        engines: dict[str, Any] | None = None,
        evaluate: Callable[[str], EvalResult] = lambda when: EvalResult({}),
        save: Callable[[Path], Any] = lambda folder: None,
    ) -> None:
        self.settings, self.step, self.total_steps, self.unit = settings, step, total_steps, unit
        self.engines, self.evaluate, self.save = engines or {}, evaluate, save
        self.displayed, self.epoch_steps = (), None

    def summarize(self) -> dict[str, Any]:
        return {}

    def describe_step(self) -> RankStep:
        return RankStep([])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def given(model: Any) -> Any:
    """A loader that gives `model`."""
    return lambda role: model


def make_placement(zero_stage: int = 0, *, trained: bool = True, **engine: Any) -> ModelPlacement:
    """How a model is held at `zero_stage`, its parameters all sharded at ZeRO-3."""
    config = build_config({"engine": {"zero_stage": zero_stage, "zero_persistence_threshold": 0, **engine}})
    return model_placements(config, "sft")["sft"] if trained else model_placements(config, "ppo")["reward"]


def bytes_held(model: Any, place: Any = None) -> int:
    """Bytes that one model holds, under an engine or not."""
    return measure_models({"model": model}, place)["model"]


def plain_state_dict(model: Any) -> dict[str, Any]:
    """A model's state under the names that it had before adapters were added, theirs left out."""
    return {to_plain_name(name): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
