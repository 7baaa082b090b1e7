"""Processes that work beside this one."""

import os
import signal
import sys

import torch


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def start_worker() -> None:
    """How a process begins that works for this one: an interrupt is not its to handle, others need cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
