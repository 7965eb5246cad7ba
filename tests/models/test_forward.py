"""The two forward passes: completion log-probabilities and token-wise scores, on padded batches."""

import torch

from rlhf.models.forward import ScalarHead, completion_log_probs, last_token_scores, model_inputs, position_ids
from tests.helpers import llama


def left_padded():
    ids = torch.tensor([[0, 0, 5, 6, 7, 8, 9, 4], [3, 4, 5, 6, 7, 8, 9, 2]])
    return ids, (ids != 0).long()


def test_positions_count_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]


def test_left_padding_does_not_change_log_probs():
    model, (ids, mask) = llama(30).eval(), left_padded()
    with torch.no_grad():
        padded = completion_log_probs(model, ids, mask, 4).log_probs[0]
        alone = completion_log_probs(model, ids[:1, 2:], mask[:1, 2:], 4).log_probs[0]
    torch.testing.assert_close(padded, alone)


def test_log_probs_are_those_of_the_tempered_distribution():
    model, (ids, mask) = llama(30).eval(), left_padded()
    with torch.no_grad():
        logits = model(**model_inputs(model, ids, mask)).logits[:, 3:-1] / 0.7
        actual = completion_log_probs(model, ids, mask, 4, temperature=0.7, entropy=True)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(actual.log_probs, expected.gather(-1, ids[:, 4:, None])[..., 0])
    torch.testing.assert_close(actual.entropy, -(expected.exp() * expected).sum(-1))


def test_only_completion_positions_are_projected():
    model, (ids, mask) = llama(30), left_padded()
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[:2]))
    completion_log_probs(model, ids, mask, 4)
    assert seen == [(2, 4)]


def test_rows_of_one_token_have_no_log_probs():
    """As the rows of a last batch of an evaluation may be."""
    model, ids = llama(30), torch.tensor([[5], [6]])
    actual = completion_log_probs(model, ids, torch.ones_like(ids), 0, entropy=True)
    assert actual.log_probs.shape == actual.entropy.shape == (2, 0)


def test_a_batch_without_padding_runs_the_same_operators():
    """transformers would look at the mask's values and choose other operators where nothing is masked."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model, (ids, mask) = llama(30), left_padded()
    model(**model_inputs(model, ids, mask))  # first use
    runs = []
    for row_mask in (mask, torch.ones_like(mask)):
        with Names() as names:
            model(**model_inputs(model, ids, row_mask))
        runs.append(names.seen)
    assert runs[0] == runs[1]
    assert not any("_local_scalar_dense" in name for name in runs[0]), "a value was read from the device"


def test_scores_come_for_every_token_and_from_the_last_real_one():
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    config = llama(30).config
    config.num_labels = 1
    model = ScalarHead(LlamaForSequenceClassification(config)).eval()
    ids, mask = left_padded()
    mask[1, -3:] = 0  # a completion that ended early
    scores = model(ids, mask)
    assert scores.shape == (2, 8)
    assert last_token_scores(scores, mask).tolist() == [scores[0, 7].item(), scores[1, 4].item()]
