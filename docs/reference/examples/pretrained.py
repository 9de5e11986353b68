import torch
from clearhead import pretrained


translator = pretrained.load("en-es")  # a Pipeline: the model, its tokenizer, its card
pretrained.translate(translator, ["Hello world"])  # → ['Hola mundo.']

made = pretrained.translations(pretrained.load("en-es"), ["Good morning."])  # each a Translation
made[0].target.startswith("Buenos")  # → True

pretrained.names()  # → ['digits-conv', 'digits-vit', 'en-es', 'shakespeare', 'sort-dedup', 'spoken-digits']

pretrained.cards()["sort-dedup"]["task"]  # → 'sort-dedup'

found = pretrained.evaluate(pretrained.load("sort-dedup"), limit=20)  # an Evaluation
found.exact_match  # → 1.0

model = pretrained.load_model("sort-dedup")

family = pretrained.export(pretrained.load("shakespeare"), "exported")

pretrained.nearest(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), 1)  # → [(1.0, 0, 2)]

part = pretrained.Segment(0.0, 1.5, "Hello.")
str(pretrained.Transcript("Hello.", (part,), 2.0))  # → 'Hello.'

callable(pretrained.transcribe)  # → True

callable(pretrained.conversation)  # → True

from clearhead.models import CTCEncoder, tiny_speech
import torch
ears = pretrained.StreamingRecognizer(CTCEncoder(tiny_speech()).eval())
events = ears.push(torch.zeros(4000))  # a RecognizedSymbol each
