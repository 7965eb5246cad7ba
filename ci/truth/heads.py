"""Do heads on one trained base see over-optimization, or does it take another model?

Trains a run that is over-optimized slowly, and scores its held-out completions again: by linear heads on the features
of its reward model, each fitted to its own part of the pairs, and by a reward model of other pairs (the judge). Prints
the table of docs/decisions/006-judge.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))

from plan import list_runs
from run import WORK, describe_pairs, train

from rlhf.config.schema import load_config
from rlhf.data.examples import Pair
from rlhf.data.stage_dataset import load_stage
from rlhf.diagnosis.records import read_run

RUN = "kl-0.0-seed-0"
HEADS = 4
_OTHER_SEED = 500  # of pairs that the reward model has not seen
_STEPS, _DECAY = 300, 1e-3


def main() -> None:
    """Train the run, and print a line for each evaluation."""
    torch.set_num_threads(1)
    (run,) = (run for run in list_runs() if run.name == RUN)
    (stage,) = read_run(train(run, keep=True)).stages
    model = WORK / f"reward-{run.seed}-{run.pairs}" / "reward" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    heads = {}
    for kind, seed in (("own", run.seed), ("other", run.seed + _OTHER_SEED)):
        pairs = read_pairs(run.pairs, seed, tokenizer)
        chosen, rejected = (
            read_features(model, [pair.prompt_ids + reply(pair) for pair in pairs])
            for reply in (attrgetter("chosen_ids"), attrgetter("rejected_ids"))
        )
        for part in range(HEADS):
            heads[f"{kind} {part + 1}"] = fit_head((chosen - rejected)[part::HEADS], part)
    print(" | ".join(["step", "approved", "reward", "judge", *heads]))
    for step, rows in sorted(stage.heldout.items()):
        features = read_features(model, [encode(tokenizer, row["prompt"], row["completion"]) for row in rows])
        numbers = [fmean(row[key] for row in rows) for key in ("approved", "reward", "judge")]
        numbers += [(features @ head).mean().item() for head in heads.values()]
        print(" | ".join([str(step), *(f"{number:.2f}" for number in numbers)]), flush=True)


def read_pairs(count: int, seed: int, tokenizer: Any) -> list[Pair]:
    """Return the pairs from which the reward stage of this seed learns."""
    settings = load_config(None, [f"data.datasets={describe_pairs(count)}"])
    return list(load_stage(settings.data, "reward", tokenizer, seed=seed).train)


def encode(tokenizer: Any, prompt: str, reply: str) -> list[int]:
    """Return the tokens of a prompt and a complete reply."""
    conversation = [{"role": "user", "content": prompt}]
    before = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    return [*before, *tokenizer(reply, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


@torch.no_grad()
def read_features(folder: Path, texts: Sequence[list[int]], rows: int = 256) -> Tensor:
    """Return what the head of a reward model reads at the end of each text: [texts, hidden size]."""
    backbone = AutoModelForSequenceClassification.from_pretrained(folder).eval().model
    found = []
    for start in range(0, len(texts), rows):
        ids = texts[start : start + rows]
        lengths = torch.tensor([len(row) for row in ids])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        hidden = backbone(input_ids=padded, attention_mask=mask).last_hidden_state
        found.append(hidden[torch.arange(len(ids)), lengths - 1])
    return torch.cat(found)


def fit_head(differences: Tensor, seed: int) -> Tensor:
    """Return weights [hidden size] that prefer chosen replies, from differences of features [pairs, hidden size]."""
    torch.manual_seed(seed)
    head = torch.nn.Parameter(0.02 * torch.randn(differences.shape[1]))
    optimizer = torch.optim.Adam([head], lr=0.05)
    for _ in range(_STEPS):
        loss = -F.logsigmoid(differences @ head).mean() + _DECAY * head.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.detach()


if __name__ == "__main__":
    main()
