"""What objectives ask of a model: logits, and for some of them other heads."""

from torch import Tensor, nn

from handwritten import Decoder, DecoderConfig


class WithValues(nn.Module):
    """Logits [B, T, V] and an estimate of the return at each token [B, T]."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.decoder = Decoder(config)
        self.value = nn.Linear(config.dim, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.decoder.hidden(tokens)
        return self.decoder.head(hidden), self.value(hidden).squeeze(-1)


class Scores(nn.Module):
    """One score per token [B, T]."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.decoder = Decoder(config)
        self.score = nn.Linear(config.dim, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.decoder.hidden(tokens)).squeeze(-1)


class ManyTokens(nn.Module):
    """Logits for the next tokens, one head for each."""

    def __init__(self, config: DecoderConfig, num_ahead: int = 2):
        super().__init__()
        self.decoder = Decoder(config)
        self.heads = nn.ModuleList(
            nn.Linear(config.dim, config.vocab_size, bias=False) for _ in range(num_ahead)
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        hidden = self.decoder.hidden(tokens)
        return tuple(head(hidden) for head in self.heads)
