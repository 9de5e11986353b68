import torch
import clearhead as ch
from clearhead import generation
from clearhead.generation import BeamSearch, Greedy, Sample, generate, search, stream
from clearhead.models import tiny_decoder


model = ch.Decoder(tiny_decoder()).eval()
result = generate(model, torch.tensor([[1, 2, 3]]), strategy=Greedy(), max_new_tokens=4)  # a Generated
result.ids.shape  # → torch.Size([1, 1, 4])

model = ch.Decoder(tiny_decoder()).eval()
generate(model, torch.tensor([[1, 2, 3]]), strategy=BeamSearch(3, n_best=2), max_new_tokens=4).scores.shape  # → torch.Size([1, 2])

model = ch.Decoder(tiny_decoder()).eval()
for step in stream(model, torch.tensor([[1, 2]]), strategy=Sample(temperature=0.8, top_k=5, seed=1), max_new_tokens=3):
    step.ids  # a GenerationStep: one id for each row

# Anything that gives next-id logits can be searched: a IncrementalDecoder, here result of a plain function.
favourite = generation.UncachedDecoder(lambda ids: torch.eye(5)[(ids[:, -1] + 1) % 5], torch.tensor([[0]]))
search(favourite, max_new_tokens=3).ids.tolist()  # → [[[1, 2, 3]]]

isinstance(generation.UncachedDecoder(lambda ids: ids, torch.tensor([[0]])), generation.IncrementalDecoder)  # → True

generation.LogitsError  # raised where all logits are NaN or −∞

model = ch.Decoder(tiny_decoder()).eval()
limits = generation.LogitsProcessors(suppress_tokens=(0, 5), no_repeat_ngram_size=1)
result = generate(model, torch.tensor([[1, 2, 3]]), logits_processors=limits, max_new_tokens=4).sequence(0).tolist()
len({1, 2, 3, *result})  # → 7

generation.WhisperTimestampRules(first=50363, end=50256, latest=50).first  # → 50363

# A pipeline is a TextGenerator, so `generate` returns text.
isinstance(ch.pipeline("shakespeare"), generation.TextGenerator)  # → True
len(generate(ch.pipeline("shakespeare"), "ROMEO:", max_new_tokens=5))  # → 5
generation.DEFAULT_MAX_NEW_TOKENS  # → 128

model = ch.Decoder(tiny_decoder()).eval()
generation.warm_up(model, max_tokens=16, slots=2)
