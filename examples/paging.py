"""A page allocator with prefix sharing: full pages are found again by what they hold, and kept until room is needed."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

Key = tuple[int, tuple[int, ...]]
"""A page's content: that of the page before it (its number; -1: none) and its own tokens."""


class PageAllocator:
    """Pages 0 to num_pages - 1 and who uses them.

    A page is free, in use, or idle: nobody uses it, but its content is known, so a later sequence may take it. Idle
    pages are given up when no free page is left, those unused for longest first. Contents have numbers, which unlike
    page ids never come again: a page is not found behind something else that took its predecessor's place.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.uses = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._numbers = count()
        self._known: dict[Key, tuple[int, int]] = {}
        self._content: dict[int, tuple[int, Key]] = {}

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages that hold the longest known prefix of tokens, in whole pages; taken into use."""
        pages: list[int] = []
        number = -1
        for begin in range(0, len(tokens) - self.page_size + 1, self.page_size):
            found = self._known.get((number, tuple(tokens[begin : begin + self.page_size])))
            if found is None:
                break
            page, number = found
            self.uses[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def take(self, num_pages: int) -> list[int] | None:
        """Pages of unknown content, taken into use; None, and nothing taken, if there are not as many."""
        if num_pages > self.available:
            return None
        pages = [self._free.pop() if self._free else self._give_up() for _ in range(num_pages)]
        for page in pages:
            self.uses[page] = 1
        return pages

    def _give_up(self) -> int:
        page, _ = self._idle.popitem(last=False)
        _, key = self._content.pop(page)
        del self._known[key]
        return page

    def publish(self, page: int, parent: int | None, tokens: Sequence[int]) -> None:
        """Say what a page in use holds, now that it is full, so that others may share it.

        Nothing happens if the content is known already, or if the page before it is not known itself.
        """
        if parent is not None and parent not in self._content:
            return
        key = (-1 if parent is None else self._content[parent][0], tuple(tokens))
        if key not in self._known:
            number = next(self._numbers)
            self._known[key] = page, number
            self._content[page] = number, key

    def release(self, pages: Sequence[int]) -> None:
        """End one use of each page. Last pages first: they are less likely to be shared again."""
        for page in reversed(pages):
            self.uses[page] -= 1
            if self.uses[page] == 0 and page in self._content:
                self._idle[page] = None
            elif self.uses[page] == 0:
                self._free.append(page)
