"""Benchmark: a training step of a small Llama on the simulated Gaudi, accounting included, against the plain CPU.

One process, the two in turns: A B A B ..., so that whatever else the machine does meets both. Prints medians as JSON.
Needs plugins/rlhf-gaudi-sim: `pip install ./plugins/rlhf-gaudi-sim`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import gaudi_sim

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
ROWS, TOKENS, VOCABULARY = 8, 128, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each (30)")
    options = parser.parse_args()
    gaudi_sim.install()
    import habana_frameworks.torch.core as htcore
    import torch

    sides = {"cpu": training("cpu", lambda: None), "simulated": training("hpu", htcore.mark_step)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    losses: dict[str, float] = {}
    for step in range(options.steps + 3):  # the first three warm up
        for side, one in sides.items():
            begun = time.perf_counter()
            loss = one()
            if step >= 3:
                seconds[side].append(time.perf_counter() - begun)
            losses[side] = float(loss)
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    facts = {
        "work": f"Llama {SIZES}, {ROWS} x {TOKENS} tokens, fp32, AdamW; forward, backward, step, two boundaries",
        "threads": torch.get_num_threads(),
        "steps": options.steps,
        "milliseconds": {side: round(1000 * median, 1) for side, median in medians.items()},
        "ratio": round(medians["simulated"] / medians["cpu"], 2),
        "losses": losses,
    }
    print(json.dumps(facts, indent=2))


def training(device: str, boundary: Callable[[], None]) -> Callable[[], object]:
    """One optimizer step each time it is called; gives the loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES)).to(device)
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        boundary()
        optimizer.step()
        optimizer.zero_grad()
        boundary()
        return loss.detach()

    return step


if __name__ == "__main__":
    main()
