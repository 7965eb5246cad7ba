"""The part of the schema that says where rows come from, how they are read, and how the stages share them.

`rlhf.config` has it under its own name too: the rest of the program imports all sections from there.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from rlhf import names
from rlhf.kinds import Name, OptionalName, Section, Shares
from rlhf.values import as_sources

Stage = Literal["sft", "reward", "ppo"]
STAGES: tuple[Stage, ...] = get_args(Stage)


class ColumnsConfig(Section):
    """Names of a data set's columns, where they differ from the known formats."""

    prompt: str | None = Field(None, description="column that holds the prompt")
    response: str | None = Field(None, description="column that holds the demonstration")
    chosen: str | None = Field(None, description="column that holds the preferred response")
    rejected: str | None = Field(None, description="column that holds the dispreferred response")
    messages: str | None = Field(None, description="column that holds a conversation: a list of {role, content}")


class DatasetConfig(Section):
    """One source of rows."""

    path: Name = Field(
        description="a .json, .jsonl, .csv or .parquet file, a save_to_disk folder, a hub name, or `world` (embedded)"
    )
    heldout: OptionalName = Field(
        None, description="a second source, used for evaluation only; empty: a fraction of `path`"
    )
    subset: str | None = Field(None, description="configuration of a hub data set that has several")
    split: str = Field("train", description="split to read where the source has several")
    heldout_subset: str | None = Field(None, description="configuration of `heldout`, as `subset` of `path`")
    heldout_split: str = Field("test", description="split to read of `heldout` where that has several")
    stages: tuple[Stage, ...] = Field(STAGES, min_length=1, description="stages that may use this source")
    weight: float = Field(
        1.0, gt=0, description="share in the blend: rows of this source per row of a source of weight 1"
    )
    columns: ColumnsConfig = Field(ColumnsConfig(), description="column names, where they are not standard")


class DataConfig(Section):
    """Where the rows come from and how they are shared among the stages."""

    datasets: Annotated[tuple[DatasetConfig, ...], BeforeValidator(as_sources)] = Field(
        (DatasetConfig(path=names.WORLD),),
        min_length=1,
        description="the sources, each a path or a mapping; several are blended by weight",
    )
    stage_split: Shares = Field(
        (2, 4, 4), description="proportions of a source's rows that go to sft, reward and ppo, also written 2:4:4"
    )
    heldout_fraction: float = Field(
        0.05, gt=0, lt=1, description="part of each stage's rows kept for evaluation, where no held-out source is named"
    )
    max_prompt_length: int = Field(256, ge=1, description="longest prompt, in tokens; longer rows are left out")
    max_completion_length: int = Field(
        256, ge=1, description="longest completion, in tokens, its end-of-sequence token included"
    )
    chat_template: bool = Field(True, description="format prompts with the tokenizer's chat template where it has one")

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and completion, in tokens."""
        return self.max_prompt_length + self.max_completion_length
