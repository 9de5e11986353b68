"""Synthetic recordings: each digit is a different chord, rising if the digit is odd, and each speaker a pitch."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import torch

RATE = 8000


def tone(digit: int, pitch: float, seconds: float) -> torch.Tensor:
    t = torch.arange(int(seconds * RATE)) / RATE
    bend = 1 + 0.3 * t / seconds * (digit % 2)
    return 0.2 * sum(torch.sin(2 * math.pi * pitch * f * bend * t) for f in (300 + 130 * digit, 1700 + 90 * digit))


def write(path: Path, samples: torch.Tensor, rate: int = RATE, channels: int = 1) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes((samples * 32767).short().repeat_interleave(channels).numpy().tobytes())


def recorded(folder: Path, speakers: tuple[str, ...] = ("ann", "bob"), numbers: tuple[int, ...] = (9, 10, 11)) -> Path:
    """Write a folder of recordings in the layout that the speech task reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for s, speaker in enumerate(speakers):
        for digit in range(10):
            for n, number in enumerate(numbers):
                sound = tone(digit, 1 + 0.1 * s + 0.01 * n, 0.1 + 0.004 * digit + 0.003 * n)
                write(folder / f"{digit}_{speaker}_{number}.wav", sound)
    return folder
