"""The section about data: the sources, how their rows are read, and how stages share them.

`rlhf.config.schema` exports the sections that the rest of the program uses.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rlhf.config import paths
from rlhf.config.loader import as_source_list
from rlhf.config.types import ConfigModel, OptionalPathOrHubId, PathOrHubId, Shares, error_at, short_repr

Share = Literal["sft", "reward", "ppo"]
"""A share of a source's rows; `data.stage_split` sets the sizes."""
Stage = Literal["sft", "reward", "dpo", "ppo", "distill"]
STAGES: tuple[Share, ...] = get_args(Share)
"""The stages that `rlhf` runs if none is named."""
EVERY_STAGE: tuple[Stage, ...] = get_args(Stage)
"""All stages, in the order of a run's folder and closing table."""
Cleaning = Literal["citations", "speaker"]
Weight = float | Literal["all"]
_WHOLE = re.compile(r"^(-?\d+)\.0+$")
_BOOLEANS = ("True", "False", "TRUE", "FALSE")
PLACEHOLDER = "{prompt}"
"""The place of the prompt in a template."""


class ColumnsConfig(ConfigModel):
    """Column names, if they differ from the known formats; `a.0.b` reads inside a column."""

    prompt: str | None = Field(None, description="column with the prompt")
    response: str | None = Field(None, description="column with the demonstration")
    chosen: str | None = Field(None, description="column with the preferred response")
    rejected: str | None = Field(None, description="column with the rejected response")
    first: str | None = Field(None, description="column with one of two responses; `prefer` says which is better")
    second: str | None = Field(None, description="column with the other response")
    margin: str | None = Field(
        None, description="column with a number of at least 0: how much higher the better response should score"
    )
    messages: str | None = Field(
        None, description="column with a conversation: a list of {role, content} or of {from, value}"
    )
    text: str | None = Field(
        None, description="column with text without a prompt, for SFT only; the model learns all of it, unchanged"
    )

    @model_validator(mode="after")
    def _check_columns(self) -> ColumnsConfig:
        if (self.first is None) != (self.second is None):
            missing = "second" if self.second is None else "first"
            raise error_at(missing, "a pair needs both columns.first and columns.second; name this column too")
        if self.first and (self.chosen or self.rejected):
            raise error_at(
                "first",
                "conflicts with columns.chosen and columns.rejected; remove these, or columns.first and columns.second",
            )
        if self.text and len(self.named()) > 1:
            raise error_at("text", "a text has no prompt and no replies; remove the other columns")
        return self

    def named(self) -> dict[str, str]:
        """Return the columns that are named, by field."""
        return {field: name for field, name in self.model_dump().items() if name}


def normalize_label(value: Any) -> Any:
    """Return a label as text, the form in which labels are compared; other values are returned unchanged.

    CSV files have only text, so 1, 1.0 and "1" are one label, and so are true, True and TRUE.
    """
    if isinstance(value, bool | int | float):
        value = str(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    return text.lower() if text in _BOOLEANS else _WHOLE.sub(r"\1", text)


def share_of(stage: Stage) -> Share:
    """Return the share of rows that a stage learns from: DPO the reward model's pairs, distillation PPO's prompts."""
    if stage == "dpo":
        return "reward"
    return "ppo" if stage == "distill" else stage


Label = Annotated[str | None, BeforeValidator(normalize_label)]


class PreferenceLabelConfig(ConfigModel):
    """How to tell which of columns.first and columns.second is better; `none` for sources with chosen and rejected."""

    label: str | None = Field(None, description="column whose value names the better response")
    first: Label = Field(None, description="the label's value if columns.first is better, e.g. 1")
    second: Label = Field(
        None, description="the label's value if columns.second is better; empty: the only other value in the column"
    )
    scores: tuple[str, str] | None = Field(
        None, description="columns with the scores of columns.first and columns.second; the higher score is better"
    )
    nothing: bool = Field(
        False, description="true, or `prefer: none`: no column of this source tells which of two replies is better"
    )

    @property
    def names_columns(self) -> bool:
        """True if a column is named that tells which response is better."""
        return self.label is not None or self.scores is not None

    @model_validator(mode="after")
    def _check_rule(self) -> PreferenceLabelConfig:
        if sum([self.label is not None, self.scores is not None, self.nothing]) > 1:
            raise error_at("label", "label, scores and none exclude each other; keep one of them")
        if self.label is not None and self.first is None:
            raise error_at("first", "missing; set it to the label's value if columns.first is better")
        if self.label is None and (self.first, self.second) != (None, None):
            raise error_at("label", "missing; name the column with these values")
        if self.label is not None and self.first == self.second:
            raise error_at(
                "second", "the same as prefer.first; set it to the label's value if columns.second is better"
            )
        return self


def _validate_weight(value: Any) -> Any:
    """Return a weight, or `all`; one error message covers both forms.

    Raises:
        ValueError: it is neither.
    """
    try:
        if value == "all" or (not isinstance(value, bool) and 0 < float(value) < math.inf):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"expected a number above 0, or all, got {short_repr(value)}")


def _check_template(template: str | None) -> str | None:
    """Return a template.

    Raises:
        ValueError: the place of the prompt is missing or unclear.
    """
    if template is None:
        return None
    shown = short_repr(template)
    if template.count(PLACEHOLDER) != 1:
        raise ValueError(f"expected {PLACEHOLDER} once, got {shown}; write {PLACEHOLDER} in place of the prompt")
    if names := re.findall(r"\{\w+\}", template.replace(PLACEHOLDER, "")):
        raise ValueError(f"only {PLACEHOLDER} is replaced, got {shown}; remove {names[0]}")
    if r"\n" in template:
        raise ValueError(f"has a backslash and an n for a line break, got {shown}; put it in double quotes")
    return template


class DatasetConfig(ConfigModel):
    """One source of rows."""

    path: PathOrHubId = Field(
        description="a .json, .jsonl, .csv or .parquet file, a folder of these (a downloaded data set), a save_to_disk "
        "folder, a hub name, or `world` (embedded)"
    )
    heldout: OptionalPathOrHubId = Field(
        None,
        description="a second source, used only for evaluation; empty: heldout_split of `path` or, without that, a "
        "fraction of its rows",
    )
    subset: str | None = Field(None, description="configuration of a data set, if it has several")
    split: str = Field("train", description="split to read, if the source has several")
    revision: str | None = Field(None, description="branch, tag or commit of a hub data set; empty: the newest commit")
    limit: int | None = Field(
        None, ge=1, description="maximum number of rows of `path`, sampled with data.seed; empty: all"
    )
    heldout_subset: str | None = Field(None, description="configuration of `heldout`, as `subset` of `path`")
    heldout_split: str | None = Field(
        None,
        description="split that is used only for evaluation, of `heldout` (empty: test, or the one of a known data "
        "set) or, without `heldout`, of `path`",
    )
    heldout_revision: str | None = Field(None, description="revision of `heldout`, as `revision` of `path`")
    stages: tuple[Share, ...] = Field(
        STAGES,
        min_length=1,
        description="stages that may use this source; DPO may use those of reward; a source with columns.text is for "
        "sft alone",
    )
    weight: Annotated[Weight, BeforeValidator(_validate_weight)] = Field(
        "all",
        description="all: every row; a number: rows of this source per row of a source with weight 1, so that sources "
        "with a number are blended and the scarcest for its weight is used whole",
    )
    columns: ColumnsConfig = Field(
        ColumnsConfig(),
        description="column names, if they are not standard; question.text and answers.0 read inside a column",
    )
    prefer: Annotated[
        PreferenceLabelConfig, BeforeValidator(lambda value: {"nothing": True} if value == "none" else value)
    ] = Field(
        PreferenceLabelConfig(),
        description="how to tell which reply of a pair is better; none: columns chosen and rejected tell",
    )
    clean: tuple[Cleaning, ...] | None = Field(
        None,
        description="what to remove from replies: citations ([1]), speaker (a leading `Assistant:`); empty: as for a "
        "known data set, else nothing",
    )

    template: Annotated[str | None, AfterValidator(_check_template)] = Field(
        None,
        description='text to write around each prompt, for models without a chat template, such as "Human: {prompt}'
        '\\n\\nAssistant:"; empty: as for a known data set, else nothing',
    )

    @property
    def heldout_name(self) -> str | None:
        """The name of the source or split that is used only for evaluation; None if it is a fraction of the rows."""
        if self.heldout is None and self.heldout_split is not None:
            return f"{self.path}, split {self.heldout_split}"
        return self.heldout

    @model_validator(mode="after")
    def _check_heldout(self) -> DatasetConfig:
        if self.heldout is not None:
            return self
        for key in ("heldout_subset", "heldout_revision"):
            if getattr(self, key) is not None:
                raise error_at(key, "is for a second source; name that in heldout, or remove this key")
        if self.heldout_split == self.split:
            raise error_at("heldout_split", f"the same as split, got {short_repr(self.split)}; name another split")
        return self

    @model_validator(mode="after")
    def _check_text(self) -> DatasetConfig:
        if self.columns.text and "stages" in self.model_fields_set and self.stages != ("sft",):
            raise error_at("stages", f"columns.text is for sft alone, got {', '.join(self.stages)}; remove stages")
        if self.columns.text:
            object.__setattr__(self, "stages", ("sft",))  # the section is immutable
        return self

    @model_validator(mode="after")
    def _check_template_use(self) -> DatasetConfig:
        if self.template and self.columns.text:
            raise error_at("template", "columns.text has no prompts to write it around; remove one of the two")
        return self

    @model_validator(mode="after")
    def _check_prefer(self) -> DatasetConfig:
        if self.columns.first and not self.prefer.names_columns:
            raise error_at(
                "prefer",
                "missing; set prefer.label or prefer.scores, to tell which of the two columns is better",
            )
        if self.prefer.names_columns and self.columns.named() and not self.columns.first:
            raise error_at("prefer", "compares columns.first and columns.second; name both of them")
        return self


class PretrainingConfig(ConfigModel):
    """One source of raw text."""

    path: PathOrHubId = Field(
        description="a .json, .jsonl, .csv or .parquet file, a folder of these, a save_to_disk folder, or a hub name"
    )
    subset: str | None = Field(None, description="configuration of a hub data set, if it has several")
    split: str = Field("train", description="split to read, if the source has several")
    revision: str | None = Field(None, description="branch, tag or commit of a hub data set; empty: the newest commit")
    limit: int | None = Field(None, ge=1, description="maximum number of documents, sampled with data.seed; empty: all")
    text: str = Field("text", min_length=1, description="column with the documents")


class DataConfig(ConfigModel):
    """Sources of rows, and how the stages share them."""

    datasets: Annotated[tuple[DatasetConfig, ...], BeforeValidator(as_source_list)] = Field(
        (DatasetConfig(path=paths.WORLD),),
        min_length=1,
        description="the sources, each a path or a mapping; several are blended by weight",
    )
    stage_split: Shares = Field(
        (2, 4, 4),
        description="proportions of a source's rows for sft, reward (and DPO) and ppo, also written 2:4:4",
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**32,
        description="seed that decides which rows each stage gets, and which are held out; empty: `seed`. Set it to "
        "train with several values of `seed` on the same rows",
    )
    heldout_fraction: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="fraction of each stage's rows held out for evaluation, if no held-out source is named",
    )
    max_prompt_length: int = Field(
        256, ge=1, description="maximum length of prompts, in tokens; too_long says what happens to longer ones"
    )
    max_completion_length: int = Field(
        256, ge=1, description="maximum length of completions, in tokens, with the end-of-sequence token"
    )
    too_long: Literal["drop", "truncate"] = Field(
        "drop",
        description="what to do with rows that are too long; truncate: cut the beginning of prompts and the end of "
        "completions (which then have no end-of-sequence token)",
    )
    pretraining: Annotated[tuple[PretrainingConfig, ...], BeforeValidator(as_source_list)] = Field(
        (), description="sources of raw text for PPO's language-modelling loss (ppo.ptx_coef), each a path or a mapping"
    )
    chat_template: bool = Field(True, description="format prompts with the tokenizer's chat template, if it has one")

    @model_validator(mode="after")
    def _check_weights(self) -> DataConfig:
        weighted = [index for index, dataset in enumerate(self.datasets) if dataset.weight != "all"]
        if len(weighted) == 1 and len(self.datasets) > 1:
            (index,) = weighted
            raise error_at(
                f"datasets.{index}.weight",
                f"has no effect, because no other source has one, got {self.datasets[index].weight:g}; set the weight "
                "of the others too, or `limit` of this one",
            )
        return self

    @property
    def max_length(self) -> int:
        """Maximum length of prompt and completion together, in tokens."""
        return self.max_prompt_length + self.max_completion_length
