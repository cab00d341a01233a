"""Which requests may start, if there are more adapters than slots."""

from enginepool.lora.slot_policy import SlotPolicy


def started(policy: SlotPolicy, waiting: list[int | None]) -> list[int | None]:
    return [number for number in waiting if policy.may_start(number)]


def test_no_more_adapters_start_than_there_are_slots() -> None:
    policy = SlotPolicy([], {}, slots=2)
    assert started(policy, [1, 2, 3, 1, None, 2, 3]) == [1, 2, 1, None, 2]


def test_running_adapters_keep_their_slots() -> None:
    policy = SlotPolicy([1, 2], {1: 3}, slots=2)
    assert started(policy, [3, 1, 2]) == [3, 1]
    policy = SlotPolicy([1, 2], {1: 3}, slots=2)
    assert started(policy, [1, 2, 3]) == [1, 2]


def test_a_request_that_waits_for_a_slot_gets_one() -> None:
    """While no slot is free, no later request starts with the adapter that has the fewest
    running requests."""
    running = {1: 2, 2: 1}
    policy = SlotPolicy([1, 2], running, slots=2)
    assert started(policy, [1, 2, 3, 1, 2, None, 2]) == [1, 2, 1, None]
    running[2] = 0
    assert started(SlotPolicy([1, 2], running, slots=2), [3, 1, 2]) == [3, 1]


def test_the_least_recently_used_free_slot_is_taken() -> None:
    policy = SlotPolicy([1, 2], {}, slots=2)
    assert started(policy, [3, 2, 1]) == [3, 2]
