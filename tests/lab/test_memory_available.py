"""What is left of the machine's memory, or of the container's."""

from subquad.lab import memory


def test_a_container_limit_counts(monkeypatch):
    free = memory.available_memory()
    assert free is None or free > 0
    numbers = {"/sys/fs/cgroup/memory.max": 1000, "/sys/fs/cgroup/memory.current": 400}
    monkeypatch.setattr(memory, "_number", numbers.get)
    assert memory.available_memory() == 600
    monkeypatch.setattr(memory, "_number", {}.get)  # no container, or no limit
    unlimited = memory.available_memory()
    assert unlimited is None or unlimited > 600
