"""Real text without a download: the standard library's own sources, tokenised on the spot.

Every Python installation carries several megabytes of well-written source code. `load` reads
it, trains a byte-level BPE on it, and keeps tokenizer and tokens under `.cache/`, so only the
first call takes a few seconds.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from platform import python_version

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CACHE_DIR = Path(__file__).resolve().parent.parent / ".cache"
END_OF_FILE = "<|endoffile|>"
# Installed packages are not the standard library; tests, codecs and pydoc topics are mostly tables.
SKIPPED_DIRS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """The tokenised text: `tokens` is int64 [num_tokens], files joined by an end marker."""

    tokenizer: Tokenizer
    tokens: torch.Tensor

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def batches(self, length: int, batch_size: int = 1, seed: int = 0) -> Iterator[torch.Tensor]:
        """Yield int64 [batch_size, length] for ever, each row a random stretch of the text.

        The same seed gives the same batches. Raises ValueError if the text is too short.
        """
        if len(self.tokens) < length:
            raise ValueError(f"the corpus has {len(self.tokens)} tokens, {length} were asked for")
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(
                len(self.tokens) - length + 1, (batch_size,), generator=generator
            )
            yield torch.stack([self.tokens[start : start + length] for start in starts.tolist()])


def load(vocab_size: int = 16_384) -> Corpus:
    """Return the standard library as a `Corpus`, from the cache where it has been made before.

    `vocab_size` counts the 256 bytes and the end marker too; a short text may give fewer entries.
    """
    CACHE_DIR.mkdir(exist_ok=True)
    name = f"stdlib-{python_version()}-{vocab_size}"
    tokenizer_path, tokens_path = CACHE_DIR / f"{name}.json", CACHE_DIR / f"{name}.pt"
    if tokenizer_path.exists() and tokens_path.exists():
        tokens = torch.load(tokens_path, weights_only=True)
        return Corpus(Tokenizer.from_file(str(tokenizer_path)), tokens.long())

    texts = standard_library_sources()
    tokenizer = train_tokenizer(texts, vocab_size)
    end = tokenizer.token_to_id(END_OF_FILE)
    encodings = tokenizer.encode_batch_fast(texts)
    tokens = torch.tensor([token for text in encodings for token in (*text.ids, end)])

    tokenizer.save(str(tokenizer_path))
    torch.save(tokens.int(), tokens_path)
    return Corpus(tokenizer, tokens)


def standard_library_sources() -> list[str]:
    """Return the text of every source file of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if SKIPPED_DIRS.isdisjoint(path.relative_to(root).parent.parts)
    )
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE: any text can be encoded, and decoding gives it back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
