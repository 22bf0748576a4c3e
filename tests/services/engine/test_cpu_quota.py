"""The threads of an engine in a container with a quota of CPU time."""

from pathlib import Path

import pytest

from services.engine.startup.cpu_quota import threads_within_quota

CORES = 64


def threads(folder: Path, groups: str, files: dict[str, str]) -> int:
    """The threads of a process in these control groups; `files` have the quotas."""
    (folder / "cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return threads_within_quota(CORES, folder / "cgroup", folder / "sys")


@pytest.mark.parametrize(
    ("quota", "found"), [("200000", 2), ("150000", 1), ("50000", 1), ("max", CORES), ("9900000", CORES)]
)
def test_they_are_the_whole_cores_of_the_quota_at_least_one_and_never_more_than_the_machine_has(
    tmp_path: Path, quota: str, found: int
) -> None:
    assert threads(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000\n"}) == found


def test_the_smallest_quota_of_a_group_and_those_above_it_counts(tmp_path: Path) -> None:
    files = {"pod/one/cpu.max": "max 100000\n", "pod/cpu.max": "300000 100000\n", "cpu.max": "800000 100000\n"}
    assert threads(tmp_path, "0::/pod/one\n", files) == 3


def test_the_first_version_of_control_groups_has_quotas_too(tmp_path: Path) -> None:
    groups = "4:memory:/a\n3:cpu,cpuacct:/docker/a\n"
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}
    assert threads(tmp_path, groups, files) == 2  # mounted in the container as its own group
    (tmp_path / "sys" / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads(tmp_path, groups, {}) == CORES


@pytest.mark.parametrize("text", ["", "many 100000\n", "100000\n", "100000 0\n"])
def test_a_file_that_is_no_quota_counts_as_none(tmp_path: Path, text: str) -> None:
    assert threads(tmp_path, "0::/\n", {"cpu.max": text}) == CORES


def test_without_control_groups_all_cores_compute(tmp_path: Path) -> None:
    assert threads_within_quota(CORES, tmp_path / "missing", tmp_path) == CORES
