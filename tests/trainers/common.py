"""What the tests of trainers share: tiny models, a tokenizer, data, and the comparison.

A test is a function `train(add_line)` that trains as a user would, with `add_line(model)` where
the one line `seqsplit.compile(model)` belongs. It runs twice, without that line and with it, and
everything it reports has to be the same.

Models are float32, as they are trained. The optimizer is SGD: Adam divides by the size of the
gradient, so that where a gradient is zero in exact arithmetic the order of a sum decides the sign
of a full step.
"""

import math
from dataclasses import dataclass, field

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import seqsplit
from seqsplit.ir.plan import Plan
from seqsplit.passes import NothingToSplit
from zoo.weights import randomise

SMALL = {"chunk_size": 16, "head_chunk_size": 16}
TOLERANCE = 1e-5
LEARNING_RATE = 0.1
STEPS = 3

WORDS = 90
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
VOCAB = len(SPECIAL) + WORDS
PAD, BOS, EOS = 0, 1, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
FAMILIES = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token + ' ' }}{% endif %}{% endfor %}"
)


def tiny_config(family="llama", **overrides):
    """Two layers, dropout nowhere."""
    return FAMILIES[family](**SIZES | overrides)


def tiny_model(family="llama", auto=transformers.AutoModelForCausalLM, **overrides):
    """A random model, the same at each call."""
    torch.manual_seed(0)
    return randomise(auto.from_config(tiny_config(family, **overrides)), scale=0.1).train()


def tiny_tokenizer():
    """One token per word: `w0` to `w89`."""
    vocabulary = {word: index for index, word in enumerate(SPECIAL + words(range(WORDS)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def words(numbers):
    """The words of some numbers."""
    return [f"w{number}" for number in numbers]


def random_text(generator, low, high):
    """A text of `low` to `high` words."""
    length = int(torch.randint(low, high + 1, (), generator=generator))
    return " ".join(words(torch.randint(WORDS, (length,), generator=generator).tolist()))


def random_texts(count, low=40, high=90, seed=0):
    """Texts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [random_text(generator, low, high) for _ in range(count)]


def token_rows(count, low=40, high=90, seed=0, vocab=VOCAB):
    """Sequences of different lengths, as the rows of a dataset with labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(low, high + 1, (), generator=generator))
        ids = torch.randint(len(SPECIAL), vocab, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def collate(rows):
    """Pad on the right; a padded position has no label."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ids = padded("input_ids", PAD)
    mask = torch.tensor(
        [[n < len(row["input_ids"]) for n in range(longest)] for row in rows], dtype=torch.long
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": padded("labels", -100)}


def batches(count=STEPS, size=2, **options):
    """Padded batches of different lengths."""
    rows = token_rows(count * size, **options)
    return [collate(rows[n : n + size]) for n in range(0, len(rows), size)]


def sgd(model, lr=LEARNING_RATE):
    """The optimizer of these tests; see the top of this file."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


# ---- Running twice, and comparing ----------------------------------------------------------------


@dataclass
class Outcome:
    """What a training gives.

    Attributes:
        weights: the trained tensors after it.
        numbers: everything that was logged, step by step.
        before: the trained tensors before it.
    """

    weights: dict
    numbers: list = field(default_factory=list)
    before: dict = field(default_factory=dict)


def trained(model):
    """A copy of the tensors that are trained."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def add_nothing(model):
    """Train without seqsplit."""
    return model


def add_seqsplit(model):
    """The one added line."""
    return seqsplit.compile(model, **SMALL)


def check_both(train, *, tolerance=TOLERANCE):
    """Train without the line and with it; everything has to be the same. Returns both outcomes."""
    expected, actual = train(add_nothing), train(add_seqsplit)
    check_numbers(expected.numbers, actual.numbers, tolerance)
    check_tensors(expected.weights, actual.weights, tolerance)
    check_moved(expected)
    return expected, actual


def check_numbers(expected, actual, tolerance=TOLERANCE):
    """Two logs have the same entries, with the same values."""
    assert expected, "nothing was logged"
    assert [sorted(entry) for entry in expected] == [sorted(entry) for entry in actual]
    for step, (entry, other) in enumerate(zip(expected, actual)):
        for name, value in entry.items():
            same = math.isclose(value, other[name], rel_tol=tolerance, abs_tol=tolerance * 1e-2)
            assert same, f"{name} of step {step}: {other[name]!r} instead of {value!r}"


def check_tensors(expected, actual, tolerance=TOLERANCE):
    """Two sets of tensors have the same names and, up to rounding, the same values."""
    assert list(expected) == list(actual)
    errors = {name: relative_error(actual[name], value) for name, value in expected.items()}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.1e}"


def check_moved(outcome):
    """Training changed every trained tensor by far more than the tolerance.

    Without this, equal weights would say nothing about the gradients.
    """
    if not outcome.before:
        return
    moved = {n: relative_error(value, outcome.before[n]) for n, value in outcome.weights.items()}
    least = min(moved, key=moved.get)
    assert moved[least] >= 10 * TOLERANCE, f"{least} moved by {moved[least]:.1e} only"


def relative_error(actual, expected):
    """The largest difference, relative to the largest value."""
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=1e-12))


def check_all_split(plans):
    """Every captured graph was split, and nothing of it runs whole."""
    assert plans, "nothing was captured"
    for plan in plans:
        assert isinstance(plan, Plan), repr(plan)
        assert plan.segments and not plan.whole, plan.whole


def check_layers_split(plans):
    """All layers were split in one graph; another graph is a tail with no sequence in it.

    That is how TRL's own head comes out: it writes into slices of a buffer, which Dynamo refuses.
    """
    for plan in plans:
        assert isinstance(plan, Plan | NothingToSplit), repr(plan)
    split = [plan for plan in plans if isinstance(plan, Plan)]
    assert any(len(plan.segments) >= SIZES["num_hidden_layers"] for plan in split), plans
    whole = [entry for plan in split for entry in plan.whole]
    assert not whole, whole


# ---- Trainers of transformers and TRL -----------------------------------------------------------

# Entries of a log that measure time, or are derived from such.
TIMES = ("runtime", "per_second", "time", "epoch", "flos")


def trainer_arguments(kind, folder, **overrides):
    """Arguments of a trainer: a few steps of SGD on the CPU, everything logged."""
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": LEARNING_RATE,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "bf16": False,
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    return kind(**arguments | overrides)


def outcome_of(trainer, before):
    """The outcome of a trainer that has trained."""
    numbers = [
        {name: value for name, value in entry.items() if not any(t in name for t in TIMES)}
        for entry in trainer.state.log_history
    ]
    return Outcome(trained(trainer.model), numbers, before)


def run_trainer(trainer, **options):
    """Train; what was logged and the trained weights."""
    before = trained(trainer.model)
    trainer.train(**options)
    return outcome_of(trainer, before)
