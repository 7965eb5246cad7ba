"""The model card of a saved model: what it is, what it was trained on, its numbers, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.config.paths import is_path
from rlhf.config.schema import Stage
from rlhf.diagnosis.records import RunRecords, StageRecords, read_run
from rlhf.diagnosis.verdict import ExaminedStage, examine_run
from rlhf.reporting.summary import format_value
from rlhf.runs.stage_directory import AVERAGE, CRITIC
from rlhf.utils.atomic_io import atomic_write
from rlhf.utils.units import format_bytes, format_seconds

CARD = "README.md"
_ADAPTER = "adapter"


def write_cards(path: Path, name: Stage) -> None:
    """Write the card of each model that a complete stage of the run in `path` has saved, into its folder.

    Raises:
        OSError: a folder cannot be written.
        RLHFError: the records cannot be read.
    """
    run = read_run(path)
    stage = next((stage for stage in examine_run(run).stages if stage.records.name == name), None)
    if stage is None:  # it has recorded no step
        return
    names = [f"{name}{suffix}" for name in ("model", _ADAPTER) for suffix in ("", AVERAGE)]
    for folder in (stage.records.directory.path / model for model in (*names, CRITIC)):
        if folder.is_dir():
            atomic_write(folder / CARD, format_card(run, stage, folder))


def format_card(run: RunRecords, examined: ExaminedStage, folder: Path) -> str:
    """Return the card of the model in `folder`, which a stage saved: YAML for hubs, then Markdown for people."""
    stage = examined.records
    base = _find_base(run, stage, folder)
    is_scalar = folder.name == CRITIC or stage.name == "reward"
    metadata: dict[str, Any] = {
        "library_name": "peft" if folder.name.startswith(_ADAPTER) else "transformers",
        "tags": ["rlhf", stage.name],
        **({} if is_scalar else {"pipeline_tag": "text-generation"}),
        **({"base_model": base} if base and _is_hub_name(base) else {}),
    }
    front = [f"{key}: {json.dumps(value)}" for key, value in metadata.items()]  # JSON is YAML on one line
    return "\n".join(["---", *front, "---", "", *_lines(run, examined, folder, base)]) + "\n"


def _lines(run: RunRecords, examined: ExaminedStage, folder: Path, base: str | None) -> Iterator[str]:
    stage = examined.records
    summary = stage.summary or {}
    yield f"# {_format_title(stage, folder)}"
    yield ""
    versions = run.description.get("versions", {})
    yield f"Trained by rlhf {versions.get('rlhf', '')} from {_describe_base(run, base)}."
    yield ""
    sentence = examined.sentence.replace(f"{run.config.output}/", "")
    yield f"Verdict: **{examined.state}**: {sentence}. `report.html` of the run has the details."
    yield ""
    yield "## Numbers"
    yield ""
    yield "On held-out rows; docs/metrics.md of rlhf defines each number."
    yield ""
    yield "| number | before | after |"
    yield "|---|---|---|"
    before, after = summary.get("before", {}), summary.get("after", {})
    for name in dict.fromkeys([*before, *after]):
        yield f"| {name.replace('_', ' ')} | {_number(name, before)} | {_number(name, after)} |"
    yield ""
    yield "## Training"
    yield ""
    yield f"- stage: {stage.title}, {summary.get('steps', stage.step):,} steps"
    for name, entry in run.description.get("data", {}).items():
        yield f"- data: `{_describe_source(name)}`, {entry.get('rows', 0):,} rows"
    yield f"- device: {run.device.get('count', '')} × {run.device.get('model', '')}, {run.precision}"
    if "seconds" in summary and "peak_memory" in summary:
        yield f"- cost: {format_seconds(summary['seconds'])}, {format_bytes(summary['peak_memory'])} of memory"
    yield f"- versions: {', '.join(f'{package} {version}' for package, version in versions.items())}"
    yield ""
    yield "`recipe.yaml` of the run trains it again."
    yield ""
    yield "## Use"
    yield ""
    yield from _usage(stage, folder, base)


def _format_title(stage: StageRecords, folder: Path) -> str:
    if folder.name == CRITIC:
        return f"Critic of {stage.title}"
    kind = {"reward": "Reward model", "sft": "Chat model after supervised fine-tuning"}.get(
        stage.name, f"Chat model after {stage.title}"
    )
    notes = ["its adapter"] * folder.name.startswith(_ADAPTER) + [
        "moving average of the weights"
    ] * folder.name.endswith(AVERAGE)
    return f"{kind} ({', '.join(notes)})" if notes else kind


def _usage(stage: StageRecords, folder: Path, base: str | None) -> Iterator[str]:
    """Yield how to load the model from the folder of its card."""
    if folder.name == CRITIC:
        yield "A PPO run can start its critic from this folder: `ppo.critic`."
        yield ""
    card = folder / CARD
    written = card.read_text(encoding="utf-8") if card.is_file() else ""
    if written.startswith("# "):  # by `rlhf.models.scalar_head.write_readme`: plain transformers has no class for it
        yield written.partition("\n")[2].strip()
        return
    is_scalar = stage.name == "reward" or folder.name == CRITIC
    kind = "AutoModelForSequenceClassification" if is_scalar else "AutoModelForCausalLM"
    yield "```python"
    if folder.name.startswith(_ADAPTER):
        yield "from peft import PeftModel"
    yield f"from transformers import {kind}, AutoTokenizer"
    yield ""
    source = "." if not folder.name.startswith(_ADAPTER) else base if base and _is_hub_name(base) else "BASE"
    yield f'model = {kind}.from_pretrained("{source}")'
    if folder.name.startswith(_ADAPTER):
        yield 'model = PeftModel.from_pretrained(model, ".")'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{source}")'
    yield "```"
    if not is_scalar:
        yield ""
        yield "`rlhf chat .` talks to it, with the prompts of its training."


def _find_base(run: RunRecords, stage: StageRecords, folder: Path) -> str | None:
    """Return the folder or hub name of the model that `folder` was trained from; None if the run created it."""
    models = run.description.get("stages", {}).get(stage.name, {}).get("models", {})
    keys = ["ppo.critic", "ppo.reward_model"] if folder.name == CRITIC else [f"{stage.name}.model"]
    keys += ["ppo.actor"] * (stage.name == "ppo") + ["model.path"]
    return next((models[key]["path"] for key in keys if key in models), None)


def _is_hub_name(base: str) -> bool:
    return not is_path(base) and not Path(base).exists()


def _describe_base(run: RunRecords, base: str | None) -> str:
    """Return the base in words: without the folders of this machine, since cards are published."""
    if base is None:
        return "scratch"
    path = Path(base)
    if path.is_relative_to(run.path) or path.is_relative_to(run.path.resolve()):
        return f"this run's `{path.parent.name}` model"
    return f"`{base}`" if _is_hub_name(base) else f"a local model, `{path.name}`"


def _describe_source(name: str) -> str:
    """Return the name of a source, `PATH (SETTINGS)`, in one line and without the folders of this machine."""
    path, settings, values = name.partition(" (")
    place = Path(path).name if Path(path).is_absolute() else path
    return " ".join(f"{place}{settings}{values}".replace("`", "'").split())


def _number(name: str, numbers: dict[str, float]) -> str:
    return format_value(name, numbers.get(name)) if name in numbers else ""
