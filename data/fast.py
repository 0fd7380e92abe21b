"""Three pieces of nanonorm.py with gradients of their own: plain PyTorch is slow or large there.

Each is a formula of two lines; read nanonorm.py first. The tests hold them, and their gradients, to
the plain way in float64.
"""

import torch

LOGITS = 2**24  # so many logits are held at once: 64 MiB in float32


def at_least_fp32(x):
    """x in float32 if it is in a 16-bit type, else unchanged (float64 stays, for exact tests)."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _RMSNorm(torch.autograd.Function):
    """y = gain · n, n = x · scale, scale = 1/rms(x); with h = gain · dL/dy, dL/dx is
    scale · (h − n · mean(h · n)). Keeps x and one number a row. PyTorch's own is slow on a CPU.
    """

    @staticmethod
    def forward(ctx, x, gain, eps):
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.rsqrt(size.square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, gain, scale)
        return (x * scale).mul_(gain)

    @staticmethod
    def backward(ctx, grad):
        x, gain, scale = ctx.saved_tensors
        n = x * scale
        gn = grad * n
        mean = (gn @ gain / x.shape[-1])[..., None]
        dx = (grad * gain).addcmul_(n, mean, value=-1).mul_(scale)
        return dx, gn.flatten(0, -2).sum(0), None


def rms_norm(x, gain, eps):
    """gain · x / rms(x) over the last dimension of x, computed in float32 at least."""
    return _RMSNorm.apply(at_least_fp32(x), gain, eps).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """(a, b) → (a cos − b sin, b cos + a sin); its gradient is the rotation back: no x is kept."""

    @staticmethod
    def turn(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        y = x.unflatten(-1, (2, -1)) * cos[..., None, :]
        y[..., 0, :].addcmul_(b, sin, value=-1)
        y[..., 1, :].addcmul_(a, sin)
        return y.flatten(-2)

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _Rotate.turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _Rotate.turn(grad, cos, -sin), None, None


def rotate(x, rope):
    """Rotate x (B, T, nh, hs) by its positions; half-split layout: i is paired with i + hs/2."""
    return _Rotate.apply(x, *rope).to(x.dtype)


class _HeadLoss(torch.autograd.Function):
    """Σ cross-entropy of softmax(x Wᵀ), x (N, C), W (V, C), targets (N,) with −100 left out.

    N × V logits would be the largest tensor of the model, three times over. Here a piece of them is
    made at a time and turned into gradients of x and W at once, which the backward then scales.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, with_grad):
        w, rows = weight.to(dtype), max(1, LOGITS // weight.shape[0])
        total = at_least_fp32(x).new_zeros(())
        dx, dw = (torch.empty_like(x), torch.zeros_like(weight)) if with_grad else (None, None)
        for at in range(0, len(x), rows):
            h, target = x[at : at + rows].to(dtype), targets[at : at + rows, None]
            logits = at_least_fp32(h @ w.T)
            index, counts = target.clamp(min=0), (target != -100).to(logits.dtype)
            of_target, top = logits.gather(1, index), logits.amax(-1, keepdim=True)
            d = logits.sub_(top).exp_()  # in the place of the logits: each is needed once
            mass = d.sum(-1, keepdim=True)
            total += ((top + mass.log() - of_target) * counts).sum()
            if with_grad:
                d = d.mul_(counts / mass).scatter_add_(1, index, -counts).to(dtype)  # p − one-hot
                dx[at : at + rows] = d @ w
                dw += d.T @ h
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        return grad.to(dx.dtype) * dx, grad.to(dw.dtype) * dw, None, None, None


def head_loss(x, weight, targets):
    """Mean cross-entropy, in nats, of the targets (N,) under logits x Wᵀ; −100 is left out.

    Under autocast the products are made in its type, the loss in float32.
    """
    kind = x.device.type
    low = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if low else weight.dtype
    with torch.autocast(kind, enabled=False):
        total = _HeadLoss.apply(x, weight, targets, dtype, torch.is_grad_enabled())
    return total / (targets != -100).sum()
