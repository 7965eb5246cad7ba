"""Why a row is left out, and what helps: the one table of both.

Reading, parsing and tokenization give each row that they leave out a reason, in a few words that many rows share.
`remedy` says what the user can do about it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

NOT_JSON = "not readable as JSON"
NOT_AN_OBJECT = "not an object"
OTHER_FIELDS = "row has more or fewer fields than the header"
SURROGATE = "half a character (surrogate)"
EMPTY_PROMPT = "empty prompt"
PROMPTS_DIFFER = "prompts of chosen and rejected differ"
NO_DEMONSTRATION = "no demonstration"
NO_PREFERENCE = "no preference"
EQUAL_SCORES = "no preference: equal scores"
UNUSABLE_SCORE = "no preference: a score is no number"
UNUSABLE_LABEL = "no preference: its label is neither of the two"
UNUSABLE_MARGIN = "margin is no number of 0 or more"
PROMPTLESS = "text without a prompt"
EMPTY_TEXT = "empty text"
EMPTY_RESPONSE = "empty response"
NO_DIFFERENCE = "chosen equals rejected"
CONTROL_TOKENS = "contains control tokens"
REFUSED = "refused by the chat template"
LONG_PROMPT = "prompt too long"
LONG_COMPLETION = "completion too long"
TRAINED_ON = "trained on"
PROMPT_TRAINED_ON = "prompt trained on"
LEFT_OUT_BY_WEIGHT = "left out by weight"

# Patterns, as of file names, since some reasons name a column or a role; the first that matches counts.
REMEDIES = {
    NOT_JSON: "write one JSON object a line",
    NOT_AN_OBJECT: 'write each row as an object, {"prompt": ...}',
    OTHER_FIELDS: 'put fields that hold commas or line breaks in "quotes"',
    SURROGATE: "mend the text where a character was cut in two",
    EMPTY_PROMPT: "name the column that holds the prompt in data.datasets.*.columns.prompt",
    "other columns than the source's (*)": "give rows of other columns a source of their own in data.datasets",
    PROMPTS_DIFFER: "give both the same conversation up to their last turn",
    "*: a turn is not an object of role and content": "write each turn as an object of role and content",
    "*: unknown role *": "name the roles user, assistant and system",
    "* does not end with the assistant's turn": "end both replies with a turn of the assistant",
    "* is *, not a list of turns": "give a list of role/content, or name another column in data.datasets.*.columns",
    "* is *, not text": "write it as text, or name another column in data.datasets.*.columns",
    NO_DEMONSTRATION: "name the column of the replies in data.datasets.*.columns.response, "
    "or leave sft out of this source (data.datasets.*.stages)",
    NO_PREFERENCE: "data.datasets.*.stages: leave reward out of this source, or give chosen and rejected",
    EQUAL_SCORES: "leave reward out of this source (data.datasets.*.stages), or give scores that differ",
    UNUSABLE_SCORE: "write both scores as numbers, or name other columns in data.datasets.*.prefer.scores",
    UNUSABLE_LABEL: "name the label's two values in data.datasets.*.prefer.first and prefer.second",
    UNUSABLE_MARGIN: "write the margins as numbers, or leave data.datasets.*.columns.margin out",
    PROMPTLESS: "data.datasets.*.stages: leave all but sft out of this source, or give prompt and response",
    EMPTY_TEXT: "fill in the texts, or name their column in data.datasets.*.columns.text",
    EMPTY_RESPONSE: "fill in the replies, or name their columns in data.datasets.*.columns",
    NO_DIFFERENCE: "give two replies that differ",
    CONTROL_TOKENS: "take the tokenizer's control tokens out of the replies, "
    "or set data.chat_template=false for text that is formatted already",
    REFUSED: "change the roles to those that it knows, or set data.chat_template=false",
    LONG_PROMPT: "raise data.max_prompt_length",
    LONG_COMPLETION: "raise data.max_completion_length",
    TRAINED_ON: "name rows that no stage trains on in data.datasets.*.heldout",
    PROMPT_TRAINED_ON: "name prompts that no stage trains on in data.datasets.*.heldout",
    LEFT_OUT_BY_WEIGHT: "change data.datasets.*.weight (all: every row)",
}


def remedy(reason: str) -> str:
    """What helps against `reason`, which must be one of the table's."""
    return next(help for pattern, help in REMEDIES.items() if fnmatchcase(reason, pattern))


def kind_of(value: object) -> str:
    """What a value is that should be text, in the user's words."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a {type(value).__name__}" if value is not None else "empty"
