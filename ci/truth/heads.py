"""Do heads on one trained base see over-optimization, or does it take another model? About six minutes on one core.

Trains a run that is over-optimized slowly, and scores its held-out completions again: by linear heads on the features
of its reward model, each fitted to its own part of the pairs, and by a reward model of other pairs (the judge). Prints
the table of docs/decisions/006-judge.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))

from plan import list_runs
from run import WORK, train

from rlhf.data.toy_world import generate_records
from rlhf.diagnosis.records import read_run

RUN = "pairs-2048-seed-0"
HEADS = 4
_OTHER_SEED = 500  # of pairs that the reward model has not seen
_STEPS, _DECAY = 300, 1e-3

Text = tuple[str, str]
"""A prompt and a reply."""


def main() -> None:
    """Train the run, and print a line for each evaluation."""
    torch.set_num_threads(1)
    (run,) = (run for run in list_runs() if run.name == RUN)
    (stage,) = read_run(train(run, keep=True)).stages
    model = WORK / f"reward-{run.seed}-{run.pairs}" / "reward" / "model"
    heads = {}
    for kind, seed in (("own", run.seed), ("other", run.seed + _OTHER_SEED)):
        records = list(islice(generate_records(seed), run.pairs))
        chosen, rejected = (
            read_features(model, [(record["prompt"], record[reply]) for record in records])
            for reply in ("chosen", "rejected")
        )
        for part in range(HEADS):
            heads[f"{kind} {part + 1}"] = fit_head((chosen - rejected)[part::HEADS], part)
    print(" | ".join(["step", "approved", "reward", "judge", *heads]))
    for step, rows in sorted(stage.heldout.items()):
        features = read_features(model, [(row["prompt"], row["completion"]) for row in rows])
        numbers = [fmean(row[key] for row in rows) for key in ("approved", "reward", "judge")]
        numbers += [(features @ head).mean().item() for head in heads.values()]
        print(" | ".join([str(step), *(f"{number:.2f}" for number in numbers)]), flush=True)


@torch.no_grad()
def read_features(folder: Path, texts: Sequence[Text], rows: int = 256) -> Tensor:
    """Return what the head of a reward model reads at the end of each text: [texts, hidden size]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backbone = AutoModelForSequenceClassification.from_pretrained(folder).eval().model
    found = []
    for start in range(0, len(texts), rows):
        ids = [
            [
                *tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
                ),
                *tokenizer(reply, add_special_tokens=False).input_ids,
                tokenizer.eos_token_id,
            ]
            for prompt, reply in texts[start : start + rows]
        ]
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
