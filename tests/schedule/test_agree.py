from __future__ import annotations

import threading
import time

from torch.distributed import HashStore, TCPStore

from dynaflow_train.errors import PlanMismatchError
from dynaflow_train.schedule.agree import agree

TEXT = "strategy dual_batch\nsizes    2 2\n   0  compute  0  mlp\n"


def ranks(
    plans: dict[int, tuple[str, str]], world_size: int, store=None, key="forward/4", limit=5.0
):
    """What `agree` raised on each rank (None: nothing), each in a thread, and how long it took."""
    store = store or HashStore()
    found: dict[int, str | None] = {}

    def run(rank: int) -> None:
        try:
            agree(*plans[rank], store=store, rank=rank, world_size=world_size, key=key,
                  timeout_s=limit)  # fmt: skip
            found[rank] = None
        except PlanMismatchError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in plans]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found, time.monotonic() - start


def test_equal_plans_agree_again_and_again_on_one_store():
    store = HashStore()
    for key in ("forward/4", "backward/4"):
        found, took = ranks(dict.fromkeys(range(3), (key, TEXT)), 3, store, key)
        assert found == {0: None, 1: None, 2: None}
        assert took < 4, f"took {took} s"


def test_every_rank_names_the_one_that_differs_and_the_line():
    other = TEXT.replace("2 2", "3 1")
    found, _ = ranks({0: ("a", TEXT), 1: ("b", other), 2: ("a", TEXT)}, 3)
    assert len(set(found.values())) == 1
    message = found[0]
    assert message is not None
    assert message.startswith("rank 1 of 3 made another plan for forward/4 than rank 0")
    assert "first difference in line 2" in message
    assert "  rank 0: sizes    2 2\n  rank 1: sizes    3 1  <-- here\n" in message


def test_the_majority_is_right_even_against_rank_0():
    found, _ = ranks({0: ("b", TEXT + "x"), 1: ("a", TEXT), 2: ("a", TEXT)}, 3)
    assert all(message and message.startswith("rank 0 of 3 made") for message in found.values())
    assert "line 4" in (found[2] or "")


def test_equal_plans_of_different_graphs_say_so():
    found, _ = ranks({0: ("a", TEXT), 1: ("b", TEXT)}, 2)
    assert "their plans read the same, but the graphs below them differ" in (found[1] or "")


def test_a_dead_store_is_an_error_that_names_its_host():
    store = TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    client = TCPStore("localhost", store.port, None, is_master=False)
    del store
    found, _ = ranks({1: ("a", TEXT)}, 2, client, limit=2)
    assert "the process group's store failed" in (found[1] or "")
    assert "mostly rank 0" in (found[1] or "")


def test_a_rank_that_does_not_answer_is_named_within_the_limit():
    found, took = ranks({0: ("a", TEXT), 2: ("a", TEXT)}, 4, limit=0.5)
    assert "ranks 1, 3 of 4 did not answer" in (found[0] or "")
    assert "rank 0 waited 0.5 s for the plan of forward/4" in (found[0] or "")
    assert "rank 2 waited" in (found[2] or "")
    assert 0.4 < took < 3
