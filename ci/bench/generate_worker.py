"""Run rollouts with transformers' `generate()` for `rollout.py`: one rollout per line on stdin.

`rollout.py` starts this script; it is not for use from a shell. The process imports nothing of `rlhf` and holds only
the model. It first times each setting of `generate()` on the whole workload, unless an earlier call has, and then uses
the fastest.
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
"""The default of `generate()` with a static cache on a GPU; on a CPU, compilation has to be requested."""


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    channel = Channel()
    import torch
    import transformers

    torch.manual_seed(0)
    device = torch.device("cpu" if work["accelerator"] == "cpu" else work["accelerator"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[work["precision"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype).to(device).eval()
    # Without an end token there is no check for it, and no processor runs between the logits and the sampling.
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    ids = torch.tensor(work["prompts"][: work["batch_size"]], device=device)
    length = work["completion_tokens"]

    def rollout(name: str, tokens: int = length) -> float:
        options = dict(settings[name])
        model.set_attn_implementation(options.pop("attention"))
        start = time.perf_counter()
        with torch.inference_mode():
            rows = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=True,
                top_k=0,
                use_cache=True,
                **options,
            )
        if device.type != "cpu":
            torch.accelerator.synchronize()
        if rows.shape[1] != ids.shape[1] + tokens:
            raise SystemExit(f"{name}: {rows.shape[1] - ids.shape[1]} tokens were generated, expected {tokens}")
        return time.perf_counter() - start

    settings = dict(SETTINGS)
    if device.type != "cpu" or work["compiled"]:
        compiled = {"attention": "sdpa", "cache_implementation": "static"}
        if device.type == "cpu":
            config = transformers.CompileConfig(mode="default")
            config._compile_all_devices = True  # transformers 5.23: compile on a CPU too
            compiled["compile_config"] = config
        settings[COMPILED] = compiled
    tried: dict[str, float] = work["tried"]
    if not tried:
        for name in settings:
            # Two tokens suffice to warm up, but a compiled step is specific to the length of the cache.
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
