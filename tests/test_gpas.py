"""GPAS (2506.22049): the op and its gate; what it changes, and what it must leave as it was."""

import math

import pytest
import torch
from conftest import ALL_NORMS, NORMS, assert_close, assert_same, fresh, gradients, tiny, tokens

from nanonorm import GATE_ACTS, Config, Gate, Transformer, gpas, naive_gpas


def case(seed=0, dtype=torch.float64):
    """x (2, 5, 8) with gradient, and an upstream gradient of the same shape."""
    g = torch.Generator().manual_seed(seed)
    x, up = torch.randn((2, 2, 5, 8), generator=g, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), up


# ---------------------------------------------------------------------------------------------
# The op
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_output", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("s", [0.0, 0.3, -0.2785, 1.0, 1.7])
def test_forward_scales_and_the_gradient_passes_unchanged(s, dtype, keep_output):
    """Eq. 3: the value is (1 − s)·x, the gradient in x is the incoming one, bit for bit."""
    x, up = case(dtype=dtype)
    s = torch.tensor([s], dtype=dtype, requires_grad=True)
    y = gpas(x, s, keep_output)
    assert torch.equal(y, (1 - s) * x)
    y.backward(up)
    assert torch.equal(x.grad, up)


@pytest.mark.parametrize("keep_output", [True, False])
def test_same_gradients_as_the_detach_form(keep_output):
    """x − s·sg(x) as autograd does it."""
    x, up = case()
    s = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    gpas(x, s, keep_output).backward(up)
    (want,) = torch.autograd.grad(x - s * x.detach(), s, up)
    assert_close(s.grad, want, 1e-12)
    assert s.grad.shape == (1,)


def test_both_ways_to_keep_give_the_same_gradients():
    """Which of input and output is kept is a matter of memory only."""
    grads = []
    for keep_output in (True, False):
        x, up = case()
        s = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
        gpas(x, s, keep_output).backward(up)
        grads.append((x.grad, s.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert_close(grads[0][1], grads[1][1], 1e-12)


@pytest.mark.parametrize("keep_output", [True, False])
def test_a_scale_of_exactly_0_gives_finite_gradients(keep_output):
    """With 1 − s = 0 the kept output is all 0 and x cannot be had from it: no NaN must come."""
    x, up = case()
    s = torch.ones(1, dtype=torch.float64, requires_grad=True)
    gpas(x, s, keep_output).backward(up)
    assert torch.equal(x.grad, up)
    assert s.grad.isfinite().all()


def test_naive_form_scales_the_gradient_too():
    """The ablation of 2506.22049: (1 − s)·x without stop-gradient."""
    x, up = case()
    s = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    y = naive_gpas(x, s)
    y.backward(up)
    assert torch.equal(y, 0.6 * x)
    assert torch.equal(x.grad, 0.6 * up)
    assert_close(s.grad, -(up * x.detach()).sum().view(1), 1e-12)


# ---------------------------------------------------------------------------------------------
# The gate
# ---------------------------------------------------------------------------------------------


def gate_at(alpha, **settings):
    gate = Gate(Config(norm="gpas", **settings)).double()
    with torch.no_grad():
        gate.alpha.fill_(alpha)
    return gate


@pytest.mark.parametrize("keep_output", [True, False])
@pytest.mark.parametrize("alpha", [-1.5, -0.3, 0.4, 1.2])
@pytest.mark.parametrize("act", GATE_ACTS)
def test_gate_gradient_against_finite_differences(act, alpha, keep_output):
    """dL/dα = −act′(α)·⟨dL/dg, x⟩: α moved by ±h, x held, float64."""
    x, up = case()
    gate = gate_at(alpha, gpas_act=act)
    gate(x, keep_output).backward(up)
    h = 1e-6
    at = lambda a: (gate_at(a, gpas_act=act)(x, keep_output).detach() * up).sum()
    want = (at(alpha + h) - at(alpha - h)) / (2 * h)
    assert gate.alpha.grad.item() == pytest.approx(want.item(), rel=1e-7, abs=1e-8)


@pytest.mark.parametrize(
    "act, slope", [("silu", 0.5), ("identity", 1.0), ("relu", 1.0), ("tanh", 1.0)]
)
def test_a_gate_can_leave_its_start(act, slope):
    """At α = 0 the gradient is −slope·⟨dL/dg, x⟩; PyTorch's own relu has slope 0 there."""
    x, up = case()
    gate = gate_at(0.0, gpas_act=act)
    gate(x).backward(up)
    assert_close(gate.alpha.grad, -slope * (up * x.detach()).sum().view(1), 1e-12)


@pytest.mark.parametrize("act", GATE_ACTS)
def test_every_act_opens_at_0_and_moves(act):
    """The identity at the start whatever the act, with some slope."""
    x, up = case()
    gate = gate_at(0.0, gpas_act=act)
    y = gate(x)
    assert torch.equal(y, x)
    y.backward(up)
    assert gate.alpha.grad.abs() > 0


def test_silu_scale_is_at_most_1_2785():
    """SiLU has its minimum −0.2785 at α = −1.2785, so a gate amplifies by no more than that."""
    alphas = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    scales = torch.stack([gate_at(a.item())(one).detach() for a in alphas[8000:9500:10]])
    assert scales.max().item() == pytest.approx(1.278465, abs=1e-5)


@pytest.mark.parametrize("gate, per_block", [("block", 1), ("sublayer", 2)])
@pytest.mark.parametrize("norm", NORMS)
def test_number_and_shape_of_the_gates(norm, gate, per_block):
    """One α a block, used at both sites (released code), or one a sub-layer (paper). They are 0."""
    config = tiny(f"{norm}+gpas", gpas_gate=gate)
    model, plain = fresh(config), fresh(tiny(norm))
    assert [len(alphas) for alphas in model.gates()] == [per_block] * config.layers
    assert all(a.shape == (1,) and a.item() == 0 for a in sum(model.gates(), []))
    assert model.num_params() == plain.num_params() + per_block * config.layers
    assert plain.gates() == [[]] * config.layers


# ---------------------------------------------------------------------------------------------
# X and X+GPAS
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["block", "sublayer"])
@pytest.mark.parametrize("norm", NORMS)
def test_starts_as_the_variant_without_gpas(norm, gate):
    """Bit-equal weights, logits and gradients while α = 0.

    A release gave DeepNorm+GPAS another init than DeepNorm, so that two things were compared.
    """
    plain, gated = fresh(tiny(norm)), fresh(tiny(f"{norm}+gpas", gpas_gate=gate))
    named = dict(plain.named_parameters())
    without_gates = lambda named: {k: v for k, v in named.items() if v.numel() > 1}
    assert_same(without_gates(dict(gated.named_parameters())), named)
    ids, targets = tokens(plain.config)
    assert torch.equal(gated(ids), plain(ids))
    assert_same(
        without_gates(gradients(gated, ids, targets)),
        gradients(plain, ids, targets),
    )


def kept_for_backward(model, ids, targets):
    """{address: bytes} of the storages that one forward keeps, without the parameters'."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor  # holds it, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, targets)
    del loss
    return {address: t.untyped_storage().nbytes() for address, t in kept.items()}


@pytest.mark.parametrize("gate", ["block", "sublayer"])
@pytest.mark.parametrize("norm", NORMS)
def test_keeps_no_further_activation(norm, gate):
    """The gate's gradient needs x or (1 − s)·x: one of them is kept by the block anyway."""
    sizes = []
    for name in (norm, f"{norm}+gpas"):
        model = fresh(tiny(name, gpas_gate=gate))
        kept = kept_for_backward(model, *tokens(model.config, T=16, batch=4))
        sizes.append(list(kept.values()))
    activation = 4 * 16 * 16 * 4  # (B, T, C) in float32
    large = [sorted(n for n in one if n >= activation) for one in sizes]
    assert large[0].count(activation) >= 4 * 4  # the count sees something
    assert large[1] == large[0]
    assert sum(sizes[1]) - sum(sizes[0]) < 1024  # a few numbers for each gate


def test_the_memory_count_sees_a_kept_activation():
    """x − s·x.detach() keeps one more tensor at each site: the test above can fail."""
    config = tiny("gpas")
    model = fresh(config)
    ids, targets = tokens(config, T=16, batch=4)
    before = sum(kept_for_backward(model, ids, targets).values())
    for module in model.modules():
        if isinstance(module, Gate):
            module.forward = lambda x, keep_output=True, m=module: x - m.act(m.alpha) * x.detach()
    after = sum(kept_for_backward(model, ids, targets).values())
    activation = 4 * 16 * 16 * 4  # (B, T, C) in float32
    assert after - before > 0.9 * 2 * config.layers * activation


# ---------------------------------------------------------------------------------------------
# Other ways to run it
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_output", [True, False])
def test_compiled_equals_eager(keep_output):
    """Forward and both gradients, through inductor."""

    def run(f):
        x, up = case(dtype=torch.float32)
        alpha = torch.tensor([0.7], requires_grad=True)
        y = f(x, alpha)
        y.backward(up)
        return y.detach(), x.grad, alpha.grad

    f = lambda x, alpha: gpas(x, torch.nn.functional.silu(alpha), keep_output)
    torch._dynamo.reset()
    for got, want in zip(run(torch.compile(f, fullgraph=True)), run(f), strict=True):
        assert_close(got, want, 1e-6)


def test_under_bf16_autocast():
    """Mixed precision: the stream and α are float32, and so is the gate's gradient."""
    model = fresh(tiny("gpas"))
    ids, targets = tokens(model.config)
    exact = gradients(model, ids, targets)
    exact = torch.cat([exact[name] for name in exact if exact[name].numel() == 1])
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, targets)
    loss.backward()
    got = torch.cat([alpha.grad for alpha in sum(model.gates(), [])])
    assert got.dtype == torch.float32
    assert_close(got, exact, 0.05)


def test_gates_shrink_the_stream_and_not_its_gradient():
    """What GPAS is for: (1 − SiLU(α)) at each site forward, 1 backward, over any depth."""
    config = tiny("gpas", layers=3)
    model = fresh(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2 and p is not model.embed.weight and p is not model.head.weight:
                p.zero_()  # the blocks add nothing: only the gates act
        for alpha in sum(model.gates(), []):
            alpha.fill_(0.5)
    ids, targets = tokens(config)
    seen = [model.embed(ids)]
    rope, constants = model.tables(ids.shape[1], seen[0])
    for block, c in zip(model.blocks, constants, strict=True):
        seen.append(block(seen[-1], rope, c))
    scale = 1 - 0.5 / (1 + math.exp(-0.5))
    for l, x in enumerate(seen):
        assert_close(x.detach(), seen[0].detach() * scale ** (2 * l), 1e-6)
    (top, bottom) = torch.autograd.grad(seen[-1].sum(), (seen[-2], seen[0]))
    assert torch.equal(top, torch.ones_like(top))
    assert torch.equal(bottom, torch.ones_like(bottom))


@pytest.mark.parametrize("norm", [n for n in ALL_NORMS if n.endswith("gpas")])
def test_state_dict_round_trip(norm):
    """Shared gates are loaded once or twice, to the same value."""
    one, two = fresh(tiny(norm), seed=0), fresh(tiny(norm), seed=1)
    with torch.no_grad():
        for i, alpha in enumerate(sum(one.gates(), [])):
            alpha.fill_(0.1 * (i + 1))
    two.load_state_dict(one.state_dict())
    ids, _ = tokens(one.config)
    assert torch.equal(two(ids), one(ids))
    assert isinstance(two, Transformer)
