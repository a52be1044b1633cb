"""What the scripts share: models and steps, options, progress and tables, result files."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .baselines import Loss
from .models import SHAPES, Decoder, DecoderShape

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def train_step(loss: Loss, trained: Decoder, batch: tuple[Tensor, Tensor]) -> float:
    """One forward and backward from cleared gradients; returns the loss."""
    trained.zero_grad(set_to_none=True)
    value = loss(*batch)
    value.backward()
    return value.item()


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(device: str, step: Callable[..., Any], *arguments: Any) -> float:
    """Seconds of one call, with the device's queue empty before and after."""
    synchronise(device)
    start = time.perf_counter()
    step(*arguments)
    synchronise(device)
    return time.perf_counter() - start


# --- command line ---------------------------------------------------------------------------------


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Options common to the scripts; ``defaults`` overrides their default values."""
    options = argparse.ArgumentParser(
        description=(description or "").strip().splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--shape", choices=SHAPES, default="small", help="decoder to measure")
    options.add_argument("--chunk", type=int, default=512, help="positions per chunk")
    options.add_argument("--batch", type=int, default=1, help="sequences per step")
    options.add_argument("--dtype", choices=DTYPES, default="float32", help="parameter type")
    options.add_argument("--device", default="cpu", help="where to run")
    options.add_argument("--threads", type=int, default=2, help="CPU threads")
    options.set_defaults(**defaults)
    return options


def make_model(shape: DecoderShape, dtype: torch.dtype, device: str) -> Decoder:
    """A randomly initialised decoder, the same one every time."""
    torch.manual_seed(0)
    with torch.device(device):
        return Decoder(shape).to(dtype)


# --- showing --------------------------------------------------------------------------------------


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


class Screen:
    """Progress and tables with rich, or as plain lines where rich is not installed."""

    def __init__(self) -> None:
        try:
            import rich.console
            import rich.progress
            import rich.table
        except ImportError:
            self._rich = None
        else:
            self._rich = rich
            self._console = rich.console.Console()

    @contextmanager
    def progress(self, title: str, steps: int) -> Iterator[Callable[[str], None]]:
        """Yields a function to call with a step's name as the step begins."""
        if self._rich is None:
            done = iter(range(1, steps + 1))
            yield lambda name: print(f"{title}: {next(done, steps)}/{steps} {name}", flush=True)
            return
        columns = self._rich.progress.Progress.get_default_columns()
        elapsed = self._rich.progress.TimeElapsedColumn()
        with self._rich.progress.Progress(*columns, elapsed, console=self._console) as bar:
            task = bar.add_task(title, total=steps)
            begun = False

            def begin(name: str) -> None:
                nonlocal begun
                bar.update(task, advance=1 if begun else 0, description=f"{title}: {name}")
                begun = True
                if not self._console.is_terminal:  # a bar shows nothing in a file until it ends
                    self.say(f"{title}: {name}")

            yield begin
            bar.update(task, completed=steps, description=title)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """First column left-aligned, the others to the right."""
        if self._rich is None:
            print(f"\n{title}\n" + "\n".join(" | ".join(map(str, r)) for r in (columns, *rows)))
            return
        table = self._rich.table.Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        self._console.print(table)

    def say(self, text: str) -> None:
        if self._rich is None:
            print(text, flush=True)
        else:
            self._console.print(text, markup=False, highlight=False)


# --- keeping --------------------------------------------------------------------------------------


def write_results(name: str, options: argparse.Namespace, results: Any) -> Path:
    """Write ``benchmarks/results/NAME.json``: the options, the software, the figures."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "options": vars(options),
        "environment": environment(str(getattr(options, "device", "cpu"))),
        "results": results,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def environment(device: str) -> dict[str, Any]:
    """Versions and the device, as far as figures depend on them."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found
