"""What data/batches.py promises: windows that depend on (seed, step, i) alone, an exact evaluation.

Faults seen elsewhere: a resume that draws the first batches again, an evaluation divided by n + 1,
or whose number depends on the batch size, or that leaves out the last tokens.
"""

import csv
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import fresh, tiny

from data.batches import evaluate, get_batch, window_starts
from data.prepare import load, prepare
from nanonorm import Transformer

# ---- Which windows ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed, step", [(0, 0), (3, 17), (2**63 - 1, 10**6)])
def test_the_window_of_a_sample_does_not_depend_on_how_many_there_are(seed, step):
    whole = window_starts(seed, step, 512, 10_000, 64)
    assert whole.shape == (512,) and whole.dtype == np.int64
    for count in (1, 2, 3, 8, 13, 511):
        assert np.array_equal(window_starts(seed, step, count, 10_000, 64), whole[:count])


def test_windows_come_from_the_arguments_and_from_nothing_else():
    """Not from a global generator: calls in between, in any order, change nothing."""
    one = [window_starts(5, step, 8, 1000, 16) for step in range(4)]
    np.random.seed(1)
    torch.manual_seed(1)
    two = [window_starts(5, step, 8, 1000, 16) for step in reversed(range(4))]
    assert np.array_equal(one, two[::-1])


def test_windows_differ_between_seeds_steps_and_samples():
    """Nor do neighbours share draws: (seed, step + 1) is not (seed + 1, step), nor shifted by i."""
    n = 10**12
    draws = [window_starts(seed, step, 8, n, 64) for seed in range(8) for step in range(8)]
    assert len(np.unique(draws)) == 8 * 8 * 8


def test_every_start_is_reached_and_none_passes_the_end():
    tokens, block = 25, 16
    seen = np.concatenate([window_starts(0, step, 8, tokens, block) for step in range(100)])
    assert sorted(set(seen.tolist())) == list(range(tokens - block))  # the last: 8, 8 + 16 + 1 = 25
    assert set(window_starts(0, 0, 9, block + 1, block).tolist()) == {0}


def test_windows_are_spread_evenly():
    """A chi-square of 100 bins, 20,000 draws: 99 ± 14; five deviations are allowed."""
    seen = np.concatenate([window_starts(1, step, 20, 1016, 16) for step in range(1000)])
    counts = np.bincount(seen // 10, minlength=100)
    assert counts.shape == (100,)
    assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * 14.1


@pytest.mark.parametrize("tokens", [0, 1, 16])
def test_a_text_without_a_window_is_refused(tokens):
    with pytest.raises(ValueError, match="16"):
        window_starts(0, 0, 1, tokens, 16)


def test_targets_are_the_next_tokens():
    text = np.arange(1000, 1100, dtype=np.uint16)
    ids, targets = get_batch(text, np.array([0, 7, 83]), 16)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.tolist() == [list(range(1000 + s, 1016 + s)) for s in (0, 7, 83)]
    assert targets.tolist() == [list(range(1001 + s, 1017 + s)) for s in (0, 7, 83)]


def test_ids_above_32767_survive():
    ids, targets = get_batch(np.array([40_000, 50_256, 65_535], dtype=np.uint16), [0], 2)
    assert ids.tolist() == [[40_000, 50_256]] and targets.tolist() == [[50_256, 65_535]]


@pytest.fixture
def forwards():
    """Records (inputs, targets) of every forward that is trained on."""
    seen = []

    def record(module, args, output):
        if isinstance(module, Transformer) and torch.is_grad_enabled():
            seen.append(args)

    handle = torch.nn.modules.module.register_module_forward_hook(record)
    yield seen
    handle.remove()


def test_training_sees_the_same_windows_however_an_update_is_cut(fit, forwards, place):
    seen = {}
    for batch, accum in ((4, 1), (2, 2), (1, 4)):
        forwards.clear()
        assert fit("--batch", batch, "--accum", accum, "--steps=3", "--seed=9").code == 0
        assert len(forwards) == 3 * accum
        assert {ids.shape for ids, _ in forwards} == {(batch, 16)}
        seen[accum] = torch.stack([torch.cat(parts) for parts in zip(*forwards, strict=True)])
    assert torch.equal(seen[1], seen[2]) and torch.equal(seen[1], seen[4])

    text = load(prepare(place / "text.txt", 257, log=lambda _: None))[0]
    starts = np.concatenate([window_starts(9, step, 4, len(text), 16) for step in range(3)])
    assert seen[1].tolist() == [part.tolist() for part in get_batch(text, starts, 16)]


# ---- Evaluation ---------------------------------------------------------------------------------

BLOCK, BATCH = 8, 3
LENGTHS = {  # predicted tokens: around the ends of a window and of a batch
    "one": 1,
    "shorter than a window": 5,
    "one window": BLOCK,
    "a window and one": BLOCK + 1,
    "a batch less one": BATCH * BLOCK - 1,
    "one batch": BATCH * BLOCK,
    "a batch and one": BATCH * BLOCK + 1,
    "three batches and a half": 3 * BATCH * BLOCK + BATCH * BLOCK // 2,
}


@pytest.mark.parametrize("n", LENGTHS.values(), ids=LENGTHS)
def test_every_token_is_predicted_once_from_the_one_before_it(n):
    text, predicted = np.arange(100, 101 + n, dtype=np.uint16), []

    def loss_of(ids, targets):
        assert ids.shape == targets.shape and ids.shape[1] == BLOCK
        counted = targets != -100
        assert torch.equal(ids[counted] + 1, targets[counted])
        for row, kept in zip(ids, counted, strict=True):  # one window: consecutive tokens
            window = row[kept]
            assert torch.equal(window, window[:1] + torch.arange(len(window)))
        predicted.extend(targets[counted].tolist())
        return torch.tensor(1.0)

    evaluate(loss_of, text, BLOCK, BATCH)
    assert sorted(predicted) == list(range(101, 101 + n))


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
@pytest.mark.parametrize("n", LENGTHS.values(), ids=LENGTHS)
def test_the_mean_is_exact(n, batch):
    """Every target has a loss of its own, so a wrong weight of any batch, or n + 1, shows."""
    text = np.random.default_rng(n).integers(0, 257, n + 1).astype(np.uint16)
    price = torch.rand(257, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss_of(ids, targets):
        return price[targets[targets != -100]].mean()

    want = price[torch.from_numpy(text[1:].astype(np.int64))].mean().item()
    assert evaluate(loss_of, text, BLOCK, batch) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("n", LENGTHS.values(), ids=LENGTHS)
def test_a_constant_loss_comes_back_unchanged(n):
    text = np.zeros(n + 1, dtype=np.uint16)
    got = evaluate(lambda ids, targets: torch.tensor(3.5), text, BLOCK, BATCH)
    assert got == pytest.approx(3.5, rel=1e-12)


def test_a_model_is_evaluated_as_by_hand_and_without_a_gradient():
    """Window by window, each token from the tokens before it in its window."""
    model = fresh(tiny(vocab=257, block=BLOCK, embed_std=1.0, init="fan_in")).double()
    text = np.random.default_rng(1).integers(0, 257, 54).astype(np.uint16)
    ids = torch.from_numpy(text.astype(np.int64))
    losses = []
    for at in range(0, 53, BLOCK):
        window = ids[at : at + BLOCK + 1]
        logp = model(window[None, :-1])[0].log_softmax(-1)
        losses += [-logp[i, token].item() for i, token in enumerate(window[1:])]
    grads = []

    def loss_of(ids, targets):
        grads.append(torch.is_grad_enabled())
        return model(ids, targets)

    for batch in (1, 3, 4):
        got = evaluate(loss_of, text, BLOCK, batch)
        assert got == pytest.approx(math.fsum(losses) / 53, rel=1e-12)
    assert not any(grads)
    assert len(losses) == 53


def test_a_uniform_model_costs_ln_vocab_and_its_bits_per_byte(fit, place, monkeypatch):
    """ln V nats a token; with vocab 300 a token is 1.3 bytes, and the separators are no bytes."""
    forward = Transformer.forward

    def uniform(self, ids, targets=None):
        logits = 0 * forward(self, ids)
        return logits if targets is None else F.cross_entropy(logits.mT, targets)

    monkeypatch.setattr(Transformer, "forward", uniform)
    run = fit("--vocab=300", "--steps=1")
    val = load(prepare(place / "text.txt", 300, log=lambda _: None))[1]
    text = "".join(decoded(val, 300))
    [row] = csv.DictReader(run.text("log.csv").splitlines())
    assert float(row["loss"]) == pytest.approx(math.log(300), rel=1e-6)
    assert float(row["val_loss"]) == pytest.approx(math.log(300), rel=1e-6)
    bits = math.log2(300) * (len(val) - 1) / len(text.encode())
    assert float(row["val_bpb"]) == pytest.approx(bits, rel=1e-6)
    assert abs(bits - math.log2(300)) > 0.5


def decoded(ids, vocab):
    """The documents in `ids`, without separators."""
    from data.prepare import tokenizer

    for doc in np.split(ids, np.flatnonzero(ids == vocab - 1)):
        yield tokenizer(vocab).decode([i for i in doc.tolist() if i != vocab - 1])
