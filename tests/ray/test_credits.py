"""Which host gets what: without Ray, hosts or engines."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from enginepool.ray.credits import HostLoad, Waiting, assign


@st.composite
def some_hosts(draw: st.DrawFn) -> list[HostLoad]:
    hosts = []
    for index in draw(st.lists(st.integers(0, 9), unique=True, max_size=5)):
        slots = draw(st.integers(1, 12))
        outstanding = draw(st.integers(0, 2 * slots))
        hosts.append(HostLoad(index, slots, outstanding, reserved=draw(st.booleans())))
    return hosts


WAITING = st.lists(
    st.builds(
        Waiting,
        group=st.integers(0, 4),
        home=st.none() | st.integers(0, 9),
        alone=st.sampled_from([False, False, False, True]),
    ),
    max_size=60,
)


@given(some_hosts(), WAITING)
def test_what_always_holds(hosts: list[HostLoad], waiting: list[Waiting]) -> None:
    given = assign(hosts, waiting)
    assert given == assign(hosts, waiting)  # a function of its arguments
    positions = [position for position, _ in given]
    assert positions == sorted(set(positions))  # each once, the oldest first
    by_index = {host.index: host for host in hosts}
    for index, count in Counter(index for _, index in given).items():
        host = by_index[index]  # one that there is
        assert not host.reserved
        assert host.outstanding + count <= host.window <= host.slots * 1.25 + 1
    for position, index in given:
        if waiting[position].alone:
            assert by_index[index].outstanding == 0
            assert [i for _, i in given].count(index) == 1


@given(some_hosts(), st.lists(st.integers(0, 4), max_size=60))
def test_no_host_stands_idle_beside_what_waits(hosts: list[HostLoad], groups: list[int]) -> None:
    given = assign(hosts, [Waiting(group, home=group) for group in groups])
    if len(given) == len(groups):
        return
    counts = Counter(index for _, index in given)
    for host in hosts:
        assert host.reserved or host.outstanding + counts[host.index] >= host.slots


@given(st.integers(1, 12), st.integers(1, 12))
def test_one_that_runs_alone_gets_its_turn(slots: int, busy: int) -> None:
    """Hosts are full of others, and others wait behind it: one of them runs empty for it."""
    loads = {0: busy, 1: busy}
    waiting = [Waiting("suspect", alone=True), *[Waiting(i) for i in range(40)]]
    for _ in range(2 * busy + 40):
        hosts = [HostLoad(index, slots, load) for index, load in loads.items()]
        given = assign(hosts, waiting)
        for _, index in given:
            loads[index] += 1
        if any(position == 0 for position, _ in given):
            return
        waiting = [one for i, one in enumerate(waiting) if i not in {p for p, _ in given}]
        loads = {index: max(0, load - 1) for index, load in loads.items()}
    raise AssertionError("it still waits")


def test_a_group_stays_together_until_somebody_would_stand_idle() -> None:
    hosts = [HostLoad(0, 4, 0), HostLoad(1, 4, 0)]
    two_prompts = [Waiting(group) for group in (*"aaaa", *"bbbb")]
    homes = Counter((two_prompts[p].group, index) for p, index in assign(hosts, two_prompts))
    assert len(homes) == 2
    assert set(homes.values()) == {4}
    one_prompt = [Waiting("a")] * 8
    assert Counter(index for _, index in assign(hosts, one_prompt)) == {0: 4, 1: 4}


def test_others_pass_one_that_waits_for_its_host() -> None:
    hosts = [HostLoad(0, 4, 5), HostLoad(1, 4, 4)]
    assert assign(hosts, [Waiting("a", home=0), Waiting("b")]) == [(1, 1)]
