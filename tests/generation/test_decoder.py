"""The static-cache decoder says what transformers' own generate says, and fills its masks from what it drew."""

import contextlib
import warnings

import pytest
import torch

from accelerators import CaptureError, ShapePolicy
from rlhf.config.schema import SamplingConfig
from rlhf.generation.decoder import Decoder
from rlhf.generation.rank_groups import PromptBatch

GREEDY = SamplingConfig(temperature=0)


def models():
    from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    from tests.helpers import llama

    def opt():
        sizes = {"ffn_dim": 32, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
        return OPTForCausalLM(
            OPTConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, **sizes)
        )

    def windowed(name, **changes):
        """A tiny model of a family whose layers, all or some, see `sliding_window` tokens."""
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
        special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
        config = AutoConfig.for_model(name, vocab_size=60, **sizes, **heads, **special, **changes)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    def mixed(name):
        kinds = ["sliding_attention", "full_attention"]
        return lambda: windowed(name, sliding_window=5, use_sliding_window=True, layer_types=kinds)

    return {
        "mistral": lambda: windowed("mistral", sliding_window=4096),
        "mistral, filled": lambda: windowed("mistral", sliding_window=8),
        "phi3, filled": lambda: windowed("phi3", sliding_window=8),
        "gemma3_text": mixed("gemma3_text"),
        "qwen2": mixed("qwen2"),
        "cohere2": mixed("cohere2"),
        "llama": lambda: llama(60),
        "opt": opt,
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=64)),
        "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=2)),
    }


WINDOWED = ("mistral", "mistral, filled", "phi3, filled", "gemma3_text", "qwen2", "cohere2")
NAMES = ("llama", "opt", "gpt2", "bloom", *WINDOWED)


def build(name):
    torch.manual_seed(1)
    return models()[name]().eval()


def prompts():
    """Two prompts of different lengths, padded left with 0."""
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 8, 7, 6, 5, 4], [0, 11, 12, 13, 14, 15]])
    return ids, (ids != 0).long()


def decoder(accelerator, eos=(), length=12, shapes="static", batch_size=None):
    return Decoder(
        accelerator,
        eos_ids=eos,
        pad_id=0,
        max_new_tokens=length,
        shapes=ShapePolicy(shapes),
        batch_size=batch_size,
    )


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_generate(accelerator, name):
    model, (ids, mask) = build(name), prompts()
    expected = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of names that transformers will remove
        completions = decoder(accelerator).generate(model, ids, mask, GREEDY)
    assert torch.equal(completions.ids, expected[:, 6:])
    assert (completions.mask == 1).all()


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.parametrize("name", NAMES)
def test_prompt_of_several_completions_is_read_once(accelerator, name, shapes):
    """Tokens are those of the definition: the first at which the summed probabilities pass the random number.

    They are computed by whole passes without a cache. Rows end early and make room.
    """
    copies, length = 4, 10
    model, (ids, mask) = build(name), prompts()
    repeated = [tensor.repeat_interleave(copies, 0) for tensor in (ids, mask)]
    read = []
    hook = model.get_input_embeddings().register_forward_hook(lambda layer, inputs, _: read.append(inputs[0].shape))
    decode = decoder(accelerator, eos=range(3, 60, 7), length=length, shapes=shapes)
    for _ in range(2):  # the second one uses the first one's buffers again, if shapes are static
        decode.random.manual_seed(5)
        drawn = decode.generate(model, *repeated, SamplingConfig(), copies)
        assert decode.copies == copies
    hook.remove()
    assert [shape[0] for shape in read if shape[1] == 6] == [3, 3]
    numbers = torch.rand(length, 12, generator=torch.Generator().manual_seed(5))
    assert len(drawn.mask.sum(1).unique()) > 1, "all rows end together"
    for row in range(12):
        text = repeated[0][row][repeated[1][row].bool()].tolist()
        for place, token in enumerate(drawn.ids[row][drawn.mask[row].bool()].tolist()):
            with torch.no_grad():
                sums = model(torch.tensor([text])).logits[0, -1].double().softmax(-1).cumsum(-1)
            near = (sums - numbers[place, row]).abs().min() < 1e-5
            assert near or token == torch.searchsorted(sums, numbers[place, row].double(), right=True)
            text.append(token)
    decode.batch_size = 9  # two batches of 6, which is no multiple of 4
    decode.generate(model, *repeated, SamplingConfig(), copies)
    assert decode.copies == 1


def test_row_ends_with_its_end_token_and_padding_follows(accelerator):
    model, (ids, mask) = build("llama"), prompts()
    free = decoder(accelerator).generate(model, ids, mask, GREEDY).ids
    end = free[0, 4].item()
    completions = decoder(accelerator, eos=[end]).generate(model, ids, mask, GREEDY)
    for row in range(3):
        hits = (free[row] == end).nonzero()
        length = hits[0].item() + 1 if len(hits) else 12
        assert torch.equal(completions.ids[row, :length], free[row, :length])
        assert completions.mask[row].tolist() == [1] * length + [0] * (12 - length)
        assert (completions.ids[row, length:] == 0).all()


def test_every_row_may_end_at_once(accelerator):
    model, (ids, mask) = build("llama"), prompts()
    first_tokens = decoder(accelerator).generate(model, ids, mask, GREEDY).ids[:, 0].tolist()
    for shapes, is_full in (("static", True), ("dynamic", False)):  # dynamic ones drop columns that no row reached
        decode = decoder(accelerator, eos=first_tokens, length=40, shapes=shapes)
        longer = decode.generate(model, mask * 9, mask, GREEDY)
        drawn = decode.generate(model, ids, mask, GREEDY)
        assert drawn.mask.sum(-1).tolist() == [1, 1, 1] and (drawn.ids.shape[1] == 40) == is_full
        assert (drawn.ids[:, 1:] == 0).all() and longer.mask.sum() > 12, "the buffers keep an earlier call"


def test_steps_are_the_tokens_drawn_one_after_the_other(accelerator):
    model, (ids, mask) = build("llama"), prompts()
    decode = decoder(accelerator, length=12)
    for _ in range(2):
        decode.generate(model, ids, mask, GREEDY)
        assert decode.steps == 12, "of the latest call"
    parts = decoder(accelerator, length=12, batch_size=1)
    parts.generate(model, ids, mask, GREEDY)
    assert parts.steps == 3 * 12, "batches follow one another"
    first_tokens = decode.generate(model, ids, mask, GREEDY).ids[:, 0].tolist()
    ended = decoder(accelerator, eos=first_tokens, length=12, shapes="dynamic")
    ended.generate(model, ids, mask, GREEDY)
    assert ended.steps == 4, "the decoder looks for rows that have ended every four steps"


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.parametrize("batch_size", [1, 2, 99])
def test_samples_do_not_depend_on_the_batch_size(accelerator, shapes, batch_size):
    """Some rows end early; rows that fill up the last part have no part in it."""
    model, (ids, mask) = build("llama"), prompts()
    five = torch.cat([ids, ids[:2].flip(0)]), torch.cat([mask, mask[:2].flip(0)])
    drawn = []
    for rows in (None, batch_size):
        decode = decoder(accelerator, eos=range(1, 20), length=40, shapes=shapes, batch_size=rows)
        decode.random.manual_seed(3)
        drawn.append(decode.generate(model, *five, SamplingConfig()))
    whole, cut = drawn
    assert torch.equal(whole.ids, cut.ids) and torch.equal(whole.mask, cut.mask)
    assert len(set(whole.mask.sum(-1).tolist())) > 2 and len(whole.ids) == 5
    assert (whole.ids.shape[1] < 40) == (shapes == "dynamic")


def test_log_probs_of_training_are_those_of_drawing(accelerator):
    """Left padding, positions and the cache agree with one forward pass over the whole sequence."""
    from rlhf.models.forward import completion_log_probs

    model, (ids, mask) = build("llama"), prompts()
    completions = decoder(accelerator).generate(model, ids, mask, GREEDY)
    whole = torch.cat([ids, completions.ids], 1), torch.cat([mask, completions.mask], 1)
    with torch.no_grad():
        logits = model(input_ids=whole[0], attention_mask=whole[1], position_ids=(whole[1].cumsum(-1) - 1).clamp_min(0))
        assert torch.equal(logits.logits[:, 5:-1].argmax(-1), completions.ids)
        expected = logits.logits[:, 5:-1].log_softmax(-1).gather(-1, completions.ids[..., None])[..., 0]
        torch.testing.assert_close(completion_log_probs(model, *whole, 12).log_probs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shapes", ["static", "dynamic"])  # dynamic: rows that have ended are dropped
def test_drawn_log_probs_are_those_of_the_whole_sequence(accelerator, name, shapes):
    model, (ids, mask) = build(name), (torch.cat([part, part.flip(0)]) for part in prompts())
    decode = decoder(accelerator, eos=range(1, 20), shapes=shapes)
    drawn = decode.generate(model, ids, mask, SamplingConfig(temperature=0.7))
    assert len(set(drawn.mask.sum(1).tolist())) > 1, "all rows end at once"
    (state,) = decode._states
    assert (state.order.tolist() != [*range(6)]) == (shapes == "dynamic"), "rows move into the places of dropped ones"
    whole, seen = torch.cat([ids, drawn.ids], 1), torch.cat([mask, drawn.mask], 1)
    for row, length in enumerate(drawn.mask.sum(1).tolist()):
        tokens = whole[row][seen[row].bool()]
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, -length - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, tokens[-length:, None])[:, 0]
        torch.testing.assert_close(drawn.log_probs[row, :length], expected, atol=1e-4, rtol=1e-4)


def test_cache_that_counts_tokens_in_python_is_not_captured(accelerator, captured, monkeypatch, caplog):
    """A replay would repeat the place of the recorded step."""
    from rlhf.generation import decode_state as module

    model, (ids, mask) = build("llama"), prompts()
    expected = decoder(accelerator).generate(model, ids, mask, GREEDY)
    captured.clear()
    make = module.WindowedStaticCache

    def counting(*arguments, **options):
        cache = make(*arguments, **options)
        cache.layers[1].is_sliding = True
        return cache

    monkeypatch.setattr(module, "WindowedStaticCache", counting)
    caplog.set_level("DEBUG", "rlhf")
    drawing = decoder(accelerator)
    for _ in range(2):
        assert torch.equal(drawing.generate(model, ids, mask, GREEDY).ids, expected.ids)
    (record,) = caplog.records
    assert "WindowedStaticLayer of transformers counts tokens in Python" in record.getMessage()
    assert not captured


def reading_on_the_host(model):
    """The model with a layer that looks at a value in every step, as some mixtures of experts do."""
    forward = model.forward

    def reads(*args, **kwargs):
        output = forward(*args, **kwargs)
        float(output.logits.sum())
        return output

    model.forward = reads
    return model


@pytest.mark.parametrize("recording", [False, True])
def test_capture_that_fails_is_noted_only_if_others_capture(accelerator, monkeypatch, caplog, recording):
    """The line that is to blame is for the authors of the model, or of the backend."""
    from accelerators import Support

    ids, mask = prompts()
    expected = decoder(accelerator).generate(build("llama"), ids, mask, GREEDY)
    monkeypatch.setattr(accelerator.kernels, "capabilities", lambda: {"graph_capture": Support(recording, "because")})
    caplog.set_level("DEBUG", "rlhf")
    drawing, model = decoder(accelerator), reading_on_the_host(build("llama"))
    for _ in range(2):
        assert torch.equal(drawing.generate(model, ids, mask, GREEDY).ids, expected.ids)
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in logged] == (["WARNING"] if recording else []) + ["DEBUG"]
    assert logged[-1][1].startswith("generation is not captured: ") and "test_decoder.py:" in logged[-1][1]
    assert not recording or "slower than possible" in logged[0][1]


@pytest.fixture
def captured(accelerator, monkeypatch):
    """The keys under which decoding steps were captured."""
    keys = []
    capture = accelerator.capture
    monkeypatch.setattr(accelerator, "capture", lambda fn, key: keys.append(key) or capture(fn, key))
    return keys


@pytest.mark.parametrize("shapes", ["static", "bucketed", "dynamic"])
def test_batches_of_a_rollout_share_buffers(accelerator, captured, shapes):
    model, (ids, mask) = build("llama"), prompts()
    decode = decoder(accelerator, shapes=shapes, batch_size=2)
    for _ in range(2):
        decode.generate(model, ids, mask, GREEDY)
    assert captured == ["decode 2 x 6 up to 24"]
    (state,) = decode._states
    assert state.cache.nbytes() < 2 * 2 * 2 * 2 * 24 * 8 * 4 + 64, "keys and values of two rows"


@pytest.mark.parametrize(("memory_of_caches", "captures"), [(100, 1), (10, 2)])
def test_large_buffers_are_released_before_training(accelerator, monkeypatch, captured, memory_of_caches, captures):
    from accelerators import Memory

    model, (ids, mask) = build("llama"), prompts()
    cache = 2 * 2 * 3 * 2 * 24 * 8 * 4  # keys and values, layers, rows, heads, columns, head size, bytes
    monkeypatch.setattr(accelerator, "memory", lambda: Memory(0, 0, total=cache * memory_of_caches))
    drawing = decoder(accelerator)
    first = drawing.generate(model, ids, mask, GREEDY)
    drawing.release_if_large()
    again = drawing.generate(model, ids, mask, GREEDY)
    assert torch.equal(first.ids, again.ids)
    assert len(captured) == captures


@pytest.mark.parametrize(("shapes", "captures"), [("bucketed", 2), ("static", 2), ("dynamic", 3)])
def test_each_shape_is_captured_once_unless_shapes_are_dynamic(accelerator, captured, shapes, captures):
    model, (ids, mask) = build("llama"), prompts()
    drawing = decoder(accelerator, shapes=shapes)
    for columns in (6, 5, 6):
        drawing.generate(model, ids[:, -columns:], mask[:, -columns:], GREEDY)
    assert len(captured) == captures


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_step_draws_the_same_tokens(accelerator, monkeypatch, caplog, name):
    """The step is replayed from its second call on: whatever it did in Python would not happen again."""
    from accelerators.capture import Graph
    from accelerators.testing.stand_in import record

    caplog.set_level("DEBUG", "rlhf")
    model, (ids, mask) = build(name), prompts()
    plain, free = decoder(accelerator, length=16), SamplingConfig(temperature=0.7, top_k=20)
    expected = [plain.generate(model, ids, mask, GREEDY).ids, plain.generate(model, mask * 9, mask, GREEDY).ids]
    monkeypatch.setattr(accelerator, "capture", lambda fn, key: Graph(fn, key, record))
    recorded = decoder(accelerator, length=16)
    tokens = [recorded.generate(model, ids, mask, GREEDY).ids, recorded.generate(model, mask * 9, mask, GREEDY).ids]
    assert all(torch.equal(actual, reference) for actual, reference in zip(tokens, expected))
    plain.random.manual_seed(3)
    recorded.random.manual_seed(3)
    expected = plain.generate(model, ids, mask, free).ids
    assert torch.equal(recorded.generate(model, ids, mask, free).ids, expected)
    ours = [record for record in caplog.records if record.name.startswith("rlhf")]
    assert not ours, "it was recorded, and not given up"


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_streamed_tokens_are_those_of_a_rollout(accelerator, shapes, temperature):
    model, (ids, mask) = build("llama"), prompts()
    sampling, numbers = SamplingConfig(temperature=temperature), torch.rand(12, 3, generator=torch.Generator())
    free = decoder(accelerator).generate(model, ids, mask, GREEDY).ids
    decode = decoder(accelerator, eos=free[0, 4:6].tolist(), shapes=shapes)
    decode.draw_numbers = lambda rows: numbers
    whole = decode.generate(model, ids, mask, sampling)
    rows = {row: [] for row in range(3)}
    steps = decode.stream(model, PromptBatch(ids, mask, numbers), sampling)
    tokens = next(steps)
    with contextlib.suppress(StopIteration):
        while True:
            for row, token in tokens.items():
                rows[row].append(token)
            tokens = steps.send([1] if len(rows[1]) == 3 else [])
    for row, drawn in rows.items():
        length = min(int(whole.mask[row].sum()), 3 if row == 1 else 12)
        assert [token.id for token in drawn] == whole.ids[row, :length].tolist()
        assert torch.tensor([token.log_prob for token in drawn]) == pytest.approx(
            whole.log_probs[row, :length], abs=1e-6
        )
        assert [token.ended for token in drawn[:-1]] == [False] * (length - 1)


def test_stream_continues_without_capture_where_it_stopped(accelerator):
    """A backend may refuse the second window of columns when rows have been sent already."""
    model, (ids, mask) = build("llama"), prompts()
    numbers = torch.rand(50, 3, generator=torch.Generator())
    decode = decoder(accelerator, length=50)
    expected = list(decode.stream(model, PromptBatch(ids, mask, numbers), SamplingConfig()))
    calls = []

    def capture(step, key):
        def replay():
            calls.append(key)
            if len(set(calls)) > 1:
                raise CaptureError("no second window")
            step()

        return replay

    refusing = decoder(accelerator, length=50)
    refusing._capture = capture
    assert list(refusing.stream(model, PromptBatch(ids, mask, numbers), SamplingConfig())) == expected
    assert len(set(calls)) == 2 and refusing._capture is None
