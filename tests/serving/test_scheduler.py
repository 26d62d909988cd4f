"""The scheduler alone: slots, pages, chunks, preemption and depths, without an engine or a device."""

import random

import pytest

from mtpjax.serving.page_pool import PagePool
from mtpjax.serving.request import Request, RequestTimes, Sequence
from mtpjax.serving.scheduler import Scheduler, SchedulerSettings

PAGE = 4


def make_scheduler(*, pages=64, shards=1, **changes):
    sizes = {"num_slots": 2, "prefill_chunk": 8, "prefill_rows": 2, "rounds_per_call": 4, "overlap": 1, "max_depth": 3}
    sizes |= {"num_pages_of": lambda length: -(-length // PAGE), "depth_of": lambda rows: 3}
    return Scheduler(SchedulerSettings(**(sizes | changes)), [PagePool(pages, PAGE) for _ in range(shards)])


def make_sequence(number, prompt=3, new_tokens=20, first=None, **changes):
    """A request whose prompt shares no page with another one, unless `first` says how it begins."""
    tokens = [number * 1000 + i for i in range(prompt)] if first is None else list(first)
    request = Request(prompt=tuple(tokens), max_new_tokens=new_tokens, speculative=changes.pop("speculative", True))
    sequence = Sequence(number, request, print, tokens, len(tokens) + new_tokens, None, True, None, RequestTimes(0.0))
    for name, value in changes.items():
        setattr(sequence, name, value)
    return sequence


def start(scheduler, *sequences):
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler.plan()


def read(sequence, num_tokens):
    """Reads one report from the device, with this many new tokens."""
    sequence.text += [0] * min(num_tokens, sequence.limit - len(sequence.text))
    sequence.num_unread -= 1


def test_requests_enter_in_order_until_the_slots_are_taken():
    scheduler, sequences = make_scheduler(), [make_sequence(number) for number in range(3)]
    plan = start(scheduler, *sequences)
    assert plan.admitted == scheduler.running == sequences[:2] and scheduler.num_waiting == 1
    assert {sequence.slot for sequence in sequences[:2]} == {0, 1}
    scheduler.end(sequences[0])
    assert scheduler.plan().admitted == [sequences[2]] and sequences[2].slot is not None


def test_a_large_request_at_the_head_holds_up_those_after_it():
    scheduler, large, small = make_scheduler(pages=8), make_sequence(0, prompt=40), make_sequence(1)
    assert not start(scheduler, large, small).admitted and scheduler.num_waiting == 2


def test_rows_are_spread_over_the_shards():
    scheduler, sequences = make_scheduler(shards=2), [make_sequence(number) for number in range(4)]
    start(scheduler, *sequences)
    assert sorted((sequence.shard, sequence.slot) for sequence in sequences) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_prompt_is_prefilled_in_chunks_and_decodes_with_its_last_one():
    scheduler, sequence = make_scheduler(), make_sequence(0, prompt=19)
    plans = [start(scheduler, sequence), scheduler.plan(), scheduler.plan()]
    assert [plan.prefills for plan in plans] == [[(sequence, 0, 8)], [(sequence, 8, 16)], [(sequence, 16, 19)]]
    assert [plan.advances for plan in plans] == [{}, {}, {3: [sequence]}]
    # The last chunk gives one token, and each of the rounds between one and four.
    assert (sequence.min_length, sequence.max_length) == (20 + 4, 20 + 4 * 4)


def test_at_most_prefill_rows_prompts_are_prefilled_in_a_tick_the_oldest_first():
    scheduler, sequences = make_scheduler(prefill_rows=1), [make_sequence(number) for number in range(2)]
    assert [row for row, *_ in start(scheduler, *sequences).prefills] == sequences[:1]
    assert [row for row, *_ in scheduler.plan().prefills] == sequences[1:]


def test_a_shared_beginning_is_not_prefilled_again_but_for_the_overlap():
    scheduler, prompt = make_scheduler(), list(range(12))
    first = make_sequence(0, first=prompt)
    start(scheduler, first)
    scheduler.pools[0].store(first.lease, first.text, 12)
    second, third = make_sequence(1, first=[*prompt, 50, 51]), make_sequence(2, first=[*prompt, 60])
    third.request = Request(prompt=third.request.prompt, max_new_tokens=1, salt=b"another user")
    scheduler.end(first)
    plan = start(scheduler, second, third)
    assert plan.prefills == [(second, 11, 14), (third, 0, 8)] and (second.num_cached, third.num_cached) == (12, 0)


def test_one_round_while_a_request_waits_and_one_depth_for_all_rows():
    depths = {1: 3, 2: 1}
    scheduler = make_scheduler(depth_of=depths.get)
    drafted, plain = make_sequence(0), make_sequence(1, speculative=False)
    plan = start(scheduler, drafted)
    assert (plan.num_rounds, plan.advances) == (4, {3: [drafted]})
    plan = start(scheduler, plain, make_sequence(2))
    assert (plan.num_rounds, plan.advances) == (1, {1: [drafted], 0: [plain]})


def test_a_row_that_may_have_ended_is_not_decoded_again():
    scheduler, sequence = make_scheduler(), make_sequence(0, new_tokens=5)
    assert start(scheduler, sequence).advances  # at least 1 + 4 tokens are on their way
    assert not scheduler.plan().advances


def test_a_row_with_a_grammar_waits_a_tick_for_its_first_token_and_takes_one_round():
    scheduler, sequence = make_scheduler(), make_sequence(0, matcher=object())
    assert not start(scheduler, sequence).constrained
    plan = scheduler.plan()
    assert plan.constrained == {3: [sequence]} and not plan.advances and sequence.min_length == 4 + 1


def test_a_text_to_score_comes_first_and_does_not_decode():
    scheduler, waiting, scored = make_scheduler(num_slots=1), make_sequence(0), make_sequence(1, scored=object())
    plan = start(scheduler, waiting, scored)
    assert plan.admitted == [scored] and plan.prefills == [(scored, 0, 3)] and not plan.advances


def test_the_newest_row_gives_up_its_pages_and_goes_on_later_at_the_same_position():
    # Each text grows by 16 tokens a call, so two of them soon need more than 14 pages.
    scheduler, old, new = make_scheduler(pages=14), make_sequence(0, new_tokens=60), make_sequence(1, new_tokens=60)
    start(scheduler, old, new)
    for sequence in (old, new):
        read(sequence, 1)
        read(sequence, 16)
    plan = scheduler.plan()
    assert scheduler.running == [old] and plan.advances == {3: [old]} and scheduler.num_preempted == 1
    assert new.slot is None and new.lease is None and scheduler.num_waiting == 1 and len(new.text) == 20
    scheduler.end(old)
    plan = scheduler.plan()
    assert plan.admitted == [new] and new.is_resumed
    # Its newest token was delivered, but not yet processed by the trunk.
    assert new.num_to_prefill == 19 and plan.prefills == [(new, 0, 8)]


def test_a_preempted_row_waits_until_its_reports_are_read():
    scheduler, old, new = make_scheduler(pages=14), make_sequence(0, new_tokens=60), make_sequence(1, new_tokens=60)
    start(scheduler, old, new)
    scheduler.plan()  # preempts `new`, whose first reports are not read
    assert scheduler.num_preempted == 1
    scheduler.end(old)
    assert not scheduler.plan().admitted and scheduler.num_waiting == 1
    read(new, 1)
    read(new, 16)
    assert scheduler.plan().admitted == [new]


@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_an_aborted_request_leaves_nothing(state):
    scheduler, old, new = make_scheduler(pages=14), make_sequence(0, new_tokens=60), make_sequence(1, new_tokens=60)
    if state == "waiting":
        scheduler.add(new)
    else:
        start(scheduler, old, new)
    if state == "preempted":
        scheduler.plan()
    scheduler.end(new)
    scheduler.end(old)
    assert new.has_ended and not scheduler.num_waiting and not scheduler.running
    assert scheduler.pools[0].num_in_use == 0
    assert not scheduler.plan().admitted


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_all_end_and_never_write_outside_their_pages(seed):
    rng = random.Random(seed)
    shards, rounds = rng.choice([1, 2]), rng.choice([1, 4])
    scheduler = make_scheduler(pages=rng.choice([20, 40]), shards=shards, num_slots=4, rounds_per_call=rounds)
    arriving = [make_sequence(number, rng.randint(1, 20), rng.randint(1, 30)) for number in range(30)]
    sequences, unread = list(arriving), []
    for _ in range(2000):
        if arriving and rng.random() < 0.4:
            scheduler.add(arriving.pop(0))
        plan = scheduler.plan()
        # Slots are taken once, and the pages hold whatever the dispatched calls may write.
        assert len({(row.shard, row.slot) for row in scheduler.running}) == len(scheduler.running)
        in_use = [(row.shard, page) for row in scheduler.running for page in row.lease.pages]
        assert len(in_use) == len(set(in_use)) == sum(pool.num_in_use for pool in scheduler.pools)
        for row, _, end in plan.prefills:
            assert end <= len(row.lease.pages) * PAGE
            unread.append((row, int(row.is_prefilled and not row.is_resumed)))
        for depth, rows in plan.advances.items():
            for row in rows:
                assert row.max_length <= len(row.lease.pages) * PAGE
                unread.append((row, sum(rng.randint(1, depth + 1) for _ in range(plan.num_rounds))))
        # The reports of older calls arrive, at least one call late.
        while len(unread) > rng.randint(0, 8):
            row, num_tokens = unread.pop(0)
            read(row, num_tokens)
            if len(row.text) == row.limit and not row.has_ended:
                scheduler.end(row)
        if not arriving and all(sequence.has_ended for sequence in sequences):
            break
    assert all(sequence.has_ended and sequence.num_new == sequence.request.max_new_tokens for sequence in sequences)
    assert all(pool.num_in_use == 0 for pool in scheduler.pools)
