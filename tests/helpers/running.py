"""A session that a test drives by hand: requests enter slots, and rounds run on all of them."""

import jax
import numpy as np

from mtpjax import SamplingParams
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.device import fit_params, with_implementation
from mtpjax.decoding.result import collect
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.session import Batch, PromptChunk, Session, admit, advance, prefill_chunk
from mtpjax.decoding.state import StateShape
from mtpjax.inference.requests import make_drafter, make_new_rows
from mtpjax.models.pages import NO_PAGE
from mtpjax.models.sharding import data_size

MAX_ROUNDS = 8  # per call


class Running:
    """A session of one shard, and the pages of its slots."""

    def __init__(self, params, *, model, config, num_slots=2, max_length=64, pool=(64, 16), draft_params=None):
        drafter = make_drafter(config)
        params, model, mesh = fit_params(params, with_implementation(model, config), config)
        assert data_size(mesh) == 1
        is_greedy = config.acceptance == "greedy"
        decoder = Decoder.make(
            config, drafter, model, mesh, batch=num_slots, max_length=max_length, is_greedy=is_greedy
        )
        is_chain = config.num_steps > 0 and config.topk == 1
        self.decoder = decoder.replace(pool=pool, logprobs=True, check_nan=True, is_adaptive=is_chain)
        shape = StateShape(num_slots, self.decoder.capacity(max_length), (8, 8), SamplingFeatures.all_enabled())
        if draft_params is None:
            draft_params = drafter.default_params(params, config, model=model)
        self.session = Session(params, draft_params, decoder=self.decoder, config=config, mesh=mesh, shape=shape)
        self.max_length, self.config, self.depth = max_length, config, config.num_steps
        self.pages, self.num_cached = [[] for _ in range(num_slots)], [0] * num_slots

    @property
    def state(self):
        return self.session.state

    def batch(self, slots):
        """The rows of these slots."""
        table = np.full((1, len(slots), self.decoder.num_pages_of(self.max_length)), NO_PAGE, np.int32)
        for row, slot in zip(table[0], slots, strict=True):
            row[: len(self.pages[slot])] = self.pages[slot][: len(row)]
        return Batch(
            np.array([slots], np.int32), table, np.array([[self.num_cached[slot] for slot in slots]], np.int32)
        )

    def enter(self, slot, prompt, pages, *, sampling=None, config=None, num_cached=0):
        """Puts a request into a slot and processes its prompt, after the positions that its pages hold already."""
        self.pages[slot], self.num_cached[slot] = list(pages), num_cached
        rows = make_new_rows(
            [np.asarray(prompt, np.int32)], model=self.decoder.model, config=config or self.config,
            limit=self.max_length, capacity=self.session.shape.capacity, sampling=sampling or SamplingParams(),
            shape=self.session.shape,
        )  # fmt: skip
        rows = jax.tree.map(lambda leaf: leaf[None], rows.replace(first_token=np.full(1, -1, np.int32)))
        assert len(pages) >= self.decoder.num_pages_of(int(rows.settings.limit[0, 0]))
        with self.session.on_device():
            self.session.call(admit, rows, np.array([[slot]], np.int32), decoder=self.decoder)
            start = min(max(num_cached - self.decoder.drafter.max_shift(self.decoder.model), 0), len(prompt) - 1)
            for position in range(start, len(prompt), self.decoder.spec.prefill_chunk):
                chunk = PromptChunk(np.array([[position]], np.int32), np.array([[-1]], np.int32))
                self.session.call(prefill_chunk, self.batch([slot]), chunk, decoder=self.decoder)

    def go_on(self, rounds=1000, depth=None):
        """Runs rounds on all slots."""
        depth, slots = self.depth if depth is None else depth, range(len(self.pages))
        while rounds > 0 and not np.asarray(self.state.done).all():
            now, static = np.int32(min(rounds, MAX_ROUNDS)), {"depth": depth, "max_rounds": MAX_ROUNDS}
            with self.session.on_device():
                self.session.call(advance, self.batch(list(slots)), now, decoder=self.decoder, **static)
            rounds -= MAX_ROUNDS

    def collect(self, slots=None):
        return collect(self.state, slots)
