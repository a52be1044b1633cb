"""From a configuration of transformers to a module without storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqsplit.errors import InvalidOptionError, format_message

__all__ = ["model_on_meta", "read_configuration"]


def model_on_meta(configuration: Any, dtype: torch.dtype) -> nn.Module:
    """The causal decoder of a configuration, in training mode, on the meta device.

    Raises:
        InvalidOptionError: it is no configuration.
    """
    try:
        from transformers import AutoModelForCausalLM, PretrainedConfig
    except ImportError:
        PretrainedConfig = ()
    if not isinstance(configuration, PretrainedConfig):
        raise InvalidOptionError(
            format_message(
                f"cannot plan for a {type(configuration).__name__}",
                fix="give an nn.Module, or a configuration of transformers",
            )
        )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(configuration, dtype=dtype).train()


def read_configuration(path: Path) -> Any:
    """The configuration in a ``config.json``, or in the folder of one.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no configuration, or transformers is not installed.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            "reading a configuration needs transformers: pip install seqsplit[hf]"
        ) from None
    if path.is_dir():
        path = path / "config.json"
    values = json.loads(path.read_text())
    if "model_type" not in values:
        raise ValueError(f"{path} names no model_type: it is no configuration of transformers")
    return AutoConfig.for_model(**values)
