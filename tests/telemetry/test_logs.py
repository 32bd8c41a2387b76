"""The lines that operators look for are written as they look for them; log files rotate, and nothing gets lost."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys

import pytest

from kvcore.errors import ConfigError
from kvcore.telemetry import LogObserver, configure_logging, log_lookup


def lines(caplog):
    return [(record.name, record.levelname, record.getMessage()) for record in caplog.records]


def test_the_two_lines_are_those_of_the_contract(caplog):
    caplog.set_level("INFO", "kvcore")
    observer = LogObserver()
    observer.request_lookup("req-1", 1391, 1280, 0.001)
    observer.request_lookup("req-2", 1391, 1280, 0.001, 1024)
    observer.request_store("req-1", 256, 1391, 1000, 0.1)
    assert lines(caplog) == [
        ("kvcore", "INFO", "Reqid: req-1, Total tokens 1391, hit tokens: 1280, need to load: 1280"),
        ("kvcore", "INFO", "Reqid: req-2, Total tokens 1391, hit tokens: 1280, need to load: 256"),
        ("kvcore", "INFO", "Storing KV cache for 256 out of 1391 tokens for request req-1"),
    ]


def test_nothing_to_load_is_not_a_negative_number(caplog):
    caplog.set_level("INFO", "kvcore")
    log_lookup("r", 10, 0, 8)
    assert caplog.messages == ["Reqid: r, Total tokens 10, hit tokens: 0, need to load: 0"]


def test_what_has_no_name_or_stores_nothing_is_no_news(caplog):
    caplog.set_level("INFO", "kvcore")
    observer = LogObserver()
    observer.request_lookup("", 10, 0, 0.0)
    observer.request_store("", 10, 10, 1, 0.0)
    observer.request_store("r", 0, 10, 0, 0.0)
    assert caplog.messages == []
    caplog.set_level("DEBUG", "kvcore")
    observer.request_store("", 10, 10, 1, 0.0)
    assert caplog.messages == ["Storing KV cache for 10 out of 10 tokens for request -"]


# --- files


def written(path):
    """All lines, of the oldest file first."""
    older = sorted(path.parent.glob(f"{path.name}.[0-9]*"), key=lambda p: -int(p.suffix[1:]))
    return [line for file in [*older, path] for line in file.read_text("utf-8").splitlines()]


def test_a_file_gets_the_lines_and_rotates(tmp_path, logger):
    path = tmp_path / "new" / "kvcore.log"
    configure_logging("info", path, max_bytes=1000, count=3)
    for number in range(60):
        logger.info("line %d", number)
    found = [line.split()[-1] for line in written(path)]
    assert found == [str(number) for number in range(60 - len(found), 60)]
    names = {file.name for file in path.parent.glob("kvcore.log*")} - {"kvcore.log.lock"}
    assert names == {"kvcore.log", "kvcore.log.1", "kvcore.log.2", "kvcore.log.3"}
    assert all(file.stat().st_size <= 1000 for file in path.parent.glob("kvcore.log*"))


def test_no_older_file_need_be_kept(tmp_path, logger):
    path = tmp_path / "kvcore.log"
    configure_logging("INFO", path, max_bytes=500, count=0)
    for number in range(100):
        logger.info("line %d", number)
    assert written(path)[-1].endswith("line 99")
    assert path.stat().st_size <= 500
    assert {file.name for file in tmp_path.iterdir()} == {"kvcore.log", "kvcore.log.lock"}


def test_calling_it_again_replaces_what_it_did(tmp_path, logger):
    before = list(logger.handlers)
    for name in ("a.log", "b.log", "b.log"):
        configure_logging("INFO", tmp_path / name)
    assert len(logger.handlers) == len(before) + 1
    logger.info("once")
    assert (tmp_path / "a.log").read_text() == ""
    assert len(written(tmp_path / "b.log")) == 1
    configure_logging("WARNING")
    assert logger.handlers == before
    assert logger.level == logging.WARNING


def test_nothing_but_the_logger_is_touched(tmp_path, logger, caplog):
    root = logging.getLogger()
    before = (root.level, list(root.handlers), logger.propagate)
    configure_logging("DEBUG", tmp_path / "a.log")
    assert (root.level, list(root.handlers), logger.propagate) == before
    logger.debug("seen by all")
    assert caplog.messages == ["seen by all"]


@pytest.mark.parametrize("level", ["verbose", "", "NOTSET"])
def test_an_unknown_level_is_refused(level):
    with pytest.raises(ConfigError, match="log_level must be one of DEBUG"):
        configure_logging(level)


@pytest.mark.parametrize("sizes", [{"max_bytes": 0}, {"count": -1}])
def test_sizes_that_mean_nothing_are_refused(sizes, tmp_path):
    with pytest.raises(ConfigError, match="at least one byte"):
        configure_logging("INFO", tmp_path / "a.log", **sizes)


def test_a_file_that_cannot_be_opened_is_refused_and_what_was_there_stays(tmp_path, logger):
    configure_logging("INFO", tmp_path / "a.log")
    with pytest.raises(ConfigError, match="choose another log_file"):
        configure_logging("INFO", tmp_path)
    logger.info("still")
    assert len(written(tmp_path / "a.log")) == 1


def test_a_file_that_is_removed_is_made_again(tmp_path, logger):
    path = tmp_path / "a.log"
    configure_logging("INFO", path)
    logger.info("one")
    path.unlink()
    logger.info("two")
    assert [line.split()[-1] for line in written(path)] == ["two"]


def many_lines(path, who, configure):
    if configure:
        configure_logging("INFO", path, max_bytes=2000, count=100)
    for number in range(200):
        logging.getLogger("kvcore").info("%s %d", who, number)


# Newer Pythons warn of every fork next to threads; which other tests left some is not this one's business.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_several_processes_write_one_file_and_no_line_is_lost(tmp_path, method):
    path = tmp_path / "kvcore.log"
    if method == "fork":
        configure_logging("INFO", path, max_bytes=2000, count=100)
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=many_lines, args=(path, who, method == "spawn")) for who in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = [tuple(line.split()[-2:]) for line in written(path)]
    assert sorted(found) == sorted((who, str(number)) for who in "abc" for number in range(200))
    assert len(list(tmp_path.glob("kvcore.log.[0-9]*"))) > 5


BARE = """
import logging
from kvcore.telemetry import configure_logging
configure_logging({arguments})
logging.getLogger("kvcore").info("news")
logging.getLogger("kvcore").warning("trouble")
"""


@pytest.mark.parametrize("with_file", [False, True])
def test_where_nobody_listens_it_goes_to_the_error_stream(tmp_path, with_file):
    arguments = f'"INFO", {str(tmp_path / "a.log")!r}' if with_file else '"INFO"'
    command = [sys.executable, "-c", BARE.format(arguments=arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "trouble" in done.stderr
    assert ("news" in done.stderr) != with_file
