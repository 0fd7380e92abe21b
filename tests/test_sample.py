"""What sample.py promises: greedy at 0, seeds, streaming, a window that slides, one-line faults."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import Run, fresh, scramble, tiny

import sample
from data.prepare import tokenizer
from nanonorm import Config, Transformer
from sample import generate, load_run, sample_run, stream_text

EOT = 256  # of a vocabulary of 257, whose other ids are the single bytes


@pytest.fixture(scope="module")
def model():
    """Untrained, with logits far enough apart that greedy has no ties."""
    return scramble(fresh(tiny(norm="gpas", layers=2, vocab=257, block=12))).eval()


class Scripted(Transformer):
    """A model that is sure of the next id: the one that the script has there."""

    def __init__(self, script):
        super().__init__(Config(layers=1, dim=4, heads=1, ffn=1, vocab=257, block=8))
        self.script, self.calls, self.longest = script, 0, 0

    def forward(self, ids, targets=None):
        logits = torch.zeros(*ids.shape, 257)
        logits[0, -1, self.script[self.calls]] = 100.0
        self.calls, self.longest = self.calls + 1, max(self.longest, ids.shape[1])
        return logits


def ids_of(text):
    return tokenizer(257).encode_ordinary(text)


def written(script, tokens=None, prompt=""):
    """The pieces that come out for the ids of a script."""
    tokens = len(script) if tokens is None else tokens
    return [*stream_text(Scripted(script), tokenizer(257), prompt, tokens=tokens)]


# ---- Which ids ----------------------------------------------------------------------------------


@torch.no_grad()
def greedy(model, ids, tokens):
    """The likeliest id each time, from the last `block` ids."""
    ids = list(ids)
    for _ in range(tokens):
        ids.append(model(torch.tensor([ids[-model.config.block :]]))[0, -1].argmax().item())
    return ids[-tokens:]


@pytest.mark.parametrize("seed", [0, 1])
def test_temperature_0_is_greedy_whatever_the_seed(model, seed):
    want = greedy(model, [EOT, 5], 30)
    assert [*generate(model, [EOT, 5], 30, temperature=0, seed=seed)] == want
    assert len(set(want)) > 3


@pytest.mark.parametrize("temperature", [0.8, 1e9])
def test_top_k_1_is_greedy(model, temperature):
    want = greedy(model, [EOT], 30)
    assert [*generate(model, [EOT], 30, temperature=temperature, top_k=1)] == want


def test_a_tiny_temperature_is_greedy_and_does_not_overflow(model):
    for temperature in (1e-3, 1e-30, 1e-320):
        got = [*generate(model, [EOT], 10, temperature=temperature, top_k=0)]
        assert got == greedy(model, [EOT], 10)


def test_the_same_seed_gives_the_same_ids_and_another_seed_others(model):
    torch.manual_seed(1)
    one = [*generate(model, [EOT], 40, seed=7)]
    torch.manual_seed(2)
    assert [*generate(model, [EOT], 40, seed=7)] == one
    assert [*generate(model, [EOT], 40, seed=8)] != one


def test_sampling_does_not_touch_the_global_generator(model):
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    list(generate(model, [EOT], 5))
    assert torch.equal(torch.rand(1), want)


@pytest.mark.parametrize("top_k", [0, 3, 400])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
@torch.no_grad()
def test_ids_are_drawn_with_their_probabilities(model, top_k, temperature):
    """softmax(logits / temperature) over the k likeliest: 300 first draws, within 5 deviations."""
    logits = model(torch.tensor([[EOT]]))[0, -1].double()
    if 0 < top_k < 257:
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    p = (logits / temperature).softmax(-1)
    n, counts = 300, torch.zeros(257)
    for seed in range(n):
        counts[next(generate(model, [EOT], 1, temperature, top_k, seed))] += 1
    deviation = (n * p * (1 - p)).sqrt()
    assert ((counts - n * p).abs() <= 5 * deviation + 1).all()
    assert (counts[p == 0] == 0).all()


@pytest.mark.parametrize("top_k", [257, 258, 10_000])
def test_a_top_k_of_all_or_more_is_allowed(model, top_k):
    assert len([*generate(model, [EOT], 5, top_k=top_k)]) == 5


@pytest.mark.parametrize("temperature", [1e9, 1e300])
def test_a_huge_temperature_draws_evenly_and_every_id_can_be_written(model, temperature):
    got = [*generate(model, [EOT], 400, temperature=temperature, top_k=0)]
    assert len(set(got)) > 160 and all(0 <= i < 257 for i in got)
    encoding = tokenizer(257)
    assert all(encoding.decode_single_token_bytes(i) or i == EOT for i in got)
    text = "".join(stream_text(model, encoding, tokens=50, temperature=temperature, top_k=0))
    assert len(text) > 0


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_exactly_as_many_tokens_as_asked_for(model, tokens):
    assert len([*generate(model, [EOT], tokens)]) == tokens


@pytest.mark.parametrize("start", [1, 11, 12, 13, 40])
def test_past_the_context_the_window_slides(model, start):
    """Ten contexts of tokens, from prompts shorter and longer than one; the edge is at 12."""
    first = [EOT, *range(1, start)]
    assert [*generate(model, first, 120, temperature=0)] == greedy(model, first, 120)


def test_the_model_never_sees_more_than_its_context_and_all_of_it():
    model = Scripted([65] * 30)
    list(generate(model, [EOT], 30))
    assert model.longest == 8
    seen = []
    forward = model.forward
    model.calls, model.forward = 0, lambda ids: seen.append(ids[0].tolist()) or forward(ids)
    list(generate(model, [1, 2, 3], 7))
    assert seen == [([1, 2, 3] + [65] * i)[-8:] for i in range(7)]


def test_the_list_of_ids_given_is_left_as_it_is(model):
    ids = [EOT, 3]
    list(generate(model, ids, 5))
    assert ids == [EOT, 3]


def test_a_loaded_model_samples_without_gradients_and_can_be_trained_after(fit):
    run = fit("--steps=1")
    model, encoding = load_run(run.folder)
    list(generate(model, [EOT], 3))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()
    assert encoding.n_vocab == 257


# ---- Text ---------------------------------------------------------------------------------------


def test_pieces_come_one_by_one():
    model = Scripted(ids_of("abcdef"))
    stream = stream_text(model, tokenizer(257), "", tokens=6)
    for calls, letter in enumerate("abcdef", 1):
        assert next(stream) == letter
        assert model.calls == calls


def test_the_pieces_are_the_text_of_all_ids(model):
    encoding = tokenizer(257)
    for seed in range(2):
        ids = [*generate(model, [EOT, *ids_of("To")], 150, seed=seed, top_k=0)]
        data = b"".join(b"\n\n" if i == EOT else bytes(encoding.decode_bytes([i])) for i in ids)
        text = "".join(stream_text(model, encoding, "To", tokens=150, seed=seed, top_k=0))
        assert text == data.decode("utf-8", "replace")


def test_a_character_cut_between_tokens_is_not_garbled():
    text = "é€😀 naïve ü"
    assert len(ids_of(text)) == len(text.encode()) > len(text)
    pieces = written(ids_of(text))
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == [*text]


def test_a_character_that_stays_unfinished_is_marked_once_and_does_no_harm():
    assert "".join(written(ids_of("a€"), tokens=3)) == "a\ufffd"
    assert "".join(written([0xE2, EOT, *ids_of("b")])[:3]).count("\ufffd") <= 1
    script = ids_of("€")[:2] + [EOT] + ids_of("b")
    assert "".join(written(script)) == "\ufffd\n\nb"


def test_after_a_separator_a_new_document_begins():
    assert "".join(written([*ids_of("a"), EOT, *ids_of("b")])) == "a\n\nb"


def test_an_empty_prompt_starts_a_document_and_a_prompt_follows_its_start():
    """As in the training text, where the separator stands before each document."""
    for prompt in ("", "Hé", "<|endoftext|>"):
        model, seen = Scripted([65] * 3), []
        forward = model.forward
        model.forward = lambda ids, seen=seen, forward=forward: seen.append(ids) or forward(ids)
        assert "".join(stream_text(model, tokenizer(257), prompt, tokens=1)) == chr(65 + 33)
        assert seen[0][0].tolist() == [EOT, *ids_of(prompt)][-8:]


# ---- The command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(fit):
    return fit("--norm=gpas", "--steps=12")


def command(capsys, *argv):
    """(exit code, stdout, stderr)"""
    code = sample.main([str(a) for a in argv])
    return code, *capsys.readouterr()


def test_the_command_writes_prompt_and_text(run, capsys):
    folder = run.folder
    code, out, err = command(capsys, folder, "--prompt", "line é", "--tokens=30", "--seed=4")
    assert (code, err) == (0, "")
    assert out == "line é" + sample_run(folder, "line é", tokens=30, seed=4) + "\n"
    assert (
        command(capsys, folder / "ckpt.pt", "--prompt=line é", "--tokens=30", "--seed=4")[1] == out
    )


@pytest.mark.parametrize(
    "flags",
    [["--seed=1"], ["--temperature=0"], ["--top-k=2"], ["--tokens=31"], ["--prompt=x"]],
    ids=str,
)
def test_no_flag_is_dead(run, capsys, flags):
    base = command(capsys, run.folder, "--tokens=30")
    other = command(capsys, run.folder, "--tokens=30", *flags)
    assert base[0] == other[0] == 0
    assert base[1] != other[1]
    assert command(capsys, run.folder, "--tokens=30") == base


def test_no_tokens_leave_the_prompt(run, capsys):
    assert command(capsys, run.folder, "--prompt=abc", "--tokens=0") == (0, "abc\n", "")


def test_text_appears_as_it_is_made(run, capsys):
    """At each forward pass, all that was made before it has been written."""
    seen = []

    def look(module, args):
        if isinstance(module, Transformer):
            seen.append(capsys.readouterr().out)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        sample.main([str(run.folder), "--tokens=12", "--prompt=abc", "--temperature=0"])
    finally:
        handle.remove()
    assert seen[0] == "abc" and len(seen) == 12
    assert sum(map(bool, seen[1:])) >= 5


def test_the_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as e:
        sample.main(["--help"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    for flag in ("--prompt", "--tokens", "--temperature", "--top-k", "--seed"):
        assert re.search(rf"^  {flag} \S+\s+[a-z0-9]", out, re.M), flag


BAD = [
    ("{run}/nothing", "nothing"),
    ("{tmp}", "ckpt.pt"),
    ("{tmp}/hello.txt", "hello.txt"),
    ("{tmp}/short.pt", "short.pt"),
    ("{tmp}/flipped.pt", "flipped.pt"),
    ("{tmp}/empty.pt", "empty.pt"),
    ("{tmp}/other.pt", "other.pt"),
    ("", "run"),
    ("{run} extra", "extra"),
    ("{run} --tokens=-1", "--tokens"),
    ("{run} --tokens=many", "--tokens"),
    ("{run} --tokens=1.5", "--tokens"),
    ("{run} --temperature=nan", "--temperature"),
    ("{run} --temperature=inf", "--temperature"),
    ("{run} --temperature=-1", "--temperature"),
    ("{run} --temperature=warm", "--temperature"),
    ("{run} --top-k=-1", "--top-k"),
    ("{run} --top-k=2.5", "--top-k"),
    ("{run} --seed=-1", "--seed"),
    ("{run} --seed=99999999999999999999", "--seed"),
    ("{run} --temp=1", "--temp"),
    ("{run} --prompt", "--prompt"),
]


@pytest.mark.parametrize("given, word", BAD, ids=[given for given, _ in BAD])
def test_bad_input_is_one_line(run, tmp_path, given, word, capsys):
    data = (run.folder / "ckpt.pt").read_bytes()
    (tmp_path / "hello.txt").write_text("hello\n", encoding="utf-8")
    (tmp_path / "short.pt").write_bytes(data[: len(data) // 2])
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    (tmp_path / "flipped.pt").write_bytes(flipped)
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    argv = given.format(run=run.folder, tmp=tmp_path).split()
    code, out, err = command(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("sample.py: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert word in err and "Traceback" not in err


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "made-by-the-checkpoint"), "w")

    torch.save({"format": 1, "model": Evil()}, tmp_path / "ckpt.pt")
    assert command(capsys, tmp_path)[0] == 2
    assert not (tmp_path / "made-by-the-checkpoint").exists()


def test_a_damaged_checkpoint_is_refused_with_the_one_before_it_named(run, tmp_path, capsys):
    shutil.copy(run.folder / "ckpt.pt", tmp_path / "ckpt.prev.pt")
    (tmp_path / "ckpt.pt").write_bytes(b"half")
    code, _, err = command(capsys, tmp_path)
    assert code == 2 and "ckpt.prev.pt" in err
    assert command(capsys, tmp_path / "ckpt.prev.pt", "--tokens=3")[0] == 0


def test_ctrl_c_while_it_writes_ends_with_130(run, monkeypatch, capsys):
    def interrupted(self, ids, targets=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(Transformer, "forward", interrupted)
    assert command(capsys, run.folder)[0] == 130


def test_a_reader_that_goes_away_leaves_no_traceback(run, checkout, tmp_path):
    """`python sample.py … | head -c 5`, which also shows that the text comes before the end.

    From another folder, on a stream of plain ASCII, with a prompt that is no valid UTF-8.
    """
    argv = [sys.executable, checkout / "sample.py", run.folder, "--prompt", b"na\xc3\xafve \xff"]
    p = subprocess.Popen(
        [*argv, "--tokens=1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
    )
    try:
        assert p.stdout.read(5) == "naïv".encode()
        assert len(p.stdout.read(100)) == 100
        assert p.poll() is None
        p.stdout.close()
        p.stdout = None
        _, err = p.communicate(timeout=60)
    finally:
        p.kill()
    assert err.decode() == ""


def test_loading_gives_the_saved_weights_in_eval_mode(run):
    model, _ = load_run(run.folder)
    for name, w in Run(run.folder).weights.items():
        assert torch.equal(model.state_dict()[name], w)
    assert not model.training
