import clearhead as ch
from clearhead import interop
from clearhead.models import tiny_decoder


model = ch.Decoder(tiny_decoder())
family = interop.export(model, "theirs")  # a folder as transformers writes it
type(interop.load("theirs")).__name__  # → 'Decoder'

family = interop.export(ch.Decoder(tiny_decoder()), "second")
interop.is_third_party("second")  # → True
interop.read_config("second").d_model == tiny_decoder().d_model  # → True

family = interop.export(ch.Decoder(tiny_decoder()), "third")
source = interop.open_checkpoint("third")  # a Source: configuration and tensors by its maker's names
model = interop.read(source)
stops = interop.eos_ids(source)

# What comes with a model of text: its tokenizer, how an encoder's vectors are pooled, files to go along.
(interop.load_tokenizer, interop.pooling_mode, interop.tokenizer_files)

family = interop.export(ch.Decoder(tiny_decoder()), "limits", files={"generation_config.json": '{"min_new_tokens": 3}'})
source = interop.open_checkpoint("limits")
interop.generation_constraints(source).min_new_tokens  # → 3
interop.decoder_start_ids(source)  # → ()
