"""nanonorm: where the norms sit in a deep Transformer, every variant beside its formula.

Read from top to bottom: norms, GPAS, the two sub-layers, the block variants, the inits, the
configuration, the model. Notation: x is the residual stream (B, T, C), f a sub-layer (attention or
FFN), N a norm, sg stop-gradient, L the number of blocks, l = 1..L a block's index.

`python nanonorm.py` prints the table of variants with what each does to a deep model at init.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from data.fast import at_least_fp32, head_loss, rms_norm, rotate
from data.llama import LlamaNames, fold  # noqa: F401 (fold is for users)

# ---- Parts: norms, rotary embedding -------------------------------------------------------------


class Linear(nn.Linear):
    """A matrix without bias; `Transformer.init_weights` is the only place that draws weights."""

    def __init__(self, fan_in, fan_out):
        super().__init__(fan_in, fan_out, bias=False)

    def reset_parameters(self):
        pass  # PyTorch's own draw would only cost time (and random numbers) before ours


class RMSNorm(nn.Module):
    """gain · x / rms(x) over the last dimension, computed in fp32 (arXiv 1910.07467)."""

    def __init__(self, dim, eps):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.gain, self.eps)


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

    def qkv(self, x, rope):
        """q, k, v, (B, nh, T, hs) each, normed and rotated."""
        B, T, C = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.heads, self.head_dim).unbind(2)  # (B, T, nh, hs)
        q, k, v = rotate(self.norm_q(q), rope), rotate(self.norm_k(k), rope), self.norm_v(v)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x, rope):
        y = F.scaled_dot_product_attention(*self.qkv(x, rope), is_causal=True)  # (B, nh, T, hs)
        return self.wo(y.transpose(1, 2).flatten(-2))  # (B, T, C)


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


class Transformer(LlamaNames, nn.Module):
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
        self._tables = {}
        self.init_weights()

    def forward(self, ids, targets=None):
        x = self.final_stream(ids)
        return at_least_fp32(self.head(self.norm(x))) if targets is None else self.loss(x, targets)

    def loss(self, x, targets):
        """The mean cross-entropy of head(norm(x)), x (B, T, C) as the stream after all blocks."""
        return head_loss(self.norm(x).flatten(0, 1), self.head.weight, targets.flatten())

    def final_stream(self, ids):
        """The stream (B, T, C) after the last block, before the final norm."""
        x = self.embed_norm(self.embed(ids))
        rope, constants = self.tables(ids.shape[1], x)
        for block, c in zip(self.blocks, constants, strict=True):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, c, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rope, c)
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


# ---- Looking inside: probes ---------------------------------------------------------------------
# Those that run the model take any variant, compiled or not, and leave weights, gradients and the
# random numbers as they are. ids, targets: int64 (B, T).


@torch.no_grad()
def visit(model, ids, stream=None, add=None, hidden=None, attend=None):
    """Run the model over ids (B, T), showing its inside to the functions given. Returns None.

    stream(l, x): x (B, T, C) after block l = 1..L; the embedding as l = 0.
    add(l, i, x, branch, y): each residual addition, i 0 of attention and 1 of the FFN: the shortcut
    with its constant, before GPAS; the branch; what leaves (for Post-LN the sum that is normed).
    hidden(l, h): the FFN's hidden activations (B, T, ffn). attend(l, q, k): (B, nh, T, hs) each.
    """
    hooks = []

    def hook(module, see):
        def call(*args):
            see(*args)  # what it returns would take the place of the module's output

        hooks.append(module.register_forward_hook(call, with_kwargs=True))

    if stream:
        hook(model.embed_norm, lambda m, args, kw, x: stream(0, x))
    for l, block in enumerate(model.blocks, 1):
        if stream:
            hook(block, lambda m, args, kw, x, l=l: stream(l, x))
        for i, s in enumerate((block.attn, block.ffn) if add else ()):

            def see(m, args, kw, y, l=l, i=i):
                x, branch, scale = (*args, kw.get("scale"))[:3]
                add(l, i, x if scale is None else scale * x, branch, y)

            hook(s.add, see)
        if hidden:
            hook(block.ffn.f.w2, lambda m, args, kw, y, l=l: hidden(l, args[0]))
        if attend:
            hook(block.attn.f, lambda m, args, kw, y, l=l: attend(l, *m.qkv(*args)[:2]))
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled block would not call them
            model(ids, ids)  # the whole model: sharded weights are gathered by its own hooks
    finally:
        for h in hooks:
            h.remove()
        if hasattr(model, "reshard"):  # FSDP2: else the next update would not be seen
            model.reshard()


def streams(model, ids):
    """The stream after each block, the embedding first: (L + 1, B, T, C), float32 at least."""
    seen = []
    visit(model, ids, stream=lambda l, x: seen.append(at_least_fp32(x)))
    return torch.stack(seen)


def stream_variance(x):
    """Mean over batch and positions of the variance over features of x (B, T, C); a 0-d tensor."""
    return x.detach().float().var(-1, unbiased=False).mean()


def angular_distance(x, y):
    """(1/π)·arccos cos(x, y) at the last position, mean over sequences: 0..1 (2502.05795)."""
    cos = F.cosine_similarity(x[:, -1].double(), y[:, -1].double(), dim=-1)
    return (cos.clamp(-1, 1).arccos() / math.pi).mean().float()


def angular_distances(xs):
    """(L + 1, L + 1): row l, column n the distance of x_l and x_{l+n}; NaN past the last block."""
    d = xs.new_full((len(xs), len(xs)), math.nan)
    for l in range(len(xs)):
        for n in range(len(xs) - l):
            d[l, n] = angular_distance(xs[l], xs[l + n])
    return d


def block_influence(x, y):
    """1 − mean cos(x, y) over all positions, of a block's input and output (2403.03853)."""
    return (1 - F.cosine_similarity(x.double(), y.double(), dim=-1).mean()).float()


def pair_cosines(xs):
    """(n, n): the mean over positions of cos(x_i, x_j) for n streams xs (n, B, T, C)."""
    h = F.normalize(xs.flatten(1, -2), dim=-1)  # (n, B·T, C)
    return torch.einsum("ipc,jpc->ij", h, h) / h.shape[1]


def rms(x):
    return x.float().square().mean().sqrt()


def channel_kurtosis(x):
    """Mean over channels of E[z⁴], z the standardised channel over all tokens: 3 if Gaussian."""
    x = at_least_fp32(x).flatten(0, -2)
    return ((x - x.mean(0)) / x.std(0, unbiased=False).clamp(min=1e-30)).pow(4).mean()


def channel_correlation(x):
    """Mean |correlation| over tokens between two different channels: 0 if they are independent."""
    c = torch.corrcoef(x.flatten(0, -2).T.double()).abs().nan_to_num()
    return ((c.sum() - c.trace()) / (len(c) * (len(c) - 1))).float()


def attention_entropy(q, k):
    """Mean entropy, in nats, of the causal attention rows of q, k (B, nh, T, hs)."""
    T, scores = q.shape[-2], at_least_fp32(q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    past = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    p = scores.masked_fill(~past, -math.inf).softmax(-1)
    return -torch.xlogy(p, p).sum(-1).mean()


def eigenvalues(x):
    """Eigenvalues, largest first, of the covariance over all tokens of x (…, F): (F,), float64."""
    x = x.flatten(0, -2).double()
    x = x - x.mean(0)
    return torch.linalg.eigvalsh(x.T @ x / len(x)).clamp(min=0).flip(0)


def hard_rank(values):
    """The participation ratio (Σλ)²/Σλ² of eigenvalues (…, F); F if all are equal. (…,)"""
    return values.sum(-1).square() / values.square().sum(-1)


def soft_rank(values):
    """exp(−Σ p ln p), p = λ/Σλ, of eigenvalues (…, F); F if all are equal. (…,)"""
    p = values / values.sum(-1, keepdim=True)
    return (-torch.xlogy(p, p).sum(-1)).exp()


def stream_eigenvalues(model, ids):
    """Eigenvalues of the stream after each block, the embedding first: (L + 1, C).

    Their hard_rank over C stands for SpanNorm's "effective dimension ratio", which no public copy
    of 2601.22580 defines.
    """
    seen = []
    visit(model, ids, stream=lambda l, x: seen.append(eigenvalues(x)))
    return torch.stack(seen)


def ffn_eigenvalues(model, ids):
    """Eigenvalues of each FFN's hidden activations: (L, ffn). Wants tokens ≫ ffn."""
    seen = []
    visit(model, ids, hidden=lambda l, h: seen.append(eigenvalues(h)))
    return torch.stack(seen)


def condition_numbers(model):
    """σ_max/σ_min of the FFN's up and down matrix of each block: (L, 2)."""
    found = []
    for role, _, w in model.matrices():
        if role in ("up", "down"):
            s = torch.linalg.svdvals(w.double())
            found.append(s[0] / s[-1])
    return torch.stack(found).view(-1, 2)


def branch_variances(model, ids):
    """Variance over features of what attention and FFN add in each block: (L, 2)."""
    seen = []
    visit(model, ids, add=lambda l, i, x, branch, y: seen.append(stream_variance(branch)))
    return torch.stack(seen).view(-1, 2)


LAYER_COLUMNS = (
    "variance", "grad_norm", "grad_norm_ffn", "weight_norm", "gate_attn", "gate_ffn", "influence",
    "angle", "ratio_attn", "ratio_ffn", "sigma_attn", "sigma_ffn", "kurtosis", "entropy",
)  # fmt: skip


def layer_table(model, ids):
    """{each of LAYER_COLUMNS: [a number for each block]}, all that one forward shows cheaply.

    variance of the stream after the block; the block's gradient norm, that of its FFN alone and its
    weight norm; its gates' values ("" without); influence (Block Influence) and angle (angular
    distance) between its input and output; ratio_*: rms of what a sub-layer adds over rms of what
    it is added to; sigma_*: standard deviation of the sum, σ_A and σ_Z of 2601.22580 where a norm
    follows; kurtosis of the channels; entropy of the attention, in nats.
    """
    table = {k: [] for k in LAYER_COLUMNS}
    before = None

    def stream(l, x):
        nonlocal before
        if l:
            table["variance"].append(stream_variance(x))
            table["influence"].append(block_influence(before, x))
            table["angle"].append(angular_distance(before, x))
            table["kurtosis"].append(channel_kurtosis(x))
        before = x

    def add(l, i, x, branch, y):
        site = ("attn", "ffn")[i]
        table[f"ratio_{site}"].append(rms(branch) / rms(x))
        table[f"sigma_{site}"].append(stream_variance(y).sqrt())

    def attend(l, q, k):
        table["entropy"].append(attention_entropy(q, k))

    visit(model, ids, stream, add, attend=attend)
    table["grad_norm"] = block_grad_norms(model)
    table["grad_norm_ffn"] = ffn_grad_norms(model)
    table["weight_norm"] = block_weight_norms(model)
    for of_block in gate_values(model):
        table["gate_attn"] += of_block[:1] or [""]
        table["gate_ffn"] += of_block[-1:] or [""]
    return {k: v if k.startswith("gate") else torch.stack([*v]).tolist() for k, v in table.items()}


def _whole(x):
    """x, put together from all processes if it is sharded (FSDP2)."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _block_norms(model, tensors):
    """L2 norm of all tensors(block) together, for each block: (L,). 0 where there are none."""
    norms = []
    for block in model.blocks:
        found = [t for t in tensors(block) if t is not None]
        norms.append(_whole(nn.utils.get_total_norm(found)) if found else torch.zeros(()))
    return torch.stack([n.detach().to(norms[-1].device) for n in norms])


def block_grad_norms(model):
    """L2 norm of all parameter gradients of each block; tensor (L,). Blocks without any give 0."""
    return _block_norms(model, lambda block: [p.grad for p in block.parameters()])


def ffn_grad_norms(model):
    """The same of the FFN's matrices alone (2601.22580 fig. 7)."""
    return _block_norms(model, lambda block: [p.grad for p in block.ffn.f.parameters()])


def block_weight_norms(model):
    """L2 norm of all parameters of each block: (L,)."""
    return _block_norms(model, lambda block: [*block.parameters()])


def gate_values(model):
    """[[act(α) of each distinct gate] for each block]: SiLU(α), the share that GPAS takes off."""
    act = GATE_ACTS[model.config.gpas_act]
    return [[act(_whole(a.detach())).item() for a in of_block] for of_block in model.gates()]


def _eager_block(model, l, T, like):
    """x ↦ block l of x (B, T, C), not compiled, with its own constants."""
    rope, constants = model.tables(T, like)

    def run(x):
        with torch.compiler.set_stance("force_eager"):
            return model.blocks[l - 1](x, rope, constants[l - 1])

    return run


def block_jacobian(model, l, x, chunk=256):
    """∂out[t, i]/∂in[s, j] of block l at one sequence x (T, C), as (T, C, T, C): exact.

    T·C gradients, `chunk` of them at a time: for small widths. Its mean over t of [t, :, t, :] is
    the token-averaged Jacobian of 2502.05795 fig. 5. GPAS scales the values but not this: by its
    stop-gradient this is the Jacobian that gradients see.
    """
    T, C = x.shape
    run, n = _eager_block(model, l, T, x), T * C
    rows = []
    for wanted in torch.eye(n, dtype=x.dtype, device=x.device).view(n, T, C).split(chunk):
        xs = x.detach().expand_as(wanted).clone().requires_grad_()
        rows += torch.autograd.grad(run(xs), xs, wanted)
    return torch.cat(rows).view(T, C, T, C)


def jacobian_distance(model, l, x, samples=8, seed=0):
    """‖J − I‖/‖I‖ (Frobenius) of block l at x (B, T, C), a float; 0 for an identity block.

    Estimated from `samples` random vectors v, as E‖vᵀ(J − I)‖² = ‖J − I‖² for v ~ N(0, 1).
    """
    g = torch.Generator().manual_seed(seed)
    xs = x.detach().repeat(samples, 1, 1).requires_grad_()
    v = torch.randn(xs.shape, generator=g).to(xs)
    (jv,) = torch.autograd.grad(_eager_block(model, l, x.shape[1], x)(xs), xs, v)
    return rms(jv - v).item()


@torch.no_grad()
def exit_losses(model, ids, targets):
    """Cross-entropy, in nats, of head(norm(x_l)) for l = 0..L: (L + 1,). The last is the loss."""
    losses = []
    visit(model, ids, stream=lambda l, x: losses.append(model.loss(x, targets)))
    return torch.stack(losses)


@torch.no_grad()
def removal_losses(model, ids, targets):
    """The rise of the loss, in nats, if block l alone is skipped: (L,).

    Block l's input goes to block l + 1; every other block keeps its own constants. L²/2 blocks run.
    """
    xs, T = streams(model, ids), ids.shape[1]
    blocks = [_eager_block(model, l, T, xs) for l in range(1, len(xs))]
    losses = []
    for l in range(len(blocks)):
        x = xs[l]  # the input of block l + 1, which goes to the next one
        for run in blocks[l + 1 :]:
            x = run(x)
        losses.append(model.loss(x, targets))
    return torch.stack(losses) - model.loss(xs[-1], targets)


def at_init(norm, layers=64, dim=64, init=None, batch=4, seed=0):
    """(stream variance after each block, gradient norm of each block) of a fresh model, (L,) each.

    Random tokens, vocabulary 256, context 32.
    """
    torch.manual_seed(seed)
    config = Config(layers=layers, dim=dim, heads=2, vocab=256, block=32, norm=norm, init=init)
    model = Transformer(config)
    ids = torch.randint(0, 256, (batch, 33))
    model(ids[:, :-1], ids[:, 1:]).backward()
    return torch.tensor(layer_table(model, ids[:, :-1])["variance"]), block_grad_norms(model)


if __name__ == "__main__":
    from data.check import main

    raise SystemExit(main())
