"""Each variant is its formula: recorded runs of the papers' code, and equations written out."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ALL_NORMS,
    NORMS,
    assert_close,
    assert_same,
    fresh,
    gain,
    gradients,
    is_own,
    scramble,
    tiny,
    tokens,
)

from nanonorm import GATE_ACTS, PLACEMENTS, VARIANTS, Config, Transformer, streams

GOLDEN = Path(__file__).parent / "golden"

# ---------------------------------------------------------------------------------------------
# What the papers' released code computes
# ---------------------------------------------------------------------------------------------

RELEASED = {"deeppost": "deepnorm", "post_pre": "mix"}  # their names → ours


@pytest.mark.parametrize("case", sorted(p.stem for p in GOLDEN.glob("*.npz")))
def test_reproduces_the_released_code(case):
    """Logits, loss and every gradient, float32, of the GPAS and Mix-LN releases."""
    data = np.load(GOLDEN / f"{case}.npz")
    shape = json.loads(str(data["config"]))
    base = case.removesuffix("_gpas")
    norm = RELEASED.get(base, base) + ("+gpas" if case.endswith("_gpas") else "")
    fraction = shape.pop("post_layers") / shape["layers"]
    model = Transformer(Config(**(shape | {"norm": norm, "mix_fraction": fraction})))
    of = lambda kind: {k[2:]: torch.from_numpy(data[k]) for k in data if k.startswith(kind)}
    model.load_llama(of("w/"))
    ids = torch.from_numpy(data["input_ids"]).long()
    assert_close(model(ids), torch.from_numpy(data["logits"]), 1e-5, "logits")
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert_close(loss.detach(), torch.tensor(data["loss"].item()), 1e-6, "loss")
    got, want = model.llama_tensors(lambda p: p.grad), of("g/")
    assert got.keys() == want.keys()
    for name in want:
        assert_close(got[name], want[name], 1e-5, name)


def test_there_is_a_golden_case_for_each_released_variant():
    """A file that goes missing must not make the test above pass for want of cases."""
    assert len([*GOLDEN.glob("*.npz")]) == 8


# ---------------------------------------------------------------------------------------------
# The parts by hand: plain equations, float64, nothing of nanonorm's modules
# ---------------------------------------------------------------------------------------------


def rms_norm(x, gain, eps):
    """1910.07467"""
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def layer_norm(x, gain, eps):
    """1607.06450, without bias"""
    x = x - x.mean(-1, keepdim=True)
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate_half(x, theta):
    """Rotary positions (2104.09864) of x (B, T, nh, hs), as Hugging Face's LLaMA writes them."""
    T, hs = x.shape[1], x.shape[3]
    freq = torch.tensor([theta ** (-2 * i / hs) for i in range(hs // 2)], dtype=x.dtype)
    angle = (torch.arange(T, dtype=x.dtype)[:, None] * freq).repeat(1, 2)[:, None]  # (T, 1, hs)
    turned = torch.cat((-x[..., hs // 2 :], x[..., : hs // 2]), dim=-1)
    return x * angle.cos() + turned * angle.sin()


def attention(x, wq, wk, wv, wo, qkv_gains, c):
    B, T, C = x.shape
    q, k, v = ((x @ w.T).view(B, T, c.heads, C // c.heads) for w in (wq, wk, wv))
    if qkv_gains:
        q, k, v = (rms_norm(t, g, c.norm_eps) for t, g in zip((q, k, v), qkv_gains, strict=True))
    q, k = rotate_half(q, c.rope_theta), rotate_half(k, c.rope_theta)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(C // c.heads)
    future = torch.ones(T, T).triu(1).bool()
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).reshape(B, T, C) @ wo.T


def swiglu(x, gate, up, down):
    """2002.05202"""
    h = x @ gate.T
    return (h / (1 + torch.exp(-h)) * (x @ up.T)) @ down.T


ACTS = {
    "silu": lambda a: a / (1 + torch.exp(-a)),
    "identity": lambda a: a,
    "relu": lambda a: a.clamp(min=0),
    "tanh": lambda a: (torch.exp(a) - torch.exp(-a)) / (torch.exp(a) + torch.exp(-a)),
    "leaky_relu": lambda a: torch.maximum(a, 0.01 * a),
}


def by_hand(model, formula):
    """(run, leaves): the model's function with `formula` for its blocks, on copies of its weights.

    formula(a, m, x, l, c) gives block l's output from x; a (attention) and m (FFN) each have f, the
    input norm N, the output norm O, and the gate g (the identity without GPAS).
    """
    c = model.config
    leaves = {
        name: p.detach().clone().requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }
    copies = {id(p): leaves[name] for name, p in model.named_parameters()}
    of = lambda p: copies[id(p)]
    w = {(role, l): m for role, l, m in model.matrices(of)}
    norm = {"rms": rms_norm, "layer": layer_norm}[c.norm_kind]

    def norm_of(slot):
        if gain(slot) is None:
            return None  # a formula that calls a norm the model does not have fails here
        leaf = of(gain(slot))
        return lambda x: norm(x, leaf, c.norm_eps)

    def gate_of(alphas):
        if not c.gpas:
            return lambda x: x
        s = ACTS[c.gpas_act](of(alphas))
        if c.gpas_stop_gradient:
            return lambda x: x - s * x.detach()
        return lambda x: (1 - s) * x

    blocks = []
    for l, (block, alphas) in enumerate(zip(model.blocks, model.gates(), strict=True), 1):
        qkv_gains = [of(p) for p in block.attn.f.parameters() if p.ndim == 1]
        assert len(qkv_gains) == (3 if c.norm.startswith("hybrid") else 0)  # q, k, v: 2503.04598
        matrices = [[w[role, l] for role in roles] for roles in ("qkvo", ("gate", "up", "down"))]
        f = (
            lambda x, ws=matrices[0], gains=qkv_gains: attention(x, *ws, gains, c),
            lambda x, ws=matrices[1]: swiglu(x, *ws),
        )
        gates = [alphas[0], alphas[-1]] if alphas else [None, None]
        if c.gpas:
            assert len(alphas) == {"block": 1, "sublayer": 2}[c.gpas_gate]
        blocks.append(
            [
                SimpleNamespace(f=f[i], N=norm_of(s.norm_in), O=norm_of(s.norm_out), g=gate_of(a))
                for i, (s, a) in enumerate(zip((block.attn, block.ffn), gates, strict=True))
            ]
        )

    def run(ids, targets):
        x = of(model.embed.weight)[ids]
        if c.embed_norm:
            x = norm_of(model.embed_norm)(x)
        for l, (a, m) in enumerate(blocks, 1):
            x = formula(a, m, x, l, c)
        logits = norm_of(model.norm)(x) @ of(model.head.weight).T
        loss = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
        return logits, loss

    return run, leaves


def check(config, formula):
    """The model of `config` has the logits and all the gradients of `formula`, to 1e-9.

    A large eps, as with 1e-6 the norms hide a scale: the last gate would have almost no gradient.
    """
    config = dataclasses.replace(config, norm_eps=0.01)
    model = scramble(fresh(config).double())
    ids, targets = tokens(config)
    run, leaves = by_hand(model, formula)
    logits, loss = run(ids, targets)
    loss.backward()
    assert_close(model(ids).detach(), logits.detach(), 1e-9, "logits")
    grads = gradients(model, ids, targets)
    assert grads.keys() == {name for name, leaf in leaves.items() if leaf.requires_grad}
    for name, grad in grads.items():
        assert leaves[name].grad is not None, f"{name} has no place in the formula"
        assert_close(grad, leaves[name].grad, 1e-9, name)


# ---------------------------------------------------------------------------------------------
# The variants by hand, g at its default place (2506.22049: on the sum, or on the shortcut where a
# norm follows the sum)
# ---------------------------------------------------------------------------------------------


def post(a, m, x, l, c):
    """1706.03762"""
    x = a.O(a.g(x) + a.f(x))
    return m.O(m.g(x) + m.f(x))


def deepnorm(a, m, x, l, c):
    """2203.00555: α multiplies the shortcut, not the branch"""
    alpha = (2 * c.layers) ** (1 / 4)
    x = a.O(alpha * a.g(x) + a.f(x))
    return m.O(alpha * m.g(x) + m.f(x))


def pre(a, m, x, l, c):
    """2002.04745"""
    x = a.g(x + a.f(a.N(x)))
    return m.g(x + m.f(m.N(x)))


def sandwich(a, m, x, l, c):
    """2105.13290"""
    x = a.g(x + a.O(a.f(a.N(x))))
    return m.g(x + m.O(m.f(m.N(x))))


def mix(a, m, x, l, c):
    """2412.13795: Post-LN in the first quarter of the blocks"""
    return post(a, m, x, l, c) if l <= c.layers // 4 else pre(a, m, x, l, c)


def lns(a, m, x, l, c):
    """2502.05795"""
    x = a.g(x + a.f(a.N(x) / math.sqrt(l)))
    return m.g(x + m.f(m.N(x) / math.sqrt(l)))


def scaleres(a, m, x, l, c):
    """a baseline of 2506.22049"""
    L = c.layers
    x = a.g((1 - 1 / L) * x + a.f(a.N(x)) / L)
    return m.g((1 - 1 / L) * x + m.f(m.N(x)) / L)


def hybrid(a, m, x, l, c):
    """2503.04598: attention reads x itself; the FFN's shortcut is taken after the norm"""
    y = m.N(a.g(x) + a.f(x))
    return m.g(y + m.f(y))


def hybrid_star(a, m, x, l, c):
    """2503.04598: block 1 is Pre-LN (and its q, k, v are normed too)"""
    return pre(a, m, x, l, c) if l == 1 else hybrid(a, m, x, l, c)


def span(a, m, x, l, c):
    """2601.22580, Eqs. 5–8: both shortcuts carry the input of the block"""
    y = a.O(a.f(a.N(x) if l == 1 else x) + a.g(x))
    return m.O(m.f(y) + m.g(x))


class ByHand(dict):
    """A table with an entry for each variant, that says what to write where one is missing."""

    def __init__(self, wanted, entries):
        super().__init__(entries)
        self.wanted = wanted

    def __missing__(self, norm):
        if is_own(norm):
            if self.wanted is EQUATION and hasattr(VARIANTS[norm], "by_hand"):
                return VARIANTS[norm].by_hand
            pytest.skip(
                "your equation: give the class a static method by_hand(a, m, x, l, c)"
                if self.wanted is EQUATION
                else "only for the variants of nanonorm.py"
            )
        pytest.fail(f"variant {norm} has no entry in tests/test_variants.py: {self.wanted}")


EQUATION = """add its equation, written as plain torch like `pre` above, to BY_HAND.
a, m: attention and FFN half; x: stream; l: block from 1; c: Config; a.f: the sub-layer; a.N, a.O:
its norms "in" and "out", a.g: the GPAS gate where it sits by default"""
BY_HAND = ByHand(
    EQUATION,
    {
        "post": post,
        "deepnorm": deepnorm,
        "pre": pre,
        "sandwich": sandwich,
        "mix": mix,
        "lns": lns,
        "scaleres": scaleres,
        "hybrid": hybrid,
        "hybrid_star": hybrid_star,
        "peri": sandwich,  # 2502.02732: with a norm on the embedding, see by_hand
        "span": span,
    },
)


@pytest.mark.parametrize("norm", NORMS)
def test_variant_is_its_formula(norm):
    """Logits and all gradients. (Faults in the wild: α on the wrong term, a normed residual.)"""
    check(tiny(norm), BY_HAND[norm])


@pytest.mark.parametrize("gate", ["block", "sublayer"])
@pytest.mark.parametrize("norm", NORMS)
def test_variant_with_gpas_is_its_formula(norm, gate):
    """One α a block (the released code) or one a sub-layer (the text of 2506.22049)."""
    check(tiny(f"{norm}+gpas", gpas_gate=gate), BY_HAND[norm])


@pytest.mark.parametrize("layers", [1, 2, 6])
@pytest.mark.parametrize("norm", ["deepnorm", "scaleres", "mix", "hybrid_star", "span", "lns"])
def test_formula_holds_at_other_depths(norm, layers):
    """What depends on L or on l: α, 1/L, ⌊L/4⌋, the first block, 1/√l."""
    check(tiny(norm, layers=layers), BY_HAND[norm])


def test_peri_norms_the_embedding_and_no_other_variant_does():
    """2502.02732; the norm on the embedding is optional, and on by default for peri only."""
    assert [norm for norm in NORMS if Config(norm=norm).embed_norm] == ["peri"]


# ---------------------------------------------------------------------------------------------
# The settings that change the wiring
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["peri", "pre", "post", "hybrid", "span+gpas"])
@pytest.mark.parametrize("embed_norm", [True, False])
def test_embed_norm(norm, embed_norm):
    check(tiny(norm, embed_norm=embed_norm), BY_HAND[norm.removesuffix("+gpas")])


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_layer_norm_in_place_of_rms_norm(norm):
    """norm_kind="layer" changes every norm of the stream; q, k, v keep RMSNorm (2503.04598)."""
    check(tiny(norm, norm_kind="layer"), BY_HAND[norm.removesuffix("+gpas")])


@pytest.mark.parametrize("settings", [{"rope_theta": 50.0}, {"heads": 1}, {"ffn": 40}], ids=str)
@pytest.mark.parametrize("norm", ["pre", "hybrid"])
def test_theta_heads_and_ffn(norm, settings):
    check(tiny(norm, **settings), BY_HAND[norm])


FACTORS = {  # settings → the factors of (attention, FFN) in blocks 1..4
    "exponent=0.3": ({"lns_exponent": 0.3}, [(l**-0.3, l**-0.3) for l in (1, 2, 3, 4)]),
    "exponent=1": ({"lns_exponent": 1.0}, [(1, 1), (1 / 2, 1 / 2), (1 / 3, 1 / 3), (1 / 4, 1 / 4)]),
    "sites=attn": ({"lns_sites": "attn"}, [(1, 1), (2**-0.5, 1), (3**-0.5, 1), (4**-0.5, 1)]),
    "sites=ffn": ({"lns_sites": "ffn"}, [(1, 1), (1, 2**-0.5), (1, 3**-0.5), (1, 4**-0.5)]),
    "unscaled_last=1": ({"lns_unscaled_last": 1}, [(1, 1), (2**-0.5,) * 2, (3**-0.5,) * 2, (1, 1)]),
    "unscaled_last=3": ({"lns_unscaled_last": 3}, [(1, 1)] * 4),
    "learnable": ({"lns_learnable": True}, [(1, 1)] * 4),  # the gains hold it, see below
}


@pytest.mark.parametrize("norm", ["lns", "lns+gpas"])
@pytest.mark.parametrize("case", FACTORS)
def test_lns_settings(case, norm):
    """2502.05795 sweeps the exponent; the releases leave last blocks or one site unscaled."""
    settings, factors = FACTORS[case]

    def formula(a, m, x, l, c):
        x = a.g(x + a.f(a.N(x) * factors[l - 1][0]))
        return m.g(x + m.f(m.N(x) * factors[l - 1][1]))

    check(tiny(norm, **settings), formula)


@pytest.mark.parametrize("settings", [{}, {"lns_exponent": 0.7}, {"lns_sites": "ffn"}], ids=str)
def test_learnable_lns_starts_as_the_fixed_one(settings):
    """The GPAS release makes 1/√l the start of a learned gain: one function at the start."""
    fixed = fresh(tiny("lns", **settings))
    learned = fresh(tiny("lns", lns_learnable=True, **settings))
    ids, _ = tokens(fixed.config)
    assert_close(learned(ids).detach(), fixed(ids).detach(), 1e-5)
    assert all(gain(b.attn.norm_in).eq(1).all() for b in fixed.blocks)
    exponent = settings.get("lns_exponent", 0.5)
    for l, block in enumerate(learned.blocks, 1):
        assert_close(gain(block.ffn.norm_in).detach(), torch.full((16,), l**-exponent), 1e-6)


@pytest.mark.parametrize("layers", [1, 3, 4, 7, 8, 32, 100])
@pytest.mark.parametrize("fraction", [0.0, 0.0625, 0.25, 0.29, 0.5, 0.75, 1.0])
def test_mix_has_the_floor_of_the_fraction_as_post_blocks(layers, fraction):
    """2412.13795: a quarter, or 2 of 32 at 7B. 0.29 · 100 is 28.99… in floats, and means 29."""
    model = fresh(tiny("mix", layers=layers, mix_fraction=fraction, dim=4, heads=1, ffn=1))
    is_post = [gain(block.ffn.norm_out) is not None for block in model.blocks]
    posts = int(fraction * 10_000) * layers // 10_000
    assert is_post == [True] * posts + [False] * (layers - posts)


@pytest.mark.parametrize("fraction, posts", [(0.0, 0), (0.3, 1), (0.5, 2), (1.0, 4)])
@pytest.mark.parametrize("norm", ["mix", "mix+gpas"])
def test_mix_fraction(norm, fraction, posts):
    formula = lambda a, m, x, l, c: (post if l <= posts else pre)(a, m, x, l, c)
    check(tiny(norm, mix_fraction=fraction), formula)


# The formulas with every place where g may sit (2506.22049 compares them): E on what enters the
# sub-layer, K on the shortcut, R on the branch, S on the sum, M on the output of the norm. One of
# the five is g, the others are the identity.


def placed_pre(a, m, x, l, c):
    for s in (a, m):
        x = s.E(x)
        x = s.S(s.K(x) + s.R(s.f(s.M(s.N(x)))))
    return x


def placed_lns(a, m, x, l, c):
    for s in (a, m):
        x = s.E(x)
        x = s.S(s.K(x) + s.R(s.f(s.M(s.N(x)) / math.sqrt(l))))
    return x


def placed_scaleres(a, m, x, l, c):
    L = c.layers
    for s in (a, m):
        x = s.E(x)
        x = s.S((1 - 1 / L) * s.K(x) + s.R(s.f(s.M(s.N(x))) / L))
    return x


def placed_sandwich(a, m, x, l, c):
    for s in (a, m):
        x = s.E(x)
        x = s.S(s.K(x) + s.R(s.O(s.f(s.M(s.N(x))))))
    return x


def placed_post(a, m, x, l, c, alpha=1):
    for s in (a, m):
        x = s.E(x)
        x = s.M(s.O(s.S(alpha * s.K(x) + s.R(s.f(x)))))
    return x


def placed_deepnorm(a, m, x, l, c):
    return placed_post(a, m, x, l, c, alpha=(2 * c.layers) ** 0.25)


def placed_mix(a, m, x, l, c):
    return (placed_post if l <= c.layers // 4 else placed_pre)(a, m, x, l, c)


def placed_hybrid(a, m, x, l, c):
    x = a.E(x)
    y = m.E(m.N(a.S(a.K(x) + a.R(a.f(x)))))
    return m.S(m.K(y) + m.R(m.f(y)))


def placed_hybrid_star(a, m, x, l, c):
    return (placed_pre if l == 1 else placed_hybrid)(a, m, x, l, c)


def placed_span(a, m, x, l, c):
    x = a.E(x)
    if l == 1:  # the attention's norm is the extra one, so M sits on that
        y = a.O(a.S(a.R(a.f(a.M(a.N(x)))) + a.K(x)))
    else:
        y = a.M(a.O(a.S(a.R(a.f(x)) + a.K(x))))
    return m.M(m.O(m.S(m.R(m.f(m.E(y))) + m.K(x))))


# E, K, R, S, M: a gate on x, on the shortcut, on the branch, on the sum, behind the norm (that of
# the input where there are two); only the one that a test places is there, the others do nothing.
PLACES = "add its equation with all the places where a gate may sit (E K R S M) to PLACED"
PLACED = ByHand(
    PLACES,
    {
        "pre": placed_pre,
        "lns": placed_lns,
        "scaleres": placed_scaleres,
        "sandwich": placed_sandwich,
        "peri": placed_sandwich,
        "post": placed_post,
        "deepnorm": placed_deepnorm,
        "mix": placed_mix,
        "hybrid": placed_hybrid,
        "hybrid_star": placed_hybrid_star,
        "span": placed_span,
    },
)
LETTERS = {"before": "E", "shortcut": "K", "branch": "R", "sum": "S", "norm": "M"}
SITES = [  # (variant, placement, gate); hybrid's attention has no norm for a gate to follow
    (norm, placement, gate)
    for norm in PLACED
    for placement in LETTERS
    for gate in ("block", "sublayer")
    if not (norm.startswith("hybrid") and placement == "norm")
]


def test_every_placement_is_tested():
    assert LETTERS.keys() == PLACEMENTS.keys()
    for norm in VARIANTS:
        assert PLACED[norm] and BY_HAND[norm]
    assert ACTS.keys() == GATE_ACTS.keys()


@pytest.mark.parametrize("norm, placement, gate", SITES)
def test_gpas_placement(norm, placement, gate):
    def formula(a, m, x, l, c):
        for s in (a, m):
            for place, letter in LETTERS.items():
                setattr(s, letter, s.g if place == placement else lambda x: x)
        return PLACED[norm](a, m, x, l, c)

    check(tiny(f"{norm}+gpas", gpas_placement=placement, gpas_gate=gate), formula)


@pytest.mark.parametrize("stop_gradient", [True, False], ids=["stop_gradient", "naive"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_gpas_act_and_stop_gradient(norm, act, stop_gradient):
    """The ablations of 2506.22049: other activations, and (1 − act(α))·x without stop-gradient."""
    check(
        tiny(f"{norm}+gpas", gpas_act=act, gpas_stop_gradient=stop_gradient, gpas_gate="sublayer"),
        BY_HAND[norm],
    )


@pytest.mark.parametrize("stop_gradient", [True, False], ids=["stop_gradient", "naive"])
@pytest.mark.parametrize("norm", ["pre", "deepnorm", "hybrid"])
def test_gpas_fixed(norm, stop_gradient):
    """A gate that is held, not learned: the formula at that α, and no gradient for it."""
    config = tiny(f"{norm}+gpas", gpas_fixed=0.4, gpas_stop_gradient=stop_gradient)
    check(config, BY_HAND[norm])
    alphas = sum(fresh(config).gates(), [])
    assert len(alphas) == 4
    assert all(alpha.item() == pytest.approx(0.4) for alpha in alphas)
    assert not any(alpha.requires_grad for alpha in alphas)


# ---------------------------------------------------------------------------------------------
# What holds for every variant
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["block", "sublayer"])
@pytest.mark.parametrize("norm", ALL_NORMS)
def test_every_parameter_gets_a_gradient(norm, gate):
    """Two releases of LNS, and any misspelt variant in them, train blocks that do nothing."""
    model = scramble(fresh(tiny(norm, norm_eps=0.01, gpas_gate=gate)))
    grads = gradients(model, *tokens(model.config))
    assert [n for n, g in grads.items() if g is None or not g.abs().max() > 1e-7] == []
    for role, l, grad in model.matrices(lambda p: p.grad):  # q, k, v apart; gate, up apart
        assert grad.abs().max() > 1e-7, f"{role} of block {l} gets no gradient"


@pytest.mark.parametrize("norm, placement, gate", SITES)
def test_every_gate_gets_a_gradient_at_every_placement(norm, placement, gate):
    """A gate that is built but never applied would be a setting without effect."""
    model = scramble(
        fresh(tiny(f"{norm}+gpas", gpas_placement=placement, gpas_gate=gate, norm_eps=0.01))
    )
    gradients(model, *tokens(model.config))
    assert all(alpha.grad is not None and alpha.grad != 0 for alpha in sum(model.gates(), []))


@pytest.mark.parametrize("gate", ["block", "sublayer"])
@pytest.mark.parametrize("norm", ["hybrid+gpas", "hybrid_star+gpas"])
def test_a_gate_without_a_place_is_refused(norm, gate):
    """After a norm that is not there: such an α would be counted and saved, and never used."""
    with pytest.raises(ValueError, match="gpas_placement"):
        tiny(norm, gpas_placement="norm", gpas_gate=gate)
    tiny(norm.removesuffix("+gpas"), gpas_placement="norm")  # no gate, nothing to refuse


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_causal(norm):
    """Other tokens at the end leave the logits before them as they were."""
    model = scramble(fresh(tiny(norm)).double())
    ids, _ = tokens(model.config)
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % model.config.vocab
    one, two = model(ids), model(other)
    assert_close(two[:, :6], one[:, :6], 1e-13)
    assert (one - two)[:, 6:].abs().amin(dim=1).max() > 1e-3


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_order_and_distance_matter(norm):
    """Attention mixes tokens by position: the last token sees an exchange of the two before it."""
    model = scramble(fresh(tiny(norm)).double())
    ids = torch.tensor([[1, 2, 3, 4]])
    exchanged = torch.tensor([[1, 3, 2, 4]])
    assert (model(ids) - model(exchanged))[:, -1].abs().max() > 1e-3


NUMBERS = "add ((attention, FFN) in block 1, the same in the others), its norms, to COUNTS"
COUNTS = ByHand(
    NUMBERS,
    {  # norms of (attention, FFN) in block 1 and in the others: input + output + q, k, v
        "post": ((1, 1), (1, 1)),
        "deepnorm": ((1, 1), (1, 1)),
        "pre": ((1, 1), (1, 1)),
        "sandwich": ((2, 2), (2, 2)),
        "mix": ((1, 1), (1, 1)),
        "lns": ((1, 1), (1, 1)),
        "scaleres": ((1, 1), (1, 1)),
        "hybrid": ((3, 1), (3, 1)),
        "hybrid_star": ((4, 1), (3, 1)),
        "peri": ((2, 2), (2, 2)),
        "span": ((2, 1), (1, 1)),
    },
)


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_number_of_norms(norm):
    """Elsewhere a flag that was not passed on left norms out, or applied them twice."""
    model = fresh(tiny(norm))
    count = lambda s: sum(p.ndim == 1 and p.numel() > 1 for p in s.parameters())
    first, others = COUNTS[norm.removesuffix("+gpas")]
    got = [(count(block.attn), count(block.ffn)) for block in model.blocks]
    assert got == [first, others, others, others]
    assert gain(model.norm) is not None


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_rms_is_1_after_a_block_that_ends_in_a_norm(norm):
    """post, deepnorm, span, and the first blocks of mix; in the others the stream is not normed."""
    base = norm.removesuffix("+gpas")
    if is_own(norm):
        pytest.skip("whether it should is known to its author")
    model = fresh(tiny(norm, init="fan_in", embed_std=3.0))  # gains are 1
    with torch.no_grad():
        for alpha in sum(model.gates(), []):
            alpha.fill_(-0.5)
    seen = streams(model, tokens(model.config)[0]).square().mean(-1).sqrt()
    for l, rms in enumerate(seen):
        ends_in_norm = l and (base in ("post", "deepnorm", "span") or (base == "mix" and l == 1))
        assert (rms - 1).abs().max().lt(1e-4) == bool(ends_in_norm) or (base == "peri" and l == 0)


def started_plain(config):
    return fresh(config)


def started_on_meta(config):
    """As a model too large to build twice is started."""
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    return model


def started_from_a_checkpoint(config):
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    model.load_state_dict(fresh(config).state_dict())
    return model


STARTS = [started_plain, started_on_meta, started_from_a_checkpoint]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("norm", ["lns", "lns+gpas"])
def test_lns_factor_after_every_way_to_start(norm, start):
    """What f reads has RMS 1/√l. Elsewhere the factor was a buffer that a meta start wiped."""
    model = start(tiny(norm, layers=9, embed_std=1.0))
    read = []
    for block in model.blocks:
        for s in (block.attn, block.ffn):
            s.f.register_forward_pre_hook(
                lambda f, args: read.append(args[0].detach().square().mean().sqrt().item())
            )
    model(tokens(model.config)[0])
    assert read == pytest.approx([l**-0.5 for l in range(1, 10) for _ in "af"], rel=1e-4)


@pytest.mark.parametrize("start", STARTS[1:])
@pytest.mark.parametrize("norm", ALL_NORMS)
def test_every_way_to_start_gives_the_same_model(norm, start):
    """Nothing of a model is lost between the meta device and the first step."""
    config = tiny(norm, gpas_fixed=0.3 if norm.endswith("gpas") else None)
    plain, other = fresh(config), start(config)
    assert_same(dict(other.named_parameters()), dict(plain.named_parameters()))
    ids, _ = tokens(config)
    assert torch.equal(other(ids), plain(ids))


# ---------------------------------------------------------------------------------------------
# No dead setting
# ---------------------------------------------------------------------------------------------

CHANGES = {  # field: (the settings to start from, another value of the field)
    "layers": ({}, 5),
    "dim": ({}, 32),
    "heads": ({}, 4),
    "ffn": ({}, 32),
    "vocab": ({}, 40),
    "block": ({}, 11),
    "norm": ({}, "sandwich"),
    "norm_kind": ({}, "layer"),
    "norm_eps": ({}, 1e-3),
    "rope_theta": ({}, 100.0),
    "init": ({}, "fan_in"),
    "embed_std": ({}, 0.6),
    "embed_norm": ({}, True),
    "scale_init_constant": ({"norm": "span"}, 0.5),
    "mix_fraction": ({"norm": "mix"}, 0.5),
    "lns_exponent": ({"norm": "lns"}, 0.7),
    "lns_sites": ({"norm": "lns"}, "attn"),
    "lns_unscaled_last": ({"norm": "lns"}, 1),
    "lns_learnable": ({"norm": "lns"}, True),
    "gpas_gate": ({"norm": "gpas"}, "sublayer"),
    "gpas_placement": ({"norm": "gpas"}, "branch"),
    "gpas_act": ({"norm": "gpas"}, "tanh"),
    "gpas_stop_gradient": ({"norm": "gpas"}, False),
    "gpas_fixed": ({"norm": "gpas"}, 0.3),
}


def observed(config):
    """What a model shows: its weights, the gradients of a step with open gates, its context."""
    model = fresh(config)
    seen = {f"start of {name}": p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for alpha in sum(model.gates(), []):
            if alpha.requires_grad:
                alpha.fill_(0.5)
    ids, targets = tokens(tiny(), T=11)
    seen["logits"] = model(ids).detach()
    seen |= gradients(model, ids, targets)
    try:
        model(torch.zeros((1, 12), dtype=torch.long))
    except ValueError:
        seen["too long"] = torch.ones(1)
    return seen


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Config)])
def test_no_setting_is_dead(field):
    """Each field of Config, changed alone, changes what a model does. A new one needs a row."""
    assert field in CHANGES, f"say in CHANGES how to see the effect of {field}"
    settings, value = CHANGES[field]
    one = observed(tiny(**settings))
    again = observed(tiny(**settings))
    two = observed(tiny(**(settings | {field: value})))
    same = lambda a, b: a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert same(one, again)
    assert not same(one, two)


@pytest.mark.parametrize("norm", NORMS)
def test_variant_states_its_formula_and_paper(norm):
    """The table of variants, and every reader of it, relies on these."""
    variant = VARIANTS[norm]
    if is_own(norm):
        pytest.skip("a variant of one's own may leave them out")
    assert "f(" in variant.formula or "attn" in variant.formula
    assert "←" in variant.formula
    year_month, _, number = variant.paper.partition(".")
    assert len(year_month) == 4 and len(number) == 5 and (year_month + number).isdigit()
