import torch
from clearhead import hub


translator = hub.pipeline("en-es")  # a Pipeline: the model, its tokenizer, its card
hub.translate(translator, ["Hello world"])  # → ['Hola mundo.']

result = hub.translations(hub.pipeline("en-es"), ["Good morning."])  # each a Translation
result[0].target.startswith("Buenos")  # → True

hub.names()  # → ['digits-conv', 'digits-vit', 'en-es', 'shakespeare', 'sort-dedup', 'spoken-digits']

hub.cards()["sort-dedup"]["task"]  # → 'sort-dedup'

evaluation = hub.evaluate(hub.pipeline("sort-dedup"), limit=20)  # an Evaluation
evaluation.exact_match  # → 1.0

model = hub.load("sort-dedup")

family = hub.export(hub.pipeline("shakespeare"), "exported")

hub.nearest_pairs(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), 1)  # → [(1.0, 0, 2)]

part = hub.Segment(0.0, 1.5, "Hello.")
str(hub.Transcript("Hello.", (part,), 2.0))  # → 'Hello.'

callable(hub.transcribe)  # → True

callable(hub.encode_chat)  # → True

callable(hub.convert_pickle)  # → True
hub.Conversion  # the folder, its files, and notes

hub.pipeline("en-es").generation_settings.strategy.width  # → 5
hub.GenerationSettings().new_tokens(3, None)  # → 128

# Results of `fill_mask`, `tag` and `answer` of a pipeline.
(hub.TokenCandidate("fox", 8, 0.5).text, hub.TaggedSpan("LOC", "Rome", 3, 7, 0.9).label, hub.Answer("Rome", 3, 7, 0.9).start)  # → ('fox', 'LOC', 3)

import torch
from clearhead.models import CTCEncoder, tiny_speech
recognizer = hub.StreamingRecognizer(CTCEncoder(tiny_speech()).eval())
events = recognizer.push(torch.zeros(4000))  # a RecognizedSymbol each

torch.save({"weight": torch.ones(2, 3)}, "pytorch_model.bin")
conversion = hub.convert_pickle("pytorch_model.bin", "converted")  # a Conversion: the folder, its files, notes
conversion.files  # → ('model.safetensors',)

# A family for checkpoints of another format; the guide "Load and export" has a complete one.
from clearhead.models import DecoderConfig
from clearhead.nn.positions import Rotary
tiny_llm = hub.Family(
    name="tiny_llm",
    architecture="TinyLLM",
    kind=DecoderConfig,
    fields={"vocab": "vocab_size", "width": "d_model", "depth": hub.Field("n_layers", 1), "heads": "n_heads"},
    converters=(hub.Converter(lambda keys: {"positions": Rotary(base=keys("theta", 10_000.0))}),),
    rows=(hub.WeightMap("wte.weight", "embedding.weight"), *hub.block("layers.#", q="att.q", k="att.k", v="att.v")),
)
callable(hub.register_family)  # → True

callable(hub.export_gguf)  # → True
