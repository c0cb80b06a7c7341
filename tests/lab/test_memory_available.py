"""What is left of the machine's memory, or of the container's."""

from subquad.lab import peak_memory


def test_a_container_limit_counts(monkeypatch):
    free = peak_memory.available_memory()
    assert free is None or free > 0
    numbers = {"/sys/fs/cgroup/memory.max": 1000, "/sys/fs/cgroup/memory.current": 400}
    monkeypatch.setattr(peak_memory, "_number", numbers.get)
    monkeypatch.setattr(peak_memory, "_file_pages", lambda path, name: 0)
    assert peak_memory.available_memory() == 600
    monkeypatch.setattr(peak_memory, "_file_pages", lambda path, name: 150 if name == "inactive_file" else 0)
    assert peak_memory.available_memory() == 750
    monkeypatch.setattr(peak_memory, "_number", {}.get)  # no container, or no limit
    unlimited = peak_memory.available_memory()
    assert unlimited is None or unlimited > 600


def test_pages_of_files_are_read_by_name(tmp_path):
    stat = tmp_path / "memory.stat"
    stat.write_text("anon 1\ninactive_file 4096\nactive_file 8\n")
    assert peak_memory._file_pages(str(stat), "inactive_file") == 4096
    assert peak_memory._file_pages(str(stat), "total_inactive_file") == 0
    assert peak_memory._file_pages(str(tmp_path / "absent"), "inactive_file") == 0
