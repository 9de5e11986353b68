import wave

import torch

from clearhead.data import audio
from clearhead.data.audio import Resampler, Stream, resample
from clearhead.nn import mel
from clearhead.nn.mel import Mel

tone = torch.sin(torch.arange(8000) * 0.3)[None]  # a second at 8 kHz
Mel().frames(tone).shape  # → torch.Size([1, 98, 40])

heard = Mel().stream()  # a MelStream: frames as they become known
pieces = [heard.push(torch.zeros(800)) for _ in range(10)] + [heard.flush()]
sum(len(piece) for piece in pieces)  # → 98

(mel.NaturalLog(floor=1e-5), mel.WhisperLog())  # how a band's power becomes a feature; Mel.whisper() has the second

resample(torch.zeros(16000), 16000, 8000).shape  # → torch.Size([8000])

ears = Resampler(16000, 8000)
sum(len(piece) for piece in (ears.push(torch.zeros(16000)), ears.flush()))  # → 8000

with wave.open("tone.wav", "wb") as file:
    file.setparams((1, 2, 8000, 0, "NONE", ""))
    file.writeframes(bytes(16000))
sound = audio.read("tone.wav")  # a Sound
sound.seconds  # → 1.0
sum(len(piece) for piece in Stream(open("tone.wav", "rb"), rate=8000))  # → 8000
