"""The grammar process checks grammars, each in a child of its own with limits on CPU time and memory.

xgrammar's compiler has no limit of time, and nothing can stop a thread in it; the kernel can stop a child process. This process imports
the libraries that read grammars (`grammar_readers`) and nothing of vLLM. So it stays small and has one thread, and forking is cheap and
safe.

Each line of standard input is JSON: the first line has the limits, each later line a tokenizer with a number for it, or a check with the
number of its tokenizer. On standard output, an empty object says that the process is ready, and each check is answered by one line. The
process ends at the end of its input.
"""

import json
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import xgrammar as xgr

from serve_app.host.core_files import leave_no_core_file
from serve_app.ingress.front_end.grammar_readers import read, tag_arguments

_LOOK_S = 0.05
"""Seconds between two searches for killed children. A child that ends by itself writes its line before."""

_SAID_CHARS = 300
"""The longest quoted error text. A character takes at most 12 bytes of JSON, so a line stays below the 4,096 bytes that a pipe writes at
once."""

_CAUSES = {signal.SIGXCPU: "time", signal.SIGABRT: "memory", signal.SIGSEGV: "depth"}
"""The limit that each signal shows. Other signals, like the kernel's SIGKILL for lack of memory, say nothing about the grammar."""


def serve() -> None:
    """Run the checks that standard input asks for, all at the same time, until the input ends."""
    os.nice(5)  # the ingress's event loop and streams have priority
    children: dict[int, int] = {}
    compilers: dict[int, Any] = {}
    waiting, limits = b"", None
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_S if children else None)
        if readable:
            if not (data := os.read(0, 1 << 20)):
                break
            *lines, waiting = (waiting + data).split(b"\n")
            for line in map(json.loads, lines):
                if limits is None:
                    limits = line["limits"]
                    os.write(1, b"{}\n")
                elif "tokenizer" in line:
                    compilers[line["number"]] = _compiler(line["tokenizer"])
                else:
                    children[_begin(compilers[line["number"]], line, limits)] = line["id"]
        _report_killed(children)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _compiler(tokenizer: str) -> Any:
    # One thread, so that CPU time is close to the time a check takes. No cache, because a child compiles once.
    return xgr.GrammarCompiler(xgr.TokenizerInfo.deserialize_json(tokenizer), max_threads=1, cache_enabled=False)


def _begin(compiler: Any, check: Mapping[str, Any], limits: Mapping[str, Any]) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        _limit(limits["compile_s"], limits["memory_bytes"])
        signal.setitimer(signal.ITIMER_REAL, limits["run_s"])  # its signal also ends a process that only waits
        os.write(1, json.dumps({"id": check["id"], **_check(compiler, check, limits["in_loop_s"])}).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


def _limit(cpu_s: int, more_bytes: int) -> None:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # short of memory, the kernel ends this child before any other process
    with open("/proc/self/statm") as file:
        has_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (has_bytes + more_bytes,) * 2)
    leave_no_core_file()


def _check(compiler: Any, check: Mapping[str, Any], in_loop_s: float) -> dict[str, Any]:
    """Return the step that failed and its error text, if any, and the CPU seconds of two steps for which other requests have to wait.

    `read_s` is for reading the grammar in the ingress's event loop; `mask_s` is for finding the possible first tokens in an engine step.
    """
    kind, spec = check["kind"], check["spec"]
    step, said, cost = "read", "", {"read_s": 0.0, "mask_s": 0.0}
    try:
        read_it = partial(read, kind, spec, second=check["second"], ignores=check["ignores"])
        cost["read_s"], raised = _measured(read_it, in_loop_s)
        if raised is None:
            step = "compile"
            grammar = _compile(compiler, kind, spec, any_whitespace=check["any_whitespace"])
            cost["mask_s"], raised = _measured(partial(_first_mask, grammar), in_loop_s)
        if raised is not None:
            raise raised
        step = "done"
    except MemoryError:
        step = "memory"
    except Exception as exc:  # of any type: xgrammar has no common one
        said = str(exc)[:_SAID_CHARS]
        step = "memory" if "bad_alloc" in said else step
    except BaseException as exc:  # a panic of a library in Rust, which must not happen in the event loop
        step, said = "compile", str(exc)[:_SAID_CHARS]
    return {"step": step, "said": said, **cost}


def _measured(do: Callable[[], object], limit_s: float) -> tuple[float, Exception | None]:
    """Return the CPU seconds of a call and the exception that it raised; above the limit, the call is repeated and the shorter time counts.

    A good grammar must not be refused because the machine was slow for a moment.
    """
    least_s, raised = math.inf, None
    for _ in range(2):
        began = time.process_time()
        try:
            do()
        except MemoryError:
            raise
        except Exception as exc:
            raised = exc
        least_s = min(least_s, time.process_time() - began)
        if least_s <= limit_s:
            break
    return least_s, raised


def _first_mask(grammar: Any) -> None:
    xgr.GrammarMatcher(grammar).fill_next_token_bitmask(xgr.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size))


def _compile(compiler: Any, kind: str, spec: str, *, any_whitespace: bool) -> Any:
    """Do what vLLM's backend does in the engine core."""
    match kind:
        case "json":
            separators = None if any_whitespace else (",", ":")
            return compiler.compile_json_schema(spec, any_whitespace=any_whitespace, separators=separators)
        case "regex":
            return compiler.compile_regex(spec)
        case "structural_tag":
            return compiler.compile_structural_tag(*tag_arguments(spec))
        case "lark":
            return compiler.compile_lark(spec)
    return compiler.compile_grammar(spec)


def _report_killed(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        check_id = children.pop(pid)
        if os.WIFSIGNALED(status):
            step = _CAUSES.get(signal.Signals(os.WTERMSIG(status)), "late")
        elif os.WEXITSTATUS(status):
            step = "memory"  # the child could not even write its line
        else:
            continue
        os.write(1, json.dumps({"id": check_id, "step": step, "said": "", "read_s": 0.0, "mask_s": 0.0}).encode() + b"\n")


if __name__ == "__main__":
    serve()
