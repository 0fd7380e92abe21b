"""Every matrix starts at the size its init says, checked slice by slice against closed forms."""

import math

import pytest
import torch
from conftest import ALL_NORMS, NORMS, assert_same, fresh, tiny, tokens

from nanonorm import INITS, VARIANTS, Config, Matrix

DIM, FFN, VOCAB = 64, 96, 128  # all different, so that no fan can stand for another

FANS = {role: (DIM, DIM) for role in "qkvo"}  # role: (fan in, fan out)
FANS |= {"gate": (DIM, FFN), "up": (DIM, FFN), "down": (FFN, DIM), "head": (DIM, VOCAB)}


def std_by_hand(init, role, l, L):
    """The closed forms of the papers, for block l of L."""
    fan_in, fan_out = FANS[role]
    output = role in ("o", "down")
    if init == "normal":
        return 0.02
    if init == "scaled":  # GPT-2, Megatron (1909.08053)
        return 0.02 / math.sqrt(2 * L) if output else 0.02
    if init == "scale_init":  # 2601.22580
        return 0.02 / math.sqrt(L) if output else 0.02
    if init == "depth_scaled":  # 1908.11365
        return 0.02 / math.sqrt(2 * l) if output else 0.02
    if init == "mitchell":  # 2402.00838; a normal cut at 3σ has a std a little below σ
        sigma = 1 / math.sqrt(2 * fan_in * l) if output else 1 / math.sqrt(fan_in)
        density = math.exp(-(3**2) / 2) / math.sqrt(2 * math.pi)
        return sigma * math.sqrt(1 - 2 * 3 * density / math.erf(3 / math.sqrt(2)))
    if init == "deepnorm":  # 2203.00555: xavier-normal, gain β on v, o and the FFN, 1 on q and k
        if role == "head":
            return 0.02
        xavier = math.sqrt(2 / (fan_in + fan_out))
        return xavier if role in ("q", "k") else xavier / (8 * L) ** 0.25
    if init == "fan_in":
        return 1 / math.sqrt(fan_in)
    raise AssertionError(f"write down the closed form of {init}")


def shaped(**settings):
    return Config(**({"dim": DIM, "ffn": FFN, "vocab": VOCAB, "heads": 2, "block": 8} | settings))


def relative_stds(model, by_hand):
    """{role: std / closed form, for each block}, and the relative error of sampling each."""
    found = {}
    for role, l, w in model.matrices():
        want = by_hand(role, l)
        found.setdefault(role, []).append(w.std().item() / want)
    noise = {role: 1 / math.sqrt(2 * FANS[role][0] * FANS[role][1]) for role in found}
    return found, noise


@pytest.mark.parametrize("L", [4, 24, 128])
@pytest.mark.parametrize("init", INITS)
def test_std_of_every_matrix(init, L):
    """By slice: q, k, v share a matrix, and two releases gave v the wrong gain or missed it.

    Two releases have the DeepNorm gain upside down, (8L)^(+¼): weights 10 to 14 times too large.
    """
    model = fresh(shaped(layers=L, init=init))
    found, noise = relative_stds(model, lambda role, l: std_by_hand(init, role, l, L))
    assert found.keys() == FANS.keys()
    for role, ratios in found.items():
        assert len(ratios) == (1 if role == "head" else L)
        for l, ratio in enumerate(ratios, 1):
            assert abs(ratio - 1) < 6 * noise[role], f"{role} of block {l}: {ratio:.3f} × as large"
        mean = sum(ratios) / len(ratios)
        assert abs(mean - 1) < 5 * noise[role] / math.sqrt(len(ratios)), (
            f"{role}: {mean:.4f} × as large"
        )


@pytest.mark.parametrize("init", INITS)
def test_draws_are_centred_and_independent(init):
    """Mean 0 in each slice; no two blocks, and no two slices, share their draws."""
    model = fresh(shaped(layers=3, init=init))
    matrices = [w.flatten() for _, _, w in model.matrices()]
    for w in matrices:
        assert w.mean().abs() < 6 * w.std() / math.sqrt(w.numel())
    n = DIM * DIM
    rows = torch.stack([w[:n] / w[:n].std() for w in matrices])
    correlation = rows @ rows.T / n - torch.eye(len(rows))
    assert correlation.fill_diagonal_(0).abs().max() < 6 / math.sqrt(n)


@pytest.mark.parametrize("init", INITS)
def test_only_mitchell_is_truncated(init):
    """OLMo cuts the draws at 3σ (2402.00838); the other papers draw the full normal."""
    model = fresh(shaped(layers=24, init=init))
    largest = {}
    for role, l, w in model.matrices():
        fan_in = FANS[role][0]
        if init == "mitchell":
            sigma = 1 / math.sqrt(2 * fan_in * l) if role in ("o", "down") else fan_in**-0.5
        else:
            sigma = std_by_hand(init, role, l, 24)
        largest[role] = max(largest.get(role, 0.0), (w.abs().max() / sigma).item())
    del largest["head"]  # few draws
    if init == "mitchell":
        assert all(2.9 < z <= 3.0001 for z in largest.values())
    else:
        assert all(3.8 < z < 6.5 for z in largest.values())


@pytest.mark.parametrize("embed_std", [0.02, math.sqrt(2 / 5)])
@pytest.mark.parametrize("init", INITS)
def test_embedding_std_is_apart_from_the_init(init, embed_std):
    """0.02, or √(2/5) as in the Mix-LN and GPAS releases, whatever the init of the matrices."""
    model = fresh(shaped(layers=1, init=init, embed_std=embed_std))
    ratio = model.embed.weight.std().item() / embed_std
    assert abs(ratio - 1) < 6 / math.sqrt(2 * DIM * VOCAB)
    other = fresh(shaped(layers=1, init=init, embed_std=1.0))
    assert_same(
        {f"{role}{l}": w for role, l, w in model.matrices()},
        {f"{role}{l}": w for role, l, w in other.matrices()},
    )


# ---------------------------------------------------------------------------------------------
# The numbers of the papers
# ---------------------------------------------------------------------------------------------

DEPTHS = [12, 24, 128, 512]
at_depths = lambda *values: [*zip(DEPTHS, values, strict=True)]


@pytest.mark.parametrize("L, alpha", at_depths(2.213, 2.632, 4.000, 5.657))
@pytest.mark.parametrize("norm", ["deepnorm", "deepnorm+gpas"])
def test_deepnorm_alpha(norm, L, alpha):
    """α = (2L)^¼ (2203.00555), as applied. Two releases fix it at 2.83 for every depth."""
    model = fresh(tiny(norm, layers=L, dim=4, heads=1, ffn=4, vocab=8)).double()
    ids, _ = tokens(model.config)
    x = model.embed(ids).detach()
    rope, constants = model.tables(ids.shape[1], x)
    for l in (1, L):
        block, seen = model.blocks[l - 1], {}
        block.attn.f.register_forward_hook(lambda m, args, y, seen=seen: seen.update(branch=y))
        block.attn.norm_out.register_forward_pre_hook(
            lambda m, args, seen=seen: seen.update(sum=args[0])
        )
        block(x, rope, constants[l - 1])
        measured = ((seen["sum"] - seen["branch"]) / x).detach()
        assert measured.min().item() == pytest.approx(alpha, abs=5e-4)
        assert measured.max().item() == pytest.approx(alpha, abs=5e-4)


def std(init, role, l, L, **settings):
    """What INITS says of one matrix, without drawing it."""
    fan_in, fan_out = FANS[role]
    return INITS[init].std(Matrix(role, fan_in, fan_out, l, L), shaped(layers=L, **settings))


@pytest.mark.parametrize("L, beta", at_depths(0.3195, 0.2686, 0.1768, 0.1250))
@pytest.mark.parametrize("role", ["q", "k", "v", "o", "gate", "up", "down"])
def test_deepnorm_beta(role, L, beta):
    """β = (8L)^(−¼) on v, o, gate, up, down, and 1 on q and k (2203.00555)."""
    xavier = math.sqrt(2 / sum(FANS[role]))
    gain = 1 if role in ("q", "k") else beta
    assert std("deepnorm", role, 1, L) / xavier == pytest.approx(gain, abs=5.1e-5)


@pytest.mark.parametrize("L, factor", at_depths(0.2887, 0.2041, 0.0884, 0.0442))
def test_scale_init_factor(L, factor):
    """1/√L on what writes to the stream (2601.22580), in every block."""
    for l in (1, L):
        assert std("scale_init", "o", l, L) / 0.02 == pytest.approx(factor, abs=5.1e-5)
        assert std("scale_init", "down", l, L) / 0.02 == pytest.approx(factor, abs=5.1e-5)


@pytest.mark.parametrize("L, factor", at_depths(0.2041, 0.1443, 0.0625, 0.0313))
def test_scaled_factor(L, factor):
    """1/√(2L) on what writes to the stream (1909.08053), in every block."""
    for l in (1, L):
        assert std("scaled", "o", l, L) / 0.02 == pytest.approx(factor, abs=5.1e-5)
        assert std("scaled", "down", l, L) / 0.02 == pytest.approx(factor, abs=5.1e-5)


def test_scale_init_constant():
    """The paper gives O(1/√L) only: the constant is a setting, and 1/√2 of it is Megatron's."""
    for role in FANS:
        got = std("scale_init", role, 1, 24, scale_init_constant=math.sqrt(0.5))
        assert got == pytest.approx(std("scaled", role, 1, 24))
    half, one = (
        fresh(shaped(layers=4, init="scale_init", scale_init_constant=k)) for k in (0.5, 1.0)
    )
    for (role, _, a), (_, _, b) in zip(half.matrices(), one.matrices(), strict=True):
        assert torch.allclose(a, (0.5 if role in ("o", "down") else 1) * b)


# ---------------------------------------------------------------------------------------------
# Which init, and from which draws
# ---------------------------------------------------------------------------------------------


def test_own_init_of_each_variant():
    """DeepNorm and SpanNorm come with an init; the others start at N(0, 0.02)."""
    own = {"deepnorm": "deepnorm", "span": "scale_init"}
    assert {norm: Config(norm=norm).init for norm in NORMS} == {
        norm: own.get(norm, "normal") for norm in NORMS
    }
    assert {norm: VARIANTS[norm].init for norm in NORMS} == {
        norm: Config(norm=norm).init for norm in NORMS
    }


@pytest.mark.parametrize("norm", NORMS)
def test_gpas_keeps_the_init_of_its_variant(norm):
    """A release tests the name for equality, so that DeepNorm+GPAS gets no DeepNorm init."""
    assert Config(norm=f"{norm}+gpas").init == Config(norm=norm).init


@pytest.mark.parametrize("init", INITS)
def test_one_seed_gives_every_variant_the_same_matrices(init):
    """So that variants differ in the wiring only: bit-equal matrices and embedding."""
    drawn = {}
    for norm in ALL_NORMS:
        model = fresh(tiny(norm, init=init), seed=3)
        drawn[norm] = {f"{role}{l}": w for role, l, w in model.matrices()}
        drawn[norm]["embed"] = model.embed.weight.detach()
    for norm in ALL_NORMS:
        assert_same(drawn[norm], drawn["pre"])


@pytest.mark.parametrize("norm", ["pre", "deepnorm+gpas", "lns"])
def test_init_weights_is_a_function_of_the_seed(norm):
    """Drawing again under the seed undoes training; under another seed it gives another start."""
    model = fresh(tiny(norm, lns_learnable=True), seed=5)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    torch.manual_seed(5)
    model.init_weights()
    assert_same({name: p.detach() for name, p in model.named_parameters()}, start)
    torch.manual_seed(6)
    model.init_weights()
    assert not torch.equal(model.head.weight, start["head.weight"])


def test_building_a_model_draws_nothing_but_its_weights():
    """PyTorch's own draws of each layer would cost time at depth, and shift the seed."""
    one = fresh(tiny("pre"), seed=7)
    after = torch.rand(1)
    torch.manual_seed(7)
    one.init_weights()
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_gains_start_at_1(norm):
    """All norms, those of q, k, v and the final one too."""
    model = fresh(tiny(norm))
    gains = [p for p in model.parameters() if p.ndim == 1 and p.numel() > 1]
    assert gains and all(p.eq(1).all() for p in gains)
