"""Continuous batching: a stream of requests through a fixed number of rows, each admitted where another has ended."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks, kv_cache
from gumbeljax._checks import in_32_bits
from gumbeljax.decode.admission import House, Plan, best_source, num_blocks, plan_round
from gumbeljax.decode.generation import check_sampling
from gumbeljax.decode.requests import Output, Request, check_pad, checked, end_reason, known_vocab
from gumbeljax.decode.seating import empty_state, prefill_rows, seat, vacate
from gumbeljax.decode.state import DecodeState, drawn_tokens, request_keys
from gumbeljax.decode.steps import Rules, check_values, flattened, run_chunk
from gumbeljax.decode.stops import find_stop
from gumbeljax.kv_cache import PagedCache
from gumbeljax.sampling import sample

NO_TOKEN = -2  # pads a row's end tokens: below the marker -1, so never drawn


class Seat(NamedTuple):
    """A request that has a row."""

    index: int
    request: Request
    output: list[int]


def _rounded(number: int, least: int, factor: int, most: int) -> int:
    """The first of ``least * factor**i`` that holds a number, at most ``most``: few shapes, few traces."""
    while least < number:
        least *= factor
    return min(least, most)


class _Rows:
    """Host side of ``serve``: which request sits where, what it may draw, how many pages are left."""

    def __init__(self, decode_fn, params, w, cache: PagedCache, sampling: Mapping[str, Any], pad_token: int, *, sample_fn,
                 options_fn):  # fmt: skip
        self.decode_fn, self.params, self.w, self.pad_token = decode_fn, params, w, pad_token
        self.sample_fn, self.options_fn, self.vocab = sample_fn, options_fn, known_vocab(w, sample_fn)
        self.flattened = flattened(decode_fn, params)
        self.state = empty_state(decode_fn, params, cache, pad_token)
        self.batch, self.max_length = self.state.tokens.shape
        self.page_size, self.num_pages = cache.page_size, cache.pages.ref_counts.shape[0]
        self.num_free = int(cache.pages.num_free)
        self.seats: list[Seat | None] = [None] * self.batch
        self.texts = [np.zeros(0, np.int32)] * self.batch  # what the pages of each row hold
        self.keys = np.zeros((self.batch, 2), np.uint32)
        self.limits, self.min_lengths = np.zeros(self.batch, np.int32), np.zeros(self.batch, np.int32)
        self.eos_tokens = np.full((self.batch, 4), NO_TOKEN, np.int32)
        self.defaults = {name: in_32_bits(np.asarray(value)) for name, value in sampling.items()}
        self.sampling = self.of_all_rows(self.defaults)
        self.good_values: set[int] = set()
        self.check_values({})

    def of_all_rows(self, sampling: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.stack([value] * self.batch) for name, value in sampling.items()}

    def check_values(self, own: Mapping[str, np.ndarray]) -> None:
        """Refuses a request's options as the sampler would; it takes milliseconds, so what was good is remembered."""
        known = hash(tuple((name, x.dtype.str, x.shape, x.tobytes()) for name, x in sorted(own.items())))
        if known in self.good_values:
            return
        keys, rules = request_keys(jax.random.key(0), self.batch), Rules(self.limits, None, self.eos_tokens)
        sampling = self.of_all_rows({**self.defaults, **own})
        check_values(self.state, self.w, keys, rules, sampling, self.sample_fn, self.options_fn)
        self.good_values.add(known)

    def checked(self, index: int, request: Request, text_fn: Callable | None) -> Request:
        request = checked(request, index, self.vocab)
        size = len(request.prompt)
        if size < 1 or request.max_new_tokens < 1:
            raise ValueError(
                f"request {index} must have a prompt and max_new_tokens of at least 1, got {size} tokens and "
                f"{request.max_new_tokens}; leave it out."
            )
        length = size + request.max_new_tokens
        if length > self.max_length or num_blocks(length, self.page_size) > self.num_pages:
            raise ValueError(
                f"request {index} must fit a row of {self.max_length} slots and {self.num_pages} pages of {self.page_size}, "
                f"got {size} + {request.max_new_tokens} tokens; make a larger cache."
            )
        if request.stop and text_fn is None:
            raise ValueError(f"stop of request {index} must go with text_fn, got none; pass text_fn=tokenizer.decode.")
        for name in request.sampling:
            if name not in self.defaults:
                raise ValueError(
                    f"sampling of request {index} must name options that serve has a default for, got {name!r}; "
                    f"pass serve(..., {name}=the value that other requests shall have)."
                )
            if (shape := np.shape(request.sampling[name])) != self.defaults[name].shape:
                raise ValueError(
                    f"{name} of request {index} must have the shape of its default, {self.defaults[name].shape}, got {shape}; "
                    "pad it."
                )
        if request.sampling:
            own = {name: in_32_bits(np.asarray(value)) for name, value in request.sampling.items()}
            request = request._replace(sampling=own)
            try:
                self.check_values(own)
            except (TypeError, ValueError) as error:
                raise type(error)(f"sampling of request {index}: {error}") from None
        return request

    def house(self) -> House:
        free_rows = [i for i, seated in enumerate(self.seats) if seated is None]
        promised = sum(
            num_blocks(int(self.limits[i]), self.page_size) - num_blocks(self.texts[i].size, self.page_size)
            for i, seated in enumerate(self.seats) if seated is not None
        )  # fmt: skip
        return House(self.texts, free_rows, self.num_free, promised, self.page_size)

    def forget(self, kept: Sequence[int] = ()) -> bool:
        """Take the pages of ended rows, but for those kept; False if there were none."""
        is_ended = np.array([seated is None and text.size > 0 for seated, text in zip(self.seats, self.texts, strict=True)])
        is_ended[[row for row in kept if row >= 0]] = False
        if not is_ended.any():
            return False
        self.state = vacate(self.state, is_ended)
        self.num_free = int(self.state.cache.pages.num_free)
        self.texts = [np.zeros(0, np.int32) if gone else text for gone, text in zip(is_ended, self.texts, strict=True)]
        return True

    def admit(self, waiting: deque[tuple[int, Request]], shares_prefix: bool, prefill_size: int) -> bool:
        """Seat what can be seated; False if that is nothing."""
        while not (plans := plan_round(waiting, self.house(), shares_prefix=shares_prefix)):
            if not waiting or all(self.seats):
                return False
            source, _ = best_source(np.asarray(waiting[0][1].prompt, np.int32), self.texts, self.page_size)
            if not (self.forget([source]) or self.forget()):
                return False
        ancestors, num_shared = np.arange(self.batch, dtype=np.int32), np.zeros(self.batch, np.int32)
        is_new = np.zeros(self.batch, bool)
        for plan in plans:
            waiting.popleft()
            ancestors[plan.row], num_shared[plan.row], is_new[plan.row] = plan.source, plan.num_shared, True
            self.take(plan)
        self.state = seat(self.state, ancestors, num_shared, is_new, pad_token=self.pad_token)
        self.run_prompts(plans, prefill_size)
        self.num_free = int(self.state.cache.pages.num_free)
        return True

    def take(self, plan: Plan) -> None:
        """Everything the host keeps for a row now speaks of another request."""
        row, request = plan.row, plan.request
        self.seats[row], self.texts[row] = Seat(plan.index, request, []), plan.prompt
        self.keys[row] = np.asarray(jax.random.key_data(request.key))
        self.limits[row] = plan.prompt.size + request.max_new_tokens
        self.min_lengths[row] = plan.prompt.size + request.min_new_tokens
        ends, width = np.asarray(request.eos_tokens, np.int32).reshape(-1), self.eos_tokens.shape[1]
        if ends.size > width:
            wider = ((0, 0), (0, _rounded(ends.size, width, 2, 2**30) - width))
            self.eos_tokens = np.pad(self.eos_tokens, wider, constant_values=NO_TOKEN)
        self.eos_tokens[row] = NO_TOKEN
        self.eos_tokens[row, : ends.size] = ends
        for name, value in self.sampling.items():
            own = np.asarray(request.sampling.get(name, self.defaults[name]))
            if value.dtype.kind in "iu" and own.dtype.kind == "f":  # a default of 1 is no reason to round 0.5 down
                value = self.sampling[name] = value.astype(np.float64)
            value[row] = own

    def run_prompts(self, plans: list[Plan], prefill_size: int) -> None:
        """What the rows of a round do not share, in passes over these rows alone."""
        num_rows = _rounded(len(plans), 1, 4, self.batch)
        rows = np.full(num_rows, -1, np.int32)
        rows[: len(plans)] = [plan.row for plan in plans]
        rests = [plan.prompt[plan.num_shared :] for plan in plans]
        most = max(rest.size for rest in rests)
        width = _rounded(most, 16, 2, prefill_size)
        for start in range(0, most, width):
            tokens = np.zeros((num_rows, width), np.int32)
            starts, counts = np.zeros((2, num_rows), np.int32)
            for i, (plan, rest) in enumerate(zip(plans, rests, strict=True)):
                part = rest[start : start + width]
                tokens[i, : part.size], counts[i], starts[i] = part, part.size, plan.num_shared + min(start, rest.size)
            self.state = prefill_rows(self.decode_fn, self.params, self.state, rows, tokens, starts, counts)

    def step(self, num_steps: int) -> tuple[Any, np.ndarray]:
        """One chunk: what was drawn, and how many of it in each row."""
        is_short = any(
            seated is not None and text.size < least
            for seated, text, least in zip(self.seats, self.texts, self.min_lengths, strict=True)
        )
        keys = jax.random.wrap_key_data(jnp.asarray(self.keys), impl="threefry2x32")
        # The rule costs a mask over the vocabulary: it is left out of chunks that need none.
        rules = Rules(self.limits, self.min_lengths if is_short else None, self.eos_tokens)
        self.state, chunk = run_chunk(
            *self.flattened, self.w, self.state, keys, rules, self.sampling, num_steps=num_steps,
            pad_token=self.pad_token, sample_fn=self.sample_fn, options_fn=self.options_fn, frees_pages=False,
            copies_shared=False,  # rows share full pages alone
        )  # fmt: skip
        draws, counts, has_overflowed, num_free = jax.device_get(
            (chunk.draws, chunk.counts, chunk.has_overflowed, self.state.cache.pages.num_free)
        )
        if has_overflowed:
            kv_cache.check_overflow(self.state.cache)
        self.num_free = int(num_free)
        for i, seated in enumerate(self.seats):
            if seated is not None:
                self.texts[i] = np.concatenate([self.texts[i], drawn_tokens(draws)[i, : counts[i]]])
        return draws, counts

    def answer(self, row: int, draws: Any, count: int, text_fn: Callable | None) -> Output:
        """What the request in a row gets of a chunk; its row is free if that was the last."""
        seated = self.seats[row]
        assert seated is not None
        before = len(seated.output)
        output = np.array([*seated.output, *drawn_tokens(draws)[row, :count]], np.int32)
        found = find_stop(output, before, seated.request.stop, text_fn) if text_fn is not None and count else None
        output = output[:found]
        reason = end_reason(output, seated.request, found is not None)
        seated.output.extend(output[before:].tolist())
        if reason is not None:
            self.seats[row], self.limits[row] = None, 0
        return Output(seated.index, output[before:], jax.tree.map(lambda x: x[row, : output.size - before], draws), reason)


def serve(
    decode_fn: Callable,
    params: Any,
    w: Any,
    requests: Iterable[Request],
    cache: PagedCache,
    *,
    text_fn: Callable[[Sequence[int]], str] | None = None,
    pad_token: int = 0,
    chunk_size: int = 16,
    prefill_size: int = 256,
    shares_prefix: bool = True,
    sample_fn: Callable = sample,
    options_fn: Callable[[DecodeState], Mapping[str, Any]] | None = None,
    **sampling: Any,
) -> Iterator[Output]:
    """Continue a stream of prompts, as many at a time as the cache has rows; what is drawn comes out after each chunk.

    Pathwise exact: a request gets the tokens that ``generate`` gives it alone, near-ties within the rounding of ``h`` aside,
    whatever comes before, beside or after it.

    Between chunks, rows whose requests have ended take the next ones, whose prompts run in passes over those rows alone;
    nobody else waits longer than that. A request that begins like a text whose pages are still there (of a neighbour, or of
    one that has ended) shares its full pages instead of running them again.

    Args:
      decode_fn, params, w: see ``generate``.
      requests: taken from the iterable as rows become free.
      cache: an empty ``PagedCache``: its rows are the batch; consumed. A request waits until the pages that all who are
        seated may ever need leave enough for it, so the pool may be smaller than ``batch`` rows of full length.
      text_fn: tokens to text, for requests with ``stop`` strings: ``tokenizer.decode``.
      chunk_size: steps between two looks of the host.
      prefill_size: most prompt tokens per row and pass.
      shares_prefix: whether prefixes are shared.
      sample_fn, options_fn, pad_token: see ``generate``.
      any other option: its value for requests whose ``sampling`` does not name it. Requests may only name these.

    Yields:
      ``Output`` for each seated request after each chunk. A request ends at the first token for which one of these holds,
      in this order: no law (token -1), an end token, a stop string in its text, its most tokens. That token is the last.

    Raises:
      ValueError: a request that can never fit, a token id that the head does not have, an option without a default, stop
        strings without ``text_fn``.
    """
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a PagedCache, got {type(cache).__name__}; make it with model.init_paged_cache.")
    for name, size in (("chunk_size", chunk_size), ("prefill_size", prefill_size)):
        _checks.count(size, name, "raise it")
    check_pad(pad_token)
    sampling = {name: value for name, value in sampling.items() if value is not None}
    check_sampling(sampling)
    for name, value in sampling.items():
        if isinstance(value, Mapping) or hasattr(value, "_fields"):
            raise TypeError(
                f"{name} must be a number or an array, since every row of serve has its own, got {type(value).__name__}; "
                f"pass sample_fn=functools.partial(gumbeljax.sample, {name}=...)."
            )
    rows = _Rows(decode_fn, params, w, cache, sampling, pad_token, sample_fn=sample_fn, options_fn=options_fn)
    return _serve(rows, enumerate(requests), text_fn, shares_prefix, prefill_size, chunk_size)


def _serve(rows: _Rows, requests, text_fn, shares_prefix, prefill_size, num_steps) -> Iterator[Output]:
    waiting: deque[tuple[int, Request]] = deque()
    while True:
        while True:
            for index, request in islice(requests, rows.seats.count(None) - len(waiting)):
                waiting.append((index, rows.checked(index, request, text_fn)))
            if not rows.admit(waiting, shares_prefix, prefill_size):
                break
        if not any(rows.seats):
            return
        draws, counts = rows.step(num_steps)
        for row, seated in enumerate(rows.seats):
            if seated is not None:
                yield rows.answer(row, draws, counts[row], text_fn)
