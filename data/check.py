"""`python nanonorm.py`: the table of variants; with flags, a look at one model before it is scaled.

`python nanonorm.py --norm span --layers 512 --dim 384` takes every flag of train.py and tells what
a training step of that model costs, what its blocks do at init and after some updates on the text,
and whether that looks sound. `--json` prints the same for a program.
"""

import argparse
import json
import math
import sys
import time

import torch

import nanonorm
from data.batches import get_batch, window_starts
from data.engine import memory_estimate
from data.prepare import Parser, load, one_line, open_streams, prepare
from data.runs import quiet
from data.settings import BLOCK_S, PRODUCT_S, add_flags, flag, given_flags, resolve
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

UPDATES, TOKENS, SECONDS = 20, 128, 40  # of the trial; its seconds decide how wide it can be
# Bounds of the signs, set on the core grid's models (24 blocks × 64, scale_init, lr 1e-3 to 1e-2),
# where the ends are known. After 20 updates the gradients of runs that then learned differed up to
# 249×; those that collapsed later: 198× and more, but for hybrid at 3e-3, which shows nothing yet.
# Deep blocks of learning Pre-LN, LNS and Peri-LN runs were within 0.06 % to 2 % of the identity.
UNEVEN = 1000  # gradients of two blocks that differ so many times
NEAR = 0.0005  # so near to the identity is a deep block, as a share,
IDLE = 0.25  # and so near the deeper half of the blocks together, if all of them agree
LARGE = 1000  # so many times the stream's variance grows from the first block to the last

# ---- The table of variants ----------------------------------------------------------------------


def table():
    """Print formula, paper and init of every variant, and what each does to a deep model."""
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
        variance, grad = nanonorm.at_init(name, layers)
        picks = [0, layers // 2 - 1, layers - 1]
        cells = ["".join(f"{t[i].item():>11.3g}" for i in picks) for t in (variance, grad)]
        print(f"{name:<12} {'':8}{cells[0]}   {'':13}{cells[1]}")


# ---- One model ----------------------------------------------------------------------------------


def flops(c, tokens):
    """Floating-point operations of the matrix products of one update of `tokens` tokens."""
    matrices = c.layers * (4 * c.dim**2 + 3 * c.dim * c.ffn) + c.vocab * c.dim
    attention = c.layers * c.dim * c.block  # q·k and p·v, over the causal half
    return 6 * (matrices + attention) * tokens


def shown_blocks(L):
    """The first, quarter, middle, three-quarter and last block of L, from 1."""
    return sorted({max(1, round(L * q)) for q in (0, 0.25, 0.5, 0.75, 1)})


def reduced(c):
    """(Config of the model to try, updates) such that the trial takes well under a minute.

    The depth is always the real one; the width shrinks first, then the number of updates.
    """
    widths = [c.dim, *(w for w in (256, 128, 64) if w < c.dim)]
    for dim in widths:
        update = c.layers * (BLOCK_S + PRODUCT_S * TOKENS * dim**2)
        if update * UPDATES <= SECONDS:
            break
    updates = min(UPDATES, max(1, int(SECONDS / update)))
    shape = c.to_dict() | {"vocab": min(c.vocab, 2048), "block": min(c.block, 32)}
    if dim < c.dim:
        heads = max(1, dim // 32)
        shape |= {"dim": dim, "heads": heads, "ffn": round(c.ffn * dim / c.dim / 8) * 8 or 8}
    return Config.from_dict(shape), updates


def look(model, ids, targets, blocks):
    """[{block, variance, grad_norm, ratio_attn, ratio_ffn, jacobian} of each shown block]."""
    model.zero_grad(set_to_none=True)
    model(ids, targets).backward()
    seen, xs = layer_table(model, ids), streams(model, ids)
    keep = ("variance", "grad_norm", "ratio_attn", "ratio_ffn")
    return [{"block": l} | {k: seen[k][l - 1] for k in keep}
            | {"jacobian": jacobian_distance(model, l, xs[l - 1][:1])} for l in blocks]  # fmt: skip


def trial(s, config):
    """(rows at init, rows after the updates, [loss of each], tried config) of a short training."""
    c, updates = reduced(config)
    ids = load(prepare(s["data"], c.vocab, block=c.block, log=quiet))[0]
    torch.manual_seed(s["seed"])
    model, blocks, batch = Transformer(c), shown_blocks(c.layers), max(1, TOKENS // c.block)
    opt = torch.optim.AdamW(model.parameters(), betas=(s["beta1"], s["beta2"]), fused=True)
    windows = lambda step: get_batch(
        ids, window_starts(s["seed"], step, batch, len(ids), c.block), c.block
    )
    start, losses = look(model, *windows(0), blocks), []
    for step in range(updates):
        model.zero_grad(set_to_none=True)
        loss = model(*windows(step))
        loss.backward()
        losses.append(loss.item())
        if not math.isfinite(losses[-1] + block_grad_norms(model).sum().item()):
            return start, [], losses, c
        if s["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), s["clip"])
        for group in opt.param_groups:
            group["lr"] = s["lr"] * min(1, (step + 1) / 5)
        opt.step()
    return start, look(model, *windows(updates), blocks), losses, c


def verdicts(start, after, L):
    """[(bad, why)] of the rows of `look` at init and after the trial; L is the number of blocks.

    Three signs, each with its number: gradients that differ, deep blocks that do nothing, a stream
    that grows. Not bad: the one verdict is that it is sound.
    """
    numbers = [v for r in (*start, *after) for v in r.values()]
    if not after or not all(map(math.isfinite, numbers)):
        return [(True, "the loss or a gradient is not finite within the first updates")]
    found = []
    for when, rows in (("at init", start), ("after the updates", after)):
        first, last = rows[0], rows[-1]
        low, high = sorted((first["grad_norm"], last["grad_norm"]))
        if high > UNEVEN * low and not found:
            times = f"{high / low:,.0f}×" if low else "without bound"
            how = ("the first blocks hardly learn: expect Post-LN-like collapse"
                   if first["grad_norm"] == low else "the last blocks hardly learn")  # fmt: skip
            found.append((True, f"gradients differ {times} between first and last block {when}: "
                                f"{how}"))  # fmt: skip
    deep = max(r["jacobian"] for r in after if r["block"] >= 0.75 * L)
    if deep < NEAR and deep * L / 2 < IDLE:
        found.append((True, f"deep blocks are within {deep:.2%} of the identity, the deeper half "
                            f"together within {deep * L / 2:.1%}: wasted depth"))  # fmt: skip
    growth = after[-1]["variance"] / max(after[0]["variance"], 1e-30)
    if growth > LARGE:
        found.append((True, f"the stream's variance grows {growth:,.0f}× from first to last block: "
                            "deep blocks will matter less and less"))  # fmt: skip
    return found or [(False, "sound: gradients reach every block, and deep blocks change the "
                             "stream")]  # fmt: skip


def report(s, config):
    """All that is told of a model, as a dict that JSON can hold."""
    started = time.perf_counter()
    start, after, losses, tried = trial(s, config)
    tokens = s["batch"] * s["accum"] * s["block"]
    with torch.device("meta"):
        model = Transformer(config)
    found = verdicts(start, after, config.layers)
    return {
        "norm": config.norm, "init": config.init, "layers": config.layers, "dim": config.dim,
        "parameters": model.num_params(),
        "parameters_without_embeddings": model.num_params(embeddings=False),
        "tokens_per_update": tokens, "memory_bytes": memory_estimate(config, s),
        "flop_per_update": flops(config, tokens),
        "tried": {"dim": tried.dim, "heads": tried.heads, "ffn": tried.ffn, "vocab": tried.vocab,
                  "block": tried.block, "reduced": tried.dim < config.dim,
                  "updates": len(losses), "lr": s["lr"], "data": s["data"], "seed": s["seed"]},
        "at_init": start, "after": after,
        "loss": losses,
        "bad": any(bad for bad, _ in found), "verdict": [why for _, why in found],
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def finite(x):
    """x with null, which JSON has, for numbers that it has not."""
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, list):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def as_text(d):
    """The report as a person reads it."""
    t = d["tried"]
    lines = [
        f"{d['norm']}, init {d['init']}, {d['layers']} blocks × {d['dim']}",
        f"parameters  {d['parameters']:,}; {d['parameters_without_embeddings']:,} without "
        "embedding and head",
        f"update      {d['tokens_per_update']:,} tokens, {d['flop_per_update'] / 1e12:,.3g} TFLOP, "
        f"about {d['memory_bytes'] / 2**30:,.2f} GiB at the peak",
        f"tried       {t['updates']} updates at lr {t['lr']:g}"
        + (f", at width {t['dim']}: the real one is too large to try" if t["reduced"] else "")
        + f" ({d['seconds']:.0f} s)", "",
    ]  # fmt: skip
    columns = ("variance", "grad_norm", "ratio_attn", "ratio_ffn", "jacobian")
    names = ("variance", "gradient", "attn/stream", "ffn/stream", "‖J−I‖/‖I‖")
    for what, rows in (("at init", d["at_init"]), (f"after {t['updates']}", d["after"])):
        lines.append(f"{what:<9} block " + "".join(f"{n:>13}" for n in names))
        lines += [f"{'':<9} {r['block']:>5} " + "".join(f"{r[c]:>13.3g}" for c in columns)
                  for r in rows]  # fmt: skip
    if d["loss"]:
        first, last = d["loss"][0], d["loss"][-1]
        lines.append(f"loss      {first:.3f} at the first update, {last:.3f} at the last, nats")
    return "\n".join([*lines, "", *(f"verdict   {why}" for why in d["verdict"])])


def main(argv=None):
    """The table of variants, or with flags a look at one model. Returns the exit code, 0 or 2."""
    open_streams()
    p = Parser(prog="nanonorm.py", description=__doc__, allow_abbrev=False,
               formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--json", action="store_true", help="print the look at a model as JSON")
    add_flags(p)
    try:
        args = p.parse_args(argv)
        given = given_flags(args)
        if not given and not args.size and not args.json:
            table()
            return 0
        if several := [k for k, v in given.items() if isinstance(v, list)]:
            raise ValueError(f"{flag(several[0])} takes one value here")
        s, config = resolve(args.size, {"compile": "off"} | given)
        d = report(s, config)
        print(json.dumps(finite(d), indent=1) if args.json else as_text(d))
        return 0
    except (ValueError, OSError) as e:
        print(f"nanonorm.py: error: {one_line(e)}", file=sys.stderr)
        return 2
