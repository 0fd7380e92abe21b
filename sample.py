"""Write text with a trained model: `python sample.py runs/NAME --prompt "Before we"`.

The text appears as it is made. Past the context the window slides: the model sees the last `block`
tokens. Exit codes: 0, 2 bad input (one line), 130 interrupted.
"""

import codecs
import os
import sys
from pathlib import Path

import torch

from data.prepare import Parser, one_line, open_streams, tokenizer
from data.runs import load_checkpoint
from data.settings import own_variant
from nanonorm import VARIANTS, Config, Transformer


def load_run(folder, norm=None):
    """(model in eval mode, tokenizer) of a run's folder or ckpt.pt. ValueError if unreadable.

    norm: FILE.py:CLASS, for a run with a variant of its author's own. The file that such a
    checkpoint names is not run unasked.
    """
    path = Path(folder)
    state = load_checkpoint(path / "ckpt.pt" if path.is_dir() else path)
    own = {"norm": own_variant(norm)} if norm else {}
    try:
        config = state["config"] | own
        known = ":" not in config["norm"] or config["norm"].removesuffix("+gpas") in VARIANTS
        model = Transformer(Config.from_dict(config)) if known else None
        if known:
            model.load_state_dict(state["model"])
    except (RuntimeError, KeyError, TypeError, ValueError):
        raise ValueError(f"the weights in {path} do not fit the config in it") from None
    if not known:
        raise ValueError(f"{path} has a variant of its author's own: --norm {config['norm']}")
    return model.eval(), tokenizer(model.config.vocab)


@torch.no_grad()
def generate(model, ids, tokens, temperature=0.8, top_k=50, seed=0):
    """Yield `tokens` further token ids after the list `ids` (at least one id).

    temperature 0: the likeliest token each time; top_k 0: all tokens may be drawn.
    """
    device = model.embed.weight.device
    rng = torch.Generator().manual_seed(seed)
    ids = list(ids)
    for _ in range(tokens):
        window = torch.tensor([ids[-model.config.block :]], device=device)
        logits = model(window)[0, -1].double().cpu()
        if not logits.isfinite().all():
            raise ValueError("the model's weights have diverged: its logits are not finite")
        if top_k:
            kept, where = logits.topk(min(top_k, len(logits)))
        else:
            kept, where = logits, torch.arange(len(logits))
        if temperature == 0:
            pick = kept.argmax()
        else:
            # the largest is taken off first: a tiny temperature cannot overflow
            p = ((kept - kept.max()) / temperature).softmax(-1)
            pick = torch.multinomial(p, 1, generator=rng)[0]
        ids.append(where[pick].item())
        yield ids[-1]


def stream_text(model, encoding, prompt="", **options):
    """Yield the text after `prompt` piece by piece; a character cut between tokens is held back."""
    start = [encoding.eot_token, *encoding.encode_ordinary(prompt)]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in generate(model, start, **options):
        if i == encoding.eot_token:
            yield decoder.decode(b"", final=True) + "\n\n"
        else:
            yield decoder.decode(encoding.decode_single_token_bytes(i))
    yield decoder.decode(b"", final=True)


def sample_run(folder, prompt="", **options):
    """The text that the model of a run's folder writes after `prompt`, in one piece."""
    model, encoding = load_run(folder)
    return "".join(stream_text(model, encoding, prompt, **options))


def parse(argv):
    p = Parser(prog="sample.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("run", help="the folder of a run, such as runs/NAME, or a ckpt.pt")
    p.add_argument("--prompt", default="", help="text to go on from (default: none)")
    p.add_argument("--tokens", type=int, default=200, help="how many tokens to write (200)")
    p.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (0.8)")
    p.add_argument("--top-k", type=int, default=50, help="draw from the k likeliest; 0 is off (50)")
    p.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    p.add_argument("--norm", metavar="FILE.py:CLASS", help="the run's variant, if it is your own")
    args = p.parse_args(argv)
    if args.tokens < 0 or args.top_k < 0 or not 0 <= args.seed < 2**63:
        raise ValueError("--tokens, --top-k and --seed must be at least 0")
    if not 0 <= args.temperature < float("inf"):
        raise ValueError("--temperature must be at least 0 and finite")
    return args


def as_utf8(text):
    """An argument read as UTF-8, which Python does not do in a plain C locale."""
    try:
        return os.fsencode(text).decode("utf-8", "replace")
    except UnicodeEncodeError:  # it does not come from a command line
        return text


def main(argv=None):
    """The command. Returns the exit code."""
    open_streams()
    try:
        args = parse(argv)
        args.prompt = as_utf8(args.prompt)
        model, encoding = load_run(args.run, args.norm)
    except (ValueError, OSError) as e:
        print(f"sample.py: error: {one_line(e)}", file=sys.stderr)
        return 2
    options = {k: getattr(args, k) for k in ("tokens", "temperature", "top_k", "seed")}
    if hasattr(sys.stdout, "reconfigure"):  # any character can come, whatever the locale
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        print(args.prompt, end="", flush=True)
        for piece in stream_text(model, encoding, args.prompt, **options):
            print(piece, end="", flush=True)
        print()
    except BrokenPipeError:  # the reader (head, less) has gone: not a fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as e:
        print(f"\nsample.py: error: {one_line(e)}", file=sys.stderr)
        if isinstance(e, OSError):  # what could not be written must not be tried again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
