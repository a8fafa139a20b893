"""The memory of a switch: the sum of both sides if it fits on every rank, else the larger side."""

from nbkit.planner.peak import SPARE_BYTES, during

MB = 1 << 20


def test_both_sides_where_every_rank_has_room_for_the_second() -> None:
    found = during([700 * MB, 500 * MB], [200 * MB, 300 * MB], buffers=48 * MB, left=[248 * MB, None])

    assert found.in_place is False
    assert found.num_bytes == (948 * MB, 848 * MB)


def test_the_larger_side_on_all_ranks_where_one_lacks_a_single_byte() -> None:
    found = during([700 * MB, 500 * MB], [200 * MB, 600 * MB], buffers=48 * MB, left=[248 * MB - 1, None])

    assert found.in_place is True
    assert found.num_bytes == (700 * MB + SPARE_BYTES, 600 * MB + SPARE_BYTES)
