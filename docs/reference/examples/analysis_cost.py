import clearhead as ch
from clearhead.analysis import cost


total = cost.cost("tiny-decoder", tokens=7)  # a Cost
total.parameters.value == sum(p.numel() for p in ch.Decoder(cost.preset("tiny-decoder")).parameters())  # → True

cost.cost(cost.AttentionSizes(512, 8), tokens=1000).forward.value  # → 4145152000

print(cost.compare(1000, 512))

cost.cost("tiny-decoder", tokens=7).time(cost.Machine.read("h200")).seconds > 0  # → True
