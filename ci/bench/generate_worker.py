"""transformers' `generate()`, for `rollout.py`: one rollout for each line on stdin.

It has the model and the machine to itself and knows nothing of this project. First every setting of it is tried on the
whole workload; the fastest is the one that takes its turns.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from channel import Channel

SETTINGS: dict[str, dict[str, Any]] = {
    "sdpa, dynamic cache": {"attention": "sdpa"},
    "sdpa, static cache": {"attention": "sdpa", "cache_implementation": "static", "disable_compile": True},
    "eager, dynamic cache": {"attention": "eager"},
    "eager, static cache": {"attention": "eager", "cache_implementation": "static", "disable_compile": True},
}
COMPILED = "sdpa, static cache, compiled"
"""What `generate()` does by itself on devices other than a CPU, where it has to be told to."""


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    channel = Channel()
    import torch
    import transformers

    torch.manual_seed(0)
    device = torch.device("cpu" if work["accelerator"] == "cpu" else work["accelerator"])
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.bfloat16).to(device).eval()
    # Nothing ends, so nothing has to be asked; and nothing stands between the logits and the draw.
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    ids = torch.tensor(work["prompts"][: work["batch_size"]], device=device)
    length = work["completion_tokens"]

    def rollout(name: str, tokens: int = length) -> float:
        given = dict(settings[name])
        model.set_attn_implementation(given.pop("attention"))
        begun = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=True,
                top_k=0,
                use_cache=True,
                **given,
            )
        if device.type != "cpu":
            torch.accelerator.synchronize()
        if found.shape[1] != ids.shape[1] + tokens:
            raise SystemExit(f"{name}: {found.shape[1] - ids.shape[1]} tokens were generated, not {tokens}")
        return time.perf_counter() - begun

    settings = dict(SETTINGS)
    if device.type != "cpu" or work["compiled"]:
        compiled = {"attention": "sdpa", "cache_implementation": "static"}
        if device.type == "cpu":
            config = transformers.CompileConfig(mode="default")
            config._compile_all_devices = True  # transformers 5.23: its way to say that a CPU is meant too
            compiled["compile_config"] = config
        settings[COMPILED] = compiled
    tried: dict[str, float] = work["tried"]
    if not tried:
        for name in settings:
            # Two tokens bring up code and buffers; a compiled step is made for a cache of its own length.
            rollout(name, length if name == COMPILED else 2)
            tried[name] = round(rollout(name), 3)
            print(f"{name}: {tried[name]:.2f} s", file=sys.stderr, flush=True)
    best = min(tried, key=tried.__getitem__)
    channel.reply(
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        threads=torch.get_num_threads(),
        tried=tried,
        setting=best,
    )
    while channel.wait():
        rollout(best)
        channel.reply()


if __name__ == "__main__":
    main()
