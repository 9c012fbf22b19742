"""Seconds, peak memory and the machine's matmul rate, on CPU and CUDA alike."""

from __future__ import annotations

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


_clock: Callable[[], float] = time.perf_counter


def use_cpu_time() -> None:
    """Count the seconds this process computes, on one thread: what others do beside it does not count."""
    global _clock
    torch.set_num_threads(1)
    _clock = time.process_time


def cpu_time_in_use() -> bool:
    return _clock is time.process_time


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call; on CUDA from the first to the last kernel of it."""
    if device.type == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(stop) / 1e3
    begin = _clock()
    call()
    return _clock() - begin


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Memory that one call adds at its highest point, its result included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _return_free_heap()
    before = _status_bytes("VmRSS")
    if _reset_high_water():
        call()
        return _status_bytes("VmHWM") - before
    return _sampled_peak(call) - before


def top_costs(call: Callable[[], object], device: torch.device, rows: int = 12) -> str:
    """torch.profiler's table of the operators with the most time of their own, by input shape."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    call()
    with profile(activities=activities, record_shapes=True) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    averages = profiler.key_averages(group_by_input_shape=True)
    return str(averages.table(sort_by=order, row_limit=rows, max_name_column_width=40, max_shapes_column_width=70))


def available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line. Run the benchmark on Linux.")


class MatmulRate:
    """The best float32 matmul rate seen so far, in FLOP/s.

    Call ``sample`` between contestants: on a shared machine a rate measured once, before or
    after, would compare two different machines.
    """

    def __init__(self, device: torch.device, tf32: bool = False) -> None:
        self.device, self.tf32 = device, tf32
        self.size = 8192 if device.type == "cuda" else 3072
        self.samples: list[float] = []
        self._left = torch.randn(self.size, self.size, device=device)
        self._right = torch.randn(self.size, self.size, device=device)
        self._out = torch.empty_like(self._left)
        self._multiply()

    def sample(self) -> None:
        self.samples.append(2.0 * self.size**3 / seconds(self._multiply, self.device))

    @property
    def best(self) -> float:
        return max(self.samples)

    def __str__(self) -> str:
        if not self.samples:
            return "matmul rate not measured: nothing ran"
        middle = statistics.median(self.samples)
        busy = "; the machine was busy" if middle < 0.8 * self.best else ""
        return f"matmul rate {self.best / 1e9:.0f} GFLOP/s (median {middle / 1e9:.0f}{busy})"

    def _multiply(self) -> None:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.mm(self._left, self._right, out=self._out)
        torch.backends.cuda.matmul.allow_tf32 = before


def _return_free_heap() -> None:
    # What malloc keeps from earlier contestants would hide what the next one takes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {field} line. Run the benchmark on Linux.")


def _reset_high_water() -> bool:
    """Set VmHWM back to VmRSS; some containers forbid it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _sampled_peak(call: Callable[[], object], every: float = 0.002) -> int:
    highest = _status_bytes("VmRSS")
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(every):
            highest = max(highest, _status_bytes("VmRSS"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        call()
    finally:
        done.set()
        thread.join()
    return highest
