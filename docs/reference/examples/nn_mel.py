import torch
from clearhead.nn import mel
from clearhead.nn.mel import Mel


tone = torch.sin(torch.arange(8000) * 0.3)[None]  # a second at 8 kHz
Mel().frames(tone).shape  # → torch.Size([1, 98, 40])

stream = Mel().stream()  # a MelStream: frames as they become known
pieces = [stream.push(torch.zeros(800)) for _ in range(10)] + [stream.flush()]
sum(len(piece) for piece in pieces)  # → 98

(mel.NaturalLog(floor=1e-5), mel.WhisperLog())  # how a band's power becomes a feature; Mel.whisper() has the second
