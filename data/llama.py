"""Hugging Face's names for the weights, and a model folded into a plain LLaMA."""

import math

import torch


class LlamaNames:
    """The part of nanonorm.Transformer that reads and writes Hugging Face's state dicts."""

    def llama_tensors(self, of=lambda p: p.data):
        """{Hugging Face name: view of the tensor}; ValueError naming the tensor that has none."""
        if self.config.norm_kind != "rms":
            raise ValueError("norm.gain: LLaMA has RMSNorm only, this model has LayerNorm")
        names = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
        names |= {r: f"self_attn.{r}_proj" for r in "qkvo"}
        out = {"model.embed_tokens.weight": of(self.embed.weight)}
        for role, l, w in self.matrices(of):
            out[f"model.layers.{l - 1}.{names[role]}.weight" if l else "lm_head.weight"] = w
        small = {"model.norm.weight": self.norm.gain}
        for i, (block, alphas) in enumerate(zip(self.blocks, self.gates(), strict=True)):
            attn, ffn, pre = block.attn.norms(), block.ffn.norms(), f"model.layers.{i}."
            # the four norms of Gemma-2; with three or fewer, LLaMA's names
            ffn_in = "pre_feedforward" if "out" in attn else "post_attention"
            rows = ((attn, "in", "input"), (attn, "out", "post_attention"), (ffn, "in", ffn_in))
            for s, slot, name in (*rows, (ffn, "out", "post_feedforward")):
                if slot in s:
                    small[f"{pre}{name}_layernorm.weight"] = s[slot].gain
            if len(alphas) == 1:
                small[f"{pre}gpas_block.gate"] = alphas[0]
        known = {id(p) for p in small.values()}
        for name, p in self.named_parameters():
            if id(p) not in known and p.ndim < 2:
                raise ValueError(f"{name} has no Hugging Face name (norm {self.config.norm})")
        return out | {k: of(p).view(()) if "gpas" in k else of(p) for k, p in small.items()}

    def to_llama(self):
        """State dict (copies) under Hugging Face's LLaMA / Gemma-2 names. ValueError if none fit.

        LNS keeps its 1/√l and GPAS its gates: for a plain LLaMA take `fold(model).to_llama()`.
        """
        return {name: t.clone() for name, t in self.llama_tensors().items()}

    @torch.no_grad()
    def load_llama(self, state_dict):
        """Fill the weights from Hugging Face names; ValueError names a tensor that does not fit.

        Nothing is changed unless every tensor fits.
        """
        own = self.llama_tensors()
        given = {k: v for k, v in state_dict.items() if not k.endswith("rotary_emb.inv_freq")}
        for name in own:
            if name not in given:
                raise ValueError(f"{name} is missing from the state dict")
            if given[name].shape != own[name].shape:
                have, want = tuple(given[name].shape), tuple(own[name].shape)
                raise ValueError(f"{name} has shape {have}, this model needs {want}")
        for name in given:
            if name not in own:
                raise ValueError(f"{name} has no place in a {self.config.norm} model")
        for name, tensor in own.items():
            tensor.copy_(given[name])


@torch.no_grad()
def fold(model):
    """The same function as a plain Pre-LN model (a new one), for pre, lns, gpas, lns+gpas.

    LNS: the factor goes into the norm's gain. GPAS: with P the product of all scales 1 − SiLU(α) so
    far, x/P obeys the Pre-LN rule with outputs divided by P, as norms do not see a scale (but for
    their eps: equal up to eps over the stream's mean square) except its sign. Raises ValueError for
    other variants and placements, and for a gate whose scale is 0.
    """
    from nanonorm import LNS, Config, Pre, Transformer  # which imports this file

    c = model.config
    if c.variant not in (Pre, LNS) or (c.gpas and c.gpas_placement not in ("auto", "sum")):
        raise ValueError(f"cannot fold {c.norm}, placement {c.gpas_placement}: only pre, lns, gpas")
    with torch.random.fork_rng():  # the draws of a model to be overwritten must not count
        plain = Transformer(Config.from_dict(c.to_dict() | {"norm": "pre"}))
    plain.to(model.embed.weight.device, model.embed.weight.dtype)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "gate" not in k})
    P = 1.0
    for l, (block, old) in enumerate(zip(plain.blocks, model.blocks, strict=True), 1):
        factors = old.constants(c, l) if c.variant is LNS else ((1.0,), (1.0,))
        sites = ((block.attn, block.attn.f.wo, old.attn), (block.ffn, block.ffn.f.w2, old.ffn))
        for (s, out, was), (factor,) in zip(sites, factors, strict=True):
            s.norm_in.gain.mul_(math.copysign(factor, P))
            out.weight.div_(P)
            if c.gpas:
                P *= 1 - was.add.gate.act(was.add.gate.alpha.double()).item()
                if P == 0:
                    raise ValueError(f"the gate of block {l} scales the stream to 0")
    plain.norm.gain.mul_(math.copysign(1.0, P))
    return plain
