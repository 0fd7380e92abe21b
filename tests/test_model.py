"""The model around the blocks: its config, its function, its names, and every way to run it."""

import copy
import io
import json
import pickle

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
    scramble,
    tiny,
    tokens,
)
from torch._dynamo.utils import counters

from nanonorm import (
    Config,
    Transformer,
    fold,
)

# ---------------------------------------------------------------------------------------------
# Config
# ---------------------------------------------------------------------------------------------

BAD = {
    "layers": [0, -1, 2.0, "2", True, None],
    "dim": [0, 15, 6, 2.5],  # 15: not a multiple of heads; 6: odd head width
    "heads": [0, 3, 16],
    "ffn": [0, -8, 1.5],
    "vocab": [0],
    "block": [0, "64"],
    "norm": ["LNS", "", "pre+", "+gpas", "pre+gpas+gpas", "gpas+gpas", "prenorm", None, 3],
    "norm_kind": ["RMS", "batch", None],
    "norm_eps": [0.0, -1e-6, float("nan"), float("inf"), "1e-6", None],
    "rope_theta": [0, -1.0],
    "init": ["xavier", "Normal", 0.02],
    "embed_std": [0.0, -0.02, float("nan")],
    "embed_norm": ["yes", 1, "False"],
    "scale_init_constant": [0.0, -1.0],
    "mix_fraction": [-0.1, 1.1, float("nan"), "0.25"],
    "lns_exponent": [float("inf"), "0.5", None],
    "lns_sites": ["ffn+attn", "Both", None],
    "lns_unscaled_last": [-1, 5, 0.5],
    "lns_learnable": [1, "false", None],
    "gpas_gate": ["layer", None],
    "gpas_placement": ["after", "Sum", None],
    "gpas_act": ["gelu", "SiLU", None],
    "gpas_stop_gradient": [0, "true", None],
    "gpas_fixed": [float("nan"), "0.5", True],
}


@pytest.mark.parametrize("field, value", [(f, v) for f in BAD for v in BAD[f]], ids=repr)
def test_bad_value_is_one_line_that_names_the_field(field, value):
    """No bare assertion, no silent conversion ("False" must never mean true)."""
    with pytest.raises(ValueError) as error:
        tiny(**{field: value})
    message = str(error.value)
    assert "\n" not in message
    assert field.partition("_")[0] in message
    assert repr(value) in message or str(value) in message


def test_every_field_has_bad_values():
    assert BAD.keys() == Config().to_dict().keys()


@pytest.mark.parametrize(
    "name, nearest",
    [("LNS", "lns"), ("pre_gaps", "pre+gpas"), ("pre+gaps", "pre+gpas"), ("Post", "post")]
    + [("sandwhich", "sandwich"), ("hybridstar", "hybrid_star"), ("PRE+GPAS", "pre+gpas")],
)
def test_unknown_norm_names_the_nearest_and_all(name, nearest):
    """In a release, "LNS" or a misspelt name trains blocks that do nothing, without a message."""
    with pytest.raises(ValueError) as error:
        tiny(name)
    assert f"did you mean {nearest}?" in str(error.value)
    for norm in [*NORMS, "NAME+gpas"]:
        assert f" {norm}" in str(error.value)


@pytest.mark.parametrize("name", ["deeppost", "post_pre", "gpas+gpas", "deeppost_gpas", "zzz"])
def test_names_of_the_releases_are_not_ours(name):
    """They are refused with the list of ours; see golden/README.md for which is which."""
    with pytest.raises(ValueError, match="one of: post, deepnorm, pre, ") as error:
        tiny(name)
    assert repr(name) in str(error.value)


def test_gpas_means_pre_gpas():
    assert tiny("gpas") == tiny("pre+gpas")
    assert tiny("gpas").norm == "pre+gpas"
    assert tiny("gpas").gpas and not tiny("pre").gpas


def test_resolved_values():
    """ffn is 8/3 · dim rounded up to a multiple of 8; whole numbers may stand for floats."""
    assert [Config(dim=d, heads=1).ffn for d in (2, 128, 512, 768)] == [8, 344, 1368, 2048]
    assert Config(ffn=1).ffn == 1
    one = Config(mix_fraction=1, gpas_fixed=0)
    assert type(one.mix_fraction) is float and type(one.gpas_fixed) is float
    assert Config(norm="span").init == "scale_init"
    assert Config(norm="span", init="normal").init == "normal"


@pytest.mark.parametrize(
    "settings",
    [{"norm": norm} for norm in ALL_NORMS]
    + [{"norm": "gpas", "gpas_fixed": 0.25, "gpas_act": "tanh"}, {"embed_norm": True, "ffn": 7}]
    + [{"norm": "peri", "embed_norm": False, "init": "fan_in"}, {"lns_learnable": True}],
    ids=str,
)
def test_config_round_trip_through_json(settings):
    config = tiny(**settings)
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    "key, nearest", [("layer", "layers"), ("n_heads", "heads"), ("gpas_stopgrad", "gpas_stop")]
)
def test_unknown_config_key_names_the_nearest(key, nearest):
    """A misspelt key that is ignored trains another model than the one asked for."""
    with pytest.raises(ValueError, match=f"{key}.*did you mean {nearest}"):
        Config.from_dict(tiny().to_dict() | {key: 1})


# ---------------------------------------------------------------------------------------------
# The function
# ---------------------------------------------------------------------------------------------


def test_loss_is_the_mean_cross_entropy_and_ignores_minus_100():
    model = scramble(fresh(tiny()))
    ids, targets = tokens(model.config)
    logits = model(ids)
    each = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert model(ids, targets).shape == ()
    assert_close(model(ids, targets), each.mean(), 1e-6)
    masked = targets.clone()
    masked[0, :7] = -100
    kept = torch.cat((each[0, 7:], each[1]))
    assert_close(model(ids, masked), kept.mean(), 1e-6)


def test_loss_of_a_model_that_knows_nothing_is_ln_vocab():
    model = fresh(tiny())
    torch.nn.init.zeros_(model.head.weight)
    assert model(*tokens(model.config)).item() == pytest.approx(3.4657359, abs=1e-6)  # ln 32


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_logits_are_float32_also_in_mixed_precision(norm):
    """Under autocast the head computes in bfloat16; a loss in it would be good to 2 digits."""
    model = scramble(fresh(tiny(norm)))
    ids, targets = tokens(model.config)
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(ids), model(ids, targets)
    assert exact.dtype == logits.dtype == loss.dtype == torch.float32
    assert logits.shape == (*ids.shape, model.config.vocab)
    assert (logits - exact).norm() < 0.1 * exact.norm()
    assert not torch.equal(logits, exact)


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_bfloat16_weights_can_be_read(norm):
    """To sample from a model in bfloat16: constants and tables must not raise its type."""
    model = scramble(fresh(tiny(norm)))
    ids, _ = tokens(model.config)
    exact = model(ids)
    logits = model.bfloat16()(ids)
    assert logits.dtype == torch.float32
    assert_close(logits, exact, 0.2)


@pytest.mark.parametrize("norm", ["lns", "deepnorm"])
def test_tables_are_at_least_float32(norm):
    """cos(1000) or α = 2.632 in bfloat16 would be good to 2 digits, whatever the stream is in."""
    model = fresh(tiny(norm, block=1001, layers=24))
    for dtype, want in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        (cos, sin), constants = model.tables(1001, torch.empty(1, dtype=dtype))
        assert {t.dtype for t in (cos, sin, *constants)} == {want}
        exact = torch.tensor([1000.0], dtype=torch.float64).cos()
        assert_close(cos[1000].flatten()[:1].double(), exact, 1e-6)


def test_context_limit():
    """block tokens fit, one more is a ValueError that says so."""
    model = fresh(tiny(block=8))
    assert model(tokens(model.config, T=8)[0]).shape == (2, 8, 32)
    assert model(tokens(model.config, T=1)[0]).shape == (2, 1, 32)
    with pytest.raises(ValueError, match="9 tokens .* 8"):
        model(tokens(model.config, T=9)[0])


def test_a_shorter_text_gives_the_same_logits():
    """Positions count from the start of the text, whatever its length."""
    model = scramble(fresh(tiny()).double())
    ids, _ = tokens(model.config)
    assert_close(model(ids[:, :4]), model(ids)[:, :4].detach(), 1e-12)


SIZES = {  # the shapes of 2412.13795 and 2506.22049, vocabulary 32,000
    "71m": ((512, 1368, 12, 8), "70.6M"),
    "130m": ((768, 2048, 12, 12), "134.1M"),
    "250m": ((768, 2560, 24, 16), "247.4M"),
    "350m": ((1024, 2736, 24, 16), "368.0M"),
    "1b": ((2048, 5461, 24, 32), "1.339B"),
}


@pytest.mark.parametrize("size", SIZES)
def test_number_of_parameters(size):
    (dim, ffn, layers, heads), written = SIZES[size]
    with torch.device("meta"):
        model = Transformer(Config(dim=dim, ffn=ffn, layers=layers, heads=heads, vocab=32_000))
    blocks = layers * (4 * dim * dim + 3 * dim * ffn + 2 * dim) + dim
    assert model.num_params() == blocks + 2 * 32_000 * dim
    assert model.num_params(embeddings=False) == blocks
    n = model.num_params()
    assert written == (f"{n / 1e9:.3f}B" if n > 1e9 else f"{n / 1e6:.1f}M")


# ---------------------------------------------------------------------------------------------
# Ways to run it
# ---------------------------------------------------------------------------------------------

KINDS = {"mix": 2, "hybrid_star": 2, "span": 2}  # kinds of block; 1 in all other variants


@pytest.mark.parametrize("layers", [4, 64])
@pytest.mark.parametrize("norm", ALL_NORMS)
def test_one_graph_for_each_kind_of_block(norm, layers):
    """A layer's number read in the block would make a graph a layer, and eager code after 8."""
    model = fresh(tiny(norm, layers=layers, dim=8, ffn=8))
    ids, targets = tokens(model.config)
    want = model(ids, targets)
    counters.clear()
    model.compile_blocks(backend="eager", fullgraph=True)
    loss = model(ids, targets)
    assert counters["stats"]["unique_graphs"] == KINDS.get(norm.removesuffix("+gpas"), 1)
    assert_close(loss, want, 1e-6)


@pytest.mark.parametrize("norm", ["deepnorm+gpas"])
def test_compiled_by_inductor_equals_eager(norm):
    """Loss and all gradients, and the names in the state dict stay (no _orig_mod)."""
    model = scramble(fresh(tiny(norm)))
    ids, targets = tokens(model.config)
    loss, want = model(ids, targets), gradients(model, ids, targets)
    names = [*model.state_dict()]
    model.compile_blocks()
    assert_close(model(ids, targets), loss, 1e-6)
    grads = gradients(model, ids, targets)
    for name in want:
        assert_close(grads[name], want[name], 1e-5, name)
    assert [*model.state_dict()] == names
    fresh(model.config, seed=1).load_state_dict(model.state_dict())


@pytest.mark.parametrize("norm", ["pre", "post", "lns+gpas", "hybrid"])
def test_norm_gains_move_in_mixed_precision(norm):
    """Releases keep weights in bfloat16: at lr 1e-3 a gain of 1 never moves (its step is 0.004)."""
    model = fresh(tiny(norm))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(30):
        ids, targets = tokens(model.config, seed=step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    gains = {name: p for name, p in model.named_parameters() if p.ndim == 1 and p.numel() > 1}
    moved = {name: (p - 1).abs().mean().item() for name, p in gains.items()}
    assert len(moved) > 8
    assert min(moved.values()) > 2e-3, moved


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_checkpoint_activations_changes_memory_only(norm):
    """Bit-equal loss and gradients; of each block only its input is kept."""
    model = scramble(fresh(tiny(norm)))
    ids, targets = tokens(model.config)
    kept = []

    def run():
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.nbytes) or t, lambda t: t
        ):
            loss = model(ids, targets)
        return loss, gradients(model, ids, targets), sum(kept)

    loss, want, full = run()
    model.checkpoint_activations = True
    loss_again, got, less = run()
    assert torch.equal(loss_again, loss)
    assert_same(got, want)
    assert less < full / 2


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_sampling_first_and_training_after(norm):
    """Tables made in inference mode must serve training: inference tensors cannot."""
    model, other = (scramble(fresh(tiny(norm))) for _ in range(2))
    ids, targets = tokens(model.config)
    with torch.inference_mode():
        sampled = model(ids)
    assert_same(gradients(model, ids, targets), gradients(other, ids, targets))
    with torch.inference_mode():
        assert torch.equal(model(ids), sampled)


@pytest.mark.parametrize("norm", ["lns", "deepnorm+gpas"])
def test_change_of_type_after_a_forward(norm):
    """The tables follow: the double model is not held back by float32 angles."""
    model = scramble(fresh(tiny(norm)))
    ids, _ = tokens(model.config)
    model(ids)
    exact = scramble(fresh(tiny(norm)).double())
    exact.load_state_dict(model.state_dict())
    assert torch.equal(model.double()(ids), exact(ids))


@pytest.mark.parametrize("norm", ALL_NORMS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(norm, how):
    """After a forward, when the tables exist; the copy shares nothing with the model."""
    model = scramble(fresh(tiny(norm)))
    ids, targets = tokens(model.config)
    want = model(ids).detach()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        twin = fresh(model.config, seed=9)
        twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin(ids), want)
    assert [len(alphas) for alphas in twin.gates()] == [len(alphas) for alphas in model.gates()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(twin(ids), want)
    gradients(twin, ids, targets)


# ---------------------------------------------------------------------------------------------
# Hugging Face names
# ---------------------------------------------------------------------------------------------

NAMED = [
    name
    for norm in ("pre", "lns", "scaleres", "post", "deepnorm", "sandwich", "mix", "span")
    for name in (norm, f"{norm}+gpas")
]


@pytest.mark.parametrize("norm", NAMED)
def test_llama_round_trip(norm):
    """Every parameter goes out and comes back."""
    one, two = scramble(fresh(tiny(norm)), seed=1), scramble(fresh(tiny(norm)), seed=2)
    state = one.to_llama()
    assert sum(t.numel() for t in state.values()) == one.num_params()
    two.load_llama(state)
    assert_same(two.state_dict(), one.state_dict())
    assert_same(two.to_llama(), state)


def test_llama_names_of_pre():
    """Those of Hugging Face's LLaMA, no more and no less: such a file loads as it is."""
    block = ["input_layernorm", "post_attention_layernorm"]
    block += [f"self_attn.{r}_proj" for r in "qkvo"] + [f"mlp.{r}_proj" for r in ("gate", "up")]
    block += ["mlp.down_proj"]
    names = {f"model.layers.{i}.{part}.weight" for i in range(4) for part in block}
    names |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert fresh(tiny()).to_llama().keys() == names


@pytest.mark.parametrize("norm, halves", [("post", 2), ("sandwich", 4), ("span", 3)])
def test_llama_norm_names(norm, halves):
    """Norms on sums and branches have Gemma-2's names."""
    state = fresh(tiny(norm)).to_llama()
    names = [name for name in state if "layers.0" in name and "layernorm" in name]
    assert len(names) == halves
    assert {"model.layers.0.post_attention_layernorm.weight"} <= {*names}
    assert {"model.layers.0.post_feedforward_layernorm.weight"} <= {*names}


def test_to_llama_gives_copies():
    model = fresh(tiny())
    for tensor in model.to_llama().values():
        tensor.zero_()
    assert not model.embed.weight.eq(0).all() and not model.head.weight.eq(0).all()


def test_load_llama_takes_what_hugging_face_adds():
    """Older files carry the rotary frequencies; half-precision files are converted."""
    model, other = fresh(tiny(), seed=1), fresh(tiny(), seed=2)
    state = {name: t.bfloat16() for name, t in model.to_llama().items()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    other.load_llama(state)
    assert other.embed.weight.dtype == torch.float32
    assert_same(
        other.to_llama(), {name: t.bfloat16().float() for name, t in model.to_llama().items()}
    )


Q = "model.layers.2.self_attn.q_proj.weight"
REFUSED = {
    "missing": (lambda state: state.pop("lm_head.weight"), "lm_head.weight"),
    "missing block": (lambda state: state.pop(Q), Q),
    "extra": (lambda state: state.update({"model.layers.4.x": torch.ones(1)}), "layers.4.x"),
    "other shape": (lambda state: state.update({Q: torch.ones(8, 16)}), Q),
    "transposed": (
        lambda state: state.update(
            {"model.layers.3.mlp.up_proj.weight": state["model.layers.3.mlp.up_proj.weight"].T}
        ),
        "model.layers.3.mlp.up_proj.weight",
    ),
    "gate without GPAS": (
        lambda state: state.update({"model.layers.0.gpas_block.gate": torch.ones(())}),
        "model.layers.0.gpas_block.gate",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_load_llama_refuses_and_changes_nothing(case):
    """ValueError with the name of the tensor; a half-loaded model would train."""
    spoil, name = REFUSED[case]
    model = fresh(tiny(), seed=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = fresh(tiny(), seed=2).to_llama()
    spoil(state)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
        model.load_llama(state)
    assert "\n" not in str(error.value)
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize(
    "settings, tensor",
    [
        ({"norm": "hybrid"}, "blocks.0.attn"),
        ({"norm": "hybrid_star"}, "blocks.0.attn"),
        ({"norm": "peri"}, "embed_norm"),
        ({"norm": "gpas", "gpas_gate": "sublayer"}, "gate"),
        ({"norm": "pre", "norm_kind": "layer"}, "gain"),
    ],
    ids=str,
)
def test_no_llama_names(settings, tensor):
    """What Hugging Face has no name for is refused, by name, and never left out."""
    model = fresh(tiny(**settings))
    with pytest.raises(ValueError, match=tensor):
        model.to_llama()
    with pytest.raises(ValueError, match=tensor):
        model.load_llama(fresh(tiny()).to_llama())


# ---------------------------------------------------------------------------------------------
# fold
# ---------------------------------------------------------------------------------------------

FOLDED = [
    {"norm": "pre"},
    {"norm": "lns"},
    {"norm": "lns", "lns_learnable": True},
    {"norm": "lns", "lns_exponent": 0.8, "lns_sites": "ffn", "lns_unscaled_last": 1},
    {"norm": "gpas"},
    {"norm": "gpas", "gpas_gate": "sublayer"},
    {"norm": "gpas", "gpas_act": "identity", "gpas_placement": "sum"},
    {"norm": "gpas", "gpas_stop_gradient": False},
    {"norm": "gpas", "gpas_fixed": 0.4},
    {"norm": "gpas", "norm_kind": "layer", "embed_norm": True},
    {"norm": "lns+gpas"},
    {"norm": "lns+gpas", "gpas_gate": "sublayer", "lns_sites": "attn"},
]


@pytest.mark.parametrize("gates", ["small", "negative scales"])
@pytest.mark.parametrize("settings", FOLDED, ids=str)
def test_fold_is_the_same_function_as_plain_pre(settings, gates):
    """SiLU(2) > 1: the scale 1 − SiLU(α) is negative there, and a norm does see a sign."""
    model = scramble(fresh(tiny(**settings)))
    if gates == "negative scales":
        with torch.no_grad():
            for i, alpha in enumerate(sum(model.gates(), [])):
                alpha.fill_((2.0, -1.0, 3.0, 0.5, 2.5)[i % 5])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ids, _ = tokens(model.config)
    want = model(ids).detach()
    plain = fold(model)
    assert plain.config.norm == "pre"
    assert plain.gates() == [[]] * 4
    assert_close(plain(ids).detach(), want, 1e-5)
    assert_same(model.state_dict(), before)
    if model.config.norm_kind == "rms" and not model.config.embed_norm:
        twin = fresh(tiny())
        assert not any("gpas" in name for name in plain.to_llama())
        twin.load_llama(plain.to_llama())
        assert_close(twin(ids).detach(), want, 1e-5)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_close(plain(ids).detach(), want, 1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"norm": norm} for norm in ALL_NORMS if norm.removesuffix("+gpas") not in ("pre", "lns")]
    + [{"norm": "gpas", "gpas_placement": p} for p in ("shortcut", "branch", "before", "norm")],
    ids=str,
)
def test_fold_refuses_what_is_not_pre_ln(settings):
    with pytest.raises(ValueError, match="fold") as error:
        fold(fresh(tiny(**settings)))
    assert settings["norm"].removesuffix("+gpas") in str(error.value)
    assert "\n" not in str(error.value)


def test_fold_refuses_a_scale_of_0():
    """A gate that closes the stream leaves nothing to divide by."""
    model = fresh(tiny("gpas", gpas_act="identity"))
    with torch.no_grad():
        model.gates()[2][0].fill_(1.0)
    with pytest.raises(ValueError, match="block 3"):
        fold(model)


def test_gain_helper_finds_each_norm():
    """The helper that the tests read norms with is not blind."""
    block = fresh(tiny("sandwich+gpas")).blocks[0]
    assert all(gain(s) is not None for s in (block.attn.norm_in, block.ffn.norm_out))
    assert gain(fresh(tiny("pre")).blocks[0].attn.norm_out) is None
