"""What carries a run: one process or several of torchrun's, replicated (DDP) or sharded (FSDP2).

The engines are PyTorch's own. The samples of an update are shared out among the processes, so that
their number changes neither what is learned nor any setting.
"""

import math
import os
import platform
import signal
import sys
from contextlib import contextmanager, nullcontext, suppress

import torch
import torch.distributed as dist

from data.fast import LOGITS
from data.runs import say
from data.settings import idle_settings


class World:
    """The processes of a run: those that torchrun started, else this one alone."""

    def __init__(self):
        self.launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()
        env = os.environ if self.launched else {}
        self.rank, self.size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        self.local = int(env.get("LOCAL_RANK", 0))
        self.chief = self.rank == 0  # the one that writes
        self.run = self.device = self.held = None  # held: the lock of the run's folder
        if not self.chief:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")

    def open(self, s):
        """Join the others. ValueError if these settings cannot be shared."""
        device = s["device"]
        if s["shard"] and not self.launched:
            raise ValueError("--shard needs torchrun: torchrun --nproc-per-node N train.py --shard")
        self.shares(s["batch"], s["accum"])
        self.device = torch.device(device, self.local) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")  # TF32, for what autocast leaves in float32
        if s["cuda_graph"] and (device != "cuda" or s["dtype"] == "float16" or self.launched):
            raise ValueError("--cuda-graph is for one process on a CUDA device, not in float16")
        if self.launched:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")

    def close(self):
        if self.held:
            self.held.close()
        if dist.is_initialized():
            self.run = None  # DDP holds the group: freed after it, it can wait for ever
            dist.destroy_process_group()

    def wait(self):
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def shares(self, batch, accum):
        """[slice of an update's samples for each forward of this process].

        Whole forwards are shared out if their number divides, else each is cut into pieces.
        ValueError if neither divides.
        """
        if accum % self.size == 0:
            n, first, step, count = batch, self.rank * accum // self.size, 1, accum // self.size
        elif batch % self.size == 0:
            n, first, step, count = batch // self.size, self.rank, self.size, accum
        else:
            raise ValueError(f"--batch {batch} × --accum {accum} cannot be shared by {self.size} "
                             f"processes: make one a multiple of {self.size}")  # fmt: skip
        return [slice(n * (first + step * i), n * (first + step * i + 1)) for i in range(count)]

    def wrap(self, model, shard):
        """Make `self.run`, to be called in the model's place, and put the model to work."""
        self.sharded, self.run = shard, model
        if shard:
            from torch.distributed.fsdp import fully_shard  # takes a second to load

            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        elif self.size > 1:
            ids = [self.local] if self.device.type == "cuda" else None
            self.run = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def forward_of(self, last):
        """A context for each forward of an update: only the last one exchanges gradients."""
        if self.sharded:
            self.run.set_requires_gradient_sync(last)
        elif self.size > 1 and not last:
            return self.run.no_sync()
        return nullcontext()

    def any(self, asked):
        """Is it so in any of the processes?"""
        if self.size == 1:
            return asked
        x = torch.tensor(float(asked), device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return bool(x.item())

    def mean(self, x):
        """The mean of a tensor over the processes."""
        if self.size > 1:
            dist.all_reduce(x)
            x = x / self.size
        return x


@contextmanager
def ended_as_by_ctrl_c():
    """SIGTERM raises KeyboardInterrupt too, so that what is half made is cleared away."""
    old = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
    for sig in old:
        signal.signal(sig, signal.default_int_handler)
    try:
        yield
    finally:
        for sig, handler in old.items():
            signal.signal(sig, handler)


class Interrupts:
    """The first SIGINT, SIGTERM or SIGHUP ends the loop after its step; a second ends all."""

    pressed = False  # in any run of this process so far: a grid stops after that run

    def __enter__(self):
        self.asked = False
        signals = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)  # the terminal is closed, and nohup was not asked for
        self.old = {sig: signal.signal(sig, self.ask) for sig in signals}
        return self

    def ask(self, *_):
        Interrupts.pressed = True
        if self.asked:
            os._exit(130)  # files are replaced as a whole: none can be left half written
        self.asked = True
        with suppress(OSError):  # the reader may have gone with the same key
            print("\nstopping after this step (once more: at once)", file=sys.stderr, flush=True)

    def __exit__(self, *_):
        for sig, handler in self.old.items():
            signal.signal(sig, handler)


class Captured:
    """Forward and backward of one batch as a CUDA graph: one launch instead of thousands.

    It adds to the gradients that are there, as the eager way does; so they must stay the same
    tensors: set to zero, never dropped.
    """

    def __init__(self, forward_backward, params, *batch):
        self.batch = [x.clone() for x in batch]
        for p in params:
            p.grad = torch.zeros_like(p)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is made at the first calls only must not be captured
            for _ in range(3):
                forward_backward(*self.batch)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = forward_backward(*self.batch)
        for p in params:
            p.grad.zero_()

    def __call__(self, *batch):
        for mine, given in zip(self.batch, batch, strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.loss.clone()


def to(device, x):
    """A batch on the device; a GPU goes on working while it is copied."""
    if x.device.type == device.type:
        return x
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def sharded(x):
    """Is it a DTensor, whose parts lie in several processes?"""
    return hasattr(x, "full_tensor")


def whole(x):
    """Nested dicts and lists with every sharded tensor put together; all processes must call."""
    if sharded(x):
        return x.full_tensor()
    if isinstance(x, dict):
        return {k: whole(v) for k, v in x.items()}
    return [whole(v) for v in x] if isinstance(x, list) else x


def placed_moments(of, optimizer):
    """{index: moments} of a checkpoint, sharded as the optimizer's parameters are.

    ValueError unless they fit these parameters.
    """
    params = sum((group["params"] for group in optimizer.param_groups), [])
    if of.keys() != set(range(len(params))):
        raise ValueError("other parameters")
    placed = dict(of)
    for i, p in enumerate(params):
        want = {"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape}
        right = {k: v.shape for k, v in of[i].items()} == want
        if not right or any(v.dtype != torch.float32 for v in of[i].values()):
            raise ValueError("other shapes")
        if sharded(p):
            from torch.distributed.tensor import distribute_tensor

            placed[i] = {k: distribute_tensor(v, p.device_mesh, p.placements) if v.ndim else v
                         for k, v in of[i].items()}  # fmt: skip
    return placed


def memory_estimate(c, s):
    """Bytes that training takes at its peak, besides torch itself.

    Weights and Adam's moments, 12 a parameter; what the forward keeps, which the gradients replace
    as the backward frees it, whichever is more; the piece of logits, and the head's gradient twice.
    A block keeps a token's 11 C + 4 F numbers: the stream and its norm twice, q, k, v, q and k
    rotated, attention's output twice, and in the FFN gate, up, silu(gate) and their product.
    """
    n, wide = s["batch"] * s["block"], 4 if s["dtype"] == "float32" else 2
    weights = c.layers * (4 * c.dim**2 + 3 * c.dim * c.ffn) + 2 * c.vocab * c.dim
    block = n * (4 * 4 * c.dim + wide * (7 * c.dim + 4 * c.ffn))
    kept = n * 4 * c.dim * c.layers + block if s["checkpoint_activations"] else block * c.layers
    head = 2 * 4 * min(n * c.vocab, LOGITS) + 2 * 4 * c.vocab * c.dim
    modules = 2**15 * c.layers + 16 * s["batch"] * s["accum"]  # on the host: blocks, windows
    return 12 * weights + max(4 * weights, kept) + head + modules


def memory_of(device):
    """Bytes of memory that the device has; infinite where that cannot be asked."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def describe(model, s, meta, world):
    """Say what is about to run, and why so."""
    if idle := idle_settings(s, model.config):
        say(f"note     no effect with {s['norm']}, init {s['init']}: {', '.join(idle)}")
    per_step = s["batch"] * s["accum"] * s["block"]
    passes = s["steps"] * per_step / meta["train_tokens"]
    memory = memory_estimate(model.config, s)
    name = torch.cuda.get_device_name() if s["device"] == "cuda" else platform.machine()
    several = f" × {world.size} processes{', sharded' * s['shard']}" if world.launched else ""
    say(f"""device   {s["device"]} ({name}, {torch.get_num_threads()} threads){several}
dtype    float32 parameters, {s["dtype"]} matrix products: {s["dtype_why"]}
compile  {s["compile"]}: {s["compile_why"]}
data     {meta["name"]}: {meta["train_tokens"]:,} training tokens, {meta["val_tokens"]:,} held out
model    {s["norm"]}, {s["layers"]} blocks × {s["dim"]}, vocabulary {s["vocab"]:,}, init {s["init"]}
params   {model.num_params():,}; {model.num_params(embeddings=False):,} without embedding and head
update   {per_step:,} tokens ({s["batch"]} × block {s["block"]} × accum {s["accum"]})
steps    {s["steps"]:,}, {passes:.1f} passes over the text
memory   about {memory / 2**20:,.0f} MiB at the peak""")  # fmt: skip
