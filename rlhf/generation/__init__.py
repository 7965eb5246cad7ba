"""Generation: a static KV-cache decoder, sampling, and the switch of the actor from training to generation."""
