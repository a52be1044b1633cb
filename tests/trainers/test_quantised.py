"""Quantised bases with adapters: 4-bit and 8-bit weights, loaded as a user would.

Every layer is streamed, in chunks that each unpack the weights they need and forget them again.
"""

import pytest

pytest.importorskip("peft")

import peft
import torch
import transformers
from common import (
    Outcome,
    add_nothing,
    add_seqsplit,
    batches,
    check_all_split,
    check_both,
    relative_error,
    sgd,
    tiny_model,
    trained,
)
from test_peft import ALL, COMMON
from torch.utils._python_dispatch import TorchDispatchMode

import seqsplit
from seqsplit.memory import track_memory

# What the libraries say about each other.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:(peft|torchao).*")


def bits(**options):
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**options)


def nf4():
    """Blocks of 64 in four bits, their scales quantised as well."""
    return bits(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def fp4():
    """The same without quantised scales."""
    return bits(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32)


def int8():
    """Rows of integers with a scale each, in plain tensors and a state beside them."""
    return bits(load_in_8bit=True)


def int8_class():
    """The same as a tensor of a class of its own."""
    torchao = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())


QUANTISED = [nf4, fp4, int8, int8_class]
# Their matmul unpacks the weight again for its gradient, in eager too.
UNPACKED_AGAIN = (nf4, fp4, int8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Unquantised weights in a folder, by the number of layers and other sizes."""
    folder = tmp_path_factory.mktemp("weights")

    def save(**sizes):
        place = folder / "-".join(f"{name}{size}" for name, size in sizes.items())
        if not place.exists():
            tiny_model(**sizes).save_pretrained(place)
        return place

    return save


def load(folder, config):
    """A quantised model with a random adapter, the same at each call."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(**COMMON, target_modules=ALL)).train()


@pytest.mark.parametrize("quantised", QUANTISED)
def test_same_losses_and_adapters(quantised, saved, plans):
    """Three steps; nothing of the model runs whole."""

    def train(add_line):
        model = load(saved(num_hidden_layers=2), quantised())
        add_line(model)
        # A smaller step than elsewhere: with weights of eight bits, training multiplies a
        # difference in the last place by ten per step at the usual one.
        optimizer, before, numbers = sgd(model, lr=0.02), trained(model), []
        for batch in batches():
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers.append({"loss": loss.item()})
        return Outcome(trained(model), numbers, before)

    expected, actual = check_both(train)
    check_all_split(plans)
    worst = max(relative_error(actual.weights[name], w) for name, w in expected.weights.items())
    assert worst > 0  # the second run is not the first


class Unpackings(TorchDispatchMode):
    """Counts the ops that make floating-point numbers of at least as many small integers as a
    weight's packed form has."""

    def __init__(self, least):
        super().__init__()
        self.least, self.count = least, 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        packed = [
            a
            for a in args
            if isinstance(a, torch.Tensor)
            and a.dtype in (torch.int8, torch.uint8)
            and a.numel() >= self.least
        ]
        if packed and isinstance(out, torch.Tensor) and out.is_floating_point():
            self.count += 1
        return out


@pytest.mark.parametrize("quantised", QUANTISED)
def test_unpacked_once_per_chunk(quantised, saved):
    """Never kept for all chunks, neither in the forward nor until the backward."""
    layers, chunks = 2, 3
    model = load(saved(num_hidden_layers=layers), quantised())
    seqsplit.compile(model, chunk_size=16, head_chunk_size=16)
    (batch,) = batches(1, low=40, high=48)
    assert -(-batch["input_ids"].shape[1] // 16) == chunks
    model(**batch).loss.backward()
    model(**batch)  # captured again where the first call changes the layers' state
    smallest = 16 * 32 // 2  # bytes of the key projection in four bits
    with Unpackings(smallest) as forward:
        loss = model(**batch).loss
    with Unpackings(smallest) as backward:
        loss.backward()
    weights = 7 * layers
    assert forward.count == weights * chunks
    keys_and_values = 2 * layers * (chunks - 1)  # computed before the first gradient
    expected = weights * chunks + keys_and_values
    if quantised in UNPACKED_AGAIN:  # but for the three that are given embeddings, which are frozen
        expected += (weights - 3) * chunks
    assert backward.count == expected


@pytest.mark.parametrize("quantised", QUANTISED)
def test_less_memory(quantised, saved):
    """Less than half of eager's at once, and never the weights of all layers unpacked."""
    layers, width, hidden = 6, 96, 192
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": hidden}
    peaks = {}
    for add_line in (add_nothing, add_seqsplit):
        model = load(saved(**sizes), quantised())
        add_line(model)
        (batch,) = batches(1, low=128, high=128)
        for _ in range(2):
            model(**batch).loss.backward()
            model.zero_grad()
        with track_memory() as memory:
            model(**batch).loss.backward()
        peaks[add_line] = memory.peak_bytes
    assert peaks[add_seqsplit] < 0.5 * peaks[add_nothing]
    unpacked = 4 * layers * (2 * width * 32 + 2 * width * 16 + 3 * width * hidden)
    assert peaks[add_seqsplit] < unpacked


def test_quantised_head(saved):
    """The head as well, in training, and where its logits are looked at afterwards."""
    torchao = pytest.importorskip("torchao.quantization")
    found = []
    for add_line in (add_nothing, add_seqsplit):
        model = tiny_model(num_hidden_layers=1).requires_grad_(False)
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        torch.manual_seed(2)
        model = peft.get_peft_model(model, peft.LoraConfig(**COMMON, target_modules=["q_proj"]))
        add_line(model.train())
        (batch,) = batches(1)
        output = model(**batch)
        (output.loss + output.logits.square().mean()).backward()
        with torch.no_grad():
            evaluated = model(**batch)
        numbers = [output.loss, output.logits.sum(), evaluated.loss, evaluated.logits.sum()]
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        found.append([number.detach() for number in numbers] + gradients)
    for want, have in zip(*found):
        assert relative_error(have, want) <= 1e-5
