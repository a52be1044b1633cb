"""Train two small decoders on real text in three ways, and compare memory, time and loss.

Both models (one defined by transformers, one written by hand) are trained on Python's own
standard library: eagerly, with gradient checkpointing, and with seqsplit, from the same weights,
on the same batches. The three take their steps in turn, so that a slow moment of the machine
meets all of them.

A short stretch of text comes first and changes no weight: seqsplit compiles on it. In step 1 memory
is tracked, the steps after it are timed.
Writes `demo_memory.png`, the live memory over one step.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import corpus
import seqsplit
from handwritten import Decoder, DecoderConfig

matplotlib.use("Agg")  # before pyplot: no display is needed
from matplotlib import pyplot

VOCAB_SIZE = 8192
METHODS = ("eager", "checkpointing", "seqsplit")
WARM_UP_LENGTH = 512
TRACKED_STEP = 0
FIRST_TIMED_STEP = 1
# float32 sums in another order; the optimizer's division by small second moments widens it.
LOSS_TOLERANCE = 1e-4
MIB = 2**20

# What to call a model with to train it on a stretch of text.
InputsFunction = Callable[[Tensor], dict[str, Any]]


@dataclass
class Run:
    """One model trained by one method, and what was seen of it."""

    model_name: str
    method: str
    model: nn.Module
    inputs_of: InputsFunction
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    timeline: list[tuple[float, int]] = field(default_factory=list)

    def loss_on(self, text: Tensor) -> Tensor:
        """Return the loss on text, int64 [1, T + 1], and nothing else: logits may be freed."""
        output = self.model(**self.inputs_of(text))
        return output if isinstance(output, Tensor) else output.loss

    def warm_up(self, text: Tensor) -> None:
        """Compile what is to be compiled, and leave everything as it was."""
        self.loss_on(text).backward()
        self.optimizer.zero_grad()

    def step(self, text: Tensor) -> None:
        """Train on text; gradients live from the backward to the update."""
        start = time.perf_counter()
        loss = self.loss_on(text)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_s.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def tracked_step(self, text: Tensor) -> None:
        """As `step`, and note the live memory above what is there between steps."""
        with seqsplit.track_memory() as memory:
            self.step(text)
        self.peak_bytes, self.timeline = memory.peak_bytes, list(memory.timeline)


def transformers_model(vocab_size: int) -> nn.Module:
    """A small random Qwen3, built from its configuration: nothing is downloaded."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def transformers_inputs(text: Tensor) -> dict[str, Any]:
    # transformers shifts the labels itself.
    return {"input_ids": text[:, :-1], "labels": text[:, :-1], "use_cache": False}


def handwritten_model(vocab_size: int) -> nn.Module:
    return Decoder(DecoderConfig(vocab_size=vocab_size))


def handwritten_inputs(text: Tensor) -> dict[str, Any]:
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def use_checkpointing(model: nn.Module) -> None:
    """Switch the model's own gradient checkpointing on."""
    if isinstance(model, Decoder):
        model.checkpointing = True
    else:
        # Newer releases of transformers have renamed it.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def make_runs(model_name: str, model: nn.Module, inputs_of: InputsFunction) -> list[Run]:
    """One run per method, each with its own copy of the same weights."""
    runs = []
    for method in METHODS:
        copied = copy.deepcopy(model).train()
        if method == "checkpointing":
            use_checkpointing(copied)
        elif method == "seqsplit":
            copied = seqsplit.compile(copied)
        optimizer = torch.optim.AdamW(copied.parameters(), lr=1e-3, foreach=False)
        runs.append(Run(model_name, method, copied, inputs_of, optimizer))
    return runs


def train(runs: list[Run], batches: Iterator[Tensor], num_steps: int, progress: Progress) -> None:
    """Let the runs of one model take num_steps steps, in turn."""
    task = progress.add_task(runs[0].model_name, total=(1 + num_steps) * len(runs))
    short = next(batches)[:, : WARM_UP_LENGTH + 1]
    for run in runs:
        progress.update(task, description=f"{run.model_name}, {run.method}, warming up")
        run.warm_up(short)
        progress.advance(task)
    for step in range(num_steps):
        text = next(batches)
        for run in runs:
            progress.update(task, description=f"{run.model_name}, {run.method}")
            if step == TRACKED_STEP:
                run.tracked_step(text)
            else:
                run.step(text)
            progress.advance(task)
        losses = ", ".join(f"{run.method} {run.losses[-1]:.5f}" for run in runs)
        progress.console.print(f"{runs[0].model_name}, step {step + 1}: loss {losses}")
    progress.update(task, description=runs[0].model_name)


def time_ratio(run: Run, reference: Run) -> float:
    """The median over the timed steps of this run's time by the reference's on the same batch."""
    pairs = zip(run.step_s[FIRST_TIMED_STEP:], reference.step_s[FIRST_TIMED_STEP:], strict=True)
    return statistics.median(own / other for own, other in pairs)


def results_table(groups: list[list[Run]], length: int) -> Table:
    """One row per model and method."""
    num_steps = len(groups[0][0].losses)
    table = Table(
        title=f"{length} tokens per sequence, {num_steps} steps",
        caption="peak: live tensors above weights and optimizer state, gradients included",
    )
    table.add_column("model", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for name in ("loss,\nfirst", "loss,\nlast", "peak,\nMiB", "peak,\nof eager"):
        table.add_column(name, justify="right")
    table.add_column("time, of\nckpting", justify="right")
    for runs in groups:
        by_method = {run.method: run for run in runs}
        for run in runs:
            table.add_row(
                run.model_name,
                run.method,
                f"{run.losses[0]:.5f}",
                f"{run.losses[-1]:.5f}",
                f"{run.peak_bytes / MIB:.0f}",
                f"{run.peak_bytes / by_method['eager'].peak_bytes:.3f}",
                f"{time_ratio(run, by_method['checkpointing']):.2f}",
            )
        table.add_section()
    return table


def plot_memory(groups: list[list[Run]], length: int, path: Path) -> None:
    """Draw the live memory over one step, a panel per model and a line per method."""
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(6 * len(groups), 4), sharey=True, squeeze=False
    )
    for panel, runs in zip(panels[0], groups, strict=True):
        for run in runs:
            # Methods differ in their number of events, so each step is stretched to 0..1.
            first, last = run.timeline[0][0], run.timeline[-1][0]
            at = [(event - first) / (last - first) for event, _ in run.timeline]
            panel.step(at, [live / MIB for _, live in run.timeline], label=run.method, where="post")
        panel.set_title(runs[0].model_name)
        panel.set_xlabel("one training step, start to end")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("live memory above weights, MiB")
    panels[0][-1].legend()
    figure.suptitle(f"{length} tokens in one sequence")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def assert_losses_agree(groups: list[list[Run]]) -> None:
    """Every step's loss of every method has to be eager's."""
    for eager, *others in groups:
        for run in others:
            torch.testing.assert_close(
                torch.tensor(run.losses),
                torch.tensor(eager.losses),
                rtol=LOSS_TOLERANCE,
                atol=0.0,
                msg=lambda text, run=run: f"{run.model_name}, {run.method} and eager: {text}",
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps, at least 2")
    parser.add_argument("--plot", type=Path, default=Path("demo_memory.png"), help="where to draw")
    arguments = parser.parse_args()
    if arguments.steps <= FIRST_TIMED_STEP:
        parser.error(f"--steps: the first one timed is number {FIRST_TIMED_STEP + 1}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    with console.status("reading the standard library and training a tokenizer on it"):
        text = corpus.load(VOCAB_SIZE)
    console.print(f"{len(text.tokens):,} tokens of Python, vocabulary {text.vocab_size:,}")

    torch.manual_seed(0)
    models = [
        ("Qwen3 (HF)", transformers_model(text.vocab_size), transformers_inputs),
        ("handwritten", handwritten_model(text.vocab_size), handwritten_inputs),
    ]
    groups = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for model_name, model, inputs_of in models:
            runs = make_runs(model_name, model, inputs_of)
            # One token more than the models see: the last target.
            batches = text.batches(arguments.length + 1)
            train(runs, batches, arguments.steps, progress)
            groups.append(runs)
            streamed = runs[METHODS.index("seqsplit")].model
            report = seqsplit.explain(streamed, **inputs_of(next(batches)))
            progress.console.print(f"\n{report}\n", highlight=False, markup=False, soft_wrap=True)

    console.print(results_table(groups, arguments.length))
    plot_memory(groups, arguments.length, arguments.plot)
    console.print(f"live memory over one step: {arguments.plot}")
    assert_losses_agree(groups)
    console.print("the losses of the three methods agree at every step")


if __name__ == "__main__":
    main()
