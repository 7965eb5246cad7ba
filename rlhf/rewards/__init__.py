"""Reward functions of the user: Python that says how good a completion is, in a process of its own.

A function is called once for each completion:

    def function(prompt: str, completion: str, row: dict) -> float

`prompt` is the prompt as text, a conversation as a transcript; `completion` is what the policy said, without special
tokens and white space around it; `row` has the columns of the data row as its source has them (an `answer` to compare
with) and, where no column is called so, what rlhf read in it: `messages` (the conversation up to the reply, a list of
{role, content}), `response`, `chosen`, `rejected` (None where the row has none) and `source` ("file.jsonl:17").

Each rank has such a process, `worker.py`, which begins before the first step, stays, and needs neither torch nor a
device; what a function keeps in a global variable is there for the next batch. What it prints goes to standard error.
An exception, a value that is not a finite number, a process that ends or takes longer than `ppo.reward_timeout` ends
the run with one line (`process.py`). `hookspecs.py` is for functions that a plugin brings along.
"""
