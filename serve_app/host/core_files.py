"""This module keeps core files of the processes that hold requests from being written.

A core file is a copy of a process's memory: prompts, answers, grammars, API keys.
"""

import resource

_NEARLY_NONE = 1
"""Bytes. The kernel writes no core file that is smaller than a page. If ``kernel.core_pattern`` names a program, the kernel gives the
program every core whatever its limit, 0 included, except at a limit of exactly 1."""


def leave_no_core_file() -> None:
    """Let a crash of this process, and of each process that it starts, leave no core file.

    The hard limit stays, so that an operator can allow core files again while the process runs: ``prlimit --core=unlimited --pid PID``.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (_NEARLY_NONE if hard else 0, hard))
