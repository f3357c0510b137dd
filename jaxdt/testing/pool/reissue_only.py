"""The control of the pool's fuzzer: a table that keeps to the letter of the paper (hybrid parameter servers).

When a client is lost, its unfinished tasks are issued again. The paper does not say what becomes of tasks that the
client had finished and not handed in, nor of a client that comes back with more than was asked of it.
"""

from jaxdt.wiring.pool.task_table import TaskTable


class ReissueOnly(TaskTable):
    def void(self, client: int) -> list[int]:
        """Only leases are issued again. Tasks that the client had done count as done, and are asked for no more."""
        for lease in self.leases_of(client):
            self._requeue(lease)
        for m in list(self._in_flight[client]):
            self._end_flight(m, self._units[m])
        self._n_committed += len(self._uncommitted.pop(client, ()))
        return []

    def commit(self, client: int, items: tuple[tuple[int, int], ...]) -> bool:
        """Whatever comes is added."""
        self._n_committed += len(self._uncommitted.pop(client, ()))
        return True
