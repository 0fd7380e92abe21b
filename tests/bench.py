"""Speed and memory as ratios, each measured in one process: `python tests/bench.py [SECTION…]`.

Sections: default, variants, depth, memory, loss (all, if none is named). Prints a table and writes
data/results/bench.json with hardware, versions and commit. What is compared runs in turns, so that
a machine that slows down slows both; a ratio is the median over the rounds, with its range. Needs a
machine that does nothing else.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch._inductor.config  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from data.engine import memory_estimate  # noqa: E402
from data.settings import resolve  # noqa: E402
from nanonorm import VARIANTS, Config, Transformer  # noqa: E402
from train import optimizer_for  # noqa: E402

ROUNDS = 7


def batch_of(s):
    ids = torch.randint(0, s["vocab"], (s["batch"], s["block"] + 1)).to(s["device"])
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def stepper(model, opt, s):
    """A function that makes one update as train.py does: forward, backward, clip, AdamW."""
    ids, targets = batch_of(s)
    params = list(model.parameters())
    dtype, low = getattr(torch, s["dtype"]), s["dtype"] != "float32"
    autocast = torch.autocast(s["device"], dtype, enabled=low)

    def step():  # nothing in it makes the host wait for a GPU
        with autocast:
            loss = model(ids, targets)
        loss.backward()
        nn.utils.clip_grads_with_norm_(
            params, 1.0, nn.utils.get_total_norm([p.grad for p in params])
        )
        opt.step()
        opt.zero_grad(set_to_none=True)

    return step


def ours(s, compiled=False, **changes):
    """(model, stepper) of our model under the settings `s`."""
    torch.manual_seed(0)
    s = s | changes
    config = {f: s[f] for f in Config.__dataclass_fields__}
    model = Transformer(Config(**config | {"init": None, "embed_norm": None})).to(s["device"])
    model.checkpoint_activations = s["checkpoint_activations"]
    if compiled:
        model.compile_blocks()
    return model, stepper(model, optimizer_for(model, s), s)


def seconds(step, n):
    started = time.perf_counter()
    for _ in range(n):
        step()
    return (time.perf_counter() - started) / n


def in_turns(steps, rounds=ROUNDS, least=0.7):
    """[[seconds a step, one number a round] for each of `steps`], which take turns step by step."""
    for step in steps:
        step()
        step()
    n = max(1, round(least / seconds(steps[0], 2)))
    found = [[] for _ in steps]
    for _ in range(rounds):
        spent = [0.0 for _ in steps]
        for _ in range(n):
            for k, step in enumerate(steps):
                spent[k] += seconds(step, 1)
        for k, total in enumerate(spent):
            found[k].append(total / n)
    return found


def ratio(mine, theirs):
    """How many times as fast as theirs: {median, least, most} over the rounds."""
    r = [b / a for a, b in zip(mine, theirs, strict=True)]
    return {"ratio": round(statistics.median(r), 3), "least": round(min(r), 3),
            "most": round(max(r), 3), "seconds": statistics.median(mine)}  # fmt: skip


def tell(table, name, row):
    table[name] = row
    shown = "  ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
    )
    print(f"{name:<44} {shown}", flush=True)


# ---- The default run against a plain model, and against the machine's own matrix products --------


class PlainBlock(nn.Module):
    """Pre-LN as one writes it first: separate matrices, norm and rotation spelt out."""

    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(dim, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, dim, bias=False)
        self.gain1, self.gain2 = (nn.Parameter(torch.ones(dim)) for _ in range(2))

    def norm(self, x, gain):
        return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        h = self.norm(x, self.gain1)
        q, k, v = (
            f(h).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        h = self.norm(x, self.gain2)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Plain(nn.Module):
    """The same function as our Pre-LN model, written the plain way, with full logits."""

    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(PlainBlock(c.dim, c.heads, c.ffn) for _ in range(c.layers))
        self.gain = nn.Parameter(torch.ones(c.dim))
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        hs = c.dim // c.heads
        freq = c.rope_theta ** (-torch.arange(0, hs, 2).double() / hs)
        angle = torch.outer(torch.arange(c.block).double(), freq).repeat(1, 2)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def logits(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return self.head(self.blocks[0].norm(x, self.gain))

    def forward(self, ids, targets):
        return F.cross_entropy(self.logits(ids).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def fill(self, model):
        """Take the weights of our model, so that both compute the same."""
        own = model.to_llama()
        self.embed.weight.copy_(own["model.embed_tokens.weight"])
        self.head.weight.copy_(own["lm_head.weight"])
        self.gain.copy_(own["model.norm.weight"])
        for i, b in enumerate(self.blocks):
            for name in ("q", "k", "v", "o", "gate", "up", "down"):
                part = "self_attn" if name in "qkvo" else "mlp"
                w = own[f"model.layers.{i}.{part}.{name}_proj.weight"]
                getattr(b, name).weight.copy_(w)
            b.gain1.copy_(own[f"model.layers.{i}.input_layernorm.weight"])
            b.gain2.copy_(own[f"model.layers.{i}.post_attention_layernorm.weight"])
        return self


def matmul_seconds(s, c, rounds=ROUNDS):
    """The time that the matrix products of one update take alone, forward and both gradients."""
    n, dtype = s["batch"] * s["block"], getattr(torch, s["dtype"])
    shapes = [(c.dim, 3 * c.dim), (c.dim, c.dim), (c.dim, 2 * c.ffn), (c.ffn, c.dim)]
    jobs = [(shape, c.layers) for shape in shapes] + [((c.dim, c.vocab), 1)]
    flops, best = 0, []
    for (i, o), times in jobs:
        x, w, g = (torch.randn(*d).to(dtype) for d in ((n, i), (o, i), (n, o)))
        job = lambda x=x, w=w, g=g: (x @ w.T, g @ w, g.T @ x)
        job()
        k = max(3, round(0.05 / seconds(job, 3)))
        best.append(times * statistics.median(seconds(job, k) for _ in range(rounds)))
        flops += times * 6 * n * i * o
    return sum(best), flops


def default(table):
    s, config = resolve("tiny", {})
    model, step = ours(s)
    plain = Plain(config).fill(model)
    ids, targets = batch_of(s)
    torch.testing.assert_close(model(ids, targets), plain(ids, targets), rtol=1e-4, atol=1e-4)
    decay = [{"params": [p for p in plain.parameters() if (p.ndim >= 2) == big],
              "weight_decay": 0.1 * big} for big in (True, False)]  # fmt: skip
    opt = torch.optim.AdamW(decay, lr=s["lr"], betas=(s["beta1"], s["beta2"]), foreach=False)
    mine, theirs = in_turns([step, stepper(plain, opt, s)])
    tokens = s["batch"] * s["block"]
    products, flops = matmul_seconds(s, config)
    tell(table, "default run over a plain model (goal 1.3)",
         ratio(mine, theirs) | {"tokens_per_s": tokens / statistics.median(mine)})  # fmt: skip
    share = products / statistics.median(mine)
    # attention's own products are in the step's time but not among the products
    tell(table, "default run's share of the matmul rate (goal 0.35)",
         {"ratio": round(share, 3), "matmul_gflops": flops / products / 1e9})  # fmt: skip


# ---- Every variant against Pre-LN ----------------------------------------------------------------


def variants(table):
    s, _ = resolve("tiny", {})
    names = ["pre+gpas", *(n for n in VARIANTS if n != "pre"), "lns+gpas"]
    for compiled in (False, True):
        how = "compiled" if compiled else "eager"
        _, pre = ours(s, compiled)
        for name in names:
            # one of two kinds of block compiles as two graphs: the reset would drop Pre-LN's
            _, step = fresh_compiled(s, name) if compiled else ours(s, norm=name)
            mine, theirs = in_turns([step, pre])
            tell(table, f"{name} over pre, tiny, {how}", ratio(mine, theirs))
    for compiled in (False, True):
        short, _ = resolve("71m", {"batch": 1, "accum": 1, "block": 256})
        _, pre = ours(short, compiled)
        _, step = (
            ours(short, compiled, norm="gpas") if not compiled else fresh_compiled(short, "gpas")
        )
        mine, theirs = in_turns([step, pre])
        how = "compiled" if compiled else "eager"
        tell(table, f"pre+gpas over pre, 71m, 256 tokens, {how}", ratio(mine, theirs))
    tell(table, "activation memory that GPAS adds", {"bytes": gpas_memory(s)})


def fresh_compiled(s, name):
    """As `ours`, compiled without dropping the graphs of the model it is compared with."""
    model, step = ours(s, norm=name)
    for block in model.blocks:
        block.compile(dynamic=False)
    return model, step


def kept_bytes(model, ids, targets):
    """Bytes that autograd keeps for the backward, each storage once, weights left out."""
    kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(ids, targets)
    loss.backward()
    return sum(kept.values())


def gpas_memory(s):
    ids, targets = batch_of(s)
    pre, with_gates = ours(s)[0], ours(s, norm="gpas")[0]
    return kept_bytes(with_gates, ids, targets) - kept_bytes(pre, ids, targets)


# ---- Depth ---------------------------------------------------------------------------------------

NARROW = {"dim": 64, "heads": 2, "ffn": 176, "vocab": 2048, "block": 64, "batch": 8}
DEPTHS = (12, 32, 128, 512)


def depth(table, norms=("pre", "span+gpas")):
    s, _ = resolve("tiny", NARROW)
    torch._inductor.config.force_disable_caches = True  # each first step compiles anew
    _, step = ours(s, True, layers=2)
    step()  # the compiler's own start
    for norm in norms:
        first, steady = {}, {}
        for layers in DEPTHS:
            s["layers"] = layers
            _, step = ours(s, True, norm=norm)
            first[layers] = seconds(step, 1)
            step()
            n = 1 if layers > 128 else 4
            steady[layers] = statistics.median(seconds(step, n) for _ in range(ROUNDS))
            tell(table, f"{norm}, {layers} layers × 64, compiled",
                 {"first_step_s": first[layers], "step_s": steady[layers],
                  "ms_per_layer": 1e3 * steady[layers] / layers})  # fmt: skip
        tell(table, f"{norm}: first step at 512 over 32 (goal 1.2)",
             {"ratio": round(first[512] / first[32], 3)})  # fmt: skip
        per = [steady[n] / n for n in (128, 512)]
        tell(table, f"{norm}: time a layer at 512 over 128 (goal 0.9–1.1)",
             {"ratio": round(per[1] / per[0], 3)})  # fmt: skip
        _, eager = ours(s, False, norm=norm)
        mine, theirs = in_turns([step, eager], rounds=5, least=0.1)
        tell(table, f"{norm}: compiled over eager at 512 (goal 1.9)", ratio(mine, theirs))


# ---- Memory: peaks of processes of their own -----------------------------------------------------


def peak(s, plain=False):
    """Bytes that a later update adds to the memory of a process with torch loaded, at its peak."""
    code = f"""
import json, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import bench, torch
import torch.nn.functional as F
s = json.loads(sys.argv[1])
tiny, _ = bench.resolve("tiny", {{"layers": 1, "dim": 8, "heads": 1, "vocab": 257, "block": 8}})
bench.ours(tiny)[1]()
def status(key):
    with open("/proc/self/status", encoding="utf-8") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key))
with open("/proc/self/clear_refs", "w", encoding="utf-8") as f:
    f.write("5")  # forget the peak of loading torch
before = status("VmRSS")
model, _ = bench.ours(s)
if {plain}:
    def full(ids, targets):
        logits = model.head(model.norm(model.final_stream(ids))).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    model.forward = full
opt = bench.optimizer_for(model, s)
bench.stepper(model, opt, s | {{"batch": 1, "block": 8}})()  # the moments are there from here on
bench.stepper(model, opt, s)()
print((status("VmHWM") - before) * 1024)
"""
    out = subprocess.run([sys.executable, "-c", code, json.dumps(s)], capture_output=True,
                         check=True, encoding="utf-8")  # fmt: skip
    return int(out.stdout.split()[-1])


def memory(table):
    s, _ = resolve("tiny", NARROW | {"layers": 512})
    for batch in (32, 8):  # with few tokens weights and moments are most of it
        s["batch"] = batch
        kept, again = peak(s), peak(s | {"checkpoint_activations": True})
        row = {"ratio": round(again / kept, 3), "MiB": again / 2**20, "plain_MiB": kept / 2**20}
        name = f"activations recomputed, 512 layers, {64 * batch} tokens: peak (goal 0.35)"
        tell(table, name, row)
    for size, given in (
        ("tiny", {"layers": 8}),
        ("71m", {"batch": 16}),
        ("130m", {"batch": 8}),
        ("deep", {}),
    ):
        s, config = resolve(size, given | {"device": "cpu"})
        guess, found = memory_estimate(config, s), peak(s)
        tell(table, f"memory estimate over peak, {size} {given or ''} (goal 0.85–1.15)",
             {"ratio": round(guess / found, 3), "peak_MiB": found / 2**20})  # fmt: skip


def loss(table):
    s, _ = resolve("71m", {"batch": 64, "accum": 1, "device": "cpu"})
    s["checkpoint_activations"] = True  # else what the blocks keep is most of it
    mine, full = peak(s), peak(s, plain=True)
    row = {"ratio": round(mine / full, 3), "MiB": mine / 2**20, "plain_MiB": full / 2**20}
    tell(table, "loss in pieces, 71m, 16k tokens, recomputed: peak (goal 0.5)", row)


# ---- All of it -----------------------------------------------------------------------------------

SECTIONS = {
    "default": default,
    "variants": variants,
    "depth": depth,
    "memory": memory,
    "loss": loss,
}


def processor():
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    return platform.processor()


def where(hardware):
    """Commit, hardware and versions, for the record."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = ""
    with contextlib.suppress(OSError):  # no git
        commit = subprocess.run(git, capture_output=True, encoding="utf-8").stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"commit": commit, "hardware": hardware, "versions": versions}


def main(argv=None):
    torch._dynamo.config.recompile_limit = 64  # variants compared in one process
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="which to measure")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    here = where(f"{processor()}, {args.threads} threads")
    path = ROOT / "data" / "results" / "bench.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in args.sections or SECTIONS:
        print(f"\n{name}", flush=True)
        table, started = {}, time.perf_counter()
        SECTIONS[name](table)
        found[name] = here | {
            "command": f"python tests/bench.py {name}", "seed": 0,
            "minutes": round((time.perf_counter() - started) / 60, 1), "rounds": ROUNDS,
            "table": table,
        }  # fmt: skip
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
