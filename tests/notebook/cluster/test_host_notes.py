"""Test the notes about differences between the hosts of a cluster."""

from __future__ import annotations

from nbkit.notebook.cluster.hosts.agent import notes_on


def test_different_drivers_and_clocks_are_named_by_host() -> None:
    notes = notes_on({"n1": "535.183.01", "n2": "550.54.15"}, {"n1": -0.01, "n2": 3.0})
    assert notes == (
        "the hosts have different versions of NVIDIA's driver: 535.183.01 on n1, 550.54.15 on n2",
        "the clocks of the hosts differ, so times of their ranks in dashboard and traces do too: "
        "ahead by 0.0 s on n1, 3.0 s on n2",
    )


def test_equal_hosts_and_hosts_without_gpus_get_no_note() -> None:
    assert notes_on({"n1": "550.54.15", "n2": "550.54.15"}, {"n1": 0.0, "n2": -0.3}) == ()
    assert notes_on({"n1": "", "n2": ""}, {"n1": 7.0, "n2": 7.1}) == ()
