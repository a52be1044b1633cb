"""Weights large enough that attention is far from uniform and every term shows in a gradient."""

import torch


def randomise(model, seed=0, scale=0.2):
    """Add seeded noise to every parameter (norm weights and biases too); returns the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((scale * noise).to(parameter.dtype))
    return model
