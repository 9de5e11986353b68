import torch
import clearhead as ch
from clearhead import generation
from clearhead.generation import Beam, Greedy, Sample, generate, search, stream
from clearhead.models import tiny_decoder


model = ch.Decoder(tiny_decoder()).eval()
made = generate(model, torch.tensor([[1, 2, 3]]), how=Greedy(), max_new=4)  # a Generated
made.ids.shape  # → torch.Size([1, 1, 4])

model = ch.Decoder(tiny_decoder()).eval()
generate(model, torch.tensor([[1, 2, 3]]), how=Beam(3, n_best=2), max_new=4).scores.shape  # → torch.Size([1, 2])

model = ch.Decoder(tiny_decoder()).eval()
for step in stream(model, torch.tensor([[1, 2]]), how=Sample(temperature=0.8, top_k=5, seed=1), max_new=3):
    step.ids  # a Step: one id for each row

# Anything that gives next-id logits can be searched: a Stepper, here made of a plain function.
favourite = generation.Recompute(lambda ids: torch.eye(5)[(ids[:, -1] + 1) % 5], torch.tensor([[0]]))
search(favourite, max_new=3).ids.tolist()  # → [[[1, 2, 3]]]

isinstance(generation.Recompute(lambda ids: ids, torch.tensor([[0]])), generation.Stepper)  # → True

generation.LogitsError  # raised where all logits are NaN or −∞

model = ch.Decoder(tiny_decoder()).eval()
limits = generation.Limits(suppressed=(0, 5), no_repeat=1)
made = generate(model, torch.tensor([[1, 2, 3]]), limits=limits, max_new=4).sequence(0).tolist()
len({1, 2, 3, *made})  # → 7

generation.Times(first=50363, end=50256, latest=50).first  # → 50363
