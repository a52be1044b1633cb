"""Small ATen graphs with symbolic sizes, without Dynamo: what the passes are tested on."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from seqsplit.passes.graph.lowered import Lowered, Region


def trace(function, *inputs):
    """The graph of a function of tensors; dims of equal size are one symbol."""
    module = make_fx(function, tracing_mode="symbolic", pre_dispatch=True)(*inputs)
    for node in module.graph.nodes:
        node.meta["region"] = Region()
    held = [n.meta.get("val") for n in module.graph.nodes]
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    return Lowered(module, tensors[0].fake_mode.shape_env)


def output_of(lowered):
    (output,) = (node for node in lowered.graph.nodes if node.op == "output")
    return output.args[0]
