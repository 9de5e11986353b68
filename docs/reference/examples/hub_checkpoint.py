import clearhead as ch
from clearhead.hub import checkpoint, convert, tokenizer_files
from clearhead.models import tiny_decoder


model = ch.Decoder(tiny_decoder())
family = convert.export_third_party(model, "exported")  # a folder as transformers writes it
type(checkpoint.load_third_party("exported")).__name__  # → 'Decoder'

family = convert.export_third_party(ch.Decoder(tiny_decoder()), "second")
checkpoint.is_third_party("second")  # → True
checkpoint.read_config("second").d_model == tiny_decoder().d_model  # → True

family = convert.export_third_party(ch.Decoder(tiny_decoder()), "third")
source = checkpoint.open_checkpoint("third")  # a CheckpointReader: configuration and tensors by their original names
model = convert.load_from_reader(source)

# Files of a text model: its tokenizer, the pooling of an encoder, and the tokenizer files to export.
(tokenizer_files.load_tokenizer, tokenizer_files.pooling_mode, tokenizer_files.tokenizer_files)

family = convert.export_third_party(ch.Decoder(tiny_decoder()), "limits", files={"generation_config.json": '{"min_new_tokens": 3}'})
source = checkpoint.open_checkpoint("limits")
settings = checkpoint.read_generation_settings(source)  # a checkpoint.GenerationSettings
settings.logits_processors.min_new_tokens  # → 3
settings.decoder_start_ids  # → ()
