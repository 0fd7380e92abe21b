"""nanonorm: where the norms sit in a deep Transformer, every variant beside its formula.

Read from top to bottom: norms, GPAS, the two sub-layers, the block variants, the inits, the
configuration, the model. Notation: x is the residual stream (B, T, C), f a sub-layer (attention or
FFN), N a norm, sg stop-gradient, L the number of blocks, l = 1..L a block's index.

`python nanonorm.py` prints the table of variants with what each does to a deep model at init.
"""

import argparse
import difflib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# ---- Parts: norms, rotary embedding -------------------------------------------------------------


def at_least_fp32(x):
    """x in float32 if it is in a 16-bit type, else unchanged (float64 stays, for exact tests)."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Linear(nn.Linear):
    """A matrix without bias; `Transformer.init_weights` is the only place that draws weights."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out, bias=False)

    def reset_parameters(self):
        pass  # PyTorch's own draw would only cost time (and random numbers) before ours


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


class RMSNorm(nn.Module):
    """gain · x / rms(x) over the last dimension, computed in fp32 (arXiv 1910.07467)."""

    def __init__(self, dim, eps):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return _RMSNorm.apply(at_least_fp32(x), self.gain, self.eps).to(x.dtype)


class LayerNorm(RMSNorm):
    """gain · (x − mean(x)) / std(x) over the last dimension, no bias, in fp32 (1607.06450)."""

    def forward(self, x):
        h = F.layer_norm(at_least_fp32(x), self.gain.shape, self.gain, None, self.eps)
        return h.to(x.dtype)


NORM_KINDS = {"rms": RMSNorm, "layer": LayerNorm}


def rope_table(T, head_dim, theta):
    """cos and sin of the rotary angles t·θ^(−2i/hs) (2104.09864), each (T, 1, hs/2), float64."""
    freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angle = torch.outer(torch.arange(T, dtype=torch.float64, device="cpu"), freq)
    return angle.cos()[:, None], angle.sin()[:, None]


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


# ---- GPAS: shrink the activations, not the gradients --------------------------------------------


class _ScaleForwardOnly(torch.autograd.Function):
    """y = (1 − s)·x with dL/dx = dL/dy and dL/ds = −⟨dL/dy, x⟩.

    For dL/ds it keeps one tensor, and one that the block keeps anyway: the output y where a norm or
    a matrix reads y next (then x = y/(1 − s)), the input x where x is what they read. So GPAS costs
    no activation memory. `x - s * x.detach()` would give the same numbers and keep another tensor.
    """

    @staticmethod
    def forward(ctx, x, s, keep_output):
        y = (1 - s) * x
        ctx.keep_output = keep_output
        ctx.save_for_backward(y if keep_output else x, s)
        return y

    @staticmethod
    def backward(ctx, grad):
        kept, s = ctx.saved_tensors
        ds = -(grad * kept).sum()
        if ctx.keep_output:
            scale = 1 - s
            # only at a scale of exactly 0 is x lost; then the gate gets gradient 0, not NaN
            ds = torch.where(scale == 0, torch.zeros_like(scale), ds / scale)
        return grad, ds.reshape(s.shape).to(s.dtype), None


def gpas(x, s, keep_output=True):
    """g(x) = x − s·sg(x), the GPAS scaling (2506.22049 Eq. 3) with s = SiLU(α) already applied.

    x: any shape; s: shape (1,). Forward scale 1 − s; the gradient passes to x unchanged;
    dL/ds = −⟨dL/dg, x⟩. `keep_output`: which tensor is kept for dL/ds (see above), not what it is.
    """
    return _ScaleForwardOnly.apply(x, s, keep_output)


def naive_gpas(x, s, keep_output=True):
    """The ablation without stop-gradient: (1 − s)·x, which shrinks the gradient of x as well."""
    return (1 - s) * x


def relu_open_at_zero(a):
    """ReLU with slope 1 at 0 (PyTorch's is 0, and gates start at 0: they could never move)."""
    return torch.where(a >= 0, a, torch.zeros_like(a))


GATE_ACTS = {"silu": F.silu, "identity": nn.Identity(), "relu": relu_open_at_zero,
             "tanh": torch.tanh, "leaky_relu": F.leaky_relu}  # fmt: skip


class Gate(nn.Module):
    """x − act(α)·sg(x) with one learned α, of shape (1,), that starts at 0: exactly the identity.

    With `config.gpas_fixed` α is held at that value instead of learned.
    """

    def __init__(self, config):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1), requires_grad=config.gpas_fixed is None)
        self.act = GATE_ACTS[config.gpas_act]
        self.op = gpas if config.gpas_stop_gradient else naive_gpas

    def forward(self, x, keep_output=True):
        return self.op(x, self.act(self.alpha), keep_output)


class Add(nn.Module):
    """The residual addition scale·x + branch; the sub-classes say where GPAS scales it."""

    def __init__(self, gate=None):
        super().__init__()
        self.gate = gate

    def forward(self, x, branch, scale=None):
        return (x if scale is None else scale * x) + branch


class AddSum(Add):  # g(scale·x + branch)
    def forward(self, x, branch, scale=None):
        return self.gate(super().forward(x, branch, scale))


class AddShortcut(Add):  # scale·g(x) + branch
    def forward(self, x, branch, scale=None):
        return super().forward(self.gate(x, keep_output=False), branch, scale)


class AddBranch(Add):  # scale·x + g(branch)
    def forward(self, x, branch, scale=None):
        return super().forward(x, self.gate(branch), scale)


# Where GPAS may sit. "before": on x, before both the shortcut and f read it.
# "norm": on the output of the sub-layer's norm (of the input norm where there are two).
PLACEMENTS = {"sum": AddSum, "shortcut": AddShortcut, "branch": AddBranch,
              "before": Add, "norm": Add}  # fmt: skip

# ---- The loss, without the logits of the whole batch --------------------------------------------

LOGITS = 2**24  # so many logits are held at once: 64 MiB in float32


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


# ---- The two sub-layers, f ----------------------------------------------------------------------


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions; q, k, v come from one matrix.

    With `qkv_norm` (HybridNorm) q, k and v are each RMS-normed per head, before the rotation.
    """

    def __init__(self, config, qkv_norm=False):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.dim // config.heads
        self.wqkv = Linear(config.dim, 3 * config.dim)
        self.wo = Linear(config.dim, config.dim)
        norm = (lambda: RMSNorm(self.head_dim, config.norm_eps)) if qkv_norm else nn.Identity
        self.norm_q, self.norm_k, self.norm_v = norm(), norm(), norm()

    def forward(self, x, rope):
        B, T, C = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.heads, self.head_dim).unbind(2)  # (B, T, nh, hs)
        q, k, v = rotate(self.norm_q(q), rope), rotate(self.norm_k(k), rope), self.norm_v(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class FFN(nn.Module):
    """SwiGLU, w2(silu(w1 x) ⊙ w3 x) (2002.05202); w1 (gate) and w3 (up) are one matrix."""

    def __init__(self, config):
        super().__init__()
        self.w13 = Linear(config.dim, 2 * config.ffn)
        self.w2 = Linear(config.ffn, config.dim)

    def forward(self, x, rope):  # rope: unused, so that attention and FFN are called alike
        gate, up = self.w13(x).chunk(2, dim=-1)  # (B, T, ffn) each
        return self.w2(F.silu(gate) * up)


class Sublayer(nn.Module):
    """f with its norms and its residual addition; a variant's rule says how they are joined.

    `norms`: which of "in" and "out" exist, the others are the identity. norm_in is read by f;
    norm_out is the variant's own business (on the sum, or on the branch).
    """

    def __init__(self, config, f, norms, placement, gate):
        super().__init__()
        self.f = f
        for slot in ("in", "out"):
            norm = NORM_KINDS[config.norm_kind](config.dim, config.norm_eps)
            self.add_module(f"norm_{slot}", norm if slot in norms else nn.Identity())
        self.add = PLACEMENTS[placement](gate) if gate else Add()
        self.enter = gate if gate and placement == "before" else nn.Identity()
        if gate and placement == "norm":
            slot = "norm_in" if "in" in norms else "norm_out"
            setattr(self, slot, nn.Sequential(getattr(self, slot), gate))

    def norms(self):
        """{"in": norm, "out": norm}, of those that exist."""
        found = {}
        for slot in ("in", "out"):
            for module in getattr(self, f"norm_{slot}").modules():  # itself, or before its gate
                if isinstance(module, RMSNorm):
                    found[slot] = module
        return found


# ---- The variants: each is its formula ----------------------------------------------------------


class Block(nn.Module):
    """Attention, then FFN, each joined to the stream by the variant's `rule`.

    A variant states its `formula`, `paper`, `norms` (which norms its attention and its FFN have),
    `gpas` (where GPAS sits by default), own `init`, and its `rule`; or `forward`, where the two
    sub-layers are not alike. `rule` gets the sub-layer s, the stream x, the sub-layer's row c of
    `constants` and the rotary table. Constants of a layer are tensors that the model passes in:
    a Python number read here would make torch.compile build one graph per layer.
    """

    formula: str
    paper: str
    norms = ("in", "in")
    gpas = ("sum", "sum")
    init = "normal"
    qkv_norm = False
    embed_norm = False

    def __init__(self, config):
        super().__init__()
        place = self.gpas if config.gpas_placement == "auto" else (config.gpas_placement,) * 2
        gates = [Gate(config), Gate(config)] if config.gpas else [None, None]
        if config.gpas_gate == "block":
            gates[1] = gates[0]
        attn, ffn = Attention(config, self.qkv_norm), FFN(config)
        self.attn = Sublayer(config, attn, self.norms[0], place[0], gates[0])
        self.ffn = Sublayer(config, ffn, self.norms[1], place[1], gates[1])

    @classmethod
    def build(cls, config, l):
        """Block l (from 1) of this variant; variants that mix kinds of block choose here."""
        return cls(config)

    @staticmethod
    def constants(config, l):
        """The fixed numbers of block l, one row each for attention and FFN."""
        return (1.0,), (1.0,)

    @staticmethod
    def gain_start(config, l):
        """The value at which the norm gains of attention and FFN start in block l."""
        return 1.0, 1.0

    def rule(self, s, x, c, rope):
        raise NotImplementedError("a variant defines rule, or forward")

    def forward(self, x, rope, c):
        x = self.rule(self.attn, self.attn.enter(x), c[0], rope)
        return self.rule(self.ffn, self.ffn.enter(x), c[1], rope)


class Pre(Block):
    """Pre-LN. The variance of x grows with depth, so that deep blocks come to change little."""

    formula = "x ← x + f(N(x))"
    paper = "2002.04745"

    def rule(self, s, x, c, rope):
        return s.add(x, s.f(s.norm_in(x), rope))


class Post(Block):
    """Post-LN, the original Transformer's. The released code keeps a final norm here too."""

    formula = "x ← N(x + f(x))"
    paper = "1706.03762"
    norms = ("out", "out")
    gpas = ("shortcut", "shortcut")

    def rule(self, s, x, c, rope):
        return s.norm_out(s.add(x, s.f(x, rope)))


class DeepNorm(Post):
    """Post-LN with a stronger shortcut, α = (2L)^¼, and a smaller init, β = (8L)^(−¼).

    Released code differs: it fixes α at 2.83 = (2·32)^¼ for every depth, multiplies the init by
    (8L)^(+¼) (the sign is wrong), and leaves the init out altogether with GPAS.
    """

    formula = "x ← N(αx + f(x)), α = (2L)^¼"
    paper = "2203.00555"
    init = "deepnorm"

    @staticmethod
    def constants(config, l):
        alpha = (2 * config.layers) ** 0.25
        return (alpha,), (alpha,)

    def rule(self, s, x, c, rope):
        return s.norm_out(s.add(x, s.f(x, rope), scale=c[0]))


class Sandwich(Block):
    """Sandwich-LN: four norms a block."""

    formula = "x ← x + N(f(N(x)))"
    paper = "2105.13290"
    norms = ("in out", "in out")

    def rule(self, s, x, c, rope):
        return s.add(x, s.norm_out(s.f(s.norm_in(x), rope)))


class Peri(Sandwich):
    """Peri-LN: the sandwich rule, and (optional, on by default here) a norm on the embedding."""

    formula = "x ← x + N(f(N(x))), x₀ = N(E)"
    paper = "2502.02732"
    embed_norm = True


class Mix(Block):
    """Mix-LN: the first ⌊mix_fraction·L⌋ blocks are Post-LN, the others Pre-LN."""

    formula = "first ⌊L/4⌋ blocks x ← N(x + f(x)), then x ← x + f(N(x))"
    paper = "2412.13795"

    @classmethod
    def build(cls, config, l):
        post_layers = math.floor(config.mix_fraction * config.layers + 1e-9)
        return (Post if l <= post_layers else Pre)(config)


class LNS(Block):
    """LayerNorm Scaling: the norm's output times l^(−lns_exponent), ½ by default.

    The GPAS repository makes 1/√l the *start of a learnable gain* instead (`lns_learnable`).
    Two releases of this variant train identity blocks. The authors advise against combining it
    with output matrices scaled by 1/√(2L).
    """

    formula = "x ← x + f(N(x)/√l)"
    paper = "2502.05795"

    @staticmethod
    def factors(config, l):
        factor = 1.0 if l > config.layers - config.lns_unscaled_last else l**-config.lns_exponent
        return [factor if config.lns_sites in ("both", site) else 1.0 for site in ("attn", "ffn")]

    @staticmethod
    def constants(config, l):
        attn, ffn = (1.0, 1.0) if config.lns_learnable else LNS.factors(config, l)
        return (attn,), (ffn,)

    @staticmethod
    def gain_start(config, l):
        return LNS.factors(config, l) if config.lns_learnable else (1.0, 1.0)

    def rule(self, s, x, c, rope):
        return s.add(x, s.f(c[0] * s.norm_in(x), rope))


class ScaleRes(Block):
    """A convex residual, baseline of the GPAS rebuttal. That f reads N(x) is our reading."""

    formula = "x ← (1 − 1/L)·x + f(N(x))/L"
    paper = "2506.22049"

    @staticmethod
    def constants(config, l):
        L = config.layers
        return (1 - 1 / L, 1 / L), (1 - 1 / L, 1 / L)

    def rule(self, s, x, c, rope):
        return s.add(x, c[1] * s.f(s.norm_in(x), rope), scale=c[0])


class Hybrid(Block):
    """HybridNorm: q, k, v normed inside attention, the FFN post-normed *at its input and skip*.

    GPAS is not in the papers for it; by their rule it sits on the shortcut of the first sum (a norm
    follows) and on the second sum (none does).
    """

    formula = "y = x + attn_QKV(x);  x ← N(y) + ffn(N(y))"
    paper = "2503.04598"
    norms = ("", "in")
    gpas = ("shortcut", "sum")
    qkv_norm = True

    def forward(self, x, rope, c):
        x = self.attn.enter(x)
        y = self.ffn.norm_in(self.attn.add(x, self.attn.f(x, rope)))
        y = self.ffn.enter(y)
        return self.ffn.add(y, self.ffn.f(y, rope))


class PreQKV(Pre):
    """Pre-LN with HybridNorm's q, k, v norms: block 1 of hybrid_star."""

    qkv_norm = True


class HybridStar(Hybrid):
    """HybridNorm*: as hybrid, but block 1 is Pre-LN in both sub-layers (q, k, v still normed)."""

    formula = "block 1: x ← x + f(N(x));  others: y = x + attn_QKV(x);  x ← N(y) + ffn(N(y))"

    @classmethod
    def build(cls, config, l):
        return (PreQKV if l == 1 else Hybrid)(config)


class Span(Block):
    """SpanNorm (Eqs. 5–8): Post-norm, but the FFN's shortcut is the *input of the block*.

    In block 1 an extra norm feeds the attention only and both shortcuts carry the raw embedding
    (the best reading: the paper's own text on it was not obtainable). GPAS is not in the papers for
    it; as a norm follows every sum it sits on the shortcuts, as in Post-LN.
    """

    formula = "y = N(attn(x) + x);  x ← N(ffn(y) + x)"
    paper = "2601.22580"
    norms = ("out", "out")
    gpas = ("shortcut", "shortcut")
    init = "scale_init"

    @classmethod
    def build(cls, config, l):
        return (SpanFirst if l == 1 else Span)(config)

    def forward(self, x, rope, c):
        x = self.attn.enter(x)
        y = self.attn.norm_out(self.attn.add(x, self.attn.f(self.attn.norm_in(x), rope)))
        y = self.ffn.enter(y)
        return self.ffn.norm_out(self.ffn.add(x, self.ffn.f(y, rope)))


class SpanFirst(Span):
    """Block 1 of span: its attention reads N(E)."""

    norms = ("in out", "out")


VARIANTS = {
    "post": Post, "deepnorm": DeepNorm, "pre": Pre, "sandwich": Sandwich, "mix": Mix, "lns": LNS,
    "scaleres": ScaleRes, "hybrid": Hybrid, "hybrid_star": HybridStar, "peri": Peri, "span": Span,
}  # fmt: skip

# ---- The inits: each gives the std of every matrix ----------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """What an init may know of a matrix: its role, its fans and the block it is in."""

    role: str  # q k v o gate up down, or head
    fan_in: int
    fan_out: int
    l: int  # block, from 1; 0 for the head
    L: int

    @property
    def writes(self):
        """Does it write to the stream (attention output, FFN output)?"""
        return self.role in ("o", "down")


@dataclass(frozen=True)
class Init:
    """std(matrix, config) → float; `truncate`: draws are cut at that many std (None: not)."""

    std: Callable
    formula: str
    paper: str
    truncate: float | None = None


BASE_STD = 0.02


def _scale_outputs(by):
    """N(0, 0.02) with the matrices that write to the stream multiplied by `by(matrix, config)`."""
    return lambda m, config: BASE_STD * (by(m, config) if m.writes else 1.0)


def _mitchell_std(m, config):
    return (2 * m.fan_in * m.l) ** -0.5 if m.writes else m.fan_in**-0.5


def _deepnorm_std(m, config):
    if m.role == "head":
        return BASE_STD
    gain = 1.0 if m.role in ("q", "k") else (8 * m.L) ** -0.25
    return gain * (2 / (m.fan_in + m.fan_out)) ** 0.5  # xavier-normal


INITS = {
    "normal": Init(_scale_outputs(lambda m, c: 1.0), "0.02", "GPT-2"),
    "scaled": Init(_scale_outputs(lambda m, c: (2 * m.L) ** -0.5),
                   "0.02; outputs × 1/√(2L)", "1909.08053"),
    "scale_init": Init(_scale_outputs(lambda m, c: c.scale_init_constant * m.L**-0.5),
                       "0.02; outputs × k/√L, k = 1", "2601.22580"),
    "mitchell": Init(_mitchell_std, "1/√d; o 1/√(2·d·l); down 1/√(2·d_ff·l); cut at 3σ",
                     "2402.00838", truncate=3.0),
    "depth_scaled": Init(_scale_outputs(lambda m, c: (2 * m.l) ** -0.5),
                         "0.02; outputs × 1/√(2l)", "1908.11365"),
    "deepnorm": Init(_deepnorm_std, "xavier; q, k gain 1; v, o, FFN gain (8L)^(−¼)", "2203.00555"),
    "fan_in": Init(lambda m, c: m.fan_in**-0.5, "1/√fan_in", "–"),
}  # fmt: skip

# ---- Configuration ------------------------------------------------------------------------------


# What the released code calls some variants, and other slips: not accepted, but understood.
OTHER_NAMES = {"deeppost": "deepnorm", "post_pre": "mix", "deeppost_gpas": "deepnorm+gpas",
                 "post_pre_gpas": "mix+gpas", "gpu": "cuda"}  # fmt: skip


def one_of(what, value, names, shown=None):
    """value if it is one of `names`; else ValueError with the names and the nearest one."""
    if value in names:
        return value
    word = OTHER_NAMES.get(value, str(value).lower())
    near = difflib.get_close_matches(word, [str(n) for n in names], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(
        f"unknown {what} {value!r}{hint}; one of: {shown or ', '.join(map(str, names))}"
    )


def option(default, text):
    """A field of Config with its meaning, which `train.py --help` shows too."""
    return field(default=default, metadata={"help": text})


@dataclass
class Config:
    """The shape and the wiring of a model. Raises ValueError, with one line, for what cannot be.

    Names are lower case. `None` stands for a default that depends on other fields; it is resolved.
    """

    layers: int = option(8, "number of blocks, L")
    dim: int = option(128, "width of the stream, C")
    heads: int = option(4, "attention heads")
    ffn: int | None = option(None, "hidden width of the FFN (8/3 dim, up to a multiple of 8)")
    vocab: int = option(2048, "vocabulary size; texts take 257 to 50257")
    block: int = option(64, "context length, in tokens")
    norm: str = option("pre", f"variant: {' '.join(VARIANTS)}; NAME+gpas; gpas is pre+gpas")
    norm_kind: str = option("rms", f"{' '.join(NORM_KINDS)}")
    norm_eps: float = option(1e-6, "epsilon of the norms")
    rope_theta: float = option(1e4, "base of the rotary angles")
    init: str | None = option(None, f"{' '.join(INITS)} (the variant's own)")
    embed_std: float = option(BASE_STD, "std of the embedding at init, whatever the init")
    embed_norm: bool | None = option(None, "a norm on the embedding (default: with peri only)")
    # the paper gives O(1/√L) only; 0.7071 makes it Megatron's 1/√(2L)
    scale_init_constant: float = option(1.0, "k of scale_init's outputs × k/√L")
    mix_fraction: float = option(0.25, "mix: share of the blocks, the first ones, that are Post-LN")
    lns_exponent: float = option(0.5, "lns: β of the factor l^(−β)")
    lns_sites: str = option("both", "lns: norms that are scaled: both attn ffn")
    lns_unscaled_last: int = option(0, "lns: leave so many last blocks unscaled")
    lns_learnable: bool = option(False, "lns: the factor is the start of the gain, not fixed")
    gpas_gate: str = option("block", "one gate per block (as released) or per sublayer (paper)")
    gpas_placement: str = option("auto", f"auto (the variant's) {' '.join(PLACEMENTS)}")
    gpas_act: str = option("silu", f"gate activation: {' '.join(GATE_ACTS)}")
    gpas_stop_gradient: bool = option(True, "off: the naive ablation (1 − SiLU(α))·x")
    gpas_fixed: float | None = option(None, "hold every α at this value instead of learning it")

    def __post_init__(self):
        for f in fields(self):
            setattr(self, f.name, _checked(f.name, f.type, getattr(self, f.name)))
        base, plus, extra = ("pre+gpas" if self.norm == "gpas" else self.norm).partition("+")
        names = [*VARIANTS, "gpas", *(f"{name}+gpas" for name in VARIANTS)]
        if base not in VARIANTS or (plus and extra != "gpas"):
            one_of("norm", self.norm, names, f"{', '.join(VARIANTS)}; each also as NAME+gpas")
        self.norm = base + plus + extra
        if self.ffn is None:
            self.ffn = -(-8 * self.dim // 24) * 8
        self.init = one_of("init", self.variant.init if self.init is None else self.init, INITS)
        if self.embed_norm is None:
            self.embed_norm = self.variant.embed_norm
        for name, names in (("norm_kind", NORM_KINDS), ("lns_sites", ("both", "attn", "ffn")),
                            ("gpas_gate", ("block", "sublayer")), ("gpas_act", GATE_ACTS),
                            ("gpas_placement", ("auto", *PLACEMENTS))):  # fmt: skip
            one_of(name, getattr(self, name), names)
        for name in ("layers", "dim", "heads", "ffn", "vocab", "block"):
            self._need(getattr(self, name) >= 1, name, "must be at least 1")
        for name in ("norm_eps", "rope_theta", "embed_std", "scale_init_constant"):
            self._need(getattr(self, name) > 0, name, "must be above 0")
        self._need(self.dim % self.heads == 0, "dim", f"is not a multiple of heads {self.heads}")
        odd = f"over heads {self.heads} gives an odd head width; rotary positions need an even one"
        self._need(self.dim // self.heads % 2 == 0, "dim", odd)
        self._need(0 <= self.mix_fraction <= 1, "mix_fraction", "must lie in 0..1")
        self._need(abs(self.lns_exponent) <= 10, "lns_exponent", "must lie in -10..10")
        in_depth = 0 <= self.lns_unscaled_last <= self.layers
        self._need(in_depth, "lns_unscaled_last", f"must lie in 0..layers {self.layers}")
        if self.gpas and self.gpas_placement == "norm" and "" in self.variant.norms:
            raise ValueError(f"gpas_placement norm: {self.norm} has no norm in every sub-layer")

    def _need(self, holds, name, what):
        if not holds:
            raise ValueError(f"{name} {getattr(self, name)} {what}")

    @property
    def variant(self):
        """The class that builds the blocks."""
        return VARIANTS[self.norm.partition("+")[0]]

    @property
    def gpas(self):
        """Does the model have GPAS gates?"""
        return self.norm.endswith("+gpas")

    def to_dict(self):
        """Plain dict of every field, for JSON and checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d):
        """The Config that `to_dict` gave. ValueError for a key that is no field."""
        for key in d:
            one_of("config key", key, [f.name for f in fields(cls)])
        return cls(**d)


def _checked(name, kind, value):
    """value as the field's type: whole numbers may stand for floats, nothing else is converted."""
    if value is None and kind in (int | None, float | None, bool | None, str | None):
        return None
    want = next(t for t in (bool, int, float, str) if kind in (t, t | None))
    if want is float and type(value) is int and abs(value) < 1e18:
        value = float(value)
    if type(value) is not want or (want is float and not math.isfinite(value)):
        raise ValueError(f"{name} must be {want.__name__}, not {value!r}")
    if want in (int, float) and abs(value) > 1e15:  # no overflow in fp32, nor in sizes
        raise ValueError(f"{name} {value!r} is too large")
    return value


# ---- The model ----------------------------------------------------------------------------------


class Transformer(nn.Module):
    """LLaMA with the block variant of `config.norm`: embedding, L blocks, final norm, untied head.

    model(ids): logits (B, T, vocab), at least float32. model(ids, targets): the scalar mean
    cross-entropy, in nats, of the targets (B, T); −100 is ignored. ids, targets: int64.
    Raises ValueError where T > config.block. Weights are drawn from torch's global generator.
    """

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        norm = NORM_KINDS[c.norm_kind]
        self.embed = nn.Embedding(c.vocab, c.dim, _weight=torch.empty(c.vocab, c.dim))
        self.embed_norm = norm(c.dim, c.norm_eps) if c.embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(c.variant.build(c, l) for l in range(1, c.layers + 1))
        self.norm = norm(c.dim, c.norm_eps)
        self.head = Linear(c.dim, c.vocab)
        self.checkpoint_activations = False  # keep only each block's input; recompute the rest
        self.tap = None  # tap(l, x) sees the stream after block l = 1..L; the embedding as l = 0
        self._tables = {}
        self.init_weights()

    def forward(self, ids, targets=None):
        x = self.norm(self.final_stream(ids))
        if targets is None:
            return at_least_fp32(self.head(x))
        return head_loss(x.flatten(0, 1), self.head.weight, targets.flatten())

    def final_stream(self, ids):
        """The stream (B, T, C) after the last block, before the final norm."""
        x = self.embed_norm(self.embed(ids))
        rope, constants = self.tables(ids.shape[1], x)
        if self.tap:
            self.tap(0, x)
        for l, (block, c) in enumerate(zip(self.blocks, constants, strict=True), 1):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, c, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rope, c)
            if self.tap:
                self.tap(l, x)
        return x

    def tables(self, T, like):
        """((cos, sin) for T positions, [block constants]) on the device and in the type of `like`.

        They are made from the config when first needed. As buffers they would be lost when a model
        is built on the meta device, and a lost 1/√l is a wrong model that trains.
        """
        if T > self.config.block:
            raise ValueError(f"{T} tokens are longer than the context, block {self.config.block}")
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (like.device, dtype)
        if key not in self._tables:
            with torch.inference_mode(False):  # made while sampling, they must serve training too
                c = self.config
                rope = rope_table(c.block, c.dim // c.heads, c.rope_theta)
                rows = [b.constants(c, l) for l, b in enumerate(self.blocks, 1)]
                self._tables[key] = (
                    [t.to(like.device, dtype) for t in rope],
                    [torch.tensor(row, dtype=dtype, device=like.device) for row in rows],
                )
        rope, constants = self._tables[key]
        return (rope[0][:T], rope[1][:T]), constants

    @torch.no_grad()
    def init_weights(self):
        """Draw every matrix by the init; set gains and gates to their start.

        The same matrices are drawn in the same order whatever the variant, so that under one seed
        all variants (and X and X+GPAS) start from the same draws.
        """
        c = self.config
        init = INITS[c.init]
        self.embed.weight.normal_(0.0, c.embed_std)
        for role, l, w in self.matrices():
            m = Matrix(role, w.shape[1], w.shape[0], l, c.layers)
            std = init.std(m, c)
            if init.truncate:
                nn.init.trunc_normal_(w, 0.0, std, -init.truncate * std, init.truncate * std)
            else:
                w.normal_(0.0, std)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.gain.fill_(1.0)
            elif isinstance(module, Gate):
                module.alpha.fill_(c.gpas_fixed or 0.0)
        for l, block in enumerate(self.blocks, 1):
            for s, start in zip((block.attn, block.ffn), block.gain_start(c, l), strict=True):
                for norm in s.norms().values():
                    norm.gain.fill_(start)

    def matrices(self, of=lambda p: p.data):
        """(role, block l from 1, matrix (fan_out, fan_in)) for all but the embedding; head has l 0.

        q, k, v and gate, up are views of the matrix that holds them. `of`: what to take of each
        parameter (its values, or `lambda p: p.grad`).
        """
        for l, block in enumerate(self.blocks, 1):
            attn, ffn = block.attn.f, block.ffn.f
            yield from zip("qkv", (l, l, l), of(attn.wqkv.weight).chunk(3), strict=True)
            yield "o", l, of(attn.wo.weight)
            yield from zip(("gate", "up"), (l, l), of(ffn.w13.weight).chunk(2), strict=True)
            yield "down", l, of(ffn.w2.weight)
        yield "head", 0, of(self.head.weight)

    def gates(self):
        """[[α of each distinct gate] for each block], empty lists without GPAS."""
        return [
            [m.alpha for m in block.modules() if isinstance(m, Gate)]  # modules() gives each once
            for block in self.blocks
        ]

    def num_params(self, embeddings=True):
        """Number of parameters; without the embedding and the head if `embeddings` is False."""
        n = sum(p.numel() for p in self.parameters())
        return n if embeddings else n - self.embed.weight.numel() - self.head.weight.numel()

    def compile_blocks(self, **options):
        """Compile each block in place (torch.compile); one graph serves all blocks of a kind.

        Compiling the block, not the model, keeps the cost flat in depth; in place, so that the
        names in the state dict do not change.
        """
        torch._dynamo.reset()  # graphs of earlier models count against the limit
        for block in self.blocks:
            block.compile(dynamic=False, **options)

    # -- Hugging Face names -------------------------------------------------------------------

    def llama_tensors(self, of=lambda p: p.data):
        """{Hugging Face name: view of the tensor}; ValueError naming the tensor that has none."""
        if self.config.norm_kind != "rms":
            raise ValueError("norm.gain: LLaMA has RMSNorm only, this model has LayerNorm")
        names = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
        names |= {r: f"self_attn.{r}_proj" for r in "qkvo"}
        out = {"model.embed_tokens.weight": of(self.embed.weight)}
        for role, l, w in self.matrices(of):
            out[f"model.layers.{l - 1}.{names[role]}.weight" if l else "lm_head.weight"] = w
        small = {"model.norm.weight": self.norm.gain}
        for i, (block, alphas) in enumerate(zip(self.blocks, self.gates(), strict=True)):
            attn, ffn, pre = block.attn.norms(), block.ffn.norms(), f"model.layers.{i}."
            # the four norms of Gemma-2; with three or fewer, LLaMA's names
            ffn_in = "pre_feedforward" if "out" in attn else "post_attention"
            rows = ((attn, "in", "input"), (attn, "out", "post_attention"), (ffn, "in", ffn_in))
            for s, slot, name in (*rows, (ffn, "out", "post_feedforward")):
                if slot in s:
                    small[f"{pre}{name}_layernorm.weight"] = s[slot].gain
            if len(alphas) == 1:
                small[f"{pre}gpas_block.gate"] = alphas[0]
        known = {id(p) for p in small.values()}
        for name, p in self.named_parameters():
            if id(p) not in known and p.ndim < 2:
                raise ValueError(f"{name} has no Hugging Face name (norm {self.config.norm})")
        return out | {k: of(p).view(()) if "gpas" in k else of(p) for k, p in small.items()}

    def to_llama(self):
        """State dict (copies) under Hugging Face's LLaMA / Gemma-2 names. ValueError if none fit.

        LNS keeps its 1/√l and GPAS its gates: for a plain LLaMA take `fold(model).to_llama()`.
        """
        return {name: t.clone() for name, t in self.llama_tensors().items()}

    @torch.no_grad()
    def load_llama(self, state_dict):
        """Fill the weights from Hugging Face names; ValueError names a tensor that does not fit.

        Nothing is changed unless every tensor fits.
        """
        own = self.llama_tensors()
        given = {k: v for k, v in state_dict.items() if not k.endswith("rotary_emb.inv_freq")}
        for name in own:
            if name not in given:
                raise ValueError(f"{name} is missing from the state dict")
            if given[name].shape != own[name].shape:
                have, want = tuple(given[name].shape), tuple(own[name].shape)
                raise ValueError(f"{name} has shape {have}, this model needs {want}")
        for name in given:
            if name not in own:
                raise ValueError(f"{name} has no place in a {self.config.norm} model")
        for name, tensor in own.items():
            tensor.copy_(given[name])


@torch.no_grad()
def fold(model):
    """The same function as a plain Pre-LN model (a new one), for pre, lns, gpas, lns+gpas.

    LNS: the factor goes into the norm's gain. GPAS: with P the product of all scales 1 − SiLU(α) so
    far, x/P obeys the Pre-LN rule with outputs divided by P, as norms do not see a scale (but for
    their eps: equal up to eps over the stream's mean square) except its sign. Raises ValueError for
    other variants and placements, and for a gate whose scale is 0.
    """
    c = model.config
    if c.variant not in (Pre, LNS) or (c.gpas and c.gpas_placement not in ("auto", "sum")):
        raise ValueError(f"cannot fold {c.norm}, placement {c.gpas_placement}: only pre, lns, gpas")
    with torch.random.fork_rng():  # the draws of a model to be overwritten must not count
        plain = Transformer(Config.from_dict(c.to_dict() | {"norm": "pre"}))
    plain.to(model.embed.weight.device, model.embed.weight.dtype)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "gate" not in k})
    P = 1.0
    for l, (block, old) in enumerate(zip(plain.blocks, model.blocks, strict=True), 1):
        factors = old.constants(c, l) if c.variant is LNS else ((1.0,), (1.0,))
        sites = ((block.attn, block.attn.f.wo, old.attn), (block.ffn, block.ffn.f.w2, old.ffn))
        for (s, out, was), (factor,) in zip(sites, factors, strict=True):
            s.norm_in.gain.mul_(math.copysign(factor, P))
            out.weight.div_(P)
            if c.gpas:
                P *= 1 - was.add.gate.act(was.add.gate.alpha.double()).item()
                if P == 0:
                    raise ValueError(f"the gate of block {l} scales the stream to 0")
    plain.norm.gain.mul_(math.copysign(1.0, P))
    return plain


# ---- Looking inside -----------------------------------------------------------------------------


def stream_variance(x):
    """Mean over batch and positions of the variance over features of x (B, T, C); a 0-d tensor."""
    return x.detach().float().var(-1, unbiased=False).mean()


def block_grad_norms(model):
    """L2 norm of all parameter gradients of each block; tensor (L,). Blocks without any give 0."""
    norms = []
    for block in model.blocks:
        grads = [p.grad for p in block.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # if sharded
    return torch.stack([n.to(norms[0].device) for n in norms])


def at_init(norm, layers=64, dim=64, init=None, batch=4, seed=0):
    """(stream variance after each block, gradient norm of each block) of a fresh model, (L,) each.

    Random tokens, vocabulary 256, context 32.
    """
    torch.manual_seed(seed)
    config = Config(layers=layers, dim=dim, heads=2, vocab=256, block=32, norm=norm, init=init)
    model, seen = Transformer(config), []
    model.tap = lambda l, x: seen.append(stream_variance(x))
    ids = torch.randint(0, 256, (batch, 33))
    model(ids[:, :-1], ids[:, 1:]).backward()
    return torch.stack(seen[1:]), block_grad_norms(model)


def main(argv=None):
    """Print the table of variants. Returns the exit code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.parse_args(argv)
    print("Variants (f: attention or FFN, N: norm, L blocks, l = 1..L); each also as NAME+gpas:\n")
    width = max(len(v.formula) for v in VARIANTS.values())
    print(f"{'norm':<12} {'formula':<{width}} {'arXiv':<11} init")
    for name, v in VARIANTS.items():
        print(f"{name:<12} {v.formula:<{width}} {v.paper:<11} {v.init}")
    rule = "g(x) = x − SiLU(α)·sg(x) on the sum, or on the shortcut"
    print(f"{'NAME+gpas':<12} {rule:<{width}} {'2506.22049':<11} that of NAME")
    print("\nInits (std of each matrix):\n")
    for name, init in INITS.items():
        print(f"{name:<13} {init.formula:<50} {init.paper}")
    layers = 64
    print(f"\nAt init, {layers} blocks × width 64, seed 0, own inits; columns: blocks")
    columns = "".join(f"{b:>11}" for b in (1, layers // 2, layers))
    print(f"{'norm':<12} variance{columns}   gradient norm{columns}")
    for name in VARIANTS:
        variance, grad = at_init(name, layers)
        picks = [0, layers // 2 - 1, layers - 1]
        cells = ["".join(f"{t[i].item():>11.3g}" for i in picks) for t in (variance, grad)]
        print(f"{name:<12} {'':8}{cells[0]}   {'':13}{cells[1]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
