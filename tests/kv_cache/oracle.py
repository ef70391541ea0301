"""A paged cache in plain Python: rows are lists of page objects, and a page knows its numbers; no jax, no counts kept."""

from collections import Counter


class Page:
    """A page is told from others by identity alone."""

    def __init__(self, values=()):
        self.values = list(values)


class PythonCache:
    """What the paged cache promises, written the slow way."""

    def __init__(self, batch: int, max_blocks: int, num_pages: int, page_size: int):
        self.max_blocks, self.num_pages, self.page_size = max_blocks, num_pages, page_size
        self.rows = [[] for _ in range(batch)]  # lists of pages
        self.texts = [[] for _ in range(batch)]  # what each row should read
        self.has_overflowed = [False] * batch

    def owners(self) -> Counter:
        return Counter(id(page) for row in self.rows for page in row)

    def append(self, new: list[list[float]]) -> None:
        owners, size = self.owners(), self.page_size
        free = self.num_pages - len(owners)
        growing = [i for i, values in enumerate(new) if values and not self.has_overflowed[i]]
        partial = {i: self.rows[i][-1] for i in growing if len(self.texts[i]) % size}
        sharing = [i for i in partial if owners[id(partial[i])] > 1]
        # All owners write at once: the last of them keeps the page, if the others get one.
        together = {
            i: others for i in sharing
            if len(others := [j for j in sharing if partial[j] is partial[i]]) == owners[id(partial[i])]
        }  # fmt: skip
        keepers = {i for i, others in together.items() if i == max(others)}
        asked, refused = 0, set()
        for i in growing:
            blocks = -(-(len(self.texts[i]) + len(new[i])) // size)
            need = blocks - len(self.rows[i]) + (i in sharing and i not in keepers)
            if blocks > self.max_blocks:
                refused.add(i)
            else:
                asked += need  # what is refused still counts: rows are served in order
                if need and asked > free:
                    refused.add(i)
        refused |= {i for i in keepers if any(j in refused for j in together[i] if j != i)}
        for i in growing:
            if i in refused:
                self.has_overflowed[i] = True
                continue
            if i in sharing and i not in keepers:
                self.rows[i][-1] = Page(self.rows[i][-1].values)
            for value in new[i]:
                if len(self.texts[i]) % size == 0:
                    self.rows[i].append(Page())
                page = self.rows[i][-1]
                page.values = [*page.values[: len(self.texts[i]) % size], value]
                self.texts[i].append(value)

    def truncate(self, lengths: list[int]) -> None:
        for i, length in enumerate(lengths):
            length = max(0, min(length, len(self.texts[i])))
            self.texts[i] = self.texts[i][:length]
            self.rows[i] = self.rows[i][: -(-length // self.page_size)]

    def fork(self, ancestors: list[int]) -> None:
        self.rows = [list(self.rows[a]) if a >= 0 else [] for a in ancestors]
        self.texts = [list(self.texts[a]) if a >= 0 else [] for a in ancestors]
        self.has_overflowed = [a >= 0 and self.has_overflowed[a] for a in ancestors]

    def release(self, is_released: list[bool]) -> None:
        self.truncate([0 if gone else len(text) for gone, text in zip(is_released, self.texts, strict=True)])
        self.has_overflowed = [flag and not gone for flag, gone in zip(self.has_overflowed, is_released, strict=True)]
