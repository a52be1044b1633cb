"""The command line: ``seqsplit plan config.json --seq-len 131072``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from seqsplit.errors import SeqsplitError
from seqsplit.planner import OPTIMIZERS, plan
from seqsplit.planning.configurations import read_configuration

__all__ = ["main"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0, 1 where no schedule fits, 2 where the arguments mean nothing.
    """
    options = _parser().parse_args(arguments)
    console, errors = Console(), Console(stderr=True)
    try:
        with errors.status("capturing") as status:
            found = plan(
                read_configuration(options.config),
                seq_len=options.seq_len,
                batch_size=options.batch_size,
                memory=options.memory,
                optimizer=options.optimizer,
                dtype=_DTYPES[options.dtype],
                accumulate=options.accumulate,
                chunk_size=options.chunk_size or "auto",
                head_chunk_size=options.head_chunk_size or "auto",
                progress=lambda name: status.update(f"rehearsing: {name}"),
            )
    except (SeqsplitError, OSError, ValueError) as error:
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2
    console.print(str(found), markup=False, highlight=False, soft_wrap=True)
    return 0 if found.recommended else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seqsplit")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "plan",
        help="predict the memory of a training step",
        description="Predict the memory of a training step, under each "
        "schedule, without a GPU and without its weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("config", type=Path, help="a config.json, or its folder")
    command.add_argument("--seq-len", type=int, required=True, help="tokens per sequence")
    command.add_argument("--batch-size", type=int, default=1, help="sequences per step")
    command.add_argument("--memory", default="80GB", help="of the device")
    command.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="its states")
    command.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights")
    command.add_argument(
        "--accumulate", action="store_true", help="gradients are there when the step begins"
    )
    command.add_argument("--chunk-size", type=int, default=0, help="rows per chunk; 0: automatic")
    command.add_argument("--head-chunk-size", type=int, default=0, help="the same in the head")
    return parser


if __name__ == "__main__":
    sys.exit(main())
