"""The README says what the code does: prose beside code drifts unless a test holds them."""

import re
from pathlib import Path

import torch

import nanonorm
import train
from data import settings
from nanonorm import INITS, VARIANTS, Block, Config, Transformer

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def rows(header):
    """The rows, as lists of cells, of the table whose first heading is `header`."""
    lines = README.split(f"| {header} |", 1)[1].split("\n")[2:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            return table
        table.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return table


def test_two_commands_stand_in_the_marked_block():
    block = README.split("<!-- two commands -->")[1].split("<!-- end -->")[0]
    commands = [line.strip() for line in block.splitlines() if line.startswith("    ")]
    assert commands == [
        "pip install -e . && python train.py",
        'pip install -e ".[test]" && python -m pytest',
    ]


def test_variant_table_is_that_of_the_code():
    table = {row[0]: row[1:] for row in rows("`--norm`")}
    assert list(table) == [*VARIANTS, "NAME+gpas"]
    for name, variant in VARIANTS.items():
        formula, paper, _, init = table[name]
        assert (formula, paper, init) == (variant.formula, variant.paper, variant.init)


def test_init_table_is_that_of_the_code():
    table = {row[0]: row[1:] for row in rows("`--init`")}
    assert table == {name: [init.formula, init.paper] for name, init in INITS.items()}


def test_size_table_is_that_of_the_code():
    table = {row[0].split("`")[0]: row[1:] for row in rows("`--size`")}
    assert list(table) == list(settings.SIZES)
    for size, (shape, ffn, heads, params, updates, lr) in table.items():
        s, config = settings.resolve(size, {})
        with torch.device("meta"):
            n = Transformer(config).num_params()
        shown = f"{n / 1e9:.3f}B" if n > 1e9 else f"{n / 1e6:.1f}M"
        assert shape.split(",")[0] == f"{config.layers} × {config.dim}"
        assert (ffn, heads, params) == (str(config.ffn), str(config.heads), shown)
        tokens = s["batch"] * s["accum"] * s["block"]
        assert updates == f"{s['steps']:,} × {tokens:,}"
        assert float(lr) == s["lr"]


def test_every_flag_in_the_readme_exists():
    known = {settings.flag(name) for name in settings.TABLE} | {
        "--size",
        "--out",
        "--resume",
        "--help",
    }
    known |= {"--no-gpas-stop-gradient", "--prompt", "--tokens", "--nproc-per-node"}
    known |= {"--json", "--answer", "--variant"}  # of nanonorm.py and of the tests
    assert set(re.findall(r"--[a-z][a-z0-9-]*", README)) <= known


def test_the_toy_variant_of_the_readme_works(monkeypatch):
    code = next(c for c in re.findall(r"```python\n(.*?)```", README, re.S) if "class Out" in c)
    scope = {"Block": Block}
    exec(code, scope)
    monkeypatch.setitem(nanonorm.VARIANTS, "out", scope["Out"])
    for norm in ("out", "out+gpas"):
        torch.manual_seed(0)
        model = Transformer(Config(layers=2, dim=16, heads=2, vocab=32, block=8, norm=norm))
        x = torch.randn(2, 8, 16)
        rope, constants = model.tables(8, x)
        block = model.blocks[0]
        y = x + block.attn.norm_out(block.attn.f(x, rope))
        y = y + block.ffn.norm_out(block.ffn.f(y, rope))
        torch.testing.assert_close(block(x, rope, constants[0]), y)


def test_the_checkpoint_is_read_as_the_readme_says(tmp_path, monkeypatch):
    tiny = "--layers 1 --dim 8 --heads 2 --vocab 257 --block 8 --batch 2 --steps 2".split()
    assert train.main([*tiny, "--out", str(tmp_path / "runs" / "NAME")]) == 0
    code = next(c for c in re.findall(r"```python\n(.*?)```", README, re.S) if "torch.load" in c)
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(code, scope)
    assert scope["model"].num_params() > 0
