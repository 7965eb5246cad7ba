"""The part of the schema that says where rows come from, how they are read, and how the stages share them.

`rlhf.config.schema` has it under its own name too: the rest of the program imports all sections from there.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from rlhf.config import paths
from rlhf.config.loader import as_source_list
from rlhf.config.types import ConfigModel, OptionalPathOrHubId, PathOrHubId, Shares
from rlhf.config.validation_errors import error_at, short_repr

Share = Literal["sft", "reward", "ppo"]
"""A part of a source's rows: `data.stage_split` says how large each is."""
Stage = Literal["sft", "reward", "dpo", "ppo"]
STAGES: tuple[Share, ...] = get_args(Share)
"""What `rlhf` runs where no stage is named."""
EVERY_STAGE: tuple[Stage, ...] = get_args(Stage)
"""In the order in which a run's folder and closing table have them."""
Cleaning = Literal["citations", "speaker"]
Weight = float | Literal["all"]
_WHOLE = re.compile(r"^(-?\d+)\.0+$")
_BOOLEANS = ("True", "False", "TRUE", "FALSE")


class ColumnsConfig(ConfigModel):
    """Names of a data set's columns, where they differ from the known formats; `a.0.b` is what a column holds."""

    prompt: str | None = Field(None, description="column that holds the prompt")
    response: str | None = Field(None, description="column that holds the demonstration")
    chosen: str | None = Field(None, description="column that holds the preferred response")
    rejected: str | None = Field(None, description="column that holds the dispreferred response")
    first: str | None = Field(None, description="column that holds one of two responses; `prefer` says which is better")
    second: str | None = Field(None, description="column that holds the other of the two")
    margin: str | None = Field(
        None, description="column with a number of 0 or more: by how much the better response should score more"
    )
    messages: str | None = Field(
        None, description="column that holds a conversation: a list of {role, content} or of {from, value}"
    )
    text: str | None = Field(
        None, description="column that holds text without a prompt, for SFT alone: all of it is learned, as it stands"
    )

    @model_validator(mode="after")
    def _fit_together(self) -> ColumnsConfig:
        if (self.first is None) != (self.second is None):
            missing = "second" if self.second is None else "first"
            raise error_at(missing, "a pair needs columns.first and columns.second; name the other one too")
        if self.first and (self.chosen or self.rejected):
            raise error_at("first", "the pair has its columns already; leave columns.chosen and columns.rejected out")
        if self.text and len(self.named()) > 1:
            raise error_at("text", "a text has no prompt and no replies; leave the other columns out")
        return self

    def named(self) -> dict[str, str]:
        """Field -> column, of those that are named."""
        return {field: name for field, name in self.model_dump().items() if name}


def normalize_label(value: Any) -> Any:
    """A label as text, as which labels are compared: CSV has no other, and 1, 1.0 and "1" are one label.

    So are true and what a program wrote of it: True, TRUE.
    """
    if isinstance(value, bool | int | float):
        value = str(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    return text.lower() if text in _BOOLEANS else _WHOLE.sub(r"\1", text)


def share_of(stage: Stage) -> Share:
    """The rows that a stage learns from: DPO takes the pairs of the reward model."""
    return "reward" if stage == "dpo" else stage


Label = Annotated[str | None, BeforeValidator(normalize_label)]


class PreferenceLabelConfig(ConfigModel):
    """What decides which of columns.first and columns.second is preferred; `none`: chosen and rejected are so."""

    label: str | None = Field(None, description="column whose value names the better one")
    first: Label = Field(None, description="its value where columns.first is better, e.g. 1")
    second: Label = Field(
        None, description="its value where columns.second is better; empty: the only other one that there is"
    )
    scores: tuple[str, str] | None = Field(
        None, description="columns with the scores of columns.first and columns.second; the higher one is better"
    )
    nothing: bool = Field(
        False, description="true, also written `prefer: none`: no column of this source decides between two replies"
    )

    @property
    def decides(self) -> bool:
        """Whether a column is named that decides."""
        return self.label is not None or self.scores is not None

    @model_validator(mode="after")
    def _one_way(self) -> PreferenceLabelConfig:
        if sum([self.label is not None, self.scores is not None, self.nothing]) > 1:
            raise error_at(
                "label", "one thing decides: give label (with its value `first`), scores, or none, not several"
            )
        if self.label is not None and self.first is None:
            raise error_at("first", "missing; give the value of the label where columns.first is better")
        if self.label is None and (self.first, self.second) != (None, None):
            raise error_at("label", "missing; name the column that holds these values")
        if self.label is not None and self.first == self.second:
            raise error_at("second", "the same as prefer.first; give the value where columns.second is better")
        return self


def _weight(value: Any) -> Any:
    """A number or a word, so that the error is not that of one of them alone."""
    try:
        if value == "all" or (not isinstance(value, bool) and 0 < float(value) < math.inf):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"expected a number above 0, or all, got {short_repr(value)}")


class DatasetConfig(ConfigModel):
    """One source of rows."""

    path: PathOrHubId = Field(
        description="a .json, .jsonl, .csv or .parquet file, a save_to_disk folder, a hub name, or `world` (embedded)"
    )
    heldout: OptionalPathOrHubId = Field(
        None, description="a second source, used for evaluation only; empty: a fraction of `path`"
    )
    subset: str | None = Field(None, description="configuration of a hub data set that has several")
    split: str = Field("train", description="split to read where the source has several")
    revision: str | None = Field(None, description="branch, tag or commit of a hub data set; empty: the newest")
    limit: int | None = Field(
        None, ge=1, description="rows to read of `path`, drawn from all of it by the seed; empty: every one"
    )
    heldout_subset: str | None = Field(None, description="configuration of `heldout`, as `subset` of `path`")
    heldout_split: str | None = Field(
        None, description="split to read of `heldout` where that has several; empty: test, or what is known of its name"
    )
    heldout_revision: str | None = Field(None, description="revision of `heldout`, as `revision` of `path`")
    stages: tuple[Share, ...] = Field(
        STAGES, min_length=1, description="stages that may use this source; what reward may, DPO may"
    )
    weight: Annotated[Weight, BeforeValidator(_weight)] = Field(
        1.0,
        description="share in the blend: rows of this source per row of a source of weight 1; or all: every row, "
        "whatever the others have",
    )
    columns: ColumnsConfig = Field(
        ColumnsConfig(), description="column names, where they are not standard; question.text, answers.0 look inside"
    )
    prefer: Annotated[
        PreferenceLabelConfig, BeforeValidator(lambda value: {"nothing": True} if value == "none" else value)
    ] = Field(
        PreferenceLabelConfig(),
        description="what decides which reply of a pair is better; none: chosen and rejected do",
    )
    clean: tuple[Cleaning, ...] | None = Field(
        None,
        description="what to take out of replies: citations ([1]), speaker (a leading `Assistant:`); empty: what is "
        "known of its name",
    )

    @model_validator(mode="after")
    def _decided(self) -> DatasetConfig:
        if self.columns.first and not self.prefer.decides:
            raise error_at(
                "prefer", "missing; say what decides between columns.first and columns.second: label or scores"
            )
        if self.prefer.decides and self.columns.named() and not self.columns.first:
            raise error_at("prefer", "decides between columns.first and columns.second; name both in columns")
        return self


class PretrainingConfig(ConfigModel):
    """One source of raw text."""

    path: PathOrHubId = Field(
        description="a .json, .jsonl, .csv or .parquet file, a save_to_disk folder, or a hub name"
    )
    subset: str | None = Field(None, description="configuration of a hub data set that has several")
    split: str = Field("train", description="split to read where the source has several")
    revision: str | None = Field(None, description="branch, tag or commit of a hub data set; empty: the newest")
    limit: int | None = Field(None, ge=1, description="documents to read, drawn from all by the seed; empty: all")
    text: str = Field("text", min_length=1, description="column that holds the documents")


class DataConfig(ConfigModel):
    """Where the rows come from and how they are shared among the stages."""

    datasets: Annotated[tuple[DatasetConfig, ...], BeforeValidator(as_source_list)] = Field(
        (DatasetConfig(path=paths.WORLD),),
        min_length=1,
        description="the sources, each a path or a mapping; several are blended by weight",
    )
    stage_split: Shares = Field(
        (2, 4, 4),
        description="proportions of a source's rows that go to sft, reward (and DPO) and ppo, also written 2:4:4",
    )
    heldout_fraction: float = Field(
        0.05, gt=0, lt=1, description="part of each stage's rows kept for evaluation, where no held-out source is named"
    )
    max_prompt_length: int = Field(256, ge=1, description="longest prompt, in tokens; longer ones: see too_long")
    max_completion_length: int = Field(
        256, ge=1, description="longest completion, in tokens, its end-of-sequence token included"
    )
    too_long: Literal["drop", "truncate"] = Field(
        "drop",
        description="what becomes of rows that are too long; truncate: a prompt loses its oldest text, a completion "
        "its end (and then has no end-of-sequence token)",
    )
    pretraining: Annotated[tuple[PretrainingConfig, ...], BeforeValidator(as_source_list)] = Field(
        (), description="sources of raw text that PPO goes on to model (ppo.ptx_coef), each a path or a mapping"
    )
    chat_template: bool = Field(True, description="format prompts with the tokenizer's chat template where it has one")

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and completion, in tokens."""
        return self.max_prompt_length + self.max_completion_length
