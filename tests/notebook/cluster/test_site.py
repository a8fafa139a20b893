"""Test nbkit.toml: the settings of a machine, a user and a project, and the limits for a user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nbkit.errors import UsageError
from nbkit.notebook.cluster import registry, site_settings
from nbkit.notebook.cluster.launch.pins import pins_within
from nbkit.notebook.cluster.machine.gpus import Gpu, Survey
from nbkit.notebook.cluster.machine.machine import Machine, TorchBuild, read_machine
from nbkit.notebook.cluster.registry import ClusterEntry
from nbkit.notebook.doctor import doctor
from nbkit.wire.processes import Process

Files = tuple[Path, Path, Path]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Return the paths of the settings of a machine, a user and a project. None of these files exists yet."""
    found = tmp_path / "machine.toml", tmp_path / "user.toml", tmp_path / "project.toml"
    monkeypatch.setattr(site_settings, "files", lambda: found)
    # Importing torch takes seconds for each report. tests/commands/test_doctor.py does it.
    monkeypatch.setattr("nbkit.notebook.doctor._private_symbols", lambda torch: ())
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path / "home"))
    return found


def held(n: int, *labels: str) -> None:
    """Register a running cluster of this user."""
    here = Process.of(os.getpid())
    labels = labels or ("core 0",) * n
    entry = ClusterEntry("taken", os.uname().nodename, n, "gloo", 60.0, 0.0, here, here, here, labels, ("",) * n)
    entry.folder.mkdir(parents=True)
    registry.save(entry)


def gpus(count: int) -> Machine:
    found = tuple(Gpu(i, f"GPU-{i}000", "A100", 81920, 4) for i in range(count))
    return Machine(TorchBuild("2.13.0", cuda="13.0"), Survey(found))


def test_a_later_file_wins_and_a_limit_of_the_machine_is_only_lowered(files: Files) -> None:
    machine, user, project = files
    assert site_settings.read() == site_settings.Site()

    machine.write_text('max_ranks = 8\nmax_gpus = 2\nttl = "1h"\n')
    user.write_text('max_ranks = 16\nttl = "30min"\nhome = "/scratch"\n')
    project.write_text("max_gpus = 1\nttl = 60\n")
    found = site_settings.read()

    assert (found.max_ranks, found.max_gpus, found.ttl, found.home) == (8, 1, 60.0, Path("/scratch"))
    assert found.sources["max_gpus"] == project
    assert found.notes == (f"max_ranks in {user} has no effect: {machine} allows less",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_rank = 8", "no key 'max_rank'; keys: max_ranks, max_gpus, max_ttl, ttl, home, runs, max_disk"),
        ("max_ranks = 0", "max_ranks = 0"),
        ("max_ranks = true", "max_ranks = True"),
        ('ttl = "soon"', "ttl = 'soon'"),
        ('home = "here"', "home = 'here'"),
        ('runs = "here"', "runs = 'here'"),
        ('max_disk = "20"', "max_disk = '20'"),
        ('max_disk = "0GB"', "max_disk = '0GB'"),
        ("max_disk = 20", "max_disk = 20"),
        ("max_ranks = ", "Invalid value"),
        ('home = "/scratch"', "for a machine or a user"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_file_and_shown_by_doctor(files: Files, text: str, says: str) -> None:
    files[2].write_text(text)

    with pytest.raises(UsageError) as error:
        site_settings.read()

    assert str(files[2]) in error.value.what and says in error.value.numbers
    report = doctor()
    assert says in repr(report) and not report.ok


def test_one_user_takes_no_more_than_the_machine_allows(files: Files) -> None:
    files[0].write_text("max_ranks = 3\n")
    held(2)

    with pytest.raises(UsageError, match=r"2 ranks asked for, max_ranks is 3 in .*; 2 are taken by taken") as error:
        pins_within(site_settings.read(), read_machine(), 2, cpu=True)
    assert error.value.hint == "-n 1   or   %cluster stop taken"
    fewer = pins_within(site_settings.read(), gpus(0))
    assert len(fewer.pins) == 1
    assert any("1 of 2 ranks are taken, since max_ranks is 3" in note for note in fewer.notes)


def test_gpus_have_a_separate_limit(files: Files) -> None:
    files[0].write_text("max_gpus = 2\n")
    held(2, "GPU 7 A100", "GPU 7 A100")

    assert len(pins_within(site_settings.read(), gpus(4), 5, cpu=True).pins) == 5
    assert [pin.label for pin in pins_within(site_settings.read(), gpus(4)).pins] == ["GPU 0 A100"]
    with pytest.raises(UsageError, match="2 GPUs asked for"):
        pins_within(site_settings.read(), gpus(4), gpus="0,1")
    with pytest.raises(UsageError, match="2 GPUs asked for"):  # a spare counts too
        pins_within(site_settings.read(), gpus(4), 1, spares=1)


def test_the_time_to_live_has_a_default_and_a_bound(files: Files) -> None:
    assert site_settings.read().ttl_of(None) == 7200
    files[0].write_text('max_ttl = "1h"\n')

    assert site_settings.read().ttl_of(None) == 3600
    assert site_settings.read().ttl_of(60.0) == site_settings.read().ttl_of("1min") == 60
    with pytest.raises(UsageError, match="max_ttl is 1 h"):
        site_settings.read().ttl_of(7200.0)


def test_clusters_are_stored_where_the_machine_says(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files[0].write_text('home = "/scratch"\n')
    monkeypatch.delenv("NBKIT_HOME")
    monkeypatch.setattr(site_settings, "getpass", type("Known", (), {"getuser": staticmethod(lambda: "ada")}))
    site_settings.home_here.cache_clear()

    assert registry.home() == Path("/scratch/ada/nbkit")
    site_settings.home_here.cache_clear()


def test_runs_have_a_folder_for_each_user_and_a_limit_which_a_later_file_lowers(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_settings, "getpass", type("Known", (), {"getuser": staticmethod(lambda: "ada")}))
    files[0].write_text('runs = "/data"\nmax_disk = "20GB"\n')
    assert (site_settings.read().runs, site_settings.read().max_disk) == (Path("/data/ada"), 20_000_000_000)

    files[1].write_text('max_disk = "1.5 TB"\n')
    files[2].write_text('runs = "/project"\nmax_disk = "500 MB"\n')
    found = site_settings.read()

    assert (found.runs, found.max_disk) == (Path("/project/ada"), 500_000_000)
    assert found.notes == (f"max_disk in {files[1]} has no effect: {files[0]} allows less",)
    assert f"500 MB  {files[2]}" in repr(doctor()) and f"/project/ada  {files[2]}" in repr(doctor())


def test_doctor_shows_each_setting_with_its_file(files: Files) -> None:
    files[1].write_text('max_ranks = 1\nttl = "30min"\n')

    shown = repr(doctor())

    assert f"30 min  {files[1]}" in shown
    assert "1 of 2 ranks are taken, since max_ranks is 1" in shown
