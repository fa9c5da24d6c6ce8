"""Predictions of the target after one to three tokens, in a file.

The store of retrieval-based speculative decoding (REST, He et al. 2023, arXiv 2311.08252), with the
target's distributions instead of texts. Trees start with them: the first answer of a run need not
wait until the target has predicted the same tokens before.
"""

from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
from safetensors.numpy import save

from offload_rt.errors import SettingsError
from offload_rt.system.files import write_atomically

# Name of the file in the directory of a draft.
PREDICTIONS_FILE = "predictions.safetensors"
# Most tokens of a key; predicted tokens of a key in memory, and in the file.
LONGEST = 3
N_PREDICTED = 8
N_STORED = 4

Context = tuple[int, ...]


class Level(NamedTuple):
    """Predictions after `k` tokens, in the order of the tokens.

    contexts  (n, k)
    tokens    (n, N_STORED), the most probable first
    probs     (n, N_STORED) float16; 0 beyond the last token
    """

    contexts: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray


class StoredPredictions:
    """Predictions in memory, found by bisection.

    Raises SettingsError if the file is damaged or of another vocabulary.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        change = "change --draft-predictions, or write the file again"
        try:
            with safetensors.safe_open(path, "np") as file:
                self._levels = [
                    Level(*(file.get_tensor(f"{name}.{k}") for name in Level._fields))
                    for k in range(1, LONGEST + 1)
                ]
        except (OSError, safetensors.SafetensorError) as error:
            problem = f"{path} is not a file of predictions: {error}"
            raise SettingsError(problem, change=change) from None
        largest = max(int(level.tokens.max(initial=0)) for level in self._levels)
        if largest >= vocab_size:
            need = f"tokens below {vocab_size}, the target's"
            problem = f"{path} belongs to another model"
            raise SettingsError(problem, need=need, have=str(largest), change=change)
        self._vocab_size = vocab_size
        self._keys = [self._keys_of(level.contexts) for level in self._levels]

    @property
    def nbytes(self) -> int:
        """Bytes of all predictions."""
        return sum(part.nbytes for level in self._levels for part in level)

    def find(self, context: Context) -> tuple["array[int]", "array[float]"] | None:
        """Return tokens and probabilities after exactly these tokens; None if unknown."""
        keys = self._keys[len(context) - 1]
        key = 0
        for token in context:
            key = key * self._vocab_size + token
        i = int(keys.searchsorted(key))
        if i == len(keys) or keys[i] != key:
            return None
        _, tokens, probs = self._levels[len(context) - 1]
        n = np.count_nonzero(probs[i])
        return array("q", tokens[i, :n].tolist()), array("f", probs[i, :n].tolist())

    def _keys_of(self, contexts: np.ndarray) -> np.ndarray:
        keys = np.zeros(len(contexts), dtype=np.int64)
        for column in contexts.T:
            keys = keys * self._vocab_size + column
        return keys


def write_predictions(
    path: Path, contexts: np.ndarray, tokens: np.ndarray, probs: np.ndarray
) -> None:
    """Write the mean predictions after each context and its suffixes.

    contexts  (n, LONGEST) last tokens before each prediction
    tokens    (n, m) most probable tokens
    probs     (n, m) their probabilities
    A context is left out if its tokens after the first have no other predecessor. Raises OSError.
    """
    stored: dict[str, np.ndarray] = {}
    is_kept = np.ones(len(contexts), dtype=bool)
    for k in range(1, LONGEST + 1):
        level = _mean(contexts[is_kept, -k:], tokens[is_kept], probs[is_kept])
        stored |= {f"{name}.{k}": tensor for name, tensor in level._asdict().items()}
        _, suffixes = np.unique(contexts[:, -k:], axis=0, return_inverse=True)
        suffixes = suffixes.reshape(-1)
        longer = np.unique(contexts[:, -k - 1 :], axis=0, return_index=True)[1]
        is_kept = np.bincount(suffixes[longer])[suffixes] > 1
    write_atomically(path, save(stored))


def _mean(contexts: np.ndarray, tokens: np.ndarray, probs: np.ndarray) -> Level:
    """Return the mean predictions of equal contexts."""
    different, places = np.unique(contexts, axis=0, return_inverse=True)
    places = places.reshape(-1)
    counts = np.bincount(places, minlength=len(different))
    pairs = np.stack((np.repeat(places, tokens.shape[1]), tokens.ravel()), 1)
    pairs, owner = np.unique(pairs, axis=0, return_inverse=True)
    weights = np.bincount(owner.reshape(-1), probs.ravel()) / counts[pairs[:, 0]]
    order = np.lexsort((-weights, pairs[:, 0]))
    pairs, weights = pairs[order], weights[order]
    starts = np.searchsorted(pairs[:, 0], np.arange(len(different)))
    rank = np.arange(len(pairs)) - starts[pairs[:, 0]]
    first = rank < N_STORED
    small = np.min_scalar_type(max(contexts.max(initial=0), tokens.max(initial=0)))
    best = np.zeros((len(different), N_STORED), dtype=small)
    chances = np.zeros(best.shape, dtype=np.float16)
    best[pairs[first, 0], rank[first]] = pairs[first, 1]
    chances[pairs[first, 0], rank[first]] = weights[first]
    return Level(different.astype(small), best, chances)
