import wave
import torch
from clearhead.data import audio
from clearhead.data.audio import AudioStream, Resampler, resample


resample(torch.zeros(16000), 16000, 8000).shape  # → torch.Size([8000])

recognizer = Resampler(16000, 8000)
sum(len(piece) for piece in (recognizer.push(torch.zeros(16000)), recognizer.flush()))  # → 8000

with wave.open("tone.wav", "wb") as file:
    file.setparams((1, 2, 8000, 0, "NONE", ""))
    file.writeframes(bytes(16000))
sound = audio.read_audio("tone.wav")  # a Waveform
sound.seconds  # → 1.0
sum(len(piece) for piece in AudioStream(open("tone.wav", "rb"), sample_rate=8000))  # → 8000
