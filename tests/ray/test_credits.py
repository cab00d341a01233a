"""Which host gets which outputs, without Ray, hosts or engines."""

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
        hosts.append(HostLoad(index, slots, outstanding, suspect=draw(st.booleans())))
    return hosts


WAITING = st.lists(
    st.builds(
        Waiting,
        group=st.integers(0, 4),
        last_host=st.none() | st.integers(0, 9),
        suspect=st.sampled_from([False, False, False, True]),
    ),
    max_size=60,
)


@given(some_hosts(), WAITING)
def test_properties_of_every_assignment(hosts: list[HostLoad], waiting: list[Waiting]) -> None:
    given = assign(hosts, waiting)
    assert given == assign(hosts, waiting)  # a function of its arguments
    positions = [position for position, _ in given]
    assert positions == sorted(set(positions))  # each position once, the oldest first
    by_index = {host.index: host for host in hosts}
    for index, count in Counter(index for _, index in given).items():
        host = by_index[index]  # an existing host
        assert host.outstanding + count <= host.window <= host.slots * 1.25 + 1
    suspects = Counter(index for position, index in given if waiting[position].suspect)
    for index, count in suspects.items():
        assert count + by_index[index].suspect == 1


@given(some_hosts(), st.lists(st.integers(0, 4), max_size=60))
def test_no_host_is_idle_while_outputs_wait(hosts: list[HostLoad], groups: list[int]) -> None:
    given = assign(hosts, [Waiting(group, last_host=group) for group in groups])
    if len(given) == len(groups):
        return
    counts = Counter(index for _, index in given)
    for host in hosts:
        assert host.outstanding + counts[host.index] >= host.slots


def test_suspects_go_one_by_one_and_others_pass() -> None:
    waiting = [Waiting(i, suspect=i < 3) for i in range(6)]
    assert assign([HostLoad(0, 4, 0)], waiting) == [(0, 0), (3, 0), (4, 0), (5, 0)]
    assert assign([HostLoad(0, 4, 1, suspect=True)], waiting[:3]) == []


def test_a_group_stays_together_until_a_host_would_be_idle() -> None:
    hosts = [HostLoad(0, 4, 0), HostLoad(1, 4, 0)]
    two_prompts = [Waiting(group) for group in (*"aaaa", *"bbbb")]
    pairs = Counter((two_prompts[p].group, index) for p, index in assign(hosts, two_prompts))
    assert len(pairs) == 2
    assert set(pairs.values()) == {4}
    one_prompt = [Waiting("a")] * 8
    assert Counter(index for _, index in assign(hosts, one_prompt)) == {0: 4, 1: 4}


def test_others_pass_one_that_waits_for_its_host() -> None:
    hosts = [HostLoad(0, 4, 5), HostLoad(1, 4, 4)]
    assert assign(hosts, [Waiting("a", last_host=0), Waiting("b")]) == [(1, 1)]
