"""`python nanonorm.py`: the table of variants, and a look at one model before it is scaled."""

import copy
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import NORMS, SMALL, fresh, tiny

import nanonorm
from data import check
from data.batches import get_batch, window_starts
from data.engine import memory_estimate
from data.prepare import load, prepare
from data.settings import SIZES
from nanonorm import (
    INITS,
    VARIANTS,
    Config,
    Transformer,
    block_grad_norms,
    jacobian_distance,
    layer_table,
    streams,
)


def strict(text):
    """JSON without the NaN and Infinity that only Python reads."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def told(place, capsys, monkeypatch):
    """told(flags…) is the look at a small model as --json gives it, after few small updates."""
    monkeypatch.setattr(check, "TOKENS", 32)

    def run(*flags, updates=2):
        monkeypatch.setattr(check, "UPDATES", updates)
        capsys.readouterr()
        argv = [*SMALL, "--data", place / "text.txt", *flags, "--json"]
        assert check.main([str(a) for a in argv]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return strict(out)

    return run


def timeless(d):
    return {k: v for k, v in d.items() if k != "seconds"}


# ---- The table of variants ----------------------------------------------------------------------


@pytest.fixture
def at_init(monkeypatch):
    """at_init gives made-up numbers, for speed; the list has the arguments of each call."""
    calls = []

    def made_up(norm, layers=64, **settings):
        calls.append((norm, layers, settings))
        start = 1000 * NORMS.index(norm)
        return start + torch.arange(1.0, layers + 1), start + torch.arange(301.0, layers + 301)

    monkeypatch.setattr(nanonorm, "at_init", made_up)
    return calls


def test_the_table_has_every_variant_with_its_formula(at_init, capsys):
    """Its paper and init beside it; and every init."""
    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for norm in NORMS:
        row, *_ = [line for line in lines if line.split()[:1] == [norm]]
        assert VARIANTS[norm].formula in row
        assert VARIANTS[norm].paper in row
        assert VARIANTS[norm].init in row.split()
    for init in INITS:
        assert any(line.startswith(f"{init} ") and INITS[init].formula in line for line in lines)


def test_the_table_shows_first_middle_and_last_block(at_init, capsys):
    """Their variance, then their gradient norm, as at_init gives them for a deep model."""
    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [norm for norm, *_ in at_init] == NORMS
    assert len({layers for _, layers, _ in at_init}) == 1
    L = at_init[0][1]
    assert L >= 32
    for i, norm in enumerate(NORMS):
        row = [line for line in lines if line.split()[:1] == [norm]][-1]
        want = [1000 * i + n for n in (1, L // 2, L, 301, 300 + L // 2, 300 + L)]
        assert [float(n) for n in row.split()[1:]] == pytest.approx(want, rel=5e-3)


def test_the_table_holds_the_numbers_of_real_models(monkeypatch, capsys):
    monkeypatch.setattr(check, "VARIANTS", {"post": VARIANTS["post"]})
    assert check.main([]) == 0
    row = [x for x in capsys.readouterr().out.splitlines() if x.startswith("post ")][-1]
    variance, grad = nanonorm.at_init("post", 64)
    want = [t[i].item() for t in (variance, grad) for i in (0, 31, 63)]
    assert [float(n) for n in row.split()[1:]] == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize("argv", [["--json"], ["--size", "deep"], ["--layers=3"], ["--norm=lns"]])
def test_any_flag_asks_for_a_look_at_one_model(monkeypatch, capsys, argv):
    asked = []
    monkeypatch.setattr(check, "table", lambda: pytest.fail("the table was not asked for"))
    monkeypatch.setattr(check, "report", lambda s, config: asked.append((s, config)) or {"a": 1})
    monkeypatch.setattr(check, "as_text", lambda d: "as text")
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)  # trying it takes long
    assert check.main(argv) == 0
    [(s, config)] = asked
    size = argv[1] if argv[0] == "--size" else "tiny"
    assert s["size"] == size
    assert config.layers == (3 if argv[0] == "--layers=3" else SIZES[size]["layers"])
    assert config.norm == ("lns" if argv[0] == "--norm=lns" else "pre")
    assert capsys.readouterr().out.strip() == ('{\n "a": 1\n}' if argv == ["--json"] else "as text")


# ---- What a model is judged by ------------------------------------------------------------------

L = 8


def rows(grads=(1.0,) * 5, jacobians=(0.5,) * 5, variances=(1.0,) * 5):
    """The shown blocks of a model of 8, by hand; a sound one unless told otherwise."""
    return [
        {"block": l, "grad_norm": g, "jacobian": j, "variance": v, "ratio_attn": 0.1,
         "ratio_ffn": 0.1} for l, g, j, v in zip((1, 2, 4, 6, 8), grads, jacobians, variances,
                                                 strict=True)
    ]  # fmt: skip


def one_bad(start, after):
    """What is said of a model with one bad sign."""
    [(bad, why)] = check.verdicts(start, after, L)
    assert bad
    return why


def test_a_sound_model_is_said_to_be_sound():
    [(bad, why)] = check.verdicts(rows(), rows(), L)
    assert not bad and "sound" in why


@pytest.mark.parametrize("where", ["at init", "after"])
@pytest.mark.parametrize("low", ["first", "last"])
def test_gradients_that_differ_between_first_and_last_block_are_bad(where, low):
    """With how many times they do; which of them hardly learn; and when."""
    times = 3 * check.UNEVEN
    grads = (0.01, 1, 1, 1, 0.01 * times) if low == "first" else (0.01 * times, 1, 1, 1, 0.01)
    uneven, even = rows(grads=grads), rows()
    why = one_bad(uneven, even) if where == "at init" else one_bad(even, uneven)
    assert f"{times:,}×" in why and where in why and f"the {low} blocks" in why
    assert one_bad(uneven, uneven).count("×") == 1  # said once, for init
    assert "at init" in one_bad(uneven, uneven)


def test_gradients_may_differ_somewhat():
    just = rows(grads=(1.0, 1, 1, 1, 0.999 * check.UNEVEN))
    assert not check.verdicts(just, just, L)[0][0]
    over = rows(grads=(1.0, 1, 1, 1, 1.001 * check.UNEVEN))
    assert check.verdicts(just, over, L)[0][0]


# Seed 0, 24 blocks × 64, scale_init, 20 updates: gradient of the last block over that of the first,
# largest Jacobian distance of the last quarter, and the loss that the core grid ended at (3.54 is
# that of counting tokens).
ENDS = [
    ("span, lr 3e-3, 2.35", 139, 0.31, False),
    ("mix, lr 3e-3, 2.37", 0.083, 0.032, False),
    ("lns, lr 3e-3, 2.56", 0.22, 0.0025, False),
    ("lns, lr 1e-3, 2.76", 1 / 249, 0.0122, False),
    ("lns+gpas, lr 1e-2, 2.63", 0.029, 0.0006, False),
    ("post, lr 3e-3, 3.54", 1.906e6, 0.71, True),
    ("mix, lr 1e-2, 3.54", 2.056e6, 0.0269, True),
    ("span, lr 1e-2, 3.54", 8.539e4, 0.76, True),
]


@pytest.mark.parametrize("ratio, near, bad", [e[1:] for e in ENDS], ids=[e[0] for e in ENDS])
def test_the_verdict_agrees_with_how_such_runs_ended(ratio, near, bad):
    after = rows(grads=(1, 1, 1, 1, ratio), jacobians=(1, 1, 1, near, near))
    assert check.verdicts(rows(), after, L)[0][0] is bad


def test_a_gradient_of_zero_is_without_bound():
    assert "without bound" in one_bad(rows(), rows(grads=(0.0, 1, 1, 1, 1)))
    assert "without bound" in one_bad(rows(), rows(grads=(1, 1, 1, 1, 0.0)))


def test_deep_blocks_near_the_identity_are_wasted_depth():
    """The nearest of the last quarter counts, by what the deeper half together then does."""
    share = 0.5 * min(check.NEAR, check.IDLE / (L / 2))
    why = one_bad(rows(), rows(jacobians=(0.5, 0.5, 0.5, 0.8 * share, share)))
    assert "wasted depth" in why and f"{share:.2%}" in why and f"{share * L / 2:.1%}" in why
    for jacobians in ((1e-5, 1e-5, 1e-5, 1e-5, 0.5), (1e-5, 1e-5, 1e-5, 0.5, 1e-5)):
        assert not check.verdicts(rows(), rows(jacobians=jacobians), L)[0][0]
    assert not check.verdicts(rows(jacobians=(0.0,) * 5), rows(), L)[0][0]  # it learns to do more


def test_in_a_deeper_model_each_block_may_do_less():
    some, deep = rows(jacobians=(0.9 * check.NEAR,) * 5), 2 * check.IDLE / (0.9 * check.NEAR)
    wide = [r | {"block": 10**6} for r in some]  # past three quarters of any depth
    assert check.verdicts(some, wide, int(0.9 * deep))[0][0]
    assert not check.verdicts(some, wide, int(1.1 * deep))[0][0]


def test_a_shallow_model_is_not_idle_for_being_shallow():
    """Few blocks sum up to little; each must be near the identity too."""
    some = rows(jacobians=(1.1 * check.NEAR,) * 5)
    assert not check.verdicts(some, some, 2)[0][0]


def test_a_stream_that_grows_is_bad():
    """After the updates, with how many times it does."""
    times = 5 * check.LARGE
    grown = rows(variances=(0.1, 1, 1, 1, 0.1 * times))
    assert f"{times:,}×" in one_bad(rows(), grown) and "variance" in one_bad(rows(), grown)
    assert not check.verdicts(grown, rows(variances=(0.1, 1, 1, 1, 0.09 * check.LARGE)), L)[0][0]
    assert not check.verdicts(rows(), rows(variances=(0.1 * times, 1, 1, 1, 0.1)), L)[0][0]


def test_every_sign_is_told():
    bad = rows(grads=(0.0, 1, 1, 1, 1), jacobians=(0.0,) * 5, variances=(0.0, 1, 1, 1, 9.0))
    found = check.verdicts(rows(), bad, L)
    assert len(found) == 3 and all(is_bad for is_bad, _ in found)


def test_a_trial_that_broke_off_is_bad():
    assert "not finite" in one_bad(rows(), [])


def test_rows_that_are_not_finite_are_bad():
    nan = (math.nan,) * 5
    assert check.verdicts(rows(), rows(grads=nan, jacobians=nan, variances=nan), L)[0][0]


# ---- What is computed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers, blocks",
    [
        (1, [1]),
        (2, [1, 2]),
        (4, [1, 2, 3, 4]),
        (8, [1, 2, 4, 6, 8]),
        (512, [1, 128, 256, 384, 512]),
    ],
)
def test_first_quarter_middle_three_quarter_and_last_block_are_shown(layers, blocks):
    assert check.shown_blocks(layers) == blocks


@pytest.mark.parametrize("layers", range(1, 40))
def test_the_first_and_the_last_block_are_always_among_the_shown(layers):
    shown = check.shown_blocks(layers)
    assert shown[0] == 1 and shown[-1] == layers and shown == sorted({*shown})


def test_the_operations_of_an_update_by_hand():
    """Two for each weight and token forward, four backward; and the products of attention."""
    c = tiny()  # 4 blocks × 16, FFN 24, vocabulary 32, context 16
    of_weights = 2 * (4 * (16 * 48 + 16 * 16 + 16 * 48 + 24 * 16) + 32 * 16)
    of_attention = 4 * 2 * (2 * 16 * 16 / 2)  # q·k and p·v; on average half the context is seen
    assert check.flops(c, 10) == 3 * 10 * (of_weights + of_attention)
    weights = sum(w.numel() for *_, w in fresh(c).matrices())
    assert of_weights == 2 * weights


SHAPES = {
    "small": {"layers": 4, "dim": 48, "heads": 2, "ffn": 96},
    "wide": {"layers": 8, "dim": 4096, "heads": 32},
    "deep": {"layers": 512, "dim": 384, "heads": 6, "ffn": 1000},
    "narrow and very deep": {"layers": 20_000, "dim": 16, "heads": 2},
    "odd": {"layers": 400, "dim": 330, "heads": 5, "ffn": 10, "vocab": 300, "block": 7},
} | {size: {k: SIZES[size][k] for k in ("layers", "dim", "heads", "vocab")} for size in SIZES}


def seconds(c, updates):
    """The estimate that train.py makes too."""
    return updates * c.layers * (check.BLOCK_S + check.PRODUCT_S * check.TOKENS * c.dim**2)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_tried_model_has_the_real_depth_and_takes_well_under_a_minute(shape):
    """The width shrinks first, then the number of updates; all else stays as it is."""
    real = Config(**shape, norm="lns+gpas", init="scaled", embed_std=0.3, norm_kind="layer")
    c, updates = check.reduced(real)
    assert c.layers == real.layers
    assert c.dim <= real.dim and 1 <= updates <= check.UPDATES
    assert seconds(c, updates) <= check.SECONDS or updates == 1
    if seconds(real, check.UPDATES) <= check.SECONDS:
        assert (c.dim, c.heads, c.ffn, updates) == (real.dim, real.heads, real.ffn, check.UPDATES)
    else:
        assert c.dim < real.dim or updates < check.UPDATES
    if updates < check.UPDATES:
        assert c.dim <= 64  # as narrow as it gets
    assert c.ffn / c.dim == pytest.approx(real.ffn / real.dim, abs=5 / c.dim + 0.1)
    assert c.vocab <= real.vocab and c.block <= real.block
    shrunk = ("dim", "heads", "ffn", "vocab", "block")
    same = lambda config: {k: v for k, v in config.to_dict().items() if k not in shrunk}
    assert same(c) == same(real)


def by_hand(model, ids, targets, blocks):
    """The rows of a look, from the probes one by one."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    model(ids, targets).backward()
    xs, table = streams(model, ids), layer_table(model, ids)
    grads = block_grad_norms(model)
    return [
        {
            "block": l,
            "variance": xs[l].var(-1, unbiased=False).mean().item(),
            "grad_norm": grads[l - 1].item(),
            "ratio_attn": table["ratio_attn"][l - 1],
            "ratio_ffn": table["ratio_ffn"][l - 1],
            "jacobian": jacobian_distance(model, l, xs[l - 1][:1]),
        }
        for l in blocks
    ]


@pytest.mark.parametrize("flags", [[], ["--norm=post", "--layers=5"], ["--norm=span+gpas"]])
def test_the_numbers_are_those_of_the_probes(told, monkeypatch, flags):
    """Of the model as drawn, and of the same model after its updates."""
    seen, look = [], check.look

    def watched(model, ids, targets, blocks):
        seen.append((copy.deepcopy(model), by_hand(model, ids, targets, blocks)))
        return look(model, ids, targets, blocks)

    monkeypatch.setattr(check, "look", watched)
    d = told(*flags)
    (drawn, start), (trained, after) = seen
    for got, want in ((d["at_init"], start), (d["after"], after)):
        assert [r["block"] for r in got] == check.shown_blocks(drawn.config.layers)
        for r, w in zip(got, want, strict=True):
            assert r == pytest.approx(w, rel=1e-4)
    torch.manual_seed(0)
    for p, q, r in zip(Transformer(drawn.config).parameters(), drawn.parameters(),
                       trained.parameters(), strict=True):  # fmt: skip
        assert torch.equal(p, q) and not torch.equal(q, r)


def test_the_rest_is_that_of_the_whole_model(told, place):
    """Sizes, memory and operations are the real model's, even where a narrower one is tried."""
    flags = "--layers=3 --dim=96 --heads=4 --ffn=200 --batch=3 --accum=5 --norm=lns".split()
    d = told(*flags)
    c = Config(norm="lns", layers=3, dim=96, heads=4, ffn=200, vocab=257, block=16, embed_std=0.1)
    model = Transformer(c)
    head = model.head.weight.numel() + model.embed.weight.numel()
    n = sum(p.numel() for p in model.parameters())
    s = {"batch": 3, "accum": 5, "block": 16}
    s |= {"device": "cpu", "dtype": "float32", "checkpoint_activations": False, "shard": False}
    want = {"norm": "lns", "init": "normal", "layers": 3, "dim": 96, "parameters": n,
            "parameters_without_embeddings": n - head, "tokens_per_update": 3 * 5 * 16,
            "memory_bytes": memory_estimate(c, s),
            "flop_per_update": check.flops(c, 240)}  # fmt: skip
    assert {k: d[k] for k in want} == want
    tried = {"dim": 96, "heads": 4, "ffn": 200, "vocab": 257, "block": 16, "reduced": False,
             "updates": 2, "lr": 0.01, "data": str(place / "text.txt"), "seed": 0}  # fmt: skip
    assert d["tried"] == tried


def test_a_model_too_large_to_try_is_tried_narrower_and_said_to_be(
    told, monkeypatch, capsys, place
):
    monkeypatch.setattr(check, "SECONDS", 0.07)
    flags = ["--layers=6", "--dim=512", "--heads=8"]
    d = told(*flags)
    assert d["tried"]["dim"] < 512 == d["dim"] and d["tried"]["reduced"] is True
    assert d["parameters"] > 6 * 12 * 512**2 * 0.9
    assert len(d["loss"]) == d["tried"]["updates"]
    argv = [*SMALL, "--data", place / "text.txt", *flags]
    assert check.main([str(a) for a in argv]) == 0
    assert f"width {d['tried']['dim']}" in capsys.readouterr().out


def test_the_first_loss_is_that_of_the_drawn_model(told, place):
    d = told("--seed=3")
    text = prepare(place / "text.txt", 257, log=lambda *_: None)
    ids, c = load(text)[0], Config(layers=2, dim=16, heads=2, vocab=257, block=16, embed_std=0.1)
    c.ffn = d["tried"]["ffn"]
    starts = window_starts(3, 0, 2, len(ids), 16)  # 32 tokens in windows of 16
    assert d["loss"][0] == pytest.approx(fresh(c, 3)(*get_batch(ids, starts, 16)).item(), rel=1e-5)
    assert len(d["loss"]) == 2


@pytest.mark.parametrize(
    "flag", "--lr=0.02 --beta1=0.5 --clip=0.01 --seed=1 --norm=lns --init=fan_in".split()
)
def test_no_setting_of_the_trial_is_dead(told, flag):
    """Each sees other weights in the end."""
    told_with, told_without = told(flag, updates=3), told(updates=3)
    assert told_with["after"] != told_without["after"]


def test_the_same_look_twice_gives_the_same_numbers(told):
    first = told("--norm=gpas")
    torch.manual_seed(99)
    assert timeless(told("--norm=gpas")) == timeless(first)


# ---- Real models --------------------------------------------------------------------------------


def test_eight_blocks_of_pre_are_sound(told):
    d = told("--layers=8", "--init=fan_in", updates=10)
    assert d["bad"] is False and len(d["verdict"]) == 1 and "sound" in d["verdict"][0]
    assert d["loss"][-1] < d["loss"][0]


def test_a_deep_post_ln_model_at_a_high_learning_rate_is_bad(told):
    d = told("--norm=post", "--layers=24", "--lr=0.1", updates=8)
    assert d["bad"] is True
    [why] = [why for why in d["verdict"] if "gradients differ" in why]
    assert "first blocks" in why and "after" in why
    first, last = d["after"][0]["grad_norm"], d["after"][-1]["grad_norm"]
    assert last > check.UNEVEN * first
    if first:
        assert f"{last / first:,.0f}×" in why


def test_blocks_that_write_nothing_are_wasted_depth(told, monkeypatch):
    draw = Transformer.init_weights

    def silent(model):
        draw(model)
        for block in model.blocks:
            block.attn.f.wo.weight.data.zero_()
            block.ffn.f.w2.weight.data.zero_()

    monkeypatch.setattr(Transformer, "init_weights", silent)
    d = told("--layers=8", "--lr=1e-6")
    assert {r["jacobian"] for r in d["at_init"]} == {0.0}
    assert max(r["jacobian"] for r in d["after"]) < check.NEAR
    deep = max(r["jacobian"] for r in d["after"] if r["block"] >= 6)
    assert d["bad"] is True
    [why] = d["verdict"]
    assert f"within {deep:.2%} of the identity" in why and "wasted depth" in why


def test_a_trial_that_is_not_finite_stops_there_and_is_bad(told):
    d = told("--lr=1e30", "--clip=0", updates=9)
    assert d["bad"] is True and "not finite" in d["verdict"][0]
    assert d["after"] == [] and d["tried"]["updates"] == len(d["loss"]) < 9


def test_a_last_update_that_breaks_the_model_is_bad(told):
    d = told("--lr=1e30", "--clip=0", updates=1)
    assert d["bad"] is True and "not finite" in d["verdict"][0]


# ---- The command --------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_null_in_json(told, monkeypatch):
    made_up = ([], [], [1.0, math.nan, math.inf], tiny())
    monkeypatch.setattr(check, "trial", lambda s, config: made_up)
    assert told()["loss"] == [1.0, None, None]


def test_the_text_has_the_same_numbers(told, place, capsys):
    """Of every shown block, at init and after; sizes; the verdict."""
    d = told("--layers=5", "--norm=gpas")
    assert check.main([*SMALL, "--data", str(place / "text.txt"), "--layers=5", "--norm=gpas"]) == 0
    out = capsys.readouterr().out
    for row in d["at_init"] + d["after"]:
        numbers = [f"{row[k]:.3g}" for k in ("variance", "grad_norm", "ratio_attn", "ratio_ffn")]
        line = r"\s+".join(map(re.escape, [str(row["block"]), *numbers, f"{row['jacobian']:.3g}"]))
        assert re.search(rf"^\s*{line}$", out, re.M)
    assert f"{d['parameters']:,}" in out and f"{d['parameters_without_embeddings']:,}" in out
    assert f"{d['loss'][0]:.3f}" in out and f"{d['loss'][-1]:.3f}" in out
    assert all(why in out for why in d["verdict"])
    assert "pre+gpas" in out and "5 blocks × 16" in out


def test_the_command_prints_nothing_but_json(checkout):
    """From any folder, also the first time, when the text is prepared."""
    run = subprocess.run(
        [sys.executable, checkout / "nanonorm.py", *SMALL, "--layers=1", "--json"]
        + ["--data", "../text.txt"],
        cwd=checkout / "data",
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "cp1252"},
    )
    assert (run.returncode, run.stderr.decode()) == (0, "")
    assert strict(run.stdout.decode("cp1252"))["layers"] == 1


BAD = [  # (what is given, words that the line must have)
    ("--layrs 3", "--layrs", "--layers"),
    ("--lay 3", "--lay"),
    ("pre", "pre"),
    ("--out there", "--out"),
    ("--resume there", "--resume"),
    ("--layers 0", "layers"),
    ("--layers two", "--layers", "two"),
    ("--norm LNS", "LNS", "lns"),
    ("--norm none.py:MyNorm", "none.py"),
    ("--size huge", "huge", "tiny"),
    ("--lr fast", "--lr", "fast"),
    ("--lr 0", "--lr"),
    ("--dim 30 --heads 4", "dim 30", "heads 4"),
    ("--lr 1e-3,3e-3", "--lr", "one value"),
    ("--norm pre,gpas", "--norm", "one value"),
    ("--data nothing.txt", "nothing.txt"),
    ("--data {place}/short.txt", "16"),
]


@pytest.mark.parametrize("given, words", [(g, w) for g, *w in BAD], ids=[g for g, *_ in BAD])
def test_bad_input_is_one_line(place, capsys, given, words):
    (place / "short.txt").write_bytes(b"ten words of text are not enough")
    own = given.replace("{place}", str(place)).split(" ")
    assert check.main([*SMALL, "--data", str(place / "text.txt"), *own]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nanonorm.py: error: ") and err.count("\n") == 1 and err.endswith("\n")
    for word in words:
        assert word in err


def test_a_list_is_refused_with_the_flag_as_it_was_given(capsys):
    assert check.main([*SMALL, "--min-lr=1e-4,1e-3"]) == 2
    assert "--min-lr" in capsys.readouterr().err
