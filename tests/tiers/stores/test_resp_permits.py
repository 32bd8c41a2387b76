"""Permits: never more than there are, in the order of asking, and none lost."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from kvcore.tiers.stores.resp_permits import Permits


def test_never_more_than_there_are() -> None:
    permits, lock = Permits(3), threading.Lock()
    inside = most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with permits:
                with lock:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0)
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 3)


def test_in_the_order_of_asking() -> None:
    permits, order = Permits(1), []
    permits.acquire()
    threads = []
    for n in range(5):
        threads.append(threading.Thread(target=lambda n=n: (permits.acquire(), order.append(n), permits.release())))
        threads[-1].start()
        while len(permits._waiting) <= n:
            time.sleep(0.001)
    permits.release()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_who_is_interrupted_leaves_the_queue() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    permits = Permits(1)
    permits.acquire()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            permits.acquire()
    finally:
        signal.signal(signal.SIGALRM, before)
    permits.release()
    with permits:  # it is free, and was handed to nobody
        pass
    permits.acquire()
    permits.release()
