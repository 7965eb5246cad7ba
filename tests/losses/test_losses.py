"""The objectives against plain loops that follow their definitions row by row."""

import math

import pytest
import torch
import torch.nn.functional as F

from rlhf.config.schema import PPOConfig
from rlhf.losses import log_probs as tokens
from rlhf.losses.advantages import gae, whiten
from rlhf.losses.log_probs import ends_with, token_log_probs, token_log_probs_and_entropy
from rlhf.losses.ppo import earned_scores, importance_weights, kl_estimate, policy_loss, shaped_rewards, value_loss
from rlhf.losses.reward_model import pairwise_reward_loss


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def lengths_mask(lengths, width):
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).float()


def token_entropy(logits, temperature=1.0):
    return token_log_probs_and_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.long), temperature)[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tempered_log_probs_and_entropy_lose_no_digits(dtype, monkeypatch):
    """The quotient is float32: rounded to bf16, log-probabilities would differ from the ones that were sampled."""
    monkeypatch.setattr(tokens, "CHUNK_ELEMENTS", 100)  # several chunks
    logits, labels = (torch.randn(2, 3, 50) * 8).to(dtype), torch.randint(50, (2, 3))
    before, expected = logits.clone(), (logits.double() / 0.7).log_softmax(-1)
    log_probs = token_log_probs(logits, labels, 0.7)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected.gather(-1, labels[..., None])[..., 0], atol=1e-4, rtol=0)
    entropy = -(expected.exp() * expected).sum(-1)
    torch.testing.assert_close(token_entropy(logits, 0.7).double(), entropy, atol=1e-4, rtol=0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("chunk", [20, 1 << 24])  # a row at a time, and all
def test_log_probs_and_entropy_have_the_gradient_of_log_softmax(temperature, with_entropy, chunk, monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK_ELEMENTS", chunk)
    logits, labels = torch.randn(3, 5, 11, dtype=torch.float64, requires_grad=True), torch.randint(11, (3, 5))
    first, second = torch.randn(2, 3, 5)
    second = second if with_entropy else torch.zeros(3, 5)
    distribution = F.log_softmax(logits / temperature, -1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    expected = distribution.gather(-1, labels[..., None])[..., 0]
    (expected * first + entropies * second).sum().backward()
    gradient, logits.grad = logits.grad, None
    if with_entropy:
        log_probs, entropy = token_log_probs_and_entropy(logits, labels, temperature)
        torch.testing.assert_close(entropy.double(), entropies, atol=1e-6, rtol=1e-5)
        (log_probs * first + entropy * second).sum().backward()
    else:
        log_probs = token_log_probs(logits, labels, temperature)
        (log_probs * first).sum().backward()
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(logits.grad, gradient, atol=1e-6, rtol=1e-5)


def test_no_float32_copy_of_the_logits_exists(monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK_ELEMENTS", 64)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                sizes.append(out.numel())
            return out

    logits = torch.randn(4, 8, 32).bfloat16().requires_grad_()
    with Sizes():
        token_log_probs(logits, torch.zeros(4, 8, dtype=torch.long)).sum().backward()
        (token_entropy(logits) ** 2).sum().backward()
    assert sizes and max(sizes) <= 64


def test_entropy_of_impossible_and_certain_tokens_is_finite():
    torch.testing.assert_close(token_entropy(torch.zeros(2, 3, 8)), torch.full((2, 3), math.log(8)))
    assert token_entropy(torch.tensor([[[-torch.inf, 0.0, -torch.inf]]])).item() == 0
    logits = torch.tensor([[[1.0, -torch.inf, 1.0, 3.0]]], requires_grad=True)
    (token_entropy(logits) * 1e6).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 0, 1] == 0 and logits.grad[0, 0, 3] < 0


def test_rewards_are_kl_penalty_and_score_on_the_last_action():
    start, width = 3, 9
    log_probs, reference = torch.randn(4, width), torch.randn(4, width)
    scores = torch.tensor([1.0, -7.0, 9.0, 2.0])
    lengths = [6, 3, 1, 0]  # of the completion
    mask = torch.zeros(4, width)
    for row, length in enumerate(lengths):
        mask[row, start : start + length] = 1
    earned = earned_scores(scores, torch.ones(4), clip=5.0)
    actual = shaped_rewards(log_probs, reference, earned, mask, start, kl_coef=0.3)
    expected = torch.zeros(4, width)
    for row, length in enumerate(lengths):
        for column in range(start, start + length):
            expected[row, column] = -0.3 * (log_probs[row, column] - reference[row, column])
        if length:
            expected[row, start + length - 1] += max(-5.0, min(5.0, scores[row].item()))
    torch.testing.assert_close(actual, expected)


def test_missing_end_is_subtracted_after_the_clip():
    scores, ended = torch.tensor([1.0, 1.0, -9.0, 9.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert earned_scores(scores, ended, clip=5.0, missing_end=2.0).tolist() == [1, -1, -7, 3]
    assert earned_scores(scores, ended, clip=5.0).tolist() == [1, 1, -5, 5]
    assert earned_scores(scores, ended, clip=5.0, missing_end=0.0).tolist() == [1, 1, -5, 5]


def test_ends_with_reads_the_last_action():
    ids = torch.tensor([[4, 7, 9], [4, 5, 7], [7, 5, 5], [7, 7, 7]])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert ends_with(ids, mask, torch.tensor([7, 9])).tolist() == [1, 0, 1, 0]


P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
KL = (P * (P / Q).log()).sum()


@pytest.mark.parametrize(("estimator", "mean"), [("k1", KL), ("k3", KL), ("k2", (P * (P / Q).log() ** 2 / 2).sum())])
def test_the_mean_of_a_kl_estimate(estimator, mean):
    """k1 and k3 are unbiased; k2 is not, and k1 alone is ever negative."""
    estimate = kl_estimate((P / Q).log(), estimator)
    torch.testing.assert_close((P * estimate).sum(), mean)
    assert (estimate < 0).any() == (estimator == "k1")


@pytest.mark.parametrize(
    ("estimator", "loss"),
    [
        ("k1", lambda log_p: 0 * log_p.sum()),
        ("k2", lambda log_p: (log_p.exp() * (log_p - Q.log())).sum()),  # KL(policy || reference)
        ("k3", lambda log_p: (Q * (Q.log() - log_p)).sum()),  # KL(reference || policy)
    ],
)
def test_gradient_of_kl_estimate_in_the_loss_is_a_divergences(estimator, loss):
    """On policy, in expectation over what is drawn."""
    logits = P.log().requires_grad_()
    (P * kl_estimate(logits.log_softmax(-1) - Q.log(), estimator)).sum().backward()
    actual, logits.grad = logits.grad, None
    loss(logits.log_softmax(-1)).backward()
    torch.testing.assert_close(actual, logits.grad)


def test_only_k1_in_the_reward_has_the_divergences_gradient():
    logits = P.log().requires_grad_()
    gradients = {}
    for estimator in ("k1", "k2", "k3"):
        logits.grad = None
        (P * kl_estimate((P / Q).log(), estimator) * logits.log_softmax(-1)).sum().backward()
        gradients[estimator] = logits.grad
    log_p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - Q.log())).sum(), logits)
    (backward,) = torch.autograd.grad((Q * (Q.log() - logits.log_softmax(-1))).sum(), logits)
    torch.testing.assert_close(gradients["k1"], exact)
    torch.testing.assert_close(gradients["k3"], exact - backward)
    assert not torch.allclose(gradients["k2"], exact, atol=1e-2)


def test_infinite_log_probs_of_padding_change_nothing():
    log_probs = torch.tensor([[0.0, -torch.inf]])
    rewards = shaped_rewards(log_probs, torch.zeros(1, 2), torch.ones(1), torch.tensor([[1, 0]]), 0)
    assert rewards.tolist() == [[1.0, 0.0]]
    log_probs = torch.tensor([[0.1, -torch.inf]], requires_grad=True)
    loss = policy_loss(log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[1.0, 0.0]]))
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.1)) and log_probs.grad[0, 1] == 0


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_follow_the_recursion_of_gae(gamma, lam):
    values, rewards = torch.randn(3, 6), torch.randn(3, 6)
    advantages, returns = gae(rewards, values, torch.ones(3, 6), PPOConfig(gamma=gamma, lam=lam))
    assert advantages.shape == returns.shape == (3, 6)
    for row in range(3):
        running = 0.0
        for column in reversed(range(6)):
            following = values[row, column + 1] if column < 5 else 0.0
            running = rewards[row, column] + gamma * following - values[row, column] + gamma * lam * running
            torch.testing.assert_close(advantages[row, column], running)
            torch.testing.assert_close(returns[row, column], running + values[row, column])


def test_policy_loss_takes_the_worse_objective():
    ratio = torch.tensor([[0.5, 1.5, 0.5, 1.5]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    actual = policy_loss(ratio.log(), torch.zeros(1, 4), advantages, torch.ones(1, 4), clip=0.2)
    torch.testing.assert_close(actual, torch.tensor((-0.5 - 1.2 + 0.8 + 1.5) / 4))


def test_policy_loss_has_no_gradient_if_clipped_or_masked():
    log_probs = torch.tensor([[0.5, 0.1, 0.1]], requires_grad=True)
    policy_loss(log_probs, torch.zeros(1, 3), torch.ones(1, 3), torch.tensor([[1.0, 1.0, 0.0]])).backward()
    assert log_probs.grad[0, 0] == 0 and log_probs.grad[0, 1] != 0 and log_probs.grad[0, 2] == 0


def test_value_loss_takes_the_larger_error():
    actual = value_loss(torch.tensor([[2.0, 0.1]]), torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]), torch.ones(1, 2))
    torch.testing.assert_close(actual, torch.tensor(0.5 * (2.8**2 + 0.9**2) / 2))


def test_parts_of_a_batch_add_up_to_the_loss_of_the_whole():
    log_probs, old, advantages = torch.randn(3, 4, 5)
    mask = lengths_mask([5, 1, 0, 3], 5)
    whole = policy_loss(log_probs, old, advantages, mask)
    parts = [
        policy_loss(log_probs[rows], old[rows], advantages[rows], mask[rows], total=mask.sum())
        for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_whitened_values_have_mean_0_and_deviation_1():
    values, mask = torch.randn(4, 6) * 3 + 1, lengths_mask([6, 2, 1, 4], 6)
    white = whiten(values, mask)
    real = white[mask.bool()]
    torch.testing.assert_close(real.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(real.std(unbiased=False), torch.tensor(1.0), atol=1e-4, rtol=0)
    assert (white[~mask.bool()] == 0).all()


def test_parts_of_a_batch_whiten_as_the_whole_does():
    values, mask = torch.randn(4, 6), lengths_mask([6, 2, 1, 4], 6)
    sums = [torch.stack([mask[2:].sum(), (values * mask)[2:].sum()])]
    mean = (values * mask).sum() / mask.sum()
    sums.append((((values - mean) * mask)[2:] ** 2).sum())
    actual = whiten(values[:2], mask[:2], lambda part: part + sums.pop(0))
    torch.testing.assert_close(actual, whiten(values, mask)[:2])


@pytest.mark.parametrize("deviation", [1.0, 0.01, 0.001])
def test_whitening_keeps_its_digits_at_a_large_mean(deviation):
    values, mask = torch.randn(16, 64, dtype=torch.float64) * deviation + 5, torch.ones(16, 64)
    actual = whiten(values.float(), mask)
    assert actual.std(unbiased=False).item() == pytest.approx(1, abs=6e-3)  # 1e-8 is added to the variance
    torch.testing.assert_close(actual.double(), (values - values.mean()) / values.std(), atol=0.02, rtol=0.01)


def plain_loss(rewards, ids, mask, *, last=False, margins=(0.0, 0.0, 0.0), center=0.0):
    """The definitions of the papers, one pair and one token at a time: the loss, and the scores of the replies."""
    total, scores = 0.0, []
    for row, margin in enumerate(margins):
        other, losses = row + 3, []
        ends = [int(mask[row].sum()) - 1, int(mask[other].sum()) - 1]
        better, worse = rewards[row, ends[0]], rewards[other, ends[1]]
        scores.append([better.item(), worse.item()])
        if last:
            losses = [-F.logsigmoid(better - worse - margin)]
        else:
            parting = next(column for column in range(8) if ids[row, column] != ids[other, column])
            for column in range(parting, max(ends) + 1):
                losses.append(-F.logsigmoid(rewards[row, column] - rewards[other, column] - margin))
        total = total + sum(losses) / len(losses) + center * (better + worse) ** 2
    return total / len(margins), torch.tensor(scores)


def pairs_batch():
    lengths = [7, 4, 5, 5, 8, 5]
    mask = lengths_mask(lengths, 8).long()
    ids = torch.randint(1, 50, (6, 8))
    ids[3:, :3] = ids[:3, :3]  # a shared prompt
    ids[:3, 3], ids[3:, 3] = 1, 2
    return torch.randn(6, 8, requires_grad=True), ids * mask, mask


@pytest.mark.parametrize("compared", ["token", "last"])
@pytest.mark.parametrize(
    ("margins", "center"), [((0, 0, 0), 0.0), ((0.5, 2.0, 0.0), 0.0), ((0.3, 0.3, 0.3), 0.1), ((0, 0, 0), 0.5)]
)
def test_pairwise_losses_and_gradients_are_those_of_a_loop(compared, margins, center):
    rewards, ids, mask = pairs_batch()
    margin = margins[0] if len(set(margins)) == 1 else torch.tensor(margins)
    result = pairwise_reward_loss(rewards, ids, mask, compared=compared, margins=margin, center=center)
    result.loss.backward()
    gradient, rewards.grad = rewards.grad, None
    expected, scores = plain_loss(rewards, ids, mask, last=compared == "last", margins=margins, center=center)
    expected.backward()
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.losses.mean(), expected)
    torch.testing.assert_close(torch.stack([result.chosen_scores, result.rejected_scores], 1), scores)
    torch.testing.assert_close(gradient, rewards.grad)


def test_the_loss_of_the_last_tokens_moves_no_other_score():
    rewards, ids, mask = pairs_batch()
    pairwise_reward_loss(rewards, ids, mask, compared="last").loss.backward()
    lengths = mask.sum(1)
    assert [row.nonzero().flatten().tolist() for row in rewards.grad] == [[int(length) - 1] for length in lengths]


def test_pair_that_fills_up_the_batch_changes_nothing():
    rewards, ids, mask = pairs_batch()
    keep = torch.tensor([0, 1, 3, 4])
    expected = pairwise_reward_loss(rewards[keep], ids[keep], mask[keep]).loss
    actual = pairwise_reward_loss(rewards, ids, mask, pair_mask=torch.tensor([True, True, False])).loss
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("correction", "limit"), [("tis", 2.0), ("mis", 2.0), ("tis", 1.1), ("mis", 5.0)])
def test_importance_weights_are_those_of_a_loop(correction, limit):
    log_probs, drawn = -torch.rand(5, 7) * 3, -torch.rand(5, 7) * 3
    mask = lengths_mask([7, 0, 3, 1, 5], 7)
    log_probs[1] = drawn[2, 5] = -math.inf  # of padding
    weights = importance_weights(log_probs, drawn, mask, correction, limit)
    for row in range(5):
        for column in range(7):
            ratio = math.exp(float(log_probs[row, column]) - float(drawn[row, column])) if mask[row, column] else 0.0
            expected = min(ratio, limit) if correction == "tis" else ratio * (1 / limit <= ratio <= limit)
            assert weights[row, column].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("correction", ["tis", "mis"])
def test_corrected_gradient_is_that_of_the_trained_policys_own_draws(correction):
    """Summed over all tokens: under the drawing policy with weights as under the trained one without, by hand."""
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    trained = logits.log_softmax(-1)
    drawing = (logits.detach() + 0.3 * torch.randn(6)).log_softmax(-1)
    advantages = torch.randn(6, dtype=torch.float64)
    mask = torch.ones(1, 6)
    weights = importance_weights(trained[None], drawing[None], mask, correction, 10.0)[0].double()
    (own,) = torch.autograd.grad((trained.exp().detach() * advantages * trained).sum(), logits, retain_graph=True)
    (corrected,) = torch.autograd.grad((drawing.exp() * weights * advantages * trained).sum(), logits)
    torch.testing.assert_close(corrected, own, rtol=1e-5, atol=1e-7)


def test_weight_of_a_loss_is_a_weight_of_its_advantage():
    """PPO multiplies advantages: the clipped surrogate of a token times its weight, as the definition has it."""
    log_probs, old, advantages = -torch.rand(3, 4), -torch.rand(3, 4), torch.randn(3, 4)
    weights, mask = torch.rand(3, 4) * 2, lengths_mask([4, 2, 3], 4)
    ratio = (log_probs - old).exp()
    surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    expected = (weights * surrogate * mask).sum() / mask.sum()
    assert policy_loss(log_probs, old, advantages * weights, mask).item() == pytest.approx(expected.item(), rel=1e-5)
