"""One class: build it tiny, run it in eager and under seqsplit, print one line of JSON."""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
import traceback
import types
import warnings
from dataclasses import replace
from typing import Any

import torch

from seqsplit.frontend.handle import handle_of
from seqsplit.ir.plan import Plan

LENGTH, BATCH = 17, 2
CHUNKS = (4, 7)


def main(model_type: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    began = time.perf_counter()
    found: dict[str, Any] = {"type": model_type}
    try:
        found |= examine(model_type)
    except Exception as error:  # whatever it is, it is what is to be reported
        found |= {"status": "error", "why": first_line(error), "trace": traceback.format_exc()}
    found["seconds"] = round(time.perf_counter() - began, 1)
    print("RESULT " + json.dumps(found))


def examine(model_type: str) -> dict[str, Any]:
    import seqsplit

    model, batch, why = eager_model(model_type)
    if model is None:
        return {"status": "not run", "why": why}
    result: dict[str, Any] = {"class": type(model).__name__, "errors": [], "status": "exact"}
    seqsplit.compile(model, chunk_size=CHUNKS[0])
    for chunk in CHUNKS:
        change_chunks(model, chunk)  # one capture for both: it is what takes the time
        checked = seqsplit.verify(model, **batch)
        result["errors"].append(checked.max_rel_error)
        if not checked.ok:
            worst = max(checked.errors, key=checked.errors.get)
            result |= {"status": "mismatch", "why": f"{worst}: {checked.max_rel_error:.1e}"}
    report = seqsplit.explain(model, **batch)
    layers = layer_scopes(name for name, _ in model.named_modules())
    left = [[scope, reason] for scope, reason in report.whole]
    touched = layer_scopes(scope for scope, _ in left)
    everything = not report.segments
    return result | {
        "layers": len(layers),
        "layers_whole": len(layers) if everything else len(touched & layers or touched),
        "segments": len(report.segments),
        "bodies": report.distinct_bodies,
        "graphs": report.num_graphs,
        "head_streamed": any(segment.is_head for segment in report.segments),
        "streamed": report.fully_streamed,
        "whole": left,
        "pass_seconds": report.pass_seconds,
    }


def change_chunks(model: Any, rows: int) -> None:
    """Let the segments that a compiled model has by now run in chunks of another size."""
    for run in handle_of(model).log:
        for segment in run.plan.segments if isinstance(run.plan, Plan) else ():
            segment.options = replace(segment.options, chunk_size=rows)


def layer_scopes(scopes: Any) -> set[str]:
    """The numbered modules (decoder layers) that scopes lie in."""
    found = set()
    for scope in scopes:
        match = re.search(r"(?:^|\.)([a-z_]+\.\d+)(?:\.|\s|$)", scope.split("  ")[0])
        if match:
            found.add(match.group(1))
    return found


def eager_model(model_type: str) -> tuple[Any, dict[str, Any], str]:
    """A tiny model that runs in eager, its batch, and else why there is none."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from .configs import tiny_configs

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    name = names if isinstance(names, str) else names[0]
    kind = getattr(transformers, name)
    config_kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    taken = [name for name in inspect.signature(kind.forward).parameters if name != "self"]
    if "labels" not in taken:
        return None, {}, f"not a causal LM: it takes no labels, but {', '.join(taken)}"
    try:
        default = default_config(config_kind, kind.config_class)
    except Exception as error:
        return None, {}, f"its default configuration fails: {first_line(error)}"
    reasons = []
    for make in tiny_configs(default):
        try:
            config = make()
            honest_float64()
            config._experts_implementation = "batched_mm"
            torch.manual_seed(0)
            model = kind._from_config(config) if hasattr(kind, "_from_config") else kind(config)
            if sum(p.numel() for p in model.parameters()) > 30_000_000:
                raise ValueError("the configuration is not tiny")
            randomise(model)
            model = model.double().train()
            honest_float64()
            batch = make_batch(config)
            loss = model(**batch).loss
            if loss is None or not loss.requires_grad:
                raise ValueError("it gives no loss")
            loss.backward()
            if not torch.isfinite(loss):
                raise ValueError("its loss is not finite")
            model.zero_grad()
            again = model(**batch).loss
            if not torch.equal(again, loss):
                raise ValueError("two calls give two losses")
            return model, batch, ""
        except ImportError as error:  # of a package: no other configuration helps
            return None, {}, first_line(error)
        except Exception as error:
            reasons.append(first_line(error))
    return None, {}, " / ".join(dict.fromkeys(reasons))[:400]


def default_config(config_kind: Any, kind_of_model: Any) -> Any:
    """What a class starts from: the type's configuration, or of a part of it that the class is."""
    default = config_kind()
    if hasattr(default, "is_decoder"):
        default.is_decoder = True
    if kind_of_model is not None and not isinstance(default, kind_of_model):
        default = kind_of_model()
    return default


def randomise(model: Any) -> None:
    """Weights of ordinary sizes, so that no term of a gradient vanishes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.1 * noise.to(parameter))


def make_batch(config: Any) -> dict[str, Any]:
    vocab = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(2)
    books = config.num_codebooks if config.model_type.startswith("musicgen") else 1
    ids = torch.randint(3, vocab, (BATCH * books, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 3::5] = -100
    if books > 1:  # there a position has a token, and a row, of each codebook
        labels = labels.view(BATCH, books, LENGTH).transpose(1, 2)
    return {"input_ids": ids, "labels": labels}


def honest_float64() -> None:
    """Make the library's code compute in float64 where it writes float32.

    A rounding to float32 in the middle of a float64 model depends on the order of sums, and
    nothing could be compared to 1e-9.
    """
    wide = types.ModuleType("torch")
    wide.__dict__.update(vars(torch), float32=torch.float64, float=torch.float64)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and getattr(module, "torch", None) is torch:
            module.torch = wide
    torch.Tensor.float = torch.Tensor.double


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if "validator" not in line] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


if __name__ == "__main__":
    main(sys.argv[1])
