"""The demo's text: where it comes from, what is held out, and which bytes a training step sees."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm.errors import UsageError

BLOCK_BYTES = 4096
HELD_OUT_EVERY = 10
"""One block in this many is held out."""
WINDOW_BYTES = 64
MIN_CORPUS_BYTES = 16 * BLOCK_BYTES
MAX_CORPUS_BYTES = 256 * 1024 * 1024
HELD_OUT_WINDOWS = 40
_PROBE_BYTES = 32


@dataclass(frozen=True)
class Corpus:
    """A text cut into training bytes and held-out windows.

    Attributes:
        train: Training bytes. [n] uint8
        held_out: Fixed windows from held-out blocks, each context + WINDOW_BYTES + 1 long. [windows, length] int64
        unigram_loss: Entropy of single bytes in the whole text, in nats per byte: what a model reaches that knows
            nothing but how often each byte occurs.
    """

    train: Tensor
    held_out: Tensor
    unigram_loss: float

    @classmethod
    def load(cls, path: Path | None, context: int) -> Corpus:
        """Read a file, or the documentation topics that ship with Python.

        Args:
            path: The text; none takes `pydoc_data.topics` (English, about 460 KB).
            context: Bytes that the model sees before the first byte it predicts.

        Raises:
            UsageError: The file cannot be read, is too small to hold anything out, or too large for a demo.
        """
        return cls.split(_read(path), context)

    @classmethod
    def split(cls, text: bytes, context: int) -> Corpus:
        """Hold out every tenth block; windows whose text also occurs in the training part do not measure."""
        blocks = [text[i : i + BLOCK_BYTES] for i in range(0, len(text), BLOCK_BYTES)]
        chosen = [i for i in range(len(blocks)) if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2]
        train = b"".join(block for i, block in enumerate(blocks) if i not in frozenset(chosen))
        length = context + WINDOW_BYTES + 1
        windows = [blocks[i][at : at + length] for i in chosen for at in range(0, len(blocks[i]) - length + 1, length)]
        probe = (length - _PROBE_BYTES) // 2
        unseen = [w for w in windows if w[probe : probe + _PROBE_BYTES] not in train] or windows
        step = max(1, len(unseen) / HELD_OUT_WINDOWS)
        picked = [unseen[int(i * step)] for i in range(min(HELD_OUT_WINDOWS, len(unseen)))]
        return cls(
            train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
            held_out=torch.stack([torch.frombuffer(bytearray(w), dtype=torch.uint8).long() for w in picked]),
            unigram_loss=unigram_entropy(text),
        )

    def batch(self, windows: int, length: int, seed: int, trainer: int, step: int) -> Tensor:
        """Random training windows, the same ones for the same seed, trainer and step. [windows, length] int64"""
        digest = hashlib.sha256(f"{seed}/{trainer}/{step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        starts = torch.randint(0, len(self.train) - length + 1, (windows,), generator=generator)
        return self.train[starts[:, None] + torch.arange(length)].long()


def _read(path: Path | None) -> bytes:
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        size = path.stat().st_size
        if size > MAX_CORPUS_BYTES:
            raise UsageError(
                f"{path} has {size} bytes, too many for a demo.", fix=f"Give at most {MAX_CORPUS_BYTES} bytes."
            )
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}", fix="Give --data a readable text file."
        ) from error
    if len(text) < MIN_CORPUS_BYTES:
        raise UsageError(
            f"{path} has only {len(text)} bytes.",
            fix=f"Give a text of at least {MIN_CORPUS_BYTES} bytes to learn from.",
        )
    return text


def unigram_entropy(text: bytes) -> float:
    """Entropy of single bytes, in nats per byte."""
    counts = Counter(text)
    return -sum(n / len(text) * math.log(n / len(text)) for n in counts.values())
