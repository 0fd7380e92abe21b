"""Faults that users met in projects like this one, by the thread that reports them: each is
impossible here, and a test says so.

GUARDS names the test of each; those that no other theme covers are below. Faults that cannot occur:
tokens an update that do not divide (nanochat#532: they are batch × block × accum, by definition); a
loader that stops after the last shard or covers only the tail of an epoch (nanochat#360,
litgpt#1712: windows are drawn by (seed, step), there is no loader to exhaust); generation with a
cache that differs from one without (x-transformers#219: there is none); a hard-coded peak FLOP/s
(nanoGPT#182: tokens/s are shown, no MFU); a memory map that fills the RAM (nanoGPT#287: its pages
are the kernel's to drop).
"""

import ast
from pathlib import Path

import pytest
import torch
from conftest import SMALL, fresh, tiny

import train
from data import engine, settings
from nanonorm import Transformer

HERE = Path(__file__).parent
GUARDS = {
    "nanoGPT PR#29: a whole number for a float option": "train: whole_numbers_may_stand_for_floats",
    "recasepunc#8: --flag=false means true": "commands: any_command_line_is_refused_in_one_line",
    "fms-hf-tuning#420: a misspelt key in a file": "model: unknown_config_key_names_the_nearest",
    "x-transformers#202: a field that does nothing": "variants: no_setting_is_dead",
    "x-transformers#202: a flag that does nothing": "train: no_training_setting_is_dead",
    "GPAS, LNS: a misspelt variant trains": "model: unknown_norm_names_the_nearest_and_all",
    "nanoGPT#532: started from another folder": "environment: all_at_once",
    "nanoGPT PR#284: tokens an update go unsaid": "faults: tokens_of_an_update_are_said",
    "nanoGPT#84, pytorch PR#148322: bf16 where it is slow": "faults: bfloat16_only_where_fast",
    "nanoGPT PR#698: mps taken for cpu, with a scaler": "faults: a_scaler_only_for_float16_on_cuda",
    "nanoGPT#217: nonsense on mps": "faults: mps_gives_the_logits_of_the_cpu",
    "nanoGPT#635: warnings of an old API": "environment: all_at_once",
    "nanoGPT PR#242, pytorch#157458, nanoGPT#477, nanoGPT#326: no compiler":
        "train: compiling_without_a_compiler_is_refused_and_auto_does_without",
    "flame#47: gains stay at 1 under bf16": "model: norm_gains_move_in_mixed_precision",
    "nanoGPT#136: NaN overwrites the checkpoint": "train: a_divergence_leaves_the_last_good",
    "nanoGPT#137: the loss climbs, one cannot see why": "train: layers_has_a_row_for_every_probed",
    "litgpt PR#1720: fp16 on a CPU": "train: bad_input_is_one_line_and_nothing_is_written",
    "pytorch#114511, HeavyBall#16: one graph a layer": "model: one_graph_for_each_kind_of_block",
    "nanoGPT#325: _orig_mod. in the saved names": "faults: compiled_and_plain_runs_save_the_same",
    "nanoGPT#467, llm-foundry PR#1277: a resume repeats batches": "kill: killed_at_random_moments",
    "lightning#688: a kill while saving": "kill: killed_at_random_moments",
    "nanochat PR#432: Ctrl-C loses the run": "resume: ctrl_c_to_the_command_saves_and_exits_130",
    "nanoGPT PR#540: unsafe or failing load": "disk: a_malicious_pickle_does_nothing",
    "nanoGPT: flags ignored on resume": "resume: what_would_change_the_weights_is_refused",
    "nanoGPT#443: the first step has lr 0": "train: the_learning_rate_of_every_update",
    "nanochat PR#399: one update too many": "train: exactly_as_many_updates_as_asked_for",
    "nanoGPT#168: accumulation scales the gradient":
        "train: accumulation_gives_the_gradient_and_the_loss_of_one_large_batch",
    "nanochat#541: the evaluation depends on the batch size": "batches: the_mean_is_exact",
    "GaLore#77: divided by n + 1": "batches: a_constant_loss_comes_back_unchanged",
    "nanochat#844: a model that peeks": "variants: causal",
    "open_lm PR#77: ids wrap in 16 bits": "data: id_width_follows_the_vocabulary",
    "RWKV-PEFT#52: a text shorter than the context": "disk: a_text_too_short_leaves_nothing",
    "tiktoken#232: the network on first use": "environment: all_at_once",
    "nanoGPT#633: a download that has gone": "environment: all_at_once",
    "gpt-2 PR#28: the platform's encoding": "environment: all_at_once",
    "nanoGPT#738: temperature 0": "sample: top_k_1_is_greedy",
    "nanoGPT#434: a character not in the vocabulary": "faults: any_character_can_be_a_prompt",
    "build-nanogpt#80: an id that cannot be decoded":
        "sample: a_huge_temperature_draws_evenly_and_every_id_can_be_written",
    "litgpt#43: past the context": "sample: past_the_context_the_window_slides",
    "OLMo-core PR#698: meta init erases the scale": "variants: lns_factor_after_every_way_to_start",
    "labml#145: α on the wrong term": "variants: variant_is_its_formula",
    "xformers PR#284: β not for V": "inits: deepnorm_beta",
    "MixLN, LNS, GPAS: β inverted, or lost with GPAS": "inits: gpas_keeps_the_init_of_its_variant",
    "HybridNorm#2: the skip taken from the wrong place": "variants: variant_is_its_formula",
    "snowfall PR#184: a norm applied twice or never": "variants: number_of_norms",
    "annotated-transformer#1: text says post, code pre": "readme: variant_table_is_that_of",
    "gpt-neox PR#1408: one name for two things": "model: names_of_the_releases_are_not_ours",
    "pytorch#55270: a start that fails in deep post-norm": "probes: at_init_shows_what_each",
    "MixLN#1: a short warm-up, and no way to see it": "train: the_learning_rate_of_every_update",
}  # fmt: skip


@pytest.mark.parametrize("fault", GUARDS)
def test_the_guard_of_each_fault_exists(fault):
    file, start = GUARDS[fault].split(": ")
    tree = ast.parse((HERE / f"test_{file}.py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert any(name.startswith(f"test_{start}") for name in names), GUARDS[fault]


def test_tokens_of_an_update_are_said(fit, capsys):
    fit("--batch=3", "--accum=4", "--block=8", "--steps=1")
    assert "update   96 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("capability, dtype", [((7, 5), "float32"), ((8, 0), "bfloat16"),
                                               ((9, 0), "bfloat16")])  # fmt: skip
def test_bfloat16_only_where_fast(monkeypatch, capability, dtype):
    """By compute capability: is_bf16_supported() says yes to cards that only emulate it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    got, why = settings.pick_dtype("auto", "cuda", 512)
    assert got == dtype and "capability" in why


@pytest.mark.parametrize("device, dtype, scaled", [
    ("cpu", "bfloat16", False), ("mps", "float16", False), ("cuda", "bfloat16", False),
    ("cuda", "float32", False), ("cuda", "float16", True),
])  # fmt: skip
def test_a_scaler_only_for_float16_on_cuda(device, dtype, scaled, monkeypatch):
    made = []

    class Seen(Exception):
        pass

    def scaler(device, enabled):
        made.append(enabled)
        raise Seen

    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    monkeypatch.setattr(train, "optimizer_for", lambda model, s: None)
    s, config = settings.resolve("tiny", {"device": "cpu"})
    with pytest.raises(Seen):
        train.ready(s | {"device": device, "dtype": dtype}, fresh(config), engine.World(), None)
    assert made == [scaled]


def test_float32_by_default_on_mps():
    assert settings.pick_dtype("auto", "mps", 512)[0] == "float32"


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
def test_mps_gives_the_logits_of_the_cpu():
    config = tiny("lns+gpas")
    model, ids = fresh(config), torch.arange(16)[None]
    on_cpu = model(ids)
    torch.testing.assert_close(model.to("mps")(ids.to("mps")).cpu(), on_cpu, rtol=1e-3, atol=1e-3)


def test_compiled_and_plain_runs_save_the_same_names(fit, monkeypatch):
    def traced(self, compile_blocks=Transformer.compile_blocks):
        compile_blocks(self, backend="eager")

    monkeypatch.setattr(Transformer, "compile_blocks", traced)
    plain, compiled = fit("--steps=1"), fit("--steps=1", "--compile=on")
    assert plain.weights.keys() == compiled.weights.keys()
    for name, w in compiled.weights.items():
        torch.testing.assert_close(w, plain.weights[name], rtol=1e-3, atol=1e-3)


def test_any_character_can_be_a_prompt(fit, capsys):
    import sample

    run = fit("--steps=1")
    for prompt in ("Zebra#", "文", "\0", "\x1b[0m", "🙂" * 50, "e\u0301"):
        capsys.readouterr()
        assert sample.main([str(run.folder), "--tokens=2", "--prompt", prompt]) == 0
        assert capsys.readouterr().out.startswith(prompt)


def test_options_before_and_after_do_not_leak(place, capsys):
    """A run that failed leaves nothing that the next one sees."""
    assert train.main([*SMALL, "--norm=nothing"]) == 2
    assert settings.resolve("tiny", {})[0]["norm"] == "pre"
