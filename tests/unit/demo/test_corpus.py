from pathlib import Path

import pytest
import torch

from swarm.demo.corpus import BLOCK_BYTES, MIN_CORPUS_BYTES, WINDOW_BYTES, Corpus, unigram_entropy
from swarm.errors import UsageError

CONTEXT = 16


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.load(None, CONTEXT)


def test_default_text_has_the_known_byte_entropy(corpus: Corpus) -> None:
    assert corpus.unigram_loss == pytest.approx(3.26, abs=0.03)


def test_uniform_bytes_have_the_entropy_of_a_coin_with_256_sides() -> None:
    assert unigram_entropy(bytes(range(256)) * 3) == pytest.approx(5.545, abs=1e-3)


def test_held_out_text_does_not_occur_in_the_training_part(corpus: Corpus) -> None:
    train = corpus.train.numpy().tobytes()
    assert corpus.held_out.shape[1] == CONTEXT + WINDOW_BYTES + 1
    for window in corpus.held_out:
        middle = bytes(window.tolist())[24:56]
        assert middle not in train


def test_one_block_in_ten_is_held_out() -> None:
    text = bytes(i % 251 for i in range(40 * BLOCK_BYTES))
    assert len(Corpus.split(text, CONTEXT).train) == 36 * BLOCK_BYTES


def test_batches_depend_on_seed_trainer_and_step_only(corpus: Corpus) -> None:
    one = corpus.batch(4, 80, seed=1, trainer=0, step=7)
    assert one.shape == (4, 80)
    assert torch.equal(one, corpus.batch(4, 80, seed=1, trainer=0, step=7))
    for other in ((2, 0, 7), (1, 1, 7), (1, 0, 8)):
        assert not torch.equal(one, corpus.batch(4, 80, *other))


def test_unusable_files_are_typed_errors(tmp_path: Path) -> None:
    small = tmp_path / "small.txt"
    small.write_bytes(b"x" * (MIN_CORPUS_BYTES - 1))
    for path, why in ((tmp_path / "missing", "cannot be read"), (tmp_path, "cannot be read"), (small, "only")):
        with pytest.raises(UsageError, match=why):
            Corpus.load(path, CONTEXT)
