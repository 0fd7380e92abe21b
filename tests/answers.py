"""Reference answers to the exercises that tests/test_exercises.py checks. Try first, then read."""

import math
import statistics

import torch

from nanonorm import Block, visit

# ---- 1 ------------------------------------------------------------------------------------------


class B2T(Block):
    """Bottom-to-top connection (2206.00330): span with one shortcut more."""

    formula = "y = N(x + attn(x));  x ← N(ffn(y) + y + x)"
    paper = "2206.00330"
    norms = ("out", "out")
    gpas = ("shortcut", "shortcut")

    def forward(self, x, rope, c):
        x = self.attn.enter(x)
        y = self.attn.norm_out(self.attn.add(x, self.attn.f(x, rope)))
        y = self.ffn.enter(y)
        return self.ffn.norm_out(self.ffn.add(x + y, self.ffn.f(y, rope)))


class Keel(Block):
    """Post-LN with a shortcut as strong as the model is deep, and a norm for the branch."""

    formula = "x ← N(αx + f(N(x))), α = 2L"
    paper = "2601.19895"
    norms = ("in out", "in out")
    gpas = ("shortcut", "shortcut")

    @staticmethod
    def constants(config, l):
        return (2.0 * config.layers,), (2.0 * config.layers,)

    def rule(self, s, x, c, rope):
        return s.norm_out(s.add(x, s.f(s.norm_in(x), rope), scale=c[0]))


# ---- 2 ------------------------------------------------------------------------------------------


def faults(build):
    """The names of what is wrong with the DeepNorm that `build` makes."""
    found = set()
    for layers in (3, 6):  # a fixed number is right at one depth at most
        model = build(layers)
        for on_x, on_branch in factors(model):
            if abs(on_branch - 1) > 0.01:
                found.add("term")
            if abs(on_x * on_branch / (2 * layers) ** 0.25 - 1) > 0.01:
                found.add("alpha")
        for role, _, w in model.matrices():
            gain = w.std().item() / (2 / sum(w.shape)) ** 0.5
            if role in "qk" and abs(gain - 1) > 0.2:
                found.add("queries")
            if role in ("v", "o", "gate", "up", "down"):
                if abs(gain * (8 * layers) ** 0.25 - 1) > 0.2:
                    found.add("gain")
        gated = build(layers, gpas=True)
        for (_, _, w), (_, _, v) in zip(model.matrices(), gated.matrices(), strict=True):
            if abs(w.std() / v.std() - 1) > 0.2:
                found.add("gpas")
    return found


def factors(model):
    """[(factor on x, factor on f(x))] of attention and FFN in the first block, as measured."""
    ids = torch.arange(8)[None]
    sums, x = [], None

    def stream(l, y):
        nonlocal x
        x = y if l == 0 else x

    visit(model, ids, stream, lambda l, i, *seen: sums.append(seen))
    rope, _ = model.tables(8, x)
    measured = []
    first = model.blocks[0]
    for s, (shortcut, branch, y) in zip((first.attn, first.ffn), sums[:2], strict=True):
        with torch.no_grad():
            alone = s.f(x, rope)
            measured.append(((shortcut / x).median().item(), (branch / alone).median().item()))
            x = s.norm_out(y)
    return measured


# ---- 3 ------------------------------------------------------------------------------------------


def predict_variance(norm, L, start, attn, ffn):
    """The variance of the stream after each of the L blocks."""
    v, profile = start, []
    for l in range(1, L + 1):
        if norm == "pre":
            v += attn + ffn
        elif norm == "sandwich":
            v += 1 + 1
        elif norm == "lns":  # attention of one token is linear, SwiGLU is a product of two
            v += attn / l + ffn / l**2
        elif norm == "scaleres":
            for branch in (attn, ffn):
                v = (1 - 1 / L) ** 2 * v + branch / L**2
        else:  # post, span: a norm is the last thing that a block does
            v = 1.0
        profile.append(v)
    return profile


# ---- 4 ------------------------------------------------------------------------------------------


def compare(runs):
    """What the runs say of each norm at its own best learning rate."""
    table, result = {}, {}
    for r in runs:
        table.setdefault(r["norm"], {}).setdefault(r["lr"], {})[r["seed"]] = r["val_bpb"]
    best = {norm: best_rate(rates) for norm, rates in table.items()}
    alive = {
        norm: finite(rates[best[norm]]) if best[norm] is not None else {}
        for norm, rates in table.items()
    }
    for norm, rates in table.items():
        mine, pre = alive[norm], alive.get("pre", {})
        mean, se = mean_and_error([*mine.values()])
        ahead, ahead_se = mean_and_error([pre[seed] - mine[seed] for seed in mine if seed in pre])
        result[norm] = {
            "lr": best[norm],
            "edge": len(rates) > 1 and best[norm] in (min(rates), max(rates)),
            "diverged": sum(len(seeds) - len(finite(seeds)) for seeds in rates.values()),
            "mean": mean,
            "se": se,
            "ahead": ahead,
            "ahead_se": ahead_se,
        }
    return result


def finite(seeds):
    return {seed: v for seed, v in seeds.items() if math.isfinite(v)}


def best_rate(rates):
    """The rate at which the fewest seeds diverged, of those the one of lowest mean; or None."""
    lost = {lr: len(seeds) - len(finite(seeds)) for lr, seeds in rates.items()}
    alive = [lr for lr in rates if finite(rates[lr])]
    return min(
        alive,
        key=lambda lr: (lost[lr], statistics.mean(finite(rates[lr]).values())),
        default=None,
    )


def mean_and_error(values):
    if not values:
        return None, None
    se = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.mean(values), se


# ---- 5 ------------------------------------------------------------------------------------------


def break_scale_init():
    """At width 64 std 0.02 makes branches so weak that no depth is felt: make them 200 × larger."""
    return {"layers": 64, "dim": 64, "scale_init_constant": 200.0}


# ---- 6 ------------------------------------------------------------------------------------------

T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def verdict(differences, least):
    """Do paired differences over seeds say that there is an advantage?"""
    n = len(differences)
    if n < 2:
        return "too small to tell"
    mean, se = mean_and_error(differences)
    if mean - T95[n] * se > 0:
        return "holds"
    if mean + T95[n] * se < least:
        return "does not hold here"
    return "too small to tell"
