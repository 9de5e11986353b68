import torch
from torch import nn
import clearhead as ch
from clearhead.analysis import checks
from clearhead.analysis.checks import Embeddings, Ids, ModuleSpec, Values
from clearhead.masks import causal
from clearhead.models import tiny_decoder


report = checks.check(ch.Decoder(tiny_decoder()), only="causality")  # a CheckReport, of each property a Finding with its Verdict
report.ok  # → True

class Bag(nn.Module):
    def forward(self, x):
        return x.cumsum(1)
spec = ModuleSpec(Bag(), inputs=Embeddings(4), mask=causal())
checks.check(spec, only="causality").ok  # → True

checks.check(nn.Linear(3, 2), inputs=Values((3,)), only="determinism").ok  # → True

checks.spec_for(ch.Decoder(tiny_decoder())).is_sequence  # → True

# How padding and a cache are passed to a third-party module.
(checks.KeepMask("attention_mask"), checks.IgnoreMask("key_padding_mask"), checks.Caching(new=dict))

Ids(50).draw(2, 3, torch.Generator().manual_seed(0)).shape  # → torch.Size([2, 3])

def run(module, batch: checks.CallInputs):  # ModuleSpec(…, run=run): how the module is called
    return module(batch.x)
