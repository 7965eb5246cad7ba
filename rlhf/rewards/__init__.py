"""Reward functions of the user: Python that scores completions, in a separate process.

A function is called once per completion:

    def function(prompt: str, completion: str, row: dict) -> float

`prompt` is the prompt as text, with a conversation as a transcript. `completion` is the policy's reply, without special
tokens and surrounding white space. `row` has the columns of the data row as in its source (for example an `answer` to
compare with) and, under names that are not columns, the fields that rlhf read from it: `messages` (the conversation up
to the reply, a list of {role, content}), `response`, `chosen`, `rejected` (None if the row has none) and `source`
("file.jsonl:17").

Each rank has one such process (`worker.py`). It starts before the first step, runs until the end, and needs neither
torch nor a device; a function's global variables keep their values between batches. Its output goes to standard error.
An exception, a value that is not a finite number, a process that exits, or one that exceeds `ppo.reward_timeout` ends
the run with one line (`process.py`). Plugins can offer reward functions, too (`hookspecs.py`).

The metrics of `rlhf evaluate --metric` are such functions as well: the same arguments, process and checks.
"""
