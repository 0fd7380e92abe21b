"""The loss in pieces is the plain loss, and never holds the logits of the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, fresh, scramble, tiny, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from data import fast
from data.fast import head_loss

V, C, N = 40, 8, 23


def inputs(dtype=torch.float32, ignored=(3, 4, 22)):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(V, C, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=g)
    targets[list(ignored)] = -100
    return x, w, targets


def plain(x, w, targets):
    return F.cross_entropy((x @ w.T).float() if x.dtype != torch.float64 else x @ w.T, targets)


def with_gradients(loss, x, w, targets):
    x.grad = w.grad = None
    value = loss(x, w, targets)
    (3 * value).backward()  # a scale such as 1/accum, or a scaler's, passes through
    return value.detach(), x.grad, w.grad


@pytest.mark.parametrize("rows", [1, 2, 5, 22, 23, 24, 1000])
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_value_and_gradients_are_those_of_the_plain_loss(monkeypatch, rows, dtype, tol):
    monkeypatch.setattr(fast, "LOGITS", rows * V)
    parts = zip(with_gradients(head_loss, *inputs(dtype)), with_gradients(plain, *inputs(dtype)),
                strict=True)  # fmt: skip
    for (got, want), what in zip(parts, ("loss", "gradient of x", "gradient of W"), strict=True):
        assert got.dtype == want.dtype
        assert_close(got, want, tol, what)


@pytest.mark.parametrize("rows", [4, 1000])
def test_in_bfloat16_as_autocast_does_it(monkeypatch, rows):
    monkeypatch.setattr(fast, "LOGITS", rows * V)
    with torch.autocast("cpu", torch.bfloat16):
        value, *mine = with_gradients(head_loss, *inputs())
        expected, *theirs = with_gradients(plain, *inputs())
    assert value.dtype == torch.float32
    assert_close(value, expected, 1e-6)
    for got, want in zip(mine, theirs, strict=True):
        assert_close(got, want, 0.01)


def test_huge_logits_do_not_overflow():
    x, w, targets = inputs()
    with torch.no_grad():
        x *= 1e4
    for got in with_gradients(head_loss, x, w, targets):
        assert got.isfinite().all()


def test_without_any_target_the_mean_is_not_a_number():
    assert head_loss(*inputs(ignored=range(N))).isnan()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.size = max(self.size, t.numel())
        return out


@pytest.mark.parametrize("graded", [True, False])
def test_the_whole_logits_are_never_there(monkeypatch, graded):
    config = tiny(vocab=1000, dim=8, heads=2, ffn=8, block=16)
    model, (ids, targets) = fresh(config), tokens(config, T=16, batch=10)
    monkeypatch.setattr(fast, "LOGITS", 20 * 1000)
    with Largest() as mine, torch.set_grad_enabled(graded):
        loss = model(ids, targets)
        if graded:
            loss.backward()
    assert mine.size <= 20 * 1000
    with Largest() as whole:  # what is counted would have been seen
        model(ids)
    assert whole.size == 160 * 1000


def test_evaluation_makes_no_gradients():
    x, w, targets = inputs()
    with torch.no_grad(), Largest() as seen:
        head_loss(x, w, targets)
    assert seen.size == N * V and x.grad is None


@pytest.mark.parametrize("norm", ["pre", "span+gpas"])
def test_a_model_learns_the_same(monkeypatch, norm):
    """One piece or many: the gradient of every parameter."""
    config = tiny(norm)
    grads = []
    for rows in (3, 1000):
        monkeypatch.setattr(fast, "LOGITS", rows * config.vocab)
        model = scramble(fresh(config)).double()
        model(*tokens(config)).backward()
        grads.append([p.grad for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
