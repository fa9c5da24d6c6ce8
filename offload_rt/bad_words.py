"""Excluded token sequences."""

from collections.abc import Iterable, Sequence


class BadWords:
    """Excluded token sequences, and the position of an answer in them.

    The time of a position depends on the words that the answer has begun, not on the number of
    words. `copy.copy` returns an independent position.
    """

    def __init__(self, words: Iterable[Sequence[int]] = ()) -> None:
        self.singles: list[int] = []  # words of one token
        # A trie: beginnings of words have numbers, 0 is the empty beginning.
        self._longer: dict[tuple[int, int], int] = {}  # by the shorter beginning and its next token
        self._ends: dict[int, list[int]] = {}
        for *first, last in words:
            beginning = 0
            for token in first:
                beginning = self._longer.setdefault((beginning, token), len(self._longer) + 1)
            (self._ends.setdefault(beginning, []) if first else self.singles).append(last)
        self._begun = [0]  # beginnings with which the answer ends

    def advance(self, token: int) -> None:
        """Append a token of the answer."""
        self._begun = self._after(self._begun, token)

    def ends(self, paths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Return pairs (row, token) of tokens that complete words behind the answer and a path.

        Words of one token are left out.
        """
        begun: dict[tuple[int, ...], list[int]] = {(): self._begun}
        pairs = []
        for row, path in enumerate(map(tuple, paths)):
            n = len(path)
            while path[:n] not in begun:
                n -= 1
            for i in range(n, len(path)):
                begun[path[: i + 1]] = self._after(begun[path[:i]], path[i])
            pairs += [(row, end) for part in begun[path] for end in self._ends.get(part, ())]
        return pairs

    def _after(self, begun: list[int], token: int) -> list[int]:
        """Return the beginnings with which the text ends after a further token."""
        return [0, *filter(None, (self._longer.get((beginning, token)) for beginning in begun))]
