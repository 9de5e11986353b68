import clearhead as ch
from clearhead import interop
from clearhead.models import tiny_decoder


model = ch.Decoder(tiny_decoder())
family = interop.export(model, "theirs")  # a folder as transformers writes it
type(interop.load("theirs")).__name__  # → 'Decoder'

family = interop.export(ch.Decoder(tiny_decoder()), "second")
interop.is_foreign("second")  # → True
interop.config_of("second").d_model == tiny_decoder().d_model  # → True

family = interop.export(ch.Decoder(tiny_decoder()), "third")
source = interop.open_source("third")  # a Source: configuration and tensors by its maker's names
model = interop.read(source)
stops = interop.stops_of(source)

# What comes with a model of text: its tokenizer, how an encoder's vectors are pooled, files to go along.
(interop.tokenizer_of, interop.pooling_of, interop.companions)

family = interop.export(ch.Decoder(tiny_decoder()), "limits", files={"generation_config.json": '{"min_new_tokens": 3}'})
source = interop.open_source("limits")
interop.limits_of(source).min_new_tokens  # → 3
interop.start_of(source)  # → ()
