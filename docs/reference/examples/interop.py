import clearhead as ch
from clearhead.hub import checkpoint, convert, tokenizer_files
from clearhead.models import tiny_decoder

model = ch.Decoder(tiny_decoder())
family = convert.export_third_party(model, "theirs")  # a folder as transformers writes it
type(checkpoint.load_third_party("theirs")).__name__  # → 'Decoder'

family = convert.export_third_party(ch.Decoder(tiny_decoder()), "second")
checkpoint.is_third_party("second")  # → True
checkpoint.read_config("second").d_model == tiny_decoder().d_model  # → True

family = convert.export_third_party(ch.Decoder(tiny_decoder()), "third")
source = checkpoint.open_checkpoint("third")  # a Source: configuration and tensors by its maker's names
model = convert.load_from_reader(source)
stops = tokenizer_files.eos_ids(source)

# What comes with a model of text: its tokenizer, how an encoder's vectors are pooled, files to go along.
(tokenizer_files.load_tokenizer, tokenizer_files.pooling_mode, tokenizer_files.tokenizer_files)

family = convert.export_third_party(ch.Decoder(tiny_decoder()), "limits", files={"generation_config.json": '{"min_new_tokens": 3}'})
source = checkpoint.open_checkpoint("limits")
tokenizer_files.generation_constraints(source).min_new_tokens  # → 3
tokenizer_files.decoder_start_ids(source)  # → ()
