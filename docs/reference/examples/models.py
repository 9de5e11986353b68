import torch
from clearhead import models
from clearhead.models import (
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderDecoder,
    VisionTransformer,
    load_checkpoint,
    save_checkpoint,
    tiny_decoder,
)


model = Decoder(DecoderConfig(vocab_size=50, max_len=16, d_model=12, n_layers=2, n_heads=3))
model(torch.tensor([[3, 1, 4]])).shape  # → torch.Size([1, 3, 50])

encoder = Encoder(models.tiny_encoder())
encoder(torch.tensor([[3, 1, 4]])).shape[:2]  # → torch.Size([1, 3])

pair = EncoderDecoder(models.tiny_encoder_decoder())
pair(torch.tensor([[3, 1]]), torch.tensor([[1, 5, 9]])).shape[:2]  # → torch.Size([1, 3])

vision = VisionTransformer(models.tiny_vision())

save_checkpoint(Decoder(tiny_decoder()), "run")
type(load_checkpoint("run")).__name__  # → 'Decoder'

models.gpt2().replace(n_layers=2).n_layers  # → 2

sizes = [config().d_model for config in (models.gpt2_medium, models.gpt2_large, models.gpt2_xl, models.bert_base)]

sizes = [config().d_model for config in (models.transformer_base, models.transformer_big)]

sizes = [config().n_heads for config in (models.vit_tiny, models.vit_small, models.vit_base)]

models.Config.from_dict(tiny_decoder().to_dict()) == tiny_decoder()  # → True

kinds = (models.EncoderConfig, models.EncoderDecoderConfig, models.VisionConfig)

(models.ClsPooling().pool(torch.zeros(1, 5, 8)).shape, models.MeanPooling(), models.ClsMeanPooling(), models.DistillationPooling())

models.ConvNet(models.ConvNetConfig())(torch.zeros(2, 1, 32, 32)).shape  # → torch.Size([2, 10])

models.Recurrent(models.RecurrentConfig(vocab_size=50, d_model=8))(torch.tensor([[3, 1]])).shape  # → torch.Size([1, 2, 50])

cache = models.RecurrentCache()
models.Recurrent(models.RecurrentConfig(vocab_size=50, d_model=8))(torch.tensor([[3]]), cache=cache).shape  # → torch.Size([1, 1, 50])

models.RecurrentSeq2Seq(models.RecurrentSeq2SeqConfig(vocab_size=50, d_model=8))

models.LogisticRegression(models.LogisticRegressionConfig(n_features=4))(torch.zeros(3, 4))

models.Autoencoder(models.AutoencoderConfig(n_features=6, d_latent=2))(torch.zeros(3, 6)).shape  # → torch.Size([3, 6])

from clearhead.masks import causal, window
models.StreamingSpec.of(causal() & window(3, 0)).left_context  # → 3

fields = sorted(set(models.CTCEncoderConfig.__dataclass_fields__) - set(models.EncoderConfig.__dataclass_fields__))
issubclass(models.CTCEncoder, torch.nn.Module)  # → True

config = models.AudioEncoderConfig(n_layers=1, d_model=12, n_heads=3, n_features=5)
models.AudioEncoder(config)(torch.zeros(2, 8, 5)).shape  # → torch.Size([2, 4, 12])

config = models.tiny_speech()
frames = torch.zeros(1, 32, config.mel.n_mels)
models.CTCEncoder(config).eval()(frames).shape[0]  # → 1

pair = models.DualEncoderConfig(text=models.tiny_encoder(), image=models.tiny_vision().replace(n_classes=0), d_shared=8)
parts = sum(p.numel() for p in models.DualEncoder(pair).parameters())

image = models.tiny_vision().replace(pooling=models.AttentionPooling())

waveform = models.WaveformEncoderConfig(d_model=12, n_heads=3, n_layers=1, position_groups=3, n_symbols=5)
models.WaveformEncoder(waveform)(torch.zeros(1, 800)).shape  # → torch.Size([1, 2, 5])
