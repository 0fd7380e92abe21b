"""The six exercises: `python -m pytest -rs tests/test_exercises.py --answer my_answers.py`.

Each check runs an answer against a model or a table, and says what it expected, what it found and
where to look. Without --answer the checks themselves are tested: the reference answers
(tests/answers.py) pass, and typical misconceptions, written out below, fail with a hint.
"""

import contextlib
import importlib.util
import math
import random
import re
import statistics
from pathlib import Path

import pytest
import torch
from conftest import fresh, gradients, scramble, tiny, tokens
from test_variants import by_hand

from data.grid import summarize
from data.settings import fault_of
from nanonorm import (
    VARIANTS,
    Block,
    Config,
    DeepNorm,
    Post,
    Pre,
    Sandwich,
    Span,
    Transformer,
    block_grad_norms,
    branch_variances,
    stream_variance,
    streams,
    visit,
)

REFERENCE = Path(__file__).parent / "answers.py"
pytest_plugins = [__name__]  # so that pytest asks this file's hook, too


def pytest_collection_modifyitems(config, items):
    """With --answer only the student's answers are checked, not the checks."""
    if config.getoption("--answer"):
        ours = [
            i for i in items if i.module.__name__ == __name__ and i.originalname != "test_answer"
        ]
        items[:] = [i for i in items if i not in ours]
        config.hook.pytest_deselected(items=ours)


class Wrong(Exception):
    """An answer is not right: the message is for the student."""


def need(holds, message):
    if not holds:
        raise Wrong(message)


# ---------------------------------------------------------------------------------------------
# 1. A variant from its formula
# ---------------------------------------------------------------------------------------------


def b2t(a, m, x, l, c):
    """2206.00330"""
    y = one_norm(a)(x + a.f(x))
    return one_norm(m)(m.f(y) + y + x)


def one_norm(s):
    return s.O or s.N


def keel(a, m, x, l, c, alpha=None):
    """2601.19895, every block alike"""
    alpha = 2 * c.layers if alpha is None else alpha
    x = a.O(alpha * x + a.f(a.N(x)))
    return m.O(alpha * x + m.f(m.N(x)))


# formulas that an answer may have instead, and what to say then
NEAR_B2T = {
    "the second sum has the right branch, but not all of its shortcuts": [
        lambda a, m, x, l, c: one_norm(m)(m.f(one_norm(a)(x + a.f(x))) + x),
        lambda a, m, x, l, c: one_norm(m)(m.f(y := one_norm(a)(x + a.f(x))) + y),
    ],
    "the FFN reads something else than y": [
        lambda a, m, x, l, c: one_norm(m)(m.f(x) + one_norm(a)(x + a.f(x)) + x),
    ],
}
NEAR_KEEL = {
    "α is on the wrong term (the shortcut is scaled, not the branch)": [
        lambda a, m, x, l, c: m.O(
            2 * c.layers * m.f(m.N(y := a.O(2 * c.layers * a.f(a.N(x)) + x))) + y
        ),
    ],
    "α has another value: count the sub-layers, not the blocks, and let it depend on L (see "
    "DeepNorm.constants)": [
        lambda a, m, x, l, c, alpha=alpha: keel(a, m, x, l, c, alpha(c.layers))
        for alpha in (lambda L: 1, lambda L: L, lambda L: (2 * L) ** 0.25, lambda L: (2 * L) ** 0.5)
    ],
}


@contextlib.contextmanager
def registered(kind):
    """The name under which a Config knows the class `kind`, for as long as this lasts."""
    VARIANTS["answer"] = kind
    try:
        yield "answer"
    finally:
        del VARIANTS["answer"]


def check_block(kind, formula, near, norms):
    """The model with blocks `kind` has the outputs and all the gradients of `formula`, float64."""
    name = getattr(kind, "__name__", kind)
    is_block = isinstance(kind, type) and issubclass(kind, Block)
    need(is_block, f"{name} must be a class that derives from nanonorm.Block")
    with registered(kind) as norm:
        for layers in (3, 1, 6):
            config = tiny(norm, layers=layers, norm_eps=0.01)
            model = scramble(fresh(config).double())
            found = [len(s.norms()) for s in (model.blocks[0].attn, model.blocks[0].ffn)]
            need(
                found == norms,
                f"the formula has {norms[0]} norm(s) in the attention half of a block and "
                f"{norms[1]} in the FFN half, {name} has {found[0]} and {found[1]}: count the N in "
                "the formula, and see `norms` of Block, Post and Sandwich",
            )
            ids, targets = tokens(config)
            run, leaves = by_hand(model, formula)
            want, loss = run(ids, targets)
            got = model(ids)
            if not close(got, want):
                off = (got - want).abs().max() / want.abs().max()
                hint = next(
                    (what for what, fs in near.items() for f in fs
                     if close(got, by_hand(model, f)[0](ids, targets)[0])),
                    "write the formula beside `forward` of Span and compare term by term"
                    if layers == 3 else "a number in it must depend on L, see DeepNorm.constants",
                )  # fmt: skip
                raise Wrong(
                    f"at {layers} blocks the outputs of {name} are not those of the formula (off by"
                    f" {off:.2g} of the largest, expected below 1e-9)"
                    + (", at 3 blocks they are" if layers != 3 else "")
                    + f". Hint: {hint}"
                )
            adds = []
            visit(model, ids, add=lambda l, i, *seen, adds=adds: adds.append((l, i)))
            need(
                len(adds) == 2 * layers,
                f"{name} joins its branches past `add`, where probes and GPAS sit ({len(adds)} "
                f"additions seen, expected {2 * layers}): use s.add(x, branch), as Post does",
            )
            loss.backward()
            for key, grad in gradients(model, ids, targets).items():
                need(
                    grad is not None and grad.abs().max() > 0,
                    f"no gradient reaches {key}: is it used, and not detached, in {name}?",
                )
                need(
                    close(grad, leaves[key].grad),
                    f"the outputs are right, the gradient of {key} is not: something in {name} "
                    "cuts or scales the backward pass alone (detach, no_grad)",
                )


def close(got, want):
    return (got - want).abs().max() <= 1e-9 * want.abs().max()


def check_b2t(kind):
    check_block(kind, b2t, NEAR_B2T, [1, 1])


def check_keel(kind):
    check_block(kind, keel, NEAR_KEEL, [2, 2])


# ---------------------------------------------------------------------------------------------
# 2. The broken DeepNorm
# ---------------------------------------------------------------------------------------------

FAULTS = {
    "alpha": "measure the factor at two depths: visit(model, ids, add=…) shows both terms of a sum",
    "term": "compare each term of the sum with x and with f(x), in attention and in the FFN: "
    "visit(model, ids, add=…)",
    "gain": "compare the std of v, o, gate, up, down with INITS['deepnorm'] at some depth: "
    "model.matrices()",
    "queries": "compare the std of q and k with INITS['deepnorm']: model.matrices()",
    "gpas": "build it with gpas=True too, and compare the std of each matrix without and with",
}


def deepnorm_like(alpha=None, on_branch=(), exponent=-0.25, queries=0.0, gpas_std=None):
    """build(layers, gpas=False) of a DeepNorm with planted faults; without arguments the right one.

    alpha: a function of L; on_branch: the halves whose branch α multiplies, not the shortcut;
    exponent: of the init's gain; queries: the same of q and k; gpas_std: of every matrix with GPAS.
    """

    class Planted(DeepNorm):
        @staticmethod
        def constants(config, l):
            a = alpha(config.layers) if alpha else (2 * config.layers) ** 0.25
            return (a,), (a,)

        def rule(self, s, x, c, rope):
            half = "attn" if s is self.attn else "ffn"
            if half in on_branch:
                return s.norm_out(s.add(x, c[0] * s.f(x, rope)))
            return s.norm_out(s.add(c[0] * x, s.f(x, rope)))

    @torch.no_grad()
    def build(layers, gpas=False):
        norm = "deepnorm+gpas" if gpas else "deepnorm"
        shape = {"layers": layers, "dim": 32, "heads": 2, "ffn": 64, "vocab": 64, "block": 16}
        model = fresh(Config(norm=norm, **shape))
        for block in model.blocks:
            block.__class__ = Planted
        for role, l, w in model.matrices():
            if role in "qk":
                w *= (8 * layers) ** queries
            elif l:
                w *= (8 * layers) ** (exponent + 0.25)
            if l and gpas and gpas_std:
                w.normal_(0.0, gpas_std)
        return model

    return build


PLANTED = [  # (what is wrong, the implementation)
    (set(), deepnorm_like()),
    ({"alpha"}, deepnorm_like(alpha=lambda L: (2 * 32) ** 0.25)),
    ({"gain"}, deepnorm_like(exponent=0.25)),
    ({"gpas"}, deepnorm_like(gpas_std=0.02)),
    ({"term"}, deepnorm_like(on_branch=("attn", "ffn"))),
    ({"term"}, deepnorm_like(on_branch=("ffn",))),
    ({"queries"}, deepnorm_like(queries=-0.25)),
    ({"alpha"}, deepnorm_like(alpha=lambda L: L**0.25)),
    ({"alpha"}, deepnorm_like(alpha=lambda L: 6**0.25)),  # right at 3 blocks
    ({"alpha"}, deepnorm_like(alpha=lambda L: 12**0.25)),  # right at 6
    ({"gain", "alpha"}, deepnorm_like(exponent=-0.5, alpha=lambda L: 2.0)),
    ({"term", "gpas"}, deepnorm_like(on_branch=("attn",), gpas_std=0.05)),
    (set(), deepnorm_like(alpha=lambda L: (2 * L) ** 0.25)),
]


def check_faults(faults):
    """The names of the planted faults, of each implementation, in an order of chance."""
    for i, (want, build) in enumerate(random.Random(1).sample(PLANTED, len(PLANTED)), 1):
        torch.manual_seed(0)
        got = faults(build)
        listed = isinstance(got, (set, frozenset, list, tuple))
        need(listed, f"faults must return a set of names, it returned {got!r}")
        unknown = [name for name in got if name not in FAULTS]
        need(not unknown, f"{unknown} are no names of faults; they are: {', '.join(FAULTS)}")
        got, which = set(got), f"implementation {i} of {len(PLANTED)}"
        for name in FAULTS:  # in order, so that the message does not change from run to run
            need(
                name not in want - got,
                f"{which}: it has the fault {name!r}, and you found {sorted(got) or 'none'}. "
                f"Hint: {FAULTS[name]}",
            )
            need(
                name not in got - want,
                f"{which}: you found {name!r}, and it does not have that fault. "
                f"Hint: {FAULTS[name]}",
            )


# ---------------------------------------------------------------------------------------------
# 3. The variance profile
# ---------------------------------------------------------------------------------------------

PROFILE_HINTS = {
    "pre": "x ← x + f(N(x)): what is the variance of a sum of independent terms, and what does f "
    "read, however large x is?",
    "post": "x ← N(x + f(x)): what is the last thing that a block does?",
    "sandwich": "x ← x + N(f(N(x))): how large is what leaves the outer N?",
    "lns": "x ← x + f(N(x)/√l): what does each of the two f write when its input is c times as "
    "large? See FFN.forward: it is not linear",
    "scaleres": "x ← (1 − 1/L)·x + f(N(x))/L, twice a block: what does a constant do "
    "to a variance?",
    "span": "y = N(attn(x) + x); x ← N(ffn(y) + x): what is the last thing that a block does?",
}
TOLERANCE = 0.15  # the idealised sum is 5 % off, both f linear in lns a third


def wide_model(norm, L, start, loud):
    """A model at init whose branches write noticeably; the same draws for every norm."""
    shape = {"layers": L, "dim": 128, "heads": 2, "vocab": 64, "block": 4}
    init = {"init": "scale_init", "scale_init_constant": 20.0 * loud, "embed_std": start**0.5}
    model = fresh(Config(norm=norm, **shape, **init))
    with torch.no_grad():
        for block in model.blocks:
            block.ffn.f.w2.weight *= 8  # SwiGLU writes little at this width
    return model


def check_profile(predict_variance):
    """The prediction is the profile of a real model, to 15 %. Sequences of a single token."""
    ids = torch.arange(64)[:, None]
    for L, start, loud in ((12, 0.1, 1.0), (6, 1.0, 2.0)):
        attn, ffn = branch_variances(wide_model("pre", L, start, loud), ids).mean(0).tolist()
        for norm, hint in PROFILE_HINTS.items():
            call = f"predict_variance({norm!r}, {L}, {start}, {attn:.3g}, {ffn:.3g})"
            got = predict_variance(norm, L, start, attn, ffn)
            try:
                got = [float(v) for v in got]
            except (TypeError, ValueError):
                raise Wrong(f"{call} must return a list of {L} numbers, not {got!r}") from None
            need(len(got) == L, f"{call} must return {L} numbers, one a block, not {len(got)}")
            xs = streams(wide_model(norm, L, start, loud), ids)[1:]
            for l, (mine, x) in enumerate(zip(got, xs, strict=True), 1):
                measured = stream_variance(x).item()
                need(
                    abs(mine - measured) <= TOLERANCE * measured,
                    f"{call}: after block {l} the model has {measured:.3g}, you predict {mine:.3g}"
                    f" (tolerance {TOLERANCE:.0%}). Hint: {hint}",
                )


# ---------------------------------------------------------------------------------------------
# 4. A fair comparison
# ---------------------------------------------------------------------------------------------


def runs_of(table):
    """Rows like those of data.grid.read_runs, in an order of chance. {norm: {lr: {seed: bpb}}}.

    A list stands for the seeds 0, 1, …; None for a run that diverged.
    """
    rows = []
    for norm, rates in table.items():
        for lr, seeds in rates.items():
            for seed, v in seeds.items() if isinstance(seeds, dict) else enumerate(seeds):
                status = "diverged" if v is None else "finished"
                v = math.nan if v is None else v
                rows.append({"norm": norm, "lr": lr, "seed": seed, "status": status, "val_bpb": v})
    return random.Random(0).sample(rows, len(rows))


TABLES = {
    "each norm has a best rate of its own": {
        "pre": {1e-3: [2.50, 2.60, 2.55], 3e-3: [2.40, 2.51, 2.45], 1e-2: [2.46, 2.55, 2.53]},
        "post": {3e-4: [2.50, 2.61, 2.56], 1e-3: [2.41, 2.50, 2.46], 3e-3: [2.80, 2.9, 2.7]},
        "span": {1e-3: [2.45, 2.54, 2.49], 3e-3: [2.38, 2.50, 2.44], 1e-2: [2.39, 2.51, 2.45]},
    },
    "a seed diverged at the rate with the lowest mean": {
        "pre": {1e-3: [2.50, 2.60, 2.55], 3e-3: [2.40, 2.51, 2.45], 1e-2: [2.46, None, 2.53]},
        "span": {1e-3: [2.48, 2.57, 2.52], 3e-3: [2.42, 2.50, 2.44], 1e-2: [2.30, None, 2.31]},
    },
    "the best rate is the last or the only one tried": {
        "pre": {1e-3: [2.50, 2.60], 3e-3: [2.40, 2.51]},
        "lns": {1e-3: [2.30, 2.42], 3e-3: [2.50, 2.62], 1e-2: [2.60, 2.70]},
        "span": {1e-3: [2.45, 2.54]},
    },
    "seeds are missing, or a pair has lost one of its runs": {
        "pre": {3e-3: {0: 2.40, 1: 2.50, 2: 2.70, 3: 2.45, 5: 2.43}},
        "lns": {3e-3: {3: 2.41, 2: 2.64, 1: 2.47, 7: 2.20}},
        "mix": {3e-3: {0: 2.38, 1: None, 2: 2.69}, 1e-2: {0: None, 1: None, 2: 2.1}},
    },
    "one seed": {"pre": {1e-3: [2.5]}, "span": {1e-3: [2.4]}},
    "every run of a norm diverged": {
        "pre": {1e-3: [2.50, 2.60], 3e-3: [2.40, 2.52]},
        "post": {1e-3: [None, None], 3e-3: [None, None]},
    },
    "every run of pre diverged": {
        "pre": {1e-3: [None, None]},
        "post": {1e-3: [2.4, 2.5]},
    },
}
COLUMNS = {
    "lr": "only among the rates at which the fewest of this norm's seeds diverged, the lowest mean",
    "edge": "is the best rate the lowest or the highest of several that were tried?",
    "diverged": "count this norm's diverged runs, at all of its rates",
    "mean": "the finished runs at this norm's own best rate",
    "se": "the standard deviation with n − 1, over √n; None for a single number",
    "ahead": "seed by seed: pre's number less this norm's, each at its own best rate, for the "
    "seeds that finished in both",
    "ahead_se": "the standard error of those differences, not one made of two standard errors: "
    "what a seed does to both runs cancels",
}


def fair(table):
    """What compare should return, as plain as the rule: {norm: {column: value}}."""
    best, done, found = {}, {}, {}
    for norm, rates in table.items():
        rates = {lr: dict(enumerate(s)) if isinstance(s, list) else s for lr, s in rates.items()}
        good = {lr: {k: v for k, v in s.items() if v is not None} for lr, s in rates.items()}
        lost = {lr: len(rates[lr]) - len(good[lr]) for lr in rates}
        ranked = sorted(
            (lost[lr], statistics.mean(good[lr].values()), lr) for lr in rates if good[lr]
        )
        best[norm] = ranked[0][2] if ranked else None
        done[norm] = good[best[norm]] if ranked else {}
        found[norm] = {"lr": best[norm], "edge": False, "diverged": sum(lost.values())}
        if len(rates) > 1 and ranked:
            found[norm]["edge"] = best[norm] in (min(rates), max(rates))
    for norm, mine in done.items():
        pairs = [done["pre"][s] - mine[s] for s in mine if s in done["pre"]]
        for name, values in (("mean", [*mine.values()]), ("ahead", pairs)):
            key = {"mean": "se", "ahead": "ahead_se"}[name]
            found[norm][name] = statistics.mean(values) if values else None
            many = len(values) > 1
            found[norm][key] = statistics.stdev(values) / math.sqrt(len(values)) if many else None
    return found


def check_compare(compare):
    """Every column of every norm, in tables where a careless way gives another number."""
    for title, table in TABLES.items():
        got, want = compare(runs_of(table)), fair(table)
        need(isinstance(got, dict), f"compare must return a dict, it returned {got!r}")
        absent = [norm for norm in want if not isinstance(got.get(norm), dict)]
        need(not absent, f"table {title!r}: the result has no dict for {', '.join(absent)}")
        for norm in want:
            for column, hint in COLUMNS.items():
                where = f"table {title!r}, norm {norm}: {column!r}"
                need(column in got[norm], f"{where} is missing")
                mine, right = got[norm][column], want[norm][column]
                need(
                    same(mine, right),
                    f"{where} should be {shown(right)}, you return {shown(mine)}. Hint: {hint}",
                )


def same(mine, right):
    if right is None or mine is None:
        return mine is right
    if isinstance(right, bool):
        return mine == right
    try:
        return math.isclose(mine, right, rel_tol=1e-6, abs_tol=1e-9)
    except TypeError:
        return False


def shown(v):
    return f"{v:.4g}" if isinstance(v, float) else repr(v)


# ---------------------------------------------------------------------------------------------
# 5. Break Scale Init
# ---------------------------------------------------------------------------------------------

LARGEST = {"layers": 64, "dim": 64, "heads": 8}
APART, TOGETHER = 100, 2.5


def gradient_spread(settings, factor, seed):
    """(largest over smallest gradient norm of the blocks from the second on, model, ids)."""
    constant = settings.get("scale_init_constant", 1.0) * factor
    settings = settings | {"scale_init_constant": constant, "init": "scale_init", "norm": "span"}
    config = Config(vocab=64, block=16, **settings)
    model = fresh(config, seed)
    ids, targets = tokens(config, T=16)
    model(ids, targets).backward()
    norms = block_grad_norms(model)[1:]  # block 1 reads the raw, small embedding: another thing
    spread = (norms.max() / norms.min()).item() if norms.min() > 0 else math.inf
    return spread, model, ids


def check_break(break_scale_init):
    """With 1/√L the gradients of all blocks are alike; without it, all else equal, they are not."""
    settings = break_scale_init()
    is_dict = isinstance(settings, dict)
    need(is_dict, f"break_scale_init must return a dict of settings, it returned {settings!r}")
    allowed = (*LARGEST, "scale_init_constant")
    other = [k for k in settings if k not in allowed]
    need(not other, f"{other} may not be set here, only {', '.join(allowed)}")
    settings = {"layers": 16, "dim": 32, "heads": 2} | settings
    for name, most in LARGEST.items():
        value = settings[name]
        need(
            type(value) is int and 2 <= value <= most,
            f"{name} must be a whole number of 2 to {most}, not {value!r}",
        )
    for seed in (0, 1):
        try:
            spread, *_ = gradient_spread(settings, 1.0, seed)
            without, model, ids = gradient_spread(settings, settings["layers"] ** 0.5, seed)
        except ValueError as e:
            raise Wrong(f"these settings make no model: {e}") from None
        need(
            spread <= TOGETHER,
            f"seed {seed}: with the factor 1/√L the gradient norms of blocks 2 to L already differ "
            f"by a factor of {spread:.3g} (at most {TOGETHER} wanted). Hint: the branches are too "
            "large even when divided by √L; scale_init_constant sets their size",
        )
        branch = branch_variances(model, ids)[1:].sum(-1).mean().item()
        need(
            without >= APART,
            f"seed {seed}: without the factor 1/√L the gradient norms of blocks 2 to L differ only "
            f"by a factor of {without:.3g} (at least {APART} wanted). There, the two branches of a "
            f"block together have a variance of {branch:.2g}, in a stream of variance 1. "
            "Hint: how large must a branch be for a deep stack of them to be felt, and what makes "
            "the branches of a narrow model small? See BASE_STD, and INITS['fan_in']",
        )


# ---------------------------------------------------------------------------------------------
# 6. A verdict
# ---------------------------------------------------------------------------------------------

HOLDS, NOT, UNSURE = "holds", "does not hold here", "too small to tell"
VERDICTS = [  # (differences, least, verdict, hint)
    ([0.050, 0.060, 0.055], 0.02, HOLDS, "the whole interval is above 0"),
    ([0.004, 0.005, 0.006, 0.005], 0.02, HOLDS,
     "the whole interval is above 0: a small advantage is an advantage"),
    ([0.020, 0.050, 0.030], 0.02, UNSURE,
     "with three seeds t is 4.30, not 1.96: the interval has 0 and `least` in it"),
    ([0.100, -0.060, 0.150, 0.020], 0.02, UNSURE,
     "a mean above 0 is not enough: look at the interval"),
    ([0.030, -0.028, 0.010, -0.014], 0.02, UNSURE,
     "not shown is not refuted: an advantage of `least` is still inside the interval"),
    ([-0.050, -0.040, -0.045], 0.02, NOT, "the whole interval is below `least`"),
    ([0.002, -0.003, 0.001, -0.001], 0.02, NOT,
     "no advantage is shown, and one of `least` is excluded: the interval ends below it"),
    ([0.002, -0.003, 0.001, -0.001], 0.001, UNSURE,
     "an advantage of `least` is inside the interval: the threshold is an argument, no constant"),
    ([0.05, 0.04, 0.01, 0.03, 0.07, 0.02, 0.04, 0.03, 0.05], 0.02, HOLDS,
     "the interval is that of the mean: its error falls as 1/√n"),
    ([0.4], 0.02, UNSURE, "one seed has no spread, so no interval"),
    ([], 0.02, UNSURE, "there is nothing to judge"),
]  # fmt: skip


def check_verdict(verdict):
    for differences, least, want, hint in VERDICTS:
        got = verdict(list(differences), least)
        one_of_them = got in (HOLDS, NOT, UNSURE)
        need(one_of_them, f"verdict must return {HOLDS!r}, {NOT!r} or {UNSURE!r}, not {got!r}")
        need(
            got == want,
            f"verdict({differences}, {least}) should be {want!r}, you return {got!r}. Hint: {hint}",
        )


# ---------------------------------------------------------------------------------------------
# The exercises, and a file of answers
# ---------------------------------------------------------------------------------------------

EXERCISES = {  # what to define: (number, its check)
    "B2T": (1, check_b2t),
    "Keel": (1, check_keel),
    "faults": (2, check_faults),
    "predict_variance": (3, check_profile),
    "compare": (4, check_compare),
    "break_scale_init": (5, check_break),
    "verdict": (6, check_verdict),
}


def load(path):
    """The module in a file of answers. Fails, in one line, if it cannot be imported."""
    path = Path(path).resolve()
    if not path.is_file():
        pytest.fail(f"there is no file {path}: what does --answer name?", pytrace=False)
    spec = importlib.util.spec_from_file_location("given_answers", path)
    module, what = importlib.util.module_from_spec(spec), None
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        what = fault_of(e, str(path))
    if what:
        pytest.fail(f"{path.name} cannot be imported: {what}", pytrace=False)
    return module


def judge(name, answer, file=""):
    """Run the check of exercise `name`; fails with a message for the student."""
    number, check = EXERCISES[name]
    what = None
    try:
        check(answer)
    except Wrong as e:
        what = str(e)
    except Exception as e:
        what = f"your code raises {fault_of(e, file)}"
    if what:  # out here, so that pytest shows the message alone
        pytest.fail(f"exercise {number}, {name}: {what}", pytrace=False)


def judge_file(name, module):
    """The same of what a file of answers defines; skips what it does not define."""
    answer = getattr(module, name, None)
    if answer is None:
        pytest.skip(f"exercise {EXERCISES[name][0]}: not answered yet (define {name})")
    judge(name, answer, module.__file__)


@pytest.mark.parametrize("name", EXERCISES)
def test_answer(name, request):
    """Yours with --answer, else the reference answer, passes."""
    judge_file(name, load(request.config.getoption("--answer") or REFERENCE))


# ---------------------------------------------------------------------------------------------
# The checks themselves: misconceptions fail, and are told why
# ---------------------------------------------------------------------------------------------


reference = load(REFERENCE)


class MissingShortcut(reference.B2T):
    def forward(self, x, rope, c):
        y = self.attn.norm_out(self.attn.add(x, self.attn.f(x, rope)))
        return self.ffn.norm_out(self.ffn.add(x, self.ffn.f(y, rope)))


class PastTheAdd(reference.B2T):
    def forward(self, x, rope, c):
        y = self.attn.norm_out(x + self.attn.f(x, rope))
        return self.ffn.norm_out(x + y + self.ffn.f(y, rope))


class Detached(reference.B2T):
    def forward(self, x, rope, c):
        y = self.attn.norm_out(self.attn.add(x, self.attn.f(x, rope)))
        return self.ffn.norm_out(self.ffn.add(x + y.detach(), self.ffn.f(y, rope)))


class OneAlpha(reference.Keel):
    @staticmethod
    def constants(config, l):
        return (6.0,), (6.0,)  # right at 3 blocks


class BlocksNotSublayers(reference.Keel):
    @staticmethod
    def constants(config, l):
        return (float(config.layers),), (float(config.layers),)


class WrongTerm(reference.Keel):
    def rule(self, s, x, c, rope):
        return s.norm_out(s.add(x, c[0] * s.f(s.norm_in(x), rope)))


def faults_at_one_depth(build):
    found = reference.faults(build)
    x, _ = reference.factors(build(6))[0]
    return found - {"alpha"} | ({"alpha"} if abs(x - 12**0.25) > 0.01 else set())


def faults_without_gpas(build):
    return reference.faults(lambda layers, gpas=False: build(layers))


def profile_by(**changed):
    """predict_variance of the reference, but for the norms given: a function (v, l, attn, ffn)."""

    def predict(norm, L, start, attn, ffn):
        if norm not in changed:
            return reference.predict_variance(norm, L, start, attn, ffn)
        v, profile = start, []
        for l in range(1, L + 1):
            v = changed[norm](v, l, attn, ffn)
            profile.append(v)
        return profile

    return predict


def shared_rate(runs):
    """One learning rate for all: the one that pre likes."""
    lr, *_ = (row["lr"] for norm, row in reference.compare(runs).items() if norm == "pre")
    return reference.compare([r for r in runs if r["lr"] == lr])


def forgetting_the_lost(runs):
    """The count of them is right, but they do not speak against a rate."""
    result, every = reference.compare([r for r in runs if r["status"] == "finished"]), {}
    for r in runs:
        every[r["norm"]] = every.get(r["norm"], 0) + (r["status"] == "diverged")
    return {norm: row | {"diverged": every[norm]} for norm, row in result.items()}


def unpaired(runs):
    result = reference.compare(runs)
    for row in result.values():
        if row["ahead_se"] is not None:
            row["ahead_se"] = math.hypot(row["se"], result["pre"]["se"])
    return result


def without_edge(runs):
    return {norm: row | {"edge": False} for norm, row in reference.compare(runs).items()}


def verdict_by(t=None, spread=True):
    """The rule with another t, or with the standard deviation for its error."""

    def verdict(differences, least):
        n = len(differences)
        if n < 2:
            return UNSURE
        error = statistics.stdev(differences) * (1 if spread else n**-0.5)
        error *= reference.T95[n] if t is None else t
        mean = statistics.mean(differences)
        return HOLDS if mean > error else NOT if mean + error < least else UNSURE

    return verdict


def not_shown_is_refuted(differences, least):
    return HOLDS if reference.verdict(differences, least) == HOLDS else NOT


MISCONCEPTIONS = {  # (exercise, answer, words of the message)
    "span is b2t": ("B2T", MissingShortcut, "not all of its shortcuts"),
    "post is b2t": ("B2T", Post, "not all of its shortcuts"),
    "pre is b2t": ("B2T", Pre, "not those of the formula.*term by term"),
    "too many norms": ("B2T", Sandwich, r"has 1 norm\(s\).*has 2 and 2.*Post and Sandwich"),
    "no add": ("B2T", PastTheAdd, r"past `add`.*0 additions seen, expected 6"),
    "detached": ("B2T", Detached, "the outputs are right, the gradient of .* is not"),
    "an instance": ("B2T", 3, "must be a class"),
    "α for one depth": ("Keel", OneAlpha, "at 1 blocks .* at 3 blocks they are.*must depend on L"),
    "α = L": ("Keel", BlocksNotSublayers, "count the sub-layers"),
    "α on the branch": ("Keel", WrongTerm, "α is on the wrong term"),
    "all is well": ("faults", lambda build: set(), "it has the fault '.*you found none"),
    "all is broken": ("faults", lambda build: set(FAULTS), "does not have that fault"),
    "one depth": ("faults", faults_at_one_depth, "has the fault 'alpha'.*at two depths"),
    "no gpas": ("faults", faults_without_gpas, "has the fault 'gpas'.*gpas=True"),
    "own names": ("faults", lambda build: {"sign"}, "no names of faults; they are: alpha"),
    "constant": ("predict_variance", lambda norm, L, start, attn, ffn: [1.0] * L,
                 "'pre', 12.*after block 1 the model has .* independent terms"),
    "f reads x": ("predict_variance", profile_by(pre=lambda v, l, a, f: v * (1 + a) * (1 + f)),
                  "'pre'.*however large x is"),
    "post grows": ("predict_variance", profile_by(post=lambda v, l, a, f: v + a + f),
                   "'post'.*last thing that a block does"),
    "both linear": ("predict_variance", profile_by(lns=lambda v, l, a, f: v + (a + f) / l),
                    "'lns'.*FFN.forward"),
    "1/√l of a variance": ("predict_variance",
                           profile_by(lns=lambda v, l, a, f: v + (a + f) / l**0.5),
                           "'lns'.*what does each of the two f write"),
    "sandwich as pre": ("predict_variance", profile_by(sandwich=lambda v, l, a, f: v + a + f),
                        "'sandwich'.*outer N"),
    "too short": ("predict_variance", lambda *_: [1.0], "12 numbers, one a block, not 1"),
    "no list": ("predict_variance", lambda *_: None, "a list of 12 numbers, not None"),
    "one rate for all": ("compare", shared_rate, "norm post: 'lr' should be 0.001"),
    "the lost forgotten": ("compare", forgetting_the_lost, "norm span: 'lr' should be 0.003"),
    "unpaired": ("compare", unpaired, "'ahead_se' should be .*cancels"),
    "edge unseen": ("compare", without_edge, "'edge' should be True.*lowest or the highest"),
    "a list": ("compare", lambda runs: [], "must return a dict"),
    "as it comes": ("break_scale_init", dict, "differ only by a factor of 1.*BASE_STD"),
    "deep is enough": ("break_scale_init", lambda: {"layers": 64, "dim": 64},
                       "differ only by a factor of 1.*BASE_STD"),
    "too loud": ("break_scale_init", lambda: {"layers": 64, "scale_init_constant": 9e3},
                 "with the factor 1/√L .* already differ"),
    "too deep": ("break_scale_init", lambda: {"layers": 512}, "of 2 to 64, not 512"),
    "another init": ("break_scale_init", lambda: {"init": "fan_in"}, "'init'. may not be set"),
    "no model": ("break_scale_init", lambda: {"dim": 33}, "make no model: dim 33"),
    "above 0": ("verdict", lambda ds, least: HOLDS if sum(ds) > 0 else NOT, "t is 4.30"),
    "1.96": ("verdict", verdict_by(t=1.96, spread=False), "t is 4.30, not 1.96"),
    "spread, not error": ("verdict", verdict_by(), "'holds', you return .*whole interval|1/√n"),
    "not shown is refuted": ("verdict", not_shown_is_refuted, "not refuted|not 1.96"),
    "own words": ("verdict", lambda ds, least: True, "must return 'holds'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISCONCEPTIONS)
def test_a_misconception_fails_with_a_hint(case):
    """The message names the exercise and says what to think about."""
    name, answer, words = MISCONCEPTIONS[case]
    with pytest.raises(pytest.fail.Exception) as e:
        judge(name, answer)
    assert str(e.value).startswith(f"exercise {EXERCISES[name][0]}, {name}: ")
    assert re.search(words, str(e.value)), str(e.value)


def test_every_exercise_has_two_misconceptions():
    """A check that nothing fails proves nothing."""
    for name in EXERCISES:
        assert sum(exercise == name for exercise, *_ in MISCONCEPTIONS.values()) >= 2, name


def test_span_first_block_is_no_answer_either():
    """Span as it stands has an extra norm in block 1: the count of the norms tells."""
    with pytest.raises(pytest.fail.Exception, match=r"has 2 and 1"):
        judge("B2T", Span)


# ---------------------------------------------------------------------------------------------
# A student's file
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    """written(text) is the path of a file of answers."""

    def write(text):
        path = tmp_path / "my_answers.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\ndef verdict(:\n", r"my_answers.py cannot be imported: SyntaxError.*\(line 2\)"),
        ("import nanonorm\n\nnanonorm.Blok\n", r"AttributeError.*Blok.*\(line 3\)"),
        ("raise SystemExit\n", "my_answers.py cannot be imported: SystemExit"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(written, text, words):
    with pytest.raises(pytest.fail.Exception, match=words) as e:
        load(written(text))
    assert "\n" not in str(e.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="there is no file .*nowhere.py"):
        load(tmp_path / "nowhere.py")


def test_what_is_not_answered_is_skipped(written):
    """The message says what to define; None stands for nothing."""
    module = load(written("verdict = None\n"))
    for name in EXERCISES:
        with pytest.raises(pytest.skip.Exception, match=f"not answered yet .define {name}"):
            judge_file(name, module)


def test_an_exception_names_the_line(written):
    """Of the student's file, where the check called it."""
    module = load(written("def verdict(ds, least):\n    a = 1\n    return ds[7]\n"))
    words = r"exercise 6, verdict: your code raises IndexError: .*\(line 3\)"
    with pytest.raises(pytest.fail.Exception, match=words):
        judge_file("verdict", module)


def test_an_answer_may_fail_anyhow():
    """A function without its arguments, or a block without a rule, is no crash of the checks."""
    for name in EXERCISES:
        with pytest.raises(pytest.fail.Exception, match=f"exercise ., {name}: "):
            judge(name, lambda a, b, c, d, e, f, g: None)
    with pytest.raises(pytest.fail.Exception, match="defines rule, or forward"):
        judge("B2T", type("Empty", (Block,), {"norms": ("out", "out")}))


# ---------------------------------------------------------------------------------------------
# The exercises are what they say
# ---------------------------------------------------------------------------------------------


def test_the_checks_leave_no_variant_behind():
    """Whether they pass or fail."""
    before = {**VARIANTS}
    reference_and_wrong = (reference.B2T, MissingShortcut, Sandwich)
    for kind in reference_and_wrong:
        with contextlib.suppress(pytest.fail.Exception):
            judge("B2T", kind)
    assert before == VARIANTS


@pytest.mark.parametrize("title", [t for t in TABLES if not t.endswith("of pre diverged")])
def test_exercise_4_has_the_rule_of_the_summary(title):
    """The best rate, the means and the differences are those of summary.csv (data.grid)."""
    want = fair(TABLES[title])
    for row in summarize(runs_of(TABLES[title])):
        if row["best"]:
            right = want[row["norm"]]
            for column in ("lr", "ahead", "ahead_se", "se"):
                assert same(row[column], right[column]), (row["norm"], column)
            assert same(row["val_bpb"], right["mean"])
            assert bool(row["edge"]) == right["edge"]


def test_a_right_deepnorm_is_not_planted():
    """The implementations without a fault are nanonorm's DeepNorm, bit for bit."""
    ids, _ = tokens(Config(vocab=64))
    for want, build in PLANTED:
        if not want:
            for gpas in (False, True):
                model = build(3, gpas)
                assert torch.equal(model(ids), fresh(model.config)(ids))


def test_exercise_5_compares_models_that_differ_in_the_factor_alone():
    """k√L in place of k takes 1/√L off the output matrices and leaves all others as they are."""
    shape = {"layers": 4, "dim": 16, "heads": 2, "norm": "span"}
    with_it = fresh(Config(**shape, scale_init_constant=3.0))
    without = fresh(Config(**shape, scale_init_constant=6.0))
    for (role, _, a), (_, _, b) in zip(with_it.matrices(), without.matrices(), strict=True):
        torch.testing.assert_close(b, a * (2.0 if role in ("o", "down") else 1.0))


def test_models_of_exercise_3_have_the_same_draws():
    """So that attn and ffn, measured in the Pre-LN model, hold for all of them."""
    pre, span = (wide_model(norm, 2, 1.0, 1.0) for norm in ("pre", "span"))
    for (_, _, a), (_, _, b) in zip(pre.matrices(), span.matrices(), strict=True):
        assert torch.equal(a, b)
    assert isinstance(pre, Transformer)
