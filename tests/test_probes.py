"""The probes: each on a case whose answer is known by hand, and that looking changes nothing."""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import ALL_NORMS, assert_close, assert_same, fresh, gradients, scramble, tiny, tokens
from torch._dynamo.utils import counters

from nanonorm import (
    LAYER_COLUMNS,
    Config,
    Transformer,
    angular_distance,
    angular_distances,
    at_init,
    attention_entropy,
    block_grad_norms,
    block_influence,
    block_jacobian,
    block_weight_norms,
    branch_variances,
    channel_correlation,
    channel_kurtosis,
    condition_numbers,
    eigenvalues,
    exit_losses,
    ffn_eigenvalues,
    ffn_grad_norms,
    gate_values,
    hard_rank,
    jacobian_distance,
    layer_table,
    pair_cosines,
    removal_losses,
    rms,
    soft_rank,
    stream_eigenvalues,
    stream_variance,
    streams,
    visit,
)


def exact(norm="pre", **settings):
    """A scrambled model in float64, with ids and targets."""
    model = scramble(fresh(tiny(norm, **settings)).double())
    return model, *tokens(model.config)


@torch.no_grad()
def identity(norm="pre", **settings):
    """A model whose sub-layers write nothing to the stream, with ids and targets."""
    model, *batch = exact(norm, **settings)
    for block in model.blocks:
        block.attn.f.wo.weight.zero_()
        block.ffn.f.w2.weight.zero_()
    return model, *batch


def randn(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def known(*values):
    return torch.tensor(values, dtype=torch.float64)


# The papers' formulas once more. What a sub-layer of block l reads, given the stream x; then the
# shortcut and the branch of its sum, given what f made of it and the block's input x0.
READS = {
    "pre": lambda s, x, l: s.norm_in(x),
    "lns": lambda s, x, l: s.norm_in(x) / l**0.5,
    "scaleres": lambda s, x, l: s.norm_in(x),
    "sandwich": lambda s, x, l: s.norm_in(x),
    "post": lambda s, x, l: x,
    "deepnorm": lambda s, x, l: x,
    "span": lambda s, x, l: s.norm_in(x),  # there is one for the attention of block 1 only
}
SUMS = {
    "pre": lambda s, x, x0, f, L: (x, f),
    "lns": lambda s, x, x0, f, L: (x, f),
    "scaleres": lambda s, x, x0, f, L: ((1 - 1 / L) * x, f / L),
    "sandwich": lambda s, x, x0, f, L: (x, s.norm_out(f)),
    "post": lambda s, x, x0, f, L: (x, f),
    "deepnorm": lambda s, x, x0, f, L: ((2 * L) ** 0.25 * x, f),
    "span": lambda s, x, x0, f, L: (x0, f),
}
NORM_ON_SUM = ("post", "deepnorm", "span")
BY_HAND = [*READS, *(f"{norm}+gpas" for norm in READS)]


class Hand:
    """A model run formula by formula; with `skip`, block l's input goes to block l + 1.

    streams: x_0..x_L; reads: what each sub-layer reads; sums: (l, i, shortcut, branch, sum).
    """

    @torch.no_grad()
    def __init__(self, model, ids, skip=None):
        base, _, has_gates = model.config.norm.partition("+")
        x, L = model.embed(ids), model.config.layers
        rope, _ = model.tables(ids.shape[1], x)
        self.model, self.streams, self.reads, self.sums = model, [x], [], []
        for l, block in enumerate(model.blocks, 1):
            if l == skip:
                continue
            g = 1 - F.silu(model.gates()[l - 1][0]) if has_gates else 1.0
            x0 = x
            for i, s in enumerate((block.attn, block.ffn)):
                self.reads.append(READS[base](s, x, l))
                shortcut, branch = SUMS[base](s, x, x0, s.f(self.reads[-1], rope), L)
                if base in NORM_ON_SUM:  # there GPAS sits on the shortcut
                    y = g * shortcut + branch
                    x = s.norm_out(y)
                else:
                    x = y = g * (shortcut + branch)
                self.sums.append((l, i, shortcut, branch, y))
            self.streams.append(x)

    def loss(self, targets, l=-1):
        """Cross-entropy of the head on stream l, the last by default."""
        logits = self.model.head(self.model.norm(self.streams[l])).detach()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def every_probe(model, ids, targets):
    """{name: result} of all probes that run a model."""
    x = streams(model, ids)
    seen = []
    visit(model, ids, *[lambda *args: seen.append(args[-1])] * 4)
    return {
        "visit": torch.cat([t.flatten() for t in seen]),
        "streams": x,
        "stream_eigenvalues": stream_eigenvalues(model, ids),
        "ffn_eigenvalues": ffn_eigenvalues(model, ids),
        "condition_numbers": condition_numbers(model),
        "branch_variances": branch_variances(model, ids),
        "grad_norms": torch.stack([block_grad_norms(model), ffn_grad_norms(model)]),
        "weight_norms": block_weight_norms(model),
        "jacobian": block_jacobian(model, 2, x[1, 0, :3]),
        "jacobian_distance": torch.tensor(jacobian_distance(model, 2, x[1])),
        "exit_losses": exit_losses(model, ids, targets),
        "removal_losses": removal_losses(model, ids, targets),
        **{k: torch.tensor(v) for k, v in layer_table(model, ids).items() if v[0] != ""},
    }


# ---------------------------------------------------------------------------------------------
# visit: what it sees
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_visit_sees_every_stream(norm):
    """The embedding as l = 0, normed where the variant norms it; then what leaves each block."""
    model, ids, _ = exact(norm)
    seen = {}
    assert visit(model, ids, stream=lambda l, x: seen.update({l: x})) is None
    x = model.embed_norm(model.embed(ids)).detach()
    rope, constants = model.tables(ids.shape[1], x)
    for l in range(5):
        if l:
            x = model.blocks[l - 1](x, rope, constants[l - 1]).detach()
        assert_close(seen[l], x, 1e-14, f"x_{l}")
    assert [*seen] == [0, 1, 2, 3, 4]  # in order
    assert torch.equal(streams(model, ids), torch.stack([*seen.values()]))


@pytest.mark.parametrize("norm", BY_HAND)
def test_visit_sees_every_addition(norm):
    """The shortcut with its constant and before GPAS, the branch, and what leaves."""
    model, ids, _ = exact(norm)
    seen, hand = [], Hand(model, ids)
    visit(model, ids, add=lambda *args: seen.append(args))
    assert [(l, i) for l, i, *_ in seen] == [(l, i) for l in range(1, 5) for i in (0, 1)]
    for (l, i, *got), (*_, shortcut, branch, y) in zip(seen, hand.sums, strict=True):
        where = f"block {l}, sub-layer {i}"
        assert_close(got[0], shortcut, 1e-12, f"shortcut, {where}")
        assert_close(got[1], branch, 1e-12, f"branch, {where}")
        assert_close(got[2], y, 1e-12, f"sum, {where}")
    assert_close(torch.stack(hand.streams), streams(model, ids), 1e-12)


@pytest.mark.parametrize("norm", ["pre", "lns+gpas", "span"])
def test_visit_sees_the_hidden_activations(norm):
    """silu(w1 x) ⊙ w3 x of what the FFN reads."""
    model, ids, _ = exact(norm)
    seen = {}
    visit(model, ids, hidden=lambda l, h: seen.update({l: h}))
    for l, x in enumerate(Hand(model, ids).reads[1::2], 1):
        w1, w3 = model.blocks[l - 1].ffn.f.w13.weight.detach().chunk(2)
        a = x @ w1.T
        assert_close(seen[l], a / (1 + (-a).exp()) * (x @ w3.T), 1e-12)
    assert [*seen] == [1, 2, 3, 4]


def turned(x, theta):
    """Rotary positions by complex numbers: x (B, T, nh, hs), i paired with i + hs/2."""
    z = torch.complex(*x.chunk(2, dim=-1))
    i, t = torch.arange(z.shape[-1]).double(), torch.arange(z.shape[1]).double()
    angles = t[:, None, None] / theta ** (i / len(i))
    z = z * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], dim=-1)


@pytest.mark.parametrize("norm", ["pre", "lns+gpas", "hybrid"])
def test_visit_sees_q_and_k(norm):
    """(B, nh, T, hs) each, rotated, and in HybridNorm normed: what the scores are made of."""
    model, ids, _ = exact(norm, rope_theta=16.0)
    seen, xs = {}, streams(model, ids)
    visit(model, ids, attend=lambda l, *qk: seen.update({l: qk}))
    reads = xs[:-1] if norm == "hybrid" else Hand(model, ids).reads[::2]
    for l, (x, block) in enumerate(zip(reads, model.blocks, strict=True), 1):
        f = block.attn.f
        for j, each in enumerate((f.norm_q, f.norm_k)):
            h = (x @ f.wqkv.weight.detach().chunk(3)[j].T).unflatten(-1, (2, 8))  # (B, T, nh, hs)
            if norm == "hybrid":
                h = each.gain.detach() * h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            want = turned(h, 16.0).transpose(1, 2)
            assert_close(seen[l][j], want, 1e-12, f"{'qk'[j]}, block {l}")
    assert [*seen] == [1, 2, 3, 4]


def test_visit_takes_no_notice_of_values():
    """A function that returns something, as a lambda may, changes nothing that is seen later."""
    model, ids, _ = exact()
    for which in ("add", "stream", "hidden", "attend"):
        seen, want = [], []
        visit(model, ids, **{which: lambda *args, to=want: to.append(args[-1])})
        visit(model, ids, **{which: lambda *args, to=seen: to.append(args[-1]) or 2 * args[-1]})
        assert torch.equal(torch.stack(seen), torch.stack(want)), which


def test_streams_are_at_least_float32():
    """Sums over 16-bit streams would be worth little."""
    model = fresh(tiny("pre")).bfloat16()
    assert streams(model, tokens(model.config)[0]).dtype == torch.float32


# ---------------------------------------------------------------------------------------------
# Looking changes nothing
# ---------------------------------------------------------------------------------------------


def hooks(model):
    return [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_visit_removes_its_hooks():
    """Also where a function that it was given raises."""
    model, ids, _ = exact()

    def fail(*args):
        raise RuntimeError("from the callback")

    for which in ("stream", "add", "hidden", "attend"):
        visit(model, ids, **{which: lambda *args: None})
        assert hooks(model) == []
        with pytest.raises(RuntimeError, match="from the callback"):
            visit(model, ids, **{which: fail})
        assert hooks(model) == []


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_probes_change_nothing(norm):
    """Loss, gradients, state dict and random numbers are bit for bit what they were."""
    model = scramble(fresh(tiny(norm, layers=2, mix_fraction=0.5)))
    ids, targets = tokens(model.config, T=6)
    loss = model(ids, targets)
    grads = {k: g.clone() for k, g in gradients(model, ids, targets).items()}
    weights = {k: w.clone() for k, w in model.state_dict().items()}
    numbers = torch.get_rng_state()
    results = every_probe(model, ids, targets)
    assert all(v.isfinite().all() and not v.requires_grad for v in results.values())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert_same({k: p.grad for k, p in model.named_parameters() if p.requires_grad}, grads)
    assert_same(model.state_dict(), weights)
    assert hooks(model) == [] and model.training
    assert torch.equal(model(ids, targets), loss)
    assert_same(gradients(model, ids, targets), grads)


@pytest.mark.parametrize("norm", ["deepnorm+gpas", "span"])
def test_compiled_models_can_be_probed(norm):
    """The same numbers, and the graphs made before serve on: none is made anew or left."""
    model = scramble(fresh(tiny(norm, layers=3)))
    batch = tokens(model.config, T=6)
    want, calls = every_probe(model, *batch), []

    def backend(graph, inputs):
        return lambda *args: calls.append(graph) or graph(*args)

    counters.clear()
    model.compile_blocks(backend=backend, fullgraph=True)
    loss = model(*batch)
    stats = {k: dict(v) for k, v in counters.items()}
    assert len(calls) == 3
    got = every_probe(model, *batch)
    assert len(calls) == 3  # hooks inside a graph would not be called: blocks are run eagerly
    assert torch.equal(model(*batch), loss)
    gradients(model, *batch)
    assert {k: dict(v) for k, v in counters.items()} == stats
    assert len(calls) == 9
    assert_same(got, want)


def test_probed_before_the_first_compiled_step():
    """Then too the step is compiled."""
    model = scramble(fresh(tiny("pre")))
    batch = tokens(model.config, T=6)
    loss = model(*batch)
    counters.clear()
    model.compile_blocks(backend="eager", fullgraph=True)
    layer_table(model, batch[0])
    assert counters["stats"]["unique_graphs"] == 0
    assert torch.equal(model(*batch), loss)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("norm", ["pre", "post+gpas"])
def test_checkpointed_models_can_be_probed(norm):
    """A block that is run again in the backward pass must not be seen again."""
    model = scramble(fresh(tiny(norm)))
    batch = tokens(model.config, T=6)
    grads = gradients(model, *batch)
    want = every_probe(model, *batch)
    model.checkpoint_activations = True
    assert_same(every_probe(model, *batch), want)
    assert_same(gradients(model, *batch), grads)


# ---------------------------------------------------------------------------------------------
# Numbers of one stream, or of several
# ---------------------------------------------------------------------------------------------


def test_stream_variance():
    """The mean over tokens of the variance over features (divided by C), by hand."""
    x = torch.tensor([[[1.0, 3.0], [5.0, 5.0]], [[0.0, 4.0], [2.0, -2.0]]], requires_grad=True)
    got = stream_variance(x)
    assert got.item() == pytest.approx((1 + 0 + 4 + 4) / 4)
    assert got.shape == () and not got.requires_grad


@pytest.mark.parametrize(
    "last, want", [([2.0, 0.0], 0), ([0.0, 3.0], 1 / 2), ([-1.0, 0.0], 1), ([1.0, 3**0.5], 1 / 3)]
)
def test_angular_distance(last, want):
    """Parallel 0, orthogonal ½, opposite 1, 60° ⅓: of the last position, whatever the others."""
    x, y = torch.tensor([[[9.0, 1.0], [1.0, 0.0]]]), torch.tensor([[[-5.0, 2.0], last]])
    assert angular_distance(x, y).item() == pytest.approx(want, abs=1e-7)
    assert angular_distance(y, x).item() == pytest.approx(want, abs=1e-7)


def test_angular_distance_is_a_mean_over_sequences():
    """Of angles, not of cosines: 0 and ½ make ¼ (the angle of the mean cosine is 60°, ⅓)."""
    x, y = known([[1, 0]], [[1, 0]]), known([[2, 0]], [[0, 1]])
    assert angular_distance(x, y).item() == pytest.approx(1 / 4)


def test_angular_distances():
    """Row l, column n: x_l and x_{l+n}; four streams at 0, 30, 90 and 180 degrees."""
    degrees = known(0, 30, 90, 180).deg2rad()
    xs = torch.stack([degrees.cos(), degrees.sin()], dim=-1)[:, None, None]  # (4, 1, 1, 2)
    n = math.nan
    want = known([0, 30, 90, 180], [0, 60, 150, n], [0, 90, n, n], [0, n, n, n]) / 180
    torch.testing.assert_close(angular_distances(xs), want, atol=1e-6, rtol=0, equal_nan=True)


def test_block_influence():
    """1 − the mean cosine: identity 0, opposite 2; every position counts alike."""
    x = randn(2, 4, 8)
    assert block_influence(x, x).item() == pytest.approx(0, abs=1e-6)
    assert block_influence(x, 3 * x).item() == pytest.approx(0, abs=1e-6)
    assert block_influence(x, -x).item() == pytest.approx(2)
    x = known([[1, 0], [1, 0], [1, 0], [1, 0]])
    y = known([[0, 1], [3, 0], [1, 0], [9, 0]])  # only the first is turned, by 90°
    assert block_influence(x, y).item() == pytest.approx(1 / 4)


def test_pair_cosines():
    """The mean over positions of each pair of streams, one pair and one position at a time."""
    xs = randn(3, 2, 5, 8)
    want = torch.zeros(3, 3, dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            pairs = zip(xs[i].flatten(0, 1), xs[j].flatten(0, 1), strict=True)
            want[i, j] = sum(a @ b / (a @ a).sqrt() / (b @ b).sqrt() for a, b in pairs) / 10
    assert_close(pair_cosines(xs), want, 1e-12)


def test_rms():
    assert rms(torch.tensor([[3.0], [4.0]])).item() == pytest.approx(12.5**0.5)
    assert rms(torch.full((8,), 300.0, dtype=torch.float16)).item() == 300  # 300² overflows


def test_channel_kurtosis():
    """Gaussian 3; two values 1, the least there is, wherever they lie; two of eight tokens 4."""
    x = randn(4, 5000, 2) * known(1, 9) + known(0, -5)
    assert channel_kurtosis(x).item() == pytest.approx(3, abs=0.15)
    sign = known(1, -1).repeat(4)
    for scale, shift in ((1, 0), (3, 7)):
        two = (scale * sign + shift).view(2, 4, 1)
        assert channel_kurtosis(two).item() == pytest.approx(1, rel=1e-12)
    few = known(1, -1, 0, 0, 0, 0, 0, 0)  # E[z²] = E[z⁴] = ¼
    x = torch.stack([sign, few], dim=-1).view(2, 4, 2)
    assert channel_kurtosis(x).item() == pytest.approx((1 + 4) / 2)  # over tokens, for each channel


def test_channel_correlation():
    """Identical channels 1, and opposite ones; independent 0; of three, the mean of the pairs."""
    a, b = known(1, 1, -1, -1), known(1, -1, 1, -1)
    of = lambda *channels: channel_correlation(torch.stack(channels, dim=-1).view(2, 2, -1)).item()
    assert of(a, 2 * a + 1) == pytest.approx(1)
    assert of(a, -a) == pytest.approx(1)
    assert of(a, b) == pytest.approx(0, abs=1e-7)
    assert of(a, a, b) == pytest.approx(1 / 3)
    assert of(a, torch.ones(4, dtype=torch.float64)) == 0  # a constant has no correlation
    assert channel_correlation(randn(2, 5000, 4)).item() == pytest.approx(0, abs=0.03)


def test_attention_entropy_of_uniform_attention():
    """Row t sees t + 1 keys alike: ln(t + 1)."""
    q, k = torch.zeros(2, 3, 5, 4), randn(2, 3, 5, 4).float()
    want = sum(math.log(t + 1) for t in range(5)) / 5
    assert attention_entropy(q, k).item() == pytest.approx(want)


def test_attention_entropy_of_one_hot_attention():
    """Each row looks at itself alone: 0, and not NaN from 0 · ln 0."""
    q = 1e3 * torch.eye(6)[None, None]
    assert attention_entropy(q, q).item() == 0


def test_attention_entropy_by_hand():
    """Row by row over its own past, scores divided by √hs; later keys do not matter."""
    q, k = randn(2, 3, 5, 4), randn(2, 3, 5, 4, seed=1)
    rows = []
    for b in range(2):
        for h in range(3):
            for t in range(5):
                weights = [math.exp(q[b, h, t] @ k[b, h, s] / 2) for s in range(t + 1)]
                p = [w / sum(weights) for w in weights]
                rows.append(-sum(v * math.log(v) for v in p))
    assert attention_entropy(q, k).item() == pytest.approx(sum(rows) / 30, rel=1e-12)


def test_eigenvalues():
    """Six tokens at ±a, ±b, ±c on turned axes around a point: a²/3, b²/3, c²/3, largest first."""
    axes = torch.linalg.qr(randn(3, 3)).Q
    tips = known(1, 5, 2)[:, None] * axes
    x = torch.cat([tips, -tips]) + known(4, -7, 1)
    got = eigenvalues(x.view(2, 3, 3).float())
    assert got.dtype == torch.float64
    assert_close(got, known(25, 4, 1) / 3, 1e-5)
    assert eigenvalues(torch.ones(2, 3, 4)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rank", [hard_rank, soft_rank])
def test_ranks_count_equal_eigenvalues(rank):
    """k equal ones among zeros give k, whatever their size; one direction gives 1."""
    for k in (1, 2, 5, 8):
        values = torch.zeros(8, dtype=torch.float64)
        values[:k] = 0.3
        assert rank(values).item() == pytest.approx(k, rel=1e-12)


def test_ranks_of_two_eigenvalues():
    """3 : 1 by hand, for each row of a matrix of them."""
    values = known([3, 1, 0], [2, 2, 2])
    assert hard_rank(values).tolist() == pytest.approx([16 / 10, 3])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert soft_rank(values).tolist() == pytest.approx([math.exp(entropy), 3])


# ---------------------------------------------------------------------------------------------
# Numbers of a model
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_stream_eigenvalues():
    """The embedding has 3 directions, and block l writes into one more."""
    model, *_ = identity()
    ids, _ = tokens(model.config, T=16, batch=4)
    model.embed.weight[:, 3:] = 0
    for l, block in enumerate(model.blocks, 1):
        block.ffn.f.w2.weight[2 + l] = randn(24, seed=l)
    got = stream_eigenvalues(model, ids)
    assert got.shape == (5, 16)
    assert got.gt(1e-9 * got[:, :1]).sum(-1).tolist() == [3, 4, 5, 6, 7]
    x = model.embed(ids).flatten(0, 1)
    assert_close(got[0].sum(), x.var(0, correction=0).sum(), 1e-12)


@torch.no_grad()
def test_ffn_eigenvalues():
    """Block l has l hidden units whose gate can open."""
    model, *_ = exact()
    ids, _ = tokens(model.config, T=16, batch=4)
    for l, block in enumerate(model.blocks, 1):
        block.ffn.f.w13.weight[l:24] = 0
    got = ffn_eigenvalues(model, ids)
    assert got.shape == (4, 24)
    assert got.gt(1e-9 * got[:, :1]).sum(-1).tolist() == [1, 2, 3, 4]
    assert hard_rank(got)[0].item() == pytest.approx(1)


@torch.no_grad()
def test_condition_numbers():
    """Matrices made of known singular values: up's, then down's, of each block."""
    model, *_ = exact()
    turn = lambda n, seed: torch.linalg.qr(randn(n, 16, seed=seed)).Q
    for l, block in enumerate(model.blocks, 1):
        sizes = torch.linspace(1, 1 + l, 16, dtype=torch.float64)  # σ_max/σ_min = 1 + l
        f = block.ffn.f
        f.w13.weight[24:] = 3 * turn(24, l) @ sizes.diag() @ turn(16, 10 + l).T  # gate is above it
        f.w2.weight.copy_(turn(16, 20 + l) @ (sizes + 10 + l).diag() @ turn(24, 30 + l).T)
    want = known(*[[1 + l, (11 + 2 * l) / (11 + l)] for l in (1, 2, 3, 4)])
    assert_close(condition_numbers(model), want, 1e-9)


@pytest.mark.parametrize("norm", ["pre", "scaleres", "span+gpas"])
def test_branch_variances(norm):
    """Of what is added, the constant of scaleres included; a zeroed matrix adds nothing."""
    model, ids, _ = exact(norm)
    with torch.no_grad():
        model.blocks[2].attn.f.wo.weight.zero_()
    want = [branch.var(-1, correction=0).mean() for *_, branch, y in Hand(model, ids).sums]
    got = branch_variances(model, ids)
    assert got[2, 0] == 0 and got.count_nonzero() == 7
    assert_close(got.double(), torch.stack(want).view(4, 2), 1e-6)


def test_norms_of_gradients_and_weights():
    """√(numbers) × size: 2,208 numbers in a block, 1,152 of them in its FFN; 0 without any."""
    model = fresh(tiny("sandwich+gpas"))
    ffn, gains = 3 * 16 * 24, 4 * 16
    all_of_it = 4 * 16 * 16 + ffn + gains + 1  # one gate
    assert block_grad_norms(model).tolist() == ffn_grad_norms(model).tolist() == [0, 0, 0, 0]
    with torch.no_grad():
        for l, block in enumerate(model.blocks, 1):
            for p in block.parameters():
                p.grad = torch.full_like(p, l) if l > 1 else None
                p.fill_(3 * l)
    want = lambda n, start: torch.tensor([start, 2, 3, 4]) * n**0.5
    assert_close(block_grad_norms(model), want(all_of_it, 0), 1e-6)
    assert_close(ffn_grad_norms(model), want(ffn, 0), 1e-6)
    assert_close(block_weight_norms(model), 3 * want(all_of_it, 1), 1e-6)


@pytest.mark.parametrize("norm", ["pre", "post+gpas"])
def test_gradient_norms_of_a_loss(norm):
    """√ of the sum of squares of all gradients of a block."""
    model = scramble(fresh(tiny(norm)))
    gradients(model, *tokens(model.config))
    want = [sum(p.grad.square().sum() for p in b.parameters()) ** 0.5 for b in model.blocks]
    assert_close(block_grad_norms(model), torch.stack(want), 1e-6)
    f = [b.ffn.f for b in model.blocks]
    want = [(m.w13.weight.grad.square().sum() + m.w2.weight.grad.square().sum()) ** 0.5 for m in f]
    assert_close(ffn_grad_norms(model), torch.stack(want), 1e-6)


@pytest.mark.parametrize("gate, per_block", [("block", 1), ("sublayer", 2)])
def test_gate_values(gate, per_block):
    """SiLU(α) = α/(1 + e^−α): one a block or one a sub-layer, attention's first."""
    model = fresh(tiny("pre+gpas", gpas_gate=gate))
    want = []
    with torch.no_grad():
        for l, block in enumerate(model.blocks, 1):
            block.attn.add.gate.alpha.fill_(l)
            want += [[l / (1 + math.exp(-l))]]
            if per_block == 2:
                block.ffn.add.gate.alpha.fill_(-l / 2)
                want[-1] += [-l / 2 / (1 + math.exp(l / 2))]
    assert len(gate_values(model)) == 4
    for got, expected in zip(gate_values(model), want, strict=True):
        assert got == pytest.approx(expected, rel=1e-6)
    table = layer_table(model, tokens(model.config)[0])
    assert table["gate_attn"] == pytest.approx([of_block[0] for of_block in want], rel=1e-6)
    assert table["gate_ffn"] == pytest.approx([of_block[-1] for of_block in want], rel=1e-6)


def test_gate_values_elsewhere():
    """None without GPAS; with another act, its value."""
    assert gate_values(fresh(tiny("pre"))) == [[], [], [], []]
    model = fresh(tiny("pre+gpas", gpas_act="tanh", gpas_fixed=0.5))
    assert sum(gate_values(model), []) == pytest.approx([math.tanh(0.5)] * 4, rel=1e-6)


# ---------------------------------------------------------------------------------------------
# The Jacobian of a block
# ---------------------------------------------------------------------------------------------


def unit(T, C):
    """The identity as a Jacobian (T, C, T, C)."""
    return torch.eye(T * C, dtype=torch.float64).view(T, C, T, C)


def test_jacobian_of_an_identity_block():
    model, *_ = identity()
    assert torch.equal(block_jacobian(model, 2, randn(3, 16)), unit(3, 16))
    assert jacobian_distance(model, 2, randn(2, 3, 16)) == 0


def test_jacobian_of_a_linear_block():
    """Without its norm, FFN and queries a block adds M·(mean of the past), M = Wo Wv.

    So ∂out[t]/∂in[s] is the identity where s = t, plus M/(t + 1) where s ≤ t.
    """
    model, *_ = identity()
    attn = model.blocks[2].attn
    attn.norm_in = nn.Identity()
    with torch.no_grad():
        attn.f.wqkv.weight[:16] = 0
        attn.f.wo.weight.copy_(randn(16, 16))
        m = attn.f.wo.weight @ attn.f.wqkv.weight[32:]
    want = unit(4, 16)
    for t in range(4):
        for s in range(t + 1):
            want[t, :, s] += m / (t + 1)
    assert_close(block_jacobian(model, 3, randn(4, 16)), want, 1e-12)


@pytest.mark.parametrize("norm", ["pre", "post+gpas", "lns", "scaleres", "hybrid", "span+gpas"])
def test_jacobian_against_autograd(norm):
    """With the block's own constants; nothing of a later token, whatever the chunk."""
    model, *_ = exact(norm, dim=8, ffn=8)
    x = randn(4, 8)
    rope, constants = model.tables(4, x)
    for l in (1, 3):
        of = lambda x, l=l: model.blocks[l - 1](x[None], rope, constants[l - 1])[0]
        got = block_jacobian(model, l, x, chunk=5)
        assert_close(got, torch.autograd.functional.jacobian(of, x), 1e-12)
        assert_close(block_jacobian(model, l, x), got, 1e-12)
        for t in range(4):
            assert not got[t, :, t + 1 :].any()
            assert got[t, :, : t + 1].flatten(0, 1).any(-1).all()


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_jacobian_is_the_gradients(stop_gradient):
    """GPAS scales the stream but not its gradient, and the Jacobian is what gradients see."""
    model, *_ = identity("pre+gpas", gpas_stop_gradient=stop_gradient, gpas_fixed=0.5)
    x, share = randn(3, 16), 0.5 / (1 + math.exp(-0.5))
    want = unit(3, 16) * (1 if stop_gradient else (1 - share) ** 2)  # two gates
    assert_close(block_jacobian(model, 1, x), want, 1e-7)  # α is made in float32


@pytest.mark.parametrize("norm", ["pre", "lns", "post+gpas"])
def test_jacobian_distance(norm):
    """‖J − I‖/‖I‖ of the exact J, over both sequences, as closely as the samples allow."""
    model, *_ = exact(norm, dim=8, ffn=8)
    x = randn(2, 4, 8)
    off = torch.stack([block_jacobian(model, 3, one) - unit(4, 8) for one in x])
    want = (off.square().sum() / (2 * 4 * 8)).sqrt().item()
    assert want > 0.3
    assert jacobian_distance(model, 3, x, samples=500) == pytest.approx(want, rel=0.04)
    few, same, other = (jacobian_distance(model, 3, x, samples=1, seed=s) for s in (0, 0, 1))
    assert few == same != other


# ---------------------------------------------------------------------------------------------
# Losses of a model cut short, or without a block
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["pre", "lns+gpas", "deepnorm", "span+gpas"])
def test_exit_losses(norm):
    """The head on the embedding, on the stream after each block; the last is the loss."""
    model, ids, targets = exact(norm)
    targets = targets.clone()
    targets[0, :4] = -100  # left out
    got, hand = exit_losses(model, ids, targets), Hand(model, ids)
    want = torch.stack([hand.loss(targets, l) for l in range(5)])
    assert_close(got, want, 1e-12)
    assert_close(got[-1], model(ids, targets).detach(), 1e-12)
    assert want.unique().numel() == 5


@pytest.mark.parametrize("norm", BY_HAND)
def test_removal_losses(norm):
    """The model without block l, the others with their own constants: 1/√l of LNS, L of the full.

    In span the second block then reads the embedding without the first one's norm.
    """
    model, ids, targets = exact(norm)
    targets = targets.clone()
    targets[0, :4] = -100
    whole = Hand(model, ids).loss(targets)
    assert_close(whole, model(ids, targets).detach(), 1e-12)
    want = [Hand(model, ids, skip=l).loss(targets) - whole for l in (1, 2, 3, 4)]
    assert_close(removal_losses(model, ids, targets), torch.stack(want), 1e-11)


def test_an_idle_block_costs_nothing():
    """Zero output matrices in Pre-LN: exactly 0, and only there."""
    model, ids, targets = exact()
    with torch.no_grad():
        model.blocks[1].attn.f.wo.weight.zero_()
        model.blocks[1].ffn.f.w2.weight.zero_()
    assert removal_losses(model, ids, targets).eq(0).tolist() == [False, True, False, False]


def test_a_model_that_does_nothing():
    """No influence, no angle, no change of the Jacobian, of the loss by a block, or of an exit."""
    model, ids, targets = identity()
    table, xs = layer_table(model, ids), streams(model, ids)
    assert torch.equal(xs, xs[:1].expand_as(xs))
    assert table["influence"] == pytest.approx([0] * 4, abs=1e-6)
    assert table["angle"] == pytest.approx([0] * 4, abs=1e-7)
    assert table["ratio_attn"] == table["ratio_ffn"] == [0] * 4
    assert [jacobian_distance(model, l, xs[l - 1]) for l in (1, 2, 3, 4)] == [0] * 4
    assert removal_losses(model, ids, targets).tolist() == [0] * 4
    assert exit_losses(model, ids, targets).unique().numel() == 1


# ---------------------------------------------------------------------------------------------
# The table of a run
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm", ["pre", "lns", "deepnorm+gpas", "scaleres", "sandwich+gpas", "span+gpas"]
)
def test_layer_table(norm):
    """Each column by hand from the streams and the sums, or from the probe of that name."""
    model, ids, targets = exact(norm)
    gradients(model, ids, targets)
    table, hand, xs = layer_table(model, ids), Hand(model, ids), streams(model, ids)
    assert tuple(table) == LAYER_COLUMNS
    size = lambda x: x.square().mean().sqrt()
    spread = lambda x: x.var(-1, correction=0).mean()
    cos = [F.cosine_similarity(x, y, dim=-1) for x, y in zip(xs, xs[1:], strict=False)]
    attn, ffn = hand.sums[::2], hand.sums[1::2]
    entropies = []
    visit(model, ids, attend=lambda l, q, k: entropies.append(attention_entropy(q, k)))
    gates = [of_block[0] for of_block in gate_values(model)] if "gpas" in norm else [""] * 4
    want = {
        "variance": [spread(x) for x in xs[1:]],
        "grad_norm": block_grad_norms(model),
        "grad_norm_ffn": ffn_grad_norms(model),
        "weight_norm": block_weight_norms(model),
        "gate_attn": gates,
        "gate_ffn": gates,
        "influence": [1 - c.mean() for c in cos],
        "angle": [c[:, -1].arccos().mean() / math.pi for c in cos],
        "ratio_attn": [size(branch) / size(x) for *_, x, branch, y in attn],
        "ratio_ffn": [size(branch) / size(x) for *_, x, branch, y in ffn],
        "sigma_attn": [spread(y) ** 0.5 for *_, y in attn],
        "sigma_ffn": [spread(y) ** 0.5 for *_, y in ffn],
        "kurtosis": [channel_kurtosis(x) for x in xs[1:]],
        "entropy": entropies,
    }
    assert want.keys() == table.keys()
    for k in LAYER_COLUMNS:
        if k.startswith("gate") and "gpas" not in norm:
            assert table[k] == want[k]
        else:
            assert all(type(v) is float for v in table[k]), k
            assert table[k] == pytest.approx([float(v) for v in want[k]], rel=1e-5, abs=1e-7), k


@pytest.mark.parametrize("norm", ["pre", "post+gpas", "span"])
def test_training_is_the_same_however_often_it_is_looked_at(fit, norm):
    """Bit-equal weights; each block at the first, the last and every so many steps."""
    often, seldom = (fit(f"--norm={norm}", f"--probe-every={n}") for n in (1, 99))
    assert_same(often.weights, seldom.weights)
    for run, steps in ((often, range(1, 7)), (seldom, (1, 6))):
        rows = run.rows("layers.csv")
        assert [(int(r["step"]), int(r["block"])) for r in rows] == [
            (step, l) for step in steps for l in (1, 2)
        ]
        assert tuple(rows[0]) == ("step", "block", *LAYER_COLUMNS)
        for k in LAYER_COLUMNS:
            if not k.startswith("gate"):
                assert all(math.isfinite(float(r[k])) for r in rows), k
    ends = [r for r in often.rows("layers.csv") if r["step"] in ("1", "6")]
    assert ends == seldom.rows("layers.csv")


def test_a_step_is_looked_at_before_its_update(fit):
    """The first rows show the model as drawn; then every second step of six, and no other."""
    run = fit("--norm=gpas", "--probe-every=2")
    torch.manual_seed(run.ckpt["settings"]["seed"])
    drawn = Transformer(Config.from_dict(run.ckpt["config"]))
    first, second = run.rows("layers.csv")[:2], run.rows("layers.csv")[2:4]
    sizes = lambda rows: [float(r["weight_norm"]) for r in rows]
    assert sizes(first) == pytest.approx(block_weight_norms(drawn).tolist(), rel=1e-6)
    assert sizes(second) != pytest.approx(sizes(first), rel=1e-6)
    assert [r["gate_attn"] for r in first] == ["0", "0"]
    assert all(float(r["gate_attn"]) != 0 for r in second)
    assert [r["step"] for r in run.rows("layers.csv")[::2]] == ["1", "2", "4", "6"]


# ---------------------------------------------------------------------------------------------
# At init
# ---------------------------------------------------------------------------------------------


def test_at_init_shows_what_each_variant_is_for():
    """Pre-LN's variance grows with depth, LNS's less (2502.05795); Post-LN's is held at 1."""
    variance = {}
    for norm in ("pre", "lns", "post", "peri"):
        variance[norm], grad = at_init(norm, layers=16, dim=32, init="fan_in")
        assert variance[norm].shape == grad.shape == (16,)
        assert grad.gt(0).all()
    assert variance["pre"][-1] > 4 * variance["pre"][0]
    assert variance["lns"][-1] < variance["pre"][-1] / 2
    assert (variance["post"] - 1).abs().max() < 0.1
    assert variance["peri"][-1] > 10  # two branches a block, of variance near 1 each


def test_at_init_is_reproducible():
    one, two, other = (at_init("pre", layers=3, dim=16, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert not torch.equal(one[0], other[0])
    inited = at_init("pre", layers=3, dim=16, init="fan_in")
    assert (inited[0] > 10 * one[0]).all()
