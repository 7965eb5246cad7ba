"""A server for one language model: OpenAI's interface, by the decoder of rollouts on any accelerator."""
