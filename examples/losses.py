"""A loss of one's own: preferences (DPO) between real code and the same code shuffled.

What is compiled is the function of a whole training step's loss, model calls included. The loss
is a non-linear function of sums over the sequence, so nothing in it can be split by hand into
independent pieces. Run it with `.venv/bin/python examples/losses.py` after `make demo`.
"""

import copy

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import corpus
import seqsplit
from handwritten import Decoder, DecoderConfig

LENGTH, PROMPT, STEPS = 2048, 512, 4
BETA = 0.1


def sequence_log_prob(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of what follows the prompt, [B].

    targets [B, T] hold the token that follows each of inputs [B, T].
    """
    logits = model(inputs)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    is_answer = torch.arange(targets.shape[1], device=targets.device) >= PROMPT
    return -(losses.view_as(targets) * is_answer).sum(dim=1)


def preference_pair(text: Tensor, generator: torch.Generator) -> Tensor:
    """Return text [1, T + 1] above the same with its answer's tokens shuffled, [2, T + 1]."""
    answer = text[:, PROMPT + 1 :]
    order = torch.randperm(answer.shape[1], generator=generator)
    shuffled = torch.cat([text[:, : PROMPT + 1], answer[:, order]], dim=1)
    return torch.cat([text, shuffled])


def main() -> None:
    torch.manual_seed(0)
    console = Console()
    text = corpus.load(vocab_size=8192)
    policy = Decoder(DecoderConfig(vocab_size=text.vocab_size))
    reference = copy.deepcopy(policy).requires_grad_(False)

    @seqsplit.compile
    def dpo_loss(inputs: Tensor, targets: Tensor, reference_log_prob: Tensor) -> Tensor:
        gain = sequence_log_prob(policy, inputs, targets) - reference_log_prob
        chosen, rejected = gain.unbind()
        return -F.logsigmoid(BETA * (chosen - rejected))

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    batches = text.batches(LENGTH + 1)
    for step in range(STEPS):
        tokens = preference_pair(next(batches), generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with torch.no_grad():
            reference_log_prob = sequence_log_prob(reference, inputs, targets)
        loss = dpo_loss(inputs, targets, reference_log_prob)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        console.print(f"step {step + 1} of {STEPS}: loss {loss.item():.4f}")

    # Every gradient of the compiled function against eager's, on one more pair.
    console.print(str(seqsplit.verify(dpo_loss, inputs, targets, reference_log_prob)))


if __name__ == "__main__":
    main()
