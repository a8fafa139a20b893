"""Test the memory of a switch: the sum of both sides if it fits on every rank, else the larger side."""

from nbkit.planner.peak import SPARE_BYTES, during

MB = 1 << 20


def test_a_switch_holds_both_sides_if_every_rank_has_room() -> None:
    found = during([700 * MB, 500 * MB], [200 * MB, 300 * MB], buffers=48 * MB, left=[248 * MB, None])

    assert found.in_place is False
    assert found.num_bytes == (948 * MB, 848 * MB)


def test_a_switch_is_in_place_on_all_ranks_if_one_rank_lacks_a_byte() -> None:
    found = during([700 * MB, 500 * MB], [200 * MB, 600 * MB], buffers=48 * MB, left=[248 * MB - 1, None])

    assert found.in_place is True
    assert found.num_bytes == (700 * MB + SPARE_BYTES, 600 * MB + SPARE_BYTES)
