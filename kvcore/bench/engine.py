"""A vLLM engine in a process of its own, in an environment of its own, as an object.

An engine cannot be taken down within a process, and two environments rarely agree on one torch: so it runs beside, and
is told what to do through pipes. See `engine_worker.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError, KVCoreError

__all__ = ["EngineProcess", "Generated", "Usage", "check_engine_python", "engine_environment"]

_LOG_LINES = 15
_ERROR = re.compile(r"\b[A-Z]\w*Error: ")
_GRACE_SECONDS = 60.0
_KV_CACHE_BYTES = 1 << 30
_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclass(frozen=True, slots=True)
class Generated:
    """What an engine made of one prompt.

    Parameters
    ----------
    tokens : list of int
        The new tokens.
    logprobs : list of float
        The natural logarithm of each one's probability.
    cached : int
        Tokens of the prompt that were not computed: those of the engine's own prefix cache, and of the connector.
    ttft : float or None
        Seconds from when the batch was given to the engine to the first new token.
    finish : str or None
        Why it ended: ``length``, ``stop``, ``error``, ``abort``.
    aborted : bool
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int
    ttft: float | None
    finish: str | None
    aborted: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of an engine hold, summed: resident bytes, threads, open descriptors."""

    processes: int
    rss: int
    threads: int
    descriptors: int


class EngineProcess:
    """A running engine; a context manager.

    Parameters
    ----------
    python : str
        The interpreter of the engine's environment.
    model : str
        A directory of Hugging Face, or a hub id.
    connector : mapping, optional
        Fields of vLLM's ``KVTransferConfig``; without it the engine has no connector.
    timeout : float
        Seconds that the start, and each call, may take: then everything is killed.
    in_process : bool
        Scheduler and worker in one process, which starts in a third of the time; else each in its own, as engines run.
    environment : mapping, optional
        More variables for the process.
    **options
        Arguments of ``vllm.LLM``; over float32, eager execution, 4,096 tokens, 8 sequences, 1 GiB of KV.

    Attributes
    ----------
    about : dict
        ``version``, ``blocks``, ``block_tokens``, ``prefix_caching``, ``chunked_prefill``, ``batched_tokens``,
        ``start_seconds``.
    pid : int
        Of the process whose children are the engine.

    Raises
    ------
    KVCoreError
        The engine does not start, fails or takes too long; the message has the end of its log.
    """

    def __init__(
        self,
        python: str,
        model: str,
        *,
        connector: Mapping[str, Any] | None = None,
        timeout: float = 300.0,
        in_process: bool = False,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        merged: dict[str, Any] = {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8, "seed": 0,
            "kv_cache_memory_bytes": _KV_CACHE_BYTES, **options,
        }  # fmt: skip
        self._timeout = timeout
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in close)
        try:
            self._process = subprocess.Popen(
                [python, "-m", "kvcore.bench.engine_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env={**engine_environment(), **({_IN_PROCESS: "0"} if in_process else {}), **(environment or {})},
                start_new_session=True,  # so that all of its processes can be killed, and none of ours
            )
        except OSError as error:
            self._log.close()
            raise KVCoreError(f"the engine's python {python} does not start: {error.strerror}") from error
        self.pid = self._process.pid
        try:
            told = {"model": model, "options": merged, "connector": None if connector is None else dict(connector)}
            self.about: dict[str, Any] = self._ask(told)
        except BaseException:
            self.kill()
            raise

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int = 16,
        together: bool = True,
        abort: Sequence[int] = (),
        abort_after: float = 0.0,
        pause: float = 0.0,
    ) -> list[Generated]:
        """Go on from prompts greedily, whatever an end-of-text token says.

        Parameters
        ----------
        prompts : sequence of sequences of int
            Token ids.
        tokens : int
            How many new ones.
        together : bool
            All prompts at once; otherwise one after the other.
        abort : sequence of int
            Indices of prompts that are aborted, where all come together.
        abort_after : float
            Seconds after which they are.
        pause : float
            Seconds to wait after each batch.

        Returns
        -------
        list of Generated
            In the order of the prompts.
        """
        answers = self._ask(
            {
                "do": "generate", "prompts": [list(map(int, prompt)) for prompt in prompts], "tokens": tokens,
                "together": together, "abort": list(abort), "abort_after": abort_after, "pause": pause,
            }
        )  # fmt: skip
        return [Generated(**answer) for answer in answers]

    def forget(self) -> bool:
        """Empty the engine's own prefix cache; return whether it could be."""
        return bool(self._ask({"do": "forget"}))

    def counters(self) -> dict[str, float]:
        """Return the sums of the engine's Prometheus counters, by name without ``_total``."""
        return dict(self._ask({"do": "metrics"})["counters"])

    def metrics_text(self) -> str:
        """Return what a Prometheus server would read."""
        return str(self._ask({"do": "metrics"})["text"])

    def call(self, module: str, function: str, *arguments: Any) -> list[Any]:
        """Call a function of a module in every worker process, with vLLM's worker object and the arguments.

        vLLM takes functions only where its variable ``VLLM_ALLOW_INSECURE_SERIALIZATION`` is 1.

        Returns
        -------
        list
            What each worker returned; JSON carries it here.
        """
        asked = {"do": "call", "module": module, "function": function, "arguments": list(arguments)}
        return list(self._ask(asked))

    def idle(self, seconds: float) -> None:
        """Let the engine be for a while."""
        self._ask({"do": "idle", "seconds": seconds})

    def log(self) -> str:
        """Return all that the engine's processes have printed."""
        place = self._log.tell()
        self._log.seek(0)
        text = self._log.read()
        self._log.seek(place)
        return text

    def usage(self) -> Usage:
        """Return what the processes hold now. Linux only."""
        pids = list(_family(self.pid))
        pages = threads = descriptors = 0
        for pid in pids:
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                pages += int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
                threads += len(os.listdir(f"/proc/{pid}/task"))
                descriptors += len(os.listdir(f"/proc/{pid}/fd"))
        return Usage(len(pids), pages * os.sysconf("SC_PAGE_SIZE"), threads, descriptors)

    def _ask(self, request: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise KVCoreError("the engine has no pipes")
        overdue = threading.Event()

        def stop() -> None:
            overdue.set()
            self._signal(signal.SIGKILL)

        timer = threading.Timer(self._timeout, stop)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died; its log says why
                stdin.write(json.dumps(request) + "\n")
                stdin.flush()
            line = stdout.readline()
        finally:
            timer.cancel()
        if line:
            answer = json.loads(line)
            if "error" not in answer:
                return answer["result"]
            raise KVCoreError(self._failure(f"the engine failed: {answer['error']}"))
        status = self._process.wait()
        why = f"took more than {self._timeout:g} s" if overdue.is_set() else f"ended with {status}"
        raise KVCoreError(self._failure(f"the engine {why}"))

    def _failure(self, what: str) -> str:
        """Say what failed: errors from anywhere in the log, for a cause is often far from the end, and its end."""
        lines = self.log().strip().splitlines()
        earlier = dict.fromkeys(line for line in lines[:-_LOG_LINES] if _ERROR.search(line))
        return "\n  ".join([what + ":", *list(earlier)[-_LOG_LINES:], *lines[-_LOG_LINES:]])

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End everything at once, as a machine that fails does."""
        self._signal(signal.SIGKILL)
        self._finish()

    def close(self) -> None:
        """End the engine and wait for it: it may finish what it does in the background."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_GRACE_SECONDS)
        self._signal(signal.SIGKILL)  # what may be left of its processes
        self._finish()

    def _finish(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._log.closed:
            self.close()


def engine_environment() -> dict[str, str]:
    """Return the variables of an engine's process: threads that do not spin, no downloads, no reports of usage.

    The user's own values win.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {
        "OMP_NUM_THREADS": str(cores),
        # By itself vLLM keeps one core of an engine free, and two where it has a connector, if that leaves any: on two
        # cores, one thread without a connector, and two with it. Engines that are compared have as many. It would
        # also want a NUMA node for each rank.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_NO_USAGE_STATS": "1",
        # Longer than a connector waits for what is on its way to a store.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "35",
    }
    return {**wanted, **os.environ}


def check_engine_python(python: str) -> str:
    """Return the path of an interpreter if vLLM and kvcore are installed there.

    Raises
    ------
    ConfigError
        They are not; the message says how to make such an environment.
    """
    path = Path(python).expanduser()
    how = "make one with `make vllm-env`, or name another with --engine-python"
    if not path.is_file():
        raise ConfigError(f"there is no engine's python at {python}: {how}")
    code = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('vllm', 'kvcore'))))"
    done = subprocess.run([str(path.absolute()), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{python} is no environment with vllm and kvcore: {how}")
    return str(path.absolute())


def _family(pid: int) -> Iterator[int]:
    """A process and all that come from it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in task.joinpath("children").read_text("ascii").split():
                yield from _family(int(child))
