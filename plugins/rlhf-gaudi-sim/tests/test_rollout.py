"""Generation with recorded steps on the simulated device draws what plain generation on the CPU does."""

from __future__ import annotations

import json

from conftest import Run

GENERATE = """
import json, sys
import accelerators

accelerator = accelerators.select(sys.argv[1], environ={}).create()
accelerator.bind(0)
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from rlhf.config.schema import SamplingConfig
from rlhf.models.quantized import quantize
from rlhf.generation.decoder import Decoder

torch.manual_seed(0)
ids = torch.randint(2, 60, (3, 6))
mask = torch.ones_like(ids)
mask[0, :3] = 0
ids, mask = accelerator.to_device((ids * mask, mask))
mixed = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
families = {
    "llama": ("llama", {}),
    "a window longer than the rows": ("mistral", {"sliding_window": 4096}),
    "a window that is filled": ("mistral", {"sliding_window": 8}),
    "windows in some layers": ("gemma3_text", mixed),
    "frozen weights in int8": ("llama", {}),
    "frozen weights in int4": ("llama", {}),
}
found = {}
for title, (family, changes) in families.items():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60, "head_dim": 8}
    special = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **sizes, **special, bos_token_id=None, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    if "frozen" in title:
        quantize(model, title[-4:], accelerator.kernels.get("quantized_weights"), exported=False)
    model = model.to(accelerator.device())
    # In the first rollout every row ends at once, in the others none does.
    decoder = Decoder(
        accelerator, eos_ids=range(60), pad_id=0, max_new_tokens=72, shapes=accelerators.ShapePolicy("static")
    )
    compilations = []
    for _ in range(3):
        before = accelerator.compilations() or 0
        tokens = decoder.generate(model, ids, mask, SamplingConfig(temperature=0)).ids
        compilations.append((accelerator.compilations() or 0) - before)
        decoder.eos_ids.fill_(-1)
    found[title] = {"tokens": tokens.tolist(), "compilations": compilations}
print(json.dumps(found))
"""


def test_recorded_steps_draw_the_tokens_of_plain_ones(python: Run) -> None:
    results = {}
    for name in ("cpu", "hpu"):
        done = python("-c", GENERATE, name, simulated=name == "hpu", strict=False, loaded=name == "hpu")
        assert done.returncode == 0, done.stderr[-2000:]
        assert "slower" not in done.stderr
        results[name] = json.loads(done.stdout.splitlines()[-1])
    for title, expected in results["cpu"].items():
        assert results["hpu"][title]["tokens"] == expected["tokens"], title
        first, second, third = results["hpu"][title]["compilations"]
        assert first < 16, "a step is recorded once for each of three windows, and not compiled 71 times"
        # Buffers are there by then when the prompts are read, in two graphs where transformers reads their mask.
        assert second <= 2 and third == 0
    assert results["hpu"]["llama"]["compilations"][0] > 0
