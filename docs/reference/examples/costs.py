import clearhead as ch
from clearhead import costs


found = costs.cost("tiny-decoder", tokens=7)  # a Cost
found.parameters.value == sum(p.numel() for p in ch.Decoder(costs.preset("tiny-decoder")).parameters())  # → True

costs.cost(costs.AttentionSizes(512, 8), tokens=1000).forward.value  # → 4145152000

print(costs.compare(1000, 512))

costs.cost("tiny-decoder", tokens=7).time(costs.Machine.read("h200")).seconds > 0  # → True
